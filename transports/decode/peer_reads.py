"""Reads from the host memory of other decode workers, by rooms: this worker names its host pages, the peer writes them.

A room with a peer is one with a prefill that computes nothing: its promise has the tokens up to the last page that is
wanted, and the pages of host memory for those that are missing. The peer may have fewer: it sends these, and then ends
the room as refused. `Receiver` checks messages and proves that nothing writes any more, as for rooms with prefill; here
its events become one outcome for each read:

    last chunk and first token             Received is sent; all pages are valid
    the peer ends the room, breaks the     Abort is sent; at Drained, or at the proven death of the process, the pages
    protocol, is lost, or is late          that were in place by then are valid

The first token of such a room has no meaning. No outcome comes while the peer may still write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidekv.states import events
from tidekv.states.errors import PrefillCause
from tidekv.states.handover.prompt_digest import digest_of
from tidekv.transports import wire
from tidekv.transports.decode.receiver import Receiver
from tidekv.transports.log import engine_log

if TYPE_CHECKING:
    from tidekv.states.types import PageIds
    from tidekv.transports import base
    from tidekv.transports.decode.decode_room import RoomKey
    from tidekv.transports.decode.prefill_link import LinkTimes
    from tidekv.transports.local_rank import LocalRank

LOG = engine_log("tidekv.transports")


class PeerRead:
    """One read."""

    def __init__(self, address: str, count: int, done: asyncio.Future[tuple[int, str]]) -> None:
        self.address = address
        self.count = count
        self.done = done
        self.received = 0
        """Leading pages that are in place."""
        self.is_written = False
        self.has_token = False
        self.writer = ""
        """The process that writes, once the promise was sent to it."""
        self.cause: str | None = None
        """Why it ended early; empty if the peer has no more pages."""
        self.timer: asyncio.TimerHandle | None = None

    def give_up(self, cause: str) -> None:
        """Note why it ends early; the first cause is kept."""
        if self.cause is None:
            kind, words = PrefillCause.parse(cause) or (PrefillCause.FAILED, cause)
            self.cause = "" if kind is PrefillCause.REFUSED else kind.words(f"peer {self.address}: {words}")


class PeerReads:
    """All reads of one decode worker. Every method runs on the loop."""

    def __init__(
        self,
        transport: base.Transport,
        rank: LocalRank,
        *,
        clock: Callable[[], float],
        times: LinkTimes,
        group: Callable[[], str] = lambda: "",
    ) -> None:
        """The memory of `rank` is the host pool, registered before the first read. `group` names the ranks that read
        together. Raises InvalidConfig.
        """
        self._page_size = rank.identity.page_size
        self._has_pairs = rank.identity.bigram_keys
        self._reads: dict[RoomKey, PeerRead] = {}
        self._receiver = Receiver(
            transport, rank, deliver=self._take, deliver_aux=lambda *_: None, clock=clock, times=times, group=group
        )

    async def start(self, *, shares_at: str) -> None:
        """See `Receiver.start`."""
        await self._receiver.start(shares_at=shares_at)

    async def close(self) -> None:
        """Close all links. Reads that have no outcome get none."""
        await self._receiver.close()
        for read in self._reads.values():
            self._stop_timer(read)

    def statistics(self) -> dict[str, int | float]:
        """See `Receiver.statistics`."""
        return self._receiver.statistics()

    async def read(
        self,
        address: str,
        request_id: str,
        generation: int,
        *,
        packed: bytes,
        key_seed: bytes,
        first: int,
        pages: PageIds,
        timeout_s: float,
    ) -> tuple[int, str]:
        """Read pages [first, first + len(pages)) of a prompt from the peer at `address` to host pages.

        `packed` are the prompt's tokens, at least those of these pages and, with pairs of tokens, the one behind them;
        `generation` grows from read to read of the request. After `timeout_s` seconds the peer is asked to stop.
        Returns how many pages are in place, from the first on, and an error, which names the peer; empty if it has sent
        what it has. By then nothing writes to the pages any more, which may take longer than the timeout.
        """
        end = first + len(pages)
        tokens = packed[: 4 * end * self._page_size]
        key = (request_id, generation)
        loop = asyncio.get_running_loop()
        read = self._reads[key] = PeerRead(address, len(pages), loop.create_future())
        try:
            self._receiver.promise(
                address,
                request_id,
                generation,
                prompt_tokens=end * self._page_size,
                promised_tokens=first * self._page_size,
                pages=pages,
                prompt_digest=digest_of(tokens, key_seed).digest,
                tokens=tokens,
                token_behind=packed[len(tokens) :][:4] if self._has_pairs else b"",
                key_seed=key_seed,
            )
        except BaseException:
            del self._reads[key]
            raise
        if not read.done.done():
            read.timer = loop.call_later(timeout_s, self._late, key, read, timeout_s)
        return await read.done

    async def offer(self, address: str, offer: wire.OfferPrompt) -> wire.PromptTaken:
        """Ask the worker at `address` to take a prompt, and wait for its answer, at most for the time that the offer
        gives it. Nothing but its reads follows from the offer.
        """
        try:
            async with asyncio.timeout(offer.within_s):
                return await self._receiver.offer(address, offer)
        except TimeoutError:
            return wire.PromptTaken(number=offer.number, cause=f"{address} has not answered in {offer.within_s:.3g} s")

    def _late(self, key: RoomKey, read: PeerRead, timeout_s: float) -> None:
        read.give_up(
            PrefillCause.SILENT.words(f"it has sent {read.received} of {read.count} pages in {timeout_s:.3g} s")
        )
        self._receiver.abort(*key)

    def _take(self, event: events.AnyEvent) -> None:
        """Take what the receiver reports of a room, or of a peer."""
        match event:
            case events.WriterLost(writer=writer, cause=cause):
                # It may be alive, and write: only its death, or its Drained, ends the reads.
                for read in [read for read in self._reads.values() if read.writer == writer]:
                    read.give_up(cause)
                return
            case events.WriterDead(writer=writer):
                for key, read in [(key, read) for key, read in self._reads.items() if read.writer == writer]:
                    read.give_up(PrefillCause.PROCESS_GONE.words("its process is gone"))
                    self._receiver.abort(*key)
                    self._end(key)
                return
            case (
                events.PromiseSent()
                | events.ChunkReceived()
                | events.AuxReceived()
                | events.RoomRefused()
                | events.RoomFailed()
                | events.RoomDrained()
            ):
                key = (event.request_id, event.generation)
                if (found := self._reads.get(key)) is not None:
                    self._take_of_read(key, found, event)

    def _take_of_read(
        self,
        key: RoomKey,
        read: PeerRead,
        event: events.PromiseSent
        | events.ChunkReceived
        | events.AuxReceived
        | events.RoomRefused
        | events.RoomFailed
        | events.RoomDrained,
    ) -> None:
        match event:
            case events.PromiseSent(writer=writer):
                read.writer = writer
            case events.ChunkReceived(count=count, last=last):
                read.received += count
                read.is_written |= last
            case events.AuxReceived():
                read.has_token = True
            case events.RoomRefused(cause=cause):
                read.give_up(PrefillCause.FAILED.words(cause))
                self._receiver.abort(*key)
            case events.RoomFailed(cause=cause, settled=settled):
                read.give_up(cause)
                if settled:
                    self._end(key)
                else:
                    self._receiver.abort(*key)
            case events.RoomDrained():
                self._end(key)
        if read.is_written and read.has_token and key in self._reads and read.cause is None:
            self._receiver.received(*key)
            self._end(key)

    def _end(self, key: RoomKey) -> None:
        """Resolve a read: nothing writes to its pages any more."""
        read = self._reads.pop(key, None)
        if read is None:
            return
        self._stop_timer(read)
        if read.cause:
            LOG.warning(
                "a peer did not send all pages",
                request_id=key[0],
                peer=read.address,
                pages=read.received,
                cause=read.cause,
            )
        if not read.done.done():
            read.done.set_result((read.received, read.cause or ""))

    def _stop_timer(self, read: PeerRead) -> None:
        if read.timer is not None:
            read.timer.cancel()
            read.timer = None
