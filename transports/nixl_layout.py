"""Where NIXL finds the pieces of pages: pure arithmetic over two pools and two lists of page ids.

A prepared list of NIXL covers a whole pool; descriptor `segment * page_count + page` is one piece of one page. A write
names its descriptors by such indices on both sides. NIXL merges neighbours of the list that are consecutive in memory
on both sides, so this file decides the order in which they stand:

    segments   a page's pieces that touch each other in both pools are one piece (a page-first pool has one segment)
    pages      in the order of their ids on our side, each with its partner

and cuts the list into parts, since posting blocks the posting thread for as long as the copy takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidekv.states.errors import InvalidRequest, PeerMismatch, RemoteProtocolError
from tidekv.states.shapes import PageIds, PoolMemory, Segment
from tidekv.transports.base import check_memory

Indices = npt.NDArray[np.int32]
DESCRIPTORS_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Part:
    """One request's worth of a write: descriptors of our list, of the peer's, and what they weigh."""

    ours: Indices
    theirs: Indices
    size_bytes: int


class WritePlan:
    """The descriptors of one write, in an order that merges well, made part by part by whoever posts them."""

    def __init__(
        self,
        *,
        pieces: tuple[Segment, ...],
        our_page_count: int,
        their_page_count: int,
        our_pages: Indices,
        their_pages: Indices,
        part_bytes: int,
        part_descriptors: int,
    ) -> None:
        if _ascends(our_pages):
            # Copied, since the caller may change his while parts are made.
            self._our_pages, self._their_pages = our_pages.copy(), their_pages.copy()
        else:
            # Sorted as one number each, which takes a fourth of the time of sorting their places. No id is negative.
            pairs = np.sort(our_pages.astype(np.int64) << 32 | their_pages)
            self._our_pages, self._their_pages = (pairs >> 32).astype(np.int32), pairs.astype(np.int32)
        self._piece_bytes = np.array([piece.piece_bytes for piece in pieces], dtype=np.int64)
        self._page_counts = (our_page_count, their_page_count)
        largest = int(self._piece_bytes.max())
        self._step = max(1, min(part_descriptors, part_bytes // largest))
        self._total = len(pieces) * len(our_pages)
        self.part_count = -(-self._total // self._step)

    def part(self, index: int) -> Part:
        """Make part `index` of `part_count`."""
        first = index * self._step
        end = min(first + self._step, self._total)
        if len(self._piece_bytes) == 1:
            size_bytes = (end - first) * int(self._piece_bytes[0])
            return Part(ours=self._our_pages[first:end], theirs=self._their_pages[first:end], size_bytes=size_bytes)
        numbers = np.arange(first, end, dtype=np.int64)
        segments, positions = np.divmod(numbers, len(self._our_pages))
        ours, theirs = self._page_counts
        return Part(
            ours=(segments * ours + self._our_pages[positions]).astype(np.int32),
            theirs=(segments * theirs + self._their_pages[positions]).astype(np.int32),
            size_bytes=int(self._piece_bytes[segments].sum()),
        )


def pair_segments(ours: PoolMemory, theirs: PoolMemory) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The pieces of both pools, pairwise of one size, with those joined that touch in both.

    Raises PeerMismatch where the pages of the pools are not made of the same pieces, RemoteProtocolError where the
    peer's pool has more pieces than an index can name.
    """
    sizes = [tuple(segment.piece_bytes for segment in memory.segments) for memory in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise PeerMismatch(field="piece_bytes", ours=sizes[0], theirs=sizes[1])
    joined: list[tuple[Segment, Segment]] = []
    for pair in zip(ours.segments, theirs.segments, strict=True):
        if joined and all(map(_touch, joined[-1], pair)):
            joined[-1] = (_join(joined[-1][0], pair[0]), _join(joined[-1][1], pair[1]))
        else:
            joined.append(pair)
    if len(joined) * theirs.page_count > DESCRIPTORS_MAX:
        raise RemoteProtocolError(f"peer announces {len(joined)} x {theirs.page_count} pieces: too many to name")
    return tuple(pair[0] for pair in joined), tuple(pair[1] for pair in joined)


def strided_rows(pieces: tuple[Segment, ...], device: int) -> npt.NDArray[np.uint64]:
    """A prepared list's input: one row [address, length, device, stride, count] a segment."""
    rows = [(p.address, p.piece_bytes, device, p.stride_bytes, p.page_count) for p in pieces]
    return np.array(rows, dtype=np.uint64)


def extents(memory: PoolMemory) -> list[tuple[int, int]]:
    """The ranges (address, length) to register: each segment's, with overlapping ones made one.

    Segments that merely touch stay apart: they may be two allocations, which a device registers one by one.
    """
    ranges = sorted(
        (s.address, s.address + s.stride_bytes * (s.page_count - 1) + s.piece_bytes) for s in memory.segments
    )
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return [(start, end - start) for start, end in merged]


def check_ours(memory: PoolMemory) -> None:
    """Judge our own pool as a peer would. Raises InvalidRequest."""
    try:
        check_memory(memory)
    except RemoteProtocolError as error:
        raise InvalidRequest(f"this pool cannot be registered, since a peer would refuse it: {error}") from error


def checked_pages(
    our_pages: PageIds, their_pages: PageIds, *, ours: PoolMemory, theirs: PoolMemory, peer: str
) -> tuple[Indices, Indices]:
    """Both lists as arrays that share the callers' memory, once they are known to name pages that exist.

    Raises InvalidRequest for what the caller got wrong: lists of two lengths, no page of our pool, one destination
    twice. Raises RemoteProtocolError for a page that the peer's pool does not have.
    """
    if len(our_pages) != len(their_pages):
        raise InvalidRequest(f"{len(our_pages)} pages cannot be written over {len(their_pages)} pages of {peer}")
    sources = np.frombuffer(our_pages, dtype=np.int32)
    targets = np.frombuffer(their_pages, dtype=np.int32)
    stray = _first_outside(sources, ours.page_count)
    if stray is not None:
        raise InvalidRequest(f"page {stray} is not of our pool, which has {ours.page_count} pages; nothing was written")
    stray = _first_outside(targets, theirs.page_count)
    if stray is not None:
        raise RemoteProtocolError(f"page {stray} is not of {peer}'s pool, which has {theirs.page_count} pages")
    if not _ascends(targets):
        ordered = np.sort(targets)
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        if twice.size:
            raise InvalidRequest(f"page {ordered[twice[0]]} of {peer} is named twice as a destination")
    return sources, targets


def _first_outside(pages: Indices, page_count: int) -> int | None:
    # In one pass where all is well: seen without their sign, negative ids are larger than any pool.
    if not pages.size or int(pages.view(np.uint32).max()) < page_count:
        return None
    return int(pages[np.flatnonzero((pages < 0) | (pages >= page_count))[0]])


def _ascends(pages: Indices) -> bool:
    """True if each page is greater than the one before it."""
    return bool((pages[1:] > pages[:-1]).all())


def _touch(left: Segment, right: Segment) -> bool:
    return left.address + left.piece_bytes == right.address and left.stride_bytes == right.stride_bytes


def _join(left: Segment, right: Segment) -> Segment:
    return Segment(
        address=left.address,
        piece_bytes=left.piece_bytes + right.piece_bytes,
        stride_bytes=left.stride_bytes,
        page_count=left.page_count,
    )
