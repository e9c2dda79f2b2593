"""Copies of slices of pages: the bytes of every slice, and no others, wherever rows and pieces lie."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.copies.slice_moves import SliceCopier, SliceMover
from tidekv.states.errors import InvalidConfig
from tidekv.states.types import PoolMemory, Segment, page_ids

PAGES = 6


def memory_of(region: np.ndarray, pieces: list[tuple[int, int]], stride: int) -> PoolMemory:
    """Segments (start, size) of pages that lie `stride` bytes apart."""
    return PoolMemory(
        segments=tuple(Segment(region.ctypes.data + start, size, stride, PAGES) for start, size in pieces),
        page_count=PAGES,
    )


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 8, 16])), min_size=1, max_size=12),
    st.lists(st.integers(0, 9), min_size=12, max_size=12),
    st.permutations(range(PAGES)),
    st.permutations(range(PAGES)),
)
def test_every_slice_is_copied_and_nothing_else(
    sizes: list[tuple[int, int]], gaps: list[int], sources: list[int], targets: list[int]
) -> None:
    ours, theirs, start, other = [], [], 0, 0
    for (gap, size), their_gap in zip(sizes, gaps, strict=False):
        ours.append((start + gap, size))
        theirs.append((other + their_gap, size))
        start, other = start + gap + size, other + their_gap + size
    source = np.random.default_rng(1).integers(0, 256, PAGES * start, np.uint8)
    target = np.zeros(PAGES * other, np.uint8)
    wanted = target.copy()
    for one, page in zip(sources, targets, strict=True):
        for (begin, size), (place, _) in zip(ours, theirs, strict=True):
            wanted[page * other + place :][:size] = source[one * start + begin :][:size]
    SliceMover(memory_of(source, ours, start), memory_of(target, theirs, other)).move(
        page_ids(sources), page_ids(targets)
    )
    assert np.array_equal(target, wanted)


def test_heads_of_evenly_spaced_tokens_and_pieces_are_one_strided_array() -> None:
    region = np.zeros(PAGES * 72 * 4, np.uint8)
    rows = [(piece * 72 + token * 16, 8) for piece in range(4) for token in range(4)]
    dense = [(at * 8, 8) for at in range(16)]
    mover = SliceMover(memory_of(region, rows, 288), memory_of(np.zeros(PAGES * 128, np.uint8), dense, 128))
    assert len(mover._blocks) == 1
    assert mover._blocks[0][0].shape == (PAGES, 4, 4, 1)


async def test_large_copies_run_on_a_thread_and_small_ones_at_once() -> None:
    size = 32 << 10
    source, target = np.ones(PAGES * size, np.uint8), np.zeros(PAGES * size, np.uint8)
    copier = SliceCopier()
    copy = copier.copying(memory_of(source, [(0, size)], size), memory_of(target, [(0, size)], size))
    assert copy(page_ids([1]), page_ids([2])).done()
    assert target[2 * size : 3 * size].all()
    async with asyncio.timeout(30):
        await copy(page_ids([0, 1, 3, 4]), page_ids([5, 4, 3, 0]))
    assert target.reshape(PAGES, size).all(axis=1).tolist() == [True, False, True, True, True, True]
    await copier.close()


def test_slices_of_other_sizes_and_on_a_gpu_are_refused() -> None:
    region = np.zeros(PAGES * 8, np.uint8)
    one, other = memory_of(region, [(0, 4)], 8), memory_of(region, [(0, 8)], 8)
    with pytest.raises(InvalidConfig, match="same sizes"):
        SliceMover(one, other)
    with pytest.raises(InvalidConfig, match="GPU"):
        SliceMover(one, PoolMemory(segments=one.segments, page_count=PAGES, kind="VRAM"))
