"""Component pages in storage: how far they let a plan reach, and their way from storage to the device.

In storage every window page and every state snapshot is a record of its own, named by the full page at its position.
With components the core queries storage for full pages and component pages at once, before it reserves anything: what a
request needs of each component depends on the boundary that it continues from. That boundary is the longest one that
all of the following serve together:

    full pages          on the device, then on the host, then in storage
    component pages     on the device, on the host, or in storage, page by page in any mixture

A request does not need those pages of a boundary that prefill writes. Pages that it needs and only storage has are read
into host pages that belong to this request only, and are copied from there to the request's device pages, so that no
component page enters the index before the full pages of its request do:

    RESERVED ──plan──▶ FETCHING ──all pages──▶ COPYING ──▶ over: the host pages are free
                           │ short, late           │ error
                           ▼                       ▼
                         the request starts over, without storage    (without host copies of components)

Ownership: the `ComponentFetch` owns the host pages in every stage; the request's `RequestComponents` owns the device
pages. A fetch that is late, or whose request leaves, hands its host pages to a `LateFetch` operation, which frees them
when the read ends. A copy in flight keeps its host pages and its device pages until it ends.

Unlike full pages, component pages cannot be requested from prefill later (*extend*). Therefore every fetch policy waits
for them until their deadline.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tidekv.states.commands import CopyComponent, FetchComponent, QueryComponents
from tidekv.states.components.specs import longest_boundary
from tidekv.states.request.request import ComponentFetch, ComponentStage, Request, RequestComponents
from tidekv.states.rollback import Rollback
from tidekv.states.storage.policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.components.index import ComponentIndex
    from tidekv.states.components.specs import Ranges
    from tidekv.states.core_state import CoreState, Operation
    from tidekv.states.events import Outcome, StoredComponent
    from tidekv.states.storage.admission import StorageAdmission

WITHOUT_STORAGE, WITHOUT_HOST, WITHOUT_COMPONENTS = 1, 2, 3
"""Values of a request's `component_limit`: no component pages from storage, none from the host either, none at all."""
BOUNDARIES_TRIED_MAX = 16
"""Maximum boundaries to try, while limits on fetches forbid them, before a request continues without storage."""


class PrefixCoverage(msgspec.Struct, frozen=True):
    """Coverage of a prompt by the caches, and by the caches and storage together."""

    cached_boundary: int
    """The longest boundary that the caches serve without storage."""
    cached_pages: int
    """Full pages of the prompt in the caches."""
    available_pages: int
    """Full pages of the prompt in the caches and, following those, in storage."""
    served: list[Ranges]
    """For each component, the boundaries that the caches and storage serve together."""

    def longest(self, limit: int) -> int:
        """The longest boundary up to `limit`; 0 if none is longer than the one that the caches serve."""
        found = longest_boundary(min(limit, self.available_pages), self.served)
        return found if found > self.cached_boundary else 0


def preempt(state: CoreState, component_pages: RequestComponents, limit: int, cause: str) -> None:
    """Let the request of these pages start over with other pages and with fewer sources, because a source failed."""
    request = component_pages.request
    if request is not None and request not in state.preempted:
        request.component_limit = max(request.component_limit + 1, limit)
        state.preempted[request] = cause


class ComponentRead:
    """Operation: a read of component pages from storage to host memory."""

    __slots__ = ("_component_pages", "_storage", "fetch")

    def __init__(self, component_pages: ComponentStorage, storage: StorageAdmission, fetch: ComponentFetch) -> None:
        self._component_pages = component_pages
        self._storage = storage
        self.fetch = fetch

    def ended(self, event: Outcome, error: str) -> None:
        """Start the copy to the device if all pages are good."""
        self._component_pages.fetched(self.fetch, self._storage.fetch_ended(event))

    def late(self) -> None:
        """Let the request start over; the read continues without it."""
        self._storage.call_is_late()
        self._component_pages.is_late(self.fetch)

    def abandon(self) -> None:
        """Let the request start over."""
        self._component_pages.failed(self.fetch)


class StoredComponentCopy:
    """Operation: a copy of component pages that storage has delivered, from the host to the device."""

    __slots__ = ("_component_pages", "_copy", "_state", "fetch")

    def __init__(
        self, state: CoreState, component_pages: ComponentStorage, copy: Operation, fetch: ComponentFetch
    ) -> None:
        self._state = state
        self._component_pages = component_pages
        self._copy = copy
        self.fetch = fetch

    def ended(self, event: Outcome, error: str) -> None:
        """Free the host pages, and end the copy like any other copy of the request."""
        self._state.run_guarded(partial(self._component_pages.copied, self.fetch))
        self._copy.ended(event, error)

    def late(self) -> None:
        """Handle lateness like that of any other copy of the request."""
        self._copy.late()

    def abandon(self) -> None:
        """End the copy like any other copy of the request."""
        self._copy.abandon()


class ComponentStorage:
    """Queries storage for component pages, plans with the answers, and fetches."""

    def __init__(
        self,
        state: CoreState,
        storage: StorageAdmission,
        index: ComponentIndex,
        copy_of: Callable[[RequestComponents], Operation],
    ) -> None:
        """`copy_of` returns the operation of a copy into a request's component pages."""
        self._state = state
        self._storage = storage
        self._copy_of = copy_of
        self._index = index

    # --- The query ---

    def query(self, request: Request) -> None:
        """Query storage for full pages and component pages beyond the caches' boundary, if enough pages are missing."""
        state = self._state
        settings = state.settings
        here = sum(self._index.probe_prefix(request.namespace, request.keys))
        gain = request.full_pages - here
        if gain < 1 or gain * settings.page_size < settings.prefetch_threshold_tokens:
            return
        first = sum(state.index.probe_prefix(request.namespace, request.keys))
        longest = max(component.trailing_pages(settings.page_size) for component in self._index.components.values())
        count = request.full_pages - first
        # The speed of the transfer is left out: a page of prefill's may be one of a component.
        self._storage.query(
            request,
            gain,
            lambda op: QueryComponents(
                op=op,
                request_id=request.request_id,
                first=first,
                count=count,
                components_first=max(0, here + 1 - longest),
            ),
            page_s=0.0,
        )
        request.queried_first = first

    def waits_for_answer(self, request: Request) -> bool:
        """Whether the request waits for the answer to a query of storage.

        Starts another one if pages in front of the known stored pages have left the caches since. Each repetition
        covers a longer part of the prompt, so repetitions end.
        """
        may_query = not request.query_op and request.stored_found and self._is_allowed(request)
        if may_query and sum(self._state.index.probe_prefix(request.namespace, request.keys)) < request.stored_first:
            self.query(request)
        return request.waits_for_answer

    # --- The plan ---

    def boundary(self, request: Request) -> int:
        """The boundary to continue from with storage; 0 if the caches serve (almost) the same boundary without it."""
        state = self._state
        request.stored_cause = "storage_left_alone"
        if not (request.stored_found or request.stored_components) or not self._is_allowed(request):
            return 0
        coverage = self.coverage(
            request.namespace, request.keys, request.stored_first, request.stored_found, request.stored_components
        )
        found = self._longest(request, coverage)
        gain_tokens = (found - coverage.cached_boundary) * state.settings.page_size
        return found if gain_tokens >= max(state.settings.prefetch_threshold_tokens, 1) else 0

    def coverage(
        self, namespace: str, keys: bytes, first: int, found: int, component_pages: tuple[StoredComponent, ...]
    ) -> PrefixCoverage:
        """Return the current coverage of the prompt by the caches and storage.

        Storage has `found` full pages from page `first` on, and the given component pages.
        """
        here = sum(self._index.probe_prefix(namespace, keys))
        full = sum(self._state.index.probe_prefix(namespace, keys))
        pages = len(keys) // self._state.settings.key_bytes
        # If pages in front of `first` have left the caches since the query, it is unknown whether storage has them.
        end = full if full < first else max(full, min(first + max(found, 0), pages))
        stored = {entry.component: _positions(entry.ranges, pages) for entry in component_pages}
        return PrefixCoverage(here, full, end, self._index.served(namespace, keys, full, stored))

    def _is_allowed(self, request: Request) -> bool:
        return self._storage.is_usable and not (request.restore_limit or request.component_limit)

    def _longest(self, request: Request, coverage: PrefixCoverage) -> int:
        """The longest boundary whose fetch fits the limits and the free host pages.

        Returns the boundary of the caches if there is no such boundary beyond it.
        """
        state = self._state
        request.stored_cause = "no_component"
        left_s = request.deadline_at_s - state.now_s
        room = state.host.free + state.index.host_evictable
        full, limit = coverage.cached_pages, coverage.available_pages
        for _ in range(BOUNDARIES_TRIED_MAX):
            end = coverage.longest(limit)
            if not end:
                break
            pages = max(0, end - full)
            count = pages + self._index.count_only_stored(
                request.namespace, request.keys, end, in_index=min(end, full), needed_from=self.needed_from(request)
            )
            fitting = self._storage.allowance(count, state.settings.prefetch_deadline_s(count, left_s))
            # Only full pages need pages of this host pool; `reserve` takes component pages from their own pool.
            if fitting >= count and pages <= room:
                return end
            request.stored_cause = "limit" if fitting < count else "no_host_page"
            # Skip the boundaries whose full pages exceed the limits on their own.
            limit = min(end - 1, full + min(fitting, room)) if pages > min(fitting, room) else end - 1
        return coverage.cached_boundary

    def needed_from(self, request: Request) -> dict[str, int]:
        """By component, the first position that the request needs at the end of its prompt."""
        page_size = self._state.settings.page_size
        components = self._index.components.items()
        return {name: component.needed_from(request.prompt_tokens, page_size) for name, component in components}

    def reserve(self, component_pages: RequestComponents) -> bool:
        """Take host pages for the pages to fetch. If there are too few, returns False with some of them taken."""
        for name, matched in component_pages.reserved.component_pages.items():
            positions, targets = matched.stored
            if not positions:
                continue
            pages = self._index.take_host(name, len(positions))
            if pages is None:
                return False
            fetch = ComponentFetch(component_pages, name, positions, targets)
            fetch.host_pages = pages
            component_pages.fetches[fetch] = None
        return True

    def begin(self, request: Request, component_pages: RequestComponents, undo: Rollback) -> None:
        """Start the fetches. `undo` reverts everything."""
        state = self._state
        count = component_pages.fetched_pages + sum(len(fetch.positions) for fetch in component_pages.fetches)
        deadline_s = state.settings.prefetch_deadline_s(count, request.deadline_at_s - state.now_s)
        for fetch in component_pages.fetches:
            undo.callback(self._unbegin, fetch)
            fetch.op = state.start_operation(ComponentRead(self, self._storage, fetch), deadline_s=deadline_s)
            state.emit(
                FetchComponent(
                    op=fetch.op,
                    request_id=request.request_id,
                    component=fetch.component,
                    positions=fetch.positions,
                    host_pages=fetch.host_pages,
                    timeout_s=min(deadline_s, FETCH_TIMEOUT_MAX_S),
                )
            )
            fetch.stage = ComponentStage.FETCHING
            component_pages.copies += 1
            self._storage.take(len(fetch.positions))
            self._storage.fetch_began(fetch, len(fetch.positions))
            fetch.begun_at_s, fetch.queued_pages = state.now_s, self._storage.pages_in_flight

    def _unbegin(self, fetch: ComponentFetch) -> None:
        state = self._state
        state.operations.pop(fetch.op, None)
        if fetch.stage is ComponentStage.FETCHING:
            self._storage.fetch_over(fetch)
            self._storage.take(-len(fetch.positions))
            fetch.stage = ComponentStage.RESERVED

    # --- Outcomes ---

    def fetched(self, fetch: ComponentFetch, good: int) -> None:
        """Start the copy to the device if the fetch delivered all pages; otherwise the request starts over.

        The first `good` pages are verified. A part of a boundary's pages is of no use. After a raise, `failed` ends the
        fetch.
        """
        state = self._state
        count = len(fetch.positions)
        if good < count:
            state.count("l3_pages_short", count - max(good, 0))
            self.failed(fetch)
            return
        self._storage.note_throughput(begun_at_s=fetch.begun_at_s, pages=fetch.queued_pages)
        with Rollback() as undo:
            copy = StoredComponentCopy(state, self, self._copy_of(fetch.component_pages), fetch)
            op = state.start_operation(copy, deadline_s=state.settings.copy_deadline_s)
            undo.callback(state.operations.pop, op)
            state.emit(
                CopyComponent(
                    op=op,
                    component=fetch.component,
                    source="host",
                    source_pages=fetch.host_pages,
                    target="device",
                    target_pages=fetch.device_pages,
                )
            )
            undo.keep()
        fetch.op = op
        fetch.stage = ComponentStage.COPYING
        self._storage.fetch_over(fetch)
        request = fetch.component_pages.request
        assert request is not None, "a leaving request gives up its fetches"
        state.dirty[request] = None

    def failed(self, fetch: ComponentFetch) -> None:
        """Free the host pages and let the request start over: nothing writes to them. Safe to call again."""
        self._storage.fetch_over(fetch)
        self.copied(fetch)
        fetch.component_pages.copies -= 1
        preempt(self._state, fetch.component_pages, WITHOUT_STORAGE, "storage did not deliver all pages of a component")

    def is_late(self, fetch: ComponentFetch) -> None:
        """Let the request start over; a `LateFetch` owns the host pages until the read ends."""
        self._state.count("l3_fetches_late")
        self._storage.note_throughput(begun_at_s=fetch.begun_at_s, pages=fetch.queued_pages)
        self._give_up(fetch)
        preempt(
            self._state,
            fetch.component_pages,
            WITHOUT_STORAGE,
            "storage did not deliver the pages of a component in time",
        )

    def copied(self, fetch: ComponentFetch) -> None:
        """Free the host pages after the copy to the device, or without a copy. Safe to call again after a raise."""
        self._index.give_back({fetch.component: fetch.host_pages}, "host")
        fetch.host_pages = page_ids()
        fetch.component_pages.fetches.pop(fetch, None)

    # --- The ends ---

    def abandon_fetches(self, component_pages: RequestComponents) -> None:
        """Give up the fetches of a leaving request. Copies continue to its device pages."""
        for fetch in list(component_pages.fetches):
            if fetch.stage is ComponentStage.FETCHING:
                self._give_up(fetch)

    def give_back(self, component_pages: RequestComponents) -> None:
        """Free the remaining host pages; nothing is in flight. Safe to call again."""
        for fetch in list(component_pages.fetches):
            self.copied(fetch)

    def _give_up(self, fetch: ComponentFetch) -> None:
        self._storage.fetch_over(fetch)
        self._storage.fetch_given_up(fetch.op, fetch.host_pages, fetch.component)
        del fetch.component_pages.fetches[fetch]
        fetch.component_pages.copies -= 1


def _positions(ranges: tuple[tuple[int, int], ...], end: int) -> set[int]:
    """The positions before `end` in the ranges of a storage answer."""
    return {at for first, stop in ranges for at in range(max(first, 0), min(stop, end))}
