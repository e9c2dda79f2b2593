"""What one room owes one rank of a decode instance: writes, the words about them, and the word that all have ended.

`SenderRoom` decides what is written and told, of pages and of components; this posts the writes (at most
`writes_in_flight_max` at once) and says what is to be said on the link to that rank. A rank that this prefill rank
writes nothing to has a delivery as well, whose writes go nowhere: its promise was compared, and its Received is waited
for. It must never say a chunk before its write is done, and never call itself drained while a write is in flight.

The pools of one decode rank as a prefill rank writes to them: its pages', and each component's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from tidekv.states.components.specs import Component, ComponentPages
from tidekv.states.errors import LinkClosed, PrefillCause, RemoteProtocolError, TidekvError
from tidekv.states.handover.sender import ComponentPart, SenderRoom, WriteJob
from tidekv.states.types import PageIds, PoolMemory, page_ids
from tidekv.states.validation import Options, PositiveCount
from tidekv.transports import base, components
from tidekv.transports.components import components_of
from tidekv.transports.control import wire
from tidekv.transports.tasks import OwnedTasks


class Target(msgspec.Struct, frozen=True):
    """Handles of the pools that are written to, by component; "full" are the pages."""

    handles: dict[str, base.PeerMemory]

    async def forget(self, transport: base.Transport) -> None:
        """Give all handles back; nothing is written to any of them."""
        for handle in self.handles.values():
            await transport.remove_peer(handle)


async def make_target(transport: base.Transport, *, ours: wire.Hello, theirs: wire.Hello) -> Target | None:
    """Make the pools of a decode rank writable, as far as its heads are ours to write, all of them or none; None: we
    write nothing to it. Raises RemoteProtocolError, TransferFailed.
    """
    exchanges = components.exchanges_with(decode=theirs, prefill=ours)
    if exchanges is None:
        return None
    handles: dict[str, base.PeerMemory] = {}
    async with AsyncExitStack() as undo:
        for name, exchange in exchanges.items():
            memory = theirs.components.get(name, theirs.memory)
            handle = await transport.add_peer(theirs.instance, theirs.metadata, memory, exchange)
            undo.push_async_callback(transport.remove_peer, handle)
            handles[name] = handle
        undo.pop_all()
    return Target(handles)


class Sent(Protocol):
    """What a delivery asks of its room, which spans all decode ranks."""

    request_id: str

    def advance(self) -> None:
        """Post the writes that have become possible, and see whether all is settled."""
        ...

    def fail(self, cause: str) -> None:
        """Give the room up for all ranks."""
        ...


RoomT = TypeVar("RoomT", bound=Sent)


class RoomSettings(Options, frozen=True, kw_only=True):
    """Limits of the writes of one room to one decode rank. Raises InvalidConfig."""

    writes_in_flight_max: PositiveCount = 4
    """Maximum writes in flight at once."""
    pages_per_write_max: PositiveCount = 256
    """Maximum pages of one write."""


class SendContext(Generic[RoomT]):
    """What rooms share: the transport, their tasks, the clock, and the counts of what was sent."""

    def __init__(
        self,
        *,
        transport: base.Transport,
        memory: PoolMemory,
        component_memory: Mapping[str, PoolMemory],
        page_size: int,
        rank: int,
        clock: Callable[[], float],
        settings: RoomSettings,
        tasks: OwnedTasks,
        on_finish: Callable[[RoomT], None],
    ) -> None:
        self.transport = transport
        self.memory = memory
        self.component_memory = component_memory
        self.page_size = page_size
        self.rank = rank
        self.clock = clock
        self.settings = settings
        self.tasks = tasks
        self.on_finish = on_finish
        self.bytes_sent = 0
        self.pages_sent = 0
        self.messages_unsent = 0


class DecodePeer:
    """A decode worker at the other end of one link. `lease_s` is how long its rooms are kept that it does not name.

    `target` are its pools, None where we write nothing to it: it is a rank whose heads are not ours to send.
    """

    def __init__(self, link: base.Link, hello: wire.Hello, target: Target | None, *, lease_s: float) -> None:
        self.link = link
        self.hello = hello
        self.target = target
        self.lease_s = lease_s
        self.is_lost = False
        self.rooms = 0
        self.room_writers: dict[tuple[str, int], RoomWriter[Any]] = {}
        """Its live rooms, by request id and generation."""


class RoomWriter(Generic[RoomT]):
    """One room's part for one decode rank."""

    def __init__(self, room: RoomT, send_context: SendContext[RoomT], peer: DecodePeer, promise: wire.Promise) -> None:
        """Take a promise over. Raises RemoteProtocolError where it contradicts itself or the pools."""
        self.room = room
        self.key = promise.room
        self.peer = peer
        self.is_received = False
        self.lease_until_s = send_context.clock() + peer.lease_s
        self._send_context = send_context
        self._drained_link: base.Link | None = None
        self.state = SenderRoom(
            prompt_tokens=promise.prompt_tokens,
            decode_prefix_len=promise.decode_prefix_len,
            page_size=send_context.page_size,
            pages=self._destination(promise),
            component_pages=self._component_pages(promise),
        )

    def advance(self) -> None:
        """Post what may be posted, and say what may be said."""
        while self.state.in_flight < self._send_context.settings.writes_in_flight_max:
            job = self.state.next_job(pages_max=self._send_context.settings.pages_per_write_max)
            if job is None:
                break
            if self.peer.target is None:
                self.state.settle(job, landed=True)
                continue
            write = self._write(self.peer.target, job)
            task = self._send_context.tasks.spawn(write, name=f"write of {self.room.request_id}")
            # In the callback, not in the task: a task that is cancelled before its first step runs nothing.
            task.add_done_callback(partial(self._write_ended, job))
        refusals, component_pages, chunks = (
            self.state.take_refusals(),
            self.state.take_component_pages(),
            self.state.take_chunks(),
        )
        if self.peer.target is None:
            return
        for refusal in refusals:
            self.say(wire.Refused(room=self.key, span=refusal.span, cause=wire.brief(refusal.cause)))
        for component in component_pages:
            self.say(wire.ComponentSent(room=self.key, rank=self._send_context.rank, component=component))
        for chunk in chunks:
            self.say(
                wire.Chunk(
                    room=self.key,
                    rank=self._send_context.rank,
                    span=chunk.span,
                    first=chunk.first,
                    count=chunk.count,
                    last=chunk.last,
                )
            )

    def say_aux(self, told: wire.Aux) -> None:
        """Tell the first token, where this rank is written to."""
        if self.peer.target is not None:
            self.say(msgspec.structs.replace(told, room=self.key))

    def renew(self, at_s: float) -> None:
        """Decode named the room: it has not forgotten it."""
        self.lease_until_s = at_s + self.peer.lease_s

    def extend(self, message: wire.Extend) -> None:
        """Decode wants more pages. Raises RemoteProtocolError."""
        self.renew(self._send_context.clock())
        if self.state.stopped is None:
            pages = wire.unpack_pages(message.pages)
            self._check(pages)
            self.state.extend(message.span, message.first, pages)
            self.room.advance()

    def say_drained_on(self, link: base.Link) -> None:
        """Say Drained on this link as soon as nothing is in flight."""
        self._drained_link = link

    def settle(self) -> bool:
        """Say Drained where that is due; True when nothing is in flight and nothing will be started."""
        if not self.state.is_drained:
            return False
        link, self._drained_link = self._drained_link, None
        if link is not None:
            self.say(wire.Drained(room=self.key, rank=self._send_context.rank), link)
        return True

    def say(self, message: wire.Message, link: base.Link | None = None) -> None:
        """Send, as far as the link still takes it; whoever reads the link hears of its end and ends its rooms."""
        try:
            (link or self.peer.link).send(message)
        except LinkClosed:
            self._send_context.messages_unsent += 1

    def _destination(self, promise: wire.Promise) -> PageIds:
        if (promise.pages is None) != (self.peer.target is None):
            expected = "nothing" if promise.pages is None else "pages"
            raise RemoteProtocolError(
                f"decode's rank {promise.rank} of {promise.ranks} expects {expected} of prefill's rank "
                f"{self._send_context.rank}, whose heads are {'others' if self.peer.target is None else 'its own'}"
            )
        if promise.pages is None:
            page_size = self._send_context.page_size
            count = -(-promise.prompt_tokens // page_size) - promise.decode_prefix_len // page_size
            return page_ids(range(max(count, 0)))
        pages = wire.unpack_pages(promise.pages)
        self._check(pages)
        return pages

    def _component_pages(self, promise: wire.Promise) -> list[ComponentPages]:
        """What is asked of components. Raises RemoteProtocolError unless it names every one that both ends have."""
        told = None if promise.component_pages is None else sorted(tail.component for tail in promise.component_pages)
        if told != (sorted(self._send_context.component_memory) or None):
            raise RemoteProtocolError(
                f"decode's promise says {'nothing' if told is None else told} of components; both ends have"
                f" {sorted(self._send_context.component_memory) or 'none'}"
            )
        page_count = -(-promise.prompt_tokens // self._send_context.page_size)
        component_pages = []
        for tail in promise.component_pages or ():
            count = max(page_count - tail.first, 0)
            pages = page_ids(range(count)) if tail.pages is None else wire.unpack_pages(tail.pages)
            memory = self.peer.hello.components[tail.component]
            if tail.pages is not None:
                base.check_pages(pages, memory, whose=f"decode's {tail.component!r}")
            if pages and tail.first < self._needed_from(tail.component, promise.prompt_tokens):
                raise RemoteProtocolError(
                    f"decode asks for {len(pages)} pages of component {tail.component!r}, which is more than its tail"
                )
            component_pages.append(ComponentPages(tail.component, tail.first, pages))
        return component_pages

    def _needed_from(self, name: str, prompt_tokens: int) -> int:
        """The first position of a tail that goes to the end of a prompt."""
        told = components_of(self.peer.hello)[name]
        component = Component(
            name=name,
            kind="window" if told.kind == "window" else "state",
            device_pages=1,
            window_tokens=told.window_tokens,
        )
        return component.needed_from(prompt_tokens, self._send_context.page_size)

    def _check(self, pages: PageIds) -> None:
        if self.peer.target is not None:
            base.check_pages(pages, self.peer.hello.memory, whose="decode's")

    async def _write(self, target: Target, job: WriteJob | ComponentPart) -> str:
        """Do one write; returns what failed, nothing if it landed."""
        component = job.component if isinstance(job, ComponentPart) else "full"
        try:
            written = await self._send_context.transport.write(
                target.handles[component], job.our_pages, job.their_pages
            )
        except TidekvError as error:
            return f"writing {len(job.our_pages)} pages ({component}) to {self.peer.hello.instance} failed: {error}"
        self._send_context.bytes_sent += written
        self._send_context.pages_sent += len(job.our_pages)
        return ""

    def _write_ended(self, job: WriteJob | ComponentPart, task: asyncio.Task[str]) -> None:
        if task.cancelled():
            failure = "the write was cut off"
        else:
            failure = f"a bug: {task.exception()!r}" if task.exception() else task.result()
        self.state.settle(job, landed=not failure)
        if failure:
            self.room.fail(PrefillCause.TRANSFER_FAILED.words(failure))
        self.room.advance()
