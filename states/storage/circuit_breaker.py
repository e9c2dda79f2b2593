"""A breaker: after failures in a row something is left alone, until a probe says that it can be used again.

    closed ──failures in a row──▶ open ──a probe succeeded──▶ closed
                                   ▲ │
                                   └─┘ a probe failed: twice the back-off, up to a bound

It has no clock and probes nothing: whoever uses it waits for `backoff_s`, probes, and tells how that went.
"""

from __future__ import annotations


class CircuitBreaker:
    """Counts failures in a row; one for each thing that may fail."""

    __slots__ = ("_failures", "backoff_s")

    def __init__(self) -> None:
        self._failures = 0
        self.backoff_s = 0.0
        """How long to wait before the next probe; 0 while it is closed."""

    @property
    def is_open(self) -> bool:
        """Whether everybody is to be kept away."""
        return self.backoff_s > 0

    def note(self, *, failed: bool, failures_max: int, backoff_s: float) -> None:
        """A use has ended, or is late. With failure number `failures_max` in a row (0: there is no limit) it opens, and
        the first probe is due in `backoff_s`.
        """
        self._failures = self._failures + 1 if failed else 0
        if not self.is_open and 0 < failures_max <= self._failures:
            self.backoff_s = backoff_s

    def probed(self, *, failed: bool, backoff_max_s: float) -> None:
        """A probe has ended: it closes, or waits for twice as long, at most `backoff_max_s`."""
        if failed:
            self.backoff_s = min(2 * self.backoff_s, backoff_max_s)
        else:
            self.close()

    def close(self) -> None:
        """Forget every failure."""
        self._failures = 0
        self.backoff_s = 0.0
