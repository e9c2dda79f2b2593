"""Which calls of an `EngineThread` have no outcome yet, and whose the pages of its requests are.

A request goes WAITING → READY → LEAVING and is forgotten then; an abort marks it at once, on the thread that asks for
it, so that no poll after that hands out pages that are about to go.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidekv.engine.engine_thread_outcomes import Failed, OnDone, Outcome, Restored
from tidekv.engine.values import ReadyRequest
from tidekv.states.errors import InvalidRequest, RequestFailed
from tidekv.states.validation import refusal

Call: TypeAlias = Literal["restore", "retract", "finish"]


class Stage(enum.Enum):
    """Where a request is, as its caller sees it."""

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
        """The outcome that says so."""
        return Failed(self.number, self.live.request_id, self.call, error)


class Tickets:
    """All of them. Every method may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, Live] = {}
        self._open: dict[int, Ticket] = {}
        self._numbers = 0
        self._ended = ""

    def __len__(self) -> int:
        """Calls without an outcome."""
        return len(self._open)

    def arrive(self, request_id: str, on_done: OnDone | None) -> Ticket:
        """A request is submitted. Raises InvalidRequest for an id that is live."""
        with self._lock:
            if request_id in self._live:
                raise InvalidRequest(f"request {request_id!r} is live already; an id is free when its end was told")
            live = self._live[request_id] = Live(request_id)
            return self._issue("restore", live, on_done)

    def leave(self, ready: ReadyRequest, call: Call, on_done: OnDone | None) -> Ticket:
        """A READY request is given back: its pages are not the caller's any more. Raises as `check`."""
        with self._lock:
            live = self._held(ready)
            live.stage = Stage.LEAVING
            return self._issue(call, live, on_done)

    def abort(self, request_id: str) -> Live | None:
        """Mark a request as aborted; None where it is not live, was aborted before, or is being given back."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None or live.is_aborted or live.stage is Stage.LEAVING:
                return None
            live.is_aborted = True
            return live

    def became_ready(self, ticket: Ticket, ready: ReadyRequest) -> Restored:
        """A restore has ended well: from now on its pages can be given back."""
        with self._lock:
            ticket.live.ready, ticket.live.stage = ready, Stage.READY
        return Restored(ticket.number, ticket.live.request_id, ready)

    def close(self, ticket: Ticket) -> None:
        """The outcome of a ticket is on its way to the caller."""
        with self._lock:
            self._open.pop(ticket.number, None)

    def withdraw(self, ticket: Ticket) -> bool:
        """Take back a call that could not be begun; False where it has its outcome already."""
        with self._lock:
            is_open = self._open.pop(ticket.number, None) is not None
            if is_open and ticket.call == "restore":
                self._live.pop(ticket.live.request_id, None)
            return is_open

    def is_live(self, live: Live) -> bool:
        """Whether a request is not over."""
        return self._live.get(live.request_id) is live

    def forget(self, live: Live) -> None:
        """A request is over, and its id free."""
        with self._lock:
            if self._live.get(live.request_id) is live:
                del self._live[live.request_id]

    def check(self, ready: ReadyRequest) -> None:
        """Raises InvalidRequest where a READY request was given back or aborted."""
        # Without the lock, since growing asks this for every token: each of these reads is whole.
        self._held(ready)

    def as_told(self, outcome: Outcome) -> Outcome:
        """The outcome as it is when the caller takes it: what was aborted since is no longer READY."""
        if isinstance(outcome, Restored):
            live = self._live.get(outcome.request_id)
            if live is None or live.ready is not outcome.ready or live.is_aborted:
                error = RequestFailed(outcome.request_id, self._ended or "aborted", "before its outcome was taken")
                return Failed(outcome.ticket, outcome.request_id, "restore", error)
        return outcome

    def end(self, cause: str) -> list[Ticket]:
        """Nothing is live any more; returns the tickets that have no outcome."""
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
