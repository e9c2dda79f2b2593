"""One room at the decode side: a rank link to each prefill rank, and which of them write.

1 prefill rank                  one rank link, whose writer the core knows by its instance
n ranks, one writes to us       that rank link, and others that only promise: their ranks compare, and get Received
n ranks, several write to us    the core counts what each has written; the loss of one fails the room

Which ranks write depends on what each holds, which is known from its Hello: a room waits until all its links are open,
and only then is it promised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tidekv.states import events
from tidekv.states.errors import LocalProtocolError, RemoteProtocolError
from tidekv.states.handover.context_parts import part_of
from tidekv.states.types import FULL
from tidekv.transports import wire
from tidekv.transports.decode.page_checks import Destinations, InOrder

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tidekv.states.component_specs import ComponentPages
    from tidekv.transports.decode.prefill_link import PrefillLink

RoomKey: TypeAlias = tuple[str, int]
FrameOfRoom: TypeAlias = "wire.Chunk | wire.Staged | wire.Aux | wire.Refused | wire.FailedRoom"


class DecodeRoom:
    """One room, and its rank links."""

    def __init__(self, promise: wire.Promise, links: Sequence[PrefillLink[RankLink]], *, page_size: int) -> None:
        """`links` are those to all prefill ranks, in order."""
        self.key = promise.room
        self.writers = 0
        """Number of rank links that write; 0 until the room is promised."""
        self.is_promised = False
        self.is_sent_reported = False
        self.is_failure_reported = False
        self.connect_timer: asyncio.TimerHandle | None = None
        """Timer that ends the wait for links that are not open."""
        first = promise.decode_prefix_len // page_size
        count = len(promise.pages or b"") // 4
        self.rank_links: list[RankLink] = []
        for at, link in enumerate(links):
            rank_link = RankLink(self, link, place=(at, len(links)))
            requested = {
                each.component: (each.first, wire.unpack_pages(each.pages))
                for each in promise.component_pages or ()
                if each.pages
            }
            counts = {name: (at, len(pages)) for name, (at, pages) in requested.items()}
            rank_link.state = ReceiverRoom(first=first, count=count, component_pages=counts)
            rank_link.destinations = Destinations(
                page_count=-(-promise.prompt_tokens // page_size),
                spans={
                    (FULL, 0): (first, wire.unpack_pages(promise.pages or b"")),
                    **{(name, 0): pages for name, pages in requested.items()},
                },
            )
            rank_link.waiting.append(promise)
            self.rank_links.append(rank_link)

    def choose_writers(self, writers: Collection[RankLink]) -> None:
        """Number the rank links that write to us, in the order of the ranks. The others only compare the promise."""
        for rank_link in self.rank_links:
            if rank_link in writers:
                rank_link.number, self.writers = self.writers, self.writers + 1
                hello = rank_link.link.theirs
                assert hello is not None, "a room is promised once all its links are open"
                rank_link.destinations.part = part_of(hello.place)
            else:
                # No pages, and no further ones: ranks that write nothing are asked for nothing.
                rank_link.waiting = [
                    _without_pages(message) for message in rank_link.waiting if isinstance(message, wire.Promise)
                ]

    @property
    def room_key(self) -> RoomKey:
        """Key of the room within this worker: request id and generation."""
        return (self.key.request_id, self.key.generation)

    @property
    def unconnected(self) -> list[RankLink]:
        """Rank links whose link has not been opened yet."""
        return [rank_link for rank_link in self.rank_links if rank_link.link.theirs is None]

    def rank_link_of(self, link: PrefillLink[RankLink]) -> RankLink | None:
        """Return the part of the room at this link; None if it has none."""
        for rank_link in self.rank_links:
            if rank_link.link is link:
                return rank_link
        return None

    def stop_connect_timer(self) -> None:
        """Stop the timer for links that are not open."""
        if self.connect_timer is not None:
            self.connect_timer.cancel()
            self.connect_timer = None

    @property
    def has_one_writer(self) -> bool:
        """True if the core knows the room's writer as a process that may be lost."""
        return self.writers == 1


def packed_components(component_pages: Iterable[ComponentPages] | None) -> tuple[wire.ComponentRequest, ...] | None:
    """Return the requested pages of components in their wire form."""
    if component_pages is None:
        return None
    return tuple(
        wire.ComponentRequest(component=each.component, first=each.first, pages=wire.pack_pages(each.pages))
        for each in component_pages
    )


def _without_pages(promise: wire.Promise) -> wire.Promise:
    component_pages = promise.component_pages
    if component_pages is not None:
        component_pages = tuple(msgspec.structs.replace(each, pages=None) for each in component_pages)
    return msgspec.structs.replace(promise, pages=None, component_pages=component_pages)


class RankLink:
    """One room's part at one prefill rank. `waiting` are its messages while the link is being opened."""

    state: ReceiverRoom
    destinations: Destinations

    def __init__(self, room: DecodeRoom, link: PrefillLink[RankLink], *, place: tuple[int, int]) -> None:
        """`place` is the expected rank at the other end and the number of ranks."""
        self.room = room
        self.link = link
        self.place = place
        self.number: int | None = None
        """Its index among the writers; None: it writes nothing, or the room is not promised yet."""
        self.waiting: list[wire.Message] = []
        self.has_ended = False
        self.in_order: InOrder | None = None
        """Messages that wait until received pages are verified; None until the first one."""


class RoomEvents:
    """Events about rooms that do not result from a single message of prefill."""

    def __init__(self, deliver: Callable[[events.AnyEvent], None], clock: Callable[[], float]) -> None:
        self._deliver = deliver
        self._clock = clock

    def sent(self, room: DecodeRoom, writer: str) -> None:
        """Deliver PromiseSent, once per room."""
        # With several writers the room has a writer name of its own: the loss of one is reported as RoomFailed instead.
        if room.is_sent_reported:
            return
        room.is_sent_reported = True
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
        """Deliver RoomFailed, once per room: it will not be completed, and ranks may still be writing."""
        if not room.is_failure_reported:
            room.is_failure_reported = True
            self._fail(room.room_key, cause, settled=False)

    def never_sent(self, room_key: RoomKey, cause: str) -> None:
        """Deliver RoomFailed, settled: the room will not be completed, and no rank was promised anything."""
        self._fail(room_key, cause, settled=True)

    def drained(self, room_key: RoomKey, number: int) -> None:
        """Deliver RoomDrained: a writer has stopped, or will never start."""
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
    """Return the core's event for a message, which numbers the writers of a room from 0.

    None: nothing to deliver, since the message is late, is about the component pages of a promise, which are recorded
    here, or a Staged. Raises RemoteProtocolError for a message that contradicts the room.
    """
    (request_id, generation), number = rank_link.room.room_key, rank_link.number or 0
    if isinstance(message, wire.Chunk | wire.Staged | wire.Aux) and (
        message.rank != rank_link.place[0] or rank_link.number is None
    ):
        raise RemoteProtocolError(f"a message of rank {message.rank} came on the link of rank {rank_link.place[0]}")
    # `ReceiverRoom` checks each message before it becomes an event: the core never sees one that contradicts the room.
    match message:
        case wire.Chunk(span=span, first=first, count=count, last=last, component=component):
            rank_link.state.receive(span=span, first=first, count=count, last=last, component=component)
            if component != FULL and span == 0:
                # Part of the promise: the last chunk of the full pages stands for it.
                return None
            return events.ChunkReceived(
                at_s=at_s,
                request_id=request_id,
                generation=generation,
                rank=number,
                span=span,
                first=first,
                count=count,
                last=last,
            )
        case wire.Staged():
            return None
        case wire.Aux():
            if rank_link.state.has_aux:
                return None  # A repeat: the first token is delivered once.
            rank_link.state.has_aux = True
            return events.AuxReceived(at_s=at_s, request_id=request_id, generation=generation, rank=number)
        case wire.Refused(span=span, cause=cause):
            rank_link.state.refuse(span)
            return events.RoomRefused(at_s=at_s, request_id=request_id, generation=generation, span=span, cause=cause)
        case wire.FailedRoom(cause=cause):
            if rank_link.room.is_failure_reported:
                return None
            rank_link.room.is_failure_reported = True
            return events.RoomFailed(
                at_s=at_s, request_id=request_id, generation=generation, cause=cause, settled=False
            )


# --- The check of what prefill reports ---


class _ExpectedSpan(msgspec.Struct):
    """One requested span: pages [first, cursor) have arrived, [cursor, end) have not."""

    cursor: int
    end: int
    ended: bool = False


class ReceiverRoom:
    """The requested spans of one room, and the check of every reported chunk against them.

    Chunks of a span follow one another without gap or overlap and end exactly at its end. Span 0 of each component that
    was requested ends before the last chunk of span 0 of the full pages. Control frames arrive in order, so anything
    else is a bug of the peer.
    """

    def __init__(self, *, first: int, count: int, component_pages: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Span 0 is pages [first, first + count) of the prompt. `component_pages` has the same two numbers of span 0 of
        each component that is requested.
        """
        self.has_aux = False
        self._spans = {(FULL, 0): _ExpectedSpan(first, first + count)}
        for name, (at, pages) in (component_pages or {}).items():
            self._spans[name, 0] = _ExpectedSpan(at, at + pages)
        self._component_of: dict[int, str] = {}
        """Component of each further span."""

    def extend(self, span: int, first: int, count: int, component: str = FULL) -> None:
        """Request a further span. Raises LocalProtocolError if the number was used before."""
        if span == 0 or span in self._component_of:
            raise LocalProtocolError(f"span {span} was requested already")
        self._component_of[span] = component
        self._spans[component, span] = _ExpectedSpan(first, first + count)

    def receive(self, *, span: int, first: int, count: int, last: bool, component: str = FULL) -> None:
        """Accept prefill's report of a chunk. Raises RemoteProtocolError, and then changes nothing."""
        expected, end = self._spans.get((component, span)), first + count
        wrong = ""
        if expected is None:
            wrong = "was never requested, or was refused"
        elif expected.ended:
            wrong = "comes after the span's last one"
        elif first != expected.cursor or end > expected.end:
            wrong = f"does not continue at its cursor: [{expected.cursor}, {expected.end})"
        elif last and end != expected.end:
            wrong = f"is marked as the last; the span ends at {expected.end}"
        elif last and (component, span) == (FULL, 0) and (missing := self._missing_component):
            wrong = f"is marked as the last; the pages of {missing!r} were not sent"
        else:
            expected.cursor, expected.ended = end, last
        if wrong:
            of = "" if component == FULL else f" of component {component!r}"
            raise RemoteProtocolError(f"chunk [{first}, {end}) of span {span}{of} {wrong}")

    @property
    def _missing_component(self) -> str:
        """A component of which span 0 has not ended; empty if there is none."""
        missing = (name for (name, span), each in self._spans.items() if span == 0 and name != FULL and not each.ended)
        return min(missing, default="")

    def refuse(self, span: int) -> None:
        """Remove a span that prefill refuses; 0 is that of the full pages. Raises RemoteProtocolError if it was not
        requested or is complete.
        """
        key = (self._component_of.get(span, FULL), span)
        expected = self._spans.get(key)
        if expected is None or expected.ended:
            raise RemoteProtocolError(f"span {span} is refused, but was not requested or is complete")
        del self._spans[key]
