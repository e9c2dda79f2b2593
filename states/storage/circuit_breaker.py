"""Circuit breaker: keeps callers away from a failing service until a probe succeeds.

    closed ──consecutive failures──▶ open ──a probe succeeded──▶ closed
                                      ▲ │
                                      └─┘ a probe failed: twice the back-off, up to a bound

Failures are counted by kind of call: storage that answers every query may deliver no page. A call that succeeds forgets
the failures of its kind. A fetch forgets all of them: storage that delivers pages is of use, even if it takes none.

A probe is not a call either: a service may answer probes and fail every call. So a probe closes the breaker and forgets
nothing. The next failure of a kind that reached the limit opens it again, for twice the last back-off.

It has no clock and probes nothing: its owner waits for `backoff_s`, probes, and reports the result.
"""

from __future__ import annotations

from typing import Final, Literal

CallKind = Literal["query", "fetch", "store"]
QUERY: Final = "query"
FETCH: Final = "fetch"
STORE: Final = "store"


class CircuitBreaker:
    """Counter of consecutive failures of one service, by kind of call."""

    __slots__ = ("_failures", "_last_s", "backoff_s")

    def __init__(self) -> None:
        self._failures: dict[CallKind, int] = {}
        self._last_s = 0.0
        """The last back-off; 0 if each kind of call that failed then has succeeded since."""
        self.backoff_s = 0.0
        """Seconds until the next probe; 0 while the breaker is closed."""

    @property
    def is_open(self) -> bool:
        """Whether the service must not be called."""
        return self.backoff_s > 0

    def note(self, kind: CallKind, *, failed: bool, failures_max: int, backoff_s: float, backoff_max_s: float) -> None:
        """Record a call that has ended or is late.

        The breaker opens with `failures_max` consecutive failures of one kind (0: never). The first probe is due in
        `backoff_s`, or in twice the last back-off, up to `backoff_max_s`, if a kind has failed ever since.
        """
        if self.is_open:
            # The outcome of a call that began before the breaker opened is no news of the service.
            return
        if failed:
            self._failures[kind] = self._failures.get(kind, 0) + 1
            if 0 < failures_max <= self._failures[kind]:
                self.backoff_s = min(2 * self._last_s, backoff_max_s) or backoff_s
            return
        if kind == FETCH:
            self._failures.clear()
        self._failures.pop(kind, None)
        if max(self._failures.values(), default=0) < failures_max:
            self._last_s = 0.0

    def probed(self, *, failed: bool, backoff_max_s: float) -> None:
        """Record a probe: close, or double the back-off up to `backoff_max_s`."""
        if failed:
            self.backoff_s = min(2 * self.backoff_s, backoff_max_s)
        else:
            self._last_s, self.backoff_s = self.backoff_s, 0.0

    def forget(self) -> None:
        """Close, and forget every failure and back-off: another service is called from now on."""
        self._failures.clear()
        self._last_s = self.backoff_s = 0.0
