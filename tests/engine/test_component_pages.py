"""What a caller does with windows and states: a window goes on within its own pages, and what is left is checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv import InvalidRequest
from tidekv.engine.decode.component_pages import (
    LeftComponents,
    ReadyComponent,
    StateRecords,
    WindowPages,
    component_pages_left,
    ready_component_pages,
)
from tidekv.states.component_specs import Component, ComponentTable, SnapshotPolicy
from tidekv.states.events import ComponentLeft
from tidekv.states.types import page_ids


def tail(first: int, pages: list[int], own: list[int]) -> ReadyComponent:
    return ReadyComponent(first, np.array(pages, dtype=np.int32), np.array(own, dtype=np.int32))


@given(
    window=st.integers(1, 13),
    page_size=st.integers(1, 5),
    prompt=st.integers(1, 40),
    new=st.integers(0, 60),
    shared_pages=st.integers(0, 20),
)
def test_a_window_always_has_its_tail_and_the_page_that_is_written(
    window: int, page_size: int, prompt: int, new: int, shared_pages: int
) -> None:
    component = Component(name="w", kind="window", window_tokens=window, device_pages=99)
    first, end = component.needed_from(prompt, page_size), -(-prompt // page_size)
    live, trailing_pages = component.live_pages(page_size), component.trailing_pages(page_size)
    # The first of them are shared, up to the last full page; the others are own, and so are all that are left.
    shared = min(shared_pages, prompt // page_size - first) if prompt // page_size > first else 0
    own = list(range(100, 100 + live))
    table = [*range(shared), *own[: end - first - shared]]
    pages = WindowPages(tail(first, table, own), window_tokens=window, page_size=page_size)
    # What lies in each page: the position that it was given for last.
    content = {page: position for position, page in enumerate(table, first)}
    for tokens in range(prompt + 1, prompt + new + 1):
        for page in pages.grow(tokens):
            assert page in own
            content[page] = pages.first + len(pages.pages) - 1
        assert len(set(pages.pages)) == len(pages.pages) <= live
        assert pages.first + len(pages.pages) == -(-tokens // page_size)
        assert [content[page] for page in pages.pages] == list(range(pages.first, pages.first + len(pages.pages)))
        # All that the last token looks at, and the tail at the end of the last full page, as far as there was one.
        assert pages.first <= max(first, (tokens - window) // page_size)
        boundary = tokens // page_size
        begin, left = pages.left(tokens)
        if boundary > first:
            assert begin == max(first, boundary - trailing_pages)
            assert [content[page] for page in left] == list(range(begin, boundary))
        else:
            assert not left


def test_a_window_that_would_skip_a_page_is_told_so() -> None:
    pages = WindowPages(tail(1, [5, 6], [6, 7, 8]), window_tokens=4, page_size=2)
    assert pages.grow(6) == [] and pages.grow(7) == [7]
    with pytest.raises(InvalidRequest, match="with pages up to position 4 cannot continue at 5"):
        pages.grow(11)
    assert pages.pages == [5, 6, 7]


def records(prompt_tokens: int, spare: list[int], **policy: int) -> StateRecords:
    """Of a state whose live record is page 9, with pages of 4 tokens."""
    return StateRecords(
        tail(prompt_tokens // 4, [9], [9, *spare]),
        policy=SnapshotPolicy(**policy),  # type: ignore[arg-type]  # Each is of its type.
        prompt_tokens=prompt_tokens,
        page_size=4,
    )


def taken(state: StateRecords, first: int, end: int) -> dict[int, int]:
    return {tokens: page for tokens in range(first, end + 1) if (page := state.due(tokens)) is not None}


def test_a_record_is_copied_whenever_a_page_is_full_and_the_last_copies_are_left() -> None:
    state = records(6, [7])
    assert taken(state, 6, 17) == {8: 7, 12: 7, 16: 7}
    assert state.left(17) == [(3, [7])]
    # The live record is at the end of a page by itself.
    state = records(6, [])
    assert taken(state, 6, 16) == {} and state.left(16) == [(3, [9])] and state.left(15) == []


def test_the_ends_of_prompt_and_output_and_intervals_are_left_as_far_as_spare_records_go() -> None:
    state = records(8, [5, 6, 7], every_pages=4)
    assert taken(state, 8, 22) == {8: 5, 12: 6, 16: 7, 20: 6}
    assert state.left(22) == [(1, [5]), (3, [7]), (4, [6])]
    # With fewer of them the newest ones stay.
    state = records(8, [5, 6], every_pages=4)
    assert taken(state, 8, 22) == {8: 5, 12: 6, 16: 6, 20: 5}
    assert state.left(22) == [(3, [6]), (4, [5])]


def test_nothing_is_copied_where_the_policy_keeps_nothing() -> None:
    state = records(8, [5, 6], prompt_end=False, output_end=False)
    assert taken(state, 8, 40) == {} and state.left(42) == []
    assert taken(records(8, [5, 6], output_end=False, every_pages=3), 8, 40) == {8: 5, 12: 6, 24: 5, 36: 6}


def test_a_snapshot_is_asked_for_once() -> None:
    state = records(8, [5, 6])
    assert (state.due(8), state.due(8), state.due(9)) == (5, None, None)


def test_the_cores_words_become_a_callers() -> None:
    assert ready_component_pages(None) == {}
    component_pages = ready_component_pages((ComponentTable("s", 3, page_ids([7]), page_ids([7])),))
    assert (
        component_pages["s"].record == 7
        and component_pages["s"].first == 3
        and component_pages["s"].own.tolist() == [7]
    )


GIVEN = {"w": tail(2, [5, 6, 7], [7, 8]), "s": tail(4, [3], [3])}


def test_own_pages_anywhere_and_shared_ones_at_their_place_can_be_left() -> None:
    left = component_pages_left("r", GIVEN, {"w": (3, np.array([6, 8], dtype=np.int32)), "s": (4, (3,))}, full_pages=5)
    assert left == (ComponentLeft("w", 3, (6, 8)), ComponentLeft("s", 4, (3,)))
    assert all(type(page) is int for each in left for page in each.pages)
    several = component_pages_left("r", GIVEN, {"w": [(3, [8]), (0, [7]), (1, [])]}, full_pages=5)
    assert several == (ComponentLeft("w", 3, (8,)), ComponentLeft("w", 0, (7,)))
    assert component_pages_left("r", GIVEN, {"w": (2, [])}, full_pages=5) == ()
    assert component_pages_left("r", GIVEN, None, full_pages=5) == ()


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ({"x": (0, [5])}, "leaves component 'x'; there are w, s"),
        ({"w": (2, [9])}, "leaves of component 'w' page 9 at position 2, which it does not have there"),
        ({"w": (3, [5])}, "page 5 at position 3, which it does not have there"),
        ({"w": (4, [7, 8])}, r"positions \[4, 6\), its tokens have full pages \[0, 5\)"),
        ({"w": (-1, [7])}, r"positions \[-1, 0\)"),
        ({"w": (3, [8, 8])}, r"a page twice: \[8, 8\]"),
        ({"s": (3, [3, 3])}, "a page twice"),
        ({"w": [(3, [8]), (4, [8])]}, "a page twice"),
        ({"w": [(3, [7]), (3, [8])]}, r"two pages at one position: \[7, 8\] at \[3, 3\]"),
        ({"w": [(3, [7]), 5]}, "no position with page ids"),
        ({"w": (2.0, [5])}, "no position with page ids"),
        ({"w": (2, ["5"])}, "no position with page ids"),
        ({"w": (2, 5)}, "no position with page ids"),
        ({"w": 5}, "no position with page ids"),
    ],
)
def test_what_is_not_the_requests_is_named(left: LeftComponents, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        component_pages_left("r", GIVEN, left, full_pages=5)


def test_without_components_there_is_nothing_to_leave() -> None:
    with pytest.raises(InvalidRequest, match="leaves component 'w'; there are none"):
        component_pages_left("r", {}, {"w": (0, [1])}, full_pages=5)
