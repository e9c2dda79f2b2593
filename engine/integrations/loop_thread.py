"""An event loop and a poller on a thread of their own, for storage engines whose callers are not coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

from tidekv.engine.poller import PollerThread
from tidekv.states.errors import EngineClosed, TidekvError

T = TypeVar("T")

CLOSE_S = 60.0
"""Maximum seconds for one step of the end of a thread."""


class LoopThread:
    """Owns the loop, its thread and the poller until `close`. Methods may be called on any thread except its own."""

    def __init__(self, name: str) -> None:
        """Start the thread under this name, the loop and the poller."""
        self._is_closed = False
        self._name = name
        self._loop = asyncio.new_event_loop()
        self.poller = PollerThread(name=f"{name}-poller")
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._finish(self._start_poller())

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def start(self, work: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        """Run `work` on the loop; the caller owns its future. Raises EngineClosed once closed."""
        if self._is_closed:
            work.close()
            raise EngineClosed("this storage is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(self, step: Callable[[], object]) -> None:
        """Schedule a call of `step` on the loop. Raises EngineClosed once closed."""
        if self._is_closed:
            raise EngineClosed("this storage is closed")
        self._loop.call_soon_threadsafe(step)

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` on the loop and return its result. Raises EngineClosed once closed.

        `work` has the deadline, as calls into storage do: pages that it still reads or writes must not be given up.
        """
        return self.start(work).result()

    def close(self, last: Coroutine[object, object, None], *, within_s: float = 0.0) -> None:
        """Accept no more calls, run `last` to its end, and stop. Idempotent.

        Raises TidekvError if `last` takes longer than `within_s`, its own deadline, and CLOSE_S: storage that hangs is
        left behind with this thread.
        """
        if self._is_closed:
            last.close()
            return
        self._is_closed = True
        try:
            self._finish(last, within_s + CLOSE_S)
        finally:
            self._finish(self.poller.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)
            # A loop that a callback blocks cannot be closed; its thread is a daemon.
            if not self._thread.is_alive():
                self._loop.close()

    def _finish(self, work: Coroutine[object, object, T], limit_s: float | None = None) -> T:
        """Run `work` on the loop, also while closing. Raises TidekvError after `limit_s` seconds (None: CLOSE_S), and
        `work` goes on.
        """
        limit_s = CLOSE_S if limit_s is None else limit_s
        ending = asyncio.run_coroutine_threadsafe(work, self._loop)
        done, _ = concurrent.futures.wait([ending], timeout=limit_s)
        if not done:
            raise TidekvError(f"{self._name}: {work.__qualname__} did not end within {limit_s:g} s; it is left behind")
        return ending.result()

    async def _start_poller(self) -> None:
        self.poller.start()
