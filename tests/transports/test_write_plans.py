"""What a write is checked for and cut into, against the plainest way of saying it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.states.errors import InvalidRequest, RemoteProtocolError
from tidekv.states.shapes import PoolMemory, Segment, page_ids
from tidekv.transports.nixl_layout import WritePlan, checked_pages

OURS, THEIRS = 12, 9
IDS = st.lists(st.integers(-2, 13), max_size=10)
ORDERED = st.lists(st.integers(0, 8), unique=True).map(sorted)


def pool(page_count: int, piece_sizes: tuple[int, ...] = (64,)) -> PoolMemory:
    segments = tuple(
        Segment(address=4096 * (1 + at), piece_bytes=size, stride_bytes=size, page_count=page_count)
        for at, size in enumerate(piece_sizes)
    )
    return PoolMemory(segments=segments, page_count=page_count)


@given(ours=IDS | ORDERED, theirs=IDS | ORDERED)
def test_pages_are_taken_exactly_where_all_exist_and_no_target_is_named_twice(
    ours: list[int], theirs: list[int]
) -> None:
    def check() -> None:
        sources, targets = checked_pages(
            page_ids(ours), page_ids(theirs), ours=pool(OURS), theirs=pool(THEIRS), peer="peer"
        )
        assert (sources.tolist(), targets.tolist()) == (ours, theirs)

    if len(ours) != len(theirs) or not all(0 <= page < OURS for page in ours):
        with pytest.raises(InvalidRequest):
            check()
    elif not all(0 <= page < THEIRS for page in theirs):
        with pytest.raises(RemoteProtocolError):
            check()
    elif len(set(theirs)) < len(theirs):
        with pytest.raises(InvalidRequest, match="named twice"):
            check()
    else:
        check()


@given(
    pairs=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 8)), min_size=1, max_size=12)
    | ORDERED.filter(len).map(lambda pages: [(page, page) for page in pages]),
    sizes=st.lists(st.sampled_from([64, 128]), min_size=1, max_size=3),
    part_descriptors=st.integers(1, 8),
)
def test_the_parts_of_a_plan_are_every_piece_once_in_the_order_of_our_pages(
    pairs: list[tuple[int, int]], sizes: list[int], part_descriptors: int
) -> None:
    ours, theirs = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    plan = WritePlan(
        pieces=pool(OURS, tuple(sizes)).segments,
        our_page_count=OURS,
        their_page_count=THEIRS,
        our_pages=ours,
        their_pages=theirs,
        part_bytes=1024,
        part_descriptors=part_descriptors,
    )
    # Parts are made later: what the caller does with his list meanwhile does not matter.
    ours[:] = theirs[:] = 0
    wanted = [
        (segment * OURS + mine, segment * THEIRS + its, size)
        for segment, size in enumerate(sizes)
        for mine, its in sorted(pairs)
    ]
    step = max(1, min(part_descriptors, 1024 // max(sizes)))
    parts = [plan.part(index) for index in range(plan.part_count)]
    cut = [wanted[first : first + step] for first in range(0, len(wanted), step)]
    assert [list(zip(part.ours.tolist(), part.theirs.tolist(), strict=True)) for part in parts] == [
        [(mine, its) for mine, its, _ in some] for some in cut
    ]
    assert [part.size_bytes for part in parts] == [sum(size for _, _, size in some) for some in cut]
    assert all(part.ours.dtype == part.theirs.dtype == np.int32 for part in parts)
