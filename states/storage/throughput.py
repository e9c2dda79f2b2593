"""Throughput estimate of a source of pages, from its recent fetches.

Every fetch that delivered all its pages, and every late one (which took at least that long), gives two values: the
seconds from its command to its outcome, and the pages that were under way when it began, its own included. The
estimator keeps sums of both, in which an earlier fetch weighs 7/8 of the next one:

    page_s  = sum of seconds / sum of pages under way      cost of one more page
    fetch_s = sum of seconds / sum of weights              average duration of a fetch

A plan of `n` pages, with `q` under way already, is expected to end in `(q + n) * page_s`. Many short fetches make
`page_s` larger than it is for long ones, whose fixed cost is spread over more pages; the first longer fetch corrects
that, because it weighs by its pages.

An estimate is old ESTIMATE_FRESH_S after its last measurement. Plans still rely on it, since a fetch that is slower
than planned is noticed and prefill is asked for its pages.
"""

from __future__ import annotations

ESTIMATE_FRESH_S = 10.0
WEIGHT = 7 / 8
MUCH_FASTER = 4
MUCH_SLOWER = 4
SHORT_PARTS = 8
"""A fetch is short if it has less than one of so many parts of the average one."""


class ThroughputEstimator:
    """Throughput estimate of one source."""

    __slots__ = ("_count", "_noted_at_s", "_pages", "_seconds", "is_confirmed")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all measurements, because another storage is attached."""
        self.is_confirmed = False
        """Whether more than the first measurement is known, which may include a stall, or the opening of files."""
        self.begin_again()

    def begin_again(self) -> None:
        """Drop all measurements, because they do not hold any more. A confirmed estimate stays so."""
        self._count = self._pages = self._seconds = 0.0
        self._noted_at_s = float("-inf")

    def note(self, *, taken_s: float, pages: int, now_s: float) -> None:
        """Add a measurement: a fetch that took `taken_s`, with `pages` pages under way when it began.

        A fetch of few pages is left out if it took longer by page and less as a whole than the average: it was mostly
        latency, and many of them would hide what a page costs in a long fetch. One that is much faster than the average
        replaces it: a stall was measured before, and a source avoided because of it would hardly be measured again. One
        that is much slower counts as MUCH_SLOWER times as slow as the estimate: one stall of this process delays
        several fetches, and a source that has really become slower shows it in each of the next ones.
        """
        is_short = pages * SHORT_PARTS * self._count < self._pages
        if is_short and pages * self.page_s < taken_s < self.fetch_s:
            return
        self.is_confirmed |= self._count > 0
        if self._count:
            taken_s = min(taken_s, MUCH_SLOWER * pages * self._seconds / self._pages)
        if taken_s * MUCH_FASTER < pages * self.page_s:
            self.begin_again()
        self._count = WEIGHT * self._count + 1
        self._pages = WEIGHT * self._pages + pages
        self._seconds = WEIGHT * self._seconds + taken_s
        self._noted_at_s = now_s

    def note_trial(self, *, taken_s: float, pages: int, now_s: float) -> None:
        """Add a fetch that was made to measure. Until the estimate is confirmed, only the fastest counts; one that is
        not faster confirms it.
        """
        if self.is_confirmed:
            self.note(taken_s=taken_s, pages=pages, now_s=now_s)
        elif not self._count or taken_s < pages * self.page_s:
            self.begin_again()
            self.note(taken_s=taken_s, pages=pages, now_s=now_s)
        else:
            self.is_confirmed = True

    @property
    def page_s(self) -> float:
        """Seconds per page; 0 if unknown."""
        return self._seconds / self._pages if self._count else 0.0

    @property
    def fetch_s(self) -> float:
        """Seconds per fetch; 0 if unknown."""
        return self._seconds / self._count if self._count else 0.0

    def is_old(self, now_s: float) -> bool:
        """Whether the last measurement is more than ESTIMATE_FRESH_S ago, or there is none."""
        return now_s - self._noted_at_s > ESTIMATE_FRESH_S
