"""How fast storage brings pages, as fetches of the last while have shown.

Of every fetch that brought all its pages, and of every one that is late (which took at least so long), two things are
known: the seconds from its command to its outcome, and the pages that were under way when it began, its own included.
Sums of both are kept in which each earlier fetch weighs 7/8 of the one after it:

    page_s  = sum of seconds / sum of pages under way      what one page more costs
    fetch_s = sum of seconds / sum of weights              how long a fetch takes, on average

A plan of `n` pages, with `q` under way already, is then expected to land in `(q + n) * page_s`. Many short fetches
make `page_s` larger than it is for long ones, whose fixed cost is shared by more pages; the first longer one corrects
that, since it weighs by its pages. An estimate expires ESTIMATE_FRESH_S after its last measurement; storage is
then used as if it had never been measured.
"""

from __future__ import annotations

ESTIMATE_FRESH_S = 10.0
WEIGHT = 7 / 8


class ThroughputEstimator:
    """The measure of one storage."""

    __slots__ = ("_count", "_noted_at_s", "_pages", "_seconds")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another storage is attached: nothing is known of it."""
        self._count = self._pages = self._seconds = 0.0
        self._noted_at_s = float("-inf")

    def note(self, *, taken_s: float, pages: int, now_s: float) -> None:
        """A fetch took so long, with `pages` pages under way when it began."""
        if now_s - self._noted_at_s > ESTIMATE_FRESH_S:
            self.forget()
        self._count = WEIGHT * self._count + 1
        self._pages = WEIGHT * self._pages + pages
        self._seconds = WEIGHT * self._seconds + taken_s
        self._noted_at_s = now_s

    def page_s(self, now_s: float) -> float:
        """Seconds that a page costs; 0 where nothing is known."""
        return self._seconds / self._pages if self._is_fresh(now_s) else 0.0

    def fetch_s(self, now_s: float) -> float:
        """Seconds that a fetch takes; 0 where nothing is known."""
        return self._seconds / self._count if self._is_fresh(now_s) else 0.0

    def _is_fresh(self, now_s: float) -> bool:
        return now_s - self._noted_at_s <= ESTIMATE_FRESH_S
