"""Sliding windows and states beside the full KV, in vLLM's hand-over role: each has blocks of its own at both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any  # vLLM's objects are not typed here.

import pytest
import torch

from tests.support.vllm_contract import BLOCK, LAYERS, MambaSpec, SlidingWindowSpec
from tests.support.vllm_handover import STATE_BYTES, HandoverVllm, kv_of, request_of, started_vllms, state_of
from tidekv.engine.integrations.vllm.handover.groups import ComponentBlocks, read_groups

pytestmark = pytest.mark.nixl
PROMPT = [*range(100, 100 + 4 * BLOCK), 1, 2]
HANDED = len(PROMPT) - 1
GROUPS = [SlidingWindowSpec(), MambaSpec()]
# By position: the full KV, the blocks with the last 16 tokens of the window, and the last record.
TABLES = ([7, 3, 11, 2, 5], [[0, 0, 9, 8, 6], [0, 0, 0, 0, 4]])
OTHERS = ([12, 13, 14, 15, 16], [[0, 0, 17, 18, 19], [0, 0, 0, 0, 1]])
Start = Callable[..., HandoverVllm]


@pytest.fixture
def start(connector: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes vLLMs, which end with the test."""
    with started_vllms(connector, monkeypatch, further=GROUPS) as start_one:
        yield start_one


def add(vllm: HandoverVllm, request: Any, tables: Any, *, computed: int = 0) -> int | None:
    """A request with blocks in each group."""
    vllm.further_tables[request.request_id] = tables[1]
    return vllm.add(request, tables[0], computed=computed)


def prefilled(prefill: HandoverVllm, name: str = "p", tokens: list[int] = PROMPT, tables: Any = TABLES) -> Any:
    """A prompt that prefill computed in steps, and what its answer says."""
    assert add(prefill, request_of(name, tokens, {"do_remote_decode": True}), tables) == 0
    return prefill.answer(name, chunk=12)


def holds_all(vllm: HandoverVllm, name: str, tokens: list[int]) -> bool:
    """Whether the blocks of all groups have what the end of these tokens needs."""
    window, record = vllm.further_tables[name]
    first = next(at for at, block in enumerate(window) if block)
    for layer, cache in enumerate(vllm.caches):
        rows = cache[window[first:]].permute(0, 2, 1, 3).flatten(0, 1)[: len(tokens) - first * BLOCK]
        if not torch.equal(rows, kv_of(tokens, layer + LAYERS)[first * BLOCK :]):
            return False
        found = cache[record[-1]].flatten().view(torch.int8)[:STATE_BYTES]
        if not torch.equal(found, state_of(tokens, layer).flatten()):
            return False
    return vllm.holds(name, tokens)


def test_decode_gets_every_group_up_to_the_last_token_which_it_computes(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = prefilled(prefill)
    assert prefill.requests["p"].num_prompt_tokens == HANDED
    assert add(decode, request_of("d", PROMPT, params), OTHERS) == HANDED
    decode.step_until(lambda: decode.loaded)
    assert not decode.failed
    assert holds_all(decode, "d", PROMPT[:HANDED])
    assert decode.counts["restore_tokens_transfer"] == HANDED
    prefill.step_until(lambda: prefill.freed)
    assert prefill.counts == {"sends_received": 1}


def kept(decode: HandoverVllm, name: str, tokens: list[int], tables: Any) -> None:
    """A request of these tokens that decode computed itself, whose blocks go to host memory."""
    add(decode, request_of(name, [*tokens, 9], None), tables)
    decode.step({name: len(tokens)})
    assert decode.finish(name) == (True, None)
    decode.step_until(lambda: name in decode.freed)


def test_what_ends_with_a_block_comes_back_from_host_memory_and_storage_in_every_group(
    start: Start, tmp_path: Path
) -> None:
    prefill, uri = start("kv_producer"), f"file:{tmp_path}/store?capacity=16MB"
    decode = start("kv_consumer", uri=uri)
    tokens, tables = PROMPT[: 4 * BLOCK], ([7, 3, 11, 2], [[0, 0, 9, 8], [0, 0, 0, 4]])
    kept(decode, "own", tokens, tables)
    others = ([12, 13, 14, 15], [[0, 0, 17, 18], [0, 0, 0, 1]])
    for source in ("l2", "l3"):
        if source == "l3":
            decode.worker.connector_worker.decodes[0].engine.wait_settled()
            decode.close()
            decode = start("kv_consumer", uri=uri)
        params = prefilled(prefill, f"p-{source}", [*tokens, 5], tables)
        assert add(decode, request_of(source, [*tokens, 5], params), others) == len(tokens)
        decode.step_until(partial(decode.loaded.__contains__, source))
        assert holds_all(decode, source, tokens)
        assert decode.counts[f"restore_tokens_{source}"] == len(tokens)
        assert "restore_tokens_transfer" not in decode.counts
    assert prefill.worker.connector_worker.prefills[0].thread.statistics()["pages_sent"] == 0, "of a window or a state"


def test_a_failed_restore_fails_as_a_whole_and_is_no_list_of_blocks(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = prefilled(prefill)
    prefill.worker.connector_worker.prefills[0].thread.stop("p", "a test")
    prefill.step_until(lambda: prefill.freed)
    add(decode, request_of("d", PROMPT, params), OTHERS)
    decode.step_until(lambda: decode.loaded)
    assert (decode.loaded, decode.failed, decode.invalid) == (["d"], ["d"], set())
    assert decode.counts == {"restores_failed": 1}
    # vLLM frees the blocks, asks again, and computes.
    assert decode.ask("d", OTHERS[0]) == 0


def test_an_abort_at_prefill_amid_a_transfer_fails_it_as_a_whole(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    add(prefill, request_of("p", PROMPT, {"do_remote_decode": True, "room": "r"}), TABLES)
    params = {"do_remote_prefill": True, "prefill": prefill.address, "room": "r"}
    assert add(decode, request_of("d", PROMPT, params), OTHERS) == HANDED
    prefill.step({"p": 2 * BLOCK})
    decode.step_until(lambda: decode.holds("d", PROMPT[: 2 * BLOCK]))
    assert prefill.finish("p") == (True, None)
    prefill.step()
    decode.step_until(lambda: decode.loaded)
    assert (decode.loaded, decode.failed, decode.invalid) == (["d"], ["d"], set())
    assert decode.counts == {"restores_failed": 1}
    assert "restored_tokens=0 cause='prefill failed: " in caplog.text
    assert decode.ask("d", OTHERS[0]) == 0


def test_a_group_whose_blocks_prefill_has_lost_fails_the_hand_over_by_name(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = prefilled(prefill, tables=(TABLES[0], [[0, 0, 0, 8, 6], TABLES[1][1]]))
    add(decode, request_of("d", PROMPT, params), OTHERS)
    decode.step_until(lambda: decode.loaded)
    assert decode.failed == ["d"]
    assert "window_1" in caplog.text


def test_an_aborted_restore_is_no_failure(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    address = prefill.address
    params = {"do_remote_prefill": True, "prefill": address, "room": "r"}
    add(decode, request_of("d", PROMPT, params), OTHERS)
    decode.step()
    assert decode.finish("d") == (False, None)
    decode.step_until(lambda: decode.loaded)
    assert (decode.failed, decode.counts) == ([], {})
    # Both ends know one another before they close.
    add(decode, request_of("later", PROMPT, prefilled(prefill)), OTHERS)
    decode.step_until(lambda: "later" in decode.loaded)


LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1]
KINDS = [[], [SlidingWindowSpec()], [MambaSpec()], GROUPS]
of_every_kind = pytest.mark.parametrize("further", KINDS, ids=["full KV", "window", "state", "window and state"])


@of_every_kind
@pytest.mark.parametrize("draft", [None, "eagle"])
def test_no_prompt_that_names_a_room_ends_the_scheduler_of_decode(
    start: Start, further: list[Any], draft: str | None
) -> None:
    """A client may name a room for any prompt, and vLLM's cache may have any of its full blocks."""
    decode = start("kv_consumer", further=further, draft=draft)
    asked = [(tokens, room, had) for tokens in LENGTHS for room in ("r", "", None) for had in range(0, tokens, BLOCK)]
    for at, (tokens, room, had) in enumerate(asked):
        params = {"do_remote_prefill": True, "prefill": "127.0.0.1:1", "room": room}
        name, tables = f"{at}", (OTHERS[0][:2], [row[-2:] for row in OTHERS[1][: len(further)]])
        claimed = add(decode, request_of(name, PROMPT[:tokens], params), tables, computed=had)
        handed = tokens - 1 if further else tokens
        assert claimed == (handed - had if room is not None else 0)
        if claimed:
            decode.step_until(partial(decode.loaded.__contains__, name))
        assert decode.ask(name, tables[0], computed=had) == 0
        decode.finish(name)
        aborted = request_of(f"aborted {at}", PROMPT[:tokens], params)
        nothing = [list[int]() for _ in range(1 + len(further))]
        assert decode.scheduler.request_finished_all_groups(aborted, nothing) == (False, None)
        decode.step()


@of_every_kind
def test_no_prompt_that_names_a_room_ends_the_scheduler_of_prefill(start: Start, further: list[Any]) -> None:
    prefill = start("kv_producer", further=further)
    for at, (tokens, room) in enumerate((tokens, room) for tokens in LENGTHS for room in ("r", "", None)):
        name, tables = f"{at}", (TABLES[0][:2], [[*row[-2:]] for row in TABLES[1][: len(further)]])
        add(prefill, request_of(name, PROMPT[:tokens], {"do_remote_decode": True, "room": room}), tables)
        prefill.compute(name, chunk=12)
        # Of a single token decode computes all, if it computes the last one.
        assert prefill.finish(name)[0] is (tokens > 1 or not further)
        prefill.step()


def test_a_prompt_that_lacks_its_last_token_only_is_computed_by_decode(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    tokens = PROMPT[: 2 * BLOCK + 1]
    tables = ([7, 3, 11], [[9, 8, 6], [0, 4, 0]])
    params = prefilled(prefill, tokens=tokens, tables=tables)
    assert add(decode, request_of("d", tokens, params), OTHERS, computed=2 * BLOCK) == 0
    decode.step()
    prefill.step_until(lambda: prefill.freed)
    assert decode.counts == {"restores_short": 1}


@pytest.mark.parametrize(("tokens", "changes"), [([5], {}), (PROMPT, {"skip_reading_prefix_cache": True})])
def test_what_decode_computes_whole_is_computed_whole_by_prefill_too(
    start: Start, tokens: list[int], changes: dict[str, Any]
) -> None:
    prefill = start("kv_producer")
    request = request_of("p", tokens, {"do_remote_decode": True}, **changes)
    add(prefill, request, TABLES)
    prefill.compute("p", chunk=12)
    assert prefill.finish("p") == (False, None)
    assert request.num_prompt_tokens == len(tokens)


def test_only_blocks_that_vllm_still_has_are_kept(start: Start) -> None:
    decode = start("kv_consumer")
    # The last block is not full: the record is behind other tokens, and the window has moved on.
    add(decode, request_of("d", [*PROMPT, 9], None), ([7, 3, 11, 2, 5], [[0, 0, 0, 8, 6], [0, 0, 0, 0, 4]]))
    decode.step({"d": len(PROMPT)})
    jobs = decode.scheduler.connector_scheduler.decode._jobs
    assert decode.finish("d") == (True, None)
    (offer,) = jobs.offers
    assert (len(offer.blocks), offer.components) == (4, {})
    decode.step_until(lambda: decode.freed)
    assert decode.counts == {"offer_pages_written": 4}


@pytest.mark.parametrize("tokens", range(1, 60))
@pytest.mark.parametrize("window", [2, 8, 9, 17, 24])
def test_the_end_of_any_prompt_needs_the_blocks_that_vllm_keeps(window: int, tokens: int) -> None:
    # As vLLM counts the tokens that are not needed any more.
    skipped = max(0, tokens - window + 1) // BLOCK
    table = [at + 1 if at >= skipped else 0 for at in range(-(-tokens // BLOCK))]
    component = ComponentBlocks("w", "window", 0, (), BLOCK, window - 1)
    assert component.at_end([table], tokens) == tuple(block for block in table if block)
    if skipped < len(table):
        table[skipped] = 0
        assert component.at_end([table], tokens) == ()


def test_the_names_of_components_are_those_of_both_ends() -> None:
    class FullAttentionSpec:
        block_size = BLOCK

    group = type("Group", (), {"layer_names": ("a",), "kv_cache_spec": FullAttentionSpec()})
    window = type("Group", (), {"layer_names": ("b",), "kv_cache_spec": SlidingWindowSpec()})
    found = read_groups([window, group])
    assert found.full == 1
    assert [(each.name, each.group, each.window_tokens) for each in found.components] == [("window_0", 0, 2 * BLOCK)]
