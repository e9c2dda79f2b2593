"""A request that leaves leaves nothing behind: deadlines and aborts in each state, and messages that free a room."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tidekv.states import commands, events
from tidekv.states.records.stages import State

PROMPT = b"abcdefgh"
LIVE = (State.PREALLOC, State.MATCH, State.PREFETCH, State.LOCAL_RESTORE, State.TRANSFER)


def settle_all(rig: Rig) -> None:
    """End every operation in flight, whether or not a request waits for it; give back the other request."""
    if rig.core.request("big") is not None:
        rig.abort("big")
    for promise in rig.take_all(commands.SendPromise):
        rig.promised(promise)
    for query in rig.take_all(commands.QueryStorage):
        rig.answer(query, 3)
    for fetch in rig.take_all(commands.FetchPages):
        rig.fetched(fetch)
    for copy in rig.take_all(commands.CopyPages, target="device"):
        rig.copied(copy)
    for abort in rig.take_all(commands.SendAbort):
        rig.drained(abort)


@pytest.mark.parametrize("state", LIVE)
def test_each_state_ends_at_the_callers_deadline_and_says_where_it_was(state: State) -> None:
    rig = Rig(query_deadline_s=50, prefetch_base_s=50)
    rig.bring(state, "a", deadline_at_s=2.0)
    assert rig.state("a") == state.value
    assert not any(isinstance(wish, commands.ReportFailed) for wish in rig.wait_until(1.9))
    rig.wait_until(2.0)
    failed = rig.take(commands.ReportFailed)
    assert (failed.request_id, failed.cause, failed.detail) == ("a", "deadline", f"in {state.value}")
    settle_all(rig)
    rig.expect_nothing_held()


@pytest.mark.parametrize("state", [*LIVE, State.READY])
def test_an_abort_in_each_state_leaves_nothing_behind(state: State) -> None:
    rig = Rig()
    rig.bring(state, "a")
    rig.abort("a")
    told = rig.take(commands.ReportDropped if state is State.READY else commands.ReportFailed)
    assert told.request_id == "a"
    assert rig.core.request("a") is None
    settle_all(rig)
    rig.expect_nothing_held()
    # The pages are good for others: as many as the device has.
    rig.core.state.storage_available = False
    rig.make_ready("next", bytes(range(100, 100 + rig.settings.device_pages)))


@pytest.mark.parametrize("state", [State.PREFETCH, State.LOCAL_RESTORE])
def test_outcomes_that_come_after_an_abort_only_give_pages_back(state: State) -> None:
    rig = Rig()
    rig.bring(state, "a")
    promise = rig.take(commands.SendPromise)
    rig.promised(promise)
    rig.abort("a")
    rig.take(commands.ReportFailed)
    rig.drained(rig.take(commands.SendAbort))
    held = rig.core.statistics()
    assert held["host_owned"] + held["host_protected"] + held["device_protected"] > 0
    settle_all(rig)
    rig.expect_nothing_held()


def in_transfer(rig: Rig, request_id: str = "a", *, ranks: int = 1) -> commands.SendPromise:
    """A request with pages that are being written by so many ranks."""
    rig.arrive(request_id, PROMPT)
    promise = rig.take(commands.SendPromise)
    rig.promised(promise, ranks=ranks)
    return promise


def test_pages_of_an_aborted_room_have_no_new_owner_before_the_writer_has_confirmed() -> None:
    rig = Rig(device_pages=8)
    in_transfer(rig)
    rig.abort("a")
    abort = rig.take(commands.SendAbort)
    assert rig.take(commands.ReportFailed).cause == "aborted"
    rig.arrive("b", b"ABCDEFGH")
    rig.wait_until(1000.0)
    assert rig.state("b") == "PREALLOC"
    rig.nothing_else()
    rig.drained(abort)
    assert len(rig.take(commands.SendPromise).pages) == 8


def test_a_room_that_one_rank_fails_waits_for_its_siblings() -> None:
    rig = Rig()
    promise = in_transfer(rig, ranks=3)
    rig.step(events.RoomFailed, request_id="a", generation=promise.generation, cause="rank 0 is ill", settled=False)
    assert rig.take(commands.ReportFailed).detail == "rank 0 is ill"
    abort = rig.take(commands.SendAbort)
    for rank, draining in ((0, 8), (0, 8), (7, 8), (1, 8), (2, 0)):
        rig.drained(abort, rank)
        assert rig.core.statistics()["device_draining"] == draining, rank
    rig.expect_nothing_held()


def test_a_confirmation_of_a_former_generation_frees_nothing_of_the_next_one() -> None:
    rig = Rig()
    in_transfer(rig)
    rig.abort("a")
    old = rig.take(commands.SendAbort)
    rig.drained(old)
    in_transfer(rig)
    rig.abort("a")
    new = rig.take(commands.SendAbort)
    assert new.generation > old.generation
    rig.drained(old)
    assert rig.core.statistics()["device_draining"] == 8
    rig.drained(new)
    rig.take_all(commands.ReportFailed)
    rig.expect_nothing_held()


def test_a_first_token_of_a_former_generation_is_not_taken_for_this_ones() -> None:
    rig = Rig()
    old = in_transfer(rig)
    rig.abort("a")
    new = in_transfer(rig)
    rig.chunk(new)
    rig.aux(old)
    rig.chunk(old)
    assert rig.state("a") == "TRANSFER"
    rig.aux(new)
    assert rig.state("a") == "READY"


def test_a_writer_that_never_answers_keeps_its_pages_until_its_death_is_proven() -> None:
    rig = Rig()
    in_transfer(rig)
    rig.step(events.WriterLost, writer="prefill.1", cause="not heard of")
    assert rig.take(commands.ReportFailed).cause == "prefill lost"
    rig.wait_until(10_000.0)
    assert rig.core.statistics()["device_draining"] == 8
    rig.step(events.WriterDead, writer="prefill.2")
    assert rig.core.statistics()["device_draining"] == 8
    rig.step(events.WriterDead, writer="prefill.1")
    rig.take(commands.SendAbort)
    rig.expect_nothing_held()


def test_an_exception_of_one_request_touches_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    good = in_transfer(rig, "good")
    fix_plan = rig.core.restore.fix_plan

    def raise_for_bad(request, event) -> None:
        if request.request_id == "bad":
            raise ZeroDivisionError("a bug")
        fix_plan(request, event)

    monkeypatch.setattr(rig.core.restore, "fix_plan", raise_for_bad)
    rig.arrive("bad", b"ABCDEFGH")
    failed = rig.take(commands.ReportFailed)
    assert (failed.request_id, failed.cause) == ("bad", "internal error")
    assert "ZeroDivisionError: a bug" in failed.detail
    rig.chunk(good)
    rig.aux(good)
    assert rig.state("good") == "READY"
    rig.abort("good")
    rig.expect_nothing_held()
