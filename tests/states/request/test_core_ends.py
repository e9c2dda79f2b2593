"""The core, stepped by hand: aborts, deadlines and lost rooms, in every state; after each, nothing is held."""

from __future__ import annotations

from itertools import pairwise

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.records.stages import State
from tidekv.states.request.table import LIVE

EIGHT = b"abcdefgh"
WITH_ROOM = (State.PREFETCH, State.LOCAL_RESTORE, State.TRANSFER)


def end_big(rig: Rig) -> None:
    """Give back what `Rig.bring` filled the device with."""
    if rig.core.request("big") is not None:
        rig.abort("big")


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.value)
def test_an_abort_is_told_once_and_leaves_nothing(state: State) -> None:
    rig = Rig()
    rig.bring(state)
    rig.abort("a")
    failed = rig.take(commands.ReportFailed)
    assert (failed.request_id, failed.cause, failed.detail) == ("a", "aborted", f"in {state.value}")
    assert rig.core.request("a") is None
    assert len(rig.take_all(commands.SendAbort)) == (state in WITH_ROOM)
    rig.abort("a")
    rig.step(events.RoomFailed, request_id="a", generation=0, cause="gone", settled=True)
    end_big(rig)
    rig.settle()
    rig.expect_nothing_held()


def test_an_abort_of_a_ready_request_gives_its_pages_back_and_keeps_the_prompt_cached() -> None:
    rig = Rig(growth_reserve_pages=2)
    rig.bring(State.READY)
    rig.abort("a")
    assert rig.take(commands.ReportDropped).request_id == "a"
    rig.nothing_else()
    rig.expect_nothing_held()
    assert rig.core.statistics()["device_cached"] == 8


@pytest.mark.parametrize("state", LIVE, ids=lambda state: state.value)
def test_a_deadline_is_told_once_and_leaves_nothing(state: State) -> None:
    rig = Rig(query_deadline_s=100.0, prefetch_base_s=100.0, copy_deadline_s=100.0)
    rig.bring(state, deadline_at_s=2.0)
    rig.wait_until(1.9)
    assert rig.state("a") == state.value
    rig.wait_until(2.0)
    failed = rig.take(commands.ReportFailed)
    assert (failed.cause, failed.detail) == ("deadline", f"in {state.value}")
    rig.step(events.RoomFailed, request_id="a", generation=0, cause="gone", settled=True)
    end_big(rig)
    rig.settle()
    rig.expect_nothing_held()
    assert rig.core.next_deadline_s() is None


def test_the_deadline_of_the_restore_is_over_when_the_request_is_ready() -> None:
    rig = Rig()
    rig.bring(State.READY, deadline_at_s=2.0)
    rig.wait_until(5.0)
    rig.nothing_else()
    assert rig.state("a") == "READY"


LOSSES = {
    "refused by prefill": lambda rig: rig.step(
        events.RoomRefused, request_id="a", generation=rig.request("a").generation, span=0, cause="no such prompt"
    ),
    "prefill failed": lambda rig: rig.step(
        events.RoomFailed,
        request_id="a",
        generation=rig.request("a").generation,
        cause="out of memory",
        settled=False,
    ),
    "prefill lost": lambda rig: rig.step(events.WriterLost, writer="prefill.1", cause="no heartbeat"),
}


@pytest.mark.parametrize("state", WITH_ROOM, ids=lambda state: state.value)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_room_fails_the_request_where_no_other_prefill_is_left(state: State, loss: str) -> None:
    rig = Rig()
    rig.bring(state)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    LOSSES[loss](rig)
    assert rig.take(commands.ReportFailed).cause == loss
    rig.take(commands.SendAbort)
    rig.step(events.WriterDead, writer="prefill.1")
    rig.settle()
    rig.expect_nothing_held()


@pytest.mark.parametrize("state", WITH_ROOM, ids=lambda state: state.value)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_room_is_tried_again_elsewhere_in_a_new_generation(state: State, loss: str) -> None:
    rig = Rig(attempts_per_prefill=2)
    rig.bring(state, prefill_count=2)
    first = rig.take(commands.SendPromise)
    tried = [first.prefill]
    rig.promised(first)
    for generation in (1, 2, 3):
        LOSSES[loss](rig)
        rig.take(commands.SendAbort)
        for query in rig.take_all(commands.QueryStorage):
            rig.answer(query, 0)
        promise = rig.take(commands.SendPromise)
        assert promise.generation == generation
        assert promise.renewed
        tried.append(promise.prefill)
        rig.promised(promise)
    assert tried == [0, 1, 0, 1]
    LOSSES[loss](rig)
    assert rig.take(commands.ReportFailed).cause == loss


def test_a_settled_failure_frees_the_pages_at_once() -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    rig.step(events.RoomFailed, request_id="a", generation=0, cause="cannot connect", settled=True)
    rig.take(commands.ReportFailed)
    rig.take(commands.SendPromise)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_pages_wait_in_quarantine_until_every_rank_has_drained() -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    rig.promised(rig.take(commands.SendPromise), ranks=3)
    rig.abort("a")
    abort = rig.take(commands.SendAbort)
    for rank in (2, 2, 7, -1, 0):
        rig.drained(abort, rank=rank)
        assert rig.core.statistics()["device_draining"] == 8
        assert not rig.core.is_idle
    rig.drained(abort, rank=1)
    rig.expect_nothing_held()


def test_a_promise_that_is_sent_behind_its_abort_is_drained_by_every_rank() -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    promise = rig.take(commands.SendPromise)
    rig.abort("a")
    abort = rig.take(commands.SendAbort)
    # The abort overtook the report of the promise: only now is it known that two ranks may write.
    rig.promised(promise, ranks=2)
    rig.drained(abort, rank=0)
    assert rig.core.statistics()["device_draining"] == 8
    rig.drained(abort, rank=1)
    rig.take(commands.ReportFailed)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_a_room_that_one_of_two_ranks_has_written_is_drained_by_both() -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise, ranks=2)
    rig.chunk(promise, rank=1)
    rig.abort("a")
    abort = rig.take(commands.SendAbort)
    assert rig.core.statistics()["device_draining"] == 8
    for rank in (1, 0):
        assert rig.core.statistics()["device_draining"] == 8
        rig.drained(abort, rank=rank)
    rig.take(commands.ReportFailed)
    rig.nothing_else()
    rig.expect_nothing_held()


def test_pages_wait_in_quarantine_until_their_writer_is_dead() -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    rig.promised(rig.take(commands.SendPromise), writer="prefill.1")
    rig.step(events.WriterLost, writer="prefill.1", cause="no heartbeat")
    rig.take(commands.ReportFailed)
    rig.wait_until(1e6)
    rig.step(events.WriterDead, writer="prefill.2")
    assert rig.core.statistics()["device_draining"] == 8
    rig.step(events.WriterDead, writer="prefill.1")
    rig.expect_nothing_held()


def test_a_writer_that_is_dead_before_it_was_lost_takes_its_rooms_along() -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    rig.promised(rig.take(commands.SendPromise))
    rig.step(events.WriterDead, writer="prefill.1")
    assert rig.take(commands.ReportFailed).cause == "prefill lost"
    rig.expect_nothing_held()


def test_one_lost_writer_takes_all_its_rooms_and_no_other() -> None:
    rig = Rig()
    for name, writer in (("a", "prefill.1"), ("b", "prefill.2"), ("c", "prefill.1")):
        rig.arrive(name, name.encode() * 3)
        rig.promised(rig.take(commands.SendPromise), writer=writer)
    rig.step(events.WriterLost, writer="prefill.1", cause="no heartbeat")
    assert [failed.request_id for failed in rig.take_all(commands.ReportFailed)] == ["a", "c"]
    assert rig.state("b") == "TRANSFER"


def test_a_lost_writer_that_filled_a_load_for_others_of_its_rooms_fails_each_once() -> None:
    rig = Rig()
    rig.make_cached("past", EIGHT[:6])
    rig.flush("l1")
    for name in ("a", "b"):
        rig.arrive(name, EIGHT)
        rig.promised(rig.take(commands.SendPromise))
    rig.copied(rig.take(commands.CopyPages, target="device"), error="failed")
    rig.take(commands.SendExtend)
    rig.step(events.WriterLost, writer="prefill.1", cause="no heartbeat")
    assert [failed.request_id for failed in rig.take_all(commands.ReportFailed)] == ["a", "b"]
    rig.step(events.WriterDead, writer="prefill.1")
    rig.expect_nothing_held()


def test_frames_of_a_generation_that_was_left_change_nothing() -> None:
    rig = Rig()
    rig.bring(State.TRANSFER, prefill_count=2)
    old = rig.take(commands.SendPromise)
    rig.promised(old)
    LOSSES["prefill failed"](rig)
    rig.take(commands.SendAbort)
    rig.answer(rig.take(commands.QueryStorage), 0)
    new = rig.take(commands.SendPromise)
    rig.promised(new)
    rig.aux(old)
    rig.chunk(old)
    rig.step(events.RoomRefused, request_id="a", generation=0, span=0, cause="late")
    rig.step(events.RoomFailed, request_id="a", generation=0, cause="late", settled=False)
    rig.nothing_else()
    assert rig.state("a") == "TRANSFER"
    assert rig.core.statistics()["frames_late"] == 4
    rig.serve(new)
    rig.take(commands.ReportReady)


def test_an_id_that_returns_has_nothing_to_do_with_the_room_that_drains_under_its_name() -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    old = rig.take(commands.SendPromise)
    rig.promised(old)
    rig.abort("a")
    abort = rig.take(commands.SendAbort)
    rig.take(commands.ReportFailed)
    rig.arrive("a", EIGHT)
    rig.answer(rig.take(commands.QueryStorage), 0)
    new = rig.take(commands.SendPromise)
    rig.promised(new)
    rig.chunk(old)
    rig.aux(old)
    assert rig.state("a") == "TRANSFER"
    rig.drained(abort)
    assert rig.core.statistics()["device_draining"] == 0
    rig.serve(new)
    rig.take(commands.ReportReady)


def late(rig: Rig, promise: commands.SendPromise, cause: str = "prefill silent: x") -> None:
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause=cause, settled=True)


@pytest.mark.parametrize("cause", ["prefill silent: x", "lease ended: x"])
def test_a_prefill_that_is_only_late_is_tried_with_growing_pauses_until_the_deadline(cause: str) -> None:
    rig = Rig(retries_late=True)
    rig.arrive("a", b"abcd", deadline_at_s=6.0)
    asked_at_s = []
    while (promise := next(iter(rig.take_all(commands.SendPromise)), None)) is not None:
        asked_at_s.append(rig.now_s)
        late(rig, promise, cause)
        assert rig.state("a") == "PREALLOC"
        while rig.core.request("a") and not any(isinstance(wish, commands.SendPromise) for wish in rig.pending):
            due_s = rig.core.next_deadline_s()
            assert due_s is not None
            rig.wait_until(due_s)
    pauses = [round(later - earlier, 6) for earlier, later in pairwise(asked_at_s)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    failed = rig.take(commands.ReportFailed)
    assert (failed.cause, rig.now_s) == ("deadline", 6.0)
    assert f"after 7 attempts, the last of which ended by {cause}" in failed.detail
    rig.expect_nothing_held()


def test_other_causes_and_callers_with_another_way_are_not_made_to_wait_for_a_late_prefill() -> None:
    for fields, cause in (({}, "prefill lost: x"), ({"can_recompute": True}, "prefill silent: x")):
        rig = Rig(retries_late=True)
        rig.arrive("a", b"abcd", deadline_at_s=6.0, **fields)
        late(rig, rig.take(commands.SendPromise), cause)
        assert rig.take_all(commands.Recompute if fields else commands.ReportFailed)


def test_a_request_in_a_pause_holds_nobody_back() -> None:
    rig = Rig(retries_late=True, admission_scan_max=1, passes_max=0)
    rig.arrive("a", b"abcd", deadline_at_s=6.0)
    late(rig, rig.take(commands.SendPromise))
    rig.arrive("b", b"efgh")
    assert rig.take(commands.SendPromise).request_id == "b"
    rig.wait_until(0.2)
    assert rig.take(commands.SendPromise).request_id == "a"
