"""Storage that answers slowly: the question holds no pages, and the plan does not wait for it."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.errors import BrokenInvariant
from tidekv.states.storage.answer_time import WAIT_MAX_S, WAIT_MIN_S

EIGHT = b"abcdefgh"


def answered(rig: Rig, *, after_s: float, name: str = "before") -> None:
    """A request whose query storage answers after that time, and that has ended."""
    rig.arrive(name, b"0123456789")
    query = rig.take(commands.QueryStorage)
    rig.wait_until(rig.now_s + after_s)
    rig.answer(query, 0)
    rig.abort(name)
    rig.settle()
    rig.pending.clear()


def test_a_question_holds_no_pages_and_keeps_none_from_others() -> None:
    rig = Rig(device_pages=16)
    rig.ask_storage()
    assert rig.core.statistics()["device_free"] == 16
    # It needs 11 of 16 pages, and no storage.
    rig.core.state.storage_available = False
    rig.make_ready("other", b"ABCDEFGHIJK")


def test_an_answer_of_half_a_second_delays_nothing_but_by_the_bound() -> None:
    rig = Rig()
    query = rig.ask_storage()
    rig.wait_until(WAIT_MAX_S + 0.001)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 0
    rig.serve(promise)
    rig.take(commands.ReportReady)
    rig.wait_until(0.5)
    # Nothing comes of the answer but its time, from which the next plan does not wait at all.
    assert rig.answer(query, 8) == []
    rig.arrive("b", b"ABCDEFGH")
    rig.take(commands.QueryStorage)
    assert rig.take(commands.SendPromise).promised_tokens == 0
    statistics = rig.core.statistics()
    assert statistics["l3_queries_outwaited"] == 1 and statistics["l3_queries_late"] == 0


def test_the_time_of_an_answer_is_measured_even_if_its_request_has_gone() -> None:
    rig = Rig()
    query = rig.ask_storage()
    rig.abort("a")
    rig.take(commands.ReportFailed)
    rig.expect_nothing_held()
    rig.wait_until(0.5)
    rig.answer(query, 8)
    rig.arrive("b", EIGHT)
    assert rig.take_all(commands.SendPromise)


def test_a_query_without_an_answer_counts_as_failed_at_its_deadline_though_nobody_waits() -> None:
    rig = Rig(breaker_failures=1)
    rig.ask_storage()
    rig.wait_until(WAIT_MAX_S + 0.001)
    rig.serve(rig.take(commands.SendPromise))
    rig.finish("a", EIGHT)
    rig.wait_until(1.1)
    statistics = rig.core.statistics()
    assert (statistics["l3_queries_late"], statistics["l3_breaker_opened"]) == (1, 1)
    # Without a request as well.
    rig = Rig(breaker_failures=1)
    rig.ask_storage()
    rig.abort("a")
    rig.wait_until(1.1)
    assert rig.core.statistics()["l3_breaker_opened"] == 1
    assert not rig.core.storage.queries_left


def test_fast_answers_are_waited_for_as_long_as_they_take() -> None:
    rig = Rig()
    rig.attach_storage()
    answered(rig, after_s=0.0001)
    query = rig.ask_storage()
    rig.wait_until(rig.now_s + WAIT_MIN_S / 2)
    rig.nothing_else()
    rig.answer(query, 8)
    assert len(rig.take(commands.FetchPages).host_pages) == 8


def test_a_request_that_still_waits_for_memory_uses_a_late_answer() -> None:
    rig = Rig()
    rig.attach_storage()
    rig.make_ready("big", bytes(range(128, 128 + rig.settings.device_pages - 4)))
    query = rig.ask_storage()
    rig.wait_until(0.9)
    rig.answer(query, 8)
    rig.abort("big")
    assert len(rig.take(commands.FetchPages).host_pages) == 8


def test_an_answer_after_the_plan_serves_the_next_generation() -> None:
    rig = Rig()
    query = rig.ask_storage(prefill_count=2)
    rig.wait_until(0.1)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 0
    rig.answer(query, 6)
    rig.nothing_else()
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="no", settled=True)
    # Storage is not asked again.
    assert rig.take_all(commands.QueryStorage) == []
    assert (rig.take(commands.FetchPages).positions[0], rig.take(commands.SendPromise).promised_tokens) == (0, 6)


def test_an_answer_serves_one_plan_only() -> None:
    """What it promised was not delivered: the next plan asks again."""
    rig = Rig()
    query = rig.ask_storage(prefill_count=3)
    rig.wait_until(0.1)
    rig.answer(query, 6)
    for generation in (0, 1):
        rig.step(events.RoomFailed, request_id="a", generation=generation, cause="no", settled=True)
    rig.take(commands.QueryStorage)


def test_a_query_whose_request_has_left_is_counted() -> None:
    rig = Rig()
    rig.ask_storage()
    rig.abort("a")
    rig.core.storage.queries_left.clear()
    with pytest.raises(BrokenInvariant, match="is not counted"):
        rig.core.check()
