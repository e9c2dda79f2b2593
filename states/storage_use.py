"""Whether storage is asked at all, and for how many pages: limits on fetches, and the breaker.

The breaker (`tidekv.states.breaker`) counts failures and lates in a row. While it is open nothing is asked, and
requests go on without storage; its waits and probes are operations of the core.

    closed ──failures in a row──▶ open, waiting ──back-off is over──▶ open, probing ──StorageProbed──▶ closed
                                        ▲                                │ with an error
                                        └────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.breaker import Breaker
from tidekv.states.commands import ProbeStorage
from tidekv.states.load import LateFetch
from tidekv.states.pace import FetchPace
from tidekv.states.planner import Way
from tidekv.states.undo import Undo

if TYPE_CHECKING:
    from tidekv.states.books import Books
    from tidekv.states.events import PolicyChanged, StorageChanged
    from tidekv.states.load import Load
    from tidekv.states.shapes import PageIds
    from tidekv.states.tail_storage import TailFetch


class StorageUse:
    """What rules ask before they ask storage."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._breaker = Breaker()
        self._pace = FetchPace()
        self._level_pages = 0.0
        self._level_at_s = float("-inf")
        self.op = 0
        """The wait for the next probe, or the probe; 0 while the breaker is closed."""
        self.fetching: dict[Load | TailFetch, int] = {}
        """Loads, and tails, whose fetch somebody waits for, and how many pages each fetches."""
        self.pages_in_flight = 0
        """Pages that storage writes to: of loads, of look-ahead, and of fetches that nobody waits for any more."""
        self.ahead_in_flight = 0
        """Fetches of look-ahead that have not ended."""

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
        self._books.ahead_due = True
        self._books.renew_write_credit()

    # --- Limits ---

    @property
    def way(self) -> Way:
        """How fast storage brings pages, and how many are under way from there."""
        return Way(self._pace.page_s(self._books.now_s), self.pages_in_flight)

    def allowance(self, wanted: int, deadline_s: float) -> int:
        """How many of `wanted` pages a plan may fetch now, if they may take `deadline_s`."""
        settings = self._books.settings
        if settings.fetch_pages_in_flight_max:
            wanted = min(wanted, max(0, settings.fetch_pages_in_flight_max - self.pages_in_flight))
        page_s = self._pace.page_s(self._books.now_s)
        fitting = settings.fetch_deadline_share * deadline_s / page_s if page_s else float("inf")
        if settings.fetch_deadline_share and fitting < wanted + self.pages_in_flight:
            wanted = max(0, int(fitting) - self.pages_in_flight)
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

    # --- Fetches under way ---

    @property
    def holds_puts(self) -> bool:
        """Whether puts are to wait: something is fetched, or fetches take too long as it is."""
        if self.fetching or self.ahead_in_flight:
            return True
        bound_s = self._books.settings.put_fetch_s_max
        return bound_s > 0 and self._pace.fetch_s(self._books.now_s) > bound_s

    def may_put_beside(self, others: bool) -> bool:
        """Whether a put, whose host pages are pinned already, may begin. The first one always may."""
        books = self._books
        room = books.settings.put_host_share * books.settings.host_pages
        if not others or books.index.host_protected <= room:
            return True
        books.count("l3_puts_declined")
        return False

    def fetch_began(self, load: Load | TailFetch, page_count: int) -> None:
        """Storage writes to the host pages of a load from now on, which waits for it."""
        self.fetching[load] = page_count
        self.pages_in_flight += page_count

    def fetch_over(self, load: Load | TailFetch) -> None:
        """The load waits for no fetch (any more)."""
        self.pages_in_flight -= self.fetching.pop(load, 0)

    def fetch_given_up(self, op: int, host_pages: PageIds, component: str = "") -> None:
        """Nobody waits for this fetch: it keeps its host pages, of a component or full ones, until it ends."""
        self._books.operations[op] = LateFetch(host_pages, component)
        self.pages_in_flight += len(host_pages)

    def late_fetch_ended(self, fetch: LateFetch) -> None:
        """A fetch that nobody waited for is over."""
        if fetch.component:
            assert self._books.components is not None
            self._books.components.give_back({fetch.component: fetch.host_pages}, "host")
        else:
            self._books.host.give_back(fetch.host_pages)
        self.pages_in_flight -= len(fetch.host_pages)

    def note_pace(self, *, begun_at_s: float, pages: int) -> None:
        """A fetch, at whose begin so many pages were under way, has brought everything, or is late."""
        self._pace.note(taken_s=self._books.now_s - begun_at_s, pages=pages, now_s=self._books.now_s)

    # --- The breaker ---

    def changed(self, event: StorageChanged) -> None:
        """Another storage is attached, or none: what the last one did, and what it holds, is forgotten."""
        # With components, full pages alone are of no use: nobody could go on from them.
        self._books.storage_available = event.available and (event.tails or self._books.components is None)
        self._books.operations.pop(self.op, None)
        self.op = 0
        self._breaker.close()
        self._pace.forget()
        if event.available:
            self._books.index.forget_stored()
        self._books.renew_write_credit()

    def note(self, *, failed: bool) -> None:
        """A call to storage has ended, or is late."""
        settings = self._books.settings
        limit = settings.breaker_failures if self._books.storage_available else 0
        self._breaker.note(failed=failed, failures_max=limit, backoff_s=settings.breaker_backoff_s)
        if self._breaker.is_open and not self.op:
            self._wait()
            self._books.count("l3_breaker_opened")

    def probe(self) -> None:
        """The back-off is over."""
        books = self._books
        op = books.begin(self, deadline_s=float("inf"))
        with Undo() as undo:
            undo.callback(books.operations.pop, op)
            books.say(ProbeStorage(op=op))
            undo.keep()
        del books.operations[self.op]
        self.op = op

    def probed(self, error: str) -> None:
        """Storage has answered the probe."""
        self._breaker.probed(failed=bool(error), backoff_max_s=self._books.settings.breaker_backoff_max_s)
        if self._breaker.is_open:
            self._books.count("l3_probes_failed")
            self._wait()
        else:
            self._books.count("l3_breaker_closed")
            self.op = 0
            self._books.renew_write_credit()

    def _wait(self) -> None:
        self.op = self._books.begin(self, deadline_s=self._breaker.backoff_s)
