"""One load for many: requests that share it, extend it when it fails, or leave."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.records.request import Request
from tidekv.states.records.stages import Stage

EIGHT = b"abcdefgh"


def make_waiters(rig: Rig, *prompts: bytes, source: str = "l2") -> list[commands.SendPromise]:
    """Requests "r0", "r1"… for these prompts, planned one after the other, over b"abcdef" in that tier."""
    rig.attach_storage()
    rig.make_cached("past", EIGHT[:6])
    rig.flush("l1")
    if source == "l3":
        rig.flush("l2")
    promises = []
    for number, prompt in enumerate(prompts):
        rig.arrive(f"r{number}", prompt)
        for query in rig.take_all(commands.QueryStorage):
            rig.answer(query, 6 if source == "l3" and not number else 0)
        promises.append(rig.take(commands.SendPromise))
        rig.serve(promises[-1])
    return promises


@pytest.mark.parametrize("source", ["l2", "l3"])
def test_waiters_cause_one_load_and_are_ready_together(source: str) -> None:
    rig = Rig()
    make_waiters(rig, EIGHT, b"abcdefxy", source=source)
    assert len(rig.core.loads) == 1
    if source == "l3":
        rig.fetched(rig.take(commands.FetchPages))
    rig.copied(rig.take(commands.CopyPages, target="device"))
    readies = rig.take_all(commands.ReportReady)
    assert [ready.sources[source] for ready in readies] == [6, 6]
    assert readies[0].pages[:6] == readies[1].pages[:6]
    assert len(rig.take_all(commands.SendReceived)) == 2
    rig.nothing_else()


def test_a_waiter_may_use_a_part_of_a_load() -> None:
    rig = Rig()
    make_waiters(rig, EIGHT, b"abcxyz")
    rig.copied(rig.take(commands.CopyPages, target="device"))
    assert [ready.sources["l2"] for ready in rig.take_all(commands.ReportReady)] == [6, 3]


def test_the_oldest_waiter_extends_into_a_failed_load_and_the_others_share_that() -> None:
    rig = Rig()
    promises = make_waiters(rig, EIGHT, b"abcdefxy", b"abcdefpq")
    rig.copied(rig.take(commands.CopyPages, target="device"), error="failed")
    extend = rig.take(commands.SendExtend)
    assert (extend.request_id, extend.generation) == ("r0", promises[0].generation)
    assert [rig.state(f"r{number}") for number in range(3)] == ["TRANSFER"] * 3
    rig.chunk(extend)
    assert [ready.sources["transfer"] for ready in rig.take_all(commands.ReportReady)] == [8, 8, 8]


def test_a_sender_extends_no_further_than_its_own_prompt_goes() -> None:
    rig = Rig()
    make_waiters(rig, source="l3")
    rig.arrive("old", b"abcxyz")
    waiting = rig.take(commands.QueryStorage)
    rig.arrive("young", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 6)
    rig.serve(rig.take(commands.SendPromise))
    rig.answer(waiting, 0)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == 3
    rig.serve(promise)
    rig.fetched(rig.take(commands.FetchPages), valid=0)
    # The oldest waiter runs along the first three pages only; the other brings what lies behind.
    extends = rig.take_all(commands.SendExtend)
    assert [(extend.request_id, extend.first, len(extend.pages)) for extend in extends] == [
        ("old", 0, 3),
        ("young", 3, 3),
    ]
    rig.chunk(extends[1])
    assert not rig.take_all(commands.ReportReady)
    rig.chunk(extends[0])
    assert {ready.request_id for ready in rig.take_all(commands.ReportReady)} == {"old", "young"}


def test_when_the_sender_of_an_extend_leaves_another_waiter_extends_into_fresh_pages() -> None:
    rig = Rig()
    make_waiters(rig, EIGHT, b"abcdefxy")
    rig.copied(rig.take(commands.CopyPages, target="device"), error="failed")
    extend = rig.take(commands.SendExtend)
    rig.abort("r0")
    (abort,) = rig.take_all(commands.SendAbort)
    rig.take(commands.ReportFailed)
    again = rig.take(commands.SendExtend)
    assert (extend.request_id, again.request_id, again.generation) == ("r0", "r1", 0)
    assert len(again.pages) == 6 and not set(again.pages) & set(extend.pages)
    # The prefill of the sender may still write its pages.
    assert rig.core.statistics()["device_draining"] == 8
    rig.chunk(again)
    assert rig.take(commands.ReportReady).request_id == "r1"
    rig.drained(abort)
    assert (rig.core.statistics()["device_draining"], rig.core.statistics()["sent_back"]) == (0, 0)


def test_without_fresh_pages_the_waiters_of_a_sender_that_leaves_start_over() -> None:
    rig = Rig(device_pages=13)
    make_waiters(rig, EIGHT, b"abcdefxy")
    rig.copied(rig.take(commands.CopyPages, target="device"), error="failed")
    extend = rig.take(commands.SendExtend)
    rig.abort("r0")
    aborts = {abort.request_id: abort for abort in rig.take_all(commands.SendAbort)}
    assert set(aborts) == {"r0", "r1"}
    rig.take(commands.ReportFailed)
    assert rig.core.statistics()["device_draining"] == 8
    rig.drained(aborts["r1"])
    assert rig.core.statistics()["device_draining"] == 8
    for query in rig.take_all(commands.QueryStorage):
        rig.answer(query, 0)
    assert rig.state("r1") == "PREALLOC"
    rig.drained(aborts["r0"])
    again = rig.take(commands.SendPromise)
    assert (again.request_id, again.generation, again.promised_tokens) == ("r1", 1, 6)
    rig.serve(again)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.take(commands.ReportReady)
    assert (rig.core.statistics()["device_draining"], rig.core.statistics()["sent_back"]) == (0, 1)
    assert len(extend.pages) == 6


def test_an_abort_of_a_waiter_leaves_the_load_to_the_others() -> None:
    rig = Rig()
    make_waiters(rig, EIGHT, b"abcdefxy")
    rig.abort("r0")
    rig.take(commands.ReportFailed)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    assert rig.take(commands.ReportReady).request_id == "r1"


def test_a_copy_that_nobody_waits_for_becomes_cache() -> None:
    rig = Rig()
    make_waiters(rig, EIGHT)
    rig.abort("r0")
    rig.take(commands.ReportFailed)
    rig.copied(rig.take(commands.CopyPages, target="device"))
    rig.expect_nothing_held()
    assert rig.core.statistics()["device_cached"] == 6


def test_a_read_that_nobody_waits_for_is_kept_in_host_memory_alone() -> None:
    rig = Rig()
    make_waiters(rig, EIGHT, source="l3")
    rig.abort("r0")
    rig.take(commands.ReportFailed)
    rig.take(commands.SendAbort)
    rig.fetched(rig.take(commands.FetchPages), valid=4)
    rig.nothing_else()
    rig.expect_nothing_held()
    assert rig.core.statistics()["device_cached"] == 0
    assert rig.core.statistics()["host_cached"] == 4


def test_a_copy_that_failed_with_nobody_left_gives_its_pages_back() -> None:
    rig = Rig()
    make_waiters(rig, EIGHT)
    rig.abort("r0")
    rig.take(commands.ReportFailed)
    rig.copied(rig.take(commands.CopyPages, target="device"), error="failed")
    rig.expect_nothing_held()
    assert rig.core.statistics()["device_free"] == rig.settings.device_pages


def test_a_failed_load_waits_for_a_waiter_that_has_no_room_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan raises, so it gives up storage: the load that it shares has no other request to extend into it."""
    rig = Rig()
    make_waiters(rig, EIGHT, source="l3")
    rig.abort("r0")
    rig.take(commands.ReportFailed)
    rig.take(commands.SendAbort)
    (load,) = rig.core.loads
    stages = raise_in_plans(rig, monkeypatch, times=1)
    rig.arrive("late", b"abcdefghijkl")
    rig.answer(rig.take(commands.QueryStorage), 0)
    assert stages == [Stage.FETCHING] and load.stage is Stage.RECEIVING
    promise, extend = rig.take(commands.SendPromise), rig.take(commands.SendExtend)
    assert (promise.promised_tokens, extend.request_id, extend.first, len(extend.pages)) == (6, "late", 0, 6)
    rig.serve(promise)
    rig.chunk(extend)
    rig.take(commands.ReportReady)


def test_a_failed_load_is_given_up_with_its_last_waiter_if_that_never_has_a_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    make_waiters(rig, EIGHT, source="l3")
    rig.abort("r0")
    rig.take(commands.ReportFailed)
    rig.drained(rig.take(commands.SendAbort))
    fetch = rig.take(commands.FetchPages)
    stages = raise_in_plans(rig, monkeypatch, times=3)
    rig.arrive("late", b"abcdefghijkl")
    rig.answer(rig.take(commands.QueryStorage), 0)
    assert stages == [Stage.FETCHING, Stage.FAILED, Stage.FAILED]
    rig.take(commands.ReportFailed)
    rig.fetched(fetch)
    rig.expect_nothing_held()


def raise_in_plans(rig: Rig, monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[Stage]:
    """The next plans raise; returns the stage of the only load at each of them."""
    stages: list[Stage] = []
    fix_plan = rig.core.restore.fix_plan

    def raising(request: Request, event: events.PlanDue) -> None:
        if len(stages) < times:
            stages.append(next(iter(rig.core.loads)).stage)
            raise ZeroDivisionError("planted")
        fix_plan(request, event)

    monkeypatch.setattr(rig.core.restore, "fix_plan", raising)
    return stages


def test_a_void_load_with_pages_of_another_load_below_waits_for_it() -> None:
    rig = Rig(copy_run_pages=3, copy_deadline_s=2.0)
    rig.make_cached("one", b"abc")
    rig.make_cached("two", b"abcdef")
    rig.flush("l1")
    rig.arrive("a", EIGHT)
    upper, lower = rig.take_all(commands.CopyPages, target="device")
    rig.take(commands.SendPromise)
    rig.wait_until(1.0)
    rig.abort("a")
    rig.step(events.RoomFailed, request_id="a", generation=0, cause="unsent", settled=True)
    rig.copied(lower)
    rig.wait_until(3.0)
    assert rig.core.statistics()["device_draining"] == 3
    rig.copied(upper)
    rig.expect_nothing_held()
    assert rig.core.statistics()["device_free"] == rig.settings.device_pages
