"""Calls that may block, or hang for ever, kept off the event loop and under a deadline.

Each call has a daemon thread of its own: a library's hung call must not keep the process from ending, which the worker
threads of an executor do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

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
    loop = asyncio.get_running_loop()
    deadline_at = None if timeout_s is None else loop.time() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            if deadline_at is None:
                await _end_of(future, loop)
            else:
                await asyncio.wait([future], timeout=deadline_at - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
        if deadline_at is not None and loop.time() >= deadline_at and not future.done():
            break
    if cancelled is not None:
        future.add_done_callback(_retrieve)
        raise cancelled
    if not future.done():
        raise TimeoutError
    return future.result()


async def _end_of(future: asyncio.Future[T], loop: asyncio.AbstractEventLoop) -> None:
    """Wait for the end of a future that a cancelled waiter does not cancel: what asyncio.wait does of several."""
    ended: asyncio.Future[None] = loop.create_future()

    def tell(_: asyncio.Future[T]) -> None:
        if not ended.done():
            ended.set_result(None)

    future.add_done_callback(tell)
    try:
        await ended
    finally:
        future.remove_done_callback(tell)


def _retrieve(future: asyncio.Future[T]) -> None:
    """Look at the outcome of a future that nobody waits for, so that asyncio does not report it as lost."""
    if not future.cancelled():
        future.exception()
