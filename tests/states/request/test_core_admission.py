"""The core, stepped by hand: which request gets device pages, and when."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tests.support.rigs import planned
from tidekv.states import commands, events
from tidekv.states.records.stages import State


def fill_device(rig: Rig, *, free: int) -> None:
    """A READY request that takes all device pages but so many."""
    rig.make_ready("big", bytes(range(100, 100 + rig.settings.device_pages - free)), cache=False)


def test_a_request_waits_for_pages_and_gets_them_when_they_are_free() -> None:
    rig = Rig()
    fill_device(rig, free=4)
    rig.arrive("a", b"abcdef")
    assert rig.state("a") == "PREALLOC"
    rig.abort("big")
    assert planned(rig) == ["a"]


def test_what_the_device_has_of_a_prompt_is_not_counted_twice() -> None:
    rig = Rig()
    rig.make_ready("keeper", b"abcdefgh")
    fill_device(rig, free=10)
    rig.arrive("a", b"abcdefghij")
    assert planned(rig) == ["a"]


def test_pages_that_a_longer_match_saves_go_to_a_waiting_request() -> None:
    rig = Rig(device_pages=16)
    rig.arrive("x", b"abcd")
    promise = rig.take(commands.SendPromise)
    rig.attach_storage()
    rig.stop_in_match("a", b"abcdefgh")
    rig.take(commands.QueryStorage)
    rig.arrive("c", b"stuvwx")
    rig.answer(rig.take(commands.QueryStorage), 0)
    assert rig.state("c") == "PREALLOC"
    rig.serve(promise)
    assert planned(rig) == []
    rig.leave_match("a")
    assert planned(rig) == ["a", "c"]


def test_unlocked_cache_makes_room() -> None:
    rig = Rig(device_pages=8, host_pages=0)
    rig.make_ready("a", b"abcdef")
    rig.finish("a", b"abcdef")
    assert rig.core.statistics()["device_evictable"] == 6
    rig.arrive("b", b"stuvwxyz")
    assert planned(rig) == ["b"]
    assert rig.core.statistics()["device_cached"] == 0


@pytest.mark.parametrize("priority", [0, 1])
def test_a_small_request_passes_a_big_one_but_only_so_often(priority: int) -> None:
    rig = Rig(passes_max=3)
    fill_device(rig, free=4)
    rig.arrive("wide", b"0123456789", priority=priority)
    for number in range(5):
        rig.arrive(f"small{number}", bytes([200 + number]), cache=False)
        for promise in rig.take_all(commands.SendPromise):
            rig.serve(promise)
            rig.abort(promise.request_id)
    assert [rig.core.request(f"small{number}") is None for number in range(5)] == [True, True, True, False, False]
    rig.abort("big")
    assert planned(rig) == ["wide", "small3", "small4"]


def test_without_passing_nobody_overtakes() -> None:
    rig = Rig(passes_max=0)
    fill_device(rig, free=4)
    rig.arrive("wide", b"0123456789")
    rig.arrive("small", b"x")
    assert planned(rig) == []
    rig.abort("wide")
    assert planned(rig) == ["small"]


def test_only_so_many_waiting_requests_are_looked_at() -> None:
    rig = Rig(admission_scan_max=2)
    fill_device(rig, free=1)
    for number in range(2):
        rig.arrive(f"wide{number}", bytes(range(10 * number, 10 * number + 10)))
    rig.arrive("small", b"x")
    assert planned(rig) == []
    rig.abort("wide0")
    assert planned(rig) == ["small"]


def test_a_higher_priority_goes_first() -> None:
    rig = Rig(ageing_s=10.0)
    fill_device(rig, free=0)
    rig.arrive("low", b"a" * 3, priority=0)
    rig.arrive("high", b"b" * 3, priority=2)
    rig.arrive("low too", b"c" * 3, priority=0)
    rig.abort("big")
    assert planned(rig) == ["high", "low", "low too"]


def test_waiting_weighs_as_much_as_priority() -> None:
    rig = Rig(ageing_s=10.0)
    fill_device(rig, free=0)
    rig.arrive("patient", b"a" * 3, priority=0)
    rig.now_s = 21.0
    rig.arrive("urgent", b"b" * 3, priority=2)
    rig.abort("big")
    assert planned(rig) == ["patient", "urgent"]


def test_a_request_that_goes_back_keeps_its_place() -> None:
    rig = Rig()
    rig.arrive("first", b"abc", prefill_count=2)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    fill_device(rig, free=3)
    rig.arrive("second", b"stuvw")
    rig.step(events.RoomFailed, request_id="first", generation=0, cause="no", settled=False)
    rig.arrive("third", b"uvwxy")
    rig.abort("big")
    assert planned(rig) == ["first", "second", "third"]


def test_storage_is_asked_while_a_request_waits_and_again_when_the_device_has_less_than_it_had() -> None:
    rig = Rig(host_pages=8)
    rig.attach_storage()
    rig.make_cached("past", b"abcd")
    rig.arrive("keeper", b"abcdef")
    rig.answer(rig.take(commands.QueryStorage), 0)
    rig.serve(rig.take(commands.SendPromise))
    rig.take(commands.ReportReady)
    rig.take(commands.SendReceived)
    fill_device(rig, free=6)
    rig.arrive("a", b"abcdefgh")
    query = rig.take(commands.QueryStorage)
    assert (query.first, query.count) == (6, 2)
    rig.answer(query, 2)
    assert rig.state("a") == "PREALLOC"
    rig.abort("keeper")
    rig.flush("l1", "l2")
    rig.abort("big")
    again = rig.take(commands.QueryStorage)
    assert (again.first, again.count) == (0, 8)
    # The second question holds no pages either.
    assert rig.state("a") == "PREALLOC"
    assert rig.core.statistics()["device_free"] == rig.settings.device_pages
    rig.answer(again, 8)
    assert len(rig.take(commands.FetchPages).host_pages) == 8


def test_an_old_answer_of_storage_is_asked_for_again_at_admission() -> None:
    rig = Rig()
    rig.bring(State.PREALLOC)
    rig.wait_until(3.0)
    rig.abort("big")
    # Five pages have arrived in storage meanwhile.
    rig.answer(rig.take(commands.QueryStorage), 5)
    assert len(rig.take(commands.FetchPages).host_pages) == 5


def test_storage_that_answered_with_an_error_is_not_asked_again_at_admission() -> None:
    rig = Rig()
    rig.attach_storage()
    fill_device(rig, free=4)
    rig.answer(rig.ask_storage(), 0, error="out of order")
    rig.wait_until(3.0)
    rig.abort("big")
    assert not rig.take_all(commands.QueryStorage)
    assert rig.take(commands.SendPromise).promised_tokens == 0


def test_a_fresh_answer_of_storage_is_not_asked_for_again() -> None:
    rig = Rig()
    rig.bring(State.PREALLOC)
    rig.wait_until(0.9)
    rig.abort("big")
    assert not rig.take_all(commands.QueryStorage)
    assert rig.take(commands.SendPromise).promised_tokens == 0
