"""Tails in storage: how far they let a plan reach, and how they come from there to the device.

In storage each page of a window, and each record of a state, is a record of its own, named by the page at its position.
With components storage is asked for both at once, and before anything is reserved: how much a request needs of each
component depends on the boundary that it goes on from. That is the longest one which all of these serve together:

    full pages           on the device, on the host, then in storage
    every component's    on the device, on the host, or in storage, each page of it wherever it is
    whole tail

Not all of a tail is needed where prefill writes the end of it. What is needed and only storage has goes by way of host
pages that no other request sees, so that nothing of it is cached before the request's own pages are:

    RESERVED ──plan──▶ FETCHING ──all of it──▶ COPYING ──▶ over: the host pages are free
                           │ short, late           │ error
                           ▼                       ▼
                         the request starts over, without storage    (without host copies of components)

A tail cannot be asked of prefill later on, as full pages can (*extend*): so whatever the policy for fetches is, a tail
is waited for until its deadline. A late fetch keeps its host pages until it ends, and nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tidekv.states.commands import CopyComponent, FetchComponent, QueryComponents
from tidekv.states.components.specs import longest_boundary
from tidekv.states.request.request import ComponentFetch, ComponentStage, Request, RequestComponents
from tidekv.states.rollback import Rollback
from tidekv.states.storage.admission import StorageQuery
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
"""What a request's `component_limit` says that it does not use: cached tails of storage, those of the host too, all."""
BOUNDARIES_TRIED_MAX = 16
"""So many boundaries that limits on fetches forbid are tried before a request does without storage."""


class Reach(msgspec.Struct, frozen=True):
    """How far a prompt can go on from the caches, and from these together with what storage says that it has."""

    here: int
    """The longest boundary that the caches serve alone."""
    full: int
    """Full pages in the caches."""
    end: int
    """Full pages in the caches and then in storage."""
    served: list[Ranges]
    """For each component, the boundaries that it serves."""

    def longest(self, limit: int) -> int:
        """The longest boundary up to `limit`; 0 where none is longer than what the caches serve."""
        found = longest_boundary(min(limit, self.end), self.served)
        return found if found > self.here else 0


def distrust(state: CoreState, component_pages: RequestComponents, limit: int, cause: str) -> None:
    """Something did not come: the request of these tails starts over, on other pages, and with less."""
    request = component_pages.request
    if request is not None and request not in state.preempted:
        request.component_limit = max(request.component_limit + 1, limit)
        state.preempted[request] = cause


class ComponentRead:
    """Operation: storage brings a tail to host memory."""

    __slots__ = ("_component_pages", "_storage", "fetch")

    def __init__(self, component_pages: ComponentStorage, storage: StorageAdmission, fetch: ComponentFetch) -> None:
        self._component_pages = component_pages
        self._storage = storage
        self.fetch = fetch

    def ended(self, event: Outcome, error: str) -> None:
        """Copy the tail to the device if all of it is good."""
        self._component_pages.fetched(self.fetch, self._storage.fetch_ended(event))

    def late(self) -> None:
        """The request starts over; the read goes on without it."""
        self._storage.call_is_late()
        self._component_pages.is_late(self.fetch)

    def abandon(self) -> None:
        """The request starts over."""
        self._component_pages.failed(self.fetch)


class StoredComponentCopy:
    """Operation: a copy brings a tail that storage has brought from the host to the device."""

    __slots__ = ("_component_pages", "_copy", "_state", "fetch")

    def __init__(
        self, state: CoreState, component_pages: ComponentStorage, copy: Operation, fetch: ComponentFetch
    ) -> None:
        self._state = state
        self._component_pages = component_pages
        self._copy = copy
        self.fetch = fetch

    def ended(self, event: Outcome, error: str) -> None:
        """Free the host pages; the rest is as for any copy of the request's tails."""
        self._state.run_guarded(partial(self._component_pages.copied, self.fetch))
        self._copy.ended(event, error)

    def late(self) -> None:
        """As for any copy of the request's tails."""
        self._copy.late()

    def abandon(self) -> None:
        """As for any copy of the request's tails."""
        self._copy.abandon()


class ComponentStorage:
    """What storage does for tails."""

    def __init__(
        self,
        state: CoreState,
        storage: StorageAdmission,
        index: ComponentIndex,
        copy_of: Callable[[RequestComponents], Operation],
    ) -> None:
        """`copy_of` makes the operation of a copy into a request's tails."""
        self._state = state
        self._storage = storage
        self._copy_of = copy_of
        self._index = index

    # --- The question ---

    def ask(self, request: Request) -> None:
        """Ask storage for full pages and tails beyond what the caches can go on from, unless that is too little."""
        state = self._state
        settings = state.settings
        here = sum(self._index.probe_prefix(request.namespace, request.keys))
        gain = request.full_pages - here
        if gain < 1 or gain * settings.page_size < settings.prefetch_threshold_tokens:
            return
        first = sum(state.index.probe_prefix(request.namespace, request.keys))
        longest = max(component.trailing_pages(settings.page_size) for component in self._index.components.values())
        with Rollback() as undo:
            query = StorageQuery(state, self._storage, request)
            op = state.start_operation(query, deadline_s=settings.query_deadline_s)
            undo.callback(state.operations.pop, op)
            state.emit(
                QueryComponents(
                    op=op,
                    request_id=request.request_id,
                    first=first,
                    count=request.full_pages - first,
                    components_first=max(0, here + 1 - longest),
                )
            )
            undo.keep()
        request.query_op = op
        request.stored_first, request.stored_found, request.stored_components = first, 0, ()

    def waits_for_answer(self, request: Request) -> bool:
        """Whether it is not known what storage has: the answer is to come. It is asked again where pages in front of
        those that it told of have left the caches; each time for more, so that this comes to an end.
        """
        may_ask = not request.query_op and request.stored_found and self._is_allowed(request)
        if may_ask and sum(self._state.index.probe_prefix(request.namespace, request.keys)) < request.stored_first:
            self.ask(request)
        return request.query_op > 0

    # --- The plan ---

    def boundary(self, request: Request) -> int:
        """The boundary to go on from with what storage has; 0 where the caches do as well without, or nearly so."""
        state = self._state
        request.stored_cause = "storage_left_alone"
        if not (request.stored_found or request.stored_components) or not self._is_allowed(request):
            return 0
        reach = self.reach(
            request.namespace, request.keys, request.stored_first, request.stored_found, request.stored_components
        )
        found = self._longest(request, reach)
        if (found - reach.here) * state.settings.page_size >= max(state.settings.prefetch_threshold_tokens, 1):
            return found
        return 0

    def reach(
        self, namespace: str, keys: bytes, first: int, found: int, component_pages: tuple[StoredComponent, ...]
    ) -> Reach:
        """How far the caches and storage reach together, now: storage has `found` full pages from `first` on, and these
        pages of components.
        """
        here = sum(self._index.probe_prefix(namespace, keys))
        full = sum(self._state.index.probe_prefix(namespace, keys))
        pages = len(keys) // self._state.settings.key_bytes
        end = full if full < first else max(full, min(first + max(found, 0), pages))
        stored = {tail.component: _positions(tail.ranges, pages) for tail in component_pages}
        return Reach(here, full, end, self._index.served(namespace, keys, full, stored))

    def _is_allowed(self, request: Request) -> bool:
        return self._storage.is_usable and not (request.restore_limit or request.component_limit)

    def _longest(self, request: Request, reach: Reach) -> int:
        """The longest boundary for which no more is to be fetched than limits and host pages allow; that of the caches
        where there is none beyond it.
        """
        state = self._state
        request.stored_cause = "no_component"
        left_s = request.deadline_at_s - state.now_s
        room = state.host.free + state.index.host_evictable
        full, limit = reach.full, reach.end
        for _ in range(BOUNDARIES_TRIED_MAX):
            end = reach.longest(limit)
            if not end:
                break
            pages = max(0, end - full)
            count = pages + self._index.count_only_stored(
                request.namespace, request.keys, end, in_index=min(end, full), needed_from=self.needed_from(request)
            )
            fitting = self._storage.allowance(count, state.settings.prefetch_deadline_s(count, left_s))
            if fitting >= count and pages <= room:
                return end
            request.stored_cause = "limit" if fitting < count else "no_host_page"
            limit = min(end - 1, full + min(fitting, room)) if pages > min(fitting, room) else end - 1
        return reach.here

    def needed_from(self, request: Request) -> dict[str, int]:
        """By component, the first position that a request needs at the end of its prompt."""
        page_size = self._state.settings.page_size
        components = self._index.components.items()
        return {name: component.needed_from(request.prompt_tokens, page_size) for name, component in components}

    def reserve(self, component_pages: RequestComponents) -> bool:
        """Take host pages for what is to be fetched; False where there are too few, with some of them taken."""
        for name, tail in component_pages.reserved.component_pages.items():
            positions, targets = tail.stored
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
        """Start the fetches. `undo` takes all of it back."""
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
        """The fetch ended with its first `good` pages verified: a tail is whole or of no use. After a raise, `failed`
        ends it.
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
        assert request is not None, "a request that leaves gives up what is being fetched"
        state.dirty[request] = None

    def failed(self, fetch: ComponentFetch) -> None:
        """Nothing of it is of use, and nothing writes to its pages: the request starts over. Can be called again."""
        self._storage.fetch_over(fetch)
        self.copied(fetch)
        fetch.component_pages.copies -= 1
        distrust(self._state, fetch.component_pages, WITHOUT_STORAGE, "storage did not bring all of a component's tail")

    def is_late(self, fetch: ComponentFetch) -> None:
        """The request starts over; the fetch keeps its host pages until it ends."""
        self._state.count("l3_fetches_late")
        self._storage.note_throughput(begun_at_s=fetch.begun_at_s, pages=fetch.queued_pages)
        self._give_up(fetch)
        distrust(
            self._state, fetch.component_pages, WITHOUT_STORAGE, "storage did not bring a component's tail in time"
        )

    def copied(self, fetch: ComponentFetch) -> None:
        """The copy to the device is over, well or not, or there will be none. Can be called again where it raised."""
        self._index.give_back({fetch.component: fetch.host_pages}, "host")
        fetch.host_pages = page_ids()
        fetch.component_pages.fetches.pop(fetch, None)

    # --- The ends ---

    def let_go(self, component_pages: RequestComponents) -> None:
        """The request leaves: it waits for no fetch any more. Copies go on to its device pages."""
        for fetch in list(component_pages.fetches):
            if fetch.stage is ComponentStage.FETCHING:
                self._give_up(fetch)

    def give_back(self, component_pages: RequestComponents) -> None:
        """Nothing is under way: free the host pages that are still held. Can be called again."""
        for fetch in list(component_pages.fetches):
            self.copied(fetch)

    def _give_up(self, fetch: ComponentFetch) -> None:
        self._storage.fetch_over(fetch)
        self._storage.fetch_given_up(fetch.op, fetch.host_pages, fetch.component)
        del fetch.component_pages.fetches[fetch]
        fetch.component_pages.copies -= 1


def _positions(ranges: tuple[tuple[int, int], ...], end: int) -> set[int]:
    """The positions before `end` in ranges of storage."""
    return {at for first, stop in ranges for at in range(max(first, 0), min(stop, end))}
