"""Positions of page pieces in NIXL's prepared lists: pure arithmetic over two pools.

A prepared list covers a whole pool; descriptor `segment * page_count + page` is one piece of one page. A write names
its descriptors by such indices on both sides. NIXL merges neighbours of the list that are consecutive in memory on both
sides, so the order of descriptors matters:

    segments   pieces of a page that touch in both pools are joined (a page-first pool has one segment)
    pages      ascending by our ids, each with its partner: see `plan.paired_pages`
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidekv.states.errors import InvalidRequest, PeerMismatch, RemoteProtocolError
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports.base import check_memory

DESCRIPTORS_MAX = 2**31 - 1


def pair_segments(ours: PoolMemory, theirs: PoolMemory) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Return the pieces of both pools, pairwise equal in size; pieces that touch in both pools are joined.

    Raises PeerMismatch if the pages of the pools have different pieces, RemoteProtocolError if the peer's pool has more
    pieces than an index can name.
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
    """Return a prepared list's input: one row [address, length, device, stride, count] per segment; uint64, [segments,
    5].
    """
    rows = [(p.address, p.piece_bytes, device, p.stride_bytes, p.page_count) for p in pieces]
    return np.array(rows, dtype=np.uint64)


def extents(*memories: PoolMemory) -> list[tuple[int, int]]:
    """Return the ranges (address, length) to register: one per segment, with overlapping ranges merged. Pools of a host
    engine that lends its pages may lie in the same memory.

    Ranges that only touch stay separate: they may be two allocations, which a device registers one by one.
    """
    ranges = sorted(
        (s.address, s.address + s.stride_bytes * (s.page_count - 1) + s.piece_bytes)
        for memory in memories
        for s in memory.segments
    )
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return [(start, end - start) for start, end in merged]


def check_ours(memory: PoolMemory) -> None:
    """Validate our own pool by the rules for a peer's. Raises InvalidRequest."""
    try:
        check_memory(memory)
    except RemoteProtocolError as error:
        raise InvalidRequest(f"this pool cannot be registered, since a peer would refuse it: {error}") from error


def _touch(left: Segment, right: Segment) -> bool:
    return left.address + left.piece_bytes == right.address and left.stride_bytes == right.stride_bytes


def _join(left: Segment, right: Segment) -> Segment:
    return Segment(
        address=left.address,
        piece_bytes=left.piece_bytes + right.piece_bytes,
        stride_bytes=left.stride_bytes,
        page_count=left.page_count,
    )
