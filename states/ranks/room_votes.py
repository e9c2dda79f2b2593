"""Vote on the progress of a room: each rank has one or several prefill ranks of its own.

The core sees one writer per room: pages count as received when all ranks have them, the room fails if it fails on one
rank, and it is drained when it is drained on all. The votes are:

    slot of a live room    lowest first: how it failed and on which rank; promise not sent; promise sent; first token
                           received
    slot of a left room    whether all writers of this rank have stopped
    slot of a span         twice the number of pages in place, plus one at its end
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states import events
from tidekv.states.errors import PrefillCause

if TYPE_CHECKING:
    from tidekv.states.events import Event
    from tidekv.states.ranks.votes import VoteVector

LOST, FAILED, REFUSED = 1, 2, 3
"""Ways in which a room fails, worst first."""
CAUSES = tuple(PrefillCause)
CAUSE_OF_KIND = {LOST: PrefillCause.LOST, FAILED: PrefillCause.FAILED, REFUSED: PrefillCause.REFUSED}
"""For details that begin with no cause."""
UNSENT = 1 << 20
"""Above every failure: the promise is not sent. One more: it is sent. Two more: the first token is here as well."""


class SpanProgress:
    """Progress of this rank's writers in one span."""

    __slots__ = ("_count", "_cursors", "_ended", "_first", "reported", "slot")

    def __init__(self, slot: int, first: int, count: int) -> None:
        self.slot = slot
        self.reported = 0
        self._first = first
        self._count = count
        self._cursors: dict[int, int] = {}
        self._ended: set[int] = set()

    @property
    def first(self) -> int:
        """The first page of the span in the prompt."""
        return self._first

    def receive(self, event: events.ChunkReceived) -> None:
        """Record a chunk, if it follows the last one of its writer."""
        cursor = self._cursors.get(event.rank, self._first)
        end = self._first + self._count
        if event.rank in self._ended or event.first != cursor or not 0 <= event.count <= end - cursor:
            return
        self._cursors[event.rank] = cursor + event.count
        if event.last and cursor + event.count == end:
            self._ended.add(event.rank)

    def value(self, ranks: int) -> int:
        """The slot value: what all writers of this rank have completed."""
        if len(self._cursors) < ranks:
            return 0
        return 2 * (min(self._cursors.values()) - self._first) + (len(self._ended) == ranks)


class RoomVote:
    """One room, from its promise until it is received or all of its writers have stopped."""

    __slots__ = (
        "_aux_from",
        "_drained",
        "_fate",
        "_is_drained",
        "_ranks",
        "_reported",
        "_spans",
        "generation",
        "is_left",
        "is_over",
        "number",
        "request_id",
        "slot",
        "writer",
    )

    def __init__(self, number: int, vote_vector: VoteVector, request_id: str, generation: int) -> None:
        self.number = number
        self.request_id = request_id
        self.generation = generation
        self.writer = ""
        """The peer that writes for this rank."""
        self.is_left = False
        self.is_over = False
        self.slot = vote_vector.open(self, UNSENT)
        self._spans: list[SpanProgress] = []
        self._ranks = 0
        self._aux_from: set[int] = set()
        self._drained: set[int] = set()
        self._is_drained = False
        self._fate = 0
        self._reported = UNSENT

    def add_span(self, vote_vector: VoteVector, first: int, count: int) -> None:
        """Add a span: the room requests these pages of the prompt as well."""
        self._spans.append(SpanProgress(vote_vector.open(self), first, count))

    def leave(self, vote_vector: VoteVector) -> None:
        """Vote from now on whether all writers have stopped, because the request has left."""
        if not self.is_left:
            self.is_left = True
            vote_vector.reset(self.slot, self._value())

    # --- Outcomes on this rank ---

    def sent(self, vote_vector: VoteVector, event: events.PromiseSent) -> None:
        """Record that the promise is on its way to this rank's writers."""
        self.writer, self._ranks = event.writer, event.ranks
        self._update(vote_vector)

    def receive(self, vote_vector: VoteVector, event: events.ChunkReceived) -> None:
        """Record a chunk; one of an unknown span or writer changes nothing."""
        if 0 <= event.span < len(self._spans) and 0 <= event.rank < self._ranks:
            span = self._spans[event.span]
            span.receive(event)
            vote_vector.set(span.slot, span.value(self._ranks))

    def receive_aux(self, vote_vector: VoteVector, rank: int) -> None:
        """Record that the first token has come from one writer."""
        if 0 <= rank < self._ranks:
            self._aux_from.add(rank)
            self._update(vote_vector)

    def fail(self, vote_vector: VoteVector, rank: int, kind: int, detail: str = "", *, settled: bool = False) -> None:
        """Record that the room fails on this rank. The ranks vote on the cause in `detail`, and all report it."""
        parsed = PrefillCause.parse(detail)
        cause = CAUSE_OF_KIND[kind] if parsed is None else parsed[0]
        self._fate = self._fate or kind << 16 | CAUSES.index(cause) << 8 | rank
        self._is_drained |= settled
        self._update(vote_vector)

    def drained(self, vote_vector: VoteVector, rank: int) -> None:
        """Record that a writer has stopped. Before the promise is sent, one such report stands for all writers."""
        self._drained.add(rank)
        if not self._ranks or len(self._drained & set(range(self._ranks))) == self._ranks:
            self._is_drained = True
        self._update(vote_vector)

    def _update(self, vote_vector: VoteVector) -> None:
        vote_vector.set(self.slot, self._value())

    def _value(self) -> int:
        if self.is_left:
            return int(self._is_drained)
        if self._fate:
            return self._fate
        has_aux = self._ranks > 0 and len(self._aux_from) == self._ranks
        return UNSENT + (self._ranks > 0) + has_aux

    # --- Values agreed on ---

    def decide(self, vote_vector: VoteVector, at_s: float) -> list[Event]:
        """See `VoteItem`."""
        value = vote_vector.agreed(self.slot)
        key = (self.request_id, self.generation)
        if self.is_left:
            self.is_over = value == 1
            return [_drained(at_s, *key)] if self.is_over else []
        if self._reported < UNSENT:
            return []
        before, self._reported = self._reported, value
        if value < UNSENT:
            return [_failed(at_s, *key, value)]
        decided: list[Event] = []
        if before == UNSENT < value:
            decided.append(_sent(at_s, *key))
        for number, span in enumerate(self._spans):
            before_span, span.reported = span.reported, vote_vector.agreed(span.slot)
            if span.reported != before_span:
                decided.append(
                    events.ChunkReceived(
                        at_s=at_s,
                        request_id=self.request_id,
                        generation=self.generation,
                        rank=0,
                        span=number,
                        first=span.first + before_span // 2,
                        count=span.reported // 2 - before_span // 2,
                        last=bool(span.reported & 1),
                    )
                )
        if before < UNSENT + 2 == value:
            decided.append(
                events.AuxReceived(at_s=at_s, request_id=self.request_id, generation=self.generation, rank=0)
            )
        return decided

    def close(self, vote_vector: VoteVector) -> None:
        """See `VoteItem`."""
        vote_vector.close(self.slot)
        for span in self._spans:
            vote_vector.close(span.slot)


def _sent(at_s: float, request_id: str, generation: int) -> Event:
    # Every rank has a writer of its own; the core knows one per room, by a name that no other room has.
    return events.PromiseSent(
        at_s=at_s, request_id=request_id, generation=generation, writer=f"{request_id}/{generation}", ranks=1
    )


def _failed(at_s: float, request_id: str, generation: int, value: int) -> Event:
    kind, cause_voted, rank = value >> 16, CAUSES[value >> 8 & 0xFF], value & 0xFF
    if kind == REFUSED:
        cause = cause_voted.words(f"refused to rank {rank}")
        return events.RoomRefused(at_s=at_s, request_id=request_id, generation=generation, span=0, cause=cause)
    cause = cause_voted.words(f"rank {rank} lost its prefill" if kind == LOST else f"failed on rank {rank}")
    # Writers of other ranks may still be writing: the room is not settled before all have stopped.
    return events.RoomFailed(at_s=at_s, request_id=request_id, generation=generation, cause=cause, settled=False)


def _drained(at_s: float, request_id: str, generation: int) -> Event:
    return events.RoomDrained(at_s=at_s, request_id=request_id, generation=generation, rank=0)
