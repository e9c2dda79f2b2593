"""A seed that fails becomes a small run that fails in the same way, and a journal that shows it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from simulation import SimulationFailed, simulate
from simulation.smallest import find_smallest
from tidekv import Replayer
from tidekv.states.errors import InvalidRequest
from tidekv.states.events import FinishRequested, Progressed
from tidekv.states.records.request import Load, Request
from tidekv.states.request.ready import Serving
from tidekv.states.request.restore import Restore


def test_a_core_that_raises_is_shown_by_few_requests_and_events(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A page that its request still has is given back: the pool refuses it the second time."""
    finish = Serving.finish

    def too_early(self: Serving, request: Request, event: FinishRequested) -> None:
        if request.held.reserve:
            self._state.device.give_back(request.held.reserve[:1])
        finish(self, request, event)

    monkeypatch.setattr(Serving, "finish", too_early)
    smallest = find_smallest(6, 120, "all", tmp_path / "small.journal", ranks=1, lends=False)
    assert smallest.what.startswith("BrokenInvariant: pool 'device'")
    assert smallest.requests < 30
    assert smallest.events < 20
    steps = list(Replayer(smallest.journal).steps())
    assert len(steps) == smallest.events
    assert steps[-1].error == "BrokenInvariant"


def test_what_an_audit_finds_is_shown_by_fewer_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Load, "unlock", lambda self, index: setattr(self, "lock", None))
    smallest = find_smallest(6, 120, "all", tmp_path / "small.journal", ranks=1, lends=False)
    assert "counts other device receipts than are held" in smallest.what
    assert smallest.requests < 120
    assert smallest.without
    assert len(list(Replayer(smallest.journal).steps())) == smallest.events


def test_what_only_the_world_sees_is_shown_by_its_command_and_journal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The core forgets to give back what a prompt has twice: it raises nothing, and the world counts."""
    commit = Restore.commit

    def forgetful(self: Restore, request: Request, event: Progressed) -> None:
        commit(self, request, event)
        request.held.own = request.held.own[:-1]

    monkeypatch.setattr(Restore, "commit", forgetful)
    smallest = find_smallest(4, 80, "all", tmp_path / "small.journal", ranks=1, lends=False)
    assert smallest.requests < 80
    words = shlex.split(smallest.command)
    assert words[:2] == ["tidekv", "simulate"]
    words.remove("--owned")
    given = dict(zip(words[2::2], words[3::2], strict=True))
    without = given.get("--without", "").split(",") if "--without" in given else []
    with pytest.raises(SimulationFailed) as again:
        simulate(int(given["--seed"]), int(given["--requests"]), "all", without=without, always_components=True)
    assert again.value.what == smallest.what
    assert len(list(Replayer(smallest.journal).steps())) == smallest.events


def test_a_kind_that_is_left_out_changes_nothing_before_it_would_have_struck() -> None:
    with_it = simulate(5, 60)
    struck = next(name for name, count in with_it.faults.items() if count)
    idle = next(name for name, count in with_it.faults.items() if not count)
    assert simulate(5, 60, without=[idle]).digest == with_it.digest
    without_it = simulate(5, 60, without=[struck])
    assert without_it.faults[struck] == 0
    assert without_it.digest != with_it.digest


def test_a_run_that_does_not_fail_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not fail"):
        find_smallest(1, 10, "none", tmp_path / "small.journal", ranks=1, lends=False)
    assert not list(tmp_path.iterdir())
