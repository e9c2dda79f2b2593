"""The wait for an answer of storage: as long as answers take, bounded, and never longer than it can gain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.states.storage.answer_time import (
    GAIN_SHARE,
    WAIT_MAX_S,
    WAIT_MIN_S,
    AnswerTime,
)


def measured(*taken_s: float, useful: float = 1.0) -> AnswerTime:
    answers = AnswerTime()
    for one in taken_s:
        answers.note(taken_s=one, useful=useful)
    return answers


def test_before_the_first_answer_the_wait_is_the_bound() -> None:
    assert AnswerTime().wait_s(0.0) == WAIT_MAX_S
    assert AnswerTime().wait_s(100.0) == WAIT_MAX_S
    # A quarter of 40 ms.
    assert AnswerTime().wait_s(0.04) == pytest.approx(0.02)


def test_fast_answers_are_waited_for_at_least_the_lower_bound() -> None:
    assert measured(*[0.0005] * 20).wait_s(1.0) == WAIT_MIN_S


def test_the_wait_covers_the_answers_that_were_measured() -> None:
    answers = measured(*[0.02, 0.03] * 20)
    assert 0.03 < answers.wait_s(1.0) < 0.06


def test_slow_answers_are_not_waited_for() -> None:
    assert measured(0.5).wait_s(0.0) == 0.0
    assert measured(0.5).wait_s(0.2) == 0.0
    # They are, if they save seconds.
    assert measured(0.5, 0.5, 0.5, 0.5).wait_s(8.0) > 0.5


def test_a_slow_first_answer_does_not_end_the_waits_for_those_that_follow() -> None:
    """The first call opens files, or meets a stall: 25 ms, and 2 ms from then on, of 10 ms that can be gained."""
    assert measured(0.025).wait_s(0.01) == 0.0
    assert measured(0.025, 0.025, 0.002).wait_s(0.01) >= 0.002


def test_a_storage_that_never_has_anything_is_not_waited_for() -> None:
    useless = measured(*[0.02] * 60, useful=0.0)
    assert useless.wait_s(0.3) == 0.0
    assert useless.wait_s(1.0) == 0.0
    assert measured(*[0.02] * 60).wait_s(0.3) > 0.02


def test_another_storage_is_measured_from_the_start() -> None:
    answers = measured(0.5, useful=0.0)
    answers.forget()
    assert answers.wait_s(0.0) == WAIT_MAX_S


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 1.0)), max_size=30), st.floats(0.0, 60.0))
def test_the_wait_stays_within_its_bounds(noted: list[tuple[float, float]], gain_s: float) -> None:
    answers = AnswerTime()
    for taken_s, useful in noted:
        answers.note(taken_s=taken_s, useful=useful)
    wait_s = answers.wait_s(gain_s)
    budget_s = GAIN_SHARE * gain_s if gain_s else WAIT_MAX_S
    assert 0.0 <= wait_s <= max(budget_s * 1.001, WAIT_MIN_S)
