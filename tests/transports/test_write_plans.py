"""What a write is checked for and cut into, against the plainest way of saying it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidekv.states.errors import InvalidRequest, RemoteProtocolError
from tidekv.states.types import Segment, page_ids
from tidekv.transports.nixl.plan import SCATTERED_WEIGHT, Numbering, WritePlan, paired_pages

OURS, THEIRS = 12, 9
IDS = st.lists(st.integers(-2, 13), max_size=10)
ORDERED = st.lists(st.integers(0, 8), unique=True).map(sorted)
# Neighbours, and what nearly is: an end beyond the pool, or two pages in each other's place.
RUNS = st.builds(lambda first, count: list(range(first, first + count)), st.integers(-2, 11), st.integers(1, 8))
SWAPPED = RUNS.map(lambda pages: pages if len(pages) < 4 else [pages[0], pages[2], pages[1], *pages[3:]])
LISTS = IDS | ORDERED | RUNS | SWAPPED


def numbering(*piece_sizes: int) -> Numbering:
    segments = tuple(
        Segment(address=4096 * (1 + at), piece_bytes=size, stride_bytes=size, page_count=OURS)
        for at, size in enumerate(piece_sizes)
    )
    return Numbering(segments, our_page_count=OURS, their_page_count=THEIRS)


@given(
    pairs=st.tuples(LISTS, LISTS)
    | st.tuples(LISTS, LISTS).map(lambda two: (two[0][: len(two[1])], two[1][: len(two[0])]))
)
@example(([3, 5, 4, 6], [0, 1, 2, 3]))
@example(([3, 4, 5, 6], [0, 2, 1, 3]))
@example(([3, 4, 5, 6], [0, 2, 2, 3]))
def test_pages_are_taken_exactly_where_all_exist_and_no_target_is_named_twice(
    pairs: tuple[list[int], list[int]],
) -> None:
    ours, theirs = pairs

    def check() -> None:
        sources, targets = paired_pages(page_ids(ours), page_ids(theirs), numbering=numbering(64), peer="peer")
        assert list(zip(sources, targets, strict=True)) == sorted(zip(ours, theirs, strict=True))

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
    pairs=st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 8)), min_size=1, max_size=9, unique_by=lambda pair: pair[1]
    )
    | ORDERED.filter(len).map(lambda pages: [(page, page) for page in pages]),
    sizes=st.lists(st.sampled_from([64, 128]), min_size=1, max_size=3),
    part_descriptors=st.integers(1, 16),
)
def test_the_parts_of_a_plan_are_every_piece_once_in_the_order_of_our_pages(
    pairs: list[tuple[int, int]], sizes: list[int], part_descriptors: int
) -> None:
    ours, theirs = (page_ids(column) for column in zip(*pairs, strict=True))
    numbers = numbering(*sizes)
    plan = WritePlan(
        numbers,
        *paired_pages(ours, theirs, numbering=numbers, peer="peer"),
        part_bytes=1024,
        part_descriptors=part_descriptors,
    )
    # Parts are made later: what the caller does with his list meanwhile does not matter.
    ours[:] = theirs[:] = page_ids([0] * len(pairs))
    wanted = [
        (segment * OURS + mine, segment * THEIRS + its, size)
        for segment, size in enumerate(sizes)
        for mine, its in sorted(pairs)
    ]
    neighbours = [[(first + place, other + place) for place in range(len(pairs))] for first, other in pairs]
    weight = 1 if pairs in neighbours else SCATTERED_WEIGHT
    assert plan.weight == weight
    assert plan.may_join(512, part_descriptors) and not plan.may_join(512, part_descriptors + 1)
    step = max(1, min(part_descriptors // weight, 1024 // max(sizes)))
    parts = [plan.part(index) for index in range(plan.part_count)]
    cut = [wanted[first : first + step] for first in range(0, len(wanted), step)]
    assert [list(zip(part.ours.tolist(), part.theirs.tolist(), strict=True)) for part in parts] == [
        [(mine, its) for mine, its, _ in some] for some in cut
    ]
    assert [part.size_bytes for part in parts] == [sum(size for _, _, size in some) for some in cut]
    assert all(part.ours.dtype == part.theirs.dtype == np.int32 for part in parts)
