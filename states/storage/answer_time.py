"""Answer time of storage: how long a plan waits for the answer to its query.

A query holds nothing, but a request that waits for the answer loses that time if storage has nothing for it. So the
wait is short, and its length follows from measurements, as a retransmission timeout does (RFC 6298):

    mean, deviation     of the seconds from the query to its answer, late answers included
    useful              share of the queried pages that storage had
    wait                mean + 4 deviations, at least WAIT_MIN_S, within the budget; 0 if the mean exceeds the budget
    budget              a share of the time that the transfer alone would take: USEFUL_SHARE of it times `useful`, at
                        least SURE_SHARE. WAIT_MAX_S, if the speed of the transfer is unknown.

With a wait of 0 a plan is made at once. Its query is sent nevertheless: the answer is measured, and a request that
cannot be admitted yet uses it. Until the first answer the mean is unknown and the wait is WAIT_MAX_S, or the budget.
"""

from __future__ import annotations

WAIT_MIN_S = 0.005
"""Minimum wait, if there is one: the event loops of both ends may be busy for as long."""
WAIT_MAX_S = 0.05
"""Maximum wait while the speed of the transfer is unknown."""
SURE_SHARE = 0.05
"""Share of the transfer's time that a request may lose by the wait, even if storage never has anything."""
USEFUL_SHARE = 0.25
"""The same if storage has every page that it is asked for."""
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
        if self._mean_s is None:
            self._mean_s, self._deviation_s = taken_s, taken_s / 2
        else:
            self._deviation_s += 2 * WEIGHT * (abs(taken_s - self._mean_s) - self._deviation_s)
            self._mean_s += WEIGHT * (taken_s - self._mean_s)
        self._useful += WEIGHT * (useful - self._useful)

    def wait_s(self, transfer_s: float) -> float:
        """Return how long a plan waits for an answer, if the transfer alone would take `transfer_s` (0: unknown)."""
        budget_s = max(SURE_SHARE, USEFUL_SHARE * self._useful) * transfer_s if transfer_s else WAIT_MAX_S
        if self._mean_s is None:
            return min(budget_s, WAIT_MAX_S)
        if self._mean_s > budget_s:
            return 0.0
        return max(min(self._mean_s + 4 * self._deviation_s, budget_s), WAIT_MIN_S)
