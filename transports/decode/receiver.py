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

An address may name all ranks of a prefill instance, joined by commas. Every rank is promised the room, and compares;
those that hold heads of ours write them. Where several write, what one of them does to the room is told of its number
among them, and the loss of one fails the room: the others are told to stop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial

from tidekv.states import events
from tidekv.states.components.specs import ComponentPages
from tidekv.states.errors import (
    InvalidConfig,
    LocalProtocolError,
    PeerMismatch,
    PrefillCause,
    RemoteProtocolError,
    TidekvError,
)
from tidekv.states.types import Identity, PageIds, PoolMemory
from tidekv.transports import base, slices
from tidekv.transports.control import handshake, wire
from tidekv.transports.control.peer_backoff import PeerBackoff
from tidekv.transports.decode.decode_room import (
    DecodeRoom,
    FrameOfRoom,
    RankLink,
    RoomKey,
    Told,
    event_of,
    packed_components,
)
from tidekv.transports.decode.prefill_link import PrefillLink, cause_of
from tidekv.transports.tasks import OwnedTasks

REDIAL_S_MAX = 4.0  # Pages wait in the quarantine meanwhile.
LOG = logging.getLogger("tidekv.transports")

COUNTS = (
    "dials_failed",
    "dials_in_pause",
    "frames_foreign",
    "frames_late",
    "links_broken",
    "messages_unsent",
    "redials",
    "rooms_broken",
)
"""What is counted, so that statistics have all counts from the start."""


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
        kv_heads_total: int = 0,
        stages: int = 1,
        group: Callable[[], str] = lambda: "",
        component_memory: Mapping[str, PoolMemory] | None = None,
    ) -> None:
        """`memory`, and that of each component by its name, must be registered before the first promise. `deliver_aux`
        gets request id, generation, first token and aux, before the AuxLanded that belongs to it.
        """
        if not (0 < heartbeat_s <= missed_s <= lease_s <= wire.SECONDS_MAX and heartbeat_s < lease_s):
            raise InvalidConfig(
                f"heartbeat_s {heartbeat_s} ≤ missed_s {missed_s} ≤ lease_s {lease_s} ≤ {wire.SECONDS_MAX:g} and "
                "heartbeat_s < lease_s do not all hold, or heartbeat_s is not positive"
            )
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._transport = transport
        self._identity = identity
        self._deliver = deliver
        self._told = Told(deliver, clock)
        self._deliver_aux = deliver_aux
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._beats_max = math.ceil(missed_s / heartbeat_s)
        self._rank = rank
        self._ranks = ranks
        place = {"rank": rank, "ranks": ranks, "kv_heads_total": kv_heads_total, "stages": stages}
        say_hello = partial(handshake.make_hello, transport, memory=memory, component_memory=component_memory)
        self._make_hello = partial(say_hello, identity=identity, lease_s=lease_s, heartbeat_s=heartbeat_s, **place)
        holding = slices.holding(identity, ranks=ranks // stages, kv_heads_total=kv_heads_total)
        self._writers = cache(partial(slices.expected_writers, holding, rank=rank, stages=stages))
        self._group = group
        self._links: dict[str, PrefillLink[RankLink]] = {}
        self._rooms: dict[RoomKey, DecodeRoom] = {}
        # Legs of lost links that may still be written to, by writer; and who waits for the writer's end.
        self._lost: dict[str, dict[RoomKey, RankLink]] = {}
        self._watched: set[str] = set()
        self._redialled: set[str] = set()
        self._peer_backoff = PeerBackoff(clock=clock)
        self._tasks = OwnedTasks(f"receiver {transport.instance}")
        self._ours: wire.Hello | None = None

    async def start(self) -> None:
        """Make our Hello; the transport is started and has our memory."""
        self._ours = self._make_hello()

    async def close(self) -> None:
        """Close all links; no event comes after that. Rooms that are not settled stay so: abort them first."""
        for room in self._rooms.values():
            room.end_patience()
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
        component_pages: Iterable[ComponentPages] | None = None,
        patience_s: float = math.inf,
    ) -> None:
        """Tell the prefill at `address` what not to send and where the rest goes → PromiseSent or RoomFailed.

        `key_seed` begins the storage keys of the prompt's pages; None: prefill must keep them nowhere.
        `component_pages` is what is asked of components. A prefill that is not connected `patience_s` from now is given
        up for this room; others may go on waiting for it. Raises LocalProtocolError for a room that is open already,
        InvalidConfig if the heads of the model cannot lie on so many prefill ranks.
        """
        room_key = (request_id, generation)
        if room_key in self._rooms:
            raise LocalProtocolError(f"request {request_id!r} has promised generation {generation} already")
        addresses = address.split(",")
        if cause := self._pause(addresses):
            self._told.never_sent(room_key, cause)
            return
        name = self._transport.name
        epoch = self._transport.instance.removeprefix(f"{name}-")
        promise = wire.Promise(
            room=wire.Room(instance=name, epoch=epoch, request_id=request_id, generation=generation),
            prompt_tokens=prompt_tokens,
            decode_prefix_len=promised_tokens,
            pages=wire.pack_pages(pages),
            rank=self._rank,
            ranks=self._ranks,
            group=self._group(),
            # The ranks of an instance have the same tokens: one of them brings them.
            tokens=tokens if self._rank == 0 else None,
            key_seed=key_seed,
            component_pages=packed_components(component_pages),
        )
        writers = self._writers(prefill_ranks=len(addresses))
        links = [self._links.get(one) or self._connect(one) for one in addresses]
        room = self._rooms[room_key] = DecodeRoom(promise, links, writers, page_size=self._identity.page_size)
        for rank_link in room.rank_links:
            rank_link.link.rank_links[rank_link] = None
        for rank_link in list(room.rank_links):
            if rank_link.link.theirs is not None and rank_link in room.rank_links:
                self._open_leg(rank_link, rank_link.link.theirs)
        if patience_s < math.inf and room_key in self._rooms and room.unconnected_legs:
            lose = partial(self._lose_patience, room, patience_s)
            room.patience = asyncio.get_running_loop().call_later(patience_s, lose)

    def _pause(self, addresses: list[str]) -> str:
        """Why one of these is not dialled now, in words."""
        for address in addresses:
            if address not in self._links and (pause_s := self._peer_backoff.pause_left_s(address)) > 0:
                self.counts["dials_in_pause"] += 1
                return PrefillCause.PROTOCOL_ERROR.words(
                    f"{address} broke the protocol too often, and is not dialled for another {pause_s:.1f} s"
                )
        return ""

    def extend(self, request_id: str, generation: int, span: int, first: int, pages: PageIds) -> None:
        """Ask for further pages; nothing happens where the room has ended, since that was told."""
        room = self._rooms.get((request_id, generation))
        for rank_link in [] if room is None else room.rank_links:
            if rank_link.number is None or rank_link.has_ended:
                continue
            rank_link.state.extend(span, first, len(pages))
            message = wire.Extend(room=rank_link.room.key, span=span, first=first, pages=wire.pack_pages(pages))
            if rank_link.link.is_open:
                rank_link.link.say(message)
            else:
                rank_link.waiting.append(message)

    def abort(self, request_id: str, generation: int) -> None:
        """Have prefill stop → RoomDrained, or WriterDead; see the top of this file for a room not known or not
        promised yet.
        """
        room_key = (request_id, generation)
        room = self._rooms.get(room_key)
        lost = any(room_key in rank_links for rank_links in self._lost.values())
        if room is None:
            if not lost:
                self._told.drained(room_key, 0)
            return
        for rank_link in list(room.rank_links):
            if not rank_link.link.is_open:
                # Its promise never left.
                self._forget(rank_link)
                if rank_link.number is not None:
                    self._told.drained(room_key, rank_link.number)
            elif not rank_link.has_ended:
                self._stop(rank_link)

    def received(self, request_id: str, generation: int) -> None:
        """Tell prefill that it may free its pages; the room is over."""
        room_key = (request_id, generation)
        room = self._rooms.pop(room_key, None)
        if room is not None:
            room.end_patience()
        for rank_link in [] if room is None else room.rank_links:
            rank_link.link.rank_links.pop(rank_link, None)
            rank_link.link.say(wire.Received(room=rank_link.room.key))
        for writer in [writer for writer, rooms in self._lost.items() if rooms.pop(room_key, None) and not rooms]:
            del self._lost[writer]

    def statistics(self) -> dict[str, int | float]:
        """links, rooms_open, rooms_unsettled (ended or lost, maybe still written to), and counts of what was odd."""
        ended = sum(any(rank_link.has_ended for rank_link in room.rank_links) for room in self._rooms.values())
        return {
            "links": sum(link.is_open for link in self._links.values()),
            "rooms_open": len(self._rooms) - ended,
            "rooms_unsettled": ended + sum(len(rooms) for rooms in self._lost.values()),
            **self.counts,
        }

    def link_offended(self, link: PrefillLink[RankLink]) -> None:
        """See `LinkOwner`."""
        self.counts["links_broken"] += 1
        self._peer_backoff.note(link.address)

    def link_opened(self, link: PrefillLink[RankLink], theirs: wire.Hello) -> None:
        """See `LinkOwner`: settle what an earlier link to this process left, and say what waited."""
        for room_key, rank_link in self._lost.pop(theirs.instance, {}).items():
            rank_link.link = link
            link.rank_links[rank_link] = None
            room = self._rooms.setdefault(room_key, rank_link.room)
            room.rank_links.append(rank_link)
            self._stop(rank_link)
        for rank_link in self._legs_of(link):
            if not rank_link.has_ended and rank_link in rank_link.room.rank_links:
                self._open_leg(rank_link, theirs)

    def link_refused(self, link: PrefillLink[RankLink], cause: str) -> None:
        """See `LinkOwner`: nothing was promised, so nothing can be written."""
        self.counts["dials_failed"] += 1
        del self._links[link.address]
        for rank_link in self._legs_of(link):
            self._fail_unsent(rank_link, cause)

    def link_lost(self, link: PrefillLink[RankLink], cause: str) -> None:
        """See `LinkOwner`: its rooms may still be written to, by a process that may be dead."""
        assert link.theirs is not None
        writer = link.theirs.instance
        del self._links[link.address]
        for rank_link in self._legs_of(link):
            self._forget(rank_link)
            if rank_link.number is not None:
                self._lost.setdefault(writer, {})[rank_link.room.room_key] = rank_link
            if rank_link.number is None or not rank_link.room.has_one_writer:
                kind, detail = PrefillCause.parse(cause) or (PrefillCause.LOST, cause)
                self._told.failed(rank_link.room, kind.words(f"{link.address} is lost: {detail}"))
        for other in self._links.values():
            if other.theirs is not None and other.theirs.instance == writer:
                # The same process under another address: the core gives up all rooms of the writer.
                for rank_link in self._legs_of(other):
                    self._stop(rank_link)
        self._deliver(events.WriterLost(at_s=self._clock(), writer=writer, cause=cause))
        if writer not in self._watched:
            self._watched.add(writer)
            self._tasks.spawn(self._watch(writer, link.theirs), name=f"end of {writer}")
        if writer in self._lost and writer not in self._redialled:
            self._redialled.add(writer)
            self._tasks.spawn(self._reach_again(writer, link.address), name=f"redial {link.address}")

    def rooms_of(self, link: PrefillLink[RankLink]) -> list[tuple[str, int]]:
        """See `LinkOwner`."""
        return [rank_link.room.room_key for rank_link in link.rank_links]

    def take(self, link: PrefillLink[RankLink], message: wire.AnyMessage) -> None:
        """See `LinkOwner`."""
        match message:
            case wire.Ping():
                return
            case wire.Chunk() | wire.ComponentSent() | wire.Aux() | wire.Refused() | wire.Failed() | wire.Drained():
                room = self._rooms.get((message.room.request_id, message.room.generation))
                rank_links = [] if room is None or room.key != message.room else room.rank_links
                rank_link = next((rank_link for rank_link in rank_links if rank_link.link is link), None)
                if rank_link is None:
                    self.counts["frames_foreign"] += 1
                elif isinstance(message, wire.Drained):
                    self._take_drained(rank_link)
                elif rank_link.has_ended:
                    self.counts["frames_late"] += 1
                else:
                    self._take_of_leg(rank_link, message)
            case _:
                raise RemoteProtocolError(f"{link.address} sent {type(message).__name__}, which is ours to send")

    def _connect(self, address: str) -> PrefillLink[RankLink]:
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

    def _legs_of(self, link: PrefillLink[RankLink]) -> list[RankLink]:
        return list(link.rank_links)

    def _forget(self, rank_link: RankLink) -> None:
        """Nothing of a leg is waited for here any more; with the last of them its room is forgotten."""
        rank_link.room.rank_links.remove(rank_link)
        rank_link.link.rank_links.pop(rank_link, None)
        if not rank_link.room.rank_links:
            rank_link.room.end_patience()
            del self._rooms[rank_link.room.room_key]

    def _lose_patience(self, room: DecodeRoom, patience_s: float) -> None:
        for rank_link in room.unconnected_legs:
            cause = (
                f"{rank_link.link.address} was not connected within {patience_s:.3g} s, its share of the request's time"
            )
            self._fail_unsent(rank_link, PrefillCause.SILENT.words(cause))

    def _open_leg(self, rank_link: RankLink, theirs: wire.Hello) -> None:
        """Say what waited for the link."""
        if not rank_link.room.unconnected_legs:
            rank_link.room.end_patience()
        waiting, rank_link.waiting = rank_link.waiting, []
        try:
            if rank_link.place != (theirs.rank, theirs.ranks):
                wanted, found = ("{} of {}".format(*place) for place in (rank_link.place, (theirs.rank, theirs.ranks)))
                raise PeerMismatch(field=f"rank (at {rank_link.link.address})", ours=wanted, theirs=found)
            wire.check_name(rank_link.room.key.request_id)
            for message in waiting:
                rank_link.link.say_or_raise(message)
        except TidekvError as error:
            # A link that failed just now, or a promise that no frame can hold: it did not leave.
            self._fail_unsent(rank_link, cause_of(error).words(str(error)))
            return
        if rank_link.number is not None:
            self._told.sent(rank_link.room, theirs.instance)

    async def _watch(self, writer: str, theirs: wire.Hello) -> None:
        await self._transport.wait_gone(writer, theirs)
        self._watched.discard(writer)
        lost = self._lost.pop(writer, {})
        self._deliver(events.WriterDead(at_s=self._clock(), writer=writer))
        for room_key, rank_link in lost.items():
            if not rank_link.room.has_one_writer:
                self._told.drained(room_key, rank_link.number or 0)

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

    def _take_of_leg(self, rank_link: RankLink, message: FrameOfRoom) -> None:
        try:
            event = event_of(rank_link, message, self._clock())
        except RemoteProtocolError as error:
            self.counts["rooms_broken"] += 1
            cause = PrefillCause.PROTOCOL_ERROR.words(f"{rank_link.link.address} broke the protocol: {error}")
            self._told.failed(rank_link.room, cause)
            self._stop(rank_link)
            return
        if isinstance(message, wire.Failed | wire.Refused):
            rank_link.has_ended |= isinstance(message, wire.Failed)
            LOG.warning(
                "request %s, generation %s: %s says: %s",
                *rank_link.room.room_key,
                rank_link.link.address,
                message.cause,
            )
        if isinstance(message, wire.ComponentSent):
            return
        if event is None:
            self.counts["frames_late"] += 1
            return
        if isinstance(message, wire.Aux) and rank_link.number == 0:
            aux = {**message.aux, "cached_tokens": message.cached} if message.cached else message.aux
            self._deliver_aux(*rank_link.room.room_key, message.first_token, aux)
        self._deliver(event)

    def _take_drained(self, rank_link: RankLink) -> None:
        room_key = rank_link.room.room_key
        self._forget(rank_link)
        if not rank_link.has_ended:
            self.counts["rooms_broken"] += 1
            cause = PrefillCause.PROTOCOL_ERROR.words(f"{rank_link.link.address} stopped the room without a cause")
            self._told.failed(rank_link.room, cause)
        if rank_link.number is not None:
            self._told.drained(room_key, rank_link.number)

    def _stop(self, rank_link: RankLink) -> None:
        """Have prefill stop; from now on only its Drained counts."""
        rank_link.has_ended = True
        rank_link.link.say(wire.Abort(room=rank_link.room.key))

    def _fail_unsent(self, rank_link: RankLink, cause: str) -> None:
        """A promise did not leave: its rank will write nothing."""
        room = rank_link.room
        if rank_link not in room.rank_links:
            return
        self._forget(rank_link)
        if rank_link.number is not None and room.has_one_writer:
            for other in list(room.rank_links):
                self._forget_or_stop(other)
            self._told.never_sent(room.room_key, cause)
            return
        if rank_link.number is not None:
            self._told.sent(room, "")
        self._told.failed(room, cause)
        if rank_link.number is not None:
            self._told.drained(room.room_key, rank_link.number)

    def _forget_or_stop(self, rank_link: RankLink) -> None:
        if not rank_link.link.is_open:
            self._forget(rank_link)
        elif not rank_link.has_ended:
            self._stop(rank_link)
