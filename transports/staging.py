"""Staging: registered memory through which slices of pages travel as dense pages.

A slice of the heads is contiguous only within a token, and a transfer of such short stretches costs far more per byte
than one of whole pieces. The end with fewer ranks gathers slices from its pages into slots of its ring, or
scatters them from there, and only dense slots cross the wire.

    prefill has fewer ranks     page ── gather ──▶ slot ── write ──▶ page of the decode rank
    decode has fewer ranks      page of the prefill rank ── write ──▶ slot ── scatter ──▶ page

A slot has one owner: the write that took it, until nothing of that write is in flight. Nothing frees it by time alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from tidekv.states.types import PageIds, PoolMemory, Segment, page_ids
from tidekv.transports.base import Exchange
from tidekv.transports.slices import Cut, exchange_of, pieces_of

BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of a write through the ring: several are under way at once, so that one is copied while another is sent."""
BATCHES_MIN = 4
"""Batches for which the ring has room, whatever its size."""

BeginCopy: TypeAlias = "Callable[[PageIds, PageIds], asyncio.Future[None]]"


class Copying(Protocol):
    """Copies of slices in host memory, away from the event loop if there are many bytes."""

    def copying(self, source: PoolMemory, target: PoolMemory) -> BeginCopy:
        """Return a function that begins to copy pages of one place over pages of the other, pairwise.

        Cancelling its future does not stop the copy.
        """
        ...


class Slots(NamedTuple):
    """Bytes of the ring that one write owns: `length` slots of `slot_bytes`, numbered from `first`."""

    first: int
    length: int
    slot_bytes: int

    @property
    def pages(self) -> PageIds:
        """The numbers of the slots, as pages of `slots_of`."""
        return page_ids(range(self.first, self.first + self.length))


class Staging(NamedTuple):
    """The staging ring of a rank, and what copies into it and out of it."""

    ring: StagingRing
    copier: Copying


class StagingRing:
    """Hands out ranges of one registered region, first come, first served. Used on one event loop."""

    def __init__(self, memory: PoolMemory) -> None:
        """`memory` is one segment of one page, registered with the transport; its owner keeps it alive."""
        (self._segment,) = memory.segments
        self.memory = memory
        self.size_bytes = self._segment.piece_bytes
        self._used: list[Slots] = []
        """In the order of their addresses."""
        self._waiting: deque[tuple[int, int, asyncio.Future[Slots]]] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes that writes own now."""
        return sum(slots.length * slots.slot_bytes for slots in self._used)

    async def take(self, slot_bytes: int, count: int, *, timeout_s: float) -> Slots | None:
        """Return slots, which the caller gives back; None if none became free in time."""
        if not self._waiting and (slots := self._fit(slot_bytes, count)) is not None:
            return slots
        future: asyncio.Future[Slots] = asyncio.get_running_loop().create_future()
        entry = (slot_bytes, count, future)
        self._waiting.append(entry)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        except asyncio.CancelledError:
            if future.done():
                self.give_back(future.result())
            else:
                self._withdraw(entry)
            raise
        if future.done():
            return future.result()
        self._withdraw(entry)
        return None

    def give_back(self, slots: Slots) -> None:
        """Free slots that nothing reads or writes any more."""
        self._used.remove(slots)
        self._serve()

    def _withdraw(self, entry: tuple[int, int, asyncio.Future[Slots]]) -> None:
        self._waiting.remove(entry)
        # Those behind it may fit where it did not.
        self._serve()

    def _serve(self) -> None:
        """Grant the first waiting writes what they wait for, as far as it fits; a later one never overtakes."""
        while self._waiting:
            slot_bytes, count, future = self._waiting[0]
            slots = self._fit(slot_bytes, count)
            if slots is None:
                return
            self._waiting.popleft()
            future.set_result(slots)

    def _fit(self, slot_bytes: int, count: int) -> Slots | None:
        """Take the first gap that is large enough. Slots begin at a multiple of their size."""
        end = 0
        for at, used in enumerate([*self._used, Slots(self.size_bytes, 0, 1)]):
            first = -(-end // slot_bytes)
            if (first + count) * slot_bytes <= used.first * used.slot_bytes:
                slots = Slots(first, count, slot_bytes)
                self._used.insert(at, slots)
                return slots
            end = (used.first + used.length) * used.slot_bytes
        return None


def batch_pages(ring: PoolMemory, slot_bytes: int) -> int:
    """Pages of one batch through a ring; 0: the ring is too small for slots of this size."""
    return min(max(BATCH_BYTES // slot_bytes, 1), ring.page_bytes // (BATCHES_MIN * slot_bytes))


class StagedExchange(NamedTuple):
    """A write by way of slots at one end: `send` crosses the wire, `copy` stays within that end."""

    copy: Exchange
    """"Ours" are slices of the pages, "theirs" the slots."""
    send: Exchange
    """"Ours" are the pages or slots of prefill, "theirs" those of decode."""
    batch_pages: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.copy.theirs.page_bytes


def gathered(ring: PoolMemory, cuts: list[Cut], *, ours: PoolMemory, theirs: PoolMemory) -> StagedExchange | None:
    """Return how these cuts travel through prefill's ring; None if they would gain nothing, or do not fit.

    "Ours" is prefill. They gain if its pages have the slices in several stretches each, and decode's have them in one.
    """
    pieces = [cut.rows * cut.row_bytes for cut in cuts]
    pages = batch_pages(ring, sum(pieces)) if cuts else 0
    if not pages or _are_dense_here(cuts) or not _are_dense_there(cuts):
        return None
    slots = _slots_of(ring, pieces)
    dense = [
        Cut(at, cut.theirs, 1, size, 0, size, cut.their_start, size)
        for at, (cut, size) in enumerate(zip(cuts, pieces, strict=True))
    ]
    rows = [
        Cut(cut.ours, at, cut.rows, cut.row_bytes, cut.our_start, cut.our_step, 0, cut.row_bytes)
        for at, cut in enumerate(cuts)
    ]
    copy, send = exchange_of(rows, ours=ours, theirs=slots), exchange_of(dense, ours=slots, theirs=theirs)
    return StagedExchange(copy, send, pages)


def scattered(ring: PoolMemory, cuts: list[Cut], *, ours: PoolMemory, theirs: PoolMemory) -> StagedExchange | None:
    """Return how these cuts travel through decode's ring; None if they would gain nothing, or do not fit.

    "Ours" is prefill. They gain if decode's pages have the slices in several stretches each, and prefill's in one.
    """
    pieces = [cut.rows * cut.row_bytes for cut in cuts]
    pages = batch_pages(ring, sum(pieces)) if cuts else 0
    if not pages or _are_dense_there(cuts) or not _are_dense_here(cuts):
        return None
    slots = _slots_of(ring, pieces)
    dense = [
        Cut(cut.ours, at, 1, size, cut.our_start, size, 0, size)
        for at, (cut, size) in enumerate(zip(cuts, pieces, strict=True))
    ]
    rows = [
        Cut(cut.theirs, at, cut.rows, cut.row_bytes, cut.their_start, cut.their_step, 0, cut.row_bytes)
        for at, cut in enumerate(cuts)
    ]
    copy, send = exchange_of(rows, ours=theirs, theirs=slots), exchange_of(dense, ours=ours, theirs=slots)
    return StagedExchange(copy, send, pages)


def _slots_of(ring: PoolMemory, pieces: list[int]) -> PoolMemory:
    """Return a ring as pages with these pieces, one after another: page n is slot n."""
    slot_bytes = sum(pieces)
    count = ring.page_bytes // slot_bytes
    slot = Segment(ring.segments[0].address, slot_bytes, slot_bytes, count)
    return pieces_of(msgspec.structs.replace(ring, segments=(slot,), page_count=count), tuple(pieces))


def _are_dense_here(cuts: list[Cut]) -> bool:
    """Whether prefill's pages have each slice in one stretch."""
    return all(cut.rows == 1 or cut.our_step == cut.row_bytes for cut in cuts)


def _are_dense_there(cuts: list[Cut]) -> bool:
    """Whether decode's pages have each slice in one stretch."""
    return all(cut.rows == 1 or cut.their_step == cut.row_bytes for cut in cuts)
