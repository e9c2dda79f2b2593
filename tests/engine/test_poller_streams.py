"""Streams on the poller's thread: each item's end is reported once, at any time, and an empty stream costs nothing."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable

import pytest

from tests.support.fault_hooks import GatedPoller
from tests.support.threads import started
from tidekv.states.errors import EngineClosed
from tidekv.transports.base import Drive, Ended, StreamTurn


class Counter:
    """A stream that ends one item a turn, or some turns after it came; a closed `gate` holds all items."""

    def __init__(self, *, waits: int = 0, gate: threading.Event | None = None) -> None:
        self.items: deque[asyncio.Future[None]] = deque()
        self.threads: set[int] = set()
        self.turns = 0
        self._waits = self._left = waits
        self._gate = gate

    def advance(self, tell: Callable[[Ended], None]) -> StreamTurn:
        self.turns += 1
        self.threads.add(threading.get_ident())
        if not self.items:
            return StreamTurn.EMPTY
        if self._left or (self._gate is not None and not self._gate.is_set()):
            self._left = max(0, self._left - 1)
            return StreamTurn.WAITING
        self._left = self._waits
        tell([(self.items.popleft(), None)])
        return StreamTurn.MOVED if self.items else StreamTurn.EMPTY

    @property
    def is_empty(self) -> bool:
        return not self.items


def enter(drive: Drive, stream: Counter) -> asyncio.Future[None]:
    future = drive.begin()
    stream.items.append(future)
    drive.wake()
    return future


@pytest.mark.parametrize("waits", [0, 3])
async def test_whatever_enters_between_any_two_turns_is_told_once(waits: int) -> None:
    poller = started()
    rng = random.Random(waits)
    streams = [Counter(waits=waits) for _ in range(3)]
    drives = [poller.drive(stream) for stream in streams]

    async def enter_some() -> None:
        for _ in range(300):
            at = rng.randrange(3)
            burst = [enter(drives[at], streams[at]) for _ in range(rng.choice((1, 1, 1, 5)))]
            # Waiting for the last one only, the next comes while the stream is about to report that it is empty.
            await burst[-1]

    async with asyncio.TaskGroup() as callers:
        for _ in range(3):
            callers.create_task(enter_some())
    assert await poller.close() == 0
    told = poller.statistics()
    assert told.completed == told.posted >= 900
    assert (told.failed, told.in_flight) == (0, 0)
    assert not any(drive.futures or drive.is_driven for drive in drives)
    assert threading.get_ident() not in set.union(*(stream.threads for stream in streams))


async def test_what_enters_while_the_stream_says_that_it_is_empty_is_told() -> None:
    loop, poller = asyncio.get_running_loop(), started()
    late: list[asyncio.Future[None]] = []
    entered, both = threading.Event(), asyncio.Event()

    class Closing(Counter):
        def advance(self, tell: Callable[[Ended], None]) -> StreamTurn:
            turn = super().advance(tell)
            if turn is StreamTurn.EMPTY and not late:
                loop.call_soon_threadsafe(enter_late)
                assert entered.wait(60.0)
            return turn

    def enter_late() -> None:
        late.append(enter(drive, stream))
        both.set()
        entered.set()

    stream = Closing()
    drive = poller.drive(stream)
    await enter(drive, stream)
    await both.wait()
    await asyncio.wait_for(late[0], 30.0)
    assert await poller.close() == 0


async def test_an_empty_stream_is_not_asked() -> None:
    poller, stream = started(), Counter()
    drive = poller.drive(stream)
    for _ in range(20):
        await enter(drive, stream)
        # Longer than the spin after activity; a poller that went on asking would give turns here.
        await asyncio.sleep(0.001)
    assert await poller.close() == 0
    assert stream.turns == 20


async def test_close_waits_for_a_stream_and_takes_nothing_new() -> None:
    poller, stream = started(), Counter(waits=20)
    drive = poller.drive(stream)
    futures = [enter(drive, stream) for _ in range(5)]
    closing = asyncio.ensure_future(poller.close())
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed, match="not running"):
        drive.begin()
    assert await closing == 0
    assert all(future.done() for future in futures)


async def test_close_tells_those_whom_a_stream_has_not_told() -> None:
    poller, stream = started(), Counter(gate=threading.Event())
    drive = poller.drive(stream)
    futures = [enter(drive, stream) for _ in range(2)]
    assert await poller.close(timeout_s=0.02) == 2
    for future in futures:
        with pytest.raises(EngineClosed, match="ended with 2 operations in flight"):
            await future


async def test_a_stream_that_raises_ends_the_poller_and_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    poller, stream = started(), Counter()
    drive = poller.drive(stream)
    monkeypatch.setattr(stream, "advance", lambda tell: 1 / 0)
    with pytest.raises(EngineClosed, match="1 operations in flight"):
        await enter(drive, stream)
    assert await poller.close() == 1
    assert reported == [ZeroDivisionError]


@pytest.mark.parametrize("after_checks", [0, 2, 9])
async def test_at_a_closed_gate_a_stream_takes_so_many_turns_and_tells_nothing(after_checks: int) -> None:
    poller, stream = started(), Counter()
    gate = GatedPoller(poller)
    drive = gate.drive(stream)
    gate.close_gate(after_checks=after_checks, skips=1)
    await enter(drive, stream)
    futures = [enter(drive, stream) for _ in range(4)]
    await gate.halted.wait()
    assert not any(future.done() for future in futures)
    # The first that ends is the last that moves.
    assert len(stream.items) == (4 if after_checks == 0 else 3)
    gate.open_gate()
    await asyncio.wait(futures)
    assert await poller.close() == 0
