"""Virtual time: actions in the order of their time and, at equal times, of their scheduling. Nothing sleeps."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Schedule:
    """Heap of scheduled actions. The same calls always give the same order."""

    __slots__ = ("_heap", "_number", "now_s")

    def __init__(self) -> None:
        # Any: each action is called with its own arguments.
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.now_s = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> None:  # Any: see `_heap`.
        """Schedule `action` at that time, or now if it is past."""
        self._number += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._number, action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:  # Any: see `_heap`.
        """Schedule `action` after that time has passed."""
        self._number += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._number, action, arguments))

    def run_next(self) -> bool:
        """Move the clock to the next action and call it. False if there is none."""
        if not self._heap:
            return False
        self.now_s, _, action, arguments = heapq.heappop(self._heap)
        action(*arguments)
        return True


class Life:
    """Schedule of one process. What it has scheduled is dropped once the process has ended."""

    __slots__ = ("_schedule", "is_over")

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.is_over = False

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._schedule.now_s

    def at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> None:  # Any: as in Schedule.
        """Schedule `action` at that time, or now if it is past."""
        self._schedule.at(at_s, self._act, action, *arguments)

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:  # Any: as in Schedule.
        """Schedule `action` after that time has passed."""
        self._schedule.after(delay_s, self._act, action, *arguments)

    def _act(self, action: Callable[..., None], *arguments: Any) -> None:
        if not self.is_over:
            action(*arguments)


class Link:
    """Connection that delivers messages in order, whatever the delay of each."""

    __slots__ = ("_free_at_s", "_schedule")

    def __init__(self, schedule: Schedule | Life) -> None:
        self._schedule = schedule
        self._free_at_s = 0.0

    def send(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:  # Any: see Schedule.
        """Deliver after `delay_s`, but not before the message sent last."""
        self._free_at_s = max(self._free_at_s, self._schedule.now_s + delay_s)
        self._schedule.at(self._free_at_s, action, *arguments)
