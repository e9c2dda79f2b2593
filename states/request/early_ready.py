"""Early READY: the caller begins with the first layers of a prompt while later layers are still on their way.

A request with `early` is copied layer by layer. Once its first token is known and the first layer of all its pages is
in place, `ReportEarly` hands the page table to the caller, and `ReportLayers` reports each further layer. The request
itself stays in its state, with everything that it owns there, and becomes READY when all is in place.

    nothing reported ──first layer, first token──▶ begun ──all in place──▶ READY
        ▲                                           │ a source failed, or the room was left
        └────────── EarlyUseEnded ──────────────── lost

A fault takes the usual way: prefill is asked for the missing pages, or the next one in a new generation. The caller
gets `ReportLayersLost` and begins again after the next report. It may have been writing meanwhile, to the last
page of the prompt behind the prompt, to the reserve, and to its own component pages. If the request leaves its room,
these pages go to the quarantine and stay there until the caller's use has ended (`EarlyUseEnded`) and prefill does not
write to them any more. All other pages are only read by the caller, whose results are dropped after a loss.

Component pages are in place before the first layer is reported. The caller updates the record of a state in place, so
after a loss the record may not be that of the prompt's end any more. Once the caller's use has ended, prefill is asked
for it by an extend, into the same page. Pages of a window are written only behind the prompt, and serve the next
attempt.

A request has one early READY at a time: none is reported while the caller may still use the pages of the last one. With
lent pages, or pages that the caller computes, there is no early READY.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import ReportEarly, ReportLayers, ReportLayersLost
from tidekv.states.records.causes import LOAD_CAUSES
from tidekv.states.records.request import Load, Request
from tidekv.states.records.stages import Stage
from tidekv.states.rollback import Rollback

if TYPE_CHECKING:
    from tidekv.states.components.missing import MissingPages
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.records.request import RoomRecord


class EarlyUse:
    """Operation: the caller uses the pages of an early READY. Ends with the caller's use, or with READY."""

    __slots__ = ("_early", "_rooms", "_state", "op", "request")

    def __init__(self, early: EarlyReady, state: CoreState, rooms: Rooms, request: Request) -> None:
        self._early = early
        self._state = state
        self._rooms = rooms
        self.request = request
        self.op = 0

    def ended(self, event: Outcome, error: str) -> None:
        """Free what the use kept in quarantine; the request may be reported early again."""
        self.abandon()

    def late(self) -> None:
        """Never called: only the caller's word makes the pages safe to reuse."""

    def abandon(self) -> None:
        """End the use. Can be called again after an exception."""
        request = self.request
        self._rooms.user_left(self.op)
        if request.room is not None and request.room.user_op == self.op:
            request.room.end_use()
        self._early.ask_for_records(request)
        request.early.end()
        if self._state.requests.get(request.request_id) is request:
            self._state.request_changed(request)


class EarlyReady:
    """Reports of layers to the callers of requests with `early`."""

    def __init__(self, state: CoreState, rooms: Rooms, missing: MissingPages | None) -> None:
        """`missing` is None without components."""
        self._state = state
        self._rooms = rooms
        self._missing = missing
        self._states = [component.name for component in state.settings.components if not component.is_shared]

    def look(self, request: Request) -> None:
        """Report the layers that have arrived since the last report, or that layers were lost.

        Can be called again after an exception.
        """
        layers = layers_in_place(request)
        if layers < request.early.layers:
            cause = next((LOAD_CAUSES[load.cause] for load in request.loads if load.cause), "")
            self._lose(request, cause)
            request.early.spoil(is_spoilt=bool(self._states))
        elif layers > request.early.layers:
            if request.early.layers:
                self._state.emit(
                    ReportLayers(request_id=request.request_id, generation=request.generation, layers=layers)
                )
                request.early.report(layers)
            elif not request.early.op:
                self._begin(request, layers)

    def _begin(self, request: Request, layers: int) -> None:
        state, room = self._state, request.room
        assert room is not None and request.held.lock is not None
        use = EarlyUse(self, state, self._rooms, request)
        with Rollback() as undo:
            use.op = state.start_operation(use, deadline_s=float("inf"))
            undo.callback(state.operations.pop, use.op)
            state.emit(
                ReportEarly(
                    op=use.op,
                    request_id=request.request_id,
                    generation=request.generation,
                    layers=layers,
                    pages=state.index.device_path(request.held.lock.node) + request.held.own,
                    reserve=request.held.reserve,
                    component_pages=None if request.component_pages is None else request.component_pages.early_table,
                )
            )
            undo.keep()
        request.early.begin(use.op, layers)
        room.begin_use(use.op)

    def _lose(self, request: Request, cause: str) -> None:
        self._state.emit(ReportLayersLost(request_id=request.request_id, generation=request.generation, cause=cause))
        request.early.report(0)

    def ask_for_records(self, request: Request) -> None:
        """Ask prefill for records that the caller may have updated, and does not write to any more."""
        held = request.component_pages
        if not request.early.is_spoilt or held is None or self._missing is None:
            return
        for name in self._states:
            self._missing.lost(held, name, range(held.plan.firsts[name], request.page_count), "record_updated")
        request.early.spoil(is_spoilt=False)

    def complete(self, request: Request, room: RoomRecord | None) -> None:
        """End the use of a request that is READY: its pages are the caller's now. Raises nothing."""
        if room is not None and room.user_op:
            self._state.operations.pop(room.user_op, None)
            request.early.end()
            room.end_use()
        request.early.report(0)

    def leave(self, request: Request) -> None:
        """Report the loss of an early READY whose request is about to leave its room."""
        if request.early.layers:
            self._lose(request, request.fallbacks.last_error)
        request.early.spoil(is_spoilt=False)


def layers_in_place(request: Request) -> int:
    """Return the number of leading layers of which all pages are in place, for a request that is not READY.

    0 before the first token is known, and if the request has no early READY at all.
    """
    room = request.room
    if room is None or request.waits_for_components or request.waits_for_sender or request.lent is not None:
        return 0
    if not room.ranks or len(room.aux_from) != room.ranks or not room.is_written:
        return 0
    return min((_layers_of(load) for load in request.loads), default=0)


def _layers_of(load: Load) -> int:
    return load.layers if load.stage is Stage.COPYING else 0
