"""KV hints of an orchestrator: the published envelope, what it does, and that it changes no answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import engine_config
from tests.support.inside import core_of, runtime_of
from tests.support.kv_hints import envelope
from tests.support.loopback_pair import PAGE, Pair, loopback_pair
from tests.support.waits import LIMIT_S
from tidekv.backends.keys.chain import page_digests
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.decode.hints import SESSIONS_MAX, Sessions
from tidekv.engine.kv_events.messages import hash_of
from tidekv.states.errors import InvalidRequest

PROMPT = list(range(4 * PAGE))


async def outcome(pair: Pair, kind: str, version: str = "1.0", **payload: object) -> tuple[str, int]:
    """Send one action; returns its outcome, and the tokens that it concerns."""
    (found,) = await pair.engine.hint(envelope(kind, version, **payload))
    return found.outcome, found.tokens


async def test_a_prefetched_prompt_is_ready_from_host_memory(tmp_path: Path) -> None:
    storage = open_storage(f"file:{tmp_path}?capacity=64MB")
    async with loopback_pair(engine_config(), storage=storage) as pair:
        await pair.serve(PROMPT)
        await pair.engine.flush()
        assert await outcome(pair, "kv.prefetch", token_ids=PROMPT) == ("accepted", 4 * PAGE)
        await pair.engine.wait_settled()
        assert pair.engine.probe_prefix(PROMPT) == {"l1": 0, "l2": 4 * PAGE}
        sources = await pair.serve(PROMPT)
        assert (sources["l2"], sources["l3"]) == (4 * PAGE, 0)


async def test_a_pinned_prompt_survives_ten_pools_of_other_traffic_and_not_its_time() -> None:
    async with loopback_pair(engine_config(), device_pages=16, host_pages=24) as pair:
        await pair.serve(PROMPT)
        assert await outcome(pair, "kv.pin", token_ids=PROMPT, ttl_ms=3_600_000) == ("accepted", 4 * PAGE)
        for number in range(10 * 24 // 6):
            await pair.serve(range(1000 * number + 100, 1000 * number + 100 + 6 * PAGE))
        assert sum(pair.engine.probe_prefix(PROMPT).values()) == 4 * PAGE
        assert await outcome(pair, "kv.unpin", token_ids=PROMPT) == ("accepted", 4 * PAGE)
        assert await outcome(pair, "kv.pin", token_ids=PROMPT, ttl_ms=1) == ("accepted", 4 * PAGE)
        async with asyncio.timeout(LIMIT_S):
            while core_of(pair.engine).hints.pins:
                await outcome(pair, "kv.retain", token_ids=[1] * PAGE)
        for number in range(2 * 24 // 6):
            await pair.serve(range(2000 * number + 7, 2000 * number + 7 + 6 * PAGE))
        assert pair.engine.probe_prefix(PROMPT) == {"l1": 0, "l2": 0}


async def test_pins_have_a_budget_and_a_flush_ends_them() -> None:
    config = engine_config(pin_share=0.25)
    async with loopback_pair(config, host_pages=16) as pair:
        await pair.serve(range(6 * PAGE))
        assert await outcome(pair, "kv.pin", token_ids=list(range(6 * PAGE)), ttl_ms=60_000) == ("clipped", 4 * PAGE)
        assert await outcome(pair, "kv.pin", token_ids=list(range(PAGE)), ttl_ms=60_000) == ("rejected", 0)
        dropped = await pair.engine.flush()
        assert dropped["dropped"]["l2"] == 6
        assert core_of(pair.engine).hints.pinned_pages == 0
        await pair.serve(PROMPT)
        page_bytes = runtime_of(pair.engine).host.memory.page_bytes  # type: ignore[union-attr]
        limits = {"ttl_ms": 60_000, "max_bytes": 2 * page_bytes}
        assert await outcome(pair, "kv.pin", token_ids=PROMPT, **limits) == ("accepted", 2 * PAGE)


async def test_demoted_pages_leave_the_device_but_never_their_last_copy(tmp_path: Path) -> None:
    storage = open_storage(f"file:{tmp_path}?capacity=64MB")
    async with loopback_pair(engine_config(), storage=storage) as pair:
        await pair.serve(PROMPT)
        held = await pair.ready(PROMPT)
        assert (await outcome(pair, "kv.demote", token_ids=PROMPT))[0] == "deferred"
        await pair.engine.finish(held)
        await pair.engine.wait_settled()
        assert await outcome(pair, "kv.demote", token_ids=PROMPT, to="host") == ("accepted", 4 * PAGE)
        assert pair.engine.probe_prefix(PROMPT) == {"l1": 0, "l2": 4 * PAGE}
        assert await outcome(pair, "kv.demote", token_ids=PROMPT, to="storage") == ("accepted", 4 * PAGE)
        assert pair.engine.probe_prefix(PROMPT) == {"l1": 0, "l2": 0}
        assert (await pair.engine.look_up(PROMPT, timeout_s=LIMIT_S)).l3 == 4 * PAGE


async def test_without_a_lower_copy_nothing_is_demoted() -> None:
    async with loopback_pair(engine_config()) as pair:
        await pair.serve(PROMPT)
        await pair.engine.flush(("l1",))
        assert await outcome(pair, "kv.demote", token_ids=PROMPT, to="storage") == ("deferred", 0)
        assert pair.engine.probe_prefix(PROMPT) == {"l1": 0, "l2": 4 * PAGE}


async def test_a_prefix_is_meant_by_tokens_by_hashes_or_by_session() -> None:
    pytest.importorskip("zmq")
    config = engine_config(kv_events_endpoint="tcp://127.0.0.1:*")
    async with loopback_pair(config) as pair:
        await pair.serve(PROMPT, namespace="tenant", session="talk")
        packed = b"".join(token.to_bytes(4, "little") for token in PROMPT)
        hashes = [hash_of(digest) for digest in page_digests(packed, PAGE, namespace="tenant")]
        for target in (
            {"token_ids": PROMPT, "namespace": "tenant"},
            {"block_hashes": hashes},
            {"session": "talk"},
        ):
            assert await outcome(pair, "kv.retain", **target) == ("accepted", 4 * PAGE)
        assert await outcome(pair, "kv.retain", block_hashes=[*hashes[:2], 7]) == ("accepted", 2 * PAGE)
        assert await outcome(pair, "kv.retain", session="talk", range=(0, 2 * PAGE)) == ("accepted", 2 * PAGE)
        for unknown in ({"token_ids": PROMPT}, {"block_hashes": [hashes[1]]}, {"session": "other"}):
            assert await outcome(pair, "kv.retain", **unknown) == ("missing", 0)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("kv.share", {"token_ids": PROMPT}),
        ("kv.fetch", {"source_control_endpoint": "tcp://127.0.0.1:1", "block_hashes": [1]}),
        ("kv.retain", {}),
        ("kv.retain", {"token_ids": PROMPT, "session": "talk"}),
        ("kv.retain", {"token_ids": ["x"]}),
        ("kv.retain", {"token_ids": PROMPT, "other": 1}),
        ("kv.retain", {"block_hashes": [1]}),
        ("kv.pin", {"token_ids": PROMPT}),
        ("kv.pin", {"token_ids": PROMPT, "ttl_ms": 1000, "tier": "device"}),
        ("kv.prefetch", {"token_ids": PROMPT, "destination": "device"}),
    ],
)
async def test_what_is_not_known_or_malformed_is_rejected_counted_and_no_error(
    kind: str, payload: dict[str, object]
) -> None:
    async with loopback_pair(engine_config()) as pair:
        (found,) = await pair.engine.hint(envelope(kind, **payload))
        assert found.outcome == "rejected" and found.cause
        assert await outcome(pair, "kv.retain", "2.0", token_ids=PROMPT) == ("rejected", 0)
        assert sum(pair.engine._hints.counts.values()) == 2


@pytest.mark.parametrize("kind", ["kv.pin", "kv.prefetch"])
async def test_a_time_beyond_all_bounds_is_the_longest_one(kind: str) -> None:
    async with loopback_pair(engine_config()) as pair:
        await pair.serve(PROMPT)
        limits = {"ttl_ms": 10**400, "deadline_ms": 10**400}
        assert await outcome(pair, kind, token_ids=PROMPT, **limits) == (
            "accepted",
            4 * PAGE if kind == "kv.pin" else 0,
        )
        await pair.serve(PROMPT, kv_hints=envelope(kind, token_ids=PROMPT, **limits))


def nested(depth: int) -> list[Any]:
    """A list in a list, and so on."""
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


NESTED = {"protocol_version": "0.1", "message_id": "m", "actions": nested(100_000)}


@pytest.mark.parametrize("what", [None, 3, {}, {"actions": []}, NESTED, {"protocol_version": "0.1", "message_id": "m"}])
async def test_what_is_no_envelope_is_refused_and_with_a_request_it_is_counted(what: Any) -> None:
    async with loopback_pair(engine_config()) as pair:
        with pytest.raises(InvalidRequest, match="no envelope of KV hints"):
            await pair.engine.hint(what)
        await pair.serve(PROMPT, kv_hints=what if isinstance(what, dict) else {"bad": 1})
        assert pair.engine._hints.counts["other", "rejected"] == 1


async def test_hints_of_a_request_are_acted_on_before_it(tmp_path: Path) -> None:
    async with loopback_pair(engine_config()) as pair:
        await pair.serve(PROMPT)
        pin = envelope("kv.pin", token_ids=PROMPT, ttl_ms=60_000)
        await pair.serve(PROMPT + [5] * PAGE, kv_hints=pin)
        assert core_of(pair.engine).hints.pinned_pages == 4


def test_sessions_are_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions()
    for number in range(SESSIONS_MAX + 5):
        sessions.note(f"s{number}", "", b"1234")
    assert sessions.prompt("s4") == ("", b"") and sessions.prompt("s5") == ("", b"1234")
    monkeypatch.setattr("tidekv.engine.decode.hints.SESSION_BYTES_MAX", 10)
    sessions.note("last", "tenant", b"12345678")
    assert sessions.prompt("last") == ("tenant", b"12345678")
    assert sessions._bytes <= 10
