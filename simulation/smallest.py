"""Reduction of a failing seed to the smallest run that fails in the same way, with its journal.

A run is reduced in what the seed does not determine: the number of requests, and the kinds of faults that may strike.
An excluded kind is still drawn but does not strike, so the run stays the same up to the moment where it would have. If
the core itself raised, single events are removed from the journal as well.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from simulation.campaign import Shape, shapes_of, simulate_shape
from simulation.simulate import SimulationFailed
from tidekv.engine.journal.format import write_lines
from tidekv.engine.journal.recorder import Recorder
from tidekv.engine.journal.shrink import shrink
from tidekv.states.errors import InvalidRequest, TidekvError

if TYPE_CHECKING:
    from simulation.faults import Chosen
    from simulation.world import World
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event

RUNS_MAX = 60
"""Maximum number of runs."""


class SmallestRun(msgspec.Struct, frozen=True):
    """A failing run, and its journal."""

    seed: int
    requests: int
    faults: Chosen
    without: tuple[str, ...]
    lends: bool
    neighbours: bool
    ranks: int
    struck: tuple[str, ...]
    """The kinds of faults that struck."""
    what: str
    """The violation."""
    journal: Path
    events: int
    """Number of events in the journal."""

    @property
    def command(self) -> str:
        """Command line that repeats the run."""
        faults = self.faults if isinstance(self.faults, str) else ",".join(self.faults)
        words = ["tidekv", "simulate", "--seed", str(self.seed), "--requests", str(self.requests), "--faults", faults]
        words += ["--ranks", str(self.ranks)]
        words += ["--lent" if self.lends else "--owned"]
        words += ["--peers"] if self.neighbours else []
        return shlex.join([*words, "--without", ",".join(self.without)] if self.without else words)


class _Attempt:
    """One run, with its failure and size."""

    def __init__(
        self,
        seed: int,
        shape: Shape,
        faults: Chosen,
        without: Collection[str],
        path: Path | None = None,
    ) -> None:
        self.what = ""
        self.given = shape
        """The shape as it was asked for; `shape` has only the requests that had arrived at the end."""
        self._worlds: list[World] = []
        tape = None if path is None else _Tape(path)

        def watch(world: World) -> None:
            self._worlds.append(world)
            if tape is not None:
                tape.attach(world)

        try:
            simulate_shape(seed, shape, faults, without, watch)
        except SimulationFailed as failure:
            self.what = failure.what
        world = self._worlds[0]
        self.shape = replace(shape, requests=shape.requests - world.arrivals_left)
        self.events = world.turns.events
        counts = {**world.faults.counts, **({} if world.neighbours is None else world.neighbours.faults.counts)}
        self.struck = tuple(name for name, count in counts.items() if count)
        if tape is not None:
            tape.write()
            self.events = tape.steps

    def fails_like(self, what: str) -> bool:
        """Whether it failed with the same text, apart from numbers."""
        return bool(self.what) and _kind(self.what) == _kind(what)


class _Tape:
    """Journal of the first rank of a world, from its last start up to the failure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self.steps = 0

    def attach(self, world: World) -> None:
        """Record every step from now on."""
        self._record(world.core)
        world.ranks[0].on_core.append(self._record)

    def _record(self, core: Core) -> None:
        recorder = Recorder(core, with_tokens=True)
        self._lines = [recorder.run_line()]
        self.steps = 0
        step = core.step

        def end_turn() -> None:
            turn = recorder.end_turn()
            assert turn is not None
            self._lines.append(recorder.render(turn))

        def taped(event: Event) -> list[Command]:
            self.steps += 1
            try:
                given = step(event)
            except Exception as error:
                recorder.stepped(event, [], type(error).__name__)
                end_turn()
                raise
            recorder.stepped(event, given)
            end_turn()
            return given

        core.step = taped  # type: ignore[method-assign]  # Wraps the method for recording.

    def write(self) -> None:
        """Write the records. There is no end record, because the run did not end."""
        write_lines(self._path, self._lines)


def find_smallest(
    seed: int,
    requests: int,
    faults: Chosen,
    path: Path,
    *,
    ranks: int | None = None,
    without: Collection[str] = (),
    lends: bool | None = None,
    neighbours: bool = False,
) -> SmallestRun:
    """Reduce a failing run for as long as it fails in the same way, and write its journal to `path`.

    The run is the first of the seed in a campaign that fails (`shapes_of`). `without` names kinds of faults that are
    excluded from the start. Raises InvalidRequest if the run does not fail.
    """
    shapes = shapes_of(seed, requests, ranks=ranks, lends=lends, neighbours=neighbours)
    runs_of_seed = (_Attempt(seed, shape, faults, without) for shape in shapes)
    best = next((attempt for attempt in runs_of_seed if attempt.what), None)
    left_out = frozenset(without)
    if best is None:
        raise InvalidRequest(f"seed {seed} with {requests} requests does not fail: there is nothing to reduce")
    what = best.what
    runs, size = 1, max(1, len(best.struck) // 2)
    # Delta debugging: exclude kinds in groups of half the number that struck, then in smaller groups.
    while runs < RUNS_MAX:
        for first in range(0, len(best.struck), size):
            tried = left_out | frozenset(best.struck[first : first + size])
            attempt = _Attempt(seed, best.shape, faults, tried)
            runs += 1
            if attempt.fails_like(what):
                best, left_out = attempt, tried
                break
            if runs == RUNS_MAX:
                break
        else:
            if size == 1:
                break
            size //= 2
    last = _Attempt(seed, best.shape, faults, left_out, path)
    if not last.fails_like(what):
        # It takes the requests that had not arrived, too: they keep the callers of others in the run.
        last = _Attempt(seed, best.given, faults, left_out, path)
    events = _without_idle_events(path, last.events)
    return SmallestRun(
        seed=seed,
        requests=last.given.requests,
        faults=faults,
        without=tuple(sorted(left_out)),
        lends=last.shape.lends,
        neighbours=neighbours,
        ranks=last.shape.ranks,
        struck=last.struck,
        what=last.what,
        journal=path,
        events=events,
    )


def _without_idle_events(path: Path, events: int) -> int:
    """Remove single events from the journal if the core raised at its end; returns the number of events left."""
    shorter = path.with_suffix(".shorter")
    try:
        shrunk = shrink(path, shorter)
    except TidekvError:
        # The core did not raise, so the violation came from the world and a replay cannot show it. Keep the journal.
        shorter.unlink(missing_ok=True)
        return events
    shorter.replace(path)
    return shrunk.events_after


def _kind(what: str) -> str:
    return re.sub(r"\d+", "#", what.splitlines()[0])
