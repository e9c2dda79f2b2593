"""A source that host pages are fetched from, storage or a peer: its fetches in flight, and how fast it is.

Ownership: a fetch writes to host pages that belong to its load, its read ahead or its `ComponentFetch`. If nothing
waits for the fetch any more, a `LateFetch` owns them until the fetch ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.events import PagesFetched
from tidekv.states.storage.source_split import SourceLoad
from tidekv.states.storage.throughput import ThroughputEstimator

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.records.ahead import AheadRun, ComponentAhead
    from tidekv.states.records.reads import ComponentFetch
    from tidekv.states.records.request import Load


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
