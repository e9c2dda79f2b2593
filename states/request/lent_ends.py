"""Ends of requests in lent pages: the guards of their rows, and the actions that end a request early.

An early end is no failure. The embedder gets its pages back with what is in place, and computes the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.request.guards_and_actions import is_in_place

if TYPE_CHECKING:
    from tidekv.states.events import DeadlinePassed, Event, PrefillLost
    from tidekv.states.records.request import Request
    from tidekv.states.request.admission_queue import Queue
    from tidekv.states.request.lending import Lending
    from tidekv.states.request.restore import Restore


def fills_lent_pages(request: Request, event: Event) -> bool:
    """Whether the device pages are the embedder's, which gets them back with whatever is in place."""
    return request.lent is not None


def has_filled_lent_pages(request: Request, event: Event) -> bool:
    """Whether everything is in place in the embedder's pages."""
    return request.lent is not None and is_in_place(request)


class LentEnds:
    """Actions that end a request with what its lent pages hold so far."""

    def __init__(self, queue: Queue, restore: Restore, lending: Lending) -> None:
        self._queue = queue
        self._restore = restore
        self._lending = lending

    def end_without_prefill(self, request: Request, event: PrefillLost) -> None:
        """End early, because the room is lost and every prefill was tried."""
        self._end(request, event.cause, event.detail, settled=event.settled)

    def end_at_deadline(self, request: Request, event: DeadlinePassed) -> None:
        """End early, because the caller's deadline has passed."""
        self._end(request, "deadline", f"in {request.state.value}", settled=False)

    def _end(self, request: Request, cause: str, detail: str, *, settled: bool) -> None:
        self._restore.leave(request, settled=settled)
        self._lending.end_with(request, cause, detail)
        if request.waits_for_admission:
            self._queue.remove(request)
