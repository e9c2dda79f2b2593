"""Rooms: the pages that prefill writes for a request, their progress, and the writers that may still write.

A *room* is one hand-over of one generation of a request. A *span* is a run of prompt pages that the room requests: span
0 is the part that was not promised, each *extend* adds another. Ownership of the pages under remote write:

    live room                       the request owns those of span 0 (`held.own`, `RequestComponents.remote`), and
                                    those of later spans of components; the tree holds those of later spans of full
                                    pages, in nodes under a load
    received                        the same: the writers have finished
    left, no writer can be active   the request's pages become free at once, and the loads are reclaimed
    left, the caller may use them   quarantine, as below: a caller that has begun early (`ReportEarly`) may write to the
                                    prompt's last page, the reserve and its component pages until its use has ended
    left, a writer may be active    quarantine: a `Draining` holds the request's pages, which are *draining*; the nodes
                                    of its loads stay in the tree, in RECLAIMING, and their pages are draining,
                                    too. The quota of the prefill counts both
    every writer has confirmed      the pages of the `Draining` become free, and its loads are reclaimed
    (Drained) or is proven dead

No time-out ever frees a page, because NIXL cannot cancel a write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import SendAbort, SendExtend, SendPromise, SendReceived
from tidekv.states.records.request import Load, Request, RoomRecord
from tidekv.states.records.span import Span
from tidekv.states.storage.fetch_source import ThroughputEstimator
from tidekv.states.storage.source_split import SourceLoad
from tidekv.states.types import FULL, PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.component_specs import ComponentPages
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import ChunkReceived, PromiseSent
    from tidekv.states.records.request import RoomKey


class Draining:
    """Pages of a left room, in quarantine until no writer can write to them any more."""

    __slots__ = (
        "charged",
        "component_pages",
        "drained",
        "has_writer",
        "loads",
        "pages",
        "prefill",
        "ranks",
        "user_op",
        "writer",
    )

    def __init__(self, room: RoomRecord) -> None:
        self.prefill = room.request.prefill
        """The instance whose quota counts its pages."""
        self.charged = 0
        self.writer = room.writer
        self.ranks = room.ranks
        """Writers that must confirm. 0 if it is unknown whether the promise was sent: then one answer is enough."""
        self.drained: set[int] = set()
        self.pages: PageIds = page_ids()
        self.component_pages: dict[str, PageIds] = {}
        """Component pages, by component."""
        self.loads = room.lost
        self.has_writer = True
        """Whether prefill may still write to its pages."""
        self.user_op = room.user_op
        """Operation of the early READY by which the caller may still write to its pages; 0 if there is none."""


class Rooms:
    """All rooms of a core, live and draining."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._live: dict[RoomKey, RoomRecord] = {}
        self._draining: dict[RoomKey, Draining] = {}
        self._throughput = ThroughputEstimator()
        self.pages_missing = 0
        """Full pages that live rooms have asked for and that have not arrived from every rank."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RoomRecord]:
        return iter(self._live.values())

    @property
    def source_load(self) -> SourceLoad:
        """Measured speed of prefill, and the number of pages under way from there."""
        return SourceLoad(self._throughput.page_s, self.pages_missing)

    @property
    def quarantine(self) -> list[Draining]:
        """Left rooms that still hold pages."""
        return list(self._draining.values())

    @property
    def draining_rooms(self) -> int:
        """Number of left rooms whose writers have not all confirmed."""
        return len(self._draining)

    def live(self, request_id: str, generation: int) -> RoomRecord | None:
        """The live room of this request and generation, or None."""
        return self._live.get((request_id, generation))

    def open(
        self,
        request: Request,
        *,
        promised: int,
        own: PageIds,
        component_pages: tuple[ComponentPages, ...] | None = None,
    ) -> None:
        """Open the room of a planned request. Span 0 are its own pages; promised pages are not sent."""
        room = RoomRecord(request, prefill=request.prefill_number)
        room.ask_for(self._span(promised, len(own)))
        untried = len(request.prefills) - request.attempts.count
        if untried > 1:
            # A prefill that hangs must not use up the time of those behind it in the list.
            now_s = self._state.now_s
            room.await_answer(now_s + (request.deadline_at_s - now_s) / untried)
            self._state.set_deadline(request, room.answer_due_s)
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
        self._enter(room)

    def extend(self, room: RoomRecord, load: Load) -> None:
        """Withdraw a part of the promise: prefill writes the pages of `load`. No local writer is left."""
        self._state.emit(
            SendExtend(
                request_id=room.request.request_id,
                generation=room.generation,
                span=len(room.spans),
                first=load.first,
                pages=load.device_pages,
            )
        )
        room.ask_for(self._span(load.first, load.page_count), load)
        self.pages_missing += load.page_count
        self._state.count("extends")

    def extend_component(self, room: RoomRecord, component: str, first: int, pages: PageIds) -> None:
        """Make prefill write the pages of a component at positions [first, first + len(pages)). No local writer is
        left.
        """
        self._state.emit(
            SendExtend(
                request_id=room.request.request_id,
                generation=room.generation,
                span=len(room.spans),
                first=first,
                pages=pages,
                component=component,
            )
        )
        held = room.request.component_pages
        cause = "" if held is None else held.plan.cause
        room.ask_for(Span(first, len(pages), component=component, cause=cause))
        self._state.count("extends")

    def _span(self, first: int, count: int) -> Span:
        if self._state.settings.prefetch != "soonest" or not count:
            # The policy does not use the speed of prefill, or there are no pages to measure it with.
            return Span(first, count)
        queued_pages = self.source_load.queued_pages + count
        return Span(first, count, asked_at_s=self._state.now_s, queued_pages=queued_pages)

    def load_filled_by(self, room: RoomRecord, event: ChunkReceived) -> Load | None:
        """The load that this chunk completes, or None. Call it before `take_chunk`."""
        if not event.last:
            return None
        span, load = room.span_of(event), room.fills.get(event.span)
        if span is None or load is None or not span.continues(event):
            return None
        is_end = event.first + event.count == span.first + span.count
        return load if is_end and len(span.ended) + 1 == room.ranks else None

    def take_chunk(self, room: RoomRecord, event: ChunkReceived) -> None:
        """Record a chunk.

        A chunk that was recorded before is counted and changes nothing. So is one that begins beyond the cursor or
        belongs to no requested span; the receiver checks every frame, so these cannot come from a peer.
        """
        span = room.span_of(event)
        if span is None:
            self._state.count("chunks_foreign")
        elif not span.continues(event):
            self._state.count("chunks_repeated")
        else:
            before = span.pages_missing(room.ranks)
            span.take(event)
            if span.component == FULL:
                self.pages_missing += span.pages_missing(room.ranks) - before
            end = event.first + event.count
            if event.last and end == span.first + span.count:
                span.end(event.rank)
                if len(span.ended) == room.ranks and span.queued_pages:
                    taken_s = self._state.now_s - span.asked_at_s
                    self._throughput.note(taken_s=taken_s, pages=span.queued_pages, now_s=self._state.now_s)
            elif event.last:
                self._state.count("chunks_foreign")

    def receive_aux(self, room: RoomRecord, rank: int) -> None:
        """Record that the first token came from one rank. An unknown rank is counted and changes nothing."""
        if 0 <= rank < room.ranks:
            room.aux_received(rank)
        else:
            self._state.count("frames_foreign")

    def receive(self, room: RoomRecord) -> None:
        """Close the complete room and report that to prefill, which may then free its pages."""
        self._state.emit(SendReceived(request_id=room.request.request_id, generation=room.generation))
        self._remove(room)

    def reopen(self, room: RoomRecord) -> None:
        """Undo `receive`, within the same step."""
        self._enter(room)

    def _enter(self, room: RoomRecord) -> None:
        self._live[room.key] = room
        self.pages_missing += room.pages_missing
        room.request.enter_room(room)

    def _remove(self, room: RoomRecord) -> None:
        del self._live[room.key]
        self.pages_missing -= room.pages_missing
        room.request.leave_room()

    def leave(self, room: RoomRecord, *, settled: bool) -> None:
        """Leave a room before its end.

        If no writer can be active (`settled`, or all spans are written), the pages become free and the loads that the
        room was filling are reclaimed. Otherwise both go to the quarantine. Safe to call again after a raise.
        """
        request = room.request
        if not settled and not room.is_aborted:
            self._state.emit(SendAbort(request_id=request.request_id, generation=room.generation))
            room.was_aborted()
        has_writer = not (settled or room.is_written)
        # The room keeps component pages that prefill, or a caller that has begun early, may write to. The others leave
        # with the request.
        if not has_writer and not room.user_op:
            if request.component_pages is not None and self._state.components is not None:
                self._state.components.give_back(request.component_pages.remote)
                request.component_pages.give_up_remote()
            self._state.device.give_back(request.held.own)
            self._state.writers_have_left(room.lost)
            self._state.pages_were_freed()
        else:
            draining = self._draining.setdefault(room.key, Draining(room))
            if request.component_pages is not None and self._state.components is not None:
                held = request.component_pages
                self._state.components.drain(held.own if room.user_op else held.remote)
                draining.component_pages.update(held.give_up_own() if room.user_op else held.give_up_remote())
            held_pages = request.held
            device_pages = held_pages.own + held_pages.reserve if room.user_op else held_pages.own
            if not draining.charged:
                pages = len(device_pages) + (sum(load.page_count for load in room.lost) if has_writer else 0)
                self._state.quota.charge(draining.prefill, pages)
                draining.charged = pages
            self._state.device.drain(device_pages)
            draining.pages = device_pages
            draining.has_writer = has_writer
            if room.user_op:
                request.held.give_up_reserve()
            if not has_writer:
                draining.loads = []
                self._state.writers_have_left(room.lost)
                self._state.pages_were_freed()
        request.held.give_up_own()
        self._remove(room)

    def drained(self, request_id: str, generation: int, rank: int) -> None:
        """Record that a writer has confirmed the end of its writes. The last confirmation frees the pages."""
        draining = self._draining.get((request_id, generation))
        if draining is None:
            self._state.count("frames_late")
            return
        if draining.ranks and not 0 <= rank < draining.ranks:
            self._state.count("frames_foreign")
            return
        # With `ranks` 0 it is unknown whether the promise was sent, and the first answer stands for all ranks.
        draining.drained.add(rank)
        if len(draining.drained) >= draining.ranks:
            self._settle((request_id, generation))

    def note_writer(self, request: Request, event: PromiseSent) -> None:
        """Record the peer that writes to the room, and the number of its ranks."""
        assert request.room is not None
        request.room.was_connected(event.writer, event.ranks, self._state.now_s)

    def note_late_writer(self, event: PromiseSent) -> None:
        """Record the writer of a room that its request has already left."""
        draining = self._draining.get((event.request_id, event.generation))
        if draining is not None:
            draining.writer, draining.ranks = event.writer, event.ranks

    def of_writer(self, writer: str) -> list[RoomRecord]:
        """Live rooms that this peer writes to."""
        return [room for room in self._live.values() if room.writer == writer]

    def left_to(self, writer: str) -> list[RoomKey]:
        """Left rooms that this peer may still write to."""
        return [key for key, draining in self._draining.items() if draining.writer == writer]

    def settle_unsent(self, request_id: str, generation: int) -> None:
        """Free the pages of a left room whose promise reached no writer, that turned out to be drained, or whose writer
        is proven dead.
        """
        if (request_id, generation) in self._draining:
            self._settle((request_id, generation))

    def user_left(self, op: int) -> None:
        """Free the pages of the left room that the early READY `op` kept, unless prefill may still write to them."""
        for key, draining in self._draining.items():
            if draining.user_op == op:
                draining.user_op = 0
                try:
                    if not draining.has_writer:
                        self._settle(key)
                except BaseException:
                    draining.user_op = op
                    raise
                return

    def _settle(self, key: RoomKey) -> None:
        """Record that a left room has no writer. Its pages become free, unless the caller may still write to them."""
        draining = self._draining[key]
        if draining.user_op:
            draining.has_writer = False
            over = draining.charged - len(draining.pages)
            self._state.quota.discharge(draining.prefill, over)
            draining.charged -= over
            self._state.writers_have_left(draining.loads)
            draining.loads = []
            self._state.pages_were_freed()
            return
        if self._state.components is not None:
            self._state.components.settle(draining.component_pages)
            draining.component_pages = {}
        self._state.quota.discharge(draining.prefill, draining.charged)
        draining.charged = 0
        self._state.device.settle(draining.pages)
        del self._draining[key]
        self._state.writers_have_left(draining.loads)
        self._state.pages_were_freed()
