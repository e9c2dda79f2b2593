"""KV hints and priorities of vLLM's requests, as the decode engine gets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any  # vLLM's objects are not typed here.

import msgspec
import pytest

from tests.support.vllm_contract import BLOCK, upon_contract
from tests.support.vllm_handover import HandoverVllm, request_of
from tidekv.engine.integrations.vllm.handover.hints import hints_of
from tidekv.engine.integrations.vllm.handover.scheduler import DecodeScheduler
from tidekv.transports.control.addresses import Dials

PROMPT = [*range(100, 100 + 4 * BLOCK), 1, 2]
PLACES = [7, 3, 11, 2, 5]


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
    assert [action["action_type"] for action in now["actions"]] == ["kv.prefetch", "kv.unpin", "kv.fetch"]
    assert [action["action_type"] for action in late["actions"]] == ["kv.pin", "kv.retain", "kv.demote"]
    assert {(*action["payload"]["token_ids"],) for action in now["actions"]} == {(*PROMPT,)}
    assert {action["payload"]["namespace"] for action in late["actions"]} == {"adapter"}
    assert hints_of(request_of("r", PROMPT, None), "") == (None, None)


@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (5, -5), (-3, 3), (10**9, -1_000_000)])
def test_a_lower_number_of_vllm_is_a_higher_priority(theirs: int, ours: int) -> None:
    scheduler = DecodeScheduler(BLOCK, Dials.parse(["127.0.0.1:*"]))
    params = {"do_remote_prefill": True, "prefill": "127.0.0.1:7000", "room": "r"}
    request = request_of("r", PROMPT, params, priority=theirs)
    assert scheduler.matched(request, 0) == len(PROMPT)
    scheduler.allocated(request, [PLACES], len(PROMPT))
    assert [job.priority for job in scheduler.take_jobs().restores] == [ours]
