"""Virtual time: what happens next, in the order of time and, at one instant, of asking. Nothing waits for a clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Schedule:
    """A heap of actions. The same calls give the same order, always."""

    __slots__ = ("_heap", "_number", "now_s")

    def __init__(self) -> None:
        # Actions have different arguments; each is called with its own.
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.now_s = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> None:  # Any: see `_heap`.
        """Call `action` at that time, or now if it is past."""
        self._number += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._number, action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:  # Any: see `_heap`.
        """Call `action` when that much time has passed."""
        self._number += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._number, action, arguments))

    def run_next(self) -> bool:
        """Move the clock to the next action and call it; False where there is none."""
        if not self._heap:
            return False
        self.now_s, _, action, arguments = heapq.heappop(self._heap)
        action(*arguments)
        return True


class Link:
    """A way on which messages keep their order, whatever each one's delay."""

    __slots__ = ("_free_at_s", "_schedule")

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._free_at_s = 0.0

    def send(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:  # Any: see Schedule.
        """Deliver after `delay_s`, or right behind what was sent before."""
        self._free_at_s = max(self._free_at_s, self._schedule.now_s + delay_s)
        self._schedule.at(self._free_at_s, action, *arguments)
