"""One room's part for one rank of a decode instance: its writes, the messages about them, and Drained.

`SenderRoom` decides which pages are written and which messages follow; `RoomWriter` posts the writes (at most
`writes_in_flight_max` at once) and sends the messages on the link to that rank. A decode rank that this prefill rank
writes nothing to has a room writer as well, whose jobs end at once without a write: its promise is compared, and its
Received is awaited. A Chunk is never sent before its write is done, nor Drained while a write is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from tidekv.states.component_specs import Component, ComponentPages
from tidekv.states.errors import LinkClosed, PrefillCause, RemoteProtocolError, TidekvError
from tidekv.states.handover.context_parts import part_of
from tidekv.states.handover.sender import SenderRoom, WriteJob
from tidekv.states.types import FULL, PageIds, page_ids
from tidekv.states.validation import ByteCount, Options, PositiveCount, Seconds
from tidekv.transports import base, components, wire
from tidekv.transports.blocking import settled
from tidekv.transports.components import components_of
from tidekv.transports.local_rank import LocalRank
from tidekv.transports.staging import BeginCopy, StagedExchange, Staging, gathered, scattered
from tidekv.transports.tasks import OwnedTasks


class StagedTarget(msgspec.Struct, frozen=True):
    """Pages of a decode rank that are written from slots of our staging ring, or to slots of its ring."""

    handle: base.PeerMemory
    gather: BeginCopy | None
    """Copies pages to slots of our ring; None: the slots are those of decode."""
    slot_bytes: int
    batch_pages: int


class Target(msgspec.Struct, frozen=True):
    """Handles of the pools of one decode rank, by component; "full" are the pages. Pools that it writes nothing of are
    absent.

    `hashing` begins the checksums of what this rank writes, by component; empty if decode requires none.
    """

    handles: dict[str, base.PeerMemory]
    hashing: dict[str, base.BeginHashing] = {}
    staged: dict[str, StagedTarget] = {}
    """Pools whose slices go through the staging ring, if it has room for them."""

    async def forget(self, transport: base.Transport) -> None:
        """Remove all handles from the transport. No write to any of them may be in flight."""
        for handle in (*self.handles.values(), *(staged.handle for staged in self.staged.values())):
            await transport.remove_peer(handle)

    def pages_max(self, pages_max: int) -> int:
        """Return the maximum pages of one write, given that of writes which are not staged."""
        return min([pages_max, *(staged.batch_pages for staged in self.staged.values())])


async def make_target(
    transport: base.Transport,
    *,
    ours: wire.Hello,
    theirs: wire.Hello,
    hashing: base.Hashing | None = None,
    staging: Staging | None = None,
) -> Target | None:
    """Make the pools of a decode rank writable, as far as its heads are ours to write: all of them or none.

    None: this rank writes nothing to it. The caller calls `Target.forget`. Raises RemoteProtocolError, TransferFailed.
    """
    cuts = components.cuts_with(decode=theirs, prefill=ours)
    if not cuts:
        return None
    exchanges = components.exchanges_with(decode=theirs, prefill=ours)
    begins: dict[str, base.BeginHashing] = {}
    if theirs.checksums == "required" and hashing is not None:
        begins = {name: hashing.hashing(exchange.ours) for name, exchange in exchanges.items()}
    handles: dict[str, base.PeerMemory] = {}
    async with AsyncExitStack() as undo:
        for name, exchange in exchanges.items():
            memory = theirs.components.get(name, theirs.memory)
            handle = await transport.add_peer(theirs.instance, theirs.metadata, memory, exchange)
            undo.push_async_callback(transport.remove_peer, handle)
            handles[name] = handle
        staged: dict[str, StagedTarget] = {}
        for name, of_pool in cuts.items():
            memory = theirs.components.get(name, theirs.memory)
            source = ours.components.get(name, ours.memory)
            gather: BeginCopy | None = None
            way: StagedExchange | None = None
            if staging is not None:
                way = gathered(staging.ring.memory, of_pool, ours=source, theirs=memory)
            if way is not None and staging is not None:
                gather = staging.copier.copying(*way.copy)
            elif theirs.staging is not None:
                way = scattered(theirs.staging, of_pool, ours=source, theirs=memory)
                memory = theirs.staging
            if way is None:
                continue
            handle = await transport.add_peer(theirs.instance, theirs.metadata, memory, way.send)
            undo.push_async_callback(transport.remove_peer, handle)
            staged[name] = StagedTarget(handle, gather, way.slot_bytes, way.batch_pages)
        undo.pop_all()
    return Target(handles, begins, staged)


class WritableRoom(Protocol):
    """The part of a room that a room writer uses; the room spans all decode ranks."""

    request_id: str

    def _advance(self) -> None:
        """Post the writes that have become possible, and check whether all have ended."""
        ...

    def fail(self, cause: str) -> None:
        """End the room for all ranks, with this cause."""
        ...


RoomT = TypeVar("RoomT", bound=WritableRoom)


class RoomSettings(Options, frozen=True, kw_only=True):
    """Limits of the writes of one room to one decode rank. Raises InvalidConfig."""

    writes_in_flight_max: PositiveCount = 4
    """Maximum writes in flight at once."""
    pages_per_write_max: PositiveCount = 256
    """Maximum pages of one write."""
    staging_bytes: ByteCount = 64 * 1024 * 1024
    """Bytes of the staging ring of this prefill rank, through which it sends slices of its heads to decode ranks that
    hold fewer. It needs pools in host memory, and is first touched when such a decode rank is served. 0 disables it.
    """
    staging_wait_s: Seconds = 5.0
    """Maximum seconds that a write waits for room in the ring; after that it is sent as short stretches instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomCallbacks(Generic[RoomT]):
    """Functions that learn what happens to rooms. They run on the loop."""

    on_room: Callable[[RoomT], None] = lambda room: None
    """Called with each room as it opens."""
    on_finish: Callable[[RoomT], None] = lambda room: None
    """Called with each room as it is finished."""
    on_written: Callable[[float], None] = lambda seconds: None
    """Called with the seconds that each write took."""
    on_busy: Callable[[bool], None] = lambda is_busy: None
    """Called with whether rooms are open, of which it learns the end somewhat later."""
    on_offer: Callable[[wire.Hello, wire.OfferPrompt], Awaitable[wire.PromptTaken]] | None = None
    """Takes a prompt of a decode worker that goes away; None: such an offer breaks the protocol."""


class SendContext(Generic[RoomT]):
    """State that rooms share: the transport, their tasks, the clock, and counts of what was sent."""

    def __init__(
        self,
        transport: base.Transport,
        rank: LocalRank,
        *,
        clock: Callable[[], float],
        settings: RoomSettings,
        tasks: OwnedTasks,
        callbacks: RoomCallbacks[RoomT],
    ) -> None:
        self.transport = transport
        self.memory = rank.memory
        self.component_memory = rank.component_memory
        self.page_size = rank.identity.page_size
        self.rank = rank.place.rank
        self.part = part_of(rank.place)
        """The pages of every prompt that this rank holds."""
        self.vocabulary = rank.vocabulary
        self.staging = None if rank.staging is None else rank.staging.ring
        self.clock = clock
        self.settings = settings
        self.tasks = tasks
        self.callbacks = callbacks
        self.bytes_sent = 0
        self.pages_sent = 0
        self.messages_unsent = 0
        self.pages_staged = 0
        self.staging_full = 0
        """Writes that found no room in the ring in time."""


PEER_BYTES_MAX = 512 * 1024 * 1024
"""Maximum bytes of prompts and page lists that prefill keeps for the rooms of one link. A prompt of 131,072 tokens in
pages of 16 has 557 KB."""


class DecodePeer:
    """A decode worker at the other end of one link.

    `lease_s` is the time in seconds for which its rooms are kept without being named in a ping. `target` are its pools;
    None: this rank writes nothing to it, since its heads are not ours to send.
    """

    def __init__(self, link: base.Link, hello: wire.Hello, target: Target | None, *, lease_s: float) -> None:
        self.link = link
        self.hello = hello
        self.target = target
        self.lease_s = lease_s
        self.is_lost = False
        self.rooms = 0
        self.offers = 0
        """Prompts of it that are being taken."""
        self.room_writers: dict[tuple[str, int], RoomWriter[Any]] = {}
        """Writers of its live rooms, by request id and generation."""
        self._held: dict[wire.RoomId, int] = {}
        """Bytes of its promises and requests for further pages, by room."""
        self._held_bytes = 0

    def hold(self, message: wire.Promise | wire.Extend) -> bool:
        """Count the lists of a message that is kept for its room; False, and nothing is counted, beyond the budget."""
        size = len(message.pages or b"")
        if isinstance(message, wire.Promise):
            size += len(message.tokens or b"") + sum(len(one.pages or b"") for one in message.component_pages or ())
        if self._held_bytes + size > PEER_BYTES_MAX:
            return False
        self._held_bytes += size
        self._held[message.room] = self._held.get(message.room, 0) + size
        return True

    def release(self, key: wire.RoomId) -> None:
        """Forget what a room that has ended held."""
        self._held_bytes -= self._held.pop(key, 0)


class RoomWriter(Generic[RoomT]):
    """One room's part for one decode rank."""

    def __init__(self, room: RoomT, send_context: SendContext[RoomT], peer: DecodePeer, promise: wire.Promise) -> None:
        """Take a promise over. Raises RemoteProtocolError if it contradicts itself or the pools."""
        self.room = room
        self.key = promise.room
        self.peer = peer
        self.is_received = False
        self.bytes_sent = 0
        """Bytes written to this decode rank for the room."""
        self.lease_until_s = send_context.clock() + peer.lease_s
        self._send_context = send_context
        self._drained_link: base.Link | None = None
        self._tickets: dict[int, asyncio.Future[int | None]] = {}
        """Requests for slots of decode's ring that wait for an answer."""
        self._ticket_count = 0
        self.state = SenderRoom(
            prompt_tokens=promise.prompt_tokens,
            decode_prefix_len=promise.decode_prefix_len,
            page_size=send_context.page_size,
            pages=self._destination(promise),
            component_pages=self._component_pages(promise),
            needed_from={
                name: self._needed_from(name, promise.prompt_tokens) for name in send_context.component_memory
            },
            part=send_context.part,
        )

    def advance(self) -> None:
        """Post all writes and send all messages that are possible now."""
        while self.state.in_flight < self._send_context.settings.writes_in_flight_max:
            pages_max = self._send_context.settings.pages_per_write_max
            if self.peer.target is not None:
                pages_max = self.peer.target.pages_max(pages_max)
            job = self.state.next_job(pages_max=pages_max)
            if job is None:
                break
            if self.peer.target is None or job.component not in self.peer.target.handles or not job.our_pages:
                # Nothing of this pool goes to this rank, or another context holds the pages: the job counts as written,
                # so the room ends as at the others.
                self.state.settle(job, written=True)
                continue
            write = self._write(self.peer.target, job)
            task = self._send_context.tasks.spawn(write, name=f"write of {self.room.request_id}")
            # In the callback, not in the task: a task cancelled before its first step runs nothing of its body.
            task.add_done_callback(partial(self._write_ended, job))
        refusals, chunks = self.state.take_refusals(), self.state.take_chunks()
        # Taken above even if nothing is sent, so that the queues of `SenderRoom` do not grow.
        if self.peer.target is None:
            return
        for refusal in refusals:
            self.send(wire.Refused(room=self.key, span=refusal.span, cause=wire.brief(refusal.cause)))
        for chunk in chunks:
            self.send(
                wire.Chunk(
                    room=self.key,
                    rank=self._send_context.rank,
                    span=chunk.span,
                    first=chunk.first,
                    count=chunk.count,
                    last=chunk.last,
                    checksums=chunk.checksums,
                    component=chunk.component,
                )
            )

    def send_aux(self, message: wire.Aux) -> None:
        """Send the first token, if this rank is written to."""
        if self.peer.target is not None:
            self.send(msgspec.structs.replace(message, room=self.key))

    def renew(self, at_s: float) -> None:
        """Extend the lease: decode named the room at `at_s`."""
        self.lease_until_s = at_s + self.peer.lease_s

    def extend(self, message: wire.Extend) -> None:
        """Take over a request for further pages. Raises RemoteProtocolError."""
        self.renew(self._send_context.clock())
        if self.state.stopped is None:
            pages = wire.unpack_pages(message.pages)
            self._check(pages, message.component)
            self.state.extend(message.span, message.first, pages, message.component)
            self.room._advance()

    def grant(self, message: wire.StagingGranted) -> None:
        """Take slots of decode's ring for the write that waits for them."""
        future = self._tickets.get(message.ticket)
        if future is not None and not future.done():
            future.set_result(message.first)

    def end_waits(self) -> None:
        """Let no write wait for slots of decode's ring any more: the room has ended."""
        for future in self._tickets.values():
            if not future.done():
                future.set_result(None)

    def send_drained_on(self, link: base.Link) -> None:
        """Send Drained on this link as soon as nothing is in flight."""
        self._drained_link = link

    def settle(self) -> bool:
        """Send a pending Drained if all writes have ended. Returns True if nothing is in flight and nothing will be
        started.
        """
        if not self.state.is_drained:
            return False
        link, self._drained_link = self._drained_link, None
        if link is not None:
            self.send(wire.Drained(room=self.key, rank=self._send_context.rank), link)
        return True

    def send(self, message: wire.Message, link: base.Link | None = None) -> None:
        """Send a message; a closed link only counts it."""
        try:
            (link or self.peer.link).send(message)
        except LinkClosed:
            # The task that reads this link gets the same error and pauses its rooms.
            self._send_context.messages_unsent += 1

    def _destination(self, promise: wire.Promise) -> PageIds:
        if (promise.pages is None) != (self.peer.target is None):
            expected = "nothing" if promise.pages is None else "pages"
            raise RemoteProtocolError(
                f"decode's rank {promise.rank} of {promise.ranks} expects {expected} of prefill's rank "
                f"{self._send_context.rank}, which holds {'none' if self.peer.target is None else 'some'} of its heads"
            )
        if promise.pages is None:
            # Placeholders, one per page: `SenderRoom` counts them, and none is ever written.
            page_size = self._send_context.page_size
            count = -(-promise.prompt_tokens // page_size) - promise.decode_prefix_len // page_size
            return page_ids(range(max(count, 0)))
        pages = wire.unpack_pages(promise.pages)
        self._check(pages)
        return pages

    def _component_pages(self, promise: wire.Promise) -> list[ComponentPages]:
        """Return the requested pages of components. Raises RemoteProtocolError unless all components of both ends are
        named.
        """
        named = (
            None
            if promise.component_pages is None
            else sorted(request.component for request in promise.component_pages)
        )
        if named != (sorted(self._send_context.component_memory) or None):
            raise RemoteProtocolError(
                f"decode's promise names {named or 'no components'}; both ends have the components"
                f" {sorted(self._send_context.component_memory) or 'none'}"
            )
        page_count = -(-promise.prompt_tokens // self._send_context.page_size)
        component_pages = []
        for request in promise.component_pages or ():
            count = max(page_count - request.first, 0)
            pages = page_ids(range(count)) if request.pages is None else wire.unpack_pages(request.pages)
            if request.pages is not None:
                self._check(pages, request.component)
            # The position decides how many pages are written: more than the prompt's end needs is an error of decode.
            if pages and request.first < self._needed_from(request.component, promise.prompt_tokens):
                raise RemoteProtocolError(
                    f"decode requests {len(pages)} pages of component {request.component!r} from position "
                    f"{request.first}, which is more than the prompt's end needs"
                )
            component_pages.append(ComponentPages(request.component, request.first, pages))
        return component_pages

    def _needed_from(self, name: str, prompt_tokens: int) -> int:
        """Return the first position of a component's pages that is needed at the end of a prompt."""
        identity = components_of(self.peer.hello)[name]
        component = Component(
            name=name,
            kind="window" if identity.kind == "window" else "state",
            device_pages=1,
            window_tokens=identity.window_tokens,
        )
        return component.needed_from(prompt_tokens, self._send_context.page_size)

    def _check(self, pages: PageIds, component: str = FULL) -> None:
        """Raise RemoteProtocolError unless the pages are in decode's pool of the component."""
        if self.peer.target is None:
            return
        memory = self.peer.hello.memory if component == FULL else self.peer.hello.components.get(component)
        if memory is None:
            raise RemoteProtocolError(f"decode requests pages of component {component!r}, which it does not have")
        base.check_pages(pages, memory, owner="decode's" if component == FULL else f"decode's {component!r}")

    async def _write(self, target: Target, job: WriteJob) -> tuple[str, bytes]:
        """Do one write. Returns the failure as text, empty if it succeeded, and the checksums of the pages."""
        component = job.component
        # Before the write begins: the checksums are those of the pages as the caller handed them over.
        hashed = target.hashing[component](job.our_pages) if target.hashing else None
        begun_at_s = self._send_context.clock()
        try:
            written = await self._write_staged(target.staged.get(component), job)
            if written is None and self.state.stopped is not None:
                return f"the room ended while a write waited for staging: {self.state.stopped}", b""
            if written is None:
                written = await self._send_context.transport.write(
                    target.handles[component], job.our_pages, job.their_pages
                )
        except TidekvError as error:
            words = f"writing {len(job.our_pages)} pages ({component}) to {self.peer.hello.instance} failed: {error}"
            return words, b""
        self._send_context.callbacks.on_written(self._send_context.clock() - begun_at_s)
        self.bytes_sent += written
        self._send_context.bytes_sent += written
        self._send_context.pages_sent += len(job.our_pages)
        return "", b"" if hashed is None else await hashed

    async def _write_staged(self, staged: StagedTarget | None, job: WriteJob) -> int | None:
        """Do one write through the staging ring. Returns the bytes written; None: it is to be written without.

        The slots are free again once nothing of the write is in flight, however it ends.
        """
        if staged is None:
            return None
        ring, count = self._send_context.staging, len(job.our_pages)
        if staged.gather is None or ring is None:
            return await self._write_scattered(staged, job)
        slots = await ring.take(staged.slot_bytes, count, timeout_s=self._send_context.settings.staging_wait_s)
        if slots is None:
            self._send_context.staging_full += 1
            return None
        try:
            await settled(staged.gather(job.our_pages, slots.pages))
            written = await self._send_context.transport.write(staged.handle, slots.pages, job.their_pages)
        finally:
            ring.give_back(slots)
        self._send_context.pages_staged += count
        return written

    async def _write_scattered(self, staged: StagedTarget, job: WriteJob) -> int | None:
        """Do one write to slots of decode's ring, which decode copies to its pages. As `_write_staged`."""
        count = len(job.our_pages)
        ticket, self._ticket_count = self._ticket_count, self._ticket_count + 1
        rank = self._send_context.rank
        future = self._tickets[ticket] = asyncio.get_running_loop().create_future()
        self.send(wire.StagingRequest(room=self.key, rank=rank, ticket=ticket, component=job.component, count=count))
        written: int | None = None
        try:
            await asyncio.wait([future], timeout=self._send_context.settings.staging_wait_s)
            first = future.result() if future.done() else None
            if first is not None:
                slots = page_ids(range(first, first + count))
                written = await self._send_context.transport.write(staged.handle, job.our_pages, slots)
        finally:
            del self._tickets[ticket]
            if written is None:
                self.send(wire.StagingReturned(room=self.key, rank=rank, ticket=ticket))
        if written is None:
            self._send_context.staging_full += 1
            return None
        self.send(
            wire.Staged(
                room=self.key, rank=rank, ticket=ticket, component=job.component, span=job.span, first=job.first
            )
        )
        self._send_context.pages_staged += count
        return written

    def _write_ended(self, job: WriteJob, task: asyncio.Task[tuple[str, bytes]]) -> None:
        checksums = b""
        if task.cancelled():
            failure = "the write was cancelled"
        elif task.exception():
            failure = f"a bug: {task.exception()!r}"
        else:
            failure, checksums = task.result()
        self.state.settle(job, written=not failure, checksums=checksums)
        if failure:
            self.room.fail(PrefillCause.TRANSFER_FAILED.words(failure))
        self.room._advance()
