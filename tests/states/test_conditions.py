"""Conditions of pages: the vector, and the loop that is there to be compiled, beside a list too simple to be wrong."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidekv.states import conditions
from tidekv.states.accounts import PageAccount
from tidekv.states.conditions import VectorConditions, make_conditions
from tidekv.states.native_conditions import NativeConditions
from tidekv.states.shapes import page_ids

PAGES = 90


def plain_change(kept: list[int], pages: list[int], source: int, target: int) -> bool:
    """What every form must do to `kept`, and answer."""
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
def test_both_forms_change_all_pages_or_none_as_a_list_would(steps: list[tuple[list[int], int, int]]) -> None:
    kept = [0] * PAGES
    forms = [VectorConditions(PAGES), NativeConditions(PAGES)]
    for pages, source, target in steps:
        wanted = plain_change(kept, pages, source, target)
        for form in forms:
            assert form.change(page_ids(pages), source, target) is wanted
            assert list(form.to_bytes()) == kept == [form.of(page) for page in range(PAGES)]


@given(pages=st.lists(st.integers(0, PAGES - 1), max_size=70))
def test_both_forms_put_pages_where_they_are_told(pages: list[int]) -> None:
    for form in (VectorConditions(PAGES), NativeConditions(PAGES)):
        form.put(page_ids(pages), 3)
        assert list(form.to_bytes()) == [3 if page in pages else 0 for page in range(PAGES)]


def test_the_loop_is_taken_where_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "conditions.cpython-311-x86_64-linux-gnu.so"
    monkeypatch.setattr(conditions, "__file__", "conditions.py")
    assert isinstance(make_conditions(4), VectorConditions)
    monkeypatch.setattr(conditions, "__file__", name)
    assert isinstance(make_conditions(4), NativeConditions)
    account = PageAccount("device", 8)
    account.to_cache(account.take(3))
    account.check()
    monkeypatch.setattr(sys, "byteorder", "big")
    assert isinstance(make_conditions(4), VectorConditions)


def test_without_what_mypyc_brought_along_the_vector_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "__file__", "conditions.cpython-311-x86_64-linux-gnu.so")
    monkeypatch.setitem(sys.modules, "tidekv.states.native_conditions", None)
    assert isinstance(make_conditions(4), VectorConditions)
