"""Which cases the default tier keeps of a matrix: as few as show what all show, and none is lost to `--all`."""

from __future__ import annotations

from itertools import product

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

from tests.support import thorough

CASES = [*product("abc", (1, 2), ("x", "y"))]


def kept(params: list[ParameterSet]) -> list[tuple[object, ...]]:
    """Values of the cases that the default tier has."""
    return [tuple(param.values) for param in params if pytest.mark.thorough not in param.marks]


def test_cases_that_are_kept_show_every_pair_of_values_and_all_cases_are_there() -> None:
    params = thorough.mark_rest(CASES)
    assert [tuple(param.values) for param in params] == CASES
    shown = {pair for case in kept(params) for pair in thorough.pairs(*case)}
    assert shown == {pair for case in CASES for pair in thorough.pairs(*case)}
    assert len(kept(params)) < len(CASES)


def test_marks_and_names_of_a_case_stay() -> None:
    given = [pytest.param(number, marks=pytest.mark.nixl, id=f"number {number}") for number in (1, 2)]
    params = thorough.mark_rest(given, lambda number: {"all"})
    assert [param.id for param in params] == ["number 1", "number 2"]
    assert all(pytest.mark.nixl in param.marks for param in params)
    assert kept(params) == [(1,)]


def test_values_beyond_the_chosen_ones_are_thorough() -> None:
    params = thorough.thorough_beyond((2, 5), range(2, 7))
    assert [param.values for param in params] == [(number,) for number in range(2, 7)]
    assert kept(params) == [(2,), (5,)]


@pytest.mark.parametrize(("marks", "expected"), [("", 60), ("nixl", 60), ("not slow and not thorough", 20)])
def test_the_default_tier_tries_a_third_of_the_examples(marks: str, expected: int) -> None:
    before = settings.get_current_profile_name()
    thorough.load_profile(marks)
    try:
        assert thorough.examples(60).max_examples == expected
    finally:
        settings.load_profile(before)
