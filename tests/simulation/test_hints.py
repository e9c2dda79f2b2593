"""Any hints, in any order and at any time: every answer is right, and every page has its owner."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from simulation.simulate import draw_settings
from simulation.world import World
from tidekv.states import commands, events


class HintedWorld:
    """A world with all faults, whose core is given hints about the prompts it has seen, between all its steps."""

    def __init__(self, seed: int, requests: int = 60) -> None:
        self.random = Random(f"hints {seed}")
        self.world = World(seed=seed, requests=requests, faults="all", settings=draw_settings(Random(f"hints {seed}")))
        self.prompts: list[tuple[str, bytes]] = []
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.calls = 0
        self.step = self.world.core.step
        self.world.core.step = self.stepped  # type: ignore[method-assign]

    def run(self) -> None:
        self.world.run(Random(f"hints {self.world}").randint(2, 12))

    def stepped(self, event: events.Event) -> list[commands.Command]:
        given = self.step(event)
        if isinstance(event, events.RequestArrived):
            self.prompts.append((event.namespace, event.keys))
        if self.prompts and self.random.random() < 0.3:
            given += self.hint(event.at_s)
        return given

    def hint(self, at_s: float) -> list[commands.Command]:
        core, random = self.world.core, self.random
        namespace, keys = random.choice(self.prompts[-20:])
        width = core.settings.key_bytes
        pages = random.randint(0, len(keys) // width)
        action = random.choice(("prefetch", "demote", "pin", "pin", "unpin", "retain"))
        self.calls += 1
        given = self.step(
            events.HintReceived(
                at_s=at_s,
                call=self.calls,
                action=action,
                namespace=namespace if random.random() < 0.9 else "nobody",
                keys=keys[: pages * width],
                tier=random.choice(("host", "storage")),
                ttl_s=random.choice((0.0, 0.1, 5.0, 100.0)),
                pages_max=core.settings.host_pages // random.choice((1, 2, 8)),
            )
        )
        (report,) = [command for command in given if isinstance(command, commands.ReportHinted)]
        assert report.call == self.calls
        assert core.hints.pinned_pages <= core.settings.host_pages
        self.outcomes[action, report.outcome] += 1
        core.check()
        return given


@pytest.mark.parametrize("seed", range(300, 316))
def test_answers_are_right_with_any_hints(seed: int) -> None:
    hinted = HintedWorld(seed)
    # The world compares the pages of every READY request with its prompt, and recounts all owners at the end.
    hinted.run()
    assert hinted.calls > 50


def test_hints_of_every_kind_are_taken_somewhere() -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(320, 330):
        hinted = HintedWorld(seed)
        hinted.run()
        outcomes += hinted.outcomes
    for action in ("demote", "pin", "unpin", "retain", "prefetch"):
        assert outcomes[action, "accepted"], outcomes
