"""Stations of a modeled world: lines that serve in order at one rate, and the decoding batch."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.schedule import Schedule

DONE = 1e-6
"""Tokens; tolerance for the floating-point remainder of a finished request."""


class Line:
    """A server in order of requests, at one rate: a link, a path to storage, a prefill worker.

    `served` counts requested bytes or tokens.
    """

    def __init__(self, schedule: Schedule, per_s: float) -> None:
        self._schedule = schedule
        self._per_s = per_s
        self._free_at_s = 0.0
        self.served = 0.0

    def change_speed(self, per_s: float) -> None:
        """Set the rate of later requests."""
        self._per_s = per_s

    def serve(self, amount: float, action: Callable[[], None]) -> None:
        """Call `action` once this amount has been served, after all earlier requests."""
        self.served += amount
        self._free_at_s = max(self._free_at_s, self._schedule.now_s) + amount / self._per_s
        self._schedule.at(self._free_at_s, action)


class DecodeBatch:
    """All decoding requests: every step gives each of them a token, and takes longer the more there are."""

    def __init__(self, schedule: Schedule, *, base_s: float, request_s: float) -> None:
        self._schedule = schedule
        self._base_s = base_s
        self._request_s = request_s
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._tokens = 0.0
        """Tokens that a request present since the start would have got by now."""
        self._at_s = 0.0
        self._stalled_s = 0.0

    def join(self, tokens: int, action: Callable[[], None]) -> None:
        """Decode this many tokens for another request, then call `action`."""
        self._advance()
        self._number += 1
        heapq.heappush(self._ends, (self._tokens + tokens, self._number, action))
        self._arm()

    def stall(self, seconds: float) -> None:
        """Pause decoding for some seconds, in which device memory is used by copies."""
        if self._ends:
            self._advance()
            self._stalled_s += seconds
            self._arm()

    @property
    def _step_s(self) -> float:
        return self._base_s + len(self._ends) * self._request_s

    def _advance(self) -> None:
        passed_s = self._schedule.now_s - self._at_s
        self._at_s = self._schedule.now_s
        if self._ends:
            stalled_s = min(self._stalled_s, passed_s)
            self._stalled_s -= stalled_s
            self._tokens += (passed_s - stalled_s) / self._step_s
        else:
            self._stalled_s = 0.0

    def _arm(self) -> None:
        if self._ends:
            self._number += 1
            left_s = self._stalled_s + (self._ends[0][0] - self._tokens) * self._step_s
            self._schedule.after(max(left_s, 0.0), self._end, self._number)

    def _end(self, number: int) -> None:
        if number != self._number:
            # The batch has changed since this timer was set, and another one was set then.
            return
        self._advance()
        actions = []
        while self._ends and self._ends[0][0] - self._tokens < DONE:
            actions.append(heapq.heappop(self._ends)[2])
        self._arm()
        for action in actions:
            action()
