"""Whether storage is asked at all, and for how many pages: limits on fetches, and the breaker.

The breaker counts failures and lates in a row. At the limit it opens: nothing more is asked, requests go on without
storage. After a back-off, storage is probed; a probe that succeeds closes it, one that fails doubles the back-off.

    closed ──failures in a row──▶ open, waiting ──back-off is over──▶ open, probing ──StorageProbed──▶ closed
                                        ▲                                │ with an error
                                        └────────────────────────────────┘
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from tidekv.states.commands import ProbeStorage
from tidekv.states.load import LateFetch

if TYPE_CHECKING:
    from tidekv.states.books import Books
    from tidekv.states.events import PolicyChanged, StorageChanged
    from tidekv.states.load import Load


class StorageUse:
    """What rules ask before they ask storage."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._failures = 0
        self._backoff_s = 0.0
        self._level_pages = 0.0
        self._level_at_s = float("-inf")
        self.op = 0
        """The wait for the next probe, or the probe; 0 while the breaker is closed."""
        self.fetching: dict[Load, None] = {}
        """Loads whose fetch somebody waits for."""

    @property
    def is_open(self) -> bool:
        """Whether the breaker keeps everybody away."""
        return self.op > 0

    @property
    def is_usable(self) -> bool:
        """Whether storage may be asked."""
        return self._books.storage_available and not self.op

    def policy_changed(self, event: PolicyChanged) -> None:
        """Go on by other policies."""
        self._books.settings = self._books.settings.with_policy(event.policy)

    # --- Limits ---

    def allowance(self, wanted: int) -> int:
        """How many of `wanted` pages a plan may fetch now."""
        settings = self._books.settings
        if settings.fetch_pages_in_flight_max:
            wanted = min(wanted, max(0, settings.fetch_pages_in_flight_max - self._pages_in_flight()))
        if settings.fetch_pages_per_s:
            wanted = min(wanted, int(self._level()))
        return wanted

    def take(self, count: int) -> None:
        """A plan fetches so many pages; with a negative count, it does not after all."""
        if self._books.settings.fetch_pages_per_s:
            self._level_pages = self._level() - count

    def _level(self) -> float:
        """What may be fetched at once: it grows with time, up to one second's worth, which is at least a page."""
        rate, now_s = self._books.settings.fetch_pages_per_s, self._books.now_s
        grown = self._level_pages + (now_s - self._level_at_s) * rate
        self._level_pages, self._level_at_s = min(grown, max(rate, 1.0)), now_s
        return self._level_pages

    def _pages_in_flight(self) -> int:
        late = (owner for owner in self._books.operations.values() if isinstance(owner, LateFetch))
        return sum(load.page_count for load in self.fetching) + sum(len(fetch.host_pages) for fetch in late)

    # --- The breaker ---

    def changed(self, event: StorageChanged) -> None:
        """Another storage is attached, or none: what the last one did, and what it holds, is forgotten."""
        self._books.storage_available = event.available
        self._books.operations.pop(self.op, None)
        self.op = self._failures = 0
        if event.available:
            self._books.index.forget_stored()

    def note(self, *, failed: bool) -> None:
        """A call to storage has ended, or is late."""
        failures = self._failures + 1 if failed else 0
        if failures >= self._books.settings.breaker_failures > 0 and self.is_usable:
            self._wait(self._books.settings.breaker_backoff_s)
            self._books.count("l3_breaker_opened")
        self._failures = failures

    def probe(self) -> None:
        """The back-off is over."""
        books = self._books
        op = books.begin(self, deadline_s=float("inf"))
        with ExitStack() as undo:
            undo.callback(books.operations.pop, op)
            books.say(ProbeStorage(op=op))
            undo.pop_all()
        del books.operations[self.op]
        self.op = op

    def probed(self, error: str) -> None:
        """Storage has answered the probe."""
        if error:
            self._wait(min(2 * self._backoff_s, self._books.settings.breaker_backoff_max_s))
            self._books.count("l3_probes_failed")
        else:
            self._books.count("l3_breaker_closed")
            self.op = self._failures = 0

    def _wait(self, backoff_s: float) -> None:
        self.op = self._books.begin(self, deadline_s=backoff_s)
        self._backoff_s = backoff_s
