"""One room at the prefill side: what the embedder holds. Each decode rank of the room has a `RoomWriter` of its own.

Whatever ends one delivery ends the room: the ranks of a decode instance go on together or not at all. The room is over
when it has an outcome and no delivery has a write in flight.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from tidekv.states.errors import InvalidRequest, PrefillCause, ProtocolError
from tidekv.states.handover.sender import ComponentRequest
from tidekv.states.types import PageIds, PoolMemory, page_ids
from tidekv.transports import base
from tidekv.transports.control import wire
from tidekv.transports.prefill.room_writer import DecodePeer, RoomSettings, RoomWriter, SendContext

__all__ = ["Room", "RoomOutcome", "RoomSettings"]


class RoomOutcome(StrEnum):
    """How a room ended for prefill."""

    RECEIVED = "received"
    LEASE_ENDED = "lease ended"
    ABORTED = "aborted"
    REPLACED = "replaced"
    FAILED = "failed"
    CLOSED = "closed"


class Room:
    """The hand-over of one prompt to one decode worker, or to all ranks of one.

    Send all pages of the prompt, in order, and of each component the tail that is asked for (`component_pages`), then
    finish; the pages stay yours, but must stay as they are until `received` returns.
    """

    def __init__(
        self,
        send_context: SendContext[Room],
        promises: Sequence[tuple[DecodePeer, wire.Promise]],
        *,
        on_end: Callable[[Room], None],
    ) -> None:
        """Take the promises of all decode ranks over, which are the same but for their destinations. Raises
        RemoteProtocolError where one contradicts itself or our pools.
        """
        _, first = promises[0]
        self.request_id = first.room.request_id
        self.generation = first.room.generation
        self.prompt_tokens = first.prompt_tokens
        self.decode_prefix_len = first.decode_prefix_len
        self.tokens = next((promise.tokens for _, promise in promises if promise.tokens is not None), None)
        self.key_seed = first.key_seed
        self.outcome: RoomOutcome | None = None
        self.aborted = asyncio.Event()
        self.room_writers = [RoomWriter(self, send_context, peer, promise) for peer, promise in promises]
        self._send_context = send_context
        self._on_end = on_end
        self._handed_over = asyncio.Event()
        self._settled = asyncio.Event()
        self._readers = 0
        # All deliveries remember the same pages and end together: the first speaks for all.
        self._state = self.room_writers[0].state
        for peer, _ in promises:
            peer.rooms += 1

    @property
    def key(self) -> wire.Room:
        """The room's name, as the lowest decode rank says it."""
        return self.room_writers[0].key

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
    def component_pages(self) -> dict[str, ComponentRequest]:
        """What decode asks for of each component, by name; without components there are none. One of no pages need not
        be sent.
        """
        return self._state.component_pages.requested

    @property
    def sends_nothing(self) -> bool:
        """Whether no decode rank is written anything by this prefill rank, whatever was promised: it holds copies of
        what others send. Of a full hit this is False, and its page lists are empty.
        """
        return all(room_writer.peer.target is None for room_writer in self.room_writers)

    @property
    def writes_in_flight(self) -> int:
        """Writes that may still touch decode's pages, and read ours."""
        return sum(room_writer.state.in_flight for room_writer in self.room_writers)

    @property
    def lease_until_s(self) -> float:
        """Until when all decode ranks that still need the room must have named it again."""
        return min((each.lease_until_s for each in self.room_writers if not each.is_received), default=math.inf)

    async def send(self, pages: Iterable[int] | PageIds, *, start_token: int, end_token: int | None = None) -> None:
        """Hand over computed pages: ids of our pool for the tokens from `start_token` on, a multiple of the page size.

        Every page of the prompt is sent, from token 0, in order, chunk by chunk; what decode has is left out and
        remembered. `end_token` says how far they are computed, where that is less than they hold. Returns when what
        decode wants of them was posted; also, doing nothing, when the room has ended: look at `aborted`. Raises
        InvalidRequest, and then nothing is sent.
        """
        ids = page_ids(pages)
        _check_ours(ids, self._send_context.memory, "")
        if self._state.stopped is not None:
            return
        for room_writer in self.room_writers:
            room_writer.state.remember(ids, start_token=start_token, end_token=end_token)
        await self._hand_over()

    async def send_component_pages(self, component: str, pages: Iterable[int] | PageIds) -> None:
        """Hand over the tail of a component, once the whole prompt is computed and before `finish`: ids of our pool of
        this component, one for each position that `component_pages` names. Of a state that is its record after the last
        token.

        Returns when it was posted; also, doing nothing, when decode asks for none of it or the room has ended. Raises
        InvalidRequest for a component that there is not, or other pages than are asked for, and then nothing is sent.
        """
        ids = page_ids(pages)
        if (memory := self._send_context.component_memory.get(component)) is not None:
            _check_ours(ids, memory, f" of component {component!r}")
        if self._state.stopped is not None:
            return
        for room_writer in self.room_writers:
            room_writer.state.send_component_pages(component, ids)
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

        Raises InvalidRequest where pages, or the tail of a component, are missing or a value cannot be sent, and then
        nothing is changed. Does nothing when the room has ended.
        """
        self._check_tokens(tokens)
        told = wire.Aux(
            room=self.key,
            rank=self._send_context.rank,
            first_token=int(first_token),
            aux=dict(aux or {}),
            cached=dict(cached or {}),
        )
        try:
            wire.decode_body(wire.encode_frame(told)[wire.LENGTH.size :])
        except ProtocolError as error:
            raise InvalidRequest(f"the first token or aux cannot be sent: {error}") from error
        if self._state.stopped is None:
            for room_writer in self.room_writers:
                room_writer.state.finish()
            self.tokens = tokens or self.tokens
            for room_writer in self.room_writers:
                room_writer.say_aux(told)
            self._send_context.on_finish(self)
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
        self._give_up(RoomOutcome.CLOSED, PrefillCause.CLOSING.words("prefill is shutting down"))

    def receive(self, room_writer: RoomWriter[Room]) -> None:
        """A decode rank has all that it needs; with the last of them the room is over."""
        room_writer.is_received = True
        room_writer.state.stop("decode has received all")
        if all(other.is_received for other in self.room_writers):
            self.end(RoomOutcome.RECEIVED, "decode has received all")

    def abort(self, room_writer: RoomWriter[Room], link: base.Link) -> None:
        """A decode rank wants the writing to stop, and to hear on `link` when it has."""
        room_writer.say_drained_on(link)
        self._tell_others(room_writer, "another decode rank aborted the room")
        self.end(RoomOutcome.ABORTED, "decode aborted the room")

    def give_up(self, room_writer: RoomWriter[Room], cause: str) -> None:
        """A decode rank gave the room up."""
        self._tell_others(room_writer, f"another decode rank gave the room up: {cause}")
        self.end(RoomOutcome.FAILED, f"decode gave the room up: {cause}")

    def end(self, outcome: RoomOutcome, cause: str) -> None:
        """Start no more writes; the first outcome stays."""
        if self.outcome is None:
            self.outcome = outcome
            self._stop(cause, is_aborted=outcome is not RoomOutcome.RECEIVED)
        self._settle()

    def pause(self) -> None:
        """A link is lost: write nothing more, but keep the room for its lease."""
        instance = next((d.peer.hello.instance for d in self.room_writers if d.peer.is_lost), "decode")
        self._stop(f"the link to {instance} is lost", is_aborted=True)

    def expire(self) -> None:
        """The lease is over. Decode is told as well: it may live, and it is us who stood still."""
        late = min(self.room_writers, key=lambda room_writer: room_writer.lease_until_s).peer
        self._give_up(
            RoomOutcome.LEASE_ENDED,
            PrefillCause.LEASE_ENDED.words(f"{late.hello.instance} did not name the room for {late.lease_s:g} s"),
        )

    def advance(self) -> None:
        """Post what may be posted, and say what may be said; see whether all is settled."""
        if self.outcome is None and self._send_context.clock() >= self.lease_until_s:
            self.expire()
        for room_writer in self.room_writers:
            room_writer.advance()
        if not any(room_writer.state.can_write() for room_writer in self.room_writers):
            self._handed_over.set()
        self._settle()

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
            self._tell_others(None, cause)
            self.end(outcome, cause)

    def _tell_others(self, room_writer: RoomWriter[Room] | None, cause: str) -> None:
        """Say Failed, and Drained when that is so, to the decode ranks that have not ended the room themselves."""
        for other in self.room_writers:
            if self.outcome is None and other is not room_writer and not other.is_received:
                other.say(wire.Failed(room=other.key, cause=wire.brief(cause)))
                other.say_drained_on(other.peer.link)

    def _stop(self, cause: str, *, is_aborted: bool) -> None:
        for room_writer in self.room_writers:
            room_writer.state.stop(cause)
        if is_aborted:
            self.aborted.set()
        self._handed_over.set()

    async def _hand_over(self) -> None:
        """Post what may be posted; wait where the limit of writes in flight holds it back."""
        self.advance()
        while any(room_writer.state.can_write() for room_writer in self.room_writers):
            self._handed_over.clear()
            await self._handed_over.wait()

    def _settle(self) -> None:
        """The room is over when it has an outcome and nothing is in flight."""
        settled = [room_writer.settle() for room_writer in self.room_writers]
        if all(settled) and self.outcome is not None and not self._readers and not self._settled.is_set():
            for room_writer in self.room_writers:
                room_writer.peer.rooms -= 1
            self._settled.set()
            self._on_end(self)


def _check_ours(pages: PageIds, memory: PoolMemory, of: str) -> None:
    if pages and not 0 <= min(pages) <= max(pages) < memory.page_count:
        raise InvalidRequest(f"pages {min(pages)} to {max(pages)}{of} are not all in the pool of {memory.page_count}")
