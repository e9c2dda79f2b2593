"""An event loop and a poller on a thread of their own, for storage engines whose callers are not coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

from tidekv.engine.poller import PollerThread
from tidekv.states.errors import EngineClosed

T = TypeVar("T")


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
        self.finish(self._start_poller())

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
        """Run `work` on the loop and return its result. Raises EngineClosed once closed."""
        return self.start(work).result()

    def finish(self, work: Coroutine[object, object, T]) -> T:
        """As `call`, but also while closing: for the last steps of the thread's owner."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self, last: Coroutine[object, object, None]) -> None:
        """Accept no more calls, run `last` to its end, and stop. Idempotent."""
        if self._is_closed:
            last.close()
            return
        self._is_closed = True
        try:
            self.finish(last)
        finally:
            self.finish(self.poller.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _start_poller(self) -> None:
        self.poller.start()
