"""From a seed that fails to the smallest run of it that fails in the same way, and the journal of that.

A run is made smaller by what the seed does not decide: how many requests there are, and which kinds of faults may
strike. A kind that is left out is drawn as before and just does not strike, so that all else stays as it was up to the
moment where it would have. Where the core itself raised, single events are left out of the journal as well.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidekv.engine.journal.recorder import Recorder
from tidekv.engine.journal.shrink import shrink
from tidekv.engine.simulation.simulate import SimulationFailed, simulate
from tidekv.states.errors import InvalidRequest, TidekvError

if TYPE_CHECKING:
    from tidekv.engine.simulation.faults import Chosen
    from tidekv.engine.simulation.world import World
    from tidekv.states.commands import Command
    from tidekv.states.events import Event
    from tidekv.states.witness import Noted

RUNS_MAX = 60
"""So many runs are tried at most."""
NOT_IN_JOURNAL = "rule_raises"
"""A raise that is put into a rule from outside is no event: a replay goes its own way from there."""


class SmallestRun(msgspec.Struct, frozen=True):
    """A run that fails, and where its journal is."""

    seed: int
    requests: int
    faults: Chosen
    without: tuple[str, ...]
    struck: tuple[str, ...]
    """The kinds of faults that it needs."""
    what: str
    """What must never happen, and did."""
    journal: Path
    events: int
    """Events in the journal."""

    @property
    def command(self) -> str:
        """What shows it again."""
        faults = self.faults if isinstance(self.faults, str) else ",".join(self.faults)
        words = ["tidekv", "simulate", "--seed", str(self.seed), "--requests", str(self.requests), "--faults", faults]
        return shlex.join([*words, "--without", ",".join(self.without)] if self.without else words)


class _Attempt:
    """One run: whether it fails, and what that took."""

    def __init__(
        self, seed: int, requests: int, faults: Chosen, without: Collection[str], path: Path | None = None
    ) -> None:
        self.what = ""
        self._worlds: list[World] = []
        tape = None if path is None else _Tape(path)

        def watch(world: World) -> None:
            self._worlds.append(world)
            if tape is not None:
                tape.attach(world)

        try:
            simulate(seed, requests, faults, without=without, watch=watch)
        except SimulationFailed as failure:
            self.what = failure.what
        world = self._worlds[0]
        self.requests = requests - world.arrivals_left
        self.events = world.event_count
        self.struck = tuple(name for name, count in world.faults.counts.items() if count)
        if tape is not None:
            tape.write()

    def fails_like(self, what: str) -> bool:
        """Whether it failed, and in those words but for the numbers."""
        return bool(self.what) and _kind(self.what) == _kind(what)


class _Tape:
    """The journal of a world, as far as that gets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._noted: list[Noted] = []

    def attach(self, world: World) -> None:
        """Take down every step from now on."""
        core = world.core
        self._recorder = Recorder(core, with_tokens=True)
        step = core.step

        def taped(event: Event) -> list[Command]:
            try:
                given = step(event)
            except Exception as error:
                self._noted.append(self._recorder.note(event, [], type(error).__name__))
                raise
            self._noted.append(self._recorder.note(event, given))
            return given

        core.step = taped  # type: ignore[method-assign]  # What it takes down.

    def write(self) -> None:
        """Write what was taken down. It has no end record: the run had no end."""
        lines = [self._recorder.run_line(), self._recorder.steps_line(self._recorder.encode(self._noted))]
        self._path.write_bytes(b"".join(lines))


def find_smallest(
    seed: int, requests: int, faults: Chosen, path: Path, *, without: Collection[str] = ()
) -> SmallestRun:
    """Make a run that fails smaller for as long as it fails in the same way, and write its journal to `path`.

    `without` are kinds of faults that are left out to begin with. Raises InvalidRequest where the run does not fail.
    """
    best, left_out = _Attempt(seed, requests, faults, without), frozenset(without)
    what = best.what
    if not what:
        raise InvalidRequest(f"seed {seed} with {requests} requests does not fail: there is nothing to make smaller")
    runs, size = 1, max(1, len(best.struck) // 2)
    while runs < RUNS_MAX:
        for first in range(0, len(best.struck), size):
            tried = left_out | frozenset(best.struck[first : first + size])
            attempt = _Attempt(seed, best.requests, faults, tried)
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
    last = _Attempt(seed, best.requests, faults, left_out, path)
    events = last.events
    if NOT_IN_JOURNAL not in last.struck:
        events = _without_idle_events(path, events)
    return SmallestRun(
        seed=seed,
        requests=last.requests,
        faults=faults,
        without=tuple(sorted(left_out)),
        struck=last.struck,
        what=last.what,
        journal=path,
        events=events,
    )


def _without_idle_events(path: Path, events: int) -> int:
    """Leave single events out of the journal, where the core raised at its end; returns how many there are."""
    shorter = path.with_suffix(".shorter")
    try:
        shrunk = shrink(path, shorter)
    except TidekvError:
        # The core did nothing that it can tell by itself: the world did. The journal stays as it is.
        shorter.unlink(missing_ok=True)
        return events
    shorter.replace(path)
    return shrunk.events_after


def _kind(what: str) -> str:
    return re.sub(r"\d+", "#", what.splitlines()[0])
