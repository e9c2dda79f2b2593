"""Drafts in vLLM's hand-over role: their layers are in the blocks of the full KV.

The last layer here is an EAGLE draft's: its KV of a position depends on the next token, too. A block that is served
where it must not be has wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any  # vLLM's objects are not typed here.

import pytest

from tests.support.vllm_contract import BLOCK, KVConnectorRole, MambaSpec, SlidingWindowSpec, configs_of
from tests.support.vllm_handover import SAMPLED, HandoverVllm, request_of, speculative_of, started_vllms
from tests.support.waits import LIMIT_S
from tidekv.engine.integrations.vllm.handover import groups
from tidekv.engine.integrations.vllm.handover.settings import read_handover
from tidekv.states.errors import InvalidConfig

pytestmark = pytest.mark.nixl
PROMPT = [*range(100, 100 + 4 * BLOCK), 1, 2]
PLACES = [7, 3, 11, 2, 5]
OTHERS = [12, 13, 14, 15, 16]
FULL = 4 * BLOCK
Start = Callable[..., HandoverVllm]


@pytest.fixture
def start(connector: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes vLLMs with a draft, which end with the test."""
    with started_vllms(connector, monkeypatch, draft="eagle") as start_one:
        yield start_one


def restored(decode: HandoverVllm, prefill: HandoverVllm, name: str, tokens: list[int], **changes: Any) -> bool:
    """Whether a prompt that prefill computed is restored and finished with the right bytes, those of the draft too."""
    prefill.add(request_of(f"p-{name}", tokens, {"do_remote_decode": True}), PLACES)
    params = prefill.answer(f"p-{name}", chunk=12)
    decode.add(request_of(name, tokens, params, **changes), OTHERS)
    decode.step_until(partial(decode.loaded.__contains__, name))
    is_right = decode.holds(name, tokens)
    decode.compute(name, chunk=100)
    decode.finish(name)
    decode.step_until(partial(decode.freed.__contains__, name))
    decode.worker.connector_worker.decodes[0].engine.wait_settled()
    # Other requests have these blocks from now on.
    decode.overwrite(OTHERS)
    return is_right and not decode.invalid


def test_the_draft_of_a_prompt_is_handed_over_and_decode_computes_it_at_the_last_token(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    prefill.add(request_of("p", PROMPT, {"do_remote_decode": True}), PLACES)
    params = prefill.answer("p", chunk=12)
    assert decode.add(request_of("d", PROMPT, params), OTHERS) == len(PROMPT)
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    # Of the last token it depends on what decode samples there.
    decode.compute("d", chunk=100)
    assert decode.holds("d", PROMPT, next_token=SAMPLED)


@pytest.mark.parametrize("source", ["l2", "l3"])
def test_a_block_is_found_for_prompts_that_go_on_as_the_one_that_it_was_computed_for(
    start: Start, tmp_path: Path, source: str
) -> None:
    prefill, uri = start("kv_producer"), f"file:{tmp_path}/store?capacity=16MB"
    decode = start("kv_consumer", uri=uri)
    assert restored(decode, prefill, "first", PROMPT)
    if source == "l3":
        decode.close()
        decode = start("kv_consumer", uri=uri)
    # The token behind the last full block is another one.
    assert restored(decode, prefill, "other", [*PROMPT[:FULL], 3, 2])
    assert decode.counts[f"restore_tokens_{source}"] == FULL - BLOCK
    assert restored(decode, prefill, "equal", PROMPT)
    assert decode.counts[f"restore_tokens_{source}"] + decode.counts.get("restore_tokens_l2", 0) >= 2 * FULL - BLOCK


def test_blocks_named_by_their_own_tokens_alone_would_serve_the_wrong_draft(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: it is what the names are for, and the test above would see it."""
    monkeypatch.setattr(groups, "depends_on_next_token", lambda _: False)
    prefill, decode = start("kv_producer"), start("kv_consumer")
    assert restored(decode, prefill, "first", PROMPT)
    assert not restored(decode, prefill, "other", [*PROMPT[:FULL], 3, 2])


def test_a_draft_whose_kv_depends_on_earlier_tokens_only_hits_as_the_model_does(start: Start) -> None:
    prefill, decode = start("kv_producer", draft="draft_model"), start("kv_consumer", draft="draft_model")
    assert restored(decode, prefill, "first", PROMPT)
    assert restored(decode, prefill, "other", [*PROMPT[:FULL], 3, 2])
    assert decode.counts["restore_tokens_l2"] == FULL


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_draft_that_reads_the_models_states_alone_hits_as_the_model_does(start: Start, method: str) -> None:
    prefill, decode = start("kv_producer", draft=method), start("kv_consumer", draft=method)
    assert restored(decode, prefill, "first", PROMPT)
    assert restored(decode, prefill, "other", [*PROMPT[:FULL], 3, 2])
    assert decode.counts["restore_tokens_l2"] == FULL


@pytest.mark.parametrize("draft", ["eagle", "draft_model"])
@pytest.mark.parametrize("source", ["l2", "l3"])
def test_a_draft_with_other_heads_than_the_model_is_handed_over_and_kept(
    start: Start, tmp_path: Path, draft: str, source: str
) -> None:
    options = {"draft": draft, "draft_heads": 1}
    prefill, uri = start("kv_producer", **options), f"file:{tmp_path}/store?capacity=16MB"
    decode = start("kv_consumer", uri=uri, events=True, **options)
    assert restored(decode, prefill, "first", PROMPT)
    if source == "l3":
        decode.close()
        decode = start("kv_consumer", uri=uri, **options)
    assert restored(decode, prefill, "longer", [*PROMPT, 9])
    assert decode.counts[f"restore_tokens_{source}"] == FULL
    if source == "l2":
        assert {event.kv_cache_spec_kind for batch in decode.published for event in batch} == {"full_attention"}


@pytest.mark.parametrize("other", [{}, {"draft_heads": 2}], ids=["equal heads", "further heads"])
def test_ends_whose_drafts_have_other_heads_refuse_each_other(
    start: Start, caplog: pytest.LogCaptureFixture, other: dict[str, int]
) -> None:
    prefill, decode = start("kv_producer", draft_heads=1), start("kv_consumer", **other)
    prefill.add(request_of("p", PROMPT, {"do_remote_decode": True}), PLACES)
    decode.add(request_of("d", PROMPT, prefill.answer("p", chunk=12)), OTHERS)
    decode.step_until(lambda: decode.loaded)
    assert decode.invalid
    assert "differs in" in caplog.text


# By position: the blocks with the last 16 tokens of a window, and the last record of a state.
BESIDE = [SlidingWindowSpec(), MambaSpec()]
FURTHER = [[0, 0, 9, 8, 6], [0, 0, 0, 0, 4]]
OTHER_FURTHER = [[0, 0, 17, 18, 19], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("draft", ["eagle", "mtp", "draft_model"])
def test_a_draft_beside_windows_and_states_is_handed_over_as_it_is_of_the_whole_prompt(
    start: Start, draft: str
) -> None:
    prefill, decode = (start(role, draft=draft, further=BESIDE) for role in ("kv_producer", "kv_consumer"))
    given = request_of("p", PROMPT, {"do_remote_decode": True})
    whole, shared = [*PROMPT], given.sampling_params
    prefill.further_tables["p"], decode.further_tables["d"] = FURTHER, OTHER_FURTHER
    prefill.add(given, PLACES)
    params = prefill.answer("p", chunk=12)
    assert decode.add(request_of("d", whole, params), OTHERS) == len(whole) - 1
    decode.step_until(lambda: decode.loaded)
    assert not decode.failed
    # The draft of the last token that was handed over has seen the token behind it, which prefill did not compute.
    assert decode.holds("d", whole[:-1], next_token=whole[-1])
    assert shared.allowed_token_ids is None, "they may be those of other requests, too"


def test_a_prompt_whose_answer_has_a_grammar_is_handed_over_beside_windows(start: Start) -> None:
    prefill = start("kv_producer", further=BESIDE)
    prefill.further_tables["p"] = FURTHER
    request = request_of("p", PROMPT, {"do_remote_decode": True}, structured_output_request=object())
    prefill.add(request, PLACES)
    assert request.sampling_params.allowed_token_ids is None, "the grammar would end the request"
    assert prefill.answer("p", chunk=12)["do_remote_prefill"]


@pytest.mark.parametrize("source", ["l2", "l3"])
def test_a_draft_beside_windows_comes_back_from_host_memory_and_storage(
    start: Start, tmp_path: Path, source: str
) -> None:
    uri, window = f"file:{tmp_path}/store?capacity=16MB", [SlidingWindowSpec()]
    prefill = start("kv_producer", further=window)
    decode = start("kv_consumer", further=window, uri=uri)

    def served(name: str, tokens: list[int]) -> bool:
        """Whether a prompt was restored with the right bytes; decode keeps what it and prefill have computed."""
        prefill.further_tables[f"p-{name}"], decode.further_tables[name] = FURTHER[:1], OTHER_FURTHER[:1]
        prefill.add(request_of(f"p-{name}", tokens, {"do_remote_decode": True}), PLACES)
        decode.add(request_of(name, tokens, prefill.answer(f"p-{name}", chunk=12)), OTHERS)
        decode.step_until(partial(decode.loaded.__contains__, name))
        is_right = decode.holds(name, tokens[:-1], next_token=tokens[-1])
        decode.requests[name].num_computed_tokens = len(tokens) - 1
        decode.step({name: 1})
        decode.finish(name)
        decode.step_until(partial(decode.freed.__contains__, name))
        decode.worker.connector_worker.decodes[0].engine.wait_settled()
        decode.overwrite([*OTHERS, *OTHER_FURTHER[0][2:]])
        return is_right and not decode.failed

    assert served("first", PROMPT)
    if source == "l3":
        decode.close()
        decode = start("kv_consumer", further=window, uri=uri)
    assert served("longer", [*PROMPT, 9])
    assert decode.counts[f"restore_tokens_{source}"] == FULL
    # The token behind the last full block is another one.
    assert served("other", [*PROMPT[:FULL], 3, 2])
    assert decode.counts[f"restore_tokens_{source}"] + decode.counts.get("restore_tokens_l2", 0) >= FULL + FULL - BLOCK


@pytest.mark.parametrize(("known", "kept"), [([], 3), ([5], 4)], ids=["ends with its block", "goes on"])
def test_a_block_is_kept_once_the_token_after_it_is_known(start: Start, known: list[int], kept: int) -> None:
    decode = start("kv_consumer")
    tokens = [*PROMPT[:FULL], *known]
    request = request_of("d", tokens, None)
    decode.add(request, PLACES)
    decode.step({"d": FULL})
    assert decode.finish("d") == (True, None)
    decode.step_until(lambda: decode.freed)
    assert decode.counts == {"offer_pages_written": kept}


@pytest.mark.parametrize("source", ["l2", "l3"])
@pytest.mark.parametrize(("behind", "found"), [(1, 4), (9, 3)], ids=["goes on", "goes on otherwise"])
def test_a_prompt_without_a_prefill_gets_the_blocks_that_were_computed_for_it(
    start: Start, tmp_path: Path, source: str, behind: int, found: int
) -> None:
    settings = {"uri": f"file:{tmp_path}/store?capacity=16MB", "lookup_timeout_s": LIMIT_S}
    decode = start("kv_consumer", **settings)
    decode.add(request_of("own", PROMPT, None), PLACES)
    decode.step_until(lambda: decode.ask("own", PLACES) == 0)
    decode.compute("own", chunk=100)
    decode.finish("own")
    decode.step_until(lambda: decode.freed)
    if source == "l3":
        decode.worker.connector_worker.decodes[0].engine.wait_settled()
        decode.close()
        decode = start("kv_consumer", **settings)
    decode.overwrite(OTHERS)
    # Prompts that end soon behind the last full block, and ones that have further blocks.
    tokens, blocks = [*PROMPT[:FULL], behind, *range(500, 500 + BLOCK)], OTHERS[:found]
    assert decode.add(request_of("again", tokens, None), blocks, computed=BLOCK) is None
    decode.step_until(lambda: decode.ask("again", blocks, computed=BLOCK))
    decode.step_until(lambda: decode.loaded)
    assert not decode.invalid
    assert decode.holds("again", tokens[: found * BLOCK], first=BLOCK, next_token=tokens[found * BLOCK])
    assert decode.counts[f"restore_tokens_{source}"] == (found - 1) * BLOCK


@pytest.mark.parametrize("drafts", [("eagle", None), (None, "eagle"), ("draft_model", "eagle")])
def test_ends_with_other_drafts_refuse_each_other_by_name(
    start: Start, caplog: pytest.LogCaptureFixture, drafts: tuple[str | None, str | None]
) -> None:
    prefill, decode = start("kv_producer", draft=drafts[0]), start("kv_consumer", draft=drafts[1])
    prefill.add(request_of("p", PROMPT, {"do_remote_decode": True}), PLACES)
    decode.add(request_of("d", PROMPT, prefill.answer("p", chunk=12)), OTHERS)
    decode.step_until(lambda: decode.loaded)
    assert decode.invalid
    assert "differs in bigram_keys" in caplog.text


def test_events_name_a_block_of_a_draft_as_vllm_does(start: Start) -> None:
    decode = start("kv_consumer", events=True)
    request = request_of("d", PROMPT, None)
    decode.add(request, PLACES)
    decode.compute("d", chunk=100)
    decode.finish("d")
    decode.step_until(lambda: decode.freed)
    end = decode.worker.connector_worker.decodes[0]
    end.engine.wait_settled()
    end.events.wait_made()
    decode.step()
    (stored,) = (event for batch in decode.published for event in batch)
    assert stored.block_hashes == [
        int.from_bytes(one, byteorder="big") & ((1 << 64) - 1) for one in request.block_hashes
    ]
    assert stored.token_ids == PROMPT[:FULL]


def configs(*, speculative: Any) -> Any:
    extra = {"uri": None, "model": None, "host": None, "handover": {"listen": "127.0.0.1:0"}}
    made = configs_of("", extra=extra, speculative=speculative)
    made[0].kv_transfer_config.kv_role, made[0].kv_transfer_config.engine_id = "kv_both", "e"
    return made


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        (
            speculative_of("custom_class"),
            "draft custom_class cannot be shared or handed over, that of eagle, eagle3, mtp, draft_model, ",
        ),
        (speculative_of("mtp", use_multi_module_mtp=lambda: True), "set num_speculative_tokens to 1"),
    ],
)
def test_drafts_that_cannot_be_handed_over_are_refused_by_name(
    connector: ModuleType, speculative: Any, words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        connector.TidekvConnector(*_with_role(configs(speculative=speculative), KVConnectorRole.SCHEDULER))


def _with_role(made: Any, role: KVConnectorRole) -> tuple[Any, KVConnectorRole, Any]:
    return made[0], role, made[1]


def test_servers_with_other_drafts_share_nothing() -> None:
    models = [
        read_handover(*configs(speculative=speculative)).model
        for speculative in (
            None,
            SimpleNamespace(method="ngram"),
            speculative_of("eagle"),
            speculative_of("eagle", draft_model_config=SimpleNamespace(model="another")),
        )
    ]
    assert models == ["its/name", "its/name", "its/name with eagle draft", "its/name with eagle another"]
