"""An event loop and a poller on a thread of their own: what storage engines need where callers are no coroutines."""

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
    """Owns the loop, its thread and the poller, until `close`. Calls may come from any thread but its own."""

    def __init__(self, name: str) -> None:
        """Start the thread. `name` is what the thread is called."""
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
        """Run `work` on the loop; its future is the caller's. Raises EngineClosed once closed."""
        if self._is_closed:
            work.close()
            raise EngineClosed("this storage is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(self, step: Callable[[], object]) -> None:
        """Call `step` on the loop, soon. Raises EngineClosed once closed."""
        if self._is_closed:
            raise EngineClosed("this storage is closed")
        self._loop.call_soon_threadsafe(step)

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` on the loop, and return its result once it has ended. Raises EngineClosed once closed."""
        return self.start(work).result()

    def finish(self, work: Coroutine[object, object, T]) -> T:
        """As `call`, while closing, too: for what the owner of the thread has to end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self, last: Coroutine[object, object, None]) -> None:
        """Take no more calls, run `last` to its end, and stop. Only the first call does anything."""
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
