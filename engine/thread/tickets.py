"""Open calls of an `EngineThread`, and the ownership of the pages of its requests.

A request goes WAITING → READY → LEAVING and is then forgotten. `abort` marks it at once, on the calling thread, so no
later `poll` returns pages that are about to be released.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidekv.engine.thread.outcomes import Failed, OnDone, Outcome, Restored
from tidekv.engine.decode.values import ReadyRequest
from tidekv.states.errors import InvalidRequest, RequestFailed
from tidekv.states.validation import refusal

Call: TypeAlias = Literal["restore", "retract", "finish"]


class Stage(enum.Enum):
    """Stage of a request, as its caller sees it."""

    WAITING = "waiting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Live:
    """One request between its submission and the outcome that ends it."""

    request_id: str
    stage: Stage = Stage.WAITING
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

    def leave(self, ready: ReadyRequest, call: Call, on_done: OnDone | None) -> Ticket:
        """Mark a READY request as given back: the caller loses its pages. Raises as `check`."""
        with self._lock:
            live = self._held(ready)
            live.stage = Stage.LEAVING
            return self._issue(call, live, on_done)

    def abort(self, request_id: str) -> Live | None:
        """Mark a request as aborted. None if it is not live, was aborted before, or is being given back."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None or live.is_aborted or live.stage is Stage.LEAVING:
                return None
            live.is_aborted = True
            return live

    def became_ready(self, ticket: Ticket, ready: ReadyRequest) -> Restored:
        """Mark a request as READY, whose pages can be given back from now on."""
        with self._lock:
            ticket.live.ready, ticket.live.stage = ready, Stage.READY
        return Restored(ticket.number, ticket.live.request_id, ready)

    def close(self, ticket: Ticket) -> None:
        """Close a ticket whose outcome is on its way to the caller."""
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

    def as_told(self, outcome: Outcome) -> Outcome:
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
        if live is None or live.ready is not ready or live.is_aborted or live.stage is not Stage.READY:
            raise InvalidRequest(f"request {ready.request_id!r} was given back or aborted: its pages are not yours")
        return live
