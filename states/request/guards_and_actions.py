"""Guards of the request machine, and those of its actions that span several rule objects.

A guard asks the request and changes nothing. An action may raise: the request is then in the state that it was in, and
`TransitionRaised` follows. Most rows of the table name a method of the object that does the work, for example
`Restore.fix_plan`; here are the actions that no single object could do: what a landed chunk means for rooms and loads,
the ways back to the queue, and the ways to fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import ReportFailed
from tidekv.states.request.request import Stage, State
from tidekv.states.storage.source_split import fetches_to_keep

if TYPE_CHECKING:
    from tidekv.states.backup.backups import Backups
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import (
        AbortRequested,
        AuxLanded,
        ChunkLanded,
        DeadlinePassed,
        Event,
        PagesLost,
        PrefillLost,
        Recomputed,
        TransitionRaised,
    )
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.loads.loads import Loads
    from tidekv.states.loads.shared_transfers import SharedTransfers
    from tidekv.states.request.admission_queue import Queue
    from tidekv.states.request.request import Request
    from tidekv.states.request.restore import Restore
    from tidekv.states.storage.admission import StorageAdmission

# --- Guards ---


def has_not_asked(request: Request, event: Event) -> bool:
    """Storage was not asked since the request waits for admission."""
    return not request.has_asked


def can_plan(request: Request, event: Event) -> bool:
    """It has no plan yet, and waits for no answer of storage."""
    return not request.is_planned and not request.query_op


def waits_for_storage(request: Request, event: Event) -> bool:
    """It is planned, and a fetch of its plan has not landed."""
    if not request.is_planned:
        return False
    for load in request.loads:
        if load.stage is Stage.FETCHING:
            return True
    return request.fetches_components


def waits_for_copies(request: Request, event: Event) -> bool:
    """It is planned, and a copy to the device is under way, or a failed load has no sharer yet that extends into it."""
    if not request.is_planned:
        return False
    for load in request.loads:
        if load.stage is Stage.COPYING or load.stage is Stage.FAILED:
            return True
    return request.waits_for_components


def is_planned(request: Request, event: Event) -> bool:
    """The promise has been given, or the caller was asked to compute."""
    return request.is_planned


def needs_no_storage(request: Request, event: Event) -> bool:
    """Every fetch has landed, or was cut."""
    return not waits_for_storage(request, event)


def needs_no_local_tier(request: Request, event: Event) -> bool:
    """Only prefill's writes are waited for."""
    return not waits_for_storage(request, event) and not waits_for_copies(request, event)


def has_everything(request: Request, event: Event) -> bool:
    """Every load has ended, every span is written, and the first token is here."""
    is_written = request.recomputed or (request.room is not None and request.room.is_complete)
    return is_written and not request.loads and not request.waits_for_components


def can_recompute(request: Request, event: Event) -> bool:
    """The caller can compute the rest itself, and was not asked yet."""
    return request.can_recompute and not request.recomputes


def has_failed(request: Request, event: Recomputed) -> bool:
    """The caller could not compute the rest."""
    return bool(event.error)


def has_tiers_left(request: Request, event: TransitionRaised) -> bool:
    """It is the first or second raise of this step: there are tiers left to give up."""
    return request.raises_of(event.taking) <= 2


def is_first_raise(request: Request, event: TransitionRaised) -> bool:
    """This step has raised for the first time: it runs once more, with less."""
    return request.raises_of(event.taking) <= 1


# --- Actions ---


class Actions:
    """Actions of one core that span several rule objects."""

    def __init__(
        self,
        state: CoreState,
        queue: Queue,
        storage: StorageAdmission,
        rooms: Rooms,
        loads: Loads,
        shared_transfers: SharedTransfers,
        restore: Restore,
        backups: Backups,
    ) -> None:
        self._state = state
        self._queue = queue
        self._storage = storage
        self._rooms = rooms
        self._loads = loads
        self._shared_transfers = shared_transfers
        self._restore = restore
        self._backups = backups
        self._attempts_per_prefill = state.settings.attempts_per_prefill

    # --- The hand-over ---

    def land_chunk(self, request: Request, event: ChunkLanded) -> None:
        """Note pages that have come; they may complete a load that other requests wait for as well."""
        assert request.room is not None
        load = self._rooms.load_filled_by(request.room, event)
        if load is not None:
            self._loads.filled(load)
        self._rooms.land(request.room, event)
        self._shared_transfers.note_landed(request)
        self._stop_waiting(request)

    def land_aux(self, request: Request, event: AuxLanded) -> None:
        """Note the first token from one rank."""
        assert request.room is not None
        self._rooms.land_aux(request.room, event.rank)
        self._shared_transfers.note_landed(request)
        self._stop_waiting(request)

    def _stop_waiting(self, request: Request) -> None:
        """Give up fetches that prefill, which has brought everything else, outruns; the policy says which."""
        policy = self._state.settings.prefetch
        if policy in ("best_effort", "soonest") and request.room is not None and request.room.is_complete:
            self._loads.transfer_is_done(request, keep=self._fetches_to_keep(request) if policy == "soonest" else 0)

    def _fetches_to_keep(self, request: Request) -> int:
        """How many fetches of a request bring their pages sooner than prefill would now."""
        now_s, page_s = self._state.now_s, self._storage.source_load.page_s
        fetches = request.fetches
        if fetches and page_s and now_s - fetches[0].begun_at_s > fetches[0].queued_pages * page_s:
            # The first should have landed by now: storage is no faster than that, for this plan and the next ones.
            self._storage.note_throughput(begun_at_s=fetches[0].begun_at_s, pages=fetches[0].queued_pages)
            page_s = (now_s - fetches[0].begun_at_s) / fetches[0].queued_pages
        lands_s = [
            max(load.begun_at_s + load.queued_pages * page_s - now_s, load.page_count * page_s) for load in fetches
        ]
        pages = [load.page_count for load in fetches]
        return fetches_to_keep(
            list(zip(lands_s if page_s else [0.0] * len(fetches), pages, strict=True)), link=self._rooms.source_load
        )

    # --- Back to the queue ---

    def has_another_prefill(self, request: Request, event: Event) -> bool:
        """Not every prefill was tried as often as the settings allow."""
        return request.attempts + 1 < request.prefill_count * self._attempts_per_prefill

    def start_over(self, request: Request, event: PagesLost) -> None:
        """Give everything back and wait for other pages, in a new generation."""
        self._state.count("sent_back")
        request.trouble = event.cause
        self._restore.leave(request, settled=False)
        self._requeue(request)

    def try_next_prefill(self, request: Request, event: PrefillLost) -> None:
        """Start over with the next prefill of the list."""
        self._state.count("prefill_retries")
        request.trouble = f"{event.cause}: {event.detail}"
        self._restore.leave(request, settled=event.settled)
        request.attempts += 1
        self._requeue(request)

    def ask_caller(self, request: Request, event: PrefillLost) -> None:
        """Start over without prefill: the caller computes what the device does not have."""
        self._state.count("recomputes")
        request.trouble = f"{event.cause}: {event.detail}"
        self._restore.leave(request, settled=event.settled)
        request.recomputes = True
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        request.generation += 1
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """The request waits for admission, for the first time or again."""
        self._queue.add(request)
        request.has_asked = False
        self._state.dirty[request] = None
        self._state.pages_freed = True

    # --- The ends ---

    def fail_by_raise(self, request: Request, event: TransitionRaised) -> None:
        """A bug of tidekv or of a component: there is no tier left to fall back to."""
        self._fail(request, "internal error", event.detail)

    def fail_by_prefill(self, request: Request, event: PrefillLost) -> None:
        """No prefill can or will send the rest."""
        self._fail(request, event.cause, event.detail, settled=event.settled)

    def fail_by_recompute(self, request: Request, event: Recomputed) -> None:
        """The last resort did not help either."""
        request.recompute_op = 0
        self._fail(request, "recompute failed", event.error)

    def fail_by_deadline(self, request: Request, event: DeadlinePassed) -> None:
        """The caller's time is up."""
        self._fail(request, "deadline", f"in {request.state.value}")

    def fail_by_abort(self, request: Request, event: AbortRequested) -> None:
        """The caller does not want it any more."""
        self._fail(request, event.cause, f"in {request.state.value}")

    def _fail(self, request: Request, cause: str, detail: str, *, settled: bool = False) -> None:
        self._restore.leave(request, settled=settled)
        self._backups.release_retracted(request.request_id)
        self._state.emit(ReportFailed(request_id=request.request_id, cause=cause, detail=detail))
        self._state.forget(request)
        if request.state is State.PREALLOC:
            self._queue.remove(request)
