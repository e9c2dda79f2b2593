"""One room at the prefill side, as the embedder holds it. Each decode rank of the room has its own `RoomWriter`.

The end of one room writer ends the room: the ranks of a decode instance continue together or not at all. The room is
over when it has an outcome and no room writer has a write in flight.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from tidekv.states.errors import InvalidRequest, PrefillCause, ProtocolError, RemoteProtocolError, TransferFailed
from tidekv.states.handover.prompt_digest import PromptDigest, digest_of
from tidekv.states.handover.sender import RequestedComponent
from tidekv.states.types import PageIds, PoolMemory, page_ids
from tidekv.states.validation import checked_first_token
from tidekv.transports import base, wire
from tidekv.transports.aux_values import encode_aux
from tidekv.transports.prefill.room_writer import DecodePeer, RoomSettings, RoomWriter, SendContext

__all__ = ["Room", "RoomOutcome", "RoomSettings"]


class RoomOutcome(StrEnum):
    """Outcome of a room for prefill."""

    RECEIVED = "received"
    LEASE_ENDED = "lease ended"
    ABORTED = "aborted"
    REPLACED = "replaced"
    FAILED = "failed"
    CLOSED = "closed"


class Room:
    """The hand-over of one prompt to one decode worker, or to all ranks of one.

    Send all pages of the prompt, in order, then the pages of each component that its end needs (`component_pages`),
    then finish. Pages that decode has are remembered and not written, unless a tier of decode does not deliver them.
    The caller owns the pages, and must not change or free them until `received` returns.

    A room takes pages of its own prompt only. If the promise brought the tokens (`tokens`), compute these. Otherwise
    say which prompt was computed, by asking for the room (`PrefillPeer.room`) or by `confirm`, before the first page.

    Fields, beside the properties below:

        request_id, generation   name of the request at decode, and how often it was promised before
        prompt_tokens            length of the prompt
        decode_prefix_len        leading tokens that decode has: their pages are remembered and not written
        tokens                   the prompt as packed little-endian u32; None if the promise brought none
        prompt                   digest of the prompt whose pages decode asks for
        outcome                  a RoomOutcome once the room has ended, otherwise None
        aborted                  an asyncio.Event, set when decode needs no more pages: stop computing
        lost_link                whether a link of the room was lost; decode may open another room for the request
        owner                    name of the decode worker, the same for all of its ranks
        token_behind             the packed token behind the prompt, in a read of cached pages; empty if it is not given
    """

    def __init__(
        self,
        send_context: SendContext[Room],
        promises: Sequence[tuple[DecodePeer, wire.Promise]],
        *,
        on_end: Callable[[Room], None],
    ) -> None:
        """Take over the promises of all decode ranks, which differ only in their destinations.

        Raises RemoteProtocolError if one contradicts itself or our pools.
        """
        _, first = promises[0]
        self.request_id = first.room.request_id
        self.generation = first.room.generation
        self.owner = first.group or f"{first.room.instance}-{first.room.epoch}"
        self.prompt_tokens = first.prompt_tokens
        self.decode_prefix_len = first.decode_prefix_len
        self.tokens = next((promise.tokens for _, promise in promises if promise.tokens is not None), None)
        self.token_behind = first.token_behind
        self.prompt = PromptDigest(first.prompt_tokens, first.prompt_digest)
        """The prompt whose pages decode asks for."""
        self._key_seed = first.key_seed
        self._is_confirmed = self.tokens is not None
        if self.tokens is not None and not self._is_of_prompt(self.tokens):
            raise RemoteProtocolError("decode's promise has tokens that are not those of its digest")
        self.outcome: RoomOutcome | None = None
        self.lost_link = False
        """Whether a link of it was lost: decode aborts such a room, and may open another one for the request."""
        self.aborted = asyncio.Event()
        self._room_writers = [RoomWriter(self, send_context, peer, promise) for peer, promise in promises]
        self._send_context = send_context
        self._on_end = on_end
        self._kept: dict[str, dict[int, int]] = {}
        self._all_posted = asyncio.Event()
        self._advanced = asyncio.Event()
        self._settled = asyncio.Event()
        self._readers = 0
        # All room writers remember the same pages and end together, so the state of the first represents all.
        self._state = self._room_writers[0].state
        for peer, _ in promises:
            peer.rooms += 1

    @property
    def _key(self) -> wire.RoomId:
        """The room's key at its lowest decode rank."""
        return self._room_writers[0].key

    @property
    def peer_addresses(self) -> tuple[str, ...]:
        """Where prefill can read what the decode worker has in host memory (`DecodeRequest.peers`): its
        `DecodeEngine.peer_address`. Empty if it does not share host memory.
        """
        shares_at = [room_writer.peer.hello.shares_at for room_writer in self._room_writers]
        return (",".join(shares_at),) if all(shares_at) else ()

    @property
    def cause(self) -> str | None:
        """Why the room ended; None while it lives."""
        return self._state.stopped

    @property
    def is_finished(self) -> bool:
        """True after `finish`."""
        return self._state.finished

    @property
    def pages(self) -> PageIds:
        """The pages sent so far, from the prompt's first page on."""
        return self._state.computed

    def held(self, pages: Iterable[int]) -> list[int]:
        """Those of these pages of the prompt, by number, that this prefill rank holds: all, unless it is
        context-parallel.
        """
        return self._send_context.part.held(pages, self._state.page_count)

    @property
    def component_pages(self) -> dict[str, RequestedComponent]:
        """The pages to send of each component, by name; empty without components: all that the prompt's end needs."""
        return self._state.component_pages

    @property
    def _kept_component_pages(self) -> dict[str, dict[int, int]]:
        """By component, the pages that storage may take, by position in the prompt: those sent and those kept."""
        return self._kept

    @property
    def sends_nothing(self) -> bool:
        """Whether this prefill rank writes nothing to any decode rank, whatever was promised: it holds copies of heads
        that other ranks send. False for a full hit, whose page lists are empty.
        """
        return all(room_writer.peer.target is None for room_writer in self._room_writers)

    @property
    def writes_in_flight(self) -> int:
        """Number of writes that may still touch decode's pages and read ours."""
        return sum(room_writer.state.in_flight for room_writer in self._room_writers)

    @property
    def bytes_sent(self) -> int:
        """Bytes of pages written to decode for this room so far."""
        return sum(room_writer.bytes_sent for room_writer in self._room_writers)

    @property
    def _lease_until_s(self) -> float:
        """Time at which the first lease of a decode rank that still needs the room expires."""
        return min((each.lease_until_s for each in self._room_writers if not each.is_received), default=math.inf)

    def confirm(self, prompt: PromptDigest) -> None:
        """Say which prompt was computed, before its first page is sent (`tidekv.prompt_digest`).

        Raises TransferFailed for another prompt than that of the room, which fails by that.
        """
        if prompt != self.prompt:
            words = (
                f"prefill has computed another prompt under the name {self.request_id!r}: it has {prompt.prompt_tokens}"
                f" tokens, and the one that decode asks for {self.prompt_tokens}, or their tokens or namespaces differ"
            )
            self.fail(PrefillCause.OTHER_PROMPT.words(words))
            raise TransferFailed(words)
        self._is_confirmed = True

    async def send(self, pages: Iterable[int] | PageIds, *, start_token: int, end_token: int | None = None) -> None:
        """Hand over computed pages: ids of our pool for the tokens from `start_token` on, a multiple of the page size.

        Send every page of the prompt, from token 0, in order, chunk by chunk; pages that decode has are remembered and
        not written. `end_token` is the end of the computed tokens, if the last page is not full. A context-parallel
        rank sends the same tokens as the others, with `end_token`, and of their pages those that it holds (`held`),
        which may be none. Pages in GPU memory must be complete when this is called: NIXL reads them without regard to
        streams, so wait for the event behind the kernels that wrote them. Returns when the wanted pages were posted. If
        the room has ended it does nothing: check `aborted`. Raises InvalidRequest, and then nothing is sent.
        """
        self._check_confirmed()
        ids = page_ids(pages)
        _check_ours(ids, self._send_context.memory, "")
        if self._state.stopped is not None:
            return
        for room_writer in self._room_writers:
            room_writer.state.remember(ids, start_token=start_token, end_token=end_token)
        await self._post_all()

    async def send_component_pages(self, component: str, pages: Iterable[int] | PageIds) -> None:
        """Hand over the pages of a component, after the whole prompt is computed and before `finish`.

        `pages` are ids of our pool of this component, one for each position that `component_pages` names and this rank
        holds (`held`); for a recurrent state the one record after the last token. Pages that decode has are remembered
        and not written. Returns when the others were posted. Does nothing if the room has ended. Raises InvalidRequest
        for an unknown component or other pages than needed, and then nothing is sent.
        """
        self._check_confirmed()
        ids = page_ids(pages)
        if (memory := self._send_context.component_memory.get(component)) is not None:
            _check_ours(ids, memory, f" of component {component!r}")
        if self._state.stopped is not None:
            return
        for room_writer in self._room_writers:
            room_writer.state.send_component_pages(component, ids)
        held = self.held(range(self.component_pages[component].first, self._state.page_count))
        self._kept.setdefault(component, {}).update(zip(held, ids, strict=True))
        await self._post_all()

    def keep_component_pages(self, component: str, first: int, pages: Iterable[int] | PageIds) -> None:
        """Let a peer with storage store pages of a component that decode did not request, before `finish`.

        `pages` are ids of our pool of this component, complete, at positions [first, first + len(pages)) of the prompt;
        the record of a state is kept at the position of the last page that it covers. Positions must be those of full
        pages of the prompt. Raises InvalidRequest, and then nothing is kept.
        """
        ids = page_ids(pages)
        memory = self._send_context.component_memory.get(component)
        if memory is None:
            known = ", ".join(self._send_context.component_memory) or "none"
            raise InvalidRequest(f"there is no component {component!r} to keep pages of; there are {known}")
        _check_ours(ids, memory, f" of component {component!r}")
        full_pages = self.prompt_tokens // self._send_context.page_size
        if first < 0 or first + len(ids) > full_pages:
            raise InvalidRequest(
                f"request {self.request_id!r} keeps positions [{first}, {first + len(ids)}) of component"
                f" {component!r}; its prompt has full pages [0, {full_pages})"
            )
        if self.is_finished:
            raise InvalidRequest(f"request {self.request_id!r} keeps pages of component {component!r} after finish")
        self._kept.setdefault(component, {}).update(enumerate(ids, first))

    async def finish(
        self,
        *,
        first_token: int,
        aux: Mapping[str, Any] | None = None,
        cached: Mapping[str, int] | None = None,
        tokens: bytes | None = None,
        key_seed: bytes | None = None,
    ) -> None:
        """Send the first token and `aux` to decode. Call it always, even if no page had to be sent.

        `aux` holds msgpack values, 64 KiB at most, with text as keys.

        `cached` is the number of tokens that prefill had cached, by source. `tokens` is the prompt as packed
        little-endian u32, for a peer with storage whose promises bring no tokens: without them its pages there cannot
        be named. `key_seed`, 32 bytes or none, starts the keys of the pages there if the promise has none: one that
        names the prompt by a digest of its own.

        Raises InvalidRequest if pages of the prompt or of a component are missing, if `first_token` is no token of the
        peer's vocabulary (integers of numpy and torch are taken), or if a value cannot be sent; then
        nothing is changed. Does nothing if the room has ended.
        """
        self._check_confirmed()
        self._check_tokens(tokens)
        token = checked_first_token(first_token, self._send_context.vocabulary)
        message = wire.Aux(
            room=self._key,
            rank=self._send_context.rank,
            first_token=token,
            aux=encode_aux(aux or {}),
            cached=dict(cached or {}),
        )
        # Decoded as decode will: a value that msgpack encodes may still exceed the limits of `Aux`.
        try:
            wire.decode_body(wire.encode_frame(message)[wire.LENGTH.size :])
        except ProtocolError as error:
            raise InvalidRequest(f"the first token or `cached` cannot be sent: {error}") from error
        if self._state.stopped is None:
            for room_writer in self._room_writers:
                room_writer.state.finish()
            self.tokens = tokens or self.tokens
            self._key_seed = key_seed if self._key_seed is None else self._key_seed
            for room_writer in self._room_writers:
                room_writer.send_aux(message)
            self._send_context.callbacks.on_finish(self)
            await self._post_all()

    async def _wait_written(self) -> None:
        """Wait until all that was sent so far is in place and reported, or the room has ended."""
        while self.cause is None and any(
            room_writer.state.in_flight or room_writer.state.can_write() for room_writer in self._room_writers
        ):
            self._advanced.clear()
            await self._advanced.wait()

    async def received(self) -> RoomOutcome:
        """Wait until decode needs nothing more of this room, or it has ended otherwise, and no write is in flight.

        Only then may its pages be freed or changed.
        """
        await self._settled.wait()
        assert self.outcome is not None
        return self.outcome

    def _borrow(self) -> None:
        """Register a reader of the pages: `received` waits for its `give_back` as well."""
        self._readers += 1

    def _give_back(self) -> None:
        """End one `borrow`."""
        assert self._readers > 0, "pages are given back once"
        self._readers -= 1
        self._settle()

    def fail(self, cause: str) -> None:
        """End the room and send the cause to decode. Does nothing if it has ended."""
        self._end_for_all(RoomOutcome.FAILED, cause)

    def _close(self) -> None:
        """End the room because prefill is closing, and send that to decode."""
        self._end_for_all(RoomOutcome.CLOSED, PrefillCause.CLOSING.words("prefill is shutting down"))

    def _receive(self, room_writer: RoomWriter[Room]) -> None:
        """Record that a decode rank has all that it needs. The last of them ends the room."""
        room_writer.is_received = True
        room_writer.state.stop("decode has received all")
        if all(other.is_received for other in self._room_writers):
            self._end(RoomOutcome.RECEIVED, "decode has received all")

    def _abort(self, room_writer: RoomWriter[Room], link: base.Link) -> None:
        """End the room for a decode rank's Abort; Drained is sent on `link` when nothing of its part is in flight."""
        self.lost_link = self.lost_link or link is not room_writer.peer.link
        room_writer.send_drained_on(link)
        self._fail_others(room_writer, "another decode rank aborted the room")
        self._end(RoomOutcome.ABORTED, "decode aborted the room")

    def _give_up(self, room_writer: RoomWriter[Room], cause: str) -> None:
        """End the room because a decode rank failed it."""
        self._fail_others(room_writer, f"another decode rank failed the room: {cause}")
        self._end(RoomOutcome.FAILED, f"decode failed the room: {cause}")

    def _end(self, outcome: RoomOutcome, cause: str) -> None:
        """Start no more writes. The first outcome is kept."""
        if self.outcome is None:
            self.outcome = outcome
            self._stop(cause, is_aborted=outcome is not RoomOutcome.RECEIVED)
        self._settle()

    def _pause(self) -> None:
        """Write nothing more, since a link is lost, but keep the room until its lease ends: decode may dial again and
        abort it.
        """
        self.lost_link = True
        instance = next((each.peer.hello.instance for each in self._room_writers if each.peer.is_lost), "decode")
        self._stop(f"the link to {instance} is lost", is_aborted=True)

    def _expire(self) -> None:
        """End the room, since its lease is over. Decode is sent Failed: it may be alive, with this process having been
        stopped.
        """
        late = min(self._room_writers, key=lambda room_writer: room_writer.lease_until_s).peer
        self._end_for_all(
            RoomOutcome.LEASE_ENDED,
            PrefillCause.LEASE_ENDED.words(f"{late.hello.instance} did not name the room for {late.lease_s:g} s"),
        )

    def _advance(self) -> None:
        """Post all writes and send all messages that are possible now; then check whether all have ended."""
        # Checked here as well as by the timer: after this process was stopped, a write may come before the timer runs.
        if self.outcome is None and self._send_context.clock() >= self._lease_until_s:
            self._expire()
        for room_writer in self._room_writers:
            room_writer.advance()
        if not any(room_writer.state.can_write() for room_writer in self._room_writers):
            self._all_posted.set()
        self._advanced.set()
        self._settle()

    def _check_confirmed(self) -> None:
        if not self._is_confirmed:
            raise InvalidRequest(
                f"the promise of request {self.request_id!r} brought no tokens: call room.confirm(prompt_digest(tokens)"
                ") with the prompt that was computed before its first page is sent, or ask for the room by"
                " PrefillPeer.room; request ids alone may belong to another prompt"
            )

    def _check_tokens(self, tokens: bytes | None) -> None:
        if tokens is None:
            return
        if len(tokens) != 4 * self.prompt_tokens:
            raise InvalidRequest(
                f"tokens are {len(tokens)} bytes; the prompt of {self.prompt_tokens} tokens has 4 each"
            )
        if self.tokens not in (None, tokens):
            raise InvalidRequest(f"tokens of request {self.request_id!r} are not those that its promise brought")
        if not self._is_of_prompt(tokens):
            raise InvalidRequest(f"tokens of request {self.request_id!r} are not those of the prompt that decode has")

    def _is_of_prompt(self, tokens: bytes) -> bool:
        """Whether these are the tokens of the digest, as far as its key is known: they name pages in storage."""
        return self._key_seed is None or digest_of(tokens, self._key_seed) == self.prompt

    def _end_for_all(self, outcome: RoomOutcome, cause: str) -> None:
        if self.outcome is None:
            self._fail_others(None, cause)
            self._end(outcome, cause)

    def _fail_others(self, room_writer: RoomWriter[Room] | None, cause: str) -> None:
        """Send Failed, and later Drained, to the decode ranks that have not ended the room themselves."""
        for other in self._room_writers:
            if self.outcome is None and other is not room_writer and not other.is_received:
                other.send(wire.FailedRoom(room=other.key, cause=wire.brief(cause)))
                other.send_drained_on(other.peer.link)

    def _stop(self, cause: str, *, is_aborted: bool) -> None:
        for room_writer in self._room_writers:
            room_writer.state.stop(cause)
            room_writer.end_waits()
        if is_aborted:
            self.aborted.set()
        self._all_posted.set()
        self._advanced.set()

    async def _post_all(self) -> None:
        """Post all possible writes; wait while the limit of writes in flight holds others back."""
        self._advance()
        while any(room_writer.state.can_write() for room_writer in self._room_writers):
            self._all_posted.clear()
            await self._all_posted.wait()

    def _settle(self) -> None:
        """Finish the room if it has an outcome, nothing is in flight and no reader is left."""
        # A list, not a generator: each room writer must send its own Drained, even if another is still writing.
        settled = [room_writer.settle() for room_writer in self._room_writers]
        if all(settled) and self.outcome is not None and not self._readers and not self._settled.is_set():
            for room_writer in self._room_writers:
                room_writer.peer.rooms -= 1
            self._settled.set()
            self._on_end(self)


def _check_ours(pages: PageIds, memory: PoolMemory, of: str) -> None:
    if pages and not 0 <= min(pages) <= max(pages) < memory.page_count:
        raise InvalidRequest(f"pages {min(pages)} to {max(pages)}{of} are not all in the pool of {memory.page_count}")
