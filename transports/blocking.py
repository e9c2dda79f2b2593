"""Calls that may block or hang, run off the event loop and under a deadline.

Each call runs in a thread of its own that nothing joins: a hung call of a library must not keep the process from
ending, as a worker thread of an executor would.
"""

from __future__ import annotations

import _thread
import asyncio
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from tidekv.states.errors import TransferFailed

T = TypeVar("T")


async def call_in_thread(call: Callable[[], T], *, what: str, timeout_s: float) -> T:
    """Run `call` in a thread and return its result, or raise its error. Raises TransferFailed after `timeout_s`
    seconds.

    A cancelled caller waits for the end of the call first (until the deadline), so that its effect is known.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # Without an error there is a result.

    def run() -> None:
        try:
            answer = (call(), None)
        except BaseException as error:  # Raised again in the caller.
            answer = (None, error)  # type: ignore[assignment]  # See above.
        try:
            loop.call_soon_threadsafe(resolve, *answer)
        except RuntimeError:
            return  # The loop is closed: no caller waits for the result.

    # Not `Thread.start`, which waits until the thread runs: many calls would stop the loop, as long as other
    # threads keep the interpreter.
    _thread.start_new_thread(run, ())
    try:
        return await settled(outcome, timeout_s=timeout_s)
    except TimeoutError as error:
        # The thread may still end with an error later, which asyncio would report as never retrieved.
        outcome.add_done_callback(_retrieve)
        raise TransferFailed(f"{what} did not end within {timeout_s:g} s") from error


async def settled(
    future: asyncio.Future[T], *, timeout_s: float | None = None, on_cancel: Callable[[], None] | None = None
) -> T:
    """Wait for a future to end even if the caller is cancelled; the cancellation is raised afterwards.

    `on_cancel` is called at each cancellation, to make the end come sooner. Raises TimeoutError after `timeout_s`
    seconds; the future continues then.
    """
    if timeout_s is None:
        return await _Settling(future, on_cancel)
    # `_Settling` cannot be left early, so a wait with a deadline is a loop around `asyncio.wait`.
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
    """Awaitable that makes a task wait for a future and refuses its cancellation until the future has ended.

    It has the four attributes that asyncio requires of a future in `await` (see `asyncio.isfuture`). A cancelled task
    calls `cancel` of the object it awaits; if that refuses, the task keeps waiting and is cancelled at the end of the
    wait. A second future in between, as in `asyncio.shield`, would cost each wait one more loop iteration.
    """

    def __init__(self, future: asyncio.Future[T], on_cancel: Callable[[], None] | None) -> None:
        self._future = future
        self._on_cancel = on_cancel
        self._asyncio_future_blocking = False
        self.get_loop = future.get_loop
        self.add_done_callback = future.add_done_callback

    def cancel(self, msg: object = None) -> bool:
        """Refuse, and call `on_cancel`."""
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
    """Retrieve the exception of an abandoned future, so that asyncio does not report it as never retrieved."""
    if not future.cancelled():
        future.exception()
