"""The driver: one consumer, turns with an end, errors that stop it loudly or change nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import get_args
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.engine.decode import driver as driver_module
from tidekv.engine.decode.driver import CALLS, Driver
from tidekv.states import commands, events
from tidekv.states.commands import Command
from tidekv.states.errors import IllegalEvent
from tidekv.states.events import Event
from tidekv.states.types import page_ids


@pytest.fixture(autouse=True)
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn ends where a test says so, however slow the machine is."""
    monkeypatch.setattr(driver_module, "TURN_S_MAX", 60.0)


def flush(call: int) -> events.FlushRequested:
    return events.FlushRequested(at_s=0.0, call=call, tiers=())


def probed(op: int) -> events.StorageProbed:
    return events.StorageProbed(at_s=0.0, op=op)


def abort(number: int) -> events.AbortRequested:
    return events.AbortRequested(at_s=0.0, request_id=str(number))


def number_of(event: Event) -> int:
    """The number of an event that was made here."""
    if isinstance(event, events.AbortRequested):
        return int(event.request_id)
    assert isinstance(event, events.FlushRequested | events.StorageProbed)
    return event.op if isinstance(event, events.StorageProbed) else event.call


class ScriptedCore:
    """Answers event number n by forgetting the tokens of n; raises for the numbers in `raises`."""

    def __init__(self, raises: dict[int, BaseException] | None = None) -> None:
        self.raises = raises or {}
        self.taken: list[int] = []
        self.due_s: float | None = None

    def step(self, event: Event) -> list[Command]:
        number = number_of(event)
        if number in self.raises:
            raise self.raises[number]
        self.taken.append(number)
        return [commands.ForgetTokens(request_number=number)]

    def next_deadline_s(self) -> float | None:
        return self.due_s


class Watcher:
    """Records the steps it is called with."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, str]] = []

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        self.told.append((number_of(event), len(given), error))


class Rig:
    def __init__(
        self, core: ScriptedCore, perform: Callable[[Command], None] | None = None, *, is_agreed: bool = False
    ) -> None:
        self.core, self.watcher = core, Watcher()
        self.performed: list[Command] = []
        self.broken: list[BaseException] = []
        self.drains = 0
        self.driver = Driver(
            core,  # type: ignore[arg-type]  # It has what the driver asks of a core.
            perform or self.performed.append,
            watchers=[self.watcher],
            on_broken=self.broken.append,
            after_drain=self._after_drain,
            is_agreed=is_agreed,
        )

    def _after_drain(self) -> None:
        self.drains += 1

    async def caught_up(self) -> None:
        for _ in range(1000):
            if self.driver.is_caught_up:
                return
            await asyncio.sleep(0)
        raise AssertionError("events are left that nobody takes")


async def test_an_event_that_the_core_refuses_is_told_and_the_next_one_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(ScriptedCore({2: IllegalEvent("no such row")}))
    with caplog.at_level(logging.ERROR, logger="tidekv.engine"):
        for call in (1, 2, 3):
            rig.driver.post(flush(call))
        await rig.caught_up()
    assert rig.core.taken == [1, 3]
    assert rig.watcher.told == [(1, 1, ""), (2, 0, "IllegalEvent"), (3, 1, "")]
    assert (rig.driver.illegal_events, rig.driver.last_illegal) == (1, "no such row")
    assert "the core refused an event, and changed nothing: " in caplog.text and "no such row" in caplog.text
    assert (rig.driver.events_taken, rig.broken) == (3, [])
    rig.driver.stop()


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), KeyboardInterrupt()], ids=repr)
async def test_a_core_that_breaks_is_stepped_no_more_and_everybody_hears_of_it(error: BaseException) -> None:
    rig = Rig(ScriptedCore({2: error}))
    for call in (1, 2, 3):
        rig.driver.post(flush(call))
    await rig.caught_up()
    assert rig.core.taken == [1]
    assert rig.watcher.told == [(1, 1, ""), (2, 0, type(error).__name__)]
    assert rig.broken == [error]
    assert rig.drains == 1
    rig.driver.post(flush(4))
    rig.driver.take_now(flush(5))
    assert rig.core.taken == [1]


async def test_a_command_that_cannot_be_performed_breaks_the_driver_before_the_next_event() -> None:
    raised = ZeroDivisionError("of an effect")

    def perform(command: Command) -> None:
        raise raised

    rig = Rig(ScriptedCore(), perform)
    rig.driver.post(flush(1))
    rig.driver.post(flush(2))
    await rig.caught_up()
    assert (rig.core.taken, rig.broken) == ([1], [raised])


async def test_others_run_between_turns_and_the_order_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "TURN_S_MAX", -1.0)
    rig = Rig(ScriptedCore())
    seen: list[int] = []
    for call in range(5):
        rig.driver.post(flush(call))
    for _ in range(5):
        await asyncio.sleep(0)
        seen.append(len(rig.core.taken))
    assert seen == [1, 2, 3, 4, 5]
    assert rig.core.taken == list(range(5))
    assert rig.drains == 5
    rig.driver.stop()


@pytest.mark.parametrize(("is_agreed", "order"), [(False, [2, 4, 1, 3]), (True, [1, 2, 3, 4])])
async def test_what_has_completed_goes_before_calls_unless_the_ranks_have_agreed_on_an_order(
    is_agreed: bool, order: list[int]
) -> None:
    rig = Rig(ScriptedCore(), is_agreed=is_agreed)
    for event in (flush(1), probed(2), flush(3), probed(4)):
        rig.driver.post(event)
    await rig.caught_up()
    assert rig.core.taken == order
    assert [call for call, _, _ in rig.watcher.told] == order
    rig.driver.stop()


async def test_nothing_that_comes_behind_an_abort_is_taken_before_it() -> None:
    rig = Rig(ScriptedCore())
    for event in (flush(1), probed(2), abort(3), probed(4), flush(5), probed(6)):
        rig.driver.post(event)
    await rig.caught_up()
    assert rig.core.taken == [2, 1, 3, 4, 5, 6]
    for event in (flush(7), probed(8)):
        rig.driver.post(event)
    await rig.caught_up()
    assert rig.core.taken[-2:] == [8, 7]
    rig.driver.stop()


async def test_completions_stay_in_order_while_what_waited_behind_an_abort_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "TURN_S_MAX", -1.0)
    rig = Rig(ScriptedCore())
    for event in (abort(1), flush(2), probed(3)):
        rig.driver.post(event)
    await asyncio.sleep(0)
    assert rig.core.taken == [1]
    rig.driver.post(probed(4))
    await rig.caught_up()
    assert rig.core.taken == [1, 2, 3, 4]
    rig.driver.stop()


@given(kinds=st.lists(st.sampled_from((flush, flush, probed, probed, abort, None)), max_size=30))
def test_calls_and_completions_are_each_taken_in_order_and_aborts_when_they_came(
    kinds: list[Callable[[int], Event] | None],
) -> None:
    async def taken() -> tuple[list[Event], list[int]]:
        with mock.patch.object(driver_module, "TURN_S_MAX", -1.0):
            rig = Rig(ScriptedCore())
            posted = [kind(number) if kind else None for number, kind in enumerate(kinds)]
            for event in posted:
                if event is None:
                    await asyncio.sleep(0)
                else:
                    rig.driver.post(event)
            await rig.caught_up()
            rig.driver.stop()
        return [event for event in posted if event is not None], rig.core.taken

    posted, order = asyncio.run(taken())
    assert sorted(order) == [number_of(event) for event in posted]
    done = {number_of(event) for event in posted if isinstance(event, events.StorageProbed)}
    asked = {number_of(event) for event in posted} - done
    for some in (done, asked):
        assert [number for number in order if number in some] == sorted(some)
    for event in posted:
        if isinstance(event, events.AbortRequested):
            before = order[: order.index(number_of(event))]
            assert sorted(before) == [number for number in sorted(order) if number < number_of(event)]


async def test_what_completes_while_a_call_is_performed_goes_before_the_next_call() -> None:
    rig = Rig(ScriptedCore(), lambda command: rig.driver.post(probed(7)) if rig.core.taken == [1] else None)
    rig.driver.post(flush(1))
    rig.driver.post(flush(2))
    await rig.caught_up()
    assert rig.core.taken == [1, 7, 2]
    rig.driver.stop()


async def test_every_kind_of_event_is_a_call_or_an_outcome() -> None:
    """A new kind of call that is not named would overtake what was asked before it."""
    asked = {kind for kind in get_args(events.AnyEvent) if kind.__name__.endswith(("Requested", "Dropped", "Arrived"))}
    assert asked < CALLS < set(get_args(events.AnyEvent))


async def test_what_is_taken_now_comes_behind_all_that_was_posted_and_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "TURN_S_MAX", -1.0)
    rig = Rig(ScriptedCore())
    rig.driver.post(flush(1))
    rig.driver.post(flush(2))
    rig.driver.post(probed(3))
    rig.driver.take_now(flush(4))
    assert rig.core.taken == [3, 1, 2, 4]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rig.core.taken == [3, 1, 2, 4]
    rig.driver.stop()


async def test_what_is_taken_now_until_the_loop_goes_on_is_one_turn() -> None:
    rig = Rig(ScriptedCore())
    for call in (1, 2, 3):
        rig.driver.take_now(flush(call))
    assert (rig.core.taken, rig.drains) == ([1, 2, 3], 0)
    await asyncio.sleep(0)
    assert rig.drains == 1
    rig.driver.take_now(flush(4))
    rig.driver.post(flush(5))
    await asyncio.sleep(0)
    assert (rig.core.taken, rig.drains) == ([1, 2, 3, 4, 5], 2)
    rig.driver.take_now(flush(6))
    rig.driver.stop()
    await asyncio.sleep(0)
    assert rig.drains == 2


async def test_the_core_is_stepped_neither_from_within_a_step_nor_from_another_thread() -> None:
    def perform(command: Command) -> None:
        rig.driver.take_now(flush(9))

    rig = Rig(ScriptedCore(), perform)
    rig.driver.post(flush(1))
    await rig.caught_up()
    (broken,) = rig.broken
    assert "not stepped from within a step" in str(broken)
    other = Rig(ScriptedCore())
    raised: list[BaseException] = []

    def post() -> None:
        try:
            other.driver.post(flush(1))
        except AssertionError as error:
            raised.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len(raised) == 1
    assert other.driver.is_caught_up


class ReadyCore(ScriptedCore):
    """Makes request n READY on the flush numbered n, and has more to do."""

    def step(self, event: Event) -> list[Command]:
        given = super().step(event)
        assert isinstance(event, events.FlushRequested)
        return [*given, ready(event.call), commands.ForgetTokens(request_number=-event.call)]


def ready(call: int) -> commands.ReportReady:
    return commands.ReportReady(
        request_id=f"r{call}", generation=1, pages=page_ids(), sources={}, reserve=page_ids(), component_pages=None
    )


def ready_rig(happened: list[str], raised: BaseException | None = None) -> Rig:
    """Records the commands performed, and what a caller that waits for readiness does."""

    def perform(command: Command) -> None:
        happened.append(type(command).__name__)
        if isinstance(command, commands.ReportReady):
            asyncio.get_running_loop().call_soon(happened.append, f"caller of {command.request_id}")
            if raised is not None:
                raise raised

    return Rig(ReadyCore(), perform)


STEP = ["ReportReady", "ForgetTokens", "ForgetTokens"]


async def test_who_is_ready_runs_before_the_rest_of_the_step_and_that_before_the_next_one() -> None:
    happened: list[str] = []
    rig = ready_rig(happened)
    rig.driver.post(flush(1))
    rig.driver.post(flush(2))
    await asyncio.sleep(0)
    assert (rig.core.taken, happened, rig.watcher.told) == ([1], STEP[:1], [])
    assert not rig.driver.is_caught_up
    await asyncio.sleep(0)
    assert (rig.core.taken, rig.watcher.told) == ([1, 2], [(1, 3, "")])
    await rig.caught_up()
    assert happened == ["ReportReady", "caller of r1", *STEP[1:], "ReportReady", "caller of r2", *STEP[1:]]
    assert rig.watcher.told == [(1, 3, ""), (2, 3, "")]
    rig.driver.stop()


async def test_what_is_taken_now_comes_behind_what_the_last_step_owes() -> None:
    happened: list[str] = []
    rig = ready_rig(happened)
    rig.driver.post(flush(1))
    await asyncio.sleep(0)
    rig.driver.take_now(flush(2))
    assert happened == [*STEP, *STEP]
    assert rig.watcher.told == [(1, 3, ""), (2, 3, "")]
    assert rig.driver.is_caught_up
    rig.driver.stop()


async def test_a_driver_that_stops_tells_of_the_last_step_and_starts_nothing_more() -> None:
    happened: list[str] = []
    rig = ready_rig(happened)
    rig.driver.post(flush(1))
    await asyncio.sleep(0)
    rig.driver.stop()
    assert (happened, rig.watcher.told) == (STEP[:1], [(1, 3, "")])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert happened == [*STEP[:1], "caller of r1"]


async def test_a_caller_that_cannot_be_told_breaks_the_driver_and_the_step_is_known() -> None:
    raised = ZeroDivisionError("of a caller")
    rig = ready_rig([], raised)
    rig.driver.post(flush(1))
    await rig.caught_up()
    assert (rig.broken, rig.watcher.told) == ([raised], [(1, 3, "")])
