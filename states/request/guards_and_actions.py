"""Guards of the request machine, and the actions that span several rule objects.

Guards read the request and change nothing. If an action raises, the request stays in its state and the core fires
`TransitionRaised`.

Most rows of the table name a method of the object that does the work, for example `Restore.fix_plan`. `Actions` has the
others: a request that fails or returns to the queue leaves rooms, loads and caches. What arrives in a room may complete
loads of other requests as well (`Receiving`).

A request in lent pages may end early, which is no failure: the embedder gets its pages back with what is in place, and
computes the rest. One that names no prefill ends when its tiers and peers have brought what they have. If host memory
had no room for all of that, it returns to the queue first, once for each part that comes: a prompt may be longer than
host memory. If nothing came, it asks again after a pause, as long as operations of others may free host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidekv.states.commands import ReportFailed
from tidekv.states.errors import PrefillCause
from tidekv.states.events import NOBODY, PrefillLost
from tidekv.states.records.stages import Stage, State

if TYPE_CHECKING:
    from tidekv.states.backup.backups import Backups
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import (
        AbortRequested,
        AuxReceived,
        ChunkReceived,
        DeadlinePassed,
        Event,
        PagesLost,
        Progressed,
        RequestChanged,
        TransitionRaised,
    )
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.loads.loads import Loads
    from tidekv.states.loads.shared_transfers import SharedTransfers
    from tidekv.states.records.request import Request
    from tidekv.states.request.admission_queue import Queue
    from tidekv.states.request.lending import Lending
    from tidekv.states.request.restore import Restore

RETRY_PAUSE_S: Final = 0.1
"""Seconds before a prefill that was late is tried again; each further pause is twice as long."""
RETRY_PAUSE_MAX_S: Final = 2.0
ROOM_PAUSE_S: Final = 0.05
"""Time after which a request asks again for room in host memory."""
LATE: Final = frozenset(cause.value for cause in PrefillCause if cause.is_lateness)

# --- Guards ---


def has_not_asked(request: Request, event: Event) -> bool:
    """Whether storage has not been asked since the request entered the queue."""
    return not request.admission.has_asked


def can_plan(request: Request, event: Event) -> bool:
    """Whether the request has no plan yet."""
    return not request.is_planned


def waits_for_storage(request: Request, event: Event) -> bool:
    """Whether the request is planned and a fetch of its plan has not arrived."""
    return _fetches(request) and request.is_planned


def waits_for_copies(request: Request, event: Event) -> bool:
    """Whether the request is planned, and a copy to the device is under way or a failed load is not extended yet."""
    return _copies(request) and request.is_planned


def needs_no_storage(request: Request, event: Event) -> bool:
    """Whether every fetch has arrived or was given up."""
    return not (_fetches(request) and request.is_planned)


def needs_no_local_tier(request: Request, event: Event) -> bool:
    """Whether the request waits for prefill's writes only."""
    return not ((_fetches(request) or _copies(request)) and request.is_planned)


def waits_for_prefill(request: Request, event: Event) -> bool:
    """Whether the request is planned and waits for prefill, or for the caller's computation, only."""
    return not (_fetches(request) or _copies(request)) and request.is_planned


# These two run on every event of a request; a plain loop is faster than `any`.
def _fetches(request: Request) -> bool:
    for load in request.loads:
        if load.stage is Stage.FETCHING:
            return True
    return request.component_pages is not None and request.fetches_components


def _copies(request: Request) -> bool:
    for load in request.loads:
        if load.stage is Stage.COPYING or load.stage is Stage.FAILED:
            return True
    return request.component_pages is not None and request.waits_for_components


def has_everything(request: Request, event: Event) -> bool:
    """Whether everything is in place in device pages of the engine."""
    return request.lent is None and is_in_place(request)


def is_in_place(request: Request) -> bool:
    """Whether every load has ended, every span is written, and the first token has arrived."""
    if request.loads:
        return False
    if request.component_pages is not None and (request.waits_for_components or request.waits_for_sender):
        return False
    return request.recompute.is_done or (request.room is not None and request.room.is_complete)


def can_recompute(request: Request, event: Event) -> bool:
    """Whether the caller can compute the rest of the prompt and was not asked yet."""
    return request.can_recompute and not request.recompute.is_chosen


def has_failed_short(request: Request, event: Event) -> bool:
    """Whether the caller failed to compute a short rest, which prefill was not asked for."""
    return bool(request.recompute.error) and request.recompute.is_short


def has_failed_to_recompute(request: Request, event: Event) -> bool:
    """Whether the caller's computation failed."""
    return bool(request.recompute.error)


def has_tiers_left(request: Request, event: TransitionRaised) -> bool:
    """Whether this is the first or second exception of this step, so that there are tiers left to give up."""
    return request.raises_of(event.taking) <= 2


def is_first_raise(request: Request, event: TransitionRaised) -> bool:
    """Whether this step has raised for the first time, so that it runs once more, with less."""
    return request.raises_of(event.taking) <= 1


def has_another_prefill(request: Request, event: PrefillLost) -> bool:
    """Whether some prefill was tried less often than `attempts_per_prefill`, or may be tried once more.

    Damaged pages are asked for once more than that: a prefill that sent them is well, and the next time the damage is
    unlikely. A prefill that is only late is tried until the deadline, unless the caller can compute the rest.
    """
    return request.prefills != NOBODY and (_has_attempts_left(request, event) or _may_be_late(request, event))


def _has_attempts_left(request: Request, event: PrefillLost) -> bool:
    attempts_max = request.attempts.attempts_max
    if event.cause == PrefillCause.DAMAGED.value:
        attempts_max += 1
    return request.attempts.count + 1 < attempts_max


def _may_be_late(request: Request, event: PrefillLost) -> bool:
    # Not with lent pages, or a caller that computes: for them a prefill that is lost is not the end.
    is_bounded = request.deadline_at_s < float("inf") and request.lent is None and not request.can_recompute
    return request.attempts.retries_late and event.cause in LATE and is_bounded


# --- Guards of requests in lent pages ---


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


# --- Actions ---


class Actions:
    """Actions of the request machine that span several rule objects of one core."""

    def __init__(
        self,
        state: CoreState,
        queue: Queue,
        restore: Restore,
        backups: Backups,
        lending: Lending,
    ) -> None:
        self._state = state
        self._queue = queue
        self._restore = restore
        self._backups = backups
        self._lending = lending

    # --- Back to the queue ---

    def start_over(self, request: Request, event: PagesLost) -> None:
        """Give everything back and return to the queue in a new generation."""
        self._state.count("sent_back")
        request.fallbacks.note(event.cause)
        self._restore.leave(request, settled=False)
        self.requeue(request)

    def try_next_prefill(self, request: Request, event: PrefillLost) -> None:
        """Return to the queue; the next generation uses the next prefill of the list."""
        self._state.count("prefill_retries")
        request.fallbacks.note(f"{event.cause}: {event.detail}")
        self._restore.leave(request, settled=event.settled)
        if not _has_attempts_left(request, event):
            # An overloaded worker gets its turns only if its waiting requests ask less often.
            late = request.attempts.count + 1 - request.attempts.attempts_max
            pause_s = min(RETRY_PAUSE_S * 2.0 ** min(late, 8), RETRY_PAUSE_MAX_S)
            request.admission.pause(self._state.now_s + pause_s)
            self._state.set_deadline(request, request.admission.retry_at_s)
            self._state.count("late_retries")
        request.attempts.try_next()
        self.requeue(request)

    def ask_caller(self, request: Request, event: PrefillLost) -> None:
        """Return to the queue; in the next generation the caller computes what the device does not have."""
        self._state.count("recomputes")
        request.fallbacks.note(f"{event.cause}: {event.detail}")
        self._restore.leave(request, settled=event.settled)
        request.recompute.choose()
        self.requeue(request)

    def ask_prefill(self, request: Request, event: Progressed) -> None:
        """Return to the queue; the next generation asks prefill for the rest that the caller could not compute."""
        self._state.count("sent_back")
        request.fallbacks.note(f"the recompute failed: {request.recompute.error}")
        self._restore.leave(request, settled=True)
        request.recompute.give_short_up()
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """Return a request that has left to the queue, in a new generation."""
        request.begin_generation()
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Add the request to the queue, for the first time or again."""
        self._queue.enter(request)
        request.admission.enter_queue()
        self._state.request_changed(request)

    def change(self, request: Request, event: RequestChanged) -> None:
        """Give a request another priority or deadline. One in the queue keeps its age."""
        state = self._state
        if event.deadline_at_s is not None:
            # Twice does no harm: the entry of a deadline that is not the request's finds nothing to do.
            state.set_deadline(request, event.deadline_at_s)
        if event.priority is not None and request.waits_for_admission:
            self._queue.move(request, event.priority)
            state.pages_were_freed()
        elif event.priority is not None:
            request.change_priority(event.priority)
        if event.deadline_at_s is not None:
            request.change_deadline(event.deadline_at_s)

    # --- The ends ---

    def fail_by_raise(self, request: Request, event: TransitionRaised) -> None:
        """Fail after an exception: no tier is left to fall back to."""
        self._fail(request, "internal error", event.detail)

    def fail_by_prefill(self, request: Request, event: PrefillLost) -> None:
        """Fail because the room is lost, every prefill was tried, and the caller cannot compute the rest."""
        self._fail(request, event.cause, event.detail, settled=event.settled)

    def fail_by_recompute(self, request: Request, event: Progressed) -> None:
        """Fail because the caller could not compute the rest."""
        self._fail(request, "recompute failed", request.recompute.error)

    def fail_by_deadline(self, request: Request, event: DeadlinePassed) -> None:
        """Fail because the caller's deadline has passed."""
        why = ""
        if request.waits_for_admission and self._queue.is_held_by_quota(request):
            why = f": prefill {request.prefill} is at its quota of device pages"
        elif request.admission.retry_at_s:
            why = (
                f": after {request.attempts.count} attempts, the last of which ended by {request.fallbacks.last_error}"
            )
        self._fail(request, "deadline", f"in {request.state.value}{why}")

    def fail_by_abort(self, request: Request, event: AbortRequested) -> None:
        """Fail because the caller aborted the request."""
        self._fail(request, event.cause, f"in {request.state.value}")

    def _fail(self, request: Request, cause: str, detail: str, *, settled: bool = False) -> None:
        request.fallbacks.note(cause)
        self._restore.leave(request, settled=settled)
        self._backups.release_retracted(request.request_id)
        self._lending.report_failed(request, ReportFailed(request_id=request.request_id, cause=cause, detail=detail))
        self._state.forget(request)
        if request.state is State.PREALLOC:
            self._queue.remove(request)

    # --- The early ends of requests in lent pages ---

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
        self.requeue(request)

    def end_without_tiers(self, request: Request, event: Progressed) -> None:
        """End early, because neither a tier nor a prefill has the rest."""
        assert request.attempts.refusal is not None
        self.end_without_prefill(request, request.attempts.refusal[1])

    def end_without_prefill(self, request: Request, event: PrefillLost) -> None:
        """End early, because the room is lost and every prefill was tried."""
        self._end_early(request, event.cause, event.detail, settled=event.settled)

    def end_at_deadline(self, request: Request, event: DeadlinePassed) -> None:
        """End early, because the caller's deadline has passed."""
        self._end_early(request, "deadline", f"in {request.state.value}", settled=False)

    def _end_early(self, request: Request, cause: str, detail: str, *, settled: bool) -> None:
        self._restore.leave(request, settled=settled)
        self._lending.end_with(request, cause, detail)
        if request.waits_for_admission:
            self._queue.remove(request)


class Receiving:
    """Actions of the request machine for what prefill sends."""

    def __init__(self, state: CoreState, rooms: Rooms, loads: Loads, shared_transfers: SharedTransfers) -> None:
        self._state = state
        self._rooms = rooms
        self._loads = loads
        self._shared_transfers = shared_transfers

    def receive_chunk(self, request: Request, event: ChunkReceived) -> None:
        """Note pages that have arrived; they may complete a load that other requests wait for as well."""
        assert request.room is not None
        load = self._rooms.load_filled_by(request.room, event)
        if load is not None:
            # Before the chunk is noted: if this raises, the room's cursors are unchanged and the chunk is not lost.
            self._loads.filled(load)
        self._rooms.take_chunk(request.room, event)
        self._note_progress(request)

    def receive_aux(self, request: Request, event: AuxReceived) -> None:
        """Note that the first token has arrived from one rank."""
        assert request.room is not None
        self._rooms.receive_aux(request.room, event.rank)
        self._note_progress(request)

    def _note_progress(self, request: Request) -> None:
        is_complete = request.room is not None and request.room.is_complete
        # Guards, waiters of component pages and early READY ask whether the room is complete, and nothing else of it.
        if is_complete:
            self._state.request_changed(request)
        self._shared_transfers.note_received(request, is_complete=is_complete)
        if is_complete:
            self._loads.divide_again(request)
