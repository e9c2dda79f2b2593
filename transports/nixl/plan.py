"""A write as descriptors: page pairs, checked, in an order that merges well, cut into parts.

    pages of the caller ── paired_pages: checked, ascending by our ids ──▶ WritePlan ── part by part ──▶ NIXL

Data that does not change between writes is made once per peer (`Numbering`): planning runs on the event loop, and
copying the pages of a small write takes only a few hundred microseconds. Posting blocks the posting thread for as long
as the copy takes, which is why a plan has parts.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidekv.states.errors import InvalidRequest, RemoteProtocolError
from tidekv.states.types import PageIds, Segment

Indices = npt.NDArray[np.int32]
SCATTERED_WEIGHT = 2  # Weight of a descriptor that NIXL cannot merge; adjacent descriptors, which it merges, weigh 1.
JOINT_SHARE = 2  # A joined request has at most 1/JOINT_SHARE of a part's bytes: its writes all wait for its end.
PAGE_ID_BYTES = 4
HIGH = 1 if np.little_endian else 0  # Index of the upper 32 bits in a 64-bit number viewed as two int32.


class Part(NamedTuple):
    """One request's worth of a write: descriptors of our list and of the peer's, pairwise, and their total bytes."""

    ours: Indices
    theirs: Indices
    size_bytes: int


class Numbering:
    """Numbering of the descriptors of two prepared lists: `segment * page_count + page`, on either side."""

    def __init__(self, pieces: tuple[Segment, ...], *, our_page_count: int, their_page_count: int) -> None:
        """`pieces` are the segments of one side; those of the other have the same sizes."""
        sizes = [piece.piece_bytes for piece in pieces]
        self.our_page_count = our_page_count
        self.their_page_count = their_page_count
        self.segment_count = len(sizes)
        self.largest_bytes = max(sizes)
        # One extra segment of zero bytes: the end of a plan's last part falls into it.
        self.piece_bytes = (*sizes, 0)
        self.bytes_before = (0, *accumulate(sizes))
        segments = np.arange(len(sizes), dtype=np.int64)
        self.our_offsets: Indices = (segments * our_page_count).astype(np.int32)
        self.their_offsets: Indices = (segments * their_page_count).astype(np.int32)
        self._pages = np.arange(max(our_page_count, their_page_count), dtype=np.int32).tobytes()
        self._run: Indices = np.frombuffer(self._pages, dtype=np.int32)

    def run(self, pages: PageIds, page_count: int) -> Indices | None:
        """Return the same pages as a view of immutable memory, if they are consecutive, ascending and in a pool of
        `page_count`.

        None otherwise. `pages` has at least one id. Compared as bytes with the list of all page ids, which takes a
        tenth of the time of NumPy operations on them.
        """
        count, first = len(pages), pages[0]
        end = first + count
        if pages[-1] != end - 1 or first < 0 or end > page_count:
            return None
        if pages.tobytes() != self._pages[first * PAGE_ID_BYTES : end * PAGE_ID_BYTES]:
            return None
        return self._run[first:end]

    def is_run(self, pages: Indices) -> bool:
        """True for a result of `run`."""
        return pages.base is self._run


class WritePlan:
    """The descriptors of one write, made part by part on the thread that posts them.

    Measured: with scattered 4 KiB pages one request of 4,096 descriptors copies 6 % to 22 % slower than two of 2,048.
    So scattered descriptors weigh twice as much as adjacent ones, for which longer requests are hardly slower.
    """

    def __init__(
        self, numbering: Numbering, our_pages: Indices, their_pages: Indices, *, part_bytes: int, part_descriptors: int
    ) -> None:
        """The pages are those of `paired_pages`, at least one; they must not change. `part_descriptors` is the maximum
        weight of a part, `part_bytes` its maximum size.
        """
        self._numbering = numbering
        are_neighbours = numbering.is_run(our_pages) and numbering.is_run(their_pages)
        self.weight = 1 if are_neighbours else SCATTERED_WEIGHT
        """Weight of each descriptor."""
        self._joint_bytes = part_bytes // JOINT_SHARE
        self._part_descriptors = part_descriptors
        self._our_pages = our_pages
        self._their_pages = their_pages
        self._step = max(1, min(part_descriptors // self.weight, part_bytes // numbering.largest_bytes))
        self._total = numbering.segment_count * len(our_pages)
        self.part_count = -(-self._total // self._step)

    def part(self, index: int) -> Part:
        """Return part `index` of `part_count`."""
        if self._total == len(self._our_pages) and self.part_count == 1:
            return Part(self._our_pages, self._their_pages, self._total * self._numbering.largest_bytes)
        first = index * self._step
        end = min(first + self._step, self._total)
        numbering = self._numbering
        if numbering.segment_count == 1:
            ours, theirs = self._our_pages[first:end], self._their_pages[first:end]
        else:
            ours = _descriptors(numbering.our_offsets, self._our_pages, first, end)
            theirs = _descriptors(numbering.their_offsets, self._their_pages, first, end)
        return Part(ours, theirs, self._bytes_before(end) - self._bytes_before(first))

    def may_join(self, size_bytes: int, weight: int) -> bool:
        """True if a request of that size and weight is within the limit for parts of several writes."""
        return size_bytes <= self._joint_bytes and weight <= self._part_descriptors

    def _bytes_before(self, position: int) -> int:
        segment, page = divmod(position, len(self._our_pages))
        numbering = self._numbering
        return numbering.bytes_before[segment] * len(self._our_pages) + numbering.piece_bytes[segment] * page


def joined(parts: list[Part]) -> Part:
    """Return parts of several writes as one part, in their order; at least one."""
    if len(parts) == 1:
        return parts[0]
    # Not by NumPy: its longer copies release the GIL, and the posting thread would have to wait to get it back.
    ours, theirs, sizes = zip(*parts, strict=True)
    return Part(
        np.frombuffer(b"".join(ours), dtype=np.int32), np.frombuffer(b"".join(theirs), dtype=np.int32), sum(sizes)
    )


def paired_pages(
    our_pages: PageIds, their_pages: PageIds, *, numbering: Numbering, peer: str
) -> tuple[Indices, Indices]:
    """Return both lists, pairwise, ascending by our ids, in memory that does not change; all ids are checked.

    Raises InvalidRequest for errors of the caller: lists of different lengths, a page outside our pool, a destination
    named twice. Raises RemoteProtocolError for a page outside the peer's pool.
    """
    count = len(our_pages)
    if count != len(their_pages):
        raise InvalidRequest(f"{count} pages cannot be written over {len(their_pages)} pages of {peer}")
    if count:
        ours = numbering.run(our_pages, numbering.our_page_count)
        if ours is not None:
            theirs = numbering.run(their_pages, numbering.their_page_count)
            if theirs is not None:
                return ours, theirs
    sources = np.frombuffer(our_pages, dtype=np.int32)
    targets = np.frombuffer(their_pages, dtype=np.int32)
    if not count:
        return sources, targets
    if not _are_distinct(targets, numbering.their_page_count):
        raise _error_of(sources, targets, numbering, peer)
    if _ascends(sources):
        ours, theirs = sources.copy(), targets.copy()
    else:
        # Each pair is sorted as one 64-bit number: a fourth of the time of argsort. Targets are not negative (checked),
        # so the low half does not disturb the order of the high half.
        pairs = np.empty(count, dtype=np.int64)
        halves = pairs.view(np.int32)
        halves[HIGH::2] = sources
        halves[1 - HIGH :: 2] = targets
        pairs.sort()
        ours, theirs = halves[HIGH::2].copy(), halves[1 - HIGH :: 2].copy()
    if ours[0] < 0 or ours[-1] >= numbering.our_page_count:
        raise _error_of(sources, targets, numbering, peer)
    return ours, theirs


def _descriptors(offsets: Indices, pages: Indices, first: int, end: int) -> Indices:
    """Return descriptors `first` up to `end`, counted over all pages of the first segment, then of the second, and so
    on.
    """
    count = len(pages)
    top, bottom = first // count, (end - 1) // count + 1
    first, end = first - top * count, end - top * count
    if bottom - top == 1:
        numbers: Indices = pages[first:end] + offsets[top]
    else:
        numbers = (offsets[top:bottom, None] + pages).ravel()[first:end]
    return numbers


def _ascends(pages: Indices) -> bool:
    """True if each page is greater than the one before it."""
    return int(np.count_nonzero(pages[1:] > pages[:-1])) == len(pages) - 1


def _are_distinct(pages: Indices, page_count: int) -> bool:
    """True if all pages are in a pool of `page_count`, and none occurs twice."""
    if not _ascends(pages):
        pages = pages.copy()
        pages.sort()
        if np.count_nonzero(pages[1:] == pages[:-1]):
            return False
    return bool(pages[0] >= 0 and pages[-1] < page_count)


def _error_of(
    sources: Indices, targets: Indices, numbering: Numbering, peer: str
) -> InvalidRequest | RemoteProtocolError:
    """Return the error for page lists that failed a check of `paired_pages`."""
    count = numbering.our_page_count
    stray = sources[(sources < 0) | (sources >= count)]
    if stray.size:
        return InvalidRequest(f"page {stray[0]} is not of our pool, which has {count} pages; nothing was written")
    count = numbering.their_page_count
    stray = targets[(targets < 0) | (targets >= count)]
    if stray.size:
        return RemoteProtocolError(f"page {stray[0]} is not of {peer}'s pool, which has {count} pages")
    ordered = np.sort(targets)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return InvalidRequest(f"page {twice[0]} of {peer} is named twice as a destination")
