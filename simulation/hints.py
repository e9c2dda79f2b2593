"""Orchestrator of the simulation: gives hints about prompts that have arrived, at any time, and counts the answers."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING

from simulation.memory import Violation
from tidekv.states.commands import ReportHinted
from tidekv.states.events import HintReceived

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.settings import CoreSettings

PROMPTS_MAX = 20
"""Prompts that hints are about: the last ones."""
HINTS_OF_AN_ARRIVAL = (0, 0, 1, 2, 4)
DELAYS_S = (0.0, 0.001, 0.02, 0.5)


class Orchestrator:
    """Gives hints to one core, or to the first rank of a group, from a random source of its own."""

    def __init__(
        self,
        seed: object,
        settings: CoreSettings,
        *,
        give: Callable[[HintReceived], None],
        after: Callable[[float, Callable[[], None]], None],
        now_s: Callable[[], float],
    ) -> None:
        """`give` passes an event on; `after` calls something later."""
        self.random = Random(f"hints {seed}")
        self._settings = settings
        self._give, self._after, self._now_s = give, after, now_s
        self.prompts: deque[tuple[str, bytes]] = deque(maxlen=PROMPTS_MAX)
        self._unanswered: set[int] = set()
        self._calls = 0

    def arrived(self, namespace: str, keys: bytes) -> None:
        """Remember a prompt, and give some hints, now or later."""
        self.prompts.append((namespace, keys))
        for _ in range(self.random.choice(HINTS_OF_AN_ARRIVAL)):
            self._after(self.random.choice(DELAYS_S) * self.random.random(), self._hint)

    def _hint(self) -> None:
        event = self.draw(self._now_s())
        self._unanswered.add(event.call)
        self._give(event)

    def draw(self, at_s: float) -> HintReceived:
        """Draw a hint about a prompt that has arrived."""
        random, settings = self.random, self._settings
        namespace, keys = random.choice(self.prompts)
        pages = random.randint(0, len(keys) // settings.key_bytes)
        self._calls += 1
        return HintReceived(
            at_s=at_s,
            call=self._calls,
            action=random.choice(("prefetch", "demote", "pin", "pin", "unpin", "retain", "no such action")),
            namespace=namespace if random.random() < 0.9 else "nobody",
            keys=keys[: pages * settings.key_bytes],
            tier=random.choice(("host", "storage")),
            ttl_s=random.choice((0.0, 0.1, 5.0, 100.0)),
            pages_max=settings.host_pages // random.choice((1, 2, 8)),
        )

    def answered(self, command: ReportHinted) -> None:
        """Note an answer. Raises a Violation for a second one."""
        if command.call not in self._unanswered:
            raise Violation(f"{command}, but no hint waits for that")
        self._unanswered.remove(command.call)

    def forget(self) -> None:
        """Wait for no answer any more: the core has ended."""
        self._unanswered.clear()

    def check_end(self) -> None:
        """Raise a Violation if a hint has no answer."""
        if self._unanswered:
            raise Violation(f"hints {self._unanswered} were never answered")
