"""What lands in the room of a request: pages and the first token. Loads of other requests may be complete by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import AuxLanded, ChunkLanded
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.loads.loads import Loads
    from tidekv.states.loads.shared_transfers import SharedTransfers
    from tidekv.states.records.request import Request


class Landing:
    """Actions of the request machine for what prefill sends."""

    def __init__(self, state: CoreState, rooms: Rooms, loads: Loads, shared_transfers: SharedTransfers) -> None:
        self._state = state
        self._rooms = rooms
        self._loads = loads
        self._shared_transfers = shared_transfers

    def land_chunk(self, request: Request, event: ChunkLanded) -> None:
        """Note pages that have landed; they may complete a load that other requests wait for as well."""
        assert request.room is not None
        load = self._rooms.load_filled_by(request.room, event)
        if load is not None:
            # Before the chunk is noted: if this raises, the room's cursors are unchanged and the chunk is not lost.
            self._loads.filled(load)
        self._rooms.land(request.room, event)
        self._landed(request)

    def land_aux(self, request: Request, event: AuxLanded) -> None:
        """Note that the first token has arrived from one rank."""
        assert request.room is not None
        self._rooms.land_aux(request.room, event.rank)
        self._landed(request)

    def _landed(self, request: Request) -> None:
        is_complete = request.room is not None and request.room.is_complete
        # Guards, waiters of component pages and early READY ask whether the room is complete, and nothing else of it.
        if is_complete:
            self._state.request_changed(request)
        self._shared_transfers.note_landed(request, is_complete=is_complete)
        if is_complete:
            self._loads.divide_again(request)
