"""One room at the prefill side: what the embedder holds, and what drives `SenderRoom` with real writes.

The state decides what is written and told; this shell posts writes (at most `writes_in_flight_max` at once), says what
is to be said on the link the room belongs to, and wakes whoever waits. It must never say a chunk before its write is
done, and never call the room drained while a write is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from tidekv.states.errors import InvalidRequest, LinkClosed, ProtocolError, TidekvError
from tidekv.states.sending import SenderRoom, WriteJob
from tidekv.states.shapes import PageIds, PoolMemory, page_ids
from tidekv.transports import base, wire
from tidekv.transports.tasks import OwnedTasks


class RoomOutcome(StrEnum):
    """How a room ended for prefill."""

    RECEIVED = "received"
    LEASE_ENDED = "lease ended"
    ABORTED = "aborted"
    REPLACED = "replaced"
    FAILED = "failed"
    CLOSED = "closed"


class RoomSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the writes of one room."""

    writes_in_flight_max: int = 4
    pages_per_write_max: int = 256


class Courier:
    """What rooms share: the transport, their tasks, the clock, and the counts of what was sent."""

    def __init__(
        self,
        *,
        transport: base.Transport,
        memory: PoolMemory,
        page_size: int,
        rank: int,
        clock: Callable[[], float],
        settings: RoomSettings,
        tasks: OwnedTasks,
        on_finish: Callable[[Room], None],
    ) -> None:
        self.transport = transport
        self.memory = memory
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
    """A decode worker at the other end of one link; its rooms live as long as its lease."""

    def __init__(self, link: base.Link, hello: wire.Hello, memory: base.PeerMemory, *, lease_s: float) -> None:
        self.link = link
        self.hello = hello
        self.memory = memory
        self.lease_s = lease_s
        self.lease_until_s = 0.0
        self.is_lost = False
        self.rooms = 0

    def renew(self, at_s: float) -> None:
        """It was heard of."""
        self.lease_until_s = at_s + self.lease_s


class Room:
    """The hand-over of one prompt to one decode worker.

    Send all pages of the prompt, in order, then finish; the pages stay yours, but must stay as they are until
    `received` returns.
    """

    def __init__(
        self, courier: Courier, peer: DecodePeer, promise: wire.Promise, *, on_end: Callable[[Room], None]
    ) -> None:
        """Take a promise over. Raises RemoteProtocolError where it contradicts itself or our pools."""
        self.key = promise.room
        self.request_id = promise.room.request_id
        self.generation = promise.room.generation
        self.prompt_tokens = promise.prompt_tokens
        self.decode_prefix_len = promise.decode_prefix_len
        self.tokens = promise.tokens
        self.key_seed = promise.key_seed
        self.peer = peer
        self.outcome: RoomOutcome | None = None
        self.aborted = asyncio.Event()
        self._courier = courier
        self._on_end = on_end
        self._handed_over = asyncio.Event()
        self._settled = asyncio.Event()
        self._drained_link: base.Link | None = None
        self._readers = 0
        self._state = SenderRoom(
            prompt_tokens=promise.prompt_tokens,
            decode_prefix_len=promise.decode_prefix_len,
            page_size=courier.page_size,
            pages=self._checked(promise.pages),
        )
        peer.rooms += 1

    @property
    def cause(self) -> str | None:
        """Why the room ended, in words; None while it lives."""
        return self._state.stopped

    @property
    def is_finished(self) -> bool:
        """True after `finish`."""
        return self._state.finished

    @property
    def pages(self) -> PageIds:
        """The pages that were sent so far, from the prompt's first on."""
        return self._state.computed

    @property
    def writes_in_flight(self) -> int:
        """Writes that may still touch decode's pages, and read ours."""
        return self._state.in_flight

    async def send(self, pages: Iterable[int] | PageIds, *, start_token: int, end_token: int | None = None) -> None:
        """Hand over computed pages: ids of our pool for the tokens from `start_token` on, a multiple of the page size.

        Every page of the prompt is sent, from token 0, in order, chunk by chunk; what decode has is left out and
        remembered. `end_token` says how far they are computed, where that is less than they hold. Returns when what
        decode wants of them was posted; also, doing nothing, when the room has ended: look at `aborted`. Raises
        InvalidRequest, and then nothing is sent.
        """
        ids = page_ids(pages)
        if ids and not 0 <= min(ids) <= max(ids) < self._courier.memory.page_count:
            raise InvalidRequest(
                f"pages {min(ids)} to {max(ids)} are not all in the pool of {self._courier.memory.page_count}"
            )
        if self._state.stopped is not None:
            return
        self._state.remember(ids, start_token=start_token, end_token=end_token)
        await self._hand_over()

    async def finish(
        self,
        *,
        first_token: int,
        aux: Mapping[str, Any] | None = None,
        cached: Mapping[str, int] | None = None,
        tokens: bytes | None = None,
    ) -> None:
        """All was sent: tell decode the first token, and `aux`: values that msgpack knows. `cached` says how many
        tokens prefill itself had, by source. Call it always, even if nothing had to be sent.

        `tokens` is the prompt as packed little-endian u32, for a peer with storage whose promises bring no tokens:
        without them nobody can name the pages there.

        Raises InvalidRequest where pages are missing or a value cannot be sent, and then nothing is changed. Does
        nothing when the room has ended.
        """
        self._check_tokens(tokens)
        told = wire.Aux(
            room=self.key,
            rank=self._courier.rank,
            first_token=int(first_token),
            aux=dict(aux or {}),
            cached=dict(cached or {}),
        )
        try:
            wire.decode_body(wire.encode_frame(told)[wire.LENGTH.size :])
        except ProtocolError as error:
            raise InvalidRequest(f"the first token or aux cannot be sent: {error}") from error
        if self._state.stopped is None:
            self._state.finish()
            self.tokens = tokens or self.tokens
            self._say(told)
            self._courier.on_finish(self)
            await self._hand_over()

    async def received(self) -> RoomOutcome:
        """Wait until decode needs nothing more of this room, or the room has ended otherwise, and no write is in
        flight: only now may its pages be freed or changed.
        """
        await self._settled.wait()
        assert self.outcome is not None
        return self.outcome

    def borrow(self) -> None:
        """Somebody else reads the pages: `received` waits for them as well, until `give_back`."""
        self._readers += 1

    def give_back(self) -> None:
        """Whoever borrowed the pages reads them no more."""
        assert self._readers > 0, "pages are given back once"
        self._readers -= 1
        self._settle()

    def fail(self, cause: str) -> None:
        """Give the room up, and tell decode why. Harmless when it has ended."""
        self._give_up(RoomOutcome.FAILED, cause)

    def close(self) -> None:
        """Prefill is closing: end the room, and tell decode."""
        self._give_up(RoomOutcome.CLOSED, "prefill is shutting down")

    def extend(self, message: wire.Extend) -> None:
        """Decode wants more pages. Raises RemoteProtocolError."""
        if self._state.stopped is None:
            self._state.extend(message.span, message.first, self._checked(message.pages))
            self._advance()

    def abort(self, link: base.Link) -> None:
        """Decode wants the writing to stop, and to hear on `link` when it has."""
        self._drained_link = link
        self.end(RoomOutcome.ABORTED, "decode aborted the room")

    def end(self, outcome: RoomOutcome, cause: str) -> None:
        """Start no more writes; the first outcome stays."""
        if self.outcome is None:
            self.outcome = outcome
            self._stop(cause, is_aborted=outcome is not RoomOutcome.RECEIVED)
        self._settle()

    def pause(self) -> None:
        """The link is lost: write nothing more, but keep the room for its lease."""
        self._stop(f"the link to {self.peer.hello.instance} is lost", is_aborted=True)

    def expire(self) -> None:
        """The lease is over. Decode is told as well: it may live, and it is us who stood still."""
        cause = f"{self.peer.hello.instance} was not heard of for {self.peer.lease_s} s"
        self._give_up(RoomOutcome.LEASE_ENDED, cause)

    def _check_tokens(self, tokens: bytes | None) -> None:
        if tokens is None:
            return
        if len(tokens) != 4 * self.prompt_tokens:
            raise InvalidRequest(
                f"tokens are {len(tokens)} bytes; the prompt of {self.prompt_tokens} tokens has 4 each"
            )
        if self.tokens not in (None, tokens):
            raise InvalidRequest(f"tokens of request {self.request_id!r} are not those that its promise brought")

    def _give_up(self, outcome: RoomOutcome, cause: str) -> None:
        if self.outcome is None:
            self._say(wire.Failed(room=self.key, cause=wire.brief(cause)))
            self._drained_link = self.peer.link
            self.end(outcome, cause)

    def _stop(self, cause: str, *, is_aborted: bool) -> None:
        self._state.stop(cause)
        if is_aborted:
            self.aborted.set()
        self._handed_over.set()

    def _checked(self, packed: bytes) -> PageIds:
        pages = wire.unpack_pages(packed)
        base.check_pages(pages, self.peer.hello.memory, whose="decode's")
        return pages

    async def _hand_over(self) -> None:
        """Post what may be posted; wait where the limit of writes in flight holds it back."""
        self._advance()
        while self._state.can_write():
            self._handed_over.clear()
            await self._handed_over.wait()

    def _advance(self) -> None:
        """Post what may be posted, and say what may be said."""
        if self._courier.clock() >= self.peer.lease_until_s:
            self.expire()
        while self._state.in_flight < self._courier.settings.writes_in_flight_max:
            job = self._state.next_job(pages_max=self._courier.settings.pages_per_write_max)
            if job is None:
                break
            task = self._courier.tasks.spawn(self._write(job), name=f"write of {self.request_id}")
            # In the callback, not in the task: a task that is cancelled before its first step runs nothing.
            task.add_done_callback(partial(self._write_ended, job))
        for refusal in self._state.take_refusals():
            self._say(wire.Refused(room=self.key, span=refusal.span, cause=wire.brief(refusal.cause)))
        for chunk in self._state.take_chunks():
            self._say(
                wire.Chunk(
                    room=self.key,
                    rank=self._courier.rank,
                    span=chunk.span,
                    first=chunk.first,
                    count=chunk.count,
                    last=chunk.last,
                )
            )
        if not self._state.can_write():
            self._handed_over.set()

    async def _write(self, job: WriteJob) -> str:
        """Do one write; returns what failed, nothing if it landed."""
        try:
            written = await self._courier.transport.write(self.peer.memory, job.our_pages, job.their_pages)
        except TidekvError as error:
            return f"writing {len(job.our_pages)} pages to {self.peer.hello.instance} failed: {error}"
        self._courier.bytes_sent += written
        self._courier.pages_sent += len(job.our_pages)
        return ""

    def _write_ended(self, job: WriteJob, task: asyncio.Task[str]) -> None:
        if task.cancelled():
            failure = "the write was cut off"
        else:
            failure = f"a bug: {task.exception()!r}" if task.exception() else task.result()
        self._state.settle(job, landed=not failure)
        if failure:
            self.fail(failure)
        self._advance()
        self._settle()

    def _settle(self) -> None:
        """The room is over when it has an outcome and nothing is in flight."""
        if not self._state.is_drained:
            return
        link, self._drained_link = self._drained_link, None
        if link is not None:
            self._say(wire.Drained(room=self.key, rank=self._courier.rank), link)
        if self.outcome is not None and not self._readers and not self._settled.is_set():
            self.peer.rooms -= 1
            self._settled.set()
            self._on_end(self)

    def _say(self, message: wire.Message, link: base.Link | None = None) -> None:
        """Send, as far as the link still takes it; whoever reads the link hears of its end and ends its rooms."""
        try:
            (link or self.peer.link).send(message)
        except LinkClosed:
            self._courier.messages_unsent += 1
