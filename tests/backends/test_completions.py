"""Outcomes from threads: one wake-up for all that ended since the last one, and nothing lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from tidekv.backends.completions import Completions, Outcome, as_error
from tidekv.states.errors import BrokenInvariant


class SlowLoop:
    """Stands in for a loop that is busy: it keeps what it is asked to call."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


async def test_a_busy_loop_is_woken_once() -> None:
    slow = SlowLoop()
    outcomes = Completions(slow)  # type: ignore[arg-type]  # All that is used of a loop.
    futures = [asyncio.get_running_loop().create_future() for _ in range(4)]
    for future in futures[:3]:
        outcomes.deliver([(future, None)])
    assert len(slow.calls) == 1
    slow.calls[0]()
    assert [future.done() for future in futures] == [True, True, True, False]
    outcomes.deliver([(futures[3], OSError("late"))])
    assert len(slow.calls) == 2
    slow.calls[1]()
    with pytest.raises(OSError, match="late"):
        futures[3].result()


async def test_a_future_that_is_done_is_left_alone_and_the_others_are_settled() -> None:
    slow = SlowLoop()
    outcomes = Completions(slow)  # type: ignore[arg-type]  # As above.
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(3)]
    futures[0].cancel()
    futures[1].set_result(None)
    batch: list[Outcome] = [(futures[0], None), (futures[1], OSError("too late")), (futures[2], None)]
    outcomes.deliver(batch)
    slow.calls[0]()
    assert futures[0].cancelled()
    assert futures[1].result() is None
    assert futures[2].result() is None


async def test_many_threads_lose_nothing() -> None:
    loop = asyncio.get_running_loop()
    outcomes = Completions(loop)
    futures = [[loop.create_future() for _ in range(100)] for _ in range(4)]

    def deliver(mine: list[asyncio.Future[None]]) -> None:
        for future in mine:
            outcomes.deliver([(future, None)])

    threads = [threading.Thread(target=deliver, args=(mine,)) for mine in futures]
    for thread in threads:
        thread.start()
    for mine in futures:
        await asyncio.gather(*mine)
    for thread in threads:
        thread.join()


def test_only_errors_are_carried_as_they_are() -> None:
    error = OSError("as it is")
    assert as_error(error) is error
    for raised in (StopIteration(), SystemExit(), KeyboardInterrupt(), asyncio.CancelledError()):
        carried = as_error(raised)
        assert isinstance(carried, BrokenInvariant)
        assert carried.__cause__ is raised
