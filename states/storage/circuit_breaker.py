"""Circuit breaker: keeps callers away from a failing service until a probe succeeds.

    closed ──consecutive failures──▶ open ──a probe succeeded──▶ closed
                                      ▲ │
                                      └─┘ a probe failed: twice the back-off, up to a bound

A probe is not a call: a service may answer probes and fail every call. So a probe closes the breaker, and only a call
that succeeds afterwards forgets the back-off. Without such a call the next back-off is twice the last one as well.

It has no clock and probes nothing: its owner waits for `backoff_s`, probes, and reports the result.
"""

from __future__ import annotations


class CircuitBreaker:
    """Counter of consecutive failures of one service."""

    __slots__ = ("_failures", "_last_s", "backoff_s")

    def __init__(self) -> None:
        self._failures = 0
        self._last_s = 0.0
        """The last back-off; 0 if a call has succeeded since."""
        self.backoff_s = 0.0
        """Seconds until the next probe; 0 while the breaker is closed."""

    @property
    def is_open(self) -> bool:
        """Whether the service must not be called."""
        return self.backoff_s > 0

    def note(self, *, failed: bool, failures_max: int, backoff_s: float, backoff_max_s: float) -> None:
        """Record a call that has ended or is late.

        The breaker opens with `failures_max` consecutive failures (0: never). The first probe is due in `backoff_s`,
        or in twice the last back-off, up to `backoff_max_s`, if no call has succeeded since.
        """
        self._failures = self._failures + 1 if failed else 0
        if self.is_open:
            # The outcome of a call that began before the breaker opened is no news of the service.
            return
        if not failed:
            self._last_s = 0.0
        elif 0 < failures_max <= self._failures:
            self.backoff_s = min(2 * self._last_s, backoff_max_s) or backoff_s

    def probed(self, *, failed: bool, backoff_max_s: float) -> None:
        """Record a probe: close, or double the back-off up to `backoff_max_s`."""
        if failed:
            self.backoff_s = min(2 * self.backoff_s, backoff_max_s)
        else:
            self._failures, self._last_s, self.backoff_s = 0, self.backoff_s, 0.0

    def forget(self) -> None:
        """Close, and forget every failure and back-off: another service is called from now on."""
        self._failures, self._last_s, self.backoff_s = 0, 0.0, 0.0
