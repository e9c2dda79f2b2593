"""The decode side of the hand-over: promises out, chunks in, and the proof that nobody writes to a page any more.

One link per prefill address, shared by all rooms there. What comes is judged and becomes the events of
`tidekv.states.events`; frames of other workers, other rooms and ended ones are dropped and counted. How a room ends:

    received        decode has all: prefill is told, the room is forgotten
    aborted         prefill is told; its Drained becomes RoomDrained, and the room is forgotten
    failed          by prefill (Failed) or for what prefill did wrong: RoomFailed, not settled, then RoomDrained;
                    prefill is told to stop without an abort of the core
    never promised  no link was opened (nobody there, or kept away): RoomFailed, settled. Aborted meanwhile: RoomDrained
    link lost       WriterLost once for all rooms; RoomDrained for each when the same process is reached again, or
                    WriterDead when its death is proven

An abort of a room that is not known here is answered by RoomDrained at once: it was never promised, or has drained.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable

from tidekv.states import events
from tidekv.states.errors import InvalidConfig, LocalProtocolError, RemoteProtocolError, TidekvError
from tidekv.states.receiving import ReceiverRoom
from tidekv.states.shapes import Identity, PageIds, PoolMemory
from tidekv.transports import base, hello, wire
from tidekv.transports.offenders import Offenders
from tidekv.transports.prefill_link import PrefillLink
from tidekv.transports.tasks import OwnedTasks

REDIAL_S_MAX = 4.0  # Pages wait in the quarantine meanwhile.
RoomKey = tuple[str, int]


class _Room:
    """What is known of one room. `waiting` are its frames while the link is being opened."""

    def __init__(self, key: wire.Room, link: PrefillLink, *, first: int, count: int) -> None:
        self.key = key
        self.link = link
        self.state = ReceiverRoom(first=first, count=count)
        self.waiting: list[wire.Message] = []
        self.has_ended = False

    @property
    def room_key(self) -> RoomKey:
        """Its key among the rooms of this worker."""
        return (self.key.request_id, self.key.generation)


class Receiver:
    """All rooms of one decode worker. Every method runs on the loop; `deliver` is called there too."""

    def __init__(
        self,
        transport: base.Transport,
        *,
        memory: PoolMemory,
        identity: Identity,
        deliver: Callable[[events.AnyEvent], None],
        deliver_aux: Callable[[str, int, int, object], None],
        clock: Callable[[], float],
        lease_s: float = 10.0,
        heartbeat_s: float = 0.5,
        missed_s: float = 2.0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """`memory` must be registered with the transport before the first promise. `deliver_aux` gets request id,
        generation, first token and aux, before the AuxLanded that belongs to it.
        """
        if not 0 < heartbeat_s <= missed_s <= lease_s:
            raise InvalidConfig(
                f"heartbeat_s {heartbeat_s} ≤ missed_s {missed_s} ≤ lease_s {lease_s} does not hold, or is not positive"
            )
        self.counts: Counter[str] = Counter()
        self._transport = transport
        self._memory = memory
        self._identity = identity
        self._deliver = deliver
        self._deliver_aux = deliver_aux
        self._clock = clock
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._beats_max = math.ceil(missed_s / heartbeat_s)
        self._rank = rank
        self._ranks = ranks
        self._links: dict[str, PrefillLink] = {}
        self._rooms: dict[RoomKey, _Room] = {}
        # Rooms of lost links that may still be written to, by writer; and who waits for the writer's end.
        self._lost: dict[str, dict[RoomKey, _Room]] = {}
        self._watched: set[str] = set()
        self._redialled: set[str] = set()
        self._offenders = Offenders(clock=clock)
        self._tasks = OwnedTasks(f"receiver {transport.instance}")
        self._ours: wire.Hello | None = None

    async def start(self) -> None:
        """Make our Hello; the transport is started and has our memory."""
        self._ours = hello.make_hello(
            self._transport,
            memory=self._memory,
            identity=self._identity,
            lease_s=self._lease_s,
            rank=self._rank,
            ranks=self._ranks,
        )

    async def close(self) -> None:
        """Close all links; no event comes after that. Rooms that are not settled stay so: abort them first."""
        await self._tasks.close()

    def promise(
        self,
        address: str,
        request_id: str,
        generation: int,
        *,
        prompt_tokens: int,
        promised_tokens: int,
        pages: PageIds,
        tokens: bytes | None = None,
        key_seed: bytes | None = None,
    ) -> None:
        """Tell the prefill at `address` what not to send and where the rest goes → PromiseSent or RoomFailed.

        `key_seed` begins the storage keys of the prompt's pages; None: prefill must keep them nowhere.
        Raises LocalProtocolError for a room that is open already.
        """
        room_key = (request_id, generation)
        if room_key in self._rooms:
            raise LocalProtocolError(f"request {request_id!r} has promised generation {generation} already")
        if address not in self._links and (pause_s := self._offenders.pause_left_s(address)) > 0:
            self.counts["dials_in_pause"] += 1
            cause = f"{address} broke the protocol too often, and is not dialled for another {pause_s:.1f} s"
            self._tell_failed(room_key, cause, settled=True)
            return
        name = self._transport.name
        key = wire.Room(
            instance=name,
            epoch=self._transport.instance.removeprefix(f"{name}-"),
            request_id=request_id,
            generation=generation,
        )
        link = self._links.get(address) or self._connect(address)
        room = _Room(key, link, first=promised_tokens // self._identity.page_size, count=len(pages))
        room.waiting.append(
            wire.Promise(
                room=key,
                prompt_tokens=prompt_tokens,
                decode_prefix_len=promised_tokens,
                pages=wire.pack_pages(pages),
                tokens=tokens,
                key_seed=key_seed,
            )
        )
        self._rooms[room_key] = room
        if link.theirs is not None:
            self._open_room(room, link.theirs.instance)

    def extend(self, request_id: str, generation: int, span: int, first: int, pages: PageIds) -> None:
        """Ask for further pages; nothing happens where the room has ended, since that was told."""
        room = self._rooms.get((request_id, generation))
        if room is None or room.has_ended:
            return
        room.state.extend(span, first, len(pages))
        message = wire.Extend(room=room.key, span=span, first=first, pages=wire.pack_pages(pages))
        if room.link.is_open:
            room.link.say(message)
        else:
            room.waiting.append(message)

    def abort(self, request_id: str, generation: int) -> None:
        """Have prefill stop → RoomDrained, or WriterDead; see the top of this file for a room not known or not
        promised yet.
        """
        room_key = (request_id, generation)
        room = self._rooms.get(room_key)
        if room is not None and room.link.is_open:
            if not room.has_ended:
                self._stop(room)
        elif room is not None or not any(room_key in rooms for rooms in self._lost.values()):
            self._rooms.pop(room_key, None)
            self._tell_drained(room_key)

    def received(self, request_id: str, generation: int) -> None:
        """Tell prefill that it may free its pages; the room is over."""
        room_key = (request_id, generation)
        room = self._rooms.pop(room_key, None)
        if room is not None:
            room.link.say(wire.Received(room=room.key))
        for writer in [writer for writer, rooms in self._lost.items() if rooms.pop(room_key, None) and not rooms]:
            del self._lost[writer]

    def statistics(self) -> dict[str, int | float]:
        """links, rooms_open, rooms_unsettled (ended or lost, maybe still written to), and counts of what was odd."""
        ended = sum(room.has_ended for room in self._rooms.values())
        return {
            "links": sum(link.is_open for link in self._links.values()),
            "rooms_open": len(self._rooms) - ended,
            "rooms_unsettled": ended + sum(len(rooms) for rooms in self._lost.values()),
            **self.counts,
        }

    def link_offended(self, link: PrefillLink) -> None:
        """See `LinkOwner`."""
        self.counts["links_broken"] += 1
        self._offenders.note(link.address)

    def link_opened(self, link: PrefillLink, theirs: wire.Hello) -> None:
        """See `LinkOwner`: settle what an earlier link to this process left, and say what waited."""
        for room_key, room in self._lost.pop(theirs.instance, {}).items():
            room.link = link
            self._rooms[room_key] = room
            self._stop(room)
        for room in self._rooms_of(link):
            if not room.has_ended:
                self._open_room(room, theirs.instance)

    def link_refused(self, link: PrefillLink, cause: str) -> None:
        """See `LinkOwner`: nothing was promised, so nothing can be written."""
        self.counts["dials_failed"] += 1
        del self._links[link.address]
        for room in self._rooms_of(link):
            self._fail(room, cause, settled=True)

    def link_lost(self, link: PrefillLink, cause: str) -> None:
        """See `LinkOwner`: its rooms may still be written to, by a process that may be dead."""
        assert link.theirs is not None
        writer = link.theirs.instance
        del self._links[link.address]
        for room in self._rooms_of(link):
            del self._rooms[room.room_key]
            self._lost.setdefault(writer, {})[room.room_key] = room
        for other in self._links.values():
            if other.theirs is not None and other.theirs.instance == writer:
                # The same process under another address: the core gives up all rooms of the writer.
                for room in self._rooms_of(other):
                    self._stop(room)
        self._deliver(events.WriterLost(at_s=self._clock(), writer=writer, cause=cause))
        if writer not in self._watched:
            self._watched.add(writer)
            self._tasks.spawn(self._watch(writer, link.theirs), name=f"end of {writer}")
        if writer in self._lost and writer not in self._redialled:
            self._redialled.add(writer)
            self._tasks.spawn(self._reach_again(writer, link.address), name=f"redial {link.address}")

    def take(self, link: PrefillLink, message: wire.AnyMessage) -> None:
        """See `LinkOwner`."""
        match message:
            case wire.Ping():
                return
            case wire.Chunk() | wire.Aux() | wire.Refused() | wire.Failed() | wire.Drained():
                room = self._rooms.get((message.room.request_id, message.room.generation))
                if room is None or room.key != message.room or room.link is not link:
                    self.counts["frames_foreign"] += 1
                elif isinstance(message, wire.Drained):
                    self._take_drained(room)
                elif room.has_ended:
                    self.counts["frames_late"] += 1
                else:
                    self._take_of_room(room, message)
            case _:
                raise RemoteProtocolError(f"{link.address} sent {type(message).__name__}, which is ours to send")

    def _connect(self, address: str) -> PrefillLink:
        if self._ours is None:
            raise LocalProtocolError("the receiver was not started")
        link = PrefillLink(
            address,
            self,
            clock=self._clock,
            heartbeat_s=self._heartbeat_s,
            beats_max=self._beats_max,
            counts=self.counts,
        )
        self._links[address] = link
        self._tasks.spawn(link.run(self._transport, self._ours, self._tasks), name=f"link to {address}")
        return link

    def _rooms_of(self, link: PrefillLink) -> list[_Room]:
        return [room for room in self._rooms.values() if room.link is link]

    def _open_room(self, room: _Room, writer: str) -> None:
        """Say what waited for the link."""
        waiting, room.waiting = room.waiting, []
        try:
            wire.check_name(room.key.request_id)
            for message in waiting:
                room.link.say_or_raise(message)
        except TidekvError as error:
            # A link that failed just now, or a promise that no frame can hold: it did not leave.
            self._fail(room, str(error), settled=True)
            return
        at_s, (request_id, generation) = self._clock(), room.room_key
        self._deliver(
            events.PromiseSent(at_s=at_s, request_id=request_id, generation=generation, writer=writer, ranks=1)
        )

    async def _watch(self, writer: str, theirs: wire.Hello) -> None:
        await self._transport.wait_gone(writer, theirs)
        self._watched.discard(writer)
        self._lost.pop(writer, None)
        self._deliver(events.WriterDead(at_s=self._clock(), writer=writer))

    async def _reach_again(self, writer: str, address: str) -> None:
        """While rooms of a lost writer are not settled, look whether it is only the link that broke."""
        pause_s = 2 * self._heartbeat_s
        while writer in self._lost:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, REDIAL_S_MAX)
            if writer in self._lost and address not in self._links:
                self.counts["redials"] += 1
                self._connect(address)
        self._redialled.discard(writer)

    def _take_of_room(self, room: _Room, message: wire.Chunk | wire.Aux | wire.Refused | wire.Failed) -> None:
        try:
            event = self._event_of(room, message)
        except RemoteProtocolError as error:
            self.counts["rooms_broken"] += 1
            self._tell_failed(room.room_key, f"{room.link.address} broke the protocol: {error}", settled=False)
            self._stop(room)
            return
        if isinstance(message, wire.Failed):
            room.has_ended = True
        if event is not None:
            self._deliver(event)

    def _event_of(
        self, room: _Room, message: wire.Chunk | wire.Aux | wire.Refused | wire.Failed
    ) -> events.AnyEvent | None:
        """What a frame means to the core, which knows one writer a room: number 0. Raises RemoteProtocolError."""
        at_s, (request_id, generation) = self._clock(), room.room_key
        if isinstance(message, wire.Chunk | wire.Aux) and message.rank != self._rank:
            raise RemoteProtocolError(f"rank {message.rank} speaks on the link of rank {self._rank}")
        match message:
            case wire.Chunk(span=span, first=first, count=count, last=last):
                room.state.land(span=span, first=first, count=count, last=last)
                return events.ChunkLanded(
                    at_s=at_s,
                    request_id=request_id,
                    generation=generation,
                    rank=0,
                    span=span,
                    first=first,
                    count=count,
                    last=last,
                )
            case wire.Aux():
                if room.state.has_aux:
                    self.counts["frames_late"] += 1
                    return None
                room.state.has_aux = True
                aux = {**message.aux, "cached_tokens": message.cached} if message.cached else message.aux
                self._deliver_aux(request_id, generation, message.first_token, aux)
                return events.AuxLanded(at_s=at_s, request_id=request_id, generation=generation, rank=0)
            case wire.Refused(span=span, cause=cause):
                room.state.refuse(span)
                return events.RoomRefused(
                    at_s=at_s, request_id=request_id, generation=generation, span=span, cause=cause
                )
            case wire.Failed(cause=cause):
                return events.RoomFailed(
                    at_s=at_s, request_id=request_id, generation=generation, cause=cause, settled=False
                )

    def _take_drained(self, room: _Room) -> None:
        del self._rooms[room.room_key]
        if not room.has_ended:
            self.counts["rooms_broken"] += 1
            cause = f"{room.link.address} stopped the room without a cause"
            self._tell_failed(room.room_key, cause, settled=False)
        self._tell_drained(room.room_key)

    def _stop(self, room: _Room) -> None:
        """Have prefill stop; from now on only its Drained counts."""
        room.has_ended = True
        room.link.say(wire.Abort(room=room.key))

    def _fail(self, room: _Room, cause: str, *, settled: bool) -> None:
        """The room is over, and forgotten."""
        del self._rooms[room.room_key]
        self._tell_failed(room.room_key, cause, settled=settled)

    def _tell_drained(self, room_key: RoomKey) -> None:
        request_id, generation = room_key
        self._deliver(events.RoomDrained(at_s=self._clock(), request_id=request_id, generation=generation, rank=0))

    def _tell_failed(self, room_key: RoomKey, cause: str, *, settled: bool) -> None:
        request_id, generation = room_key
        self._deliver(
            events.RoomFailed(
                at_s=self._clock(), request_id=request_id, generation=generation, cause=cause, settled=settled
            )
        )
