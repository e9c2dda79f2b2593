"""Ends of requests in lent pages: the guards of their rows, and the actions that end a request early.

An early end is no failure. The embedder gets its pages back with what is in place, and computes the rest.

A request that names no prefill ends when its tiers and peers have brought what they have. If host memory had no room
for all of that, it returns to the queue first, once for each part that comes: a prompt may be longer than host memory.
If nothing came, it asks again after a pause, as long as operations of others may free host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidekv.states.events import NOBODY
from tidekv.states.request.guards_and_actions import is_in_place

ROOM_PAUSE_S: Final = 0.05
"""Time after which a request asks again for room in host memory."""

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import DeadlinePassed, Event, PrefillLost, Progressed
    from tidekv.states.records.request import Request
    from tidekv.states.request.admission_queue import Queue
    from tidekv.states.request.guards_and_actions import Actions
    from tidekv.states.request.lending import Lending
    from tidekv.states.request.restore import Restore


def fills_lent_pages(request: Request, event: Event) -> bool:
    """Whether the device pages are the embedder's, which gets them back with whatever is in place."""
    return request.lent is not None


def has_filled_lent_pages(request: Request, event: Event) -> bool:
    """Whether everything is in place in the embedder's pages."""
    return request.lent is not None and is_in_place(request)


def is_left_to_tiers(request: Request, event: PrefillLost) -> bool:
    """Whether the request names no prefill, so that only its tiers and peers bring pages."""
    return request.lent is not None and request.prefills == NOBODY


def has_all_of_tiers(request: Request, event: Progressed) -> bool:
    """Whether tiers and peers have brought what they have to a request that names no prefill."""
    refusal = request.attempts.refusal
    return refusal is not None and refusal[0] == request.generation


def has_more_in_tiers(request: Request, event: Progressed) -> bool:
    """Whether the next plan of such a request may bring further pages, for which host memory had no room."""
    if request.lent is None or not has_all_of_tiers(request, event):
        return False
    had_no_room = "no_host_page" in (request.sources.declined[0], request.sources.peer_declined[0])
    return had_no_room and (_has_progressed(request) or request.sources.has_room_later)


def _has_progressed(request: Request) -> bool:
    """Whether its plan has brought pages into the lent ones."""
    return request.lent is not None and request.lent.full.restored > request.held.matched


class LentEnds:
    """Actions that end a request with what its lent pages hold so far."""

    def __init__(self, state: CoreState, queue: Queue, restore: Restore, lending: Lending, actions: Actions) -> None:
        self._state = state
        self._queue = queue
        self._restore = restore
        self._lending = lending
        self._actions = actions

    def wait_for_tiers(self, request: Request, event: PrefillLost) -> None:
        """Let the tiers go on: no prefill sends what they do not bring."""
        request.attempts.refuse(request.generation, event)
        self._state.request_changed(request)

    def ask_tiers_again(self, request: Request, event: Progressed) -> None:
        """Return to the queue with what is in place; the next plan goes on from there."""
        assert request.attempts.refusal is not None
        if not _has_progressed(request):
            request.admission.pause(self._state.now_s + ROOM_PAUSE_S)
            self._state.set_deadline(request, request.admission.retry_at_s)
        self._restore.leave(request, settled=request.attempts.refusal[1].settled)
        self._actions.requeue(request)

    def end_without_tiers(self, request: Request, event: Progressed) -> None:
        """End early, because neither a tier nor a prefill has the rest."""
        assert request.attempts.refusal is not None
        self.end_without_prefill(request, request.attempts.refusal[1])

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
