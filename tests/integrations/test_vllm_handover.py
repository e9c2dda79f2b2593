"""Both roles of the hand-over upon a contract of vLLM's base classes, over NIXL between two threads of one process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any  # vLLM's objects are not typed here.

import pytest
import torch

from tests.support.vllm_contract import (
    BLOCK,
    DIM,
    HEADS,
    LAYERS,
    FullAttentionSpec,
    KVConnectorRole,
    SlidingWindowSpec,
    configs_of,
)
from tests.support.vllm_handover import ENGINE, HandoverVllm, request_of, started_vllms
from tests.support.waits import LIMIT_S
from tidekv.engine.integrations.vllm.handover.jobs import HANDOVER_COUNTS
from tidekv.engine.integrations.vllm.handover.settings import HandoverSettings, read_handover
from tidekv.states.errors import InvalidConfig

pytestmark = pytest.mark.nixl
PROMPT = [*range(100, 100 + 4 * BLOCK), 1, 2]
PLACES = [7, 3, 11, 2, 5]
OTHERS = [12, 13, 14, 15, 16]
Start = Callable[..., HandoverVllm]


@pytest.fixture
def start(connector: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes vLLMs, which end with the test."""
    with started_vllms(connector, monkeypatch) as start_one:
        yield start_one


def to_prefill(name: str = "p", **changes: Any) -> Any:
    return request_of(name, PROMPT, {"do_remote_decode": True, **changes})


def prefilled(prefill: HandoverVllm, name: str = "p", *, chunk: int = 12) -> dict[str, Any]:
    """A prompt that prefill computed in steps, and what its answer says."""
    assert prefill.add(to_prefill(name), PLACES) == 0
    return prefill.answer(name, chunk=chunk)


def test_decode_gets_what_prefill_computed(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = prefilled(prefill)
    assert decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5]) == len(PROMPT)
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    assert not decode.invalid
    page_bytes = BLOCK * 2 * DIM * HEADS * LAYERS * 4
    assert decode.counts == {"restore_tokens_transfer": len(PROMPT), "restore_bytes_transfer": 5 * page_bytes}
    prefill.step_until(lambda: prefill.freed)
    assert (prefill.freed, prefill.counts) == (["p"], {"sends_received": 1})
    # What it decoded goes to host memory, and vLLM holds the blocks meanwhile.
    decode.compute("d", chunk=100)
    assert decode.finish("d") == (True, None)
    decode.step_until(lambda: decode.freed)
    assert decode.counts["offer_pages_written"] == 4
    # An equal prompt is restored from there, but for its last page.
    again = prefilled(prefill, "q", chunk=100)
    decode.add(request_of("e", PROMPT, again), OTHERS)
    decode.step_until(lambda: len(decode.loaded) == 2)
    assert decode.holds("e", PROMPT)
    assert decode.counts["restore_tokens_l2"] == 4 * BLOCK
    prefill.step_until(lambda: len(prefill.freed) == 2)
    decode.compute("e", chunk=100)
    decode.finish("e")
    decode.step_until(lambda: len(decode.freed) == 2)
    assert (decode.freed, decode.counts["offer_pages_present"]) == (["d", "e"], 4)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_step_without_a_hand_over_carries_no_jobs_and_asks_no_end(
    start: Start, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = start(role)
    carried = []
    build = vllm.scheduler.build_connector_meta
    monkeypatch.setattr(vllm.scheduler, "build_connector_meta", lambda step: carried.append(build(step)) or carried[-1])
    for call in ("before_forward", "start_loads", "after_forward", "take_finished"):
        monkeypatch.setattr(vllm.worker.connector_worker, call, lambda *_, call=call: pytest.fail(f"{call} was called"))
    vllm.add(request_of("plain", PROMPT, None), PLACES)
    vllm.compute("plain", chunk=12)
    vllm.step()
    assert len(carried) == 4
    assert all(one.jobs is None for one in carried)
    assert [one.is_empty for one in carried] == [False, False, False, True]


def test_what_decode_kept_survives_its_restart(start: Start, tmp_path: Path) -> None:
    prefill, uri = start("kv_producer"), f"file:{tmp_path}/store?capacity=16MB"
    decode = start("kv_consumer", uri=uri)
    decode.add(request_of("d", PROMPT, prefilled(prefill)), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    decode.compute("d", chunk=100)
    decode.finish("d")
    decode.step_until(lambda: decode.freed)
    decode.worker.connector_worker.decodes[0].engine.wait_settled()
    decode.close()
    decode = start("kv_consumer", uri=uri)
    decode.add(request_of("d", PROMPT, prefilled(prefill, "q")), OTHERS)
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    assert decode.counts["restore_tokens_l3"] == 4 * BLOCK


def test_host_memory_with_a_path_survives_a_restart_of_decode_but_not_a_reset(start: Start, tmp_path: Path) -> None:
    prefill, path = start("kv_producer"), str(tmp_path / "pool")

    def restored(name: str) -> dict[str, int]:
        decode = start("kv_consumer", host_path=path)
        decode.add(request_of(name, PROMPT, prefilled(prefill, f"p-{name}")), OTHERS)
        decode.step_until(lambda: decode.loaded)
        assert decode.holds(name, PROMPT)
        decode.compute(name, chunk=100)
        if name == "reset":
            # What was computed before it, and is offered with the step after it, has the old weights.
            decode.finish(name)
            assert decode.scheduler.reset_cache()
        else:
            decode.finish(name)
        decode.step_until(lambda: decode.freed)
        counts = decode.counts
        decode.close()
        return {tier: counts.get(f"restore_tokens_{tier}", 0) for tier in ("l2", "transfer")}

    assert restored("first") == {"l2": 0, "transfer": len(PROMPT)}
    assert restored("again") == {"l2": 4 * BLOCK, "transfer": 2}
    assert restored("reset") == {"l2": 4 * BLOCK, "transfer": 2}
    assert restored("after") == {"l2": 0, "transfer": len(PROMPT)}


def test_each_rank_of_each_engine_has_a_file_of_its_own() -> None:
    settings = HandoverSettings(dials=("127.0.0.1:*",), host_path="/dev/shm/pool")
    assert [settings.pool_path(worker) for worker in range(3)] == [f"/dev/shm/pool{end}" for end in ("", ".1", ".2")]
    assert HandoverSettings().pool_path(1) is None


def test_after_a_reset_and_for_other_adapters_nothing_kept_is_found(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")

    def restore(name: str, **changes: Any) -> int:
        decode.add(request_of(name, PROMPT, prefilled(prefill, f"p-{name}"), **changes), [1, 2, 3, 4, 5])
        decode.step_until(lambda: name in decode.loaded)
        assert decode.holds(name, PROMPT)
        decode.compute(name, chunk=100)
        decode.finish(name)
        decode.step_until(lambda: name in decode.freed)
        return decode.counts.pop("restore_tokens_l2", 0)

    assert (restore("first"), restore("again")) == (0, 4 * BLOCK)
    assert restore("salted", cache_salt="mine") == 0
    assert restore("adapter", lora_request=SimpleNamespace(lora_name="mine")) == 0
    assert decode.scheduler.reset_cache()
    assert (restore("after"), restore("later")) == (0, 4 * BLOCK)


def test_only_computed_blocks_of_known_tokens_are_kept(start: Start) -> None:
    decode = start("kv_consumer")
    decode.add(request_of("short", PROMPT[: BLOCK - 1], None), [1])
    decode.compute("short", chunk=100)
    assert decode.finish("short") == (False, None)
    decode.add(request_of("pictures", PROMPT, None, mm_features=[object()]), PLACES)
    decode.compute("pictures", chunk=100)
    assert decode.finish("pictures") == (False, None)
    decode.add(request_of("waiting", PROMPT, None), [])
    assert decode.finish("waiting") == (False, None)
    decode.add(request_of("plain", PROMPT, None), PLACES)
    decode.step({"plain": 2 * BLOCK + 3})
    assert decode.finish("plain") == (True, None)
    decode.step_until(lambda: decode.freed)
    assert decode.counts == {"offer_pages_written": 2}


def test_after_the_end_of_the_engine_vllm_computes(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    address = prefill.address
    params = {"do_remote_prefill": True, "prefill": address, "room": "chosen"}
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step()
    decode.worker.connector_worker.decodes[0].engine.close()
    decode.step_until(lambda: decode.loaded)
    decode.add(request_of("e", PROMPT, dict(params, room="other")), OTHERS)
    decode.step_until(lambda: len(decode.loaded) == 2)
    assert (decode.loaded, decode.invalid) == (["d", "e"], {1, 2, 3, 4, 5, *OTHERS})
    decode.compute("e", chunk=100)
    assert decode.finish("e") == (True, None)
    decode.step_until(lambda: decode.freed)
    assert decode.counts == {"restores_failed": 2, "offer_pages_declined": 4}
    assert "prompts are computed from now on" in caplog.text


def test_blocks_that_vllm_has_already_are_left_as_they_are(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = prefilled(prefill)
    decode.overwrite([1, 2])
    assert decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5], computed=2 * BLOCK) == 2 * BLOCK + 2
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT, first=2 * BLOCK)
    assert all((cache[[1, 2]] == 7.0).all() for cache in decode.caches)


def test_a_router_may_name_the_room_and_start_both_at_once(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    address = prefill.address
    params = {"do_remote_prefill": True, "prefill": address, "room": "chosen"}
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step()
    prefill.add(to_prefill(room="chosen"), PLACES)
    prefill.compute("p", chunk=BLOCK)
    # Decode may have everything before the scheduler hears that the request has finished.
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    assert prefill.finish("p")[0]
    prefill.step_until(lambda: prefill.freed)
    assert prefill.freed == ["p"]


def test_a_prompt_that_prefill_preempts_is_sent_again(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    address = prefill.address
    decode.add(
        request_of("d", PROMPT, {"do_remote_prefill": True, "prefill": address, "room": "chosen"}), [1, 2, 3, 4, 5]
    )
    prefill.add(to_prefill(room="chosen"), PLACES)
    prefill.step({"p": 2 * BLOCK})
    decode.step()
    prefill.preempt("p", OTHERS)
    prefill.compute("p", chunk=BLOCK)
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    assert not decode.invalid
    prefill.finish("p")
    prefill.step_until(lambda: prefill.freed)
    assert prefill.counts == {"sends_received": 1}


def test_pages_posted_before_a_preemption_are_never_sent(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    prefill.add(to_prefill(), PLACES)
    prefill.step({"p": 2 * BLOCK})
    prefill.preempt("p", OTHERS)
    prefill.compute("p", chunk=BLOCK)
    _, params = prefill.finish("p")
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)


def test_a_prompt_is_sent_in_a_second_room_if_decode_took_a_slow_prefill_for_dead(start: Start) -> None:
    engine = {**ENGINE, "peer": {"silence_s": 2.0, "heartbeat_s": 0.5}}
    prefill, decode = start("kv_producer"), start("kv_consumer", engine=engine)
    address = prefill.address
    params = {"do_remote_prefill": True, "prefill": address, "room": "chosen"}
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    prefill.add(to_prefill(room="chosen"), PLACES)
    prefill.step({"p": 2 * BLOCK})
    decode.step()
    thread = prefill.worker.connector_worker.prefills[0].thread
    until_s = time.monotonic() + LIMIT_S
    while not thread.statistics()["rooms_sending"]:
        assert time.monotonic() < until_s, "decode did not ask for the prompt"
    # Nothing of prefill runs: decode dials again and has the room aborted, since its blocks are to be written again.
    thread._loop.post(lambda: time.sleep(3.0))
    time.sleep(4.0)
    prefill.compute("p", chunk=BLOCK)
    prefill.finish("p")
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    assert not decode.invalid
    prefill.step_until(lambda: prefill.freed)
    assert prefill.counts == {"sends_received": 1}


def test_what_prefill_aborts_decode_computes(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    address = prefill.address
    prefill.add(to_prefill(room="chosen"), PLACES)
    prefill.step({"p": 2 * BLOCK})
    params = {"do_remote_prefill": True, "prefill": address, "room": "chosen"}
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5], computed=BLOCK)
    decode.step()
    assert prefill.finish("p") == (True, None)
    prefill.step_until(lambda: prefill.freed)
    decode.step_until(lambda: decode.loaded)
    # Of the two blocks that prefill had computed, decode had one; the other one may have arrived.
    assert decode.loaded == ["d"]
    assert decode.invalid in ({2, 3, 4, 5}, {3, 4, 5})
    assert decode.counts.get("restores_failed", 0) + decode.counts.get("restores_partial", 0) == 1
    # vLLM asks again, with fewer blocks, and then computes.
    assert decode.scheduler.get_num_new_matched_tokens(decode.requests["d"], BLOCK) == (0, False)


def test_a_restore_that_is_aborted_is_reported_once_and_is_no_failure(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    decode, prefill = start("kv_consumer"), start("kv_producer")
    address = prefill.address
    decode.add(request_of("d", PROMPT, {"do_remote_prefill": True, "prefill": address, "room": "r"}), [1, 2, 3, 4, 5])
    decode.step()
    assert decode.finish("d") == (False, None)
    decode.step_until(lambda: decode.loaded)
    decode.overwrite([1, 2, 3, 4, 5])
    prefill.add(to_prefill(room="r"), PLACES)
    prefill.compute("p", chunk=BLOCK)
    prefill.finish("p")
    for _ in range(20):
        decode.step()
    assert decode.loaded == ["d"]
    assert all((cache[[1, 2, 3, 4, 5]] == 7.0).all() for cache in decode.caches)
    # The client has left: vLLM computes nothing, and no operator has to look for a fault.
    assert not decode.invalid
    assert not decode.counts
    assert "not restored" not in caplog.text
    # Prefill does not hold the blocks until its own limit.
    thread = prefill.worker.connector_worker.prefills[0].thread
    prefill.step_until(lambda: thread.statistics()["rooms_declined"])
    # Both ends know one another before they close: NIXL may end a process that loads an agent which is closing.
    decode.add(request_of("later", PROMPT, prefilled(prefill, "q")), OTHERS)
    decode.step_until(lambda: "later" in decode.loaded)


def test_an_equal_prompt_waits_and_gets_the_blocks_of_the_first_one(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params, other = prefilled(prefill, "p"), prefilled(prefill, "q")
    assert decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5]) == len(PROMPT)
    assert decode.add(request_of("e", PROMPT, other), OTHERS) is None
    while not decode.loaded:
        decode.step()
        assert decode.loaded or decode.ask("e", OTHERS) is None
    # vLLM's prefix cache has the first one's full blocks now.
    assert decode.ask("e", [1, 2, 3, 4, 12], computed=4 * BLOCK) == 2
    decode.step_until(lambda: "e" in decode.loaded)
    assert decode.holds("d", PROMPT)
    assert decode.holds("e", PROMPT)
    assert decode.counts["restore_tokens_transfer"] == len(PROMPT) + 2
    assert decode.counts["restore_tokens_l1"] == 4 * BLOCK
    prefill.step_until(lambda: len(prefill.freed) == 2)
    assert prefill.counts == {"sends_received": 2}


@pytest.mark.parametrize("end", ["fails", "aborted"])
def test_after_the_end_of_the_first_restore_an_equal_prompt_goes_on_by_itself(start: Start, end: str) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params, other, third = (prefilled(prefill, name) for name in ("p", "q", "r"))
    if end == "fails":
        # Prefill does not have it any more.
        prefill.worker.connector_worker.prefills[0].thread.stop("p", "a test")
        prefill.step_until(lambda: prefill.freed)
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    assert decode.add(request_of("e", PROMPT, other), OTHERS) is None
    assert decode.add(request_of("f", PROMPT, third), OTHERS) is None
    if end == "fails":
        decode.step_until(lambda: decode.loaded)
        assert decode.invalid == {1, 2, 3, 4, 5}
    else:
        decode.step()
        decode.finish("d")
    decode.invalid.clear()
    # Neither waits for the other one: each has waited once.
    assert decode.ask("e", OTHERS) == len(PROMPT)
    assert decode.ask("f", [6, 7, 8, 9, 10]) == len(PROMPT)
    decode.step_until(lambda: {"d", "e", "f"} <= {*decode.loaded})
    assert decode.holds("e", PROMPT)
    assert decode.holds("f", PROMPT)
    assert not decode.invalid


@pytest.mark.parametrize("changes", [{"prompt_token_ids": [*PROMPT[:-1], 99]}, {"cache_salt": "mine"}])
@pytest.mark.parametrize("named_by", ["prefill", "client"])
def test_a_room_of_another_prompt_or_salt_gives_a_client_nothing(
    start: Start, caplog: pytest.LogCaptureFixture, named_by: str, changes: dict[str, Any]
) -> None:
    """A client whose parameters reach both servers names one room for two prompts, or one of another client."""
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = {"do_remote_decode": True} | ({"room": "r17"} if named_by == "client" else {})
    assert prefill.add(request_of("p", PROMPT, params), PLACES) == 0
    prefill.compute("p", chunk=12)
    held, answer = prefill.finish("p")
    assert held and answer is not None
    tokens = changes.get("prompt_token_ids", PROMPT)
    theirs = {name: value for name, value in changes.items() if name != "prompt_token_ids"}
    assert decode.add(request_of("d", tokens, answer, **theirs), [1, 2, 3, 4, 5]) == len(PROMPT)
    decode.step_until(lambda: decode.loaded)
    assert decode.invalid == {1, 2, 3, 4, 5}
    assert "other prompt" in caplog.text
    assert "restore_tokens_transfer" not in decode.counts
    # Whose prompt it is gets it.
    decode.invalid.clear()
    assert decode.add(request_of("e", PROMPT, answer), OTHERS) == len(PROMPT)
    decode.step_until(lambda: "e" in decode.loaded)
    assert decode.holds("e", PROMPT)
    prefill.step_until(lambda: prefill.freed)
    assert prefill.counts == {"sends_received": 1}


def test_prompts_that_nobody_asks_for_hold_a_share_of_the_blocks_at_most(start: Start) -> None:
    prefill, decode = start("kv_producer", unclaimed_share=0.5), start("kv_consumer")
    of_each = len(PLACES)
    share = prefill.worker.connector_worker.prefills[0]._unclaimed_max
    answers = {str(number): prefilled(prefill, str(number)) for number in range(share // of_each)}
    for _ in range(10):
        prefill.step()
    assert prefill.freed == []
    prefilled(prefill, "one more")
    prefill.step_until(lambda: prefill.freed)
    for _ in range(10):
        prefill.step()
    assert prefill.freed == ["0"]
    # Decode computes what it does not get, and gets the others.
    decode.add(request_of("d", PROMPT, answers["1"]), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    decode.add(request_of("e", [*PROMPT[:-1], 9], answers["0"]), OTHERS)
    decode.step_until(lambda: "e" in decode.loaded)
    assert decode.invalid


def test_a_prompt_that_is_being_computed_is_not_given_up_for_its_share(start: Start) -> None:
    prefill = start("kv_producer", unclaimed_share=0.25)
    prefill.add(to_prefill("p"), PLACES)
    prefill.step({"p": 2 * BLOCK})
    # One that has finished has the share alone.
    assert prefill.add(to_prefill("q"), OTHERS) == 0
    prefill.answer("q", chunk=100)
    for _ in range(10):
        prefill.step()
    assert prefill.worker.connector_worker.prefills[0].thread.unclaimed() == ["p", "q"]
    assert prefill.freed == []


def test_a_request_that_waits_for_blocks_gets_those_of_the_oldest_prompt_that_nobody_asks_for(start: Start) -> None:
    prefill, decode = start("kv_producer", unclaimed_share=1.0), start("kv_consumer")
    prefilled(prefill, "p")
    answer = prefilled(prefill, "q")
    for _ in range(10):
        prefill.step()
    assert prefill.freed == []
    prefill.add(request_of("w", PROMPT, None), PLACES)
    prefill.step_until(lambda: prefill.freed)
    prefill.compute("w", chunk=12)
    for _ in range(10):
        prefill.step()
    assert prefill.freed == ["p"]
    decode.add(request_of("d", PROMPT, answer), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)


def test_two_requests_whose_router_named_one_room_get_their_own_prompts(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    other = [token + 100 for token in PROMPT]
    answers = []
    for name, tokens, blocks in (("p", PROMPT, PLACES), ("q", other, OTHERS)):
        assert prefill.add(request_of(name, tokens, {"do_remote_decode": True, "room": "r"}), blocks) == 0
        prefill.compute(name, chunk=12)
        answers.append(prefill.finish(name)[1])
    for name, tokens, answer, blocks in (("e", other, answers[1], OTHERS), ("d", PROMPT, answers[0], [1, 2, 3, 4, 5])):
        assert decode.add(request_of(name, tokens, answer), blocks) == len(PROMPT)
        decode.step_until(lambda name=name: name in decode.loaded)
        assert decode.holds(name, tokens)
        decode.finish(name)
        decode.step()
    prefill.step_until(lambda: len(prefill.freed) == 2)
    assert prefill.counts == {"sends_received": 2}


@pytest.mark.parametrize("how", ["used before", "used before, its id in use again", "never given out"])
def test_a_reference_to_a_prompt_that_prefill_has_no_more_gives_no_block(start: Start, how: str) -> None:
    """vLLM #52234: decode read blocks that prefill had given to other prompts, and answered for those."""
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = prefilled(prefill)
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    prefill.step_until(lambda: prefill.freed)
    if how == "never given out":
        params = params | {"room": params["room"][:-4] + "0000"}
    elif how.endswith("again"):
        other = [token + 50 for token in PROMPT]
        prefill.add(request_of("p", other, {"do_remote_decode": True}), PLACES)
        prefill.compute("p", chunk=12)
        assert prefill.finish("p")[0]
    else:
        prefill.overwrite(PLACES)
    noise = [cache[OTHERS].clone() for cache in decode.caches]
    assert decode.add(request_of("e", PROMPT, params), OTHERS) == len(PROMPT)
    decode.step_until(lambda: "e" in decode.loaded)
    assert decode.invalid == set(OTHERS), "vLLM computes all of it"
    assert all(torch.equal(cache[OTHERS], before) for cache, before in zip(decode.caches, noise, strict=True))


def test_names_of_rooms_cannot_be_guessed(start: Start) -> None:
    prefill = start("kv_producer")
    names = {prefilled(prefill, name)["room"] for name in ("p", "q")}
    assert len(names) == 2
    assert all(re.fullmatch("prefill-first:[0-9a-f]{32}", name) for name in names)


def test_a_reset_of_decodes_cache_does_not_change_which_prompt_it_asks_for(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    decode.scheduler.reset_cache()
    assert decode.add(request_of("d", PROMPT, prefilled(prefill)), [1, 2, 3, 4, 5]) == len(PROMPT)
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)


def test_a_prompt_waits_for_no_restore_that_could_end_later_than_its_own(start: Start) -> None:
    decode, number = start("kv_consumer"), 0
    params = {"do_remote_prefill": True, "prefill": "127.0.0.1:9", "room": "prefill-first:r"}

    def waits(first: dict[str, Any], later: dict[str, Any]) -> bool:
        nonlocal number
        answers = []
        for one in (first, later):
            number += 1
            one = {"tokens": PROMPT, "computed": 0, "params": {}, **one}
            request = request_of(str(number), one["tokens"], {**params, **one["params"]}, **one.get("changes", {}))
            answers.append(decode.add(request, PLACES, computed=one["computed"]))
        decode.finish(str(number))
        decode.finish(str(number - 1))
        return answers[-1] is None

    assert waits({}, {})
    assert waits({}, {"tokens": [*PROMPT[:-2], 7, 8, 9]})
    whole = PROMPT[: 4 * BLOCK]
    assert waits({"tokens": whole}, {"tokens": whole})
    # Only the fourth block differs, which vLLM's cache never serves for a prompt that ends with it.
    assert waits({"tokens": whole}, {"tokens": [*whole[:-1], 5]})
    # Another prefill; a room that a router named; another adapter or salt.
    assert not waits({"params": {"prefill": "127.0.0.1:8"}}, {})
    assert not waits({"params": {"room": "named"}}, {})
    assert waits({}, {"params": {"room": "named"}})
    assert not waits({"changes": {"cache_salt": "s"}}, {})
    assert not waits({}, {"changes": {"lora_request": SimpleNamespace(lora_name="mine")}})
    # One of them brings in, or needs, further blocks.
    assert not waits({"tokens": [*PROMPT, *range(BLOCK)]}, {})
    assert not waits({}, {"tokens": [*PROMPT, *range(BLOCK)]})
    assert not waits({"tokens": PROMPT[:-3]}, {})
    assert not waits({"tokens": [9, *PROMPT[1:]]}, {})
    # vLLM has all that its cache can serve, or more than as the first one began.
    assert not waits({"computed": 4 * BLOCK}, {"computed": 4 * BLOCK})
    assert not waits({}, {"computed": BLOCK})
    assert waits({"computed": BLOCK}, {"computed": BLOCK})
    # Prompts of one block, and a vLLM without prefix caching, share nothing.
    assert not waits({"tokens": whole[:BLOCK]}, {"tokens": whole[:BLOCK]})
    assert not waits({"changes": {"block_hashes": []}}, {"changes": {"block_hashes": []}})


def test_without_prefill_decode_computes(start: Start) -> None:
    decode = start("kv_consumer")
    params = {"do_remote_prefill": True, "prefill": "127.0.0.1:9", "room": "r"}
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.invalid == {1, 2, 3, 4, 5}
    # Parameters that name no prefill, an adapter's prompt of pictures, and no parameters at all: nothing is claimed.
    assert decode.add(request_of("e", PROMPT, {"do_remote_prefill": True}), OTHERS) == 0
    assert decode.add(request_of("f", PROMPT, dict(params, room="s"), mm_features=[object()]), OTHERS) == 0
    assert decode.add(request_of("g", PROMPT, None), OTHERS) == 0


def test_a_prefill_that_was_restarted_refuses_its_old_rooms_at_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    decode, prefill = start("kv_consumer"), start("kv_producer")
    params = prefilled(prefill)
    prefill.close()
    start("kv_producer", listen=params["prefill"])
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.invalid == {1, 2, 3, 4, 5}
    assert "does not have the prompt any more" in caplog.text


def test_blocks_that_no_decode_worker_asks_for_are_free_in_time(start: Start) -> None:
    prefill = start("kv_producer", promise_timeout_s=0.05)
    prefilled(prefill)
    prefill.step_until(lambda: prefill.freed)
    assert prefill.counts == {"sends_unclaimed": 1}


def test_an_instance_may_be_both_ends(start: Start) -> None:
    first, second = start("kv_both"), start("kv_both")
    for here, there in ((first, second), (second, first)):
        params = prefilled(here, f"p{id(here)}")
        there.add(request_of(f"d{id(there)}", PROMPT, params), OTHERS)
        there.step_until(lambda there=there: there.loaded)
        assert there.holds(f"d{id(there)}", PROMPT)
        here.step_until(lambda here=here: here.freed)


def test_tensor_parallel_ranks_hand_over_in_pairs(start: Start, tmp_path: Path) -> None:
    (tmp_path / "journals").mkdir()
    engine = {**ENGINE, "journal": {"path": f"{tmp_path}/journals"}}
    options = {"tensor_parallel": 2, "uri": f"file:{tmp_path}/store?capacity=16MB", "engine": engine}
    prefill, decode = start("kv_producer", tensor_parallel=2), start("kv_consumer", **options)
    params = prefilled(prefill)
    assert len(set(params["prefill"].split(","))) == 2
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    assert decode.counts["restore_tokens_transfer"] == 2 * len(PROMPT)
    prefill.step_until(lambda: prefill.freed)
    decode.compute("d", chunk=100)
    assert decode.finish("d") == (True, None)
    decode.step_until(lambda: decode.freed)
    for worker in decode.workers:
        worker.connector_worker.decodes[0].engine.wait_settled()
    decode.close()
    assert len(list((tmp_path / "journals").iterdir())) == 2
    # After a restart each rank finds its own heads in the storage that both write to.
    decode = start("kv_consumer", **options)
    decode.add(request_of("e", PROMPT, prefilled(prefill, "q")), OTHERS)
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("e", PROMPT)
    assert decode.counts["restore_tokens_l3"] == 2 * 4 * BLOCK


@pytest.mark.parametrize(
    ("listen", "changes", "own"),
    [
        ("10.0.0.1:7000", {}, "10.0.0.1:7000"),
        ("[::1]:7000", {"tensor_parallel_size": 2, "rank": 1}, "[::1]:7001"),
        ("10.0.0.1:7000", {"tensor_parallel_size": 2, "rank": 1, "data_parallel_index": 3}, "10.0.0.1:7007"),
        ("10.0.0.1:0", {"tensor_parallel_size": 2, "rank": 1}, "10.0.0.1:0"),
        (
            "10.0.0.1:7000",
            {"tensor_parallel_size": 2, "rank": 1, "data_parallel_index": 3, "ranks": 4},
            "10.0.0.1:7014",
        ),
    ],
)
def test_each_worker_listens_at_a_port_of_its_own(listen: str, changes: dict[str, Any], own: str) -> None:
    handover = {"listen": listen, "ranks": changes.pop("ranks", None)}
    extra = {"uri": None, "model": None, "host": None, "handover": handover}
    configs = configs_of("", extra=extra, **changes)
    configs[0].kv_transfer_config.kv_role, configs[0].kv_transfer_config.engine_id = "kv_both", "e"
    assert read_handover(*configs).listen == own


def test_a_prompt_of_which_one_rank_loses_its_part_is_computed(start: Start) -> None:
    prefill, decode = start("kv_producer", tensor_parallel=2), start("kv_consumer", tensor_parallel=2)
    params = prefilled(prefill)
    prefill.workers[1].shutdown()
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert (decode.loaded, decode.invalid) == (["d"], {1, 2, 3, 4, 5})
    assert decode.counts["restores_failed"] == 1


UNEQUAL = pytest.mark.parametrize(("of_prefill", "of_decode"), [(2, 1), (1, 2), (4, 1), (2, 4)])


def unequal(start: Start, of_prefill: int, of_decode: int, **options: Any) -> tuple[HandoverVllm, HandoverVllm]:
    """Both ends of a model with 4 heads; `options` are decode's."""
    ranks = max(of_prefill, of_decode)
    return (
        start("kv_producer", tensor_parallel=of_prefill, heads=4 // of_prefill, ranks=ranks),
        start("kv_consumer", tensor_parallel=of_decode, heads=4 // of_decode, ranks=ranks, **options),
    )


@UNEQUAL
def test_ends_of_other_tensor_parallel_sizes_hand_over_their_heads_in_parts(
    start: Start, tmp_path: Path, of_prefill: int, of_decode: int
) -> None:
    uri = f"file:{tmp_path}/store?capacity=16MB"
    prefill, decode = unequal(start, of_prefill, of_decode, uri=uri)
    ranks = max(of_prefill, of_decode)
    decode.add(request_of("d", PROMPT, prefilled(prefill)), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    # No byte is sent twice.
    page_bytes = BLOCK * 2 * DIM * 4 * LAYERS * 4
    assert decode.counts == {"restore_tokens_transfer": ranks * len(PROMPT), "restore_bytes_transfer": 5 * page_bytes}
    prefill.step_until(lambda: prefill.freed)
    assert (prefill.freed, prefill.counts) == (["p"], {"sends_received": ranks})
    decode.compute("d", chunk=100)
    assert decode.finish("d") == (True, None)
    decode.step_until(lambda: decode.freed)
    assert decode.freed == ["d"]
    # What was kept is found again, in host memory and after a restart in storage.
    decode.add(request_of("e", PROMPT, prefilled(prefill, "q")), OTHERS)
    decode.step_until(lambda: "e" in decode.loaded)
    assert decode.holds("e", PROMPT)
    assert decode.counts["restore_tokens_l2"] == ranks * 4 * BLOCK
    for worker in decode.workers:
        for one in worker.connector_worker.decodes:
            one.engine.wait_settled()
    decode.close()
    # An instance of as many ranks finds the same pages.
    decode = start("kv_consumer", tensor_parallel=ranks, heads=4 // ranks, uri=uri)
    decode.add(request_of("f", PROMPT, prefilled(prefill, "r")), OTHERS)
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("f", PROMPT)
    assert decode.counts["restore_tokens_l3"] == ranks * 4 * BLOCK


@UNEQUAL
def test_a_prompt_of_which_one_part_is_lost_or_aborted_is_reported_once(
    start: Start, of_prefill: int, of_decode: int
) -> None:
    prefill, decode = unequal(start, of_prefill, of_decode)
    params, other = prefilled(prefill, "p"), prefilled(prefill, "q")
    last = prefill.workers[-1].connector_worker.prefills[-1]
    last.thread.stop("p", "a test")
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    for _ in range(10):
        decode.step()
    assert (decode.loaded, decode.invalid) == (["d"], {1, 2, 3, 4, 5})
    assert decode.counts["restores_failed"] == 1
    prefill.step_until(lambda: prefill.freed)
    # An abort ends all parts, and vLLM gets its blocks when none of them is written to.
    decode.invalid.clear()
    decode.add(request_of("e", PROMPT, other), OTHERS)
    decode.step()
    decode.finish("e")
    decode.step_until(lambda: len(decode.loaded) == 2)
    for _ in range(10):
        decode.step()
    assert (decode.loaded, decode.invalid) == (["d", "e"], set())
    prefill.step_until(lambda: len(prefill.freed) == 2)


def test_heads_that_cannot_be_divided_are_refused_by_name(start: Start) -> None:
    with pytest.raises(InvalidConfig, match="have 3 heads on this rank, which cannot be handed over in 2 parts"):
        start("kv_consumer", heads=3, ranks=2)
    with pytest.raises(InvalidConfig, match="in 2 parts, with heads outside of tokens"):
        start("kv_consumer", heads=4, ranks=2, is_head_first=False)
    with pytest.raises(InvalidConfig, match="ranks must be a multiple of the tensor-parallel size 2, not 3"):
        start("kv_consumer", tensor_parallel=2, ranks=3)


@pytest.mark.parametrize(("of_prefill", "of_decode"), [(2, 1), (1, 2)])
def test_other_numbers_of_ranks_are_refused(
    start: Start, caplog: pytest.LogCaptureFixture, of_prefill: int, of_decode: int
) -> None:
    prefill, decode = start("kv_producer", tensor_parallel=of_prefill), start("kv_consumer", tensor_parallel=of_decode)
    assert decode.add(request_of("d", PROMPT, prefilled(prefill)), [1, 2, 3, 4, 5]) == 0
    assert f"prefill hands over in {of_prefill} ranks and decode in {of_decode}:" in caplog.text
    decode.step()
    assert (decode.loaded, decode.invalid, decode.counts) == ([], set(), {"restores_declined": 1})
    # All ranks of prefill release the blocks at once: it would hold them for a minute.
    prefill.step_until(lambda: prefill.freed)
    assert prefill.counts == {"sends_unclaimed": of_prefill}


def test_a_prompt_that_decode_declines_before_prefill_has_computed_it_is_not_held(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    address = prefill.address
    params = {"do_remote_prefill": True, "prefill": address, "room": "chosen"}
    # Logprobs of the prompt need all of its tokens to be computed.
    assert decode.add(request_of("d", PROMPT, params, skip_reading_prefix_cache=True), [1, 2, 3, 4, 5]) == 0
    decode.step()
    thread = prefill.worker.connector_worker.prefills[0].thread
    until_s = time.monotonic() + LIMIT_S
    while not thread.statistics()["rooms_declined"]:
        assert time.monotonic() < until_s, "prefill did not hear of it"
    prefill.add(to_prefill(room="chosen"), PLACES)
    prefill.compute("p", chunk=BLOCK)
    assert prefill.finish("p")[0]
    prefill.step_until(lambda: prefill.freed)
    assert prefill.counts == {"sends_unclaimed": 1}
    # It is declined once; nothing of it is left to be declined at its end.
    decode.compute("d", chunk=100)
    decode.finish("d")
    decode.step()
    assert decode.counts["restores_declined"] == 1


def test_what_a_step_computes_sooner_is_not_asked_of_prefill(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer", recompute_threshold=2 * BLOCK + 2)
    # Two blocks are vLLM's own, so two are missing, and two tokens.
    assert decode.add(request_of("d", PROMPT, prefilled(prefill)), PLACES, computed=2 * BLOCK) == 0
    decode.step()
    prefill.step_until(lambda: prefill.freed)
    assert (prefill.counts, decode.counts) == ({"sends_unclaimed": 1}, {"restores_short": 1})
    # One block more is missing: prefill sends it all.
    more = prefilled(prefill, "q")
    assert decode.add(request_of("e", PROMPT, more), OTHERS, computed=BLOCK) == len(PROMPT) - BLOCK
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("e", PROMPT, first=BLOCK)
    assert decode.counts["restores_short"] == 1


def test_a_prompt_whose_client_leaves_before_it_was_asked_for_is_declined(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    first, other = prefilled(prefill, "p"), prefilled(prefill, "q")
    decode.add(request_of("d", PROMPT, first), [1, 2, 3, 4, 5])
    assert decode.add(request_of("e", PROMPT, other), OTHERS) is None
    assert decode.finish("e") == (False, None)
    decode.step_until(lambda: decode.loaded)
    prefill.step_until(lambda: len(prefill.freed) == 2)
    assert prefill.counts == {"sends_received": 1, "sends_unclaimed": 1}
    assert decode.counts["restores_declined"] == 1
    # A client that leaves later is no reason to decline.
    decode.compute("d", chunk=100)
    decode.finish("d")
    decode.step_until(lambda: decode.freed)
    assert decode.counts["restores_declined"] == 1


def test_a_decline_that_does_not_reach_prefill_harms_nothing(start: Start) -> None:
    decode = start("kv_consumer")
    for name, prefill in (("d", "127.0.0.1:9"), ("e", "127.0.0.1:8"), ("f", "127.0.0.1:9,127.0.0.1:10")):
        params = {"do_remote_prefill": True, "prefill": prefill, "room": name}
        assert decode.add(request_of(name, PROMPT, params, skip_reading_prefix_cache=True), PLACES) == 0
    engine = decode.worker.connector_worker.decodes[0].engine
    decode.step_until(lambda: engine.statistics()["receiver"]["declines_unsent"] == 4)
    assert decode.counts == {"restores_declined": 3}


def test_blocks_in_another_order_are_refused(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer", is_head_first=False)
    params = prefilled(prefill)
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.invalid == {1, 2, 3, 4, 5}
    assert "vLLM blocks of FLASH_ATTN" in caplog.text
    prefill.step_until(lambda: prefill.freed)
    assert prefill.counts == {"sends_unclaimed": 1}


def test_a_prompt_without_a_prefill_gets_what_host_memory_and_storage_have(start: Start, tmp_path: Path) -> None:
    settings = {"uri": f"file:{tmp_path}/store?capacity=16MB", "lookup_timeout_s": LIMIT_S}
    decode = start("kv_consumer", **settings)
    assert decode.add(request_of("own", PROMPT, None), PLACES) is None
    decode.step_until(lambda: decode.ask("own", PLACES) == 0)
    decode.compute("own", chunk=100)
    assert decode.finish("own") == (True, None)
    decode.step_until(lambda: decode.freed)
    longer = [*PROMPT[: 4 * BLOCK], *range(500, 500 + 2 * BLOCK)]

    def is_restored_from(source: str, decode: HandoverVllm) -> None:
        decode.overwrite(OTHERS)
        # The first block is vLLM's own hit.
        assert decode.add(request_of("again", longer, None), OTHERS[:4], computed=BLOCK) is None
        decode.step_until(lambda: decode.ask("again", OTHERS[:4], computed=BLOCK))
        decode.step_until(lambda: "again" in decode.loaded)
        assert decode.holds("again", longer[: 4 * BLOCK], first=BLOCK)
        assert not decode.invalid
        assert decode.counts[f"restore_tokens_{source}"] == 3 * BLOCK
        # It is claimed once.
        assert decode.ask("again", OTHERS[:4], computed=0) == 0

    is_restored_from("l2", decode)
    decode.worker.connector_worker.decodes[0].engine.wait_settled()
    decode.close()
    is_restored_from("l3", start("kv_consumer", **settings))


def test_a_prompt_without_a_prefill_waits_for_its_look_up_no_longer_than_the_limit(start: Start) -> None:
    decode = start("kv_consumer", lookup_timeout_s=0.2)
    assert decode.add(request_of("r", PROMPT, None), PLACES) is None
    # No worker answers: no step is run.
    until_s = time.monotonic() + LIMIT_S
    while (answer := decode.ask("r", PLACES)) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert answer == 0


@pytest.mark.parametrize("case", ["short", "new", "logprobs", "pictures"])
def test_prompts_that_a_restore_would_not_serve_are_not_looked_up(start: Start, case: str) -> None:
    decode = start("kv_consumer", lookup_timeout_s=LIMIT_S, recompute_threshold=64 if case == "short" else 0)
    changes = {"logprobs": {"skip_reading_prefix_cache": True}, "pictures": {"mm_features": [object()]}}.get(case, {})
    request = request_of("r", PROMPT[:BLOCK] if case == "new" else PROMPT, None, **changes)
    assert decode.add(request, PLACES) == 0


@pytest.mark.parametrize(
    ("handover", "changes", "words"),
    [
        ({"listen": "127.0.0.1"}, {}, "listen"),
        ({"listen": "127.0.0.1:0", "dials": ["prefill"]}, {}, "dials: 'prefill' is no address"),
        ({"listen": "127.0.0.1:0", "tls_key": "k.pem"}, {}, "tls_key is given without"),
        ({}, {}, 'needs "listen"'),
        ({"listen": "127.0.0.1:0", "uri": "memory:"}, {}, "memory: is local to one process"),
        ({"listen": "127.0.0.1:0", "host": "much"}, {}, "host must be a size"),
        ({"listen": "127.0.0.1:0", "lease_s": 0}, {}, "lease_s"),
        ({"listen": "127.0.0.1:0", "lese_s": 1}, {}, "lese_s"),
        ({"listen": "127.0.0.1:0", "engine": {"bigram_keys": True}}, {}, "bigram_keys"),
        ({"listen": "127.0.0.1:0", "engine": {"keep": True}}, {}, "keep"),
        (
            {"listen": "127.0.0.1:0"},
            {"further": [FullAttentionSpec()]},
            "in groups of FullAttentionSpec, FullAttentionSpec cannot be handed over: exactly one",
        ),
        ({"listen": "127.0.0.1:0"}, {"spec": SlidingWindowSpec()}, "in groups of SlidingWindowSpec cannot .*: exactly"),
        ({"listen": "127.0.0.1:0"}, {"has_kv": False}, "in groups of nothing cannot"),
        ({"listen": "127.0.0.1:0"}, {"further": [SimpleNamespace()]}, "KV of SimpleNamespace cannot be handed over"),
        (
            {"listen": "127.0.0.1:0"},
            {"further": [SlidingWindowSpec(block_size=16)]},
            "windows with blocks of 16 tokens beside full KV with blocks of 8",
        ),
        ({"listen": "127.0.0.1:65535"}, {"tensor_parallel_size": 2}, "port 65536"),
        (
            {"listen": "127.0.0.1:0", "engine": {"journal": {"path": "/no/such"}}},
            {"data_parallel_size": 2},
            "journal.path: /no/such must be a directory",
        ),
        ({"listen": "127.0.0.1:0"}, {"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"listen": "127.0.0.1:0"}, {"extra": {"uri": "file:/x"}}, "'uri' belongs to the storage role"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_by_name(
    connector: ModuleType, handover: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    extra = {"uri": None, "model": None, "host": None, **changes.pop("extra", {}), "handover": handover}
    configs = configs_of("", extra=extra, **changes)
    configs[0].kv_transfer_config.kv_role, configs[0].kv_transfer_config.engine_id = "kv_both", "e"
    with pytest.raises(InvalidConfig, match=words):
        connector.TidekvConnector(configs[0], KVConnectorRole.SCHEDULER, configs[1])


def test_a_decode_worker_without_prefills_to_dial_is_refused() -> None:
    extra = {"uri": None, "model": None, "host": None, "handover": {"model": "m"}}
    configs = configs_of("", extra=extra, is_kv_producer=False, is_kv_consumer=True)
    configs[0].kv_transfer_config.kv_role, configs[0].kv_transfer_config.engine_id = "kv_consumer", "e"
    with pytest.raises(InvalidConfig, match='needs "dials"'):
        read_handover(*configs)


@pytest.mark.parametrize(
    "prefill",
    ["127.0.0.1:9", "203.0.113.9:7000", "", "no address", ",".join(["127.0.0.1:7000"] * 100_000), "127.0.0.1:7000\n"],
    ids=["another port", "another host", "empty", "no address", "many", "a line more"],
)
def test_a_client_does_not_choose_whom_decode_dials(start: Start, prefill: str) -> None:
    decode = start("kv_consumer", dials=["127.0.0.1:7000"])
    request = request_of("d", PROMPT, {"do_remote_prefill": True, "prefill": prefill, "room": "r"})
    assert decode.add(request, [1, 2, 3, 4, 5]) == 0
    assert decode.finish("d") == (False, None)
    # Neither a restore nor a decline: nothing is sent there.
    assert decode.scheduler.connector_scheduler.decode.take_jobs().is_empty
    # One that is aborted before vLLM has asked for it.
    decode.scheduler.on_new_request(early := request_of("f", PROMPT, request.kv_transfer_params))
    assert decode.scheduler.request_finished_all_groups(early, ([],)) == (False, None)
    assert decode.scheduler.connector_scheduler.decode.take_jobs().is_empty
    decode.add(request_of("e", PROMPT, request.kv_transfer_params), [1, 2, 3, 4, 5])
    decode.finish("e")
    assert decode.scheduler.connector_scheduler.decode.take_jobs().is_empty


def test_the_links_of_vllm_workers_can_be_under_tls(start: Start) -> None:
    certificate = str(Path(__file__).parents[1] / "transports" / "localhost.pem")
    prefill = start("kv_producer", tls_certificate=certificate, tls_authority=certificate)
    decode = start("kv_consumer", tls_certificate=certificate, tls_authority=certificate, dials=["127.0.0.1:*"])
    plain = start("kv_consumer")
    params = prefilled(prefill)
    plain.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    plain.step_until(lambda: plain.loaded)
    assert plain.invalid
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    with pytest.raises(InvalidConfig, match=r"tls_certificate /missing.* cannot be used"):
        start("kv_producer", tls_certificate="/missing")


def test_a_secret_comes_from_a_file(start: Start, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret\n")
    (tmp_path / "other").write_text("other\n")
    prefill = start("kv_producer", secret_file=f"{tmp_path}/secret")
    decode, stranger = (
        start("kv_consumer", secret_file=f"{tmp_path}/secret"),
        start("kv_consumer", secret_file=f"{tmp_path}/other"),
    )
    params = prefilled(prefill)
    stranger.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    stranger.step_until(lambda: stranger.loaded)
    assert stranger.invalid
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    with pytest.raises(InvalidConfig, match=r"secret_file.*missing"):
        start("kv_consumer", secret_file=f"{tmp_path}/missing")


def test_the_page_names_every_option_and_count() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "vllm-handover.md").read_text()
    for name in (*HandoverSettings.__struct_fields__, *HANDOVER_COUNTS):
        assert f"`{name}`" in page, name
