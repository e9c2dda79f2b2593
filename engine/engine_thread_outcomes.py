"""How calls of an `EngineThread` end, and the way of their outcomes from its loop to the thread that polls.

loop's thread ── put ──▶ Mailbox ── take ──▶ whoever polls
                           └── eventfd: readable exactly while something waits, or nothing will come any more
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from tidekv.engine.values import ReadyRequest, RetractedRequest


@dataclass(frozen=True, slots=True)
class Restored:
    """A `submit` or `resume` ended well: the pages are the caller's until finish, retract or abort."""

    ticket: int
    request_id: str
    ready: ReadyRequest


@dataclass(frozen=True, slots=True)
class Retracted:
    """A `retract` ended well: the device pages are back; `retracted` is what `resume` or `drop` takes."""

    ticket: int
    request_id: str
    retracted: RetractedRequest


@dataclass(frozen=True, slots=True)
class Finished:
    """A `finish` ended well: everything is back, and `inserted` pages were new to the cache."""

    ticket: int
    request_id: str
    inserted: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A call ended with an error, and the request with it: it has no pages any more, and its id is free."""

    ticket: int
    request_id: str
    call: Literal["restore", "retract", "finish"]
    error: Exception
    """RequestFailed with its cause, or what else the same call of `DecodeEngine` raises."""


Outcome: TypeAlias = "Restored | Retracted | Finished | Failed"
OnDone: TypeAlias = "Callable[[Outcome], None]"


class Mailbox:
    """Outcomes that wait to be polled. Every method may be called on any thread."""

    def __init__(self) -> None:
        self.waiting: list[Outcome] = []
        """Look whether it is empty, without a lock; take from it by `take`."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._ended = False
        self._closed = False

    def put(self, outcome: Outcome) -> None:
        """Add an outcome. The first one wakes whoever waits for the eventfd."""
        with self._lock:
            self.waiting.append(outcome)
            if len(self.waiting) == 1 and not self._ended and not self._closed:
                os.eventfd_write(self.fd, 1)

    def take(self) -> list[Outcome]:
        """Take all there is."""
        with self._lock:
            taken, self.waiting = self.waiting, []
            if taken and not self._ended and not self._closed:
                os.eventfd_read(self.fd)
            return taken

    def wait(self, timeout_s: float) -> None:
        """Return when something waits, nothing will come any more, or the time is up."""
        with self._lock:
            if self._closed:
                return
            # Of our own: whoever closes meanwhile may give the number to another file.
            fd = os.dup(self.fd)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(timeout_s * 1000)
        finally:
            os.close(fd)

    def end(self) -> None:
        """Nothing will come any more: from now on the eventfd is readable, so that whoever selects comes and hears."""
        with self._lock:
            if not self._ended and not self._closed:
                self._ended = True
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Give the eventfd back. What waits can still be taken."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
