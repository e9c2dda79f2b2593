"""What arrives in the room of a request: pages and the first token. Loads of other requests may be complete by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import AuxReceived, ChunkReceived
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.loads.loads import Loads
    from tidekv.states.loads.shared_transfers import SharedTransfers
    from tidekv.states.records.request import Request


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
