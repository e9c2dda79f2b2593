"""Answer time of storage: how long a plan waits for the answer to its query.

A query holds nothing, but a request that waits for the answer loses that time if storage has nothing for it. So the
wait is short, and its length follows from measurements, as a retransmission timeout does (RFC 6298):

    mean, deviation     of the seconds from the query to its answer, late answers included
    useful              share of the queried pages that storage had
    wait                mean + 4 deviations, within the budget, at least WAIT_MIN_S; 0 if the mean exceeds the budget
    budget              GAIN_SHARE of the time that storage would save if it had every page in question, times `useful`;
                        WAIT_MAX_S if the speed of the transfer is unknown

An answer that is much faster than the mean replaces it, as in `ThroughputEstimator`: a stall was measured before, or
the first call, which opens files and connections. It would take twenty answers to forget that, and plans made meanwhile
would not wait.

With a wait of 0 a plan is made at once. Its query is sent nevertheless: the answer is measured, and a request that
cannot be admitted yet uses it. Until the first answer the mean is unknown and the wait is WAIT_MAX_S, or the budget.
"""

from __future__ import annotations

from tidekv.states.storage.fetch_source import MUCH_FASTER

WAIT_MIN_S = 0.002
"""Minimum wait, if there is one: event loops may be busy for as long."""
WAIT_MAX_S = 0.05
"""Maximum wait while the speed of the transfer is unknown."""
GAIN_SHARE = 0.5
"""Share of the possible gain that a request may spend on the wait."""
WEIGHT = 1 / 8
"""Weight of the last answer in the mean and in the useful share; in the deviation it is twice this."""


class AnswerTime:
    """Estimate of the answer time of one storage."""

    __slots__ = ("_deviation_s", "_mean_s", "_useful")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all measurements, because another storage is attached."""
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self._useful = 1.0

    def note(self, *, taken_s: float, useful: float) -> None:
        """Add an answer that took `taken_s`; storage had the share `useful` of the pages in question."""
        if self._mean_s is None or taken_s * MUCH_FASTER < self._mean_s:
            self._mean_s, self._deviation_s = taken_s, taken_s / 2
        else:
            self._deviation_s += 2 * WEIGHT * (abs(taken_s - self._mean_s) - self._deviation_s)
            self._mean_s += WEIGHT * (taken_s - self._mean_s)
        self._useful += WEIGHT * (useful - self._useful)

    def wait_s(self, gain_s: float) -> float:
        """Return how long a plan waits for an answer, if all pages in storage would save it `gain_s` (0: unknown)."""
        budget_s = GAIN_SHARE * self._useful * gain_s if gain_s else WAIT_MAX_S
        if self._mean_s is None:
            return min(budget_s, WAIT_MAX_S)
        if self._mean_s > budget_s:
            return 0.0
        return max(min(self._mean_s + 4 * self._deviation_s, budget_s), WAIT_MIN_S)
