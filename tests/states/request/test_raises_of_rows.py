"""A raise planted in every guard and action of the table, in every state, up to three times: how the request ends, and
what is reported of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simulation.rig import Rig
from tests.support.rule_classes import CLASSES, OWNERS
from tidekv.states import commands, events
from tidekv.states.core_state import CoreState
from tidekv.states.records.request import Request
from tidekv.states.records.stages import State
from tidekv.states.request import table
from tidekv.states.request.guards_and_actions import (
    fills_lent_pages,
    has_all_of_tiers,
    has_failed_short,
    has_filled_lent_pages,
    has_more_in_tiers,
    is_left_to_tiers,
)
from tidekv.states.request.table import TRANSITIONS, Row

EIGHT = b"abcdefgh"
WITHOUT_PREFILL = (is_left_to_tiers, has_all_of_tiers, has_more_in_tiers)
TWO_TIERS_TO_CUT = (State.MATCH, State.PREFETCH, State.LOCAL_RESTORE)
Stimulus = Callable[[Rig], object]


def function_of(row: Row, part: str) -> Any:
    """The guard or the action that a row names."""
    function = getattr(row, part)
    return function(CLASSES) if part == "before" else function


class Plant:
    """Raises in place of one guard or action, a number of times, once it is armed."""

    def __init__(self, patch: pytest.MonkeyPatch, row: Row, part: str, state: State) -> None:
        self.left = self.raised = 0
        self.state = state
        original: Any = function_of(row, part)
        owner, _, name = original.__qualname__.rpartition(".")

        def instead(*given: Any) -> Any:
            request = given[-2]
            if self.left and request.request_id == "a" and request.state is state:
                self.left -= 1
                self.raised += 1
                raise ZeroDivisionError("planted")
            return original(*given)

        instead.__name__ = name
        if owner:
            patch.setattr(OWNERS[owner], name, instead)
        else:
            instead.__qualname__ = name
            rows = tuple(replace(other, **{part: instead}) if other is row else other for other in TRANSITIONS)
            patch.setattr(table, "TRANSITIONS", rows)


def in_room(rig: Rig, state: State, **fields: object) -> None:
    rig.bring(state, **fields)
    for promise in rig.take_all(commands.SendPromise):
        rig.promised(promise)
        rig.pending.append(promise)


def arrival(rig: Rig, state: State) -> Stimulus:
    rig.attach_storage()
    return lambda rig: rig.arrive("a", EIGHT)


def answer(rig: Rig, state: State) -> Stimulus:
    if state is State.PREALLOC:
        rig.attach_storage()
        rig.make_ready("big", bytes(range(128, 128 + rig.settings.device_pages - 4)))
        rig.arrive("a", EIGHT)
        query = rig.take(commands.QueryStorage)
    else:
        query = rig.ask_storage()
    return lambda rig: rig.answer(query, 0)


def plan(rig: Rig, state: State, found: int = 2) -> Stimulus:
    rig.make_cached("past", EIGHT[:2])
    rig.flush("l1")
    query = rig.ask_storage()
    return lambda rig: rig.answer(query, found)


def progress(rig: Rig, state: State) -> Stimulus:
    if state is State.MATCH:
        return plan(rig, state)
    rig.bring(state)
    return Rig.settle


def frames(rig: Rig, state: State) -> Stimulus:
    rig.bring(state)
    promise = rig.take(commands.SendPromise)
    return lambda rig: rig.serve(promise)


def pages_lost(rig: Rig, state: State) -> Stimulus:
    rig.bring(state)

    def lose(rig: Rig) -> None:
        rig.core.state.pages_were_lost(rig.request("a"), "others write to them")
        rig.step(events.ClockAdvanced)

    return lose


def lost_prefill(rig: Rig, state: State, **fields: object) -> Stimulus:
    in_room(rig, state, **fields)
    return lambda rig: rig.step(events.WriterLost, writer="prefill.1", cause="silence")


def left_to_tiers(rig: Rig, state: State) -> Stimulus:
    rig.bring(state, prefills=events.NOBODY)
    rig.take(commands.SendPromise)
    return lambda rig: rig.step(events.RoomFailed, request_id="a", generation=0, cause="nobody", settled=True)


def part_of_tiers(rig: Rig, state: State) -> Stimulus:
    """Storage has all eight pages, and host memory room for two of them."""
    rig.answer(rig.ask_storage(prefills=events.NOBODY), 8)
    rig.take(commands.SendPromise)
    rig.step(events.RoomFailed, request_id="a", generation=0, cause="nobody", settled=True)
    rig.fetched(rig.take(commands.FetchPages))
    copy = rig.take(commands.CopyPages)
    return lambda rig: rig.copied(copy)


def recomputed(rig: Rig, state: State, error: str = "") -> Stimulus:
    in_room(rig, State.TRANSFER, can_recompute=True)
    rig.step(events.WriterLost, writer="prefill.1", cause="silence")
    op = rig.take(commands.Recompute).op
    return lambda rig: rig.step(events.Recomputed, op=op, error=error)


def short_rest_failed(rig: Rig, state: State) -> Stimulus:
    rig.arrive("a", b"abcdefgh", can_recompute=True)
    op = rig.take(commands.Recompute).op
    return lambda rig: rig.step(events.Recomputed, op=op, error="no")


def deadline(rig: Rig, state: State) -> Stimulus:
    rig.bring(state, deadline_at_s=0.5)
    return lambda rig: rig.wait_until(0.5)


def abort(rig: Rig, state: State) -> Stimulus:
    rig.bring(state)
    return lambda rig: rig.abort("a")


def growth(rig: Rig, state: State) -> Stimulus:
    rig.bring(state)
    return lambda rig: rig.step(events.GrowthTaken, request_id="a", page_count=0, wanted=2)


def change(rig: Rig, state: State) -> Stimulus:
    rig.bring(state)

    def change_and_go_on(rig: Rig) -> None:
        rig.step(events.RequestChanged, request_id="a", priority=1, deadline_at_s=1000.0)
        request = rig.core.request("a")
        if request is not None and request.state is State.MATCH:
            rig.leave_match("a")

    return change_and_go_on


def finish(rig: Rig, state: State) -> Stimulus:
    rig.bring(state)
    return lambda rig: rig.finish("a", EIGHT)


def retract(rig: Rig, state: State) -> Stimulus:
    rig.bring(state)
    return lambda rig: rig.step(events.RetractRequested, request_id="a", keys=EIGHT, tokens=8)


def stimulus_of(row: Row, rig: Rig, state: State) -> Stimulus:
    match row.before and function_of(row, "before").__name__, row.only_if and row.only_if.__name__:
        case "try_next_prefill", _:
            return lost_prefill(rig, state, prefill_count=2)
        case "ask_caller", _:
            return lost_prefill(rig, state, can_recompute=True)
        case "ask_prefill", _:
            return short_rest_failed(rig, state)
        case "wait_for_tiers" | "end_without_tiers", _:
            return left_to_tiers(rig, state)
        case "ask_tiers_again", _:
            return part_of_tiers(rig, State.LOCAL_RESTORE)
        case "fail_by_recompute", _:
            return recomputed(rig, state, error="no")
        case _, "waits_for_copies":
            return plan(rig, state, found=0)
        case _, "is_planned":
            return answer(rig, state)
    by_event: dict[type[events.Event], Callable[[Rig, State], Stimulus]] = {
        events.StorageDue: arrival,
        events.PlanDue: plan,
        events.Progressed: progress,
        events.PromiseSent: frames,
        events.ChunkReceived: frames,
        events.AuxReceived: frames,
        events.PagesLost: pages_lost,
        events.PrefillLost: lost_prefill,
        events.DeadlinePassed: deadline,
        events.AbortRequested: abort,
        events.RequestChanged: change,
        events.GrowthTaken: growth,
        events.FinishRequested: finish,
        events.RetractRequested: retract,
    }
    return by_event[row.event](rig, state)


def settle(rig: Rig) -> list[commands.Command]:
    """What is reported to callers in the end; a caller that is asked to compute does."""
    told: list[commands.Command] = []
    while rig.pending:
        for wish in rig.settle():
            if isinstance(wish, commands.Recompute):
                rig.step(events.Recomputed, op=wish.op)
            else:
                told.append(wish)
    return told


def ends(told: list[commands.Command]) -> list[tuple[str, str]]:
    kinds = (commands.ReportReady, commands.ReportFailed, commands.ReportFinished, commands.ReportRetracted,
             commands.ReportRestored, commands.ReportDropped)  # fmt: skip
    return [
        (type(wish).__name__, getattr(wish, "cause", ""))
        for wish in told
        if isinstance(wish, kinds) and wish.request_id == "a"
    ]


PLACES = [
    pytest.param(row, part, state, id=f"{state.value}-{row.event.__name__}-{function_of(row, part).__name__}-{number}")
    for number, row in enumerate(TRANSITIONS)
    for part in ("only_if", "before")
    if getattr(row, part) is not None and row.event is not events.TransitionRaised
    for state in row.source
]


def play(row: Row, part: str, state: State, times: int) -> tuple[Plant, Rig, list[commands.Command], list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        plant = Plant(patch, row, part, state)
        lends = row.only_if is has_filled_lent_pages or (part == "before" and row.only_if is fills_lent_pages)
        lends = lends or row.only_if in WITHOUT_PREFILL
        threshold = 8 if row.only_if is has_failed_short else 0
        host_pages = 2 if row.only_if is has_more_in_tiers else 32
        rig = Rig(
            growth_reserve_pages=0 if lends else 1,
            lends_device=lends,
            recompute_threshold=threshold,
            host_pages=host_pages,
        )
        noted: list[Any] = []
        original = CoreState.note_raise

        def note_raise(self: CoreState, request: Request | None = None) -> Any:
            noted.append(original(self, request))
            return noted[-1]

        patch.setattr(CoreState, "note_raise", note_raise)
        stimulus = stimulus_of(row, rig, state)
        rig.settle() if state is State.READY else None
        plant.left = times
        pending, rig.pending = rig.pending, []
        stimulus(rig) if stimulus is not Rig.settle else None
        rig.pending = pending + rig.pending
        told = settle(rig)
        if rig.core.request("big") is not None:
            rig.abort("big")
            told += settle(rig)
    return plant, rig, told, noted


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(("row", "part", "state"), PLACES)
def test_a_raise_costs_a_tier_and_fails_the_request_only_if_the_same_step_raises_again(
    row: Row, part: str, state: State, times: int
) -> None:
    _, _, told_without, _ = play(row, part, state, 0)
    plant, rig, told, noted = play(row, part, state, times)
    assert plant.raised, "the scenario does not reach the place"
    assert [raised.error for raised in noted] == ["ZeroDivisionError: planted"] * plant.raised
    assert all(raised.request_id == "a" and "Traceback" in raised.detail for raised in noted)
    assert rig.core.statistics()["transitions_raised"] == plant.raised
    spare = 2 if state in TWO_TIERS_TO_CUT else 1
    if plant.raised <= spare:
        assert ends(told) == ends(told_without)
        for wish in told:
            kinds = commands.ReportReady | commands.ReportFinished | commands.ReportRestored | commands.ReportRetracted
            is_end = isinstance(wish, kinds)
            if is_end and wish.request_id == "a":
                assert [fallback.error for fallback in wish.fallbacks] == [r.error for r in noted]
                assert {fallback.gave_up for fallback in wish.fallbacks} <= set(commands.FALLBACKS)
    else:
        assert ends(told)[-1] == ("ReportFailed", "internal error")
    if rig.core.request("a") is not None:
        rig.abort("a")
    rig.step(events.RetractedDropped, request_id="a")
    settle(rig)
    rig.expect_nothing_held()
