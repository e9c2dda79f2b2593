"""Outcomes of the calls of an `EngineThread`, and the mailbox that passes them to the polling thread.

loop's thread ── put ──▶ Mailbox ── take ──▶ polling thread
                           └── eventfd: readable exactly while an outcome waits, or once no more will come
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from tidekv.engine.decode.values import ReadyRequest, RetractedRequest


@dataclass(frozen=True, slots=True)
class Restored:
    """Success of `submit` or `resume`: the caller owns the pages until finish, retract or abort."""

    ticket: int
    request_id: str
    ready: ReadyRequest


@dataclass(frozen=True, slots=True)
class Retracted:
    """Success of `retract`: the device pages are given back; `retracted` is the argument of `resume` or `drop`."""

    ticket: int
    request_id: str
    retracted: RetractedRequest


@dataclass(frozen=True, slots=True)
class Finished:
    """Success of `finish`: everything is given back, and `inserted` pages were new to the cache."""

    ticket: int
    request_id: str
    inserted: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Failure of a call, which ends the request: it has no pages any more, and its id is free."""

    ticket: int
    request_id: str
    call: Literal["restore", "retract", "finish"]
    error: Exception
    """RequestFailed with its cause, or another error that the same call of `DecodeEngine` raises."""


Outcome: TypeAlias = "Restored | Retracted | Finished | Failed"
OnDone: TypeAlias = "Callable[[Outcome], None]"


class Mailbox:
    """Outcomes that wait for `poll`. Every method may be called on any thread."""

    def __init__(self) -> None:
        self.waiting: list[Outcome] = []
        """May be tested for emptiness without a lock; use `take` to take from it."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._ended = False
        self._closed = False

    def put(self, outcome: Outcome) -> None:
        """Add an outcome. The first one makes the eventfd readable."""
        with self._lock:
            self.waiting.append(outcome)
            if len(self.waiting) == 1 and not self._ended and not self._closed:
                os.eventfd_write(self.fd, 1)

    def take(self) -> list[Outcome]:
        """Take all outcomes."""
        with self._lock:
            taken, self.waiting = self.waiting, []
            if taken and not self._ended and not self._closed:
                os.eventfd_read(self.fd)
            return taken

    def wait(self, timeout_s: float) -> None:
        """Return once an outcome waits, no more will come, or the time is up."""
        with self._lock:
            if self._closed:
                return
            # A duplicate: if `close` runs meanwhile, the number of the original may be given to another file.
            fd = os.dup(self.fd)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(timeout_s * 1000)
        finally:
            os.close(fd)

    def end(self) -> None:
        """No more outcomes will come. Makes the eventfd readable for good, so a selecting thread calls `poll`."""
        with self._lock:
            if not self._ended and not self._closed:
                self._ended = True
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the eventfd. Outcomes that wait can still be taken."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
