"""Operations: the core pops and calls them, and a raise of theirs ends nothing but the operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.rig import Rig
from tests.support.each_call import raised_at_each_call
from tidekv.states import commands, events
from tidekv.states.core import CONSEQUENCES
from tidekv.states.errors import BrokenInvariant
from tidekv.states.storage.admission import StorageAdmission


class Recorder:
    """An operation that records the calls of the core, and raises in the first ones."""

    def __init__(self, *raises: Exception) -> None:
        self.calls: list[object] = []
        self._raises = list(raises)

    def _note(self, call: object) -> None:
        self.calls.append(call)
        if self._raises:
            raise self._raises.pop(0)

    def ended(self, event: events.Outcome, error: str) -> None:
        self._note(("ended", error))

    def late(self) -> None:
        self._note("late")

    def abandon(self) -> None:
        self._note("abandon")


def test_an_outcome_ends_its_operation_once() -> None:
    rig, operation = Rig(), Recorder()
    op = rig.core.state.start_operation(operation, deadline_s=1.0)
    rig.core.step(events.CopyEnded(at_s=0.0, op=op, error="broken"))
    rig.core.step(events.CopyEnded(at_s=0.0, op=op))
    assert operation.calls == [("ended", "broken")]
    assert rig.core.statistics()["outcomes_late"] == 1
    assert rig.core.next_deadline_s() is None


def test_a_command_that_raised_ends_its_operation_with_the_traceback_as_error() -> None:
    rig, operation = Rig(), Recorder()
    op = rig.core.state.start_operation(operation, deadline_s=1.0)
    rig.core.step(events.CommandRaised(at_s=0.0, op=op, detail="traceback"))
    assert operation.calls == [("ended", "traceback")]


def test_an_operation_whose_end_raises_is_abandoned() -> None:
    rig, operation = Rig(), Recorder(RuntimeError("a bug"))
    op = rig.core.state.start_operation(operation, deadline_s=1.0)
    rig.core.step(events.CopyEnded(at_s=0.0, op=op))
    assert operation.calls == [("ended", ""), "abandon"]
    assert rig.core.statistics()["transitions_raised"] == 1


def test_an_operation_is_late_once_and_once_more_if_that_raises() -> None:
    rig, operation = Rig(), Recorder(RuntimeError("a bug"))
    rig.core.state.start_operation(operation, deadline_s=1.0)
    rig.core.step(events.ClockAdvanced(at_s=0.5))
    assert operation.calls == []
    rig.core.step(events.ClockAdvanced(at_s=1.0))
    rig.core.step(events.ClockAdvanced(at_s=2.0))
    assert operation.calls == ["late", "late"]


def test_a_broken_invariant_leaves_the_step_and_abandons_nothing() -> None:
    rig, operation = Rig(), Recorder(BrokenInvariant("pages"))
    op = rig.core.state.start_operation(operation, deadline_s=1.0)
    with pytest.raises(BrokenInvariant):
        rig.core.step(events.CopyEnded(at_s=0.0, op=op))
    assert operation.calls == [("ended", "")]


def test_the_answer_to_a_probe_is_taken_again_if_taking_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(breaker_failures=1)
    rig.attach_storage()
    rig.arrive("a", b"abcd")
    rig.answer(rig.take(commands.QueryStorage), 0, error="out of order")
    rig.wait_until(rig.core.next_deadline_s() or 0.0)
    probed, raised = StorageAdmission.probed, [RuntimeError("a bug")]

    def probed_with_a_bug(self: StorageAdmission, error: str) -> None:
        if raised:
            raise raised.pop()
        probed(self, error)

    monkeypatch.setattr(StorageAdmission, "probed", probed_with_a_bug)
    rig.step(events.StorageProbed, op=rig.take(commands.ProbeStorage).op)
    assert not raised and not rig.core.storage.is_open


def test_storage_is_probed_whichever_call_raises_at_the_end_of_the_back_off() -> None:
    def prepare() -> tuple[Rig, Callable[[], object]]:
        rig = Rig(breaker_failures=1)
        rig.attach_storage()
        rig.arrive("a", b"abcd")
        rig.answer(rig.take(commands.QueryStorage), 0, error="out of order")
        rig.settle()
        return rig, lambda: rig.wait_until(rig.core.next_deadline_s() or 0.0)

    for call, rig in raised_at_each_call(prepare):
        rig.wait_until(rig.now_s + 60.0)
        probes = rig.take_all(commands.ProbeStorage)
        assert len(probes) == 1, call
        rig.step(events.StorageProbed, op=probes[0].op)
        assert not rig.core.storage.is_open, call


def test_another_storage_begins_without_the_failures_of_the_last() -> None:
    def fail(name: str) -> None:
        rig.arrive(name, name.encode() * 4)
        rig.answer(rig.take(commands.QueryStorage), 0, error="out of order")
        rig.abort(name)
        rig.settle()

    for failures in (1, 2):
        rig = Rig(breaker_failures=2)
        rig.attach_storage()
        for number in range(failures):
            fail(f"{number}")
        assert rig.core.storage.is_open == (failures == 2)
        rig.attach_storage()
        assert not rig.core.storage.is_open
        fail("c")
        assert not rig.core.storage.is_open
        fail("d")
        assert rig.core.storage.is_open


def test_the_consequences_are_in_words() -> None:
    assert all(consequence.when and consequence.rule.__doc__ for consequence in CONSEQUENCES)
