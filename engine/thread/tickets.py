"""Open calls of an `EngineThread`, their outcomes, and the ownership of the pages of its requests.

A request goes WAITING → READY → LEAVING and is then forgotten. `abort` marks it at once, on the calling thread, so no
later `poll` returns pages that are about to be released.
"""

from __future__ import annotations

import enum
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from tidekv.engine.decode.values import ReadyRequest
from tidekv.states.errors import EngineClosed, InvalidRequest, RequestFailed
from tidekv.states.validation import refusal

if TYPE_CHECKING:
    from tidekv.engine.decode.values import OfferedPages, PromptLookUp, RestoredPages, RetractedRequest


Call: TypeAlias = Literal["restore", "retract", "finish", "offer", "look_up"]


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
class RestoredInto:
    """End of `restore_into`: the lent pages are the caller's again, and the request is over."""

    ticket: int
    request_id: str
    restored: RestoredPages


@dataclass(frozen=True, slots=True)
class Offered:
    """End of `offer`: nothing reads the pages any more."""

    ticket: int
    offered: OfferedPages
    request_id: str = ""
    """Always empty: an offer belongs to no request."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """End of `look_up`."""

    ticket: int
    found: PromptLookUp
    request_id: str = ""
    """Always empty: a look-up belongs to no request."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Failure of a call, which ends the request: it has no pages any more, and its id is free."""

    ticket: int
    request_id: str
    """Empty for an offer and a look-up."""
    call: Call
    error: Exception
    """RequestFailed with its cause, or another error that the same call of `DecodeEngine` raises."""

    @property
    def ends_engine(self) -> bool:
        """Whether the call failed because the engine ends: only then its pages may still be written to."""
        error = self.error
        return isinstance(error, EngineClosed) or (isinstance(error, RequestFailed) and error.cause == "engine closed")


Outcome: TypeAlias = "Restored | RestoredInto | Offered | LookedUp | Retracted | Finished | Failed"
OnDone: TypeAlias = "Callable[[Outcome], None]"


class Mailbox:
    """Outcomes that wait for `poll`. Every method may be called on any thread.

    loop's thread ── put ──▶ Mailbox ── take ──▶ polling thread
                               └── eventfd: readable exactly while an outcome waits, or once no more will come
    """

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


class CallStage(enum.Enum):
    """Stage of a request, as its caller sees it."""

    WAITING = "waiting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Live:
    """One request between its submission and the outcome that ends it."""

    request_id: str
    stage: CallStage = CallStage.WAITING
    ready: ReadyRequest | None = None
    is_aborted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One call that has no outcome yet."""

    number: int
    call: Call
    live: Live
    on_done: OnDone | None

    def failed(self, error: Exception) -> Failed:
        """Return the outcome that reports an error."""
        return Failed(self.number, self.live.request_id, self.call, error)


class Tickets:
    """Table of open tickets and live requests. Every method may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, Live] = {}
        self._open: dict[int, Ticket] = {}
        self._numbers = 0
        self._ended = ""

    def __len__(self) -> int:
        """Number of calls without an outcome."""
        return len(self._open)

    def arrive(self, request_id: str, on_done: OnDone | None) -> Ticket:
        """Add a submitted request. Raises InvalidRequest for an id that is live."""
        with self._lock:
            if request_id in self._live:
                raise InvalidRequest(
                    f"request {request_id!r} is live already; its id is free once its outcome was delivered"
                )
            live = self._live[request_id] = Live(request_id)
            return self._issue("restore", live, on_done)

    def issue(self, call: Call, on_done: OnDone | None) -> Ticket:
        """Open a call of no request."""
        with self._lock:
            return self._issue(call, Live(""), on_done)

    def leave(self, ready: ReadyRequest, call: Call, on_done: OnDone | None) -> Ticket:
        """Mark a READY request as given back: the caller loses its pages. Raises as `check`."""
        with self._lock:
            live = self._held(ready)
            live.stage = CallStage.LEAVING
            return self._issue(call, live, on_done)

    def abort(self, request_id: str) -> Live | None:
        """Mark a request as aborted. None if it is not live, was aborted before, or is being given back."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None or live.is_aborted or live.stage is CallStage.LEAVING:
                return None
            live.is_aborted = True
            return live

    def became_ready(self, ticket: Ticket, ready: ReadyRequest) -> Restored:
        """Mark a request as READY: its pages can be given back from now on."""
        with self._lock:
            ticket.live.ready, ticket.live.stage = ready, CallStage.READY
        return Restored(ticket.number, ticket.live.request_id, ready)

    def close(self, ticket: Ticket) -> None:
        """Close a ticket after its outcome was sent to the caller."""
        with self._lock:
            self._open.pop(ticket.number, None)

    def withdraw(self, ticket: Ticket) -> bool:
        """Take back a call that could not be started. False if it has its outcome already."""
        with self._lock:
            is_open = self._open.pop(ticket.number, None) is not None
            if is_open and ticket.call == "restore":
                self._live.pop(ticket.live.request_id, None)
            return is_open

    def is_live(self, live: Live) -> bool:
        """Whether a request has not ended."""
        return self._live.get(live.request_id) is live

    def forget(self, live: Live) -> None:
        """Forget a request that has ended; its id is free."""
        with self._lock:
            if self._live.get(live.request_id) is live:
                del self._live[live.request_id]

    def check(self, ready: ReadyRequest) -> None:
        """Raises InvalidRequest if a READY request was given back or aborted."""
        # Without the lock, because each growth by a token calls this. Each of the reads is atomic.
        self._held(ready)

    def as_of_now(self, outcome: Outcome) -> Outcome:
        """Return the outcome as of now: a request aborted since it became READY has failed."""
        if isinstance(outcome, Restored):
            live = self._live.get(outcome.request_id)
            if live is None or live.ready is not outcome.ready or live.is_aborted:
                error = RequestFailed(outcome.request_id, self._ended or "aborted", "before its outcome was taken")
                return Failed(outcome.ticket, outcome.request_id, "restore", error)
        return outcome

    def end(self, cause: str) -> list[Ticket]:
        """Forget all requests; returns the tickets that have no outcome."""
        with self._lock:
            self._ended = cause
            left = list(self._open.values())
            self._open.clear()
            self._live.clear()
        return left

    def _issue(self, call: Call, live: Live, on_done: OnDone | None) -> Ticket:
        self._numbers += 1
        ticket = self._open[self._numbers] = Ticket(self._numbers, call, live, on_done)
        return ticket

    def _held(self, ready: ReadyRequest) -> Live:
        if not isinstance(ready, ReadyRequest):
            raise refusal(ready, ReadyRequest, "ready")
        live = self._live.get(ready.request_id)
        if live is None or live.ready is not ready or live.is_aborted or live.stage is not CallStage.READY:
            raise InvalidRequest(f"request {ready.request_id!r} was given back or aborted: its pages are not yours")
        return live
