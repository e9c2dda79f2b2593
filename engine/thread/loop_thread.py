"""An event loop and a poller on a thread of their own, for callers that are not coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

from tidekv.engine.poller import PollerThread
from tidekv.states.errors import EngineClosed, TidekvError
from tidekv.transports.log import own_context

T = TypeVar("T")

CANCEL_S = 5.0
"""Maximum seconds for calls that were left behind to end once they are cancelled."""
CLOSE_S = 60.0
"""Maximum seconds for one step of the end of a thread."""


class LoopThread:
    """Owns the loop, its thread and the poller until `close`. Methods may be called on any thread except its own.

    A forked child does not have the thread: every call raises EngineClosed there, and `close` does nothing.
    """

    def __init__(self, name: str) -> None:
        """Start the thread under this name, the loop and the poller."""
        self._is_closed = False
        self._name = name
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self.poller = PollerThread(name=f"{name}-poller")
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._finish(self._start_poller(), "starting the poller", CLOSE_S)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that has the thread."""
        return self._pid != os.getpid()

    def check(self) -> None:
        """Raise EngineClosed, with the reason, if the thread takes no calls.

        A caller with a lock of its own calls this before it takes that: in a forked child the lock may be held for
        ever, by a thread that is not there.
        """
        if self.is_forked:
            raise EngineClosed(f"{self._name} runs in the process that this one was forked from, and not here")
        if self._is_closed:
            raise EngineClosed(f"{self._name} is closed")

    def start(self, work: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        """Run `work` on the loop; the caller owns its future. Raises EngineClosed once closed."""
        try:
            self.check()
        except EngineClosed:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(self, step: Callable[[], object]) -> None:
        """Schedule a call of `step` on the loop. Raises EngineClosed once closed."""
        self.check()
        self._loop.call_soon_threadsafe(step, context=own_context())

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` on the loop and return its result. Raises EngineClosed once closed.

        `work` has the deadline, as calls into storage do: pages that it still reads or writes must not be given up.
        """
        return self.start(work).result()

    def close(self, last: Coroutine[object, object, None], *, within_s: float = 0.0) -> None:
        """Accept no more calls, run `last` to its end, and stop. Idempotent.

        Raises TidekvError if `last` takes longer than `within_s`, its own deadline, and CLOSE_S: work that hangs is
        left behind, and the thread is stopped.
        """
        if self._is_closed or self.is_forked:
            last.close()
            return
        self._is_closed = True
        try:
            self._finish(last, "closing", within_s + CLOSE_S)
        finally:
            self._finish(self.poller.close(), "closing the poller", CLOSE_S)
            self._finish(_cancel_rest(), "cancelling calls", 2 * CANCEL_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)
            # A loop that a callback blocks cannot be closed; its thread is a daemon.
            if not self._thread.is_alive():
                self._loop.close()

    def _finish(self, work: Coroutine[object, object, T], what: str, limit_s: float) -> T:
        """Run `work` on the loop, also while closing. Raises TidekvError after `limit_s` seconds; `work` goes on."""
        ending = asyncio.run_coroutine_threadsafe(work, self._loop)
        done, _ = concurrent.futures.wait([ending], timeout=limit_s)
        if not done:
            raise TidekvError(f"{self._name}: {what} did not end within {limit_s:g} s; it is left behind")
        return ending.result()

    async def _start_poller(self) -> None:
        self.poller.start()


async def _cancel_rest() -> None:
    """End calls that hang: other threads wait for their futures, which nothing settles once the loop has stopped."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=CANCEL_S)
