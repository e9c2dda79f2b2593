"""Pages that prefill ranks write by way of our staging ring: slots on request, and their copy to the pages of the room.

    StagingRequest ─▶ wait for slots ─▶ StagingGranted ─▶ prefill writes ─▶ Staged ─▶ copy ─▶ next message of the room

Slots belong to the rank link that requested them until they are copied, returned, or its prefill rank can write no
more: it said Drained, the room was received, or the process is dead. A copy writes to the room's pages, so the
end of the room's last writer is not reported before its copies have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tidekv.states.errors import RemoteProtocolError
from tidekv.transports import components, wire
from tidekv.transports.staging import BeginCopy, Slots, Staging, scattered

if TYPE_CHECKING:
    from tidekv.transports.decode.decode_room import RankLink
    from tidekv.transports.decode.prefill_link import PrefillLink

SLOTS_WAIT_S = 30.0
"""Maximum seconds that a request for slots waits; prefill gives up sooner by its own limit."""
TICKETS_MAX = 256
"""Maximum requests for slots of one rank link that are not over."""


class _Way(NamedTuple):
    """One pool of a link whose slices go through the ring."""

    scatter: BeginCopy
    slot_bytes: int
    batch_pages: int


class StagedPages:
    """Slots of the ring of one decode worker, and the copies out of it."""

    def __init__(self, staging: Staging, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """`spawn` starts a task of the owner."""
        self._staging = staging
        self._spawn = spawn
        self._ways: dict[PrefillLink[RankLink], dict[str, _Way]] = {}
        self._tickets: dict[RankLink, dict[int, Slots | None]] = {}
        """Slots by ticket; None: the request waits for slots."""
        self._copies: dict[RankLink, set[asyncio.Future[None]]] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of the ring that have an owner."""
        return self._staging.ring.used_bytes

    def open_link(self, link: PrefillLink[RankLink], *, ours: wire.Hello, theirs: wire.Hello) -> None:
        """Find out what the prefill rank at this link will write through the ring."""
        ways = {}
        for name, cuts in components.cuts_with(decode=ours, prefill=theirs).items():
            source, target = (hello.components.get(name, hello.memory) for hello in (theirs, ours))
            way = scattered(self._staging.ring.memory, cuts, ours=source, theirs=target)
            if way is not None:
                pages, slots = way.copy
                ways[name] = _Way(self._staging.copier.copying(slots, pages), way.slot_bytes, way.batch_pages)
        if ways:
            self._ways[link] = ways

    def close_link(self, link: PrefillLink[RankLink]) -> None:
        """Forget a link. Slots of its rank links stay theirs."""
        self._ways.pop(link, None)

    def serves(self, link: PrefillLink[RankLink]) -> bool:
        """Whether the prefill rank at this link writes through the ring."""
        return link in self._ways

    def request(self, rank_link: RankLink, message: wire.StagingRequest) -> None:
        """Take slots for a write, and grant them. Raises RemoteProtocolError."""
        way = self._ways.get(rank_link.link, {}).get(message.component)
        tickets = self._tickets.setdefault(rank_link, {})
        if way is None or message.count > way.batch_pages or message.ticket in tickets or len(tickets) >= TICKETS_MAX:
            raise RemoteProtocolError(
                f"ticket {message.ticket} requests {message.count} slots for component {message.component!r}, of"
                f" {0 if way is None else way.batch_pages} in one batch, with {len(tickets)} tickets open"
            )
        tickets[message.ticket] = None
        self._spawn(self._grant(rank_link, message, way))

    def take_back(self, rank_link: RankLink, ticket: int) -> None:
        """Free the slots of a ticket that prefill returns. Those of another ticket may be free already."""
        slots = self._tickets.get(rank_link, {}).pop(ticket, None)
        if slots is not None:
            self._staging.ring.give_back(slots)

    def copy(self, rank_link: RankLink, message: wire.Staged) -> asyncio.Future[None] | None:
        """Begin to copy slots to the pages that they are for; None if the room has ended, whose slots become free.

        Raises RemoteProtocolError for slots that were not granted, or pages that were not requested.
        """
        slots = self._tickets.get(rank_link, {}).pop(message.ticket, None)
        if slots is None:
            raise RemoteProtocolError(f"ticket {message.ticket} has no slots, and is said to be written")
        way = self._ways.get(rank_link.link, {}).get(message.component)
        pages = rank_link.destinations.written(message.component, message.span, message.first, slots.length)
        if rank_link.has_ended or way is None or pages is None or slots.slot_bytes != way.slot_bytes:
            self._staging.ring.give_back(slots)
            if rank_link.has_ended:
                return None
            raise RemoteProtocolError(
                f"ticket {message.ticket} has {slots.length} pages from {message.first} on of component"
                f" {message.component!r}, which were not requested"
            )
        future = way.scatter(slots.pages, pages)
        copies = self._copies.setdefault(rank_link, set())
        copies.add(future)

        def end(_: asyncio.Future[None]) -> None:
            self._staging.ring.give_back(slots)
            copies.discard(future)

        future.add_done_callback(end)
        return future

    def free(self, rank_link: RankLink) -> None:
        """Free the slots of a rank link whose prefill rank can write no more."""
        for slots in self._tickets.pop(rank_link, {}).values():
            if slots is not None:
                self._staging.ring.give_back(slots)
        self._copies.pop(rank_link, None)

    async def settle(self, rank_links: Iterable[RankLink]) -> None:
        """Wait for the copies of rank links whose prefill rank is dead, and free their slots."""
        for rank_link in rank_links:
            if copies := self._copies.get(rank_link):
                await asyncio.wait(copies)
            self.free(rank_link)

    async def _grant(self, rank_link: RankLink, message: wire.StagingRequest, way: _Way) -> None:
        ring = self._staging.ring
        slots = await ring.take(way.slot_bytes, message.count, timeout_s=SLOTS_WAIT_S)
        # The room may have ended, and prefill may have returned the ticket, while it waited.
        tickets = self._tickets.get(rank_link, {})
        is_wanted = message.ticket in tickets and not rank_link.has_ended and rank_link.link.is_open
        if slots is not None and is_wanted:
            tickets[message.ticket] = slots
            granted = wire.StagingGranted(room=rank_link.room.key, ticket=message.ticket, first=slots.first)
            rank_link.link.send(granted)
            return
        tickets.pop(message.ticket, None)
        if slots is not None:
            ring.give_back(slots)
