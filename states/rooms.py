"""Rooms: what prefill was asked to write for a request, how far it has come, and who may still be writing.

A room's pages are under remote write from the promise until every span's last chunk has landed. A request that leaves
before that leaves its pages here, in the quarantine, until every writer of the room has said Drained or is proven dead.
Time alone frees nothing: NIXL has no cancel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import SendAbort, SendExtend, SendPromise, SendReceived
from tidekv.states.shapes import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidekv.states.books import Books
    from tidekv.states.events import ChunkLanded
    from tidekv.states.loads import Load
    from tidekv.states.request import Request

    RoomKey = tuple[str, int]


class Span:
    """Pages [first, first + count) of the prompt that a room asked for; the cursor of each rank only grows."""

    __slots__ = ("count", "cursors", "ended", "first", "load")

    def __init__(self, first: int, count: int, load: Load | None) -> None:
        self.first = first
        self.count = count
        self.load = load
        self.cursors: dict[int, int] = {}
        self.ended: set[int] = set()


class Room:
    """One hand-over of one generation of a request."""

    __slots__ = ("aux_from", "generation", "prefill", "ranks", "request", "spans", "writer")

    def __init__(self, request: Request, *, prefill: int) -> None:
        self.request = request
        self.generation = request.generation
        self.prefill = prefill
        self.ranks = 0
        self.writer = ""
        self.spans: list[Span] = []
        self.aux_from: set[int] = set()

    @property
    def key(self) -> RoomKey:
        """What frames of this room carry, beside this process's own instance and epoch."""
        return (self.request.request_id, self.generation)

    @property
    def is_written(self) -> bool:
        """Whether the last chunk of every span has come from every rank: nobody writes to its pages any more."""
        return self.ranks > 0 and all(len(span.ended) == self.ranks for span in self.spans)

    @property
    def is_complete(self) -> bool:
        """Whether the room has brought all that was asked for, aux included."""
        return self.is_written and len(self.aux_from) == self.ranks


class Draining:
    """What a left room still holds: pages that somebody may write to."""

    __slots__ = ("drained", "loads", "pages", "ranks", "writer")

    def __init__(self, room: Room, pages: PageIds) -> None:
        self.writer = room.writer
        self.ranks = room.ranks
        """0: the promise was not sent, as far as is known; whoever answers then answers for all."""
        self.drained: set[int] = set()
        self.pages = pages
        self.loads: list[Load] = []


class Rooms:
    """All rooms of a core, live and draining."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._live: dict[RoomKey, Room] = {}
        self._draining: dict[RoomKey, Draining] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Room]:
        return iter(self._live.values())

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

    def open(self, request: Request) -> Room:
        """Open the room of a planned request: its own pages are span 0, and the promise goes out."""
        room = Room(request, prefill=request.attempts % request.prefill_count)
        room.spans.append(Span(request.promised, len(request.own), None))
        self._live[room.key] = room
        request.room = room
        page_size = self._books.settings.page_size
        self._books.say(
            SendPromise(
                request_id=request.request_id,
                generation=request.generation,
                prefill=room.prefill,
                prompt_tokens=request.prompt_tokens,
                promised_tokens=min(request.promised * page_size, request.prompt_tokens),
                pages=request.own,
                renewed=request.generation != request.first_generation,
            )
        )
        return room

    def extend(self, room: Room, load: Load) -> None:
        """Take back a part of the promise: the pages of `load`, which no local writer touches any more."""
        span = Span(load.first, load.page_count, load)
        room.spans.append(span)
        self._books.count("extends")
        self._books.say(
            SendExtend(
                request_id=room.request.request_id,
                generation=room.generation,
                span=len(room.spans) - 1,
                first=load.first,
                pages=load.device_pages,
            )
        )

    def land(self, room: Room, event: ChunkLanded) -> Load | None:
        """Note a chunk. Returns the load that it completes, if it does.

        A chunk that was noted before is counted and changes nothing; one from beyond the cursor, or of no span that
        was asked for, cannot come from a peer whose frames the receiver has checked, and is counted as well.
        """
        if not (0 <= event.span < len(room.spans) and 0 <= event.rank < room.ranks):
            self._books.count("chunks_foreign")
            return None
        span = room.spans[event.span]
        cursor = span.cursors.get(event.rank, span.first)
        end = event.first + event.count
        if event.first != cursor or end > span.first + span.count or event.rank in span.ended:
            self._books.count("chunks_repeated")
            return None
        span.cursors[event.rank] = end
        if not event.last:
            return None
        if end != span.first + span.count:
            self._books.count("chunks_foreign")
            return None
        span.ended.add(event.rank)
        return span.load if len(span.ended) == room.ranks else None

    def land_aux(self, room: Room, rank: int) -> None:
        """Note the first token from one rank; a rank that the room does not have is counted and changes nothing."""
        if 0 <= rank < room.ranks:
            room.aux_from.add(rank)
        else:
            self._books.count("frames_foreign")

    def receive(self, room: Room) -> None:
        """All of the room is here: prefill may free its pages."""
        del self._live[room.key]
        room.request.room = None
        self._books.say(SendReceived(request_id=room.request.request_id, generation=room.generation))

    def leave(self, room: Room, *, settled: bool) -> Draining | None:
        """Leave a room before its end. Its own pages go to the quarantine, or are free where nobody can write to them.

        Returns the quarantine entry, for loads that this room was filling.
        """
        request = room.request
        del self._live[room.key]
        request.room = None
        pages, request.own = request.own, page_ids()
        if not settled:
            self._books.say(SendAbort(request_id=request.request_id, generation=room.generation))
        if settled or room.is_written:
            self._books.device.give_back(pages)
            self._books.pages_freed = True
            return None
        self._books.device.drain(pages)
        draining = Draining(room, pages)
        self._draining[room.key] = draining
        return draining

    def drained(self, request_id: str, generation: int, rank: int) -> None:
        """A writer has confirmed. With the last of them the pages are free."""
        draining = self._draining.get((request_id, generation))
        if draining is None:
            self._books.count("frames_late")
            return
        if draining.ranks and not 0 <= rank < draining.ranks:
            self._books.count("frames_foreign")
            return
        draining.drained.add(rank)
        if len(draining.drained) >= draining.ranks:
            self._settle((request_id, generation))

    def sent(self, request_id: str, generation: int, *, writer: str, ranks: int) -> Room | None:
        """The promise went to this writer. Returns the room if it is still live."""
        draining = self._draining.get((request_id, generation))
        if draining is not None:
            draining.writer, draining.ranks = writer, ranks
        room = self._live.get((request_id, generation))
        if room is not None:
            room.writer, room.ranks = writer, ranks
        return room

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
        draining = self._draining.pop(key)
        self._books.device.settle(draining.pages)
        self._books.settled_loads.extend(draining.loads)
        self._books.pages_freed = True
