"""A write as descriptors: which pages go where, checked, in an order that merges well, cut into parts.

    pages that a caller names ── paired_pages: sound, in the order of our ids ──▶ WritePlan ── part by part ──▶ NIXL

What does not change from one write to the next is made once for a peer (`Numbering`): planning a write takes the event
loop, and the pages of a small one are copied within a few hundred microseconds. Posting blocks the posting thread for
as long as the copy takes, which is why a plan has parts.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidekv.states.errors import InvalidRequest, RemoteProtocolError
from tidekv.states.types import PageIds, Segment

Indices = npt.NDArray[np.int32]
SCATTERED_WEIGHT = 2  # Of a descriptor that NIXL copies alone, when neighbours, which it merges, weigh 1.
JOINT_SHARE = 2  # Of a part: what several writes are joined to, who all wait for the last of them.
PAGE_ID_BYTES = 4
HIGH = 1 if np.little_endian else 0  # Where the upper half of a number of 64 bits stands, of its two.


class Part(NamedTuple):
    """One request's worth of a write: descriptors of our list, of the peer's, and what they weigh."""

    ours: Indices
    theirs: Indices
    size_bytes: int


class Numbering:
    """How the descriptors of two prepared lists are numbered: `segment * page_count + page`, on either side."""

    def __init__(self, pieces: tuple[Segment, ...], *, our_page_count: int, their_page_count: int) -> None:
        """`pieces` are the segments of one side: those of the other have the same sizes."""
        sizes = [piece.piece_bytes for piece in pieces]
        self.our_page_count = our_page_count
        self.their_page_count = their_page_count
        self.segment_count = len(sizes)
        self.largest_bytes = max(sizes)
        # A segment more, of nothing, in which a plan's last part ends.
        self.piece_bytes = (*sizes, 0)
        self.bytes_before = (0, *accumulate(sizes))
        segments = np.arange(len(sizes), dtype=np.int64)
        self.our_offsets: Indices = (segments * our_page_count).astype(np.int32)
        self.their_offsets: Indices = (segments * their_page_count).astype(np.int32)
        self._pages = np.arange(max(our_page_count, their_page_count), dtype=np.int32).tobytes()
        self._run: Indices = np.frombuffer(self._pages, dtype=np.int32)

    def run(self, pages: PageIds, page_count: int) -> Indices | None:
        """The same pages in memory that does not change, if they are neighbours in ascending order of a pool of that
        many; at least one.

        Told by comparing bytes with all pages of a pool, which costs a tenth of what NumPy takes to look at them.
        """
        count, first = len(pages), pages[0]
        end = first + count
        if pages[-1] != end - 1 or first < 0 or end > page_count:
            return None
        if pages.tobytes() != self._pages[first * PAGE_ID_BYTES : end * PAGE_ID_BYTES]:
            return None
        return self._run[first:end]

    def is_run(self, pages: Indices) -> bool:
        """True of what `run` has returned."""
        return pages.base is self._run


class WritePlan:
    """The descriptors of one write, made part by part by whoever posts them.

    A request of some 4,096 scattered descriptors copies slower than two of 2,048, by 6 % to 22 % where pages have
    4 KiB; so these weigh twice as much as neighbours, for which a request can hardly be too long.
    """

    def __init__(
        self, numbering: Numbering, our_pages: Indices, their_pages: Indices, *, part_bytes: int, part_descriptors: int
    ) -> None:
        """The pages are those of `paired_pages`, at least one; they must stay as they are. `part_descriptors` is the
        weight that a part may have.
        """
        self._numbering = numbering
        are_neighbours = numbering.is_run(our_pages) and numbering.is_run(their_pages)
        self.weight = 1 if are_neighbours else SCATTERED_WEIGHT
        """Of each descriptor."""
        self._joint_bytes = part_bytes // JOINT_SHARE
        self._part_descriptors = part_descriptors
        self._our_pages = our_pages
        self._their_pages = their_pages
        self._step = max(1, min(part_descriptors // self.weight, part_bytes // numbering.largest_bytes))
        self._total = numbering.segment_count * len(our_pages)
        self.part_count = -(-self._total // self._step)

    def part(self, index: int) -> Part:
        """Make part `index` of `part_count`."""
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
        """True if a request of that size and weight is no more than parts of several writes may be together."""
        return size_bytes <= self._joint_bytes and weight <= self._part_descriptors

    def _bytes_before(self, position: int) -> int:
        segment, page = divmod(position, len(self._our_pages))
        numbering = self._numbering
        return numbering.bytes_before[segment] * len(self._our_pages) + numbering.piece_bytes[segment] * page


def joined(parts: list[Part]) -> Part:
    """Parts of several writes as one, in their order; at least one."""
    if len(parts) == 1:
        return parts[0]
    # Not by NumPy, whose longer copies may let go of the interpreter: the thread that posts would have to wait for it.
    ours, theirs, sizes = zip(*parts, strict=True)
    return Part(
        np.frombuffer(b"".join(ours), dtype=np.int32), np.frombuffer(b"".join(theirs), dtype=np.int32), sum(sizes)
    )


def paired_pages(
    our_pages: PageIds, their_pages: PageIds, *, numbering: Numbering, peer: str
) -> tuple[Indices, Indices]:
    """Both lists, pairwise in the order of our ids, in memory that nobody changes, once they are known to name pages
    that exist.

    Raises InvalidRequest for what the caller got wrong: lists of two lengths, no page of our pool, one destination
    twice. Raises RemoteProtocolError for a page that the peer's pool does not have.
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
        raise _objection(sources, targets, numbering, peer)
    if _ascends(sources):
        ours, theirs = sources.copy(), targets.copy()
    else:
        # Sorted as one number each, which takes a fourth of the time of sorting their places; theirs is not negative.
        pairs = np.empty(count, dtype=np.int64)
        halves = pairs.view(np.int32)
        halves[HIGH::2] = sources
        halves[1 - HIGH :: 2] = targets
        pairs.sort()
        ours, theirs = halves[HIGH::2].copy(), halves[1 - HIGH :: 2].copy()
    if ours[0] < 0 or ours[-1] >= numbering.our_page_count:
        raise _objection(sources, targets, numbering, peer)
    return ours, theirs


def _descriptors(offsets: Indices, pages: Indices, first: int, end: int) -> Indices:
    """Numbers `first` up to `end` of all pages of the first segment, then all of the second, and so on."""
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
    """True if all pages are of a pool of that many, and none is named twice."""
    if not _ascends(pages):
        pages = pages.copy()
        pages.sort()
        if np.count_nonzero(pages[1:] == pages[:-1]):
            return False
    return bool(pages[0] >= 0 and pages[-1] < page_count)


def _objection(
    sources: Indices, targets: Indices, numbering: Numbering, peer: str
) -> InvalidRequest | RemoteProtocolError:
    """What is wrong with pages of which it is known that something is."""
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
