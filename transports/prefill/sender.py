"""The prefill side of the hand-over: answers decode workers, and keeps their rooms until each has ended.

Per link: Hellos are exchanged and checked, the peer's pool is added, then messages are answered one by one. An error
within a room fails that room; a malformed frame ends the link. Repeats, late frames and frames of unknown rooms are
answered or counted, never asserted: an Abort of an unknown room is answered by Drained at once, since nothing writes to
it, an Extend by Refused.

A room is asked for by name and by the digest of the prompt that was computed: see `tidekv.states.handover.room_claims`.
A decode worker may decline a room that it has not promised, also in place of its Hello. What waits for the room, or
soon will, gets an error.

Each rank of a decode instance dials every prefill rank. A room opens once all decode ranks have promised the same;
promises that differ are refused on all links, with both numbers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from tidekv.states.errors import (
    CapacityError,
    EngineClosed,
    InvalidConfig,
    LinkClosed,
    PeerMismatch,
    PrefillCause,
    RemoteProtocolError,
    TidekvError,
    TransferFailed,
)
from tidekv.states.handover.prompt_digest import PromptDigest
from tidekv.states.handover.room_claims import RoomClaims
from tidekv.transports import base, wire
from tidekv.transports.control import handshake
from tidekv.transports.control.peer_backoff import is_violation
from tidekv.transports.local_rank import LocalRank
from tidekv.transports.log import engine_log
from tidekv.transports.prefill.pending_rooms import PendingRoom, PendingRooms
from tidekv.transports.prefill.prefill_room import Room, RoomOutcome
from tidekv.transports.prefill.room_writer import (
    PEER_BYTES_MAX,
    DecodePeer,
    RoomCallbacks,
    RoomSettings,
    RoomWriter,
    SendContext,
    make_target,
)
from tidekv.transports.tasks import OwnedTasks

LOG = engine_log("tidekv.transports")

COUNTS = (
    "frames_foreign",
    "frames_late",
    "hellos_refused",
    "links_lost",
    "pages_withdrawn",
    "promises_differ",
    "promises_repeated",
    "rooms_broken",
    "rooms_declined",
    "rooms_mismatched",
    "rooms_refused",
    *(f"rooms_{outcome.name.lower()}" for outcome in RoomOutcome),
)
"""Names of all counts, so that statistics contain them from the start."""
BEYOND_BUDGET = f"the rooms of this link hold {PEER_BYTES_MAX} bytes of prompts and page lists, the most that is kept"
DECLINED = "decode declined it"
OFFERS_MAX = 16
"""Maximum prompts of one decode worker that are being taken."""
WAITING_MAX = 3
"""Maximum promises that wait for each of the rooms that may be open."""


class Sender:
    """Rooms of all decode workers that dialled this prefill worker."""

    def __init__(
        self,
        transport: base.Transport,
        rank: LocalRank,
        *,
        clock: Callable[[], float],
        callbacks: RoomCallbacks[Room] | None = None,
        lease_s: float = 10.0,
        rooms_max: int = 4096,
        settings: RoomSettings | None = None,
    ) -> None:
        """`lease_s` is the maximum lease in seconds; a shorter one of the decode worker applies. Beyond `rooms_max`
        open rooms, promises wait, WAITING_MAX for each of them. Raises InvalidConfig.
        """
        if not 0 < lease_s <= wire.SECONDS_MAX or rooms_max < 1:
            raise InvalidConfig(
                f"lease_s is {lease_s} and rooms_max is {rooms_max}; both must be positive, and lease_s at most "
                f"{wire.SECONDS_MAX:g}"
            )
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.ended: Counter[str] = Counter({outcome.value: 0 for outcome in RoomOutcome})
        """Rooms that ended, by outcome."""
        self.aborts: Counter[str] = Counter()
        """Rooms that ended before decode had received all, by cause: a PrefillCause, or else the outcome."""
        self._transport = transport
        self._rank = rank
        self._clock = clock
        self._callbacks: RoomCallbacks[Room] = callbacks or RoomCallbacks()
        self._lease_s = lease_s
        self._rooms_max = rooms_max
        self._tasks = OwnedTasks(f"sender {transport.instance}", instance=transport.instance)
        self._send_context = SendContext(
            transport,
            rank,
            clock=clock,
            settings=settings or RoomSettings(),
            tasks=self._tasks,
            callbacks=self._callbacks,
        )
        self._room_writers: dict[wire.RoomId, RoomWriter[Room]] = {}
        self._pending_rooms = PendingRooms()
        self._claims: RoomClaims[Room, asyncio.Future[Room]] = RoomClaims(is_open=_is_open, declines_max=rooms_max)
        self._generations: dict[tuple[str, str, str], int] = {}
        self._peers: set[DecodePeer] = set()
        self._listener: base.Listener | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        self._was_late = False
        """Whether the last check of the leases was left out, since our own loop was late for it."""
        self._is_closing = False

    @property
    def _rooms(self) -> list[Room]:
        """Every room once, by its first room writer."""
        # A copy of the values is made at once: metrics are scraped on another thread.
        return [at.room for at in list(self._room_writers.values()) if at is at.room._room_writers[0]]

    @property
    def address(self) -> str:
        """Address for decode workers to dial; empty before `start`."""
        return "" if self._listener is None else self._listener.address

    async def start(self, address: str) -> None:
        """Register our pools and listen. The transport must have been started."""
        staging = [] if self._rank.staging is None else [self._rank.staging.ring.memory]
        await self._transport.register(self._rank.memory, *self._rank.component_memory.values(), *staging)
        await self.listen(address)

    async def listen(self, address: str) -> None:
        """Listen. The transport has our pools already."""
        self._listener = await self._transport.listen(address, self._serve)

    async def close(self) -> None:
        """End all rooms and links, and wait for the writes in flight."""
        self._is_closing = True
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        for claim in self._claims.claims():
            _fail(claim, EngineClosed("the prefill side is closed"))
        for room in self._rooms:
            room._close()
        try:
            await self._tasks.close()
        finally:
            if self._listener is not None:
                await self._listener.close()
            for peer in list(self._peers):
                await self._forget(peer)

    async def room(self, request_id: str, prompt: PromptDigest) -> Room:
        """Return the newest unfinished room that was promised for this prompt under this id, once; waits for its
        promise.

        Raises CapacityError if too many rooms are awaited, TransferFailed if decode declines it, EngineClosed.
        """
        if self._is_closing:
            raise EngineClosed("the prefill side is closed")
        if self._claims.claim_count >= self._rooms_max:
            raise CapacityError(
                f"{self._claims.claim_count} rooms are awaited already: wait for some before asking for more"
            )
        loop, now = asyncio.get_running_loop(), self._clock()
        claim: asyncio.Future[Room] = loop.create_future()
        found = self._claims.claim(request_id, prompt.digest, claim, now)
        if found is not None:
            found.confirm(found.prompt)
            return found
        # Its pages are held for the room: waiting for the end of rooms that are not computed yet might never end.
        if (pending_room := self._pending_rooms.next_complete(request_id, prompt.digest)) is not None:
            self._open_pending(pending_room)
        until_s = self._claims.declined_until_s(request_id, prompt.digest, now)
        late = None if until_s is None else loop.call_later(until_s - now, _fail, claim, TransferFailed(DECLINED))
        try:
            return await claim
        except asyncio.CancelledError:
            if claim.done() and not claim.cancelled() and claim.exception() is None:
                # The room came in the turn in which the wait for it was cancelled.
                self._offer(claim.result())
            raise
        finally:
            if late is not None:
                late.cancel()
            self._claims.withdraw(request_id, claim)

    def statistics(self) -> dict[str, int | float]:
        """bytes_sent, pages_sent, numbers of rooms by state, and counts of unusual events."""
        rooms = self._rooms
        return {
            "bytes_sent": self._send_context.bytes_sent,
            "pages_sent": self._send_context.pages_sent,
            "pages_staged": self._send_context.pages_staged,
            "staging_full": self._send_context.staging_full,
            "staging_used_bytes": 0 if self._rank.staging is None else self._rank.staging.ring.used_bytes,
            "rooms_sending": sum(room.cause is None and not room.is_finished for room in rooms),
            "rooms_finished": sum(room.cause is None and room.is_finished for room in rooms),
            "rooms_draining": sum(room.cause is not None for room in rooms),
            "rooms_pending": len(self._pending_rooms),
            "writes_in_flight": sum(room.writes_in_flight for room in rooms),
            "rooms_waited_for": self._claims.claim_count,
            "peers": len(self._peers),
            "messages_unsent": self._send_context.messages_unsent,
            **({} if self._listener is None else self._listener.statistics()),
            **self.counts,
        }

    def check_leases(self) -> None:
        """End the rooms that their decode worker did not name for its lease."""
        now = self._clock()
        for pending_room in self._pending_rooms:
            if now >= pending_room.lease_until_s:
                self._refuse_all(pending_room, "a rank that had promised the room did not name it for its lease")
        for room in self._rooms:
            if now >= room._lease_until_s:
                room._expire()
        for room in self._claims.mismatched(now):
            self.counts["rooms_mismatched"] += 1
            room.fail(
                PrefillCause.OTHER_PROMPT.words(
                    f"prefill has computed another prompt under the name {room.request_id!r} than that of"
                    f" {room.prompt_tokens} tokens which decode has: both must be given the same tokens and namespace"
                )
            )

    async def _serve(self, link: base.Link) -> None:
        """Run one link, from its Hello to its end."""
        ours = handshake.make_hello(
            self._transport,
            memory=self._rank.memory,
            identity=self._rank.identity,
            lease_s=self._lease_s,
            place=self._rank.place,
            component_memory=self._rank.component_memory,
            checksums="none" if self._rank.hashing is None else "offered",
            liveness_key=b"" if self._listener is None else self._listener.liveness_key,
            sends=self._rank.sends,
            cached_place=self._rank.cached_place,
        )
        try:
            link.send(ours)
            first = await self._receive_first(link)
            if isinstance(first, wire.Declined):
                self._decline(first)
                await link.close("declined")
                return
            theirs = handshake.as_hello(link, first)
            handshake.check_hello(ours, theirs)
            if theirs.contexts > 1:
                raise PeerMismatch(
                    field="contexts of decode, which has every page on each rank", ours=1, theirs=theirs.contexts
                )
            self._transport.check_metadata(theirs.instance, theirs.metadata)
            target = await make_target(
                self._transport, ours=ours, theirs=theirs, hashing=self._rank.hashing, staging=self._rank.staging
            )
            link.mark_greeted()
        except (TransferFailed, RemoteProtocolError) as error:
            self.counts["hellos_refused"] += 1
            if is_violation(error):
                link.report_violation()
            await link.close(str(error))
            return
        peer = DecodePeer(link, theirs, target, lease_s=handshake.lease_of(ours, theirs))
        self._peers.add(peer)
        LOG.info("a decode worker is connected", peer=theirs.instance)
        cause = "prefill is shutting down"
        is_lost = False
        try:
            while True:
                message = await link.receive()
                self._take(peer, message)
        except (LinkClosed, RemoteProtocolError) as error:
            cause = str(error)
            is_lost = not (isinstance(error, LinkClosed) and error.is_orderly)
            if is_violation(error):
                link.report_violation()
        finally:
            # Rooms only pause: decode may reach this process again, and then aborts them to get its Drained.
            self.counts["links_lost"] += is_lost
            LOG.info("a decode worker has left", peer=theirs.instance, cause=cause, is_lost=is_lost)
            peer.is_lost = True
            for room_writer in [room_writer for room_writer in self._room_writers.values() if room_writer.peer is peer]:
                room_writer.room._pause()
            for pending_room in self._pending_rooms.of_peer(peer):
                self._refuse_all(pending_room, f"the link to {theirs.instance} was lost before all ranks had promised")
            await link.close(cause)
            if not peer.rooms:
                await self._forget(peer)

    async def _receive_first(self, link: base.Link) -> wire.AnyMessage:
        try:
            async with asyncio.timeout(handshake.HELLO_S):
                return await link.receive()
        except TimeoutError as error:
            raise TransferFailed(f"{link.peer_label} did not send Hello within {handshake.HELLO_S} s") from error

    def _take(self, peer: DecodePeer, message: wire.AnyMessage) -> None:
        match message:
            case wire.Ping():
                self._renew(peer, message.rooms)
                self._send(peer, wire.Ping(sent_at=message.sent_at))
            case wire.OfferPrompt() if self._callbacks.on_offer is not None:
                self._tasks.spawn(self._take_offer(peer, message), name=f"take a prompt of {peer.hello.instance}")
            case (
                wire.Declined()
                | wire.Promise()
                | wire.Extend()
                | wire.Abort()
                | wire.Received()
                | wire.FailedRoom()
                | wire.StagingGranted()
            ):
                key = message.room
                if f"{key.instance}-{key.epoch}" != peer.hello.instance:
                    self.counts["frames_foreign"] += 1
                elif isinstance(message, wire.Declined):
                    self._decline(message)
                elif isinstance(message, wire.Promise):
                    self._open(peer, message)
                elif (room_writer := self._room_writers.get(key)) is not None:
                    self._take_of_room(room_writer, peer, message)
                elif (pending_room := self._pending_rooms.of(key)) is not None and isinstance(message, wire.Extend):
                    self._extend_pending(peer, pending_room, message)
                else:
                    if pending_room is not None:
                        self._drop_pending(pending_room)
                    self._take_of_unknown(peer, message)
            case _:
                raise RemoteProtocolError(f"{peer.hello.instance} sent {type(message).__name__}, which is ours to send")

    async def _take_offer(self, peer: DecodePeer, offer: wire.OfferPrompt) -> None:
        """Let the owner take a prompt, and answer."""
        assert self._callbacks.on_offer is not None
        if peer.offers >= OFFERS_MAX:
            cause = f"{OFFERS_MAX} of its prompts are being taken already"
            self._send(peer, wire.PromptTaken(number=offer.number, cause=cause))
            return
        peer.offers += 1
        try:
            taken = await self._callbacks.on_offer(peer.hello, offer)
        finally:
            peer.offers -= 1
        self._send(peer, taken)

    def _renew(self, peer: DecodePeer, rooms: tuple[tuple[str, int], ...]) -> None:
        """Renew the leases of the rooms that decode names. Rooms that decode has forgotten expire."""
        now = self._clock()
        for name in rooms:
            if (room_writer := peer.room_writers.get(name)) is not None:
                room_writer.renew(now)
        if len(self._pending_rooms):
            named = set(rooms)
            for pending_room in self._pending_rooms.of_peer(peer):
                if pending_room.name[1:] in named:
                    pending_room.renew(peer, now)

    def _take_of_room(self, room_writer: RoomWriter[Room], peer: DecodePeer, message: wire.AnyMessage) -> None:
        match message:
            case wire.Extend():
                self._extend(room_writer, message)
            case wire.Abort():
                room_writer.room._abort(room_writer, peer.link)
            case wire.Received():
                room_writer.room._receive(room_writer)
            case wire.FailedRoom():
                room_writer.room._give_up(room_writer, message.cause)
            case wire.StagingGranted():
                room_writer.grant(message)

    def _extend(self, room_writer: RoomWriter[Room], message: wire.Extend, *, is_held: bool = False) -> None:
        """Request further pages of a room. `is_held`: the message was counted while the room was pending."""
        try:
            if not is_held and not room_writer.peer.hold(message):
                raise RemoteProtocolError(BEYOND_BUDGET)
            room_writer.extend(message)
        except RemoteProtocolError as error:
            self.counts["rooms_broken"] += 1
            room_writer.room.fail(PrefillCause.PROTOCOL_ERROR.words(str(error)))

    def _take_of_unknown(self, peer: DecodePeer, message: wire.AnyMessage) -> None:
        self.counts["frames_late"] += 1
        match message:
            case wire.Abort(room=key):
                # Its promise may still wait unread on a broken link: it must not open the room after this Drained.
                self._remember_generation(key)
                self._send(peer, wire.Drained(room=key, rank=self._rank.place.rank))
            case wire.Extend():
                cause = "prefill has no such room: it has ended, or was never promised here"
                self._send(peer, wire.Refused(room=message.room, span=message.span, cause=cause))

    def _decline(self, declined: wire.Declined) -> None:
        """End a wait for a room that will not be promised. A room that its worker has promised stays."""
        key = declined.room
        seen = self._generations.get((key.instance, key.epoch, key.request_id))
        newest = msgspec.structs.replace(key, generation=seen or 0)
        if seen is not None and (newest in self._room_writers or self._pending_rooms.of(newest) is not None):
            self.counts["frames_late"] += 1
            return
        self.counts["rooms_declined"] += 1
        claim = self._claims.decline(key.request_id, declined.prompt_digest, self._clock())
        if claim is not None:
            _fail(claim, TransferFailed(DECLINED))

    def _open(self, peer: DecodePeer, promise: wire.Promise) -> None:
        """Open a room, or add the promise to its pending room, unless it repeats an earlier one or is older."""
        key = promise.room
        # A link that broke may deliver its promises late, after those of its successor: only newer generations open.
        seen = self._generations.get((key.instance, key.epoch, key.request_id), -1)
        if seen >= key.generation:
            self.counts["promises_repeated"] += 1
            if key not in self._room_writers and self._pending_rooms.of(key) is None:
                self._refuse(peer, promise, f"generation {seen} of this request came before")
            return
        waiting = len(self._pending_rooms)
        if self._is_closing or waiting >= WAITING_MAX * self._rooms_max:
            cause = "prefill is closing" if self._is_closing else f"{waiting} rooms wait until prefill has ended others"
            self._refuse(peer, promise, cause)
            return
        # A newer generation replaces the older room, which decode has given up.
        older = msgspec.structs.replace(key, generation=max(seen, 0))
        if (room_writer := self._room_writers.get(older)) is not None:
            room_writer.room._end(RoomOutcome.REPLACED, f"decode opened generation {key.generation}")
        elif (pending_room := self._pending_rooms.of(older)) is not None:
            self._drop_pending(pending_room)
        if not peer.hold(promise):
            self._refuse(peer, promise, BEYOND_BUDGET)
            return
        self._remember_generation(key)
        if promise.ranks == 1 == peer.hello.ranks and self._has_place(promise):
            self._open_room([(peer, promise)], [])
        elif (promise.rank, promise.ranks) != (peer.hello.rank, peer.hello.ranks):
            self._refuse_invalid(
                peer, promise, f"rank {promise.rank} of {promise.ranks} promises on the link of another"
            )
        else:
            self._add_promise(peer, promise)

    def _add_promise(self, peer: DecodePeer, promise: wire.Promise) -> None:
        """Add a promise to its pending room; open the room if all ranks have promised the same and there is a place,
        refuse it if they differ.
        """
        pending_room = self._pending_rooms.take(peer, promise, self._clock())
        if pending_room.difference:
            self.counts["promises_differ"] += 1
            self._refuse_all(pending_room, pending_room.difference)
        elif pending_room.is_complete and self._has_place(promise):
            self._open_pending(pending_room)
        else:
            self._start_lease_timer()

    def _has_place(self, promise: wire.Promise) -> bool:
        """Whether one more room may be open. That of a prompt that is computed, and claimed, always may."""
        is_claimed = self._claims.is_claimed(promise.room.request_id, promise.prompt_digest)
        return is_claimed or len(self._room_writers) < self._rooms_max

    def _open_pending(self, pending_room: PendingRoom) -> None:
        self._pending_rooms.drop(pending_room)
        self._open_room(pending_room.in_order(), pending_room.extends)

    def _open_room(self, promises: list[tuple[DecodePeer, wire.Promise]], extends: list[wire.Extend]) -> None:
        try:
            # Checks the promises of all ranks before any state changes here.
            room = Room(self._send_context, promises, on_end=self._drop)
        except RemoteProtocolError as error:
            for peer, promise in promises:
                self._refuse_invalid(peer, promise, str(error))
            return
        for room_writer in room._room_writers:
            self._room_writers[room_writer.key] = room_writer
            room_writer.peer.room_writers[room.request_id, room.generation] = room_writer
        LOG.info(
            "a room opened",
            request_id=room.request_id,
            generation=room.generation,
            tokens=room.prompt_tokens,
            promised_tokens=room.decode_prefix_len,
        )
        self._start_lease_timer()
        self._offer(room)
        self._callbacks.on_room(room)
        for extend in extends:
            if (waiting := self._room_writers.get(extend.room)) is not None:
                self._extend(waiting, extend, is_held=True)

    def _offer(self, room: Room) -> None:
        """Give a room to the oldest claim of its prompt, or keep it for the next one."""
        claim = self._claims.open(room.request_id, room.prompt.digest, room, self._clock())
        while claim is not None and claim.done():
            # Its wait was cancelled in this turn of the loop.
            claim = self._claims.open(room.request_id, room.prompt.digest, room, self._clock())
        if claim is not None:
            room.confirm(room.prompt)
            claim.set_result(room)

    def _remember_generation(self, key: wire.RoomId) -> None:
        """Keep the newest generation of a request, also of ended rooms, so that a late repeat of a promise opens
        nothing.
        """
        request = (key.instance, key.epoch, key.request_id)
        self._generations[request] = max(key.generation, self._generations.pop(request, -1))
        # Bounded: the request with the oldest promise is forgotten first.
        if len(self._generations) > 2 * WAITING_MAX * self._rooms_max:
            del self._generations[next(iter(self._generations))]

    def _refuse(self, peer: DecodePeer, promise: wire.Promise, cause: str) -> None:
        self.counts["rooms_refused"] += 1
        self._send(peer, wire.Refused(room=promise.room, span=0, cause=cause))

    def _refuse_all(self, pending_room: PendingRoom, cause: str) -> None:
        """Refuse a room to all ranks that have promised it.

        A rank that promises later remains pending alone, until its own instance aborts it or its lease ends.
        """
        self._drop_pending(pending_room)
        for peer, promise in pending_room.promises:
            self._refuse(peer, promise, cause)

    def _drop_pending(self, pending_room: PendingRoom) -> None:
        """Forget a pending room that will not open."""
        self._pending_rooms.drop(pending_room)
        for peer, promise in pending_room.promises:
            peer.release(promise.room)

    def _extend_pending(self, peer: DecodePeer, pending_room: PendingRoom, message: wire.Extend) -> None:
        """Keep a request for further pages of a pending room, or refuse the room."""
        cause = pending_room.extend(message, page_size=self._rank.identity.page_size)
        if not cause and not peer.hold(message):
            cause = BEYOND_BUDGET
        if cause:
            self.counts["rooms_broken"] += 1
            self._refuse_all(pending_room, PrefillCause.PROTOCOL_ERROR.words(cause))

    def _refuse_invalid(self, peer: DecodePeer, promise: wire.Promise, cause: str) -> None:
        """Fail a promise that contradicts itself or the pools: nothing was or will be written."""
        self.counts["rooms_broken"] += 1
        peer.release(promise.room)
        text = PrefillCause.PROTOCOL_ERROR.words(cause)
        self._send(peer, wire.FailedRoom(room=promise.room, cause=wire.brief(text)))
        self._send(peer, wire.Drained(room=promise.room, rank=self._rank.place.rank))

    def _drop(self, room: Room) -> None:
        """Forget a room that has ended."""
        assert room.outcome is not None
        self.counts[f"rooms_{room.outcome.name.lower()}"] += 1
        self.counts["pages_withdrawn"] += sum(room_writer.state.pages_unwritten for room_writer in room._room_writers)
        self.ended[room.outcome.value] += 1
        LOG.info(
            "a room ended",
            request_id=room.request_id,
            generation=room.generation,
            outcome=room.outcome.value,
            cause=room.cause or "",
        )
        if room.outcome is not RoomOutcome.RECEIVED:
            parsed = PrefillCause.parse(room.cause or "")
            self.aborts[parsed[0].value if parsed else room.outcome.value] += 1
        for room_writer in room._room_writers:
            if self._room_writers.get(room_writer.key) is room_writer:
                del self._room_writers[room_writer.key]
                del room_writer.peer.room_writers[room.request_id, room.generation]
            room_writer.peer.release(room_writer.key)
        self._claims.close(room.request_id, room)
        for peer in {room_writer.peer for room_writer in room._room_writers}:
            if peer.is_lost and not peer.rooms and not self._is_closing:
                self._tasks.spawn(self._forget(peer), name="forget a peer")
        while len(self._room_writers) < self._rooms_max and not self._is_closing:
            pending_room = self._pending_rooms.next_complete()
            if pending_room is None:
                return
            self._open_pending(pending_room)

    async def _forget(self, peer: DecodePeer) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            if peer.target is not None:
                await peer.target.forget(self._transport)

    def _send(self, peer: DecodePeer, message: wire.Message) -> None:
        try:
            peer.link.send(message)
        except LinkClosed:
            # The task that reads this link gets the same error and pauses its rooms.
            self._send_context.messages_unsent += 1

    def _start_lease_timer(self) -> None:
        """Check the leases four times per lease while there are rooms; without rooms no timer runs."""
        if self._lease_timer is None and not self._is_closing:
            lease_s = min(
                (room_writer.peer.lease_s for room_writer in self._room_writers.values()), default=self._lease_s
            )
            self._callbacks.on_busy(True)
            loop = asyncio.get_running_loop()
            limit_s = loop.time() + lease_s / 2
            self._lease_timer = loop.call_at(loop.time() + lease_s / 4, self._on_lease_timer, limit_s)

    def _on_lease_timer(self, limit_s: float) -> None:
        self._lease_timer = None
        # If our own loop was late, pings that arrived meanwhile wait in their sockets: read them before anything is
        # ended. Not twice in a row, so that a loop that is always late ends rooms as well.
        self._was_late = asyncio.get_running_loop().time() > limit_s and not self._was_late
        if not self._was_late:
            self.check_leases()
        if self._room_writers or len(self._pending_rooms):
            self._start_lease_timer()
        else:
            self._callbacks.on_busy(False)


def _is_open(room: Room) -> bool:
    return not room.is_finished and room.cause is None


def _fail(claim: asyncio.Future[Room], error: TidekvError) -> None:
    if not claim.done():
        claim.set_exception(error)
