"""Rooms: what prefill was asked to write for a request, how far it has come, and which writers may still write.

A room's pages are under remote write from the promise until every span's last chunk has landed. A request that leaves
before that leaves its pages here, in the quarantine, until every writer of the room has said Drained or is proven dead.
Time alone frees nothing: NIXL has no cancel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import SendAbort, SendExtend, SendPromise, SendReceived
from tidekv.states.request.request import Load, Request, Room, Span
from tidekv.states.storage.source_split import SourceLoad
from tidekv.states.storage.throughput import ThroughputEstimator
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.components.specs import ComponentPages
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import ChunkLanded, PromiseSent
    from tidekv.states.request.request import RoomKey


class Draining:
    """What a left room still holds: pages that a writer may write to."""

    __slots__ = ("component_pages", "drained", "loads", "pages", "ranks", "writer")

    def __init__(self, room: Room) -> None:
        self.writer = room.writer
        self.ranks = room.ranks
        """0: the promise was not sent, as far as is known; then the first answer counts for all ranks."""
        self.drained: set[int] = set()
        self.pages: PageIds = page_ids()
        self.component_pages: dict[str, PageIds] = {}
        """Pages of components, by name."""
        self.loads = room.lost


class Rooms:
    """All rooms of a core, live and draining."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._live: dict[RoomKey, Room] = {}
        self._draining: dict[RoomKey, Draining] = {}
        self._throughput = ThroughputEstimator()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Room]:
        return iter(self._live.values())

    @property
    def source_load(self) -> SourceLoad:
        """How fast prefill brings pages, and how many are under way from there."""
        missing = sum(span.pages_missing(room.ranks) for room in self._live.values() for span in room.spans)
        return SourceLoad(self._throughput.page_s(self._state.now_s), missing)

    @property
    def quarantine(self) -> list[Draining]:
        """What left rooms still hold."""
        return list(self._draining.values())

    @property
    def draining_rooms(self) -> int:
        """Left rooms whose writers have not confirmed yet."""
        return len(self._draining)

    def live(self, request_id: str, generation: int) -> Room | None:
        """The live room of that name, if there is one."""
        return self._live.get((request_id, generation))

    def open(
        self,
        request: Request,
        *,
        promised: int,
        own: PageIds,
        component_pages: tuple[ComponentPages, ...] | None = None,
    ) -> None:
        """Open the room of a planned request: what is promised is not sent, its own pages are span 0."""
        room = Room(request, prefill=request.attempts % request.prefill_count)
        room.spans.append(self._span(promised, len(own), None))
        self._state.emit(
            SendPromise(
                request_id=request.request_id,
                generation=request.generation,
                prefill=room.prefill,
                prompt_tokens=request.prompt_tokens,
                promised_tokens=min(promised * self._state.settings.page_size, request.prompt_tokens),
                pages=own,
                renewed=request.generation != request.first_generation,
                component_pages=component_pages,
            )
        )
        self._live[room.key] = room
        request.room = room

    def extend(self, room: Room, load: Load) -> None:
        """Take back a part of the promise: the pages of `load`, which no local writer touches any more."""
        self._state.emit(
            SendExtend(
                request_id=room.request.request_id,
                generation=room.generation,
                span=len(room.spans),
                first=load.first,
                pages=load.device_pages,
            )
        )
        room.spans.append(self._span(load.first, load.page_count, load))
        self._state.count("extends")

    def _span(self, first: int, count: int, load: Load | None) -> Span:
        if self._state.settings.prefetch != "soonest" or not count:
            # The policy does not need its speed, or it has no pages to measure it by.
            return Span(first, count, load)
        return Span(
            first, count, load, asked_at_s=self._state.now_s, queued_pages=self.source_load.queued_pages + count
        )

    def load_filled_by(self, room: Room, event: ChunkLanded) -> Load | None:
        """Tell the load that this chunk, once it is noted, completes."""
        span = room.span_of(event)
        if span is None or span.load is None or not event.last or not span.continues(event):
            return None
        is_end = event.first + event.count == span.first + span.count
        return span.load if is_end and len(span.ended) + 1 == room.ranks else None

    def land(self, room: Room, event: ChunkLanded) -> None:
        """Note a chunk.

        A chunk that was noted before is counted and changes nothing; one from beyond the cursor, or of no span that
        was asked for, cannot come from a peer whose frames the receiver has checked, and is counted as well.
        """
        span = room.span_of(event)
        if span is None:
            self._state.count("chunks_foreign")
        elif not span.continues(event):
            self._state.count("chunks_repeated")
        else:
            end = span.cursors[event.rank] = event.first + event.count
            if event.last and end == span.first + span.count:
                span.ended.add(event.rank)
                if len(span.ended) == room.ranks and span.queued_pages:
                    taken_s = self._state.now_s - span.asked_at_s
                    self._throughput.note(taken_s=taken_s, pages=span.queued_pages, now_s=self._state.now_s)
            elif event.last:
                self._state.count("chunks_foreign")

    def land_aux(self, room: Room, rank: int) -> None:
        """Note the first token from one rank; a rank that the room does not have is counted and changes nothing."""
        if 0 <= rank < room.ranks:
            room.aux_from.add(rank)
        else:
            self._state.count("frames_foreign")

    def receive(self, room: Room) -> None:
        """All of the room is here: prefill may free its pages."""
        self._state.emit(SendReceived(request_id=room.request.request_id, generation=room.generation))
        del self._live[room.key]
        room.request.room = None

    def reopen(self, room: Room) -> None:
        """Take `receive` back, in the step that it was called in."""
        self._live[room.key] = room
        room.request.room = room

    def leave(self, room: Room, *, settled: bool) -> None:
        """Leave a room before its end. Its own pages go to the quarantine, with the loads that it was filling; or they
        are free if they have no writer. It can be called again if it raised.
        """
        request = room.request
        if not settled and not room.is_aborted:
            self._state.emit(SendAbort(request_id=request.request_id, generation=room.generation))
            room.is_aborted = True
        if settled or room.is_written:
            if request.component_pages is not None and self._state.components is not None:
                self._state.components.give_back(request.component_pages.remote)
                request.component_pages.give_up_remote()
            self._state.device.give_back(request.own)
            self._state.reclaimable_loads.extend(room.lost)
            self._state.pages_freed = True
        else:
            draining = self._draining.setdefault(room.key, Draining(room))
            if request.component_pages is not None and self._state.components is not None:
                self._state.components.drain(request.component_pages.remote)
                draining.component_pages.update(request.component_pages.give_up_remote())
            self._state.device.drain(request.own)
            draining.pages = request.own
        request.own = page_ids()
        request.room = None
        del self._live[room.key]

    def drained(self, request_id: str, generation: int, rank: int) -> None:
        """A writer has confirmed. With the last of them the pages are free."""
        draining = self._draining.get((request_id, generation))
        if draining is None:
            self._state.count("frames_late")
            return
        if draining.ranks and not 0 <= rank < draining.ranks:
            self._state.count("frames_foreign")
            return
        draining.drained.add(rank)
        if len(draining.drained) >= draining.ranks:
            self._settle((request_id, generation))

    def note_writer(self, request: Request, event: PromiseSent) -> None:
        """Note which peer writes to the room, and how many ranks it has."""
        assert request.room is not None
        request.room.writer, request.room.ranks = event.writer, event.ranks

    def note_late_writer(self, event: PromiseSent) -> None:
        """The same, for a room that its request has left already."""
        draining = self._draining.get((event.request_id, event.generation))
        if draining is not None:
            draining.writer, draining.ranks = event.writer, event.ranks

    def of_writer(self, writer: str) -> list[Room]:
        """Live rooms that this peer writes to."""
        return [room for room in self._live.values() if room.writer == writer]

    def writer_dead(self, writer: str) -> None:
        """Nothing of this peer can write any more: what it kept in the quarantine is free."""
        for key in [key for key, draining in self._draining.items() if draining.writer == writer]:
            self._settle(key)

    def settle_unsent(self, request_id: str, generation: int) -> None:
        """The room of a request that has left turned out never to have reached a writer, or to be drained."""
        if (request_id, generation) in self._draining:
            self._settle((request_id, generation))

    def _settle(self, key: RoomKey) -> None:
        draining = self._draining[key]
        if self._state.components is not None:
            self._state.components.settle(draining.component_pages)
            draining.component_pages = {}
        self._state.device.settle(draining.pages)
        del self._draining[key]
        self._state.reclaimable_loads.extend(draining.loads)
        self._state.pages_freed = True
