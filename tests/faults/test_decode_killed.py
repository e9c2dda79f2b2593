"""A decode worker that is killed or interrupted: what storage has of it is whole, and prefill gets its pages back."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_process import (
    AskCounts,
    Closed,
    Counts,
    Done,
    Failed,
    Halt,
    Halted,
    Served,
    Settle,
    Turn,
)
from tests.support.waits import LIMIT_S
from tidekv.engine.prefill.prefill_peer import RoomOutcome

pytestmark = pytest.mark.nixl

PAGE_SIZE = 16
OUTPUT = list(range(7, 7 + PAGE_SIZE + 1))


def turn(request_id: str, tokens: list[int], prefill: Any) -> Turn:
    return Turn(request_id=request_id, tokens=tokens, prefill=[prefill.address], output=OUTPUT)


async def take_turn(child: Any, request_id: str, tokens: list[int], prefill: Any) -> dict[str, int]:
    """Run a turn of a decode child and require every page to be correct; return its tokens by source."""
    served = await child.ask(turn(request_id, tokens, prefill), Served)
    assert served.wrong == []
    await child.ask(Settle(), Done)
    return served.sources


async def prefill_has_its_pages_back(prefill: Any) -> None:
    """Wait until no room holds a page of prefill."""
    freed = prefill.worker.freed
    async with freed:
        await freed.wait_for(lambda: prefill.worker.pages_free == 256)
    counts = prefill.peer.statistics()
    assert counts["rooms_sending"] == counts["rooms_finished"] == counts["rooms_draining"] == 0
    assert counts["writes_in_flight"] == 0


@pytest.mark.parametrize("at_work", ["storing", "reading", "receiving"])
async def test_killed_and_restarted_on_its_storage_it_serves_the_same_bytes(
    tmp_path: Path, spawn_decode: Any, prefill_over_nixl: Any, prompt: Any, at_work: str
) -> None:
    storage = f"file:{tmp_path}?capacity=64MiB&io=nixl"
    first = prompt(1, 20)
    second = [*first, *OUTPUT, *prompt(2, 10)]
    async with asyncio.timeout(LIMIT_S), prefill_over_nixl(lease_s=3.0) as prefill:
        child = await spawn_decode(storage)
        if at_work == "storing":
            await child.ask(Halt(after_checks=1), Done)
            child.line.say(turn("one", first, prefill))
            await child.line.hear(Halted)
        else:
            assert (await take_turn(child, "one", first, prefill))["transfer"] == 20 * PAGE_SIZE
        if at_work == "reading":
            # Killed and started once more, since only storage is to have it.
            child.signal(signal.SIGKILL)
            child = await spawn_decode(storage)
            await child.ask(Halt(), Done)
            prefill.gate.close_gate()
            child.line.say(turn("two", second, prefill))
            await child.line.hear(Halted)
        if at_work == "receiving":
            prefill.gate.close_gate(after_checks=1)
            child.line.say(turn("two", second, prefill))
            await prefill.gate.halted.wait()
        child.signal(signal.SIGKILL)
        assert await child.wait_ended() == -signal.SIGKILL
        prefill.gate.open_gate()
        await prefill_has_its_pages_back(prefill)

        restarted = await spawn_decode(storage)
        sources = await take_turn(restarted, "two", second, prefill)
        # Nothing had been stored when it was killed in its first put; else the first turn with its output is there.
        assert sources["l3"] == (0 if at_work == "storing" else 21 * PAGE_SIZE)
        assert sources["l1"] == sources["l2"] == 0
        assert sum(sources.values()) == len(second)
        restarted.signal(signal.SIGKILL)
        # What the dead ones left half done is no hindrance: all of the second turn is in storage now.
        third = await spawn_decode(storage)
        assert (await take_turn(third, "three", second, prefill))["l3"] == len(second) // PAGE_SIZE * PAGE_SIZE
        await prefill_has_its_pages_back(prefill)


async def test_interrupted_in_the_middle_of_restores_it_ends_by_itself(
    tmp_path: Path, spawn_decode: Any, prefill_over_nixl: Any, prompt: Any
) -> None:
    async with asyncio.timeout(LIMIT_S), prefill_over_nixl() as prefill:
        child = await spawn_decode(f"file:{tmp_path}?capacity=64MiB&io=nixl")
        await take_turn(child, "warm", prompt(0, 8), prefill)
        prefill.gate.close_gate(after_checks=1)
        for number in range(1, 8):
            child.line.say(turn(f"r{number}", prompt(number, 20), prefill))
        await prefill.gate.halted.wait()
        counts = (await child.ask(AskCounts(), Counts)).counts
        assert counts["requests_transfer"] > 0
        assert counts["requests_ready"] == 0
        child.signal(signal.SIGINT)
        # It waits for the message of its writer, which writes to it until then.
        prefill.gate.open_gate()
        closed = (await child.line.hear(Closed)).counts
        assert await child.wait_ended() == 128 + signal.SIGINT
        assert closed["device_draining"] == closed["device_owned"] == closed["operations"] == closed["queue"] == 0
        assert closed["device_free"] + closed["device_cached"] == closed["device_total"]
        await prefill_has_its_pages_back(prefill)


async def test_interrupted_while_its_writer_hangs_it_ends_in_time_and_reports_what_is_in_flight(
    tmp_path: Path, spawn_decode: Any, prefill_over_nixl: Any, prompt: Any
) -> None:
    async with asyncio.timeout(LIMIT_S), prefill_over_nixl(lease_s=3.0) as prefill:
        child = await spawn_decode(f"file:{tmp_path}?capacity=64MiB&io=nixl", close_deadline_s=0.5)
        prefill.gate.close_gate(after_checks=1)
        child.line.say(turn("r1", prompt(1, 20), prefill))
        await prefill.gate.halted.wait()
        child.signal(signal.SIGINT)
        closed = (await child.line.hear(Closed)).counts
        assert closed["device_draining"] == 20
        assert await child.wait_ended() == 128 + signal.SIGINT
        prefill.gate.open_gate()
        await prefill_has_its_pages_back(prefill)


async def test_stopped_for_longer_than_its_lease_it_goes_on_with_right_bytes(
    tmp_path: Path, spawn_decode: Any, prefill_over_nixl: Any, prompt: Any
) -> None:
    async with asyncio.timeout(LIMIT_S), prefill_over_nixl(lease_s=3.0) as prefill:
        child = await spawn_decode(f"file:{tmp_path}?capacity=64MiB&io=nixl")
        await take_turn(child, "warm", prompt(0, 8), prefill)
        prefill.gate.close_gate(after_checks=1)
        child.line.say(turn("r1", prompt(1, 20), prefill))
        await prefill.gate.halted.wait()
        room = prefill.rooms["r1"]
        child.signal(signal.SIGSTOP)
        await room.aborted.wait()
        assert room.outcome == RoomOutcome.LEASE_ENDED
        child.signal(signal.SIGCONT)
        # It is notified that the room is over, and keeps the pages reserved until the last write has ended.
        assert (await child.line.hear(Failed)).cause in ("lease ended", "prefill lost")
        assert (await child.counts())["device_draining"] == 20
        prefill.gate.open_gate()
        assert (await take_turn(child, "r1", prompt(1, 20), prefill))["transfer"] == 20 * PAGE_SIZE
        assert (await child.counts())["device_draining"] == 0
        await prefill_has_its_pages_back(prefill)
