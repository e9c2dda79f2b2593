"""Journals of simulated runs, and what a test does to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tidekv.engine.journal import Recorder
from tidekv.engine.simulation.faults import FAULTS, Chosen
from tidekv.engine.simulation.simulate import draw_settings
from tidekv.engine.simulation.world import World
from tidekv.states import events
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.settings import CoreSettings

LINE_STEPS = 5
# A raise that is put into a rule from outside is no event: no journal can hold it.
FAULTS_IN_EVENTS = tuple(name for name in FAULTS if name != "rule_raises")


class Tape:
    """Records the steps of one core to a file, without a thread."""

    def __init__(self, core: Core, path: Path) -> None:
        self.path = path
        self._core = core
        self._recorder = Recorder(core)
        self._lines = [self._recorder.run_line()]
        self._noted: list[object] = []
        self.steps: list[tuple[events.Event, str]] = []
        """Each event with the commands that followed, as they were: pages may change hands later."""
        self._step, core.step = core.step, self.step  # type: ignore[method-assign]  # What it tapes.

    def step(self, event: events.Event) -> list[Command]:
        try:
            given = self._step(event)
        except Exception as error:
            self._noted.append(self._recorder.note(event, [], type(error).__name__))
            raise
        self._noted.append(self._recorder.note(event, given))
        self.steps.append((event, repr(given)))
        if len(self._noted) == LINE_STEPS:
            self._flush()
        return given

    def _flush(self) -> None:
        if self._noted:
            self._lines.append(self._recorder.steps_line(self._noted))  # type: ignore[arg-type]
            self._noted = []

    def end(self) -> Path:
        self._flush()
        self.path.write_bytes(b"".join([*self._lines, self._recorder.end_line()]))
        return self.path


Simulate = Callable[..., Tape]


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    """Run one seed of the simulation, and tape it; the tape is ended."""

    def run(seed: int = 1, requests: int = 40, faults: Chosen = FAULTS_IN_EVENTS, settings: CoreSettings | None = None) -> Tape:
        drawn = settings or draw_settings(Random(f"settings {seed}"))
        world = World(seed=seed, requests=requests, faults=faults, settings=drawn)
        tape = Tape(world.core, tmp_path / f"{seed}.journal")
        try:
            world.run(6)
        finally:
            tape.end()
        return tape

    return run
