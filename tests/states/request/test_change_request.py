"""Another priority or deadline of a request that waits."""

from __future__ import annotations

import pytest

from simulation.rig import Rig
from tests.support.rigs import planned
from tidekv.states import commands, events
from tidekv.states.records.stages import State
from tidekv.states.request.admission_queue import Queue


def full_rig() -> Rig:
    """A device that one request fills, and two that wait in order of arrival."""
    rig = Rig()
    rig.make_ready("big", bytes(range(100, 100 + rig.settings.device_pages)), cache=False)
    rig.arrive("first", b"abcdef")
    rig.arrive("second", b"stuvwx")
    return rig


def test_a_higher_priority_passes_those_that_came_before() -> None:
    rig = full_rig()
    rig.step(events.RequestChanged, request_id="second", priority=1)
    rig.core.check()
    rig.abort("big")
    assert planned(rig)[0] == "second"


def test_a_priority_taken_back_is_the_place_of_its_arrival() -> None:
    rig = full_rig()
    rig.step(events.RequestChanged, request_id="second", priority=5)
    rig.step(events.RequestChanged, request_id="second", priority=0)
    rig.step(events.RequestChanged, request_id="first", deadline_at_s=50.0)
    rig.abort("big")
    assert planned(rig)[0] == "first"


def test_a_nearer_deadline_ends_the_wait_and_a_later_one_prolongs_it() -> None:
    rig = Rig()
    rig.make_ready("big", bytes(range(100, 100 + rig.settings.device_pages)), cache=False)
    rig.arrive("shorter", b"abcdef", deadline_at_s=100.0)
    rig.arrive("longer", b"stuvwx", deadline_at_s=2.0)
    rig.step(events.RequestChanged, request_id="shorter", deadline_at_s=1.0)
    rig.step(events.RequestChanged, request_id="longer", deadline_at_s=3.0)
    rig.wait_until(1.0)
    failed = rig.take(commands.ReportFailed)
    assert (failed.request_id, failed.cause) == ("shorter", "deadline")
    rig.wait_until(2.5)
    assert rig.state("longer") == "PREALLOC"
    rig.wait_until(3.0)
    assert rig.take(commands.ReportFailed).request_id == "longer"


@pytest.mark.parametrize("state", [State.PREFETCH, State.LOCAL_RESTORE, State.TRANSFER], ids=lambda state: state.value)
def test_a_deadline_may_change_until_ready(state: State) -> None:
    rig = Rig()
    rig.bring(state, deadline_at_s=0.5)
    rig.step(events.RequestChanged, request_id="a", deadline_at_s=0.6, priority=3)
    rig.wait_until(0.55)
    assert rig.state("a") == state.value
    rig.wait_until(0.6)
    assert rig.take(commands.ReportFailed).cause == "deadline"


def test_a_ready_request_has_no_use_for_either() -> None:
    rig = Rig()
    rig.make_ready("a", b"abcd")
    rig.step(events.RequestChanged, request_id="a", deadline_at_s=0.0, priority=3)
    rig.step(events.RequestChanged, request_id="nobody", priority=3)
    rig.wait_until(1.0)
    assert rig.state("a") == "READY"
    assert rig.core.statistics()["calls_late"] == 1


def test_a_change_that_raises_once_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = full_rig()
    add, left = Queue.add, [1]

    def add_or_raise(queue: Queue, request: object) -> None:
        if left:
            left.pop()
            raise ZeroDivisionError("planted")
        add(queue, request)  # type: ignore[arg-type]  # A request.

    monkeypatch.setattr(Queue, "add", add_or_raise)
    rig.step(events.RequestChanged, request_id="second", priority=1)
    assert not left
    rig.core.check()
    rig.abort("big")
    assert planned(rig)[0] == "second"
