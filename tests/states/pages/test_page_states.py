"""Conditions of pages beside a plain list of numbers."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tidekv.states.pages.page_pool import PageStates
from tidekv.states.types import page_ids

PAGES = 90


def plain_change(kept: list[int], pages: list[int], source: int, target: int) -> bool:
    """Change `kept`, and return the answer, by the definition of a change."""
    if len(set(pages)) < len(pages) or not all(0 <= page < len(kept) and kept[page] == source for page in pages):
        return False
    for page in pages:
        kept[page] = target
    return True


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Pages of a run or in any order, few or more than a loop is for; now and then one is wrong."""
    pages = draw(st.lists(st.integers(0, PAGES - 1), max_size=70, unique=True))
    if draw(st.booleans()):
        pages = list(range(min(pages, default=0), PAGES))[: len(pages)]
    if draw(st.integers(0, 3)) == 0:
        wrong = draw(st.sampled_from([-1, PAGES, 2**31 - 1, -(2**31), *pages]))
        pages.insert(draw(st.integers(0, len(pages))), wrong)
    source, target = draw(st.permutations(range(3)))[:2]
    return pages, source, target


@given(steps=st.lists(changes(), max_size=12))
@example(steps=[(list(range(PAGES)), 0, 1), ([*range(PAGES), 5], 1, 2), (list(range(PAGES)), 1, 0)])
def test_a_change_is_of_all_pages_or_none(steps: list[tuple[list[int], int, int]]) -> None:
    kept, conditions = [0] * PAGES, PageStates(PAGES)
    for pages, source, target in steps:
        wanted = plain_change(kept, pages, source, target)
        assert conditions.change(page_ids(pages), source, target) is wanted
        assert list(conditions.to_bytes()) == kept == [conditions.of(page) for page in range(PAGES)]


@given(pages=st.lists(st.integers(0, PAGES - 1), max_size=70))
def test_put_sets_the_named_pages_and_no_others(pages: list[int]) -> None:
    conditions = PageStates(PAGES)
    conditions.put(page_ids(pages), 3)
    assert list(conditions.to_bytes()) == [3 if page in pages else 0 for page in range(PAGES)]
