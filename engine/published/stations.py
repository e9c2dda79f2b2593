"""What takes time in a modeled world: lines that move bytes one after the other, and the batch that decodes."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.engine.simulation.schedule import Schedule

DONE = 1e-6
"""Tokens: what is left of one in floating point when it is done."""


class Line:
    """Something that serves in order of asking, at one rate: a link, a way to storage, a prefill worker.

    `served` counts what was asked of it: bytes, or tokens.
    """

    def __init__(self, schedule: Schedule, per_s: float) -> None:
        self._schedule = schedule
        self._per_s = per_s
        self._free_at_s = 0.0
        self.served = 0.0

    def change_speed(self, per_s: float) -> None:
        """What is asked from now on is served at another rate."""
        self._per_s = per_s

    def serve(self, amount: float, action: Callable[[], None]) -> None:
        """Call `action` when that much has been served, behind all that was asked before."""
        self.served += amount
        self._free_at_s = max(self._free_at_s, self._schedule.now_s) + amount / self._per_s
        self._schedule.at(self._free_at_s, action)


class DecodeBatch:
    """All requests that decode: every step gives each of them a token, and takes the longer the more there are."""

    def __init__(self, schedule: Schedule, *, base_s: float, request_s: float) -> None:
        self._schedule = schedule
        self._base_s = base_s
        self._request_s = request_s
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._tokens = 0.0
        """Tokens that one request which is there all the time would have got by now."""
        self._at_s = 0.0
        self._stalled_s = 0.0

    def join(self, tokens: int, action: Callable[[], None]) -> None:
        """Decode so many tokens for one more request, then call `action`."""
        self._advance()
        self._number += 1
        heapq.heappush(self._ends, (self._tokens + tokens, self._number, action))
        self._arm()

    def stall(self, seconds: float) -> None:
        """Nobody gets on for so long: something else has the device memory."""
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
            # The batch has changed since: the end was armed anew.
            return
        self._advance()
        actions = []
        while self._ends and self._ends[0][0] - self._tokens < DONE:
            actions.append(heapq.heappop(self._ends)[2])
        self._arm()
        for action in actions:
            action()
