"""Calls into an engine: each ends only when everything that it started has settled, even if its caller is cancelled."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import TypeVar

from tidekv.states.errors import EngineClosed

T = TypeVar("T")


class Call:
    """The deadline of one call, and whether its caller is gone."""

    def __init__(self, timeout_s: float) -> None:
        self.deadline_s = time.monotonic() + timeout_s
        self.abandoned = False

    def may_start(self) -> bool:
        """Return True while the call may start more work."""
        return not self.abandoned and time.monotonic() < self.deadline_s

    def left_s(self) -> float | None:
        """Return the seconds until the deadline, for a wait; None if there is none."""
        return None if math.isinf(self.deadline_s) else max(self.deadline_s - time.monotonic(), 0.0)

    async def start(self, limit: asyncio.Semaphore) -> bool:
        """Wait for a slot of `limit`. True: it is taken, and the caller releases it. False: it is too late to start."""
        try:
            async with asyncio.timeout(self.left_s()):
                await limit.acquire()
        except TimeoutError:
            return False
        if not self.may_start():
            limit.release()
            return False
        return True


class Calls:
    """The calls in flight of one engine. `drain` ends the intake and waits for the last."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._calls: dict[asyncio.Task[object], Call] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._calls)

    async def run(self, body: Callable[[Call], Coroutine[object, object, T]], timeout_s: float = float("inf")) -> T:
        """Run a call to its end, also if the awaiting task is cancelled; CancelledError is raised after that.

        The body runs in its own task, because a cancellation must not reach the reads and writes that it awaits.
        """
        if self.closed:
            raise EngineClosed(f"{self._what} is closed")
        call = Call(timeout_s)
        task = asyncio.get_running_loop().create_task(body(call))
        self._calls[task] = call
        task.add_done_callback(self._calls.pop)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            call.abandoned = True
            await _settled(task)
            raise

    async def drain(self) -> None:
        """Refuse further calls, let running calls start nothing more, and wait until all have ended."""
        self.closed = True
        for call in self._calls.values():
            call.abandoned = True
        for task in list(self._calls):
            await _settled(task)


async def all_settled(bodies: Iterable[Coroutine[object, object, None]]) -> None:
    """Run bodies concurrently until every one has ended, also if one raises; then raise the first error.

    A TaskGroup would cancel the others, and with them the waits for what still writes.
    """
    tasks = [asyncio.get_running_loop().create_task(body) for body in bodies]
    await asyncio.wait(tasks)
    for error in [task.exception() for task in tasks]:
        if error is not None:
            raise error


async def _settled(task: asyncio.Task[object]) -> None:
    """Wait for the end of a task and ignore its outcome; a further cancellation is raised once the task is over."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        # Retrieved, so that asyncio does not report an error that no caller awaits any more.
        task.exception()
    if cancelled is not None:
        raise cancelled
