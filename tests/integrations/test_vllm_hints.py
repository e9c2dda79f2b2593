"""KV hints and priorities of vLLM's requests, as the decode engine gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any  # vLLM's objects are not typed here.

import msgspec
import pytest

from benchmarks.ports import free_address
from tests.support.vllm_contract import BLOCK, configs_of, upon_contract
from tests.support.vllm_handover import ENGINE, HandoverVllm, request_of, started_vllms
from tests.support.waits import LIMIT_S
from tidekv.engine.integrations.vllm.handover.hints import fetches_at_rank, fetches_of, hints_of, tokens_at_peer
from tidekv.engine.integrations.vllm.handover.jobs import HANDOVER_COUNTS
from tidekv.engine.integrations.vllm.handover.scheduler import DecodeScheduler, LookUps
from tidekv.engine.integrations.vllm.handover.settings import read_handover
from tidekv.states.errors import InvalidConfig
from tidekv.transports.control.addresses import Dials

PROMPT = [*range(100, 100 + 4 * BLOCK), 1, 2]
PLACES = [7, 3, 11, 2, 5]
OTHERS = [12, 13, 14, 15, 16, 17]


class KvHintAction(msgspec.Struct, frozen=True):
    """As vLLM's `vllm/v1/kv_hints/protocol.py` has it."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class KvHintsEnvelope(msgspec.Struct, frozen=True):
    """As above."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


def envelope(*kinds: str, **payload: object) -> KvHintsEnvelope:
    return KvHintsEnvelope("0.1", "m", [KvHintAction(f"a-{kind}", kind, "1.0", payload) for kind in kinds])


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[HandoverVllm]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with upon_contract() as module:
        vllm = HandoverVllm(module, "kv_consumer")
        yield vllm
        vllm.close()


def counted(vllm: HandoverVllm) -> dict[tuple[str, str], int]:
    """Actions that the engine has taken, by type and outcome."""
    engine = vllm.worker.connector_worker.decodes[0].engine
    return engine.call(lambda one: dict(one._hints.counts))


@pytest.mark.nixl
def test_a_pin_of_a_requests_own_prompt_holds_its_pages_once_they_are_in_host_memory(decode: HandoverVllm) -> None:
    decode.add(request_of("r", PROMPT, None, kv_hints=envelope("kv.pin", ttl_ms=60_000)), PLACES)
    decode.compute("r", chunk=100)
    assert counted(decode) == {}, "the pages are not there yet"
    assert decode.finish("r")[0]
    decode.step_until(lambda: counted(decode))
    assert counted(decode) == {("kv.pin", "accepted"): 1}
    assert decode.worker.connector_worker.decodes[0].engine.statistics()["core"]["hint_pinned_pages"] == 4


@pytest.mark.nixl
@pytest.mark.parametrize("target", [{}, {"token_ids": PROMPT}], ids=["its own prompt", "a named prompt"])
def test_a_prefetch_begins_when_its_request_arrives(decode: HandoverVllm, target: dict[str, object]) -> None:
    """Also in an envelope that came by HTTP, where vLLM's own front end has no field for it."""
    hints = msgspec.to_builtins(envelope("kv.prefetch", **target))
    decode.add(request_of("r", PROMPT, {"kv_hints": hints}), PLACES)
    decode.step()
    decode.step_until(lambda: counted(decode))
    assert counted(decode) == {("kv.prefetch", "missing"): 1}


@pytest.mark.nixl
@pytest.mark.parametrize("hints", ["pin it", {"actions": [1]}, {"actions": "all"}, {"protocol_version": "0.1"}])
def test_what_is_no_envelope_changes_nothing(decode: HandoverVllm, hints: object) -> None:
    assert decode.add(request_of("r", PROMPT, {"kv_hints": hints}), PLACES) == 0
    decode.compute("r", chunk=100)
    assert decode.finish("r")[0]
    decode.step_until(lambda: decode.freed)
    assert counted(decode) == {}


def test_actions_are_parted_by_when_their_pages_are_there() -> None:
    kinds = ("kv.prefetch", "kv.pin", "kv.unpin", "kv.retain", "kv.demote", "kv.fetch")
    now, late = hints_of(request_of("r", PROMPT, None, kv_hints=envelope(*kinds)), "adapter")
    assert now is not None and late is not None
    assert [action["action_type"] for action in now["actions"]] == ["kv.prefetch", "kv.unpin"]
    assert [action["action_type"] for action in late["actions"]] == ["kv.pin", "kv.retain", "kv.demote"]
    assert {(*action["payload"]["token_ids"],) for action in now["actions"]} == {(*PROMPT,)}
    assert {action["payload"]["namespace"] for action in late["actions"]} == {"adapter"}
    assert hints_of(request_of("r", PROMPT, None), "") == (None, None)


def test_peers_that_a_request_names_go_with_its_restore() -> None:
    """In the forms of Dynamo's router and of vLLM's own p2p tier; what is malformed is left out."""
    fetch = envelope("kv.fetch", source_control_endpoint="tcp://10.0.0.6:7100", block_hashes=[1, 2])
    source = {"kv_request_id": "x", "remote_host": "10.0.0.7", "remote_port": 7777}
    named = fetches_of(request_of("r", PROMPT, {"remote_kv_source": source}, kv_hints=fetch))
    assert named is not None
    endpoints = [action["payload"]["source_control_endpoint"] for action in named["actions"]]
    assert endpoints == ["tcp://10.0.0.6:7100", "10.0.0.7:7777"]
    (action,) = (fetches_of(request_of("r", PROMPT, {"remote_kv_source": {**source, "remote_host": "::1"}})) or {})[
        "actions"
    ]
    assert action["payload"] == {"source_control_endpoint": "[::1]:7777"}
    now, late = hints_of(request_of("r", PROMPT, None, kv_hints=fetch), "")
    assert (now, late) == (None, None), "they are no hints of their own"
    for wrong in ({"kv_hints": "pin it"}, {"kv_hints": {"actions": [1]}}, {"remote_kv_source": 3}, {}, None):
        assert fetches_of(request_of("r", PROMPT, wrong)) is None


def engine(**peers: object) -> dict[str, object]:
    """Options of an engine whose peers are waited for as long as a busy machine takes."""
    storage = {**ENGINE["storage"], "prefetch": "timeout", "prefetch_threshold_tokens": 1}
    return {
        **ENGINE,
        "storage": storage,
        "cache_peers": {"enabled": True, "wait_s": LIMIT_S, "wait_share": 0.9, **peers},
    }


def prefilled(prefill: Any, name: str) -> dict[str, Any]:
    """Have prefill compute PROMPT; return what its answer names for decode."""
    assert prefill.add(request_of(name, PROMPT, {"do_remote_decode": True}), PLACES) == 0
    answer: dict[str, Any] = prefill.answer(name, chunk=100)
    return answer


def serve(decode: Any, answer: dict[str, Any]) -> None:
    """Serve PROMPT at a decode worker, to the end of the request."""
    decode.add(request_of("a", PROMPT, answer), PLACES)
    decode.step_until(lambda: decode.loaded)
    decode.compute("a", chunk=100)
    decode.finish("a")
    decode.step_until(lambda: decode.freed)


@pytest.mark.nixl
@pytest.mark.parametrize("form", ["kv.fetch", "remote_kv_source", "ask"])
def test_decode_restores_from_the_peer_that_a_request_or_the_options_name(
    form: str, connector: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started_vllms(connector, monkeypatch) as start:
        prefill, first = start("kv_producer"), start("kv_consumer", engine=engine(listen="127.0.0.1:0"))
        serve(first, prefilled(prefill, "p"))
        address = str(first.worker.connector_worker.decodes[0].engine.call(lambda one: one.peer_address))
        host, _, port = address.rpartition(":")
        named: dict[str, Any] = {
            "kv.fetch": {"kv_hints": msgspec.to_builtins(envelope("kv.fetch", source_control_endpoint=address))},
            "remote_kv_source": {"remote_kv_source": {"remote_host": host, "remote_port": int(port)}},
            "ask": {},
        }[form]
        known = {"ask": [address]} if form == "ask" else {"allow": ["127.0.0.1:*"]}
        second = start("kv_consumer", engine=engine(**known))
        second.add(request_of("b", PROMPT, prefilled(prefill, "q") | named), PLACES)
        second.step_until(lambda: second.loaded)
        assert second.holds("b", PROMPT)
        assert (second.counts["restore_tokens_peer"], second.counts["restore_tokens_transfer"]) == (4 * BLOCK, 2)
        assert set(second.counts) <= set(HANDOVER_COUNTS)
        prefill.step_until(lambda: len(prefill.freed) == 2)


@pytest.mark.nixl
@pytest.mark.parametrize("lost", [False, True])
def test_each_rank_of_a_vllm_restores_its_heads_from_the_rank_of_the_peer_at_its_place(
    lost: bool, connector: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started_vllms(connector, monkeypatch) as start:
        prefill = start("kv_producer", tensor_parallel=2)
        first = start("kv_consumer", tensor_parallel=2, engine=engine(listen="127.0.0.1:0"))
        serve(first, prefilled(prefill, "p"))
        engines = [worker.connector_worker.decodes[0].engine for worker in first.workers]
        address = ",".join(str(one.call(lambda one: one.peer_address)) for one in engines)
        if lost:
            # Ranks are engines of their own, so one may have less: prefill sends it the rest.
            engines[1].wait_settled()
            engines[1].flush(("l2",))
        second = start("kv_consumer", tensor_parallel=2, engine=engine(allow=["127.0.0.1:*"]))
        named = {"kv_hints": msgspec.to_builtins(envelope("kv.fetch", source_control_endpoint=address))}
        second.add(request_of("b", PROMPT, prefilled(prefill, "q") | named), PLACES)
        second.step_until(lambda: second.loaded)
        assert second.holds("b", PROMPT)
        from_peers = (1 if lost else 2) * 4 * BLOCK
        assert second.counts["restore_tokens_peer"] == from_peers
        assert second.counts["restore_tokens_transfer"] == 2 * len(PROMPT) - from_peers
        prefill.step_until(lambda: len(prefill.freed) == 2)


@pytest.mark.parametrize("ends", ["whole", "flushed", "killed", "not allowed"])
def test_prefill_reads_the_turn_before_from_decode_and_computes_the_rest(
    ends: str, connector: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started_vllms(connector, monkeypatch) as start:
        listen = free_address()
        allow = ["127.0.0.1:1"] if ends == "not allowed" else ["127.0.0.1:*"]
        prefill = start("kv_both", engine=engine(allow=allow))
        decode = start("kv_consumer", engine=engine(listen=listen))
        assert prefill.add(request_of("p", PROMPT, {"do_remote_decode": True}), PLACES) == 0
        decode.add(request_of("d", PROMPT, prefill.answer("p", chunk=100)), PLACES)
        decode.step_until(lambda: decode.loaded)
        decode.compute("d", chunk=100)
        held, named = decode.finish("d")
        host, _, port = listen.rpartition(":")
        source = {"remote_host": host, "remote_port": int(port), "tokens": 4 * BLOCK}
        assert (held, named) == (True, {"remote_kv_source": source})
        decode.step_until(lambda: decode.freed)
        prefill.step_until(lambda: prefill.freed)
        at_decode = decode.worker.connector_worker.decodes[0].engine
        at_decode.wait_settled()
        if ends == "flushed":
            at_decode.flush(("l2",))
        elif ends == "killed":
            decode.close()

        # The next turn: prefill has nothing of it any more, its first block was never in its host memory.
        turn = [*PROMPT[: 4 * BLOCK], *range(500, 500 + BLOCK + 3)]
        prefill.overwrite(PLACES)
        params = {"do_remote_decode": True, **named}
        assert prefill.add(request_of("q", turn, params), OTHERS[:4]) == 4 * BLOCK
        prefill.step_until(lambda: "q" in prefill.loaded)
        prefill.tables["q"] = OTHERS
        had = 4 * BLOCK if ends == "whole" else 0
        assert prefill.counts.get("restore_tokens_peer", 0) == had
        assert prefill.invalid == (set() if had else set(OTHERS[:4]))
        prefill.requests["q"].num_computed_tokens = had
        prefill.step({"q": len(turn) - had})
        assert prefill.holds("q", turn)
        held, answer = prefill.finish("q")
        assert held and answer is not None
        # What decode gets is right, computed by either side.
        second = start("kv_consumer", engine=engine())
        second.add(request_of("e", turn, answer), [*PLACES, 9])
        second.step_until(lambda: second.loaded)
        assert second.holds("e", turn)
        prefill.step_until(lambda: len(prefill.freed) == 2)
        # Nothing of a request that prefill has handed over is remembered.
        scheduler = prefill.scheduler.connector_scheduler.decode
        assert not scheduler._claimed and not scheduler._computed and not scheduler._lookups._answers


def test_each_rank_of_prefill_reads_the_turn_before_from_the_rank_of_decode_at_its_place(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started_vllms(connector, monkeypatch) as start:
        prefill = start("kv_both", tensor_parallel=2, engine=engine(allow=["127.0.0.1:*"]))
        decode = start("kv_consumer", tensor_parallel=2, engine=engine(listen="127.0.0.1:0"))
        assert prefill.add(request_of("p", PROMPT, {"do_remote_decode": True}), PLACES) == 0
        decode.add(request_of("d", PROMPT, prefill.answer("p", chunk=100)), PLACES)
        decode.step_until(lambda: decode.loaded)
        decode.compute("d", chunk=100)
        decode.finish("d")
        decode.step_until(lambda: decode.freed)
        prefill.step_until(lambda: prefill.freed)
        engines = [worker.connector_worker.decodes[0].engine for worker in decode.workers]
        for one in engines:
            one.wait_settled()
        address = ",".join(str(one.call(lambda one: one.peer_address)) for one in engines)
        turn = [*PROMPT[: 4 * BLOCK], *range(500, 500 + BLOCK + 3)]
        prefill.overwrite(PLACES)
        params = {
            "do_remote_decode": True,
            "remote_kv_source": {"tokens": 4 * BLOCK},
            "kv_hints": msgspec.to_builtins(envelope("kv.fetch", source_control_endpoint=address)),
        }
        assert prefill.add(request_of("q", turn, params), OTHERS[:4]) == 4 * BLOCK
        prefill.step_until(lambda: "q" in prefill.loaded)
        assert prefill.counts["restore_tokens_peer"] == 2 * 4 * BLOCK and not prefill.invalid
        prefill.tables["q"] = OTHERS
        prefill.requests["q"].num_computed_tokens = 4 * BLOCK
        prefill.step({"q": len(turn) - 4 * BLOCK})
        assert prefill.holds("q", turn)


def test_only_a_number_of_tokens_at_a_peer_that_may_be_asked_is_claimed() -> None:
    for tokens, found in ((48, 48), (0, 0), (-3, 0), ("48", 0), (None, 0)):
        request = request_of("r", PROMPT, {"remote_kv_source": {"remote_host": "a", "tokens": tokens}})
        assert tokens_at_peer(request) == found
        assert LookUps(1, 0.0, peers=True).at_peer(request) == found
        assert LookUps(1, 0.0).at_peer(request) == 0
    assert tokens_at_peer(request_of("r", PROMPT, {"remote_kv_source": 3})) == 0
    assert tokens_at_peer(request_of("r", PROMPT, None)) == 0


def test_each_rank_of_a_vllm_has_addresses_of_its_own_for_peers() -> None:
    def configs(peers: Sequence[str] = (), **more: object) -> Any:
        handover = {
            "dials": ["127.0.0.1:7000"],
            "engine": {"cache_peers": {"enabled": True, "listen": "127.0.0.1:7100", "ask": list(peers)}},
        }
        extra = {"uri": None, "model": None, "host": None, "handover": handover}
        made = configs_of("", extra=extra, is_kv_producer=False, is_kv_consumer=True, **more)
        made[0].kv_transfer_config.kv_role, made[0].kv_transfer_config.engine_id = "kv_consumer", "vllm"
        return made

    read = read_handover(*configs())
    assert read.cache_peers.listen == "127.0.0.1:7100"
    assert replace(read, replica=2).cache_peers.listen == "127.0.0.1:7102"
    peers = ["10.0.0.5:7100", "10.0.0.6:7100,10.0.0.6:7200"]
    of_two = [read_handover(*configs(peers=peers, tensor_parallel_size=2, rank=rank)) for rank in range(2)]
    assert [one.cache_peers.listen for one in of_two] == ["127.0.0.1:7100", "127.0.0.1:7101"]
    assert of_two[1].cache_peers.ask == ("10.0.0.5:7101", "10.0.0.6:7200")
    with pytest.raises(InvalidConfig, match=r"handover.engine.cache_peers.ask: peer names the addresses of 2 ranks"):
        read_handover(*configs(peers=peers, tensor_parallel_size=3))


def test_each_rank_asks_the_rank_of_a_peer_at_its_place() -> None:
    fetch = envelope("kv.fetch", source_control_endpoint="tcp://10.0.0.6:7100")
    named = fetches_of(
        request_of("r", PROMPT, {"remote_kv_source": {"remote_host": "::1", "remote_port": 7}}, kv_hints=fetch)
    )
    assert named is not None

    def endpoints(rank: int, ranks: int) -> list[str]:
        own = fetches_at_rank(named, rank, ranks)
        assert own is not None
        return [action["payload"]["source_control_endpoint"] for action in own["actions"]]  # type: ignore[index, attr-defined]

    assert endpoints(0, 1) == ["tcp://10.0.0.6:7100", "[::1]:7"]
    assert endpoints(1, 2) == ["10.0.0.6:7101", "[::1]:8"]
    assert fetches_at_rank(None, 1, 2) is None
    # The engine of each rank rejects it, and counts it.
    for wrong in ({"source_control_endpoint": "a:1,b:1,c:1"}, {"source_control_endpoint": 3}, {}, None):
        given = {"actions": [{"action_type": "kv.fetch", "payload": wrong}]}
        assert fetches_at_rank(given, 1, 2) == given


@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (5, -5), (-3, 3), (10**9, -1_000_000)])
def test_a_lower_number_of_vllm_is_a_higher_priority(theirs: int, ours: int) -> None:
    scheduler = DecodeScheduler(BLOCK, Dials.parse(["127.0.0.1:*"]))
    params = {"do_remote_prefill": True, "prefill": "127.0.0.1:7000", "room": "r"}
    request = request_of("r", PROMPT, params, priority=theirs)
    assert scheduler.matched(request, 0) == len(PROMPT)
    scheduler.allocated(request, [PLACES], len(PROMPT))
    assert [job.priority for job in scheduler.take_jobs().restores] == [ours]


def test_a_prompt_is_found_as_far_as_all_ranks_have_it() -> None:
    now_s = 0.0
    lookups = LookUps(2, 1.0, clock=lambda: now_s)
    assert lookups.found("r") == 0, "without a look-up"
    lookups.ask("r")
    lookups.answered({"r": [48], "of another": [16]})
    assert lookups.found("r") is None
    lookups.answered({"r": [32]})
    assert lookups.found("r") == 32
    lookups.ask("late")
    lookups.answered({"late": [48]})
    now_s = 1.0
    assert lookups.found("late") == 0
    for name in ("r", "late"):
        lookups.forget(name)
    assert not lookups._answers and not lookups._asked_at_s
