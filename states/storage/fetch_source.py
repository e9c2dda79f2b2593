"""A source that host pages are fetched from, storage or a peer: its fetches in flight, and how fast it is.

Ownership: a fetch writes to host pages that belong to its load, its read ahead or its `ComponentFetch`. If nothing
waits for the fetch any more, a `LateFetch` owns them until the fetch ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.events import PagesFetched
from tidekv.states.storage.source_split import SourceLoad

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.records.ahead import AheadRun, ComponentAhead
    from tidekv.states.records.reads import ComponentFetch
    from tidekv.states.records.request import Load

ESTIMATE_FRESH_S = 10.0
WEIGHT = 7 / 8
MUCH_FASTER = 4
MUCH_SLOWER = 4
SHORT_PARTS = 8
"""A fetch is short if it has less than one of so many parts of the average one."""


class ThroughputEstimator:
    """Throughput estimate of one source of pages, from its recent fetches.

    Every fetch that delivered all its pages, and every late one (which took at least that long), gives two values:
    the seconds from its command to its outcome, and the pages that were under way when it began, its own included. The
    estimator keeps sums of both, in which an earlier fetch weighs 7/8 of the next one:

        page_s  = sum of seconds / sum of pages under way      cost of one more page
        fetch_s = sum of seconds / sum of weights              average duration of a fetch

    A plan of `n` pages, with `q` under way already, is expected to end in `(q + n) * page_s`. Many short fetches make
    `page_s` larger than it is for long ones, whose fixed cost is spread over more pages; the first longer fetch
    corrects that, because it weighs by its pages.

    An estimate is old ESTIMATE_FRESH_S after its last measurement. Plans still rely on it, since a fetch that is slower
    than planned is noticed and prefill is asked for its pages.
    """

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


class LateFetch:
    """Operation: a fetch that no request waits for any more. It owns its host pages until it has ended."""

    __slots__ = ("_begun_at_s", "_queued_pages", "_source", "_state", "cause", "component", "host_pages")

    def __init__(
        self,
        state: CoreState,
        source: FetchSource,
        fetch: Load | ComponentFetch | AheadRun | ComponentAhead,
        *,
        component: str,
        cause: str,
    ) -> None:
        self._state = state
        self._source = source
        self._begun_at_s, self._queued_pages = fetch.begun_at_s, fetch.queued_pages
        self.cause = cause
        """Key of `LOAD_CAUSES` if the fetch was that of a load. No decision depends on it."""
        self.host_pages = fetch.host_pages
        self.component = component
        """The component of the host pages; empty for full pages."""

    @property
    def source(self) -> FetchSource:
        """The source that writes to the host pages."""
        return self._source

    def ended(self, event: Outcome, error: str) -> None:
        """Free the host pages, and note how long the fetch took. Its lateness was counted already."""
        if isinstance(event, PagesFetched) and event.valid == len(self.host_pages):
            # Without this, a slow source whose fetches are all given up would only be known by lower bounds.
            self._source.note_throughput(begun_at_s=self._begun_at_s, pages=self._queued_pages)
        self.abandon()

    def late(self) -> None:
        """Do nothing: the fetch has no deadline any more."""

    def abandon(self) -> None:
        """Free the host pages."""
        if self.component:
            assert self._state.components is not None
            self._state.components.give_back({self.component: self.host_pages}, "host")
        else:
            self._state.host.give_back(self.host_pages)
        self._source.pages_in_flight -= len(self.host_pages)
        self._state.pages_were_freed()


class FetchSource:
    """The fetches of one source, and its measured speed."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._throughput = ThroughputEstimator()
        self.fetching: dict[Load | ComponentFetch, int] = {}
        """Loads and component fetches in flight, with the number of pages that each fetches."""
        self.pages_in_flight = 0
        """Host pages that the source writes to: of loads, of look-ahead, and of fetches that no request waits for."""

    @property
    def source_load(self) -> SourceLoad:
        """Measured speed of the source, and the number of pages under way from there."""
        return SourceLoad(self._throughput.page_s, self.pages_in_flight)

    @property
    def is_measured(self) -> bool:
        """Whether the source has been measured in the last seconds."""
        return not self._throughput.is_old(self._state.now_s)

    def fetch_began(self, load: Load | ComponentFetch, page_count: int) -> None:
        """Record that the source writes to the host pages of a load from now on, and that the load waits for it."""
        self.fetching[load] = page_count
        self.pages_in_flight += page_count

    def fetch_over(self, load: Load | ComponentFetch) -> None:
        """Record that the load does not wait for a fetch any more."""
        self.pages_in_flight -= self.fetching.pop(load, 0)

    def fetch_given_up(
        self, fetch: Load | ComponentFetch | AheadRun | ComponentAhead, *, component: str = "", cause: str = ""
    ) -> None:
        """Hand the host pages of a fetch to a `LateFetch` until the fetch ends: full pages, or those of a component."""
        late = LateFetch(self._state, self, fetch, component=component, cause=cause)
        self._state.replace_operation(fetch.op, late)
        self.pages_in_flight += len(fetch.host_pages)

    def note_throughput(self, *, begun_at_s: float, pages: int, is_trial: bool = False) -> None:
        """Record the speed of a complete or late fetch, which began with `pages` pages under way.

        `is_trial`: it was made to measure, and is complete.
        """
        if not self.is_measured:
            self._throughput.begin_again()
        note = self._throughput.note_trial if is_trial else self._throughput.note
        note(taken_s=self._state.now_s - begun_at_s, pages=pages, now_s=self._state.now_s)
