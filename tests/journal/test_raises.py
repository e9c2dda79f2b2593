"""Raises of rules are facts: a replay raises at the same place and goes on, distinct from damage and changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from simulation.rig import Rig
from simulation.simulate import draw_settings, with_components
from tests.support.each_call import raised_at_each_call
from tests.support.raise_stories import STORIES
from tidekv import JournalDamaged, ReplayDiverged, Replayer
from tidekv.engine.journal import Recorder
from tidekv.engine.journal.digest import StepDigest, final_state
from tidekv.engine.journal.format import SUFFIX_BYTES, TurnLine, write_lines
from tidekv.engine.journal.reader import JournalReader
from tidekv.states import commands, events
from tidekv.states.backup.backups import Backups
from tidekv.states.commands import Command
from tidekv.states.handover.rooms import Rooms
from tidekv.states.loads.loads import Loads
from tidekv.states.request.restore import Restore


class Tape:
    """Records a rig's core to a file, each event as a turn."""

    def __init__(self, rig: Rig, path: Path) -> None:
        self.path = path
        self._core = rig.core
        self._recorder = Recorder(rig.core)
        self._lines = [self._recorder.run_line()]
        self._step, rig.core.step = rig.core.step, self.step  # type: ignore[method-assign]  # What it records.

    def step(self, event: events.Event) -> list[Command]:
        given = self._step(event)
        self._recorder.stepped(event, given)
        turn = self._recorder.end_turn()
        assert turn is not None
        self._lines.append(self._recorder.render(turn))
        return given

    def end(self) -> Path:
        write_lines(self.path, [*self._lines, self._recorder.end_line()])
        return self.path


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_raise_at_any_call_is_replayed_at_that_call(story: Any, tmp_path: Path) -> None:
    tapes: list[Tape] = []

    def prepare() -> tuple[Rig, Callable[[], object]]:
        rig = Rig(growth_reserve_pages=1)
        tapes.append(Tape(rig, tmp_path / "j"))
        step = story.prepare(rig)
        return rig, lambda: step(rig)

    for call, rig in raised_at_each_call(prepare):
        rig.settle()
        replayer = Replayer(tapes[-1].end())
        replayed = replayer.run()
        assert replayed.complete, call
        assert replayed.raises == rig.core.state.counters.get("transitions_raised", 0), call
        assert final_state(replayer.core) == final_state(rig.core)


RAISING: list[bytes] = []
"""The journal that `raising_run` has found."""


@pytest.fixture
def raising_run(simulate: Any, tmp_path: Path) -> Path:
    """The journal of a run with components and some raises, which a test may change."""
    for seed in range(7, 27) if not RAISING else ():
        path: Path = simulate(seed, 60, settings=with_components(draw_settings(Random(seed)), 3)).path
        if len(raises_of(path)) > 2:
            RAISING.append(path.read_bytes())
            break
    assert RAISING, "no seed has raises"
    journal = tmp_path / "raising.journal"
    journal.write_bytes(RAISING[0])
    return journal


def raises_of(path: Path) -> list[Any]:
    return [raised for line in JournalReader(path).lines() if isinstance(line, TurnLine) for raised in line.raises]


def test_a_journal_with_raises_replays_to_its_end_and_names_rule_exception_and_traceback(raising_run: Path) -> None:
    raises = raises_of(raising_run)
    replayed = Replayer(raising_run).run()
    assert (replayed.complete, replayed.raises) == (True, len(raises))
    assert len(raises) > 2
    for raised in raises:
        assert raised.error == "simulation.raising.Injected"
        assert f"Injected: {raised.text}" in raised.traceback
        assert raised.stack[0].function == "Core.step"
        assert raised.rule


def test_damage_of_a_raise_is_damage_and_not_another_decision(raising_run: Path, tmp_path: Path) -> None:
    content = raising_run.read_bytes()
    at = content.index(b'"raises":[{') + 30
    broken = tmp_path / "broken"
    broken.write_bytes(content[:at] + bytes((content[at] ^ 1,)) + content[at + 1 :])
    with pytest.raises(JournalDamaged) as damaged:
        Replayer(broken).run()
    assert damaged.value.line == content[:at].count(b"\n") + 1


def test_a_changed_rule_diverges_in_a_journal_with_raises(raising_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = raises_of(raising_run)[0]
    leave = Rooms.leave
    monkeypatch.setattr(Rooms, "leave", lambda self, room, *, settled: leave(self, room, settled=True))
    with pytest.raises(ReplayDiverged) as diverged:
        Replayer(raising_run).run()
    decisions = {"effects", "index", "device pool", "host pool"}
    assert set(diverged.value.parts) & decisions
    assert set(diverged.value.parts) <= {*decisions, "raises"}  # The changed rule is another function on the stack.
    assert diverged.value.turn >= 0 and first


def forge(path: Path, change: Callable[[Any], None]) -> None:
    """Change the first turn with raises, and seal the journal again."""
    lines = [line[:-SUFFIX_BYTES] + b"}" for line in path.read_bytes().splitlines()]
    at = next(at for at, line in enumerate(lines) if b'"raises":[' in line)
    turn = msgspec.json.decode(lines[at])
    change(turn)
    lines[at] = msgspec.json.encode(turn)
    write_lines(path, lines)


def test_a_raise_whose_place_is_not_reached_is_a_divergence_in_raises(raising_run: Path) -> None:
    # As by other code, in which that place is gone.
    forge(raising_run, lambda turn: turn["raises"][0]["stack"][-1].__setitem__(1, 9999))
    with pytest.raises(ReplayDiverged) as diverged:
        Replayer(raising_run).run()
    assert "raises" in diverged.value.parts
    assert "Injected in" in diverged.value.recorded and "raises: none" in diverged.value.replayed


def test_a_raise_that_the_journal_does_not_have_is_a_divergence_in_raises(
    simulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = simulate(1, 20, faults="none").path

    def broken(self: Restore, *given: Any) -> None:
        raise ZeroDivisionError("a bug of today")

    monkeypatch.setattr(Restore, "fix_plan", broken)
    with pytest.raises(ReplayDiverged) as diverged:
        Replayer(path).run()
    assert diverged.value.parts[0] == "raises"
    assert "ZeroDivisionError in " in diverged.value.replayed


def test_a_defect_that_raises_in_the_replay_too_replays(simulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, stored = Loads.fetched, Backups.stored

    def broken_fetch(self: Loads, load: Any, good: int) -> None:
        if load.first % 3 == 1:
            raise KeyError(load.first)
        fetched(self, load, good)

    def broken_store(self: Backups, backup: Any, count: int) -> None:
        if backup.request_number % 5 == 2:
            raise KeyError(backup.request_number)
        stored(self, backup, count)

    monkeypatch.setattr(Loads, "fetched", broken_fetch)
    monkeypatch.setattr(Backups, "stored", broken_store)
    for seed in range(4):
        path = simulate(seed, 60, faults="none").path
        raises = raises_of(path)
        if raises:
            assert Replayer(path).run().complete
            return
    pytest.fail("no seed has shown the defect")


def test_each_raise_of_one_step_is_replayed(play: Any) -> None:
    """The third raise of a request fails it: none of them may be missing, nor come at another place."""
    fix_plan, raised = Restore.fix_plan, list[int]()

    def thrice(self: Restore, *given: Any) -> None:
        if not play.tape.has_ended and len(raised) < 3:
            raised.append(1)
            raise OSError("from outside")
        fix_plan(self, *given)

    play.patch(Restore, "fix_plan", thrice)
    play.arrive("r1")
    assert isinstance(play.given[-1], commands.ReportFailed)
    replayed = Replayer(play.tape.end()).run()
    assert (replayed.complete, replayed.raises) == (True, 3)


def test_what_a_request_gave_up_is_in_the_digest_and_the_text_of_the_exception_is_not() -> None:
    def check_of(gave_up: str, error: str) -> int:
        fallback = commands.Fallback("Restore.commit", gave_up, error)
        finished = commands.ReportFinished(request_id="r", inserted=1, fallbacks=(fallback,))
        return StepDigest(Rig().core).stepped([finished])

    assert check_of("cache", "KeyError: 1") == check_of("cache", "KeyError: 'one'")
    assert check_of("cache", "KeyError: 1") != check_of("backup", "KeyError: 1")
