"""Any hints, in any order and at any time: every answer is right, and every page has its owner."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from simulation.simulate import draw_settings
from simulation.world import World
from tests.support.thorough import thorough_beyond
from tidekv.states import commands, events


class HintedWorld:
    """A world with all faults, whose core is given hints about the prompts it has seen, between all its steps."""

    def __init__(self, seed: int, requests: int = 60) -> None:
        random = Random(f"hints {seed}")
        settings = draw_settings(random)
        self.at_once = random.randint(2, 12)
        self.world = World(seed=seed, requests=requests, faults="all", settings=settings, hints=True)
        assert self.world.orchestrator is not None
        self.orchestrator = self.world.orchestrator
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.calls = 0
        self.has_prompts = False
        self.step = self.world.core.step
        self.world.core.step = self.stepped  # type: ignore[method-assign]

    def run(self) -> None:
        self.world.run(self.at_once)

    def stepped(self, event: events.Event) -> list[commands.Command]:
        given = self.step(event)
        if self.has_prompts and self.orchestrator.random.random() < 0.3:
            given += self.hint(event.at_s)
        # The orchestrator hears of a prompt behind its arrival.
        self.has_prompts |= isinstance(event, events.RequestArrived) and bool(self.orchestrator.prompts)
        return given

    def hint(self, at_s: float) -> list[commands.Command]:
        core = self.world.core
        hint = self.orchestrator.draw(at_s)
        self.calls += 1
        given = self.step(hint)
        (report,) = [command for command in given if isinstance(command, commands.ReportHinted)]
        assert report.call == hint.call
        assert core.hints.pinned_pages <= core.settings.host_pages
        self.outcomes[hint.action, report.outcome] += 1
        core.check()
        return [command for command in given if command is not report]


@pytest.mark.parametrize("seed", thorough_beyond((301, 302, 305, 311), range(300, 316)))
def test_answers_are_right_with_any_hints(seed: int) -> None:
    hinted = HintedWorld(seed)
    # The world compares the pages of every READY request with its prompt, and recounts all owners at the end.
    hinted.run()
    assert hinted.calls > 50


def test_hints_of_every_kind_are_taken_somewhere() -> None:
    actions = ("demote", "pin", "unpin", "retain", "prefetch")
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(320, 328):
        hinted = HintedWorld(seed)
        hinted.run()
        outcomes += hinted.outcomes
        if all(outcomes[action, "accepted"] for action in actions):
            break
    assert all(outcomes[action, "accepted"] for action in actions), outcomes
