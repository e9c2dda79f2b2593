"""What is known of one room at the decode side: a leg to each prefill rank, and which of them write.

1 prefill rank                  one leg, whose writer is known to the core by its instance
n ranks, one writes to us       that leg, and legs that only promise: their ranks compare, and have Received
n ranks, several write to us    the core counts what each has written; a loss of one is the failure of the room
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tidekv.states import events
from tidekv.states.errors import RemoteProtocolError
from tidekv.states.handover.receiver import ReceiverRoom
from tidekv.transports.control import wire

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from tidekv.states.components.specs import ComponentPages
    from tidekv.transports.decode.prefill_link import PrefillLink

RoomKey: TypeAlias = tuple[str, int]
FrameOfRoom: TypeAlias = "wire.Chunk | wire.ComponentSent | wire.Aux | wire.Refused | wire.Failed"


class DecodeRoom:
    """One room, and its legs."""

    def __init__(
        self, promise: wire.Promise, links: Sequence[PrefillLink[RankLink]], writers: Sequence[int], *, page_size: int
    ) -> None:
        """`links` are those to all prefill ranks, in order; `writers` says which of these write to us, in the order of
        the heads.
        """
        self.key = promise.room
        self.writers = len(writers)
        """How many of its legs write."""
        self.is_told_sent = False
        self.is_told_failed = False
        self.patience: asyncio.TimerHandle | None = None
        """Ends the wait for links that are not open."""
        first = promise.decode_prefix_len // page_size
        count = len(promise.pages or b"") // 4
        self.rank_links: list[RankLink] = []
        for at, link in enumerate(links):
            number = writers.index(at) if at in writers else None
            rank_link = RankLink(self, link, place=(at, len(links)), number=number)
            asked = [tail.component for tail in promise.component_pages or () if tail.pages]
            rank_link.state = ReceiverRoom(first=first, count=count, component_pages=asked)
            # Whoever does not write to us only compares.
            rank_link.waiting.append(promise if at in writers else _without_pages(promise))
            self.rank_links.append(rank_link)

    @property
    def room_key(self) -> RoomKey:
        """Its key among the rooms of this worker."""
        return (self.key.request_id, self.key.generation)

    @property
    def unconnected_legs(self) -> list[RankLink]:
        """Its legs whose links have not been opened yet."""
        return [rank_link for rank_link in self.rank_links if rank_link.link.theirs is None]

    def end_patience(self) -> None:
        """Stop the wait for links."""
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None

    @property
    def has_one_writer(self) -> bool:
        """Whether the core knows its writer as a process that may be lost."""
        return self.writers == 1


def packed_components(component_pages: Iterable[ComponentPages] | None) -> tuple[wire.ComponentRequest, ...] | None:
    """What is asked of components, as it travels."""
    if component_pages is None:
        return None
    return tuple(
        wire.ComponentRequest(component=t.component, first=t.first, pages=wire.pack_pages(t.pages))
        for t in component_pages
    )


def _without_pages(promise: wire.Promise) -> wire.Promise:
    component_pages = promise.component_pages
    if component_pages is not None:
        component_pages = tuple(msgspec.structs.replace(tail, pages=None) for tail in component_pages)
    return msgspec.structs.replace(promise, pages=None, component_pages=component_pages)


class RankLink:
    """One room's part at one prefill rank. `waiting` are its frames while the link is being opened."""

    state: ReceiverRoom

    def __init__(
        self, room: DecodeRoom, link: PrefillLink[RankLink], *, place: tuple[int, int], number: int | None
    ) -> None:
        """`place`: the rank, and of how many, that must be at the other end. `number`: which of the writers it is, None
        where it writes nothing.
        """
        self.room = room
        self.link = link
        self.place = place
        self.number = number
        self.waiting: list[wire.Message] = []
        self.has_ended = False


class Told:
    """What the core is told of rooms beside their frames."""

    def __init__(self, deliver: Callable[[events.AnyEvent], None], clock: Callable[[], float]) -> None:
        self._deliver = deliver
        self._clock = clock

    def sent(self, room: DecodeRoom, writer: str) -> None:
        """The promise is on its way; told once. Where several write, a loss is never told as that of a writer."""
        if room.is_told_sent:
            return
        room.is_told_sent = True
        request_id, generation = room.room_key
        self._deliver(
            events.PromiseSent(
                at_s=self._clock(),
                request_id=request_id,
                generation=generation,
                writer=writer if room.has_one_writer else f"{request_id}/{generation}",
                ranks=room.writers,
            )
        )

    def failed(self, room: DecodeRoom, cause: str) -> None:
        """The room will not be completed, and ranks may still be writing; told once."""
        if not room.is_told_failed:
            room.is_told_failed = True
            self._fail(room.room_key, cause, settled=False)

    def never_sent(self, room_key: RoomKey, cause: str) -> None:
        """The room will not be completed, and nobody was promised anything."""
        self._fail(room_key, cause, settled=True)

    def drained(self, room_key: RoomKey, number: int) -> None:
        """A writer has stopped, or will never begin."""
        request_id, generation = room_key
        self._deliver(events.RoomDrained(at_s=self._clock(), request_id=request_id, generation=generation, rank=number))

    def _fail(self, room_key: RoomKey, cause: str, *, settled: bool) -> None:
        request_id, generation = room_key
        self._deliver(
            events.RoomFailed(
                at_s=self._clock(), request_id=request_id, generation=generation, cause=cause, settled=settled
            )
        )


def event_of(rank_link: RankLink, message: FrameOfRoom, at_s: float) -> events.AnyEvent | None:
    """What a frame means to the core, which knows the writers of a room by numbers from 0 on; None: nothing, since it
    is late, or the word about a tail, which is judged here. Raises RemoteProtocolError.
    """
    (request_id, generation), number = rank_link.room.room_key, rank_link.number or 0
    if isinstance(message, wire.Chunk | wire.ComponentSent | wire.Aux) and (
        message.rank != rank_link.place[0] or rank_link.number is None
    ):
        raise RemoteProtocolError(f"rank {message.rank} speaks on the link of rank {rank_link.place[0]}")
    match message:
        case wire.Chunk(span=span, first=first, count=count, last=last):
            rank_link.state.land(span=span, first=first, count=count, last=last)
            return events.ChunkLanded(
                at_s=at_s,
                request_id=request_id,
                generation=generation,
                rank=number,
                span=span,
                first=first,
                count=count,
                last=last,
            )
        case wire.ComponentSent(component=component):
            rank_link.state.land_component(component)
            return None
        case wire.Aux():
            if rank_link.state.has_aux:
                return None
            rank_link.state.has_aux = True
            return events.AuxLanded(at_s=at_s, request_id=request_id, generation=generation, rank=number)
        case wire.Refused(span=span, cause=cause):
            rank_link.state.refuse(span)
            return events.RoomRefused(at_s=at_s, request_id=request_id, generation=generation, span=span, cause=cause)
        case wire.Failed(cause=cause):
            if rank_link.room.is_told_failed:
                return None
            rank_link.room.is_told_failed = True
            return events.RoomFailed(
                at_s=at_s, request_id=request_id, generation=generation, cause=cause, settled=False
            )
