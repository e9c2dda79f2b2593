"""A failing journal becomes a short one that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from simulation.simulate import SimulationFailed, draw_settings, with_components
from tidekv import InvalidRequest, JournalDamaged, ReplayDiverged, Replayer
from tidekv.engine.journal.shrink import shrink
from tidekv.states.backup.backups import Backups
from tidekv.states.components.request_components import ComponentRestore
from tidekv.states.errors import BrokenInvariant
from tidekv.states.handover.rooms import Rooms

TURN_EVENTS = 5


def first_that_breaks(simulate, directory: Path, seeds: range, **drawn: Callable[[int], object]) -> Path:
    """The journal of the first seed that breaks the simulation; what is drawn for it follows from the seed."""
    for seed in seeds:
        try:
            simulate(seed, 60, **{name: draw(seed) for name, draw in drawn.items()})
        except (BrokenInvariant, SimulationFailed):
            path = directory / f"{seed}.journal"
            assert path.exists()
            return path
    pytest.fail("nothing breaks")


def diverges(path: Path) -> bool:
    try:
        Replayer(path).run()
    except ReplayDiverged:
        return True
    return False


def test_journal_of_a_broken_core_is_reduced_to_the_few_events_that_break_it(simulate, monkeypatch, tmp_path) -> None:
    stored = Backups.stored

    def broken(self: Backups, backup, count: int, event) -> None:  # type: ignore[no-untyped-def]
        if backup.request_id.endswith("7"):
            raise BrokenInvariant("planted")
        stored(self, backup, count, event)

    monkeypatch.setattr(Backups, "stored", broken)
    path = first_that_breaks(simulate, tmp_path, range(1, 20))
    out = tmp_path / "short.journal"
    shrunk = shrink(path, out)
    # Requests with pages that the broken one needs stay: what prefill sent it would not fit otherwise.
    assert shrunk.events_after < shrunk.events_before / 2
    steps = list(Replayer(out).steps())
    assert steps[-1].error == "BrokenInvariant"
    assert len(steps) == shrunk.events_after


def test_what_is_left_of_components_is_left_in_the_short_journal_too(simulate, monkeypatch, tmp_path) -> None:
    keep, planted = ComponentRestore.keep, []

    def broken(self: ComponentRestore, request, left, node, **further) -> None:  # type: ignore[no-untyped-def]
        if left and request.request_id.endswith("7"):
            planted.append(left)
            raise BrokenInvariant("planted")
        keep(self, request, left, node, **further)

    monkeypatch.setattr(ComponentRestore, "keep", broken)

    def settings(seed: int) -> object:
        return with_components(draw_settings(Random(seed)), seed)

    path = first_that_breaks(simulate, tmp_path, range(1, 30), settings=settings)
    out = tmp_path / "short.journal"
    shrunk = shrink(path, out)
    assert shrunk.events_after < shrunk.events_before / 2
    planted.clear()
    steps = list(Replayer(out).steps())
    # Not some other error of the same class: pages that are another request's in a shorter run would be one.
    assert steps[-1].error == "BrokenInvariant" and planted


def test_divergence_is_cut_behind_its_first_event(simulate, monkeypatch, tmp_path) -> None:
    out = tmp_path / "short.journal"
    paths = [simulate(seed, 60).path for seed in range(1, 9)]
    with monkeypatch.context() as patch:
        leave = Rooms.leave
        patch.setattr(Rooms, "leave", lambda self, room, *, settled: leave(self, room, settled=True))
        # Not every seed has a room that is left while prefill may still write.
        path = next(path for path in paths if diverges(path))
        with pytest.raises(ReplayDiverged) as long:
            Replayer(path).run()
        shrink(path, out)
        with pytest.raises(ReplayDiverged) as short:
            Replayer(out).run()
    assert str(short.value) == str(long.value)
    replayed = Replayer(out).run()
    # It is cut behind the turn.
    assert long.value.seq < replayed.events <= long.value.seq + TURN_EVENTS
    assert isinstance(replayed.torn, JournalDamaged)


def test_good_journal_is_not_shrunk(simulate, tmp_path) -> None:
    path = simulate(1, 10).path
    with pytest.raises(InvalidRequest, match="no error"):
        shrink(path, tmp_path / "short.journal")
