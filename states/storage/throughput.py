"""Throughput estimate of a source of pages, from its recent fetches.

Every fetch that delivered all its pages, and every late one (which took at least that long), gives two values: the
seconds from its command to its outcome, and the pages that were under way when it began, its own included. The
estimator keeps sums of both, in which an earlier fetch weighs 7/8 of the next one:

    page_s  = sum of seconds / sum of pages under way      cost of one more page
    fetch_s = sum of seconds / sum of weights              average duration of a fetch

A plan of `n` pages, with `q` under way already, is expected to land in `(q + n) * page_s`. Many short fetches make
`page_s` larger than it is for long ones, whose fixed cost is spread over more pages; the first longer fetch corrects
that, because it weighs by its pages. The estimate of storage expires ESTIMATE_FRESH_S after the last measurement;
storage is then used as if it had never been measured. That of prefill does not expire, since every plan measures it.
"""

from __future__ import annotations

ESTIMATE_FRESH_S = 10.0
WEIGHT = 7 / 8


class ThroughputEstimator:
    """Throughput estimate of one source."""

    __slots__ = ("_count", "_fresh_s", "_noted_at_s", "_pages", "_seconds")

    def __init__(self, *, fresh_s: float = ESTIMATE_FRESH_S) -> None:
        """`fresh_s` after the last measurement the estimate expires."""
        self._fresh_s = fresh_s
        self.forget()

    def forget(self) -> None:
        """Drop all measurements, because another storage is attached."""
        self._count = self._pages = self._seconds = 0.0
        self._noted_at_s = float("-inf")

    def note(self, *, taken_s: float, pages: int, now_s: float) -> None:
        """Add a measurement: a fetch that took `taken_s`, with `pages` pages under way when it began."""
        if not self._is_fresh(now_s):
            self.forget()
        self._count = WEIGHT * self._count + 1
        self._pages = WEIGHT * self._pages + pages
        self._seconds = WEIGHT * self._seconds + taken_s
        self._noted_at_s = now_s

    def page_s(self, now_s: float) -> float:
        """Seconds per page; 0 if unknown."""
        return self._seconds / self._pages if self._is_fresh(now_s) else 0.0

    def fetch_s(self, now_s: float) -> float:
        """Seconds per fetch; 0 if unknown."""
        return self._seconds / self._count if self._is_fresh(now_s) else 0.0

    def _is_fresh(self, now_s: float) -> bool:
        return self._count > 0 and now_s - self._noted_at_s <= self._fresh_s
