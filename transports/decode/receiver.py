"""The decode side of the hand-over: promises out, chunks in, and the proof that no process writes to a page any more.

One link per prefill address, shared by all rooms there. Messages are checked and become events of
`tidekv.states.events`; those for other workers, unknown rooms and ended rooms are dropped and counted. How a room ends:

    received        decode has all: prefill gets Received, the room is forgotten
    aborted         prefill gets Abort; its Drained becomes RoomDrained, and the room is forgotten
    failed          by prefill (Failed) or for an error of prefill: RoomFailed, not settled, then RoomDrained;
                    prefill gets Abort without an abort of the core
    never promised  not all links were opened (unreachable, or in back-off): RoomFailed, settled; RoomDrained if aborted
                    before
    link lost       WriterLost once for all rooms; RoomDrained for each when the same process is reached again, or
                    WriterDead when its death is proven

An abort of an unknown room is answered by RoomDrained at once: it was never promised, or has drained.

A room that will not be promised can be declined, so that prefill frees its pages at once.

An address may name all ranks of a prefill instance, joined by commas. Every rank is promised the room once all are
connected, and compares; those that hold heads and layers of ours write them. If several write, events name each by its
number among the writers, and the loss of one fails the room: the others get Abort.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

from tidekv.states import events
from tidekv.states.component_specs import ComponentPages
from tidekv.states.errors import (
    LinkClosed,
    LocalProtocolError,
    PeerMismatch,
    PrefillCause,
    RemoteProtocolError,
    TidekvError,
)
from tidekv.states.types import FULL, PageIds
from tidekv.transports import base, components, wire
from tidekv.transports.aux_values import decode_aux
from tidekv.transports.control import handshake
from tidekv.transports.control.peer_backoff import PeerBackoff
from tidekv.transports.decode.decode_room import (
    DecodeRoom,
    FrameOfRoom,
    RankLink,
    RoomEvents,
    RoomKey,
    event_of,
    packed_components,
)
from tidekv.transports.decode.page_checks import DamagedPage, InOrder, PageChecks, damaged_page
from tidekv.transports.decode.prefill_link import LinkTimes, PrefillLink, cause_of
from tidekv.transports.decode.prompt_offers import PromptOffers
from tidekv.transports.decode.staged_pages import StagedPages
from tidekv.transports.local_rank import LocalRank
from tidekv.transports.log import EngineLog, engine_log
from tidekv.transports.slices import check_stages, partition_of
from tidekv.transports.tasks import OwnedTasks

REDIAL_S_MAX = 4.0
"""Maximum seconds between attempts to reach a lost writer again; its pages stay in quarantine meanwhile."""
LOG = engine_log("tidekv.transports")

COUNTS = (
    "declines_unsent",
    "dials_failed",
    "dials_in_pause",
    "frames_foreign",
    "frames_late",
    "links_broken",
    "links_late",
    "messages_unsent",
    "pages_damaged",
    "redials",
    "rooms_broken",
)
"""Names of all counts, so that statistics contain them from the start."""


class Receiver:
    """All rooms of one decode worker. Every method runs on the loop, and `deliver` is called there, too."""

    def __init__(
        self,
        transport: base.Transport,
        rank: LocalRank,
        *,
        deliver: Callable[[events.AnyEvent], None],
        deliver_aux: Callable[[str, int, int, object], None],
        clock: Callable[[], float],
        times: LinkTimes | None = None,
        group: Callable[[], str] = lambda: "",
    ) -> None:
        """The pools of `rank` must be registered before the first promise. `deliver_aux` is called with request id,
        generation, first token and aux, before the AuxReceived that belongs to it. Pages whose checksums prefill sends
        are verified before an event reports them, and a damaged one fails its room; so does a first token beyond the
        vocabulary. Raises InvalidConfig.
        """
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._transport = transport
        self._rank = rank
        self._deliver = deliver
        self._room_events = RoomEvents(deliver, clock)
        self._deliver_aux = deliver_aux
        self._clock = clock
        self._times = times = times or LinkTimes()
        make = partial(handshake.make_hello, transport, memory=rank.memory, component_memory=rank.component_memory)
        self._make_hello = partial(
            make,
            identity=rank.identity,
            lease_s=times.lease_s,
            heartbeat_s=times.heartbeat_s,
            checksums="none" if rank.hashing is None else "required",
            staging=None if rank.staging is None else rank.staging.ring.memory,
            place=rank.place,
            sends=rank.sends,
            cached_place=rank.cached_place,
        )
        place, identity = rank.place, rank.identity
        check_stages(ranks=place.ranks, stages=place.stages)
        width = place.ranks // place.stages
        partition_of(ranks=width, heads=identity.kv_heads, kind=identity.kind, total=place.kv_heads_total)
        self._exchanges: dict[PrefillLink[RankLink], dict[str, base.Exchange]] = {}
        """What the prefill rank of each open link writes here."""
        self._group = group
        self._page_checks: dict[PrefillLink[RankLink], PageChecks] = {}
        self._links: dict[str, PrefillLink[RankLink]] = {}
        self._rooms: dict[RoomKey, DecodeRoom] = {}
        # Rank links of lost links whose pages may still be written to, by writer.
        self._lost: dict[str, dict[RoomKey, RankLink]] = {}
        # Writers whose death is awaited, and writers that are being dialled again.
        self._watched: set[str] = set()
        self._redialled: set[str] = set()
        self._peer_backoff = PeerBackoff(clock=clock)
        self._offers = PromptOffers()
        self._tasks = OwnedTasks(f"receiver {transport.instance}", instance=transport.instance)
        self._ours: wire.Hello | None = None
        spawn = partial(self._tasks.spawn, name="slots of the staging ring")
        self._staged = None if rank.staging is None else StagedPages(rank.staging, spawn)

    async def start(self, *, shares_at: str = "") -> None:
        """Make our Hello. The transport is started and has our memory. `shares_at` is where our host memory is read."""
        self._ours = self._make_hello(shares_at=shares_at)

    async def close(self) -> None:
        """Close all links; no event is delivered after that. Rooms that are not settled stay so: abort them first."""
        for room in self._rooms.values():
            room.stop_connect_timer()
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
        prompt_digest: bytes,
        tokens: bytes | None = None,
        token_behind: bytes = b"",
        key_seed: bytes | None = None,
        component_pages: Iterable[ComponentPages] | None = None,
        connect_s: float = math.inf,
    ) -> None:
        """Promise a room to the prefill at `address` → PromiseSent or RoomFailed.

        `prompt_digest` names the prompt: prefill sends pages of no other one. `promised_tokens` is the length of the
        prefix that decode has; `pages` are the destinations of the rest, and `component_pages` those of components.
        `token_behind`: see `wire.Promise`. `key_seed` starts the storage keys of the prompt's pages; None: prefill must
        not store them. If the prefill is not connected within `connect_s` seconds, this room fails; other rooms may
        wait longer for it. Raises LocalProtocolError for a room that is open already.
        """
        room_key = (request_id, generation)
        if room_key in self._rooms:
            raise LocalProtocolError(f"request {request_id!r} has promised generation {generation} already")
        addresses = address.split(",")
        if cause := self._refusal_to_dial(addresses):
            self._room_events.never_sent(room_key, cause)
            return
        name = self._transport.name
        epoch = self._transport.instance.removeprefix(f"{name}-")
        promise = wire.Promise(
            room=wire.RoomId(instance=name, epoch=epoch, request_id=request_id, generation=generation),
            prompt_tokens=prompt_tokens,
            decode_prefix_len=promised_tokens,
            pages=wire.pack_pages(pages),
            prompt_digest=prompt_digest,
            rank=self._rank.place.rank,
            ranks=self._rank.place.ranks,
            group=self._group(),
            # All ranks of an instance have the same tokens: rank 0 sends them.
            tokens=tokens if self._rank.place.rank == 0 else None,
            token_behind=token_behind,
            key_seed=key_seed,
            component_pages=packed_components(component_pages),
        )
        links = [self._links.get(one) or self._connect(one) for one in addresses]
        room = self._rooms[room_key] = DecodeRoom(promise, links, page_size=self._rank.identity.page_size)
        for rank_link in room.rank_links:
            rank_link.link.rank_links[rank_link] = None
        self._open_room(room)
        if connect_s < math.inf and room_key in self._rooms and room.unconnected:
            lose = partial(self._end_connecting, room, connect_s)
            room.connect_timer = asyncio.get_running_loop().call_later(connect_s, lose)

    def _refusal_to_dial(self, addresses: list[str]) -> str:
        """Return why one of these addresses is not dialled now; empty if all may be."""
        for address in addresses:
            if address not in self._links and (pause_s := self._peer_backoff.pause_left_s(address)) > 0:
                self.counts["dials_in_pause"] += 1
                return PrefillCause.PROTOCOL_ERROR.words(
                    f"{address} broke the protocol too often, and is not dialled for another {pause_s:.1f} s"
                )
        return ""

    def extend(
        self, request_id: str, generation: int, span: int, first: int, pages: PageIds, component: str = FULL
    ) -> None:
        """Request further pages of a component. Does nothing if the room has ended, since its end was delivered."""
        room = self._rooms.get((request_id, generation))
        for rank_link in [] if room is None else room.rank_links:
            if rank_link.has_ended or (rank_link.number is None and rank_link.room.is_promised):
                continue
            rank_link.state.extend(span, first, len(pages), component)
            rank_link.destinations.spans[component, span] = (first, pages)
            message = wire.Extend(
                room=rank_link.room.key, span=span, first=first, pages=wire.pack_pages(pages), component=component
            )
            if rank_link.room.is_promised and rank_link.link.is_open:
                rank_link.link.send(message)
            else:
                rank_link.waiting.append(message)

    def abort(self, request_id: str, generation: int) -> None:
        """Make prefill stop → RoomDrained, or WriterDead. The module docstring covers unknown and unpromised rooms."""
        room_key = (request_id, generation)
        room = self._rooms.get(room_key)
        lost = any(room_key in rank_links for rank_links in self._lost.values())
        if room is None:
            if not lost:
                self._room_events.drained(room_key, 0)
            return
        if not room.is_promised:
            for rank_link in list(room.rank_links):
                self._forget(rank_link)
            self._room_events.drained(room_key, 0)
            return
        for rank_link in list(room.rank_links):
            if not rank_link.link.is_open:
                # Its promise was never sent.
                self._forget(rank_link)
                if rank_link.number is not None:
                    self._room_events.drained(room_key, rank_link.number)
            elif not rank_link.has_ended:
                self._stop(rank_link)

    def received(self, request_id: str, generation: int) -> None:
        """Let prefill free its pages; the room is over."""
        room_key = (request_id, generation)
        room = self._rooms.pop(room_key, None)
        if room is not None:
            room.stop_connect_timer()
        for rank_link in [] if room is None else room.rank_links:
            rank_link.link.rank_links.pop(rank_link, None)
            rank_link.link.send(wire.Received(room=rank_link.room.key))
            self._free_slots(rank_link)
        for writer, rooms in list(self._lost.items()):
            if (lost := rooms.pop(room_key, None)) is not None:
                self._free_slots(lost)
            if not rooms:
                del self._lost[writer]

    def decline(self, address: str, request_id: str, prompt_digest: bytes) -> None:
        """Let the prefill at `address` free the pages of a prompt that is never promised. A failure is only counted
        and logged: prefill has a limit of its own.
        """
        name = self._transport.name
        epoch = self._transport.instance.removeprefix(f"{name}-")
        room = wire.RoomId(instance=name, epoch=epoch, request_id=request_id, generation=0)
        declined = wire.Declined(room=room, prompt_digest=prompt_digest)
        for one in address.split(","):
            link = self._links.get(one)
            if link is not None and link.is_open:
                link.send(declined)
            elif cause := self._refusal_to_dial([one]):
                self._note_unsent(one, room, cause)
            else:
                self._tasks.spawn(self._decline_alone(one, declined), name=f"decline {request_id} at {one}")

    async def _decline_alone(self, address: str, declined: wire.Declined) -> None:
        """Decline by a link of its own without a Hello, which prefill may refuse for its layout."""
        try:
            async with asyncio.timeout(self._times.beats_max * self._times.heartbeat_s):
                link = await self._transport.dial(address)
                try:
                    link.send(declined)
                    # Prefill's Hello, then its end of the link. If we ended it first, a reset could overtake our frame.
                    while True:
                        await link.receive()
                except LinkClosed as closed:
                    if not closed.is_orderly:
                        raise
                finally:
                    await link.close("declined")
        except (TimeoutError, TidekvError) as error:
            self._note_unsent(address, declined.room, str(error) or "prefill did not answer")

    def _note_unsent(self, address: str, room: wire.RoomId, cause: str) -> None:
        self.counts["declines_unsent"] += 1
        LOG.info("a room could not be declined", request_id=room.request_id, prefill=address, cause=cause)

    def offer(self, address: str, offer: wire.OfferPrompt) -> asyncio.Future[wire.PromptTaken]:
        """Ask the decode worker at `address` to take a prompt; see `PromptOffers.offer`."""
        if cause := self._refusal_to_dial([address]):
            refused: asyncio.Future[wire.PromptTaken] = asyncio.get_running_loop().create_future()
            refused.set_result(wire.PromptTaken(number=offer.number, cause=cause, refuses=True))
            return refused
        return self._offers.offer(self._links.get(address) or self._connect(address), offer)

    def statistics(self) -> dict[str, int | float]:
        """links, rooms_open, rooms_unsettled (ended or lost, maybe still written to), and counts of unusual events."""
        ended = sum(any(rank_link.has_ended for rank_link in room.rank_links) for room in self._rooms.values())
        return {
            "links": sum(link.is_open for link in self._links.values()),
            "rooms_open": len(self._rooms) - ended,
            "rooms_unsettled": ended + sum(len(rooms) for rooms in self._lost.values()),
            "staging_used_bytes": 0 if self._staged is None else self._staged.used_bytes,
            **self.counts,
        }

    def link_violated(self, link: PrefillLink[RankLink]) -> None:
        """See `LinkOwner`."""
        self.counts["links_broken"] += 1
        self._peer_backoff.note(link.address)

    def link_opened(self, link: PrefillLink[RankLink], theirs: wire.Hello) -> None:
        """See `LinkOwner`: abort the rooms that an earlier link to this process left, and send waiting messages."""
        assert self._ours is not None
        LOG.info("connected to a prefill", peer=theirs.instance, address=link.address)
        self._exchanges[link] = components.exchanges_with(decode=self._ours, prefill=theirs)
        if self._rank.hashing is not None:
            self._page_checks[link] = PageChecks(self._rank.hashing, self._exchanges[link])
        if self._staged is not None:
            self._staged.open_link(link, ours=self._ours, theirs=theirs)
        self._offers.opened(link)
        # The same process lives: its Drained will settle what the lost link left open.
        for room_key, rank_link in self._lost.pop(theirs.instance, {}).items():
            rank_link.link = link
            link.rank_links[rank_link] = None
            room = self._rooms.setdefault(room_key, rank_link.room)
            room.rank_links.append(rank_link)
            self._stop(rank_link)
        for rank_link in self._rank_links_of(link):
            if not rank_link.has_ended and rank_link in rank_link.room.rank_links:
                self._open_room(rank_link.room)

    def link_refused(self, link: PrefillLink[RankLink], cause: str) -> None:
        """See `LinkOwner`: nothing was promised, so nothing can be written."""
        self.counts["dials_failed"] += 1
        LOG.info("a prefill cannot be connected to", address=link.address, cause=cause)
        del self._links[link.address]
        self._offers.ended(link, cause)
        for rank_link in self._rank_links_of(link):
            self._fail_unsent(rank_link, cause)

    def link_lost(self, link: PrefillLink[RankLink], cause: str) -> None:
        """See `LinkOwner`: its rooms may still be written to, by a process that may be alive or dead."""
        assert link.theirs is not None
        writer = link.theirs.instance
        del self._links[link.address]
        self._offers.ended(link, cause)
        self._page_checks.pop(link, None)
        self._exchanges.pop(link, None)
        if self._staged is not None:
            self._staged.close_link(link)
        for rank_link in self._rank_links_of(link):
            if not rank_link.room.is_promised:
                self._fail_unsent(rank_link, cause)
                continue
            self._forget(rank_link)
            if rank_link.number is not None:
                self._lost.setdefault(writer, {})[rank_link.room.room_key] = rank_link
            if rank_link.number is None or not rank_link.room.has_one_writer:
                kind, detail = PrefillCause.parse(cause) or (PrefillCause.LOST, cause)
                self._room_events.failed(rank_link.room, kind.words(f"{link.address} is lost: {detail}"))
        for other in self._links.values():
            if other.theirs is not None and other.theirs.instance == writer:
                # The same process under another address: WriterLost ends all rooms of the writer in the core.
                for rank_link in self._rank_links_of(other):
                    if rank_link.room.is_promised:
                        self._stop(rank_link)
        self._deliver(events.WriterLost(at_s=self._clock(), writer=writer, cause=cause))
        if writer not in self._watched:
            self._watched.add(writer)
            self._tasks.spawn(self._watch(writer, link.theirs), name=f"end of {writer}")
        if writer in self._lost and writer not in self._redialled:
            self._redialled.add(writer)
            self._tasks.spawn(self._redial(writer, link.address), name=f"redial {link.address}")

    def rooms_of(self, link: PrefillLink[RankLink]) -> list[tuple[str, int]]:
        """See `LinkOwner`."""
        return [rank_link.room.room_key for rank_link in link.rank_links]

    def take(self, link: PrefillLink[RankLink], message: wire.AnyMessage) -> None:
        """See `LinkOwner`."""
        match message:
            case wire.Ping():
                return
            case wire.PromptTaken():
                self._offers.take(link, message)
            case (
                wire.Chunk()
                | wire.StagingRequest()
                | wire.StagingReturned()
                | wire.Staged()
                | wire.Aux()
                | wire.Refused()
                | wire.FailedRoom()
                | wire.Drained()
            ):
                room = self._rooms.get((message.room.request_id, message.room.generation))
                rank_link = None if room is None or room.key != message.room else room.rank_link_of(link)
                if rank_link is None:
                    self.counts["frames_foreign"] += 1
                elif isinstance(message, wire.StagingRequest | wire.StagingReturned):
                    self._take_of_staging(rank_link, message)
                elif link in self._page_checks or (self._staged is not None and self._staged.serves(link)):
                    self._take_in_order(rank_link, message)
                else:
                    self._take_of_room(rank_link, message)
            case _:
                raise RemoteProtocolError(f"{link.address} sent {type(message).__name__}, which is ours to send")

    def _take_of_staging(self, rank_link: RankLink, message: wire.StagingRequest | wire.StagingReturned) -> None:
        """Handle a message about slots of our ring, which does not wait for others."""
        if self._staged is None:
            raise RemoteProtocolError(f"{rank_link.link.address} sent {type(message).__name__}, and we have no ring")
        if isinstance(message, wire.StagingReturned):
            self._staged.take_back(rank_link, message.ticket)
        elif rank_link.has_ended or rank_link.number is None:
            self.counts["frames_late"] += 1
        else:
            try:
                self._staged.request(rank_link, message)
            except RemoteProtocolError as error:
                self._break_room(rank_link, error)

    def _take_in_order(self, rank_link: RankLink, message: FrameOfRoom | wire.Drained) -> None:
        """Handle a message after the pages that it reports were hashed or copied, and those of earlier messages.

        Raises RemoteProtocolError if prefill sends more messages than a room can have.
        """
        if rank_link.in_order is None:
            rank_link.in_order = InOrder(partial(self._take_hashed, rank_link))
        if len(rank_link.in_order) >= (bound := rank_link.destinations.messages_max):
            raise RemoteProtocolError(f"{rank_link.link.address} sent more than {bound} messages about one room")
        name = f"verify pages of {rank_link.room.key.request_id}"
        spawn = partial(self._tasks.spawn, name=name)
        if isinstance(message, wire.Staged):
            try:
                rank_link.in_order.add(message, partial(self._copy_staged, rank_link, message), spawn)
            except RemoteProtocolError as error:
                self._break_room(rank_link, error)
            return
        # Pages that come through the ring are hashed once they were copied.
        in_turn = self._staged is not None and self._staged.serves(rank_link.link)
        rank_link.in_order.add(message, partial(self._hash_reported, rank_link, message), spawn, in_turn=in_turn)

    def _copy_staged(self, rank_link: RankLink, message: wire.Staged) -> asyncio.Future[bytes | None] | None:
        """Begin to copy pages from our ring. Raises RemoteProtocolError."""
        if self._staged is None:
            raise RemoteProtocolError("we have no staging ring")
        return cast("asyncio.Future[bytes | None] | None", self._staged.copy(rank_link, message))

    def _hash_reported(
        self, rank_link: RankLink, message: FrameOfRoom | wire.Drained
    ) -> asyncio.Future[bytes | None] | None:
        """Begin to hash the pages that a message reports; None if they are not verified."""
        checks = self._page_checks.get(rank_link.link)
        if checks is None or rank_link.has_ended:
            return None
        return cast("asyncio.Future[bytes | None] | None", checks.begin(rank_link.destinations, message))

    def _take_hashed(self, rank_link: RankLink, message: FrameOfRoom | wire.Drained, hashed: bytes | None) -> None:
        if rank_link in rank_link.room.rank_links and rank_link in rank_link.link.rank_links:
            self._take_of_room(rank_link, message, hashed)
        else:
            # The link was lost while the pages were hashed, or the room was received without the rest.
            self.counts["frames_late"] += 1

    def _take_of_room(
        self, rank_link: RankLink, message: FrameOfRoom | wire.Drained, hashed: bytes | None = None
    ) -> None:
        if isinstance(message, wire.Drained):
            self._take_drained(rank_link)
        elif rank_link.has_ended:
            self.counts["frames_late"] += 1
        else:
            self._take_of_rank_link(rank_link, message, hashed)

    def _connect(self, address: str) -> PrefillLink[RankLink]:
        if self._ours is None:
            raise LocalProtocolError("the receiver was not started")
        link = PrefillLink(
            address,
            self,
            clock=self._clock,
            times=self._times,
            counts=self.counts,
        )
        self._links[address] = link
        self._tasks.spawn(link.run(self._transport, self._ours, self._tasks), name=f"link to {address}")
        return link

    def _rank_links_of(self, link: PrefillLink[RankLink]) -> list[RankLink]:
        return list(link.rank_links)

    def _forget(self, rank_link: RankLink) -> None:
        """Remove a rank link from its room and its link; the room is forgotten with its last rank link."""
        rank_link.room.rank_links.remove(rank_link)
        rank_link.link.rank_links.pop(rank_link, None)
        if not rank_link.room.rank_links:
            rank_link.room.stop_connect_timer()
            del self._rooms[rank_link.room.room_key]

    def _end_connecting(self, room: DecodeRoom, connect_s: float) -> None:
        for rank_link in room.unconnected:
            cause = (
                f"{rank_link.link.address} was not connected within {connect_s:.3g} s, its share of the request's time"
            )
            self._fail_unsent(rank_link, PrefillCause.SILENT.words(cause))

    def _open_room(self, room: DecodeRoom) -> None:
        """Promise a room whose links are all open to all ranks; those that hold pages of ours will write them."""
        if room.is_promised or not all(rank_link.link.is_open for rank_link in room.rank_links):
            return
        room.stop_connect_timer()
        try:
            for rank_link in room.rank_links:
                _check_place(rank_link)
            _check_contexts(room.rank_links)
            exchanges = {rank_link: self._exchanges[rank_link.link] for rank_link in room.rank_links}
            assert self._ours is not None
            written: dict[int, list[dict[str, base.Exchange]]] = {}
            for rank_link, exchange in exchanges.items():
                written.setdefault(_hello_of(rank_link).context, []).append(exchange)
            # Each context writes pages of its own, so the ranks of each hold all heads and layers of ours.
            if missing := next(filter(None, (components.missing_of(self._ours, of) for of in written.values())), ""):
                raise PeerMismatch(field=f"ranks ({missing})", ours=self._rank.place.ranks, theirs=len(exchanges))
            wire.check_name(room.key.request_id)
        except TidekvError as error:
            self._fail_unsent(room.rank_links[0], cause_of(error).words(str(error)))
            return
        room.choose_writers([rank_link for rank_link, written in exchanges.items() if written])
        room.is_promised = True
        for rank_link in list(room.rank_links):
            # Sending to one may have failed the room and removed the others.
            if rank_link in room.rank_links:
                self._open_rank_link(rank_link)

    def _open_rank_link(self, rank_link: RankLink) -> None:
        """Send the messages that waited for the links of the room."""
        waiting, rank_link.waiting = rank_link.waiting, []
        try:
            for message in waiting:
                rank_link.link.send_or_raise(message)
        except TidekvError as error:
            # The link has just failed, or no frame can hold the promise: it was not sent.
            self._fail_unsent(rank_link, cause_of(error).words(str(error)))
            return
        if rank_link.number is not None:
            assert rank_link.link.theirs is not None
            self._room_events.sent(rank_link.room, rank_link.link.theirs.instance)

    async def _watch(self, writer: str, theirs: wire.Hello) -> None:
        await self._transport.wait_gone(writer, theirs)
        self._watched.discard(writer)
        lost = self._lost.pop(writer, {})
        if self._staged is not None:
            # Copies out of our ring write to the pages that this event frees.
            await self._staged.settle(lost.values())
        self._deliver(events.WriterDead(at_s=self._clock(), writer=writer))
        for room_key, rank_link in lost.items():
            if not rank_link.room.has_one_writer:
                self._room_events.drained(room_key, rank_link.number or 0)

    async def _redial(self, writer: str, address: str) -> None:
        """Dial a lost writer's address at growing intervals while rooms of it are unsettled: only the link may have
        broken.
        """
        pause_s = 2 * self._times.heartbeat_s
        while writer in self._lost:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, REDIAL_S_MAX)
            if writer in self._lost and address not in self._links:
                self.counts["redials"] += 1
                self._connect(address)
        self._redialled.discard(writer)

    def _take_of_rank_link(self, rank_link: RankLink, message: FrameOfRoom, hashed: bytes | None) -> None:
        """Handle a message. `hashed` are the checksums of the pages that it reports; None: they are not verified."""
        try:
            # Before the event, which would otherwise report values that cannot be read.
            aux = self._first_aux(rank_link, message) if isinstance(message, wire.Aux) else None
            event = event_of(rank_link, message, self._clock())
            damaged = None if hashed is None else damaged_page(rank_link.destinations, message, hashed)
        except RemoteProtocolError as error:
            self._break_room(rank_link, error)
            return
        if damaged is not None:
            self._fail_damaged(rank_link, damaged)
            return
        if isinstance(message, wire.FailedRoom | wire.Refused):
            rank_link.has_ended |= isinstance(message, wire.FailedRoom)
            _log_of(rank_link).warning("prefill ended a room", cause=message.cause)
        if event is None:
            # A Staged, or a chunk of component pages of the promise, is recorded; anything else is late.
            self.counts["frames_late"] += not isinstance(message, wire.Chunk | wire.Staged)
            return
        if aux is not None and isinstance(message, wire.Aux):
            self._deliver_aux(*rank_link.room.room_key, message.first_token, aux)
        self._deliver(event)

    def _first_aux(self, rank_link: RankLink, message: wire.Aux) -> dict[str, object] | None:
        """Return the values beside the first token. None for all but the first writer's first Aux: every writing rank
        sends one. Raises RemoteProtocolError.
        """
        if 0 < self._rank.vocabulary <= message.first_token:
            raise RemoteProtocolError(
                f"the first token is {message.first_token}, and the vocabulary has {self._rank.vocabulary} tokens"
            )
        if rank_link.number != 0 or rank_link.state.has_aux:
            return None
        aux = decode_aux(message.aux)
        if message.cached:
            aux["cached_tokens"] = message.cached
        return aux

    def _break_room(self, rank_link: RankLink, error: RemoteProtocolError) -> None:
        """Fail the room of a message that contradicts it."""
        self.counts["rooms_broken"] += 1
        cause = PrefillCause.PROTOCOL_ERROR.words(f"{rank_link.link.address} broke the protocol: {error}")
        self._room_events.failed(rank_link.room, cause)
        self._stop(rank_link)

    def _free_slots(self, rank_link: RankLink) -> None:
        """Free the slots of our ring that a prefill rank had for a room: it writes to them no more."""
        if self._staged is not None:
            self._staged.free(rank_link)

    def _fail_damaged(self, rank_link: RankLink, damaged: DamagedPage) -> None:
        """Fail the room of a damaged page: nothing of it has been reported."""
        self.counts["pages_damaged"] += 1
        _log_of(rank_link).warning("a page arrived damaged, its room fails", cause=str(damaged))
        cause = PrefillCause.DAMAGED.words(f"{damaged} ({rank_link.link.address})")
        self._room_events.failed(rank_link.room, cause)
        self._stop(rank_link)

    def _take_drained(self, rank_link: RankLink) -> None:
        room_key = rank_link.room.room_key
        self._free_slots(rank_link)
        self._forget(rank_link)
        if not rank_link.has_ended:
            self.counts["rooms_broken"] += 1
            cause = PrefillCause.PROTOCOL_ERROR.words(f"{rank_link.link.address} stopped the room without a cause")
            self._room_events.failed(rank_link.room, cause)
        if rank_link.number is not None:
            self._room_events.drained(room_key, rank_link.number)

    def _stop(self, rank_link: RankLink) -> None:
        """Send Abort; from now on only Drained is accepted from this rank."""
        rank_link.has_ended = True
        rank_link.link.send(wire.Abort(room=rank_link.room.key))

    def _fail_unsent(self, rank_link: RankLink, cause: str) -> None:
        """Fail a room whose promise was not sent to this rank, which will write nothing."""
        room = rank_link.room
        if rank_link not in room.rank_links:
            return
        if not room.is_promised:
            for other in list(room.rank_links):
                self._forget(other)
            self._room_events.never_sent(room.room_key, cause)
            return
        self._forget(rank_link)
        if rank_link.number is not None and room.has_one_writer:
            # The remaining ranks only compare: without a writer none of them needs to settle.
            for other in list(room.rank_links):
                self._forget_or_stop(other)
            self._room_events.never_sent(room.room_key, cause)
            return
        if rank_link.number is not None:
            self._room_events.sent(room, "")
        self._room_events.failed(room, cause)
        if rank_link.number is not None:
            self._room_events.drained(room.room_key, rank_link.number)

    def _forget_or_stop(self, rank_link: RankLink) -> None:
        if not rank_link.link.is_open:
            self._forget(rank_link)
        elif not rank_link.has_ended:
            self._stop(rank_link)


def _check_place(rank_link: RankLink) -> None:
    """Raise PeerMismatch unless the rank at this address is the expected one."""
    theirs = _hello_of(rank_link)
    if rank_link.place != (theirs.rank, theirs.ranks):
        wanted, found = ("{} of {}".format(*place) for place in (rank_link.place, (theirs.rank, theirs.ranks)))
        raise PeerMismatch(field=f"rank (at {rank_link.link.address})", ours=wanted, theirs=found)


def _check_contexts(rank_links: list[RankLink]) -> None:
    """Raise PeerMismatch unless all prefill ranks divide prompts in the same way: no page would be written otherwise,
    or another twice.
    """
    first = _hello_of(rank_links[0])
    for rank_link in rank_links[1:]:
        theirs = _hello_of(rank_link)
        for name in ("contexts", "stripe_pages"):
            one, other = getattr(first, name), getattr(theirs, name)
            if one != other:
                at = f"{rank_links[0].link.address} and {rank_link.link.address}"
                raise PeerMismatch(field=f"{name} (of prefill at {at})", ours=one, theirs=other)


def _hello_of(rank_link: RankLink) -> wire.Hello:
    theirs = rank_link.link.theirs
    assert theirs is not None, "a room is promised once all its links are open"
    return theirs


def _log_of(rank_link: RankLink) -> EngineLog:
    request_id, generation = rank_link.room.room_key
    return LOG.bind(request_id=request_id, generation=generation, peer=rank_link.link.address)
