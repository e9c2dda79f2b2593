"""Rules that raise: at every call that they make, nothing is lost, and only the request itself feels it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simulation.raising import Injected, Places
from simulation.rig import Rig
from tests.support.each_call import raised_at_each_call
from tests.support.raise_stories import EIGHT, FAILED, READY, STORIES, three_tiers
from tidekv.states import commands, events
from tidekv.states.core import RAISES_MAX
from tidekv.states.errors import BrokenInvariant
from tidekv.states.handover.rooms import Rooms
from tidekv.states.loads.loads import Loads
from tidekv.states.prefix.index import PrefixIndex
from tidekv.states.records.request import Request
from tidekv.states.records.stages import State
from tidekv.states.request.ready import Serving
from tidekv.states.request.restore import Restore


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_raise_at_any_call_loses_nothing(story: Any) -> None:
    def prepare() -> tuple[Rig, Callable[[], object]]:
        rig = Rig(growth_reserve_pages=1)
        step = story.prepare(rig)
        return rig, lambda: step(rig)

    for call, rig in raised_at_each_call(prepare):
        told = rig.settle()
        ends = {type(wish).__name__ for wish in told if getattr(wish, "request_id", "") == "a"}
        assert ends & set(story.ends) or "" in story.ends, (call, told)
        assert story.never not in ends, (call, told)
        assert not {READY, FAILED} <= ends, f"call {call}: the request ended twice"
        for name in ("a", "big"):
            if rig.core.request(name) is not None:
                rig.abort(name)
        if rig.core.statistics()["requests_retracted"]:
            rig.step(events.RetractedDropped, request_id="a")
        rig.settle()
        rig.expect_nothing_held()


def pools(rig: Rig) -> dict[str, int]:
    counted = ("free", "owned", "cached", "draining", "protected", "evictable")
    return {name: count for name, count in rig.core.statistics().items() if name.endswith(counted)}


def test_a_plan_that_raises_leaves_the_pools_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call raises: between the raise and the next try, nothing of the plan is left."""
    raised = 1
    while plan_raising_at(raised, monkeypatch):
        raised += 1
    assert raised > 15


def plan_raising_at(place: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have the first plan of a request raise at this call; False where it makes fewer calls."""
    rig = Rig()
    query = three_tiers(rig)
    original, places, tries = Restore.fix_plan, Places(rig.core), list[bool]()

    def state() -> object:
        books = rig.core.state
        return pools(rig), len(books.out), len(books.operations), len(rig.core.loads)

    def fix_plan(self: Restore, request: Request, event: object) -> None:
        before, places.left = state(), 0 if tries else place
        try:
            original(self, request, event)
        except Injected:
            tries.append(True)
            assert state() == before, f"call {place}"
            rig.core.state.index.check()
            raise
        finally:
            places.left = 0

    with monkeypatch.context() as patch:
        patch.setattr(Restore, "fix_plan", fix_plan)
        rig.answer(query, 2)
    assert any(isinstance(wish, commands.ReportReady) for wish in rig.settle())
    return bool(tries)


def raise_times(patch: pytest.MonkeyPatch, owner: type, name: str, times: int) -> list[int]:
    """Have this method raise the first `times` times; returns a list that counts them."""
    original, raised = getattr(owner, name), list[int]()

    def call(*arguments: object, **named: object) -> object:
        if len(raised) < times:
            raised.append(1)
            raise RuntimeError(f"{name} is broken")
        return original(*arguments, **named)

    patch.setattr(owner, name, call)
    return raised


@pytest.mark.parametrize(
    ("times", "promised", "reads", "copies"),
    [(0, 6, 1, 1), (1, 4, 0, 1), (2, 2, 0, 0)],
    ids=["all tiers", "L2-only", "L1 and transfer"],
)
def test_each_raise_of_the_plan_trusts_one_tier_less(
    monkeypatch: pytest.MonkeyPatch, times: int, promised: int, reads: int, copies: int
) -> None:
    rig = Rig()
    query = three_tiers(rig)
    raise_times(monkeypatch, Restore, "fix_plan", times)
    rig.answer(query, 2)
    promise = rig.take(commands.SendPromise)
    assert promise.promised_tokens == promised
    assert len(rig.take_all(commands.FetchPages)) == reads
    assert len(rig.take_all(commands.CopyPages, target="device")) == copies
    assert rig.core.statistics().get("fallbacks_by_raise", 0) == times


def test_the_third_raise_fails_the_request_and_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    query = three_tiers(rig)
    raise_times(monkeypatch, Restore, "fix_plan", 3)
    rig.answer(query, 2)
    failed = rig.take(commands.ReportFailed)
    assert failed.cause == "internal error"
    assert "RuntimeError: fix_plan is broken" in failed.detail
    assert "Traceback" in failed.detail
    rig.settle()
    rig.expect_nothing_held()


@pytest.mark.parametrize(("owner", "name"), [(Loads, "begin_copy"), (Loads, "begin_fetch"), (Rooms, "open")])
def test_a_part_of_the_plan_that_always_raises_is_given_up_or_fails_the_request(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    rig = Rig()
    query = three_tiers(rig)
    raise_times(monkeypatch, owner, name, 99)
    rig.answer(query, 2)
    told = rig.settle()
    if name == "open":
        assert [wish.cause for wish in told if isinstance(wish, commands.ReportFailed)] == ["internal error"]
    else:
        ready = next(wish for wish in told if isinstance(wish, commands.ReportReady))
        assert ready.sources["l3"] == 0
        assert ready.sources["l2"] == (0 if name == "begin_copy" else 2)


@pytest.mark.parametrize(("state", "name"), [(State.PREALLOC, "grant"), (State.TRANSFER, "commit")])
def test_where_there_is_no_tier_to_cut_the_second_raise_fails_that_request_alone(
    monkeypatch: pytest.MonkeyPatch, state: State, name: str
) -> None:
    rig = Rig()
    rig.make_ready("bystander", b"xyz")
    rig.attach_storage()
    raised = raise_times(monkeypatch, Restore, name, 2)
    rig.arrive("a", EIGHT)
    for query in rig.take_all(commands.QueryStorage):
        rig.answer(query, 0)
    for promise in rig.take_all(commands.SendPromise):
        rig.serve(promise)
    assert len(raised) == 2
    assert rig.take(commands.ReportFailed).cause == "internal error"
    assert rig.state("bystander") == "READY"
    rig.settle()
    rig.abort("bystander")
    rig.expect_nothing_held()


def test_a_raise_while_a_frame_is_taken_does_not_lose_the_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.bring(State.LOCAL_RESTORE)
    promise, copy = rig.take(commands.SendPromise), rig.take(commands.CopyPages, target="device")
    for name in ("note_writer", "receive_aux", "take_chunk"):
        raise_times(monkeypatch, Rooms, name, 1 if name != "take_chunk" else 0)
    rig.serve(promise)
    rig.copied(copy)
    rig.take(commands.ReportReady)


def test_a_ready_request_whose_rule_raises_twice_is_failed_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.bring(State.READY)
    raise_times(monkeypatch, Serving, "grow", 2)
    rig.step(events.GrowthTaken, request_id="a", page_count=0)
    assert rig.take(commands.ReportFailed).cause == "internal error"
    rig.expect_nothing_held()


def test_a_broken_invariant_is_never_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    query = three_tiers(rig)

    def broken(self: PrefixIndex, *arguments: object) -> None:
        raise BrokenInvariant("the tree is upside down")

    monkeypatch.setattr(PrefixIndex, "give_device", broken)
    with pytest.raises(BrokenInvariant, match="upside down"):
        rig.core.step(events.StorageAnswered(at_s=0.0, op=query.op, found=2))


def test_what_cannot_even_be_failed_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.bring(State.TRANSFER)
    raised = raise_times(monkeypatch, Restore, "leave", 99)
    with pytest.raises(RuntimeError, match="leave is broken"):
        rig.core.step(events.AbortRequested(at_s=0.0, request_id="a"))
    assert len(raised) == RAISES_MAX + 1


def test_a_raise_between_two_pins_of_a_backup_gives_both_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.attach_storage()
    rig.make_cached("past", EIGHT[:4])
    rig.make_ready("a", EIGHT)
    rig.finish("a", EIGHT)
    copy = rig.take(commands.CopyPages, target="host")
    raised = raise_times(monkeypatch, PrefixIndex, "unpin", 1)
    rig.copied(copy)
    assert raised == [1]
    rig.settle()
    assert rig.core.statistics()["host_protected"] == 0
    assert rig.core.statistics()["transitions_raised"] == 1
