"""Components as a plan sees them: which make sense, how many pages each needs, which boundaries all of them serve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.states.component_specs import Component, ComponentKind, longest_boundary, served_boundaries
from tidekv.states.errors import InvalidConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ""}, "called ''"),
        ({"name": "full"}, "called 'full'"),
        ({"kind": "mirror"}, "'mirror' is no kind"),
        ({"device_pages": 0}, "0 device"),
        ({"host_pages": -1}, "-1 host"),
        ({"window_tokens": 0}, "a window, cannot have window_tokens=0"),
        ({"kind": "state"}, "a state, cannot have window_tokens=8"),
    ],
)
def test_component_with_contradicting_values_is_refused(fields: dict[str, object], words: str) -> None:
    good = {"name": "window", "kind": "window", "window_tokens": 8, "device_pages": 4}
    with pytest.raises(InvalidConfig, match=words):
        Component(**{**good, **fields})  # type: ignore[arg-type]  # Wrong on purpose.


@pytest.mark.parametrize(
    ("kind", "tokens", "trailing_pages", "live"), [("window", 64, 4, 5), ("window", 65, 5, 6), ("window", 1, 1, 2)]
)
def test_a_window_needs_the_pages_that_cover_it_and_one_to_write(
    kind: ComponentKind, tokens: int, trailing_pages: int, live: int
) -> None:
    component = Component(name="c", kind=kind, window_tokens=tokens, device_pages=1)
    assert (component.trailing_pages(16), component.live_pages(16)) == (trailing_pages, live)


def test_a_state_needs_one_record_however_long_the_prompt() -> None:
    state = Component(name="c", kind="state", device_pages=1)
    assert (state.trailing_pages(16), state.live_pages(16)) == (1, 1)


@given(st.sets(st.integers(0, 20)), st.integers(1, 6), st.integers(0, 22))
def test_boundaries_are_those_whose_component_pages_are_all_there(
    positions: set[int], trailing_pages: int, limit: int
) -> None:
    def is_served(boundary: int) -> bool:
        return all(at in positions for at in range(max(0, boundary - trailing_pages), boundary))

    served = served_boundaries(sorted(positions), trailing_pages)
    assert {b for low, high in served for b in range(low, high + 1)} == {b for b in range(1, 23) if is_served(b)}
    assert longest_boundary(limit, [served]) == max(b for b in range(limit + 1) if is_served(b))


@given(st.lists(st.tuples(st.sets(st.integers(0, 12)), st.integers(1, 3)), max_size=3), st.integers(0, 14))
def test_the_longest_boundary_is_served_by_all(parts: list[tuple[set[int], int]], limit: int) -> None:
    served = [served_boundaries(sorted(positions), trailing_pages) for positions, trailing_pages in parts]
    expected = next(
        b
        for b in range(limit, -1, -1)
        if all(at in positions for positions, trailing_pages in parts for at in range(max(0, b - trailing_pages), b))
    )
    assert longest_boundary(limit, served) == expected
