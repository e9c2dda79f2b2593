"""The core, stepped by hand: one prefill cannot withhold all device pages from the requests of others."""

from __future__ import annotations

from simulation.rig import Rig
from tests.support.rigs import planned
from tidekv.states import commands, events

SILENT = {"prefills": ("silent",), "cache": False}
GOOD = {"prefills": ("good",), "cache": False}


def prompt(number: int, pages: int = 6) -> bytes:
    return bytes([number]) * pages


def test_nine_requests_to_a_silent_prefill_leave_room_for_those_of_another() -> None:
    rig = Rig(device_pages=64, growth_reserve_pages=1, prefill_share=0.5)
    for number in range(9):
        rig.arrive(f"silent {number}", prompt(number), **SILENT)
    assert len(planned(rig)) == 4
    assert rig.core.state.quota.held == {"silent": 28}
    for number in range(5):
        rig.arrive(f"good {number}", prompt(100 + number), **GOOD)
    assert planned(rig) == [f"good {number}" for number in range(4)]
    # The first waiting request of each prefill was tried; those behind it were not.
    assert rig.core.statistics()["quota_waits"] == 2


def test_requests_over_their_quota_are_not_counted_among_those_that_are_tried() -> None:
    rig = Rig(device_pages=20, prefill_share=0.5, admission_scan_max=2, passes_max=0)
    for number in range(9):
        rig.arrive(f"silent {number}", prompt(number), **SILENT)
    assert planned(rig) == ["silent 0"]
    rig.arrive("good", prompt(100), **GOOD)
    assert planned(rig) == ["good"]


def test_a_request_over_its_quota_is_admitted_before_smaller_ones_of_the_same_prefill() -> None:
    rig = Rig(device_pages=20, prefill_share=0.5)
    rig.arrive("first", prompt(1, 4), **SILENT)
    rig.arrive("second", prompt(2, 4), **SILENT)
    first, second = rig.take_all(commands.SendPromise)
    rig.arrive("wide", prompt(3, 8), **SILENT)
    rig.arrive("small", prompt(4, 1), **SILENT)
    rig.arrive("other", prompt(5, 1), **GOOD)
    assert planned(rig) == ["other"]
    rig.serve(first)
    assert planned(rig) == []
    rig.serve(second)
    assert planned(rig) == ["wide", "small"]


def test_a_prompt_larger_than_the_quota_is_served_alone() -> None:
    rig = Rig(device_pages=20, prefill_share=0.25)
    rig.arrive("small", prompt(1, 2), **SILENT)
    rig.arrive("wide", prompt(2, 12), **SILENT)
    rig.arrive("next", prompt(3, 1), **SILENT)
    (small,) = rig.take_all(commands.SendPromise)
    rig.serve(small)
    (wide,) = rig.take_all(commands.SendPromise)
    assert wide.request_id == "wide"
    rig.serve(wide)
    assert planned(rig) == ["next"]


def test_the_quarantine_counts_until_it_has_drained() -> None:
    rig = Rig(device_pages=20, prefill_share=0.5)
    rig.arrive("a", prompt(1, 8), **SILENT)
    rig.promised(rig.take(commands.SendPromise))
    rig.abort("a")
    rig.arrive("b", prompt(2, 8), **SILENT)
    assert planned(rig) == []
    assert rig.core.state.quota.held == {"silent": 8}
    rig.drained(rig.take(commands.SendAbort))
    assert planned(rig) == ["b"]


def test_a_ready_request_counts_no_more() -> None:
    rig = Rig(device_pages=20, prefill_share=0.5)
    rig.make_ready("a", prompt(1, 8), **GOOD)
    assert rig.core.state.quota.held == {}
    rig.arrive("b", prompt(2, 8), **GOOD)
    assert planned(rig) == ["b"]


def test_cached_pages_count_if_only_that_request_keeps_them_from_eviction() -> None:
    rig = Rig(device_pages=20, prefill_share=0.5, host_pages=0)
    rig.make_ready("past", b"abcdefgh")
    rig.finish("past", b"abcdefgh")
    rig.take_all(commands.ReportFinished), rig.take_all(commands.ForgetTokens)
    rig.arrive("a", b"abcdefghij", **SILENT)
    assert planned(rig) == ["a"]
    assert rig.core.state.quota.held == {"silent": 10}
    rig.arrive("b", b"abcdefghxy", **GOOD)
    assert planned(rig) == ["b"]
    assert rig.core.state.quota.held == {"silent": 10, "good": 2}


def test_pages_that_the_plan_does_not_need_are_charged_no_more() -> None:
    rig = Rig(device_pages=40, prefill_share=0.5)
    rig.attach_storage()
    rig.stop_in_match("slow", b"abcdefghij", prefills=("silent",))
    query = rig.take(commands.QueryStorage)
    assert rig.core.state.quota.held == {"silent": 10}
    rig.core.state.storage_available = False
    rig.make_ready("fast", b"abcdefg", prefills=("good",))
    rig.answer(query, 0)
    rig.leave_match("slow")
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 7
    assert rig.core.state.quota.held == {"silent": 3}
    rig.serve(promise)
    assert rig.core.state.quota.held == {}


def test_the_charge_goes_to_the_prefill_of_the_present_generation() -> None:
    rig = Rig(device_pages=20, prefill_share=0.5)
    rig.arrive("a", prompt(1, 8), prefills=("silent", "good"))
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.step(events.RoomFailed, request_id="a", generation=0, cause="no", settled=False)
    assert rig.take(commands.SendPromise).prefill == 1
    assert rig.core.state.quota.held == {"silent": 8, "good": 8}
    rig.drained(rig.take(commands.SendAbort))
    assert rig.core.state.quota.held == {"good": 8}


def test_what_the_caller_computes_is_charged_to_no_prefill() -> None:
    rig = Rig(device_pages=20, prefill_share=0.25)
    for number in range(2):
        rig.arrive(f"r{number}", prompt(number, 8), can_recompute=True, **SILENT)
        promise = rig.take(commands.SendPromise)
        failed = {"request_id": promise.request_id, "generation": 0, "cause": "no", "settled": True}
        rig.step(events.RoomFailed, **failed)
        assert rig.take(commands.Recompute).request_id == f"r{number}"
    assert rig.core.state.quota.held == {}


def test_a_deadline_in_the_queue_names_the_quota() -> None:
    rig = Rig(device_pages=20, prefill_share=0.5)
    rig.arrive("a", prompt(1, 8), **SILENT)
    rig.arrive("b", prompt(2, 8), **SILENT)
    rig.arrive("c", prompt(3, 1), deadline_at_s=1.0, **SILENT)
    rig.wait_until(2.0)
    assert rig.take(commands.ReportFailed).detail == "in PREALLOC: prefill silent is at its quota of device pages"


def test_without_a_share_there_is_no_limit() -> None:
    rig = Rig(device_pages=20)
    for number in range(3):
        rig.arrive(f"r{number}", prompt(number), **SILENT)
    assert planned(rig) == ["r0", "r1", "r2"]


def test_a_request_whose_prefill_is_at_its_quota_gives_way_to_the_next_of_its_list() -> None:
    rig = Rig(device_pages=40, prefill_share=0.2)
    rig.arrive("hung", prompt(1, 6), prefills=("a",), cache=False)
    assert planned(rig) == ["hung"]
    for number in range(2):
        rig.arrive(f"both {number}", prompt(2 + number, 6), prefills=("a", "b"), cache=False)
    (promise,) = rig.take_all(commands.SendPromise)
    assert (promise.request_id, promise.prefill) == ("both 0", 1)
    assert rig.core.state.quota.held == {"a": 6, "b": 6}
    assert rig.core.statistics()["quota_waits"] == 2
    # Both are at their quota now; the second one waits, and goes where there is room first.
    rig.serve(promise)
    (promise,) = rig.take_all(commands.SendPromise)
    assert (promise.request_id, promise.prefill) == ("both 1", 1)
    # No attempt is used up by that: after the loss of "b" the request tries "a".
    rig.abort("hung")
    (abort,) = rig.take_all(commands.SendAbort)
    rig.drained(abort)
    lost = {"generation": promise.generation, "cause": "prefill failed: no", "settled": True}
    rig.step(events.RoomFailed, request_id="both 1", **lost)
    (promise,) = rig.take_all(commands.SendPromise)
    assert (promise.request_id, promise.prefill) == ("both 1", 0)


def test_a_prefill_that_sends_nothing_for_its_share_of_the_deadline_gives_way() -> None:
    rig = Rig(device_pages=40)
    rig.arrive("r", prompt(1), prefills=("a", "b", "c"), deadline_at_s=30.0)
    places = []
    for at_s in (9.9, 10.1, 19.9, 20.1, 29.9):
        places += [promise.prefill for promise in rig.take_all(commands.SendPromise)]
        rig.wait_until(at_s)
    places += [promise.prefill for promise in rig.take_all(commands.SendPromise)]
    assert places == [0, 1, 2]
    rig.wait_until(30.0)
    assert rig.take(commands.ReportFailed).cause == "deadline"


def test_a_prefill_that_has_sent_a_part_or_is_the_last_of_its_list_has_the_whole_deadline() -> None:
    for prefills in (("a",), ("a", "b")):
        rig = Rig(device_pages=40)
        rig.arrive("r", prompt(1), prefills=prefills, deadline_at_s=30.0)
        promise = rig.take(commands.SendPromise)
        rig.promised(promise)
        if len(prefills) > 1:
            rig.chunk(promise, count=1, last=False)
        rig.wait_until(29.9)
        assert rig.take_all(commands.SendPromise) == []
        rig.wait_until(30.0)
        assert rig.take(commands.ReportFailed).cause == "deadline"
