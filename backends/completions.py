"""Delivery of outcomes from a worker thread to the event loop: many operations in one wake-up.

A wake-up of the loop costs a system call and about 40 µs until the waiter runs; outcomes that arrive while one is
pending share it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import TypeAlias

from tidekv.states.errors import BrokenInvariant

Outcome: TypeAlias = "tuple[asyncio.Future[None], Exception | None]"


class Completions:
    """Settles futures of one loop from any thread. A future that was cancelled meanwhile is skipped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._ended: list[Outcome] = []
        self._woken = False

    def deliver(self, ended: Iterable[Outcome]) -> None:
        """Settle these futures soon, in this order. Raises RuntimeError if the loop was closed under its users."""
        with self._lock:
            self._ended.extend(ended)
            wake = not self._woken
            self._woken = True
        if wake:
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
            self._woken = False
        for future, error in ended:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def as_error(raised: BaseException) -> Exception:
    """Return an exception that a future can carry, for anything that a foreign call raised: a future takes neither an
    exit nor a StopIteration.
    """
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = BrokenInvariant(f"an operation raised {raised!r}, which is no error")
    error.__cause__ = raised
    return error
