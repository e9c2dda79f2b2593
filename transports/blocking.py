"""Calls that may block, or hang for ever, kept off the event loop and under a deadline.

Each call has a daemon thread of its own: a library's hung call must not keep the process from ending, which the worker
threads of an executor do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from tidekv.states.errors import TransferFailed

T = TypeVar("T")


async def call_in_thread(call: Callable[[], T], *, what: str, timeout_s: float) -> T:
    """Run `call` in a thread and return its result, or raise its error; TransferFailed when it takes too long.

    A cancelled caller waits for the call's end first (until the deadline), so that what it changed is known.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # There is a result where there is no error.

    def run() -> None:
        try:
            answer = (call(), None)
        except BaseException as error:  # It is raised in the caller.
            answer = (None, error)  # type: ignore[assignment]  # See above.
        try:
            loop.call_soon_threadsafe(tell, *answer)
        except RuntimeError:
            return  # The loop was closed: nobody waits any more.

    threading.Thread(target=run, name=f"tidekv-{what}", daemon=True).start()
    try:
        return await settled(outcome, timeout_s=timeout_s)
    except TimeoutError as error:
        outcome.add_done_callback(_retrieve)
        raise TransferFailed(f"{what} did not end within {timeout_s:g} s") from error


async def settled(
    future: asyncio.Future[T], *, timeout_s: float | None = None, on_cancel: Callable[[], None] | None = None
) -> T:
    """Wait for a future that a cancelled caller must not leave behind: it ends first, then the cancellation is raised.

    Raises TimeoutError where the deadline passes; `future` goes on then.
    """
    if timeout_s is None:
        return await _Settling(future, on_cancel)
    loop = asyncio.get_running_loop()
    deadline_at = loop.time() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future], timeout=deadline_at - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
        if loop.time() >= deadline_at and not future.done():
            break
    if cancelled is not None:
        future.add_done_callback(_retrieve)
        raise cancelled
    if not future.done():
        raise TimeoutError
    return future.result()


class _Settling(Generic[T]):
    """A future as a task sees it that waits for it and cannot be kept from it.

    What can be awaited is what has these four names (see `asyncio.isfuture`). A task that is cancelled asks what it
    waits for to cancel itself; where that refuses, the task goes on waiting and is cancelled at the end of the wait.
    A future more that stands between both, as in `asyncio.shield`, costs each wait one more turn of the loop.
    """

    def __init__(self, future: asyncio.Future[T], on_cancel: Callable[[], None] | None) -> None:
        self._future = future
        self._on_cancel = on_cancel
        self._asyncio_future_blocking = False
        self.get_loop = future.get_loop
        self.add_done_callback = future.add_done_callback

    def cancel(self, msg: object = None) -> bool:
        """Refuse, and tell whoever can make the end come sooner."""
        if self._on_cancel is not None:
            self._on_cancel()
        return False

    def __await__(self) -> Generator[object, None, T]:
        future = self._future
        if not future.done():
            self._asyncio_future_blocking = True
            try:
                yield self
            except asyncio.CancelledError:
                future.add_done_callback(_retrieve)
                raise
        return future.result()


def _retrieve(future: asyncio.Future[T]) -> None:
    """Look at the outcome of a future that nobody waits for, so that asyncio does not report it as lost."""
    if not future.cancelled():
        future.exception()
