"""Component pages in storage: which ones a request asks for, and their way from storage to the device.

In storage every window page and every state snapshot is a record of its own, named by the full page at its position. A
query of storage asks for the component pages that the end of the prompt needs and device and host lack, together with
the full pages. They are used whether or not the full pages come from storage, too. They are read into host pages that
belong to this request only, and are copied from there to the request's device pages:

    FETCHING ──valid pages──▶ COPYING ──▶ over: the host pages are free
        │ short, late           │ error
        ▼                       ▼
      prefill is asked for what is not valid (`tidekv.states.components.missing`)

A fetch may have begun before the plan, as a look-ahead read (`tidekv.states.components.look_ahead`).

Ownership: the `ComponentFetch` owns the host pages in every stage; the request's `RequestComponents` owns the device
pages. A fetch that is late, or whose request leaves, hands its host pages to a `LateFetch` operation, which frees them
when the read ends. A copy in flight keeps its host pages and its device pages until it ends.

Component pages are few, so every fetch policy waits for them until their deadline, even if the transfer is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import FetchPages
from tidekv.states.records.ahead import ComponentAhead
from tidekv.states.records.reads import ComponentFetch
from tidekv.states.records.request import Request, RequestComponents
from tidekv.states.records.stages import ComponentStage
from tidekv.states.rollback import Rollback
from tidekv.states.storage_policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.components.missing import MissingPages
    from tidekv.states.core_state import CoreState, Operation
    from tidekv.states.events import Outcome, StoredComponent
    from tidekv.states.prefix.component_index import ComponentIndex
    from tidekv.states.storage.admission import StorageAdmission


class ComponentRead:
    """Operation: a read of component pages from storage to host memory."""

    __slots__ = ("_rules", "_storage", "component_pages", "fetch")

    def __init__(
        self,
        rules: ComponentStorage,
        storage: StorageAdmission,
        component_pages: RequestComponents,
        fetch: ComponentFetch,
    ) -> None:
        self._rules = rules
        self._storage = storage
        self.component_pages = component_pages
        self.fetch = fetch

    def ended(self, event: Outcome, error: str) -> None:
        """Start the copy of the valid pages to the device; the rest is asked of prefill."""
        self._rules.fetched(self.component_pages, self.fetch, self._storage.fetch_ended(event))

    def late(self) -> None:
        """Ask prefill for the pages; the read continues without the request."""
        self._storage.fetch_is_late()
        self._rules.is_late(self.component_pages, self.fetch)

    def abandon(self) -> None:
        """Ask prefill for the pages."""
        self._rules.failed(self.component_pages, self.fetch)


class ComponentStorage:
    """Queries storage for component pages, plans with the answers, and fetches."""

    def __init__(
        self,
        state: CoreState,
        storage: StorageAdmission,
        index: ComponentIndex,
        missing: MissingPages,
        copy_in: Callable[[RequestComponents, ComponentFetch], int],
    ) -> None:
        """`copy_in` starts the copy of a fetch's pages to the device, and returns its operation."""
        self._state = state
        self._storage = storage
        self._missing = missing
        self._copy_in = copy_in
        self._index = index

    # --- The query ---

    def wanted(self, request: Request) -> dict[str, int]:
        """By component, the first position to ask storage for; empty if it need not be asked for components.

        A window is worth a query from `prefetch_threshold_tokens` on, a snapshot always. The end of a prompt has a
        snapshot in storage only if it is the end of a page.
        """
        if not self._storage.keeps_components:
            return {}
        page_size = self._state.settings.page_size
        wanted: dict[str, int] = {}
        for name, first in self.needed_from(request).items():
            if not self._index.host[name].pool.total:
                # Its pages could not be read.
                continue
            if request.lent is not None:
                first = request.lent.components[name].restored
            missing = self.available_end(request.namespace, request.keys, name, first, None)
            tokens = max(request.full_pages - missing, 0) * page_size
            is_shared = self._index.components[name].is_shared
            if tokens and (not is_shared or tokens >= self._state.settings.prefetch_threshold_tokens):
                wanted[name] = missing
        return wanted

    def needed_from(self, request: Request) -> dict[str, int]:
        """By component, the first position that the request needs at the end of its prompt."""
        page_size = self._state.settings.page_size
        components = self._index.components.items()
        return {name: component.needed_from(request.prompt_tokens, page_size) for name, component in components}

    def available_end(self, namespace: str, keys: bytes, name: str, first: int, answer: StoredComponent | None) -> int:
        """The end of the positions of a component, from `first` on, that device, host and storage have without a gap.

        `answer` is that of storage; None counts as no pages.
        """
        pages = len(keys) // self._state.settings.key_bytes
        if first >= pages:
            return first
        here = self._index.positions(namespace, keys, name, first)
        return gap(first, pages, here | positions_in(answer, first, pages))

    # --- The plan ---

    def stored(self, request: Request, name: str, first: int) -> set[int]:
        """The positions from `first` on at which storage has pages of a component that the plan may fetch."""
        if request.restore_limit or not self._storage.keeps_components:
            return set()
        answers = (entry for entry in request.answer.components if entry.component == name)
        return positions_in(next(answers, None), first, request.full_pages)

    def to_fetch(self, request: Request, name: str, first: int, here: set[int]) -> tuple[PageIds, int]:
        """The positions of a component to fetch if the caches have those of `here`, and the first that prefill sends.

        `first` is the first position that the request needs.
        """
        stored = self.stored(request, name, first) - here
        end = gap(first, request.full_pages, here | stored)
        return page_ids(sorted(at for at in stored if at < end)), end

    def take_host(self, request: Request, name: str, count: int) -> PageIds | None:
        """Take host pages for a fetch of `count` pages; None if limits or the pool do not allow the whole fetch.

        A request does not wait for them: prefill sends what is not fetched.
        """
        deadline_s = self._deadline_s(request, count)
        return self._index.take("host", name, count) if self._storage.allowance(count, deadline_s) >= count else None

    def begin(
        self, request: Request, component_pages: RequestComponents, fetch: ComponentFetch, undo: Rollback
    ) -> None:
        """Start a fetch, which owns its host pages. `undo` reverts it."""
        state = self._state
        count = len(fetch.positions)
        # Behind the pages that are being fetched already.
        deadline_s = self._deadline_s(request, count + self._storage.pages_in_flight)
        read = ComponentRead(self, self._storage, component_pages, fetch)
        fetch.run_as(state.start_operation(read, deadline_s=deadline_s))
        undo.callback(state.operations.pop, fetch.op)
        state.emit(
            FetchPages(
                op=fetch.op,
                request_id=request.request_id,
                component=fetch.component,
                positions=fetch.positions,
                host_pages=fetch.host_pages,
                timeout_s=min(deadline_s, FETCH_TIMEOUT_MAX_S),
            )
        )
        component_pages.add_fetch(fetch)
        undo.callback(component_pages.forget_fetch, fetch)
        component_pages.copy_began()
        self._storage.take(count)
        undo.callback(self._storage.take, -count)
        self._storage.fetch_began(fetch, count)
        undo.callback(self._storage.fetch_over, fetch)
        fetch.was_queued(state.now_s, self._storage.pages_in_flight)

    def read_ahead(self, request: Request, name: str, positions: PageIds) -> ComponentAhead | None:
        """The look-ahead read of exactly these positions, if there is one that the request's plan may adopt."""
        read = None if request.ahead is None else request.ahead.components.get(name)
        return read if read is not None and read.positions == positions else None

    def adopt(
        self,
        request: Request,
        component_pages: RequestComponents,
        fetch: ComponentFetch,
        read: ComponentAhead,
        undo: Rollback,
    ) -> None:
        """Turn a look-ahead read into a fetch of the plan, which takes over its host pages. `undo` reverts it."""
        state = self._state
        # Registered before the first change, since `_disown` also handles a partial adoption.
        undo.callback(self._disown, component_pages, fetch, read, state.operations.get(read.op))
        read.note_adoption(is_adopted=True)
        fetch.own_host(read.host_pages)
        component_pages.add_fetch(fetch)
        component_pages.copy_began()
        if read.has_ended:
            fetch.copy(self._copy_in(component_pages, fetch))
            return
        # The read continues under its operation number; only the owner of the outcome changes.
        fetch.run_as(read.op)
        fetch.was_queued(read.begun_at_s, read.queued_pages)
        operation = ComponentRead(self, self._storage, component_pages, fetch)
        state.replace_operation(fetch.op, operation)
        deadline_s = self._deadline_s(request, self._storage.pages_in_flight)
        state.set_deadline(operation, state.now_s + deadline_s, op=fetch.op)
        self._storage.fetching[fetch] = len(fetch.positions)

    def _disown(
        self,
        component_pages: RequestComponents,
        fetch: ComponentFetch,
        read: ComponentAhead,
        operation: Operation | None,
    ) -> None:
        """Reverse an adoption in the step that made it: the read belongs to the look-ahead again."""
        read.note_adoption(is_adopted=False)
        component_pages.forget_fetch(fetch)
        self._storage.fetching.pop(fetch, None)
        if operation is None:
            self._state.operations.pop(fetch.op, None)
        else:
            # Restore the same object: its deadline is still in the heap and is matched by identity.
            self._state.replace_operation(read.op, operation)

    def _deadline_s(self, request: Request, count: int) -> float:
        return self._state.settings.prefetch_deadline_s(count, request.deadline_at_s - self._state.now_s)

    # --- Outcomes ---

    def fetched(self, component_pages: RequestComponents, fetch: ComponentFetch, valid: int) -> None:
        """Start the copy of the first `valid` pages, which are verified; the others are asked of prefill.

        After a raise, `failed` ends the fetch.
        """
        state = self._state
        count = len(fetch.positions)
        if valid < count:
            state.count("l3_pages_short", count - max(valid, 0))
            if valid < 1:
                self.failed(component_pages, fetch)
                return
            self._cut(component_pages, fetch, valid)
        else:
            self._storage.note_throughput(begun_at_s=fetch.begun_at_s, pages=fetch.queued_pages)
        fetch.copy(self._copy_in(component_pages, fetch))
        self._storage.fetch_over(fetch)
        request = component_pages.request
        assert request is not None, "a leaving request gives up its fetches"
        state.request_changed(request)

    def _cut(self, component_pages: RequestComponents, fetch: ComponentFetch, valid: int) -> None:
        """Reduce a fetch that has ended to its first `valid` pages."""
        self._index.give_back({fetch.component: fetch.host_pages[valid:]}, "host")
        self._missing.lost(component_pages, fetch.component, fetch.positions[valid:], "component_fetch_short")
        fetch.cut(valid)

    def failed(self, component_pages: RequestComponents, fetch: ComponentFetch) -> None:
        """Free the host pages, and ask prefill for the pages: nothing writes to them. Safe to call again."""
        self._storage.fetch_over(fetch)
        self.copied(component_pages, fetch)
        component_pages.copy_ended()
        self._missing.lost(component_pages, fetch.component, fetch.positions, "component_fetch_short")

    def is_late(self, component_pages: RequestComponents, fetch: ComponentFetch) -> None:
        """Ask prefill for the pages; a `LateFetch` owns the host pages until the read ends."""
        self._state.count("l3_fetches_late")
        self._storage.note_throughput(begun_at_s=fetch.begun_at_s, pages=fetch.queued_pages)
        self._give_up(component_pages, fetch)
        self._missing.lost(component_pages, fetch.component, fetch.positions, "component_fetch_late")

    def copied(self, component_pages: RequestComponents, fetch: ComponentFetch) -> None:
        """Free the host pages after the copy to the device, or without a copy. Safe to call again after a raise."""
        self._index.give_back({fetch.component: fetch.host_pages}, "host")
        fetch.own_host(page_ids())
        component_pages.forget_fetch(fetch)

    # --- The ends ---

    def abandon_fetches(self, component_pages: RequestComponents) -> None:
        """Give up the fetches of a leaving request. Copies continue to its device pages."""
        for fetch in list(component_pages.fetches):
            if fetch.stage is ComponentStage.FETCHING:
                self._give_up(component_pages, fetch)

    def give_back(self, component_pages: RequestComponents) -> None:
        """Free the remaining host pages; nothing is in flight. Safe to call again."""
        for fetch in list(component_pages.fetches):
            self.copied(component_pages, fetch)

    def _give_up(self, component_pages: RequestComponents, fetch: ComponentFetch) -> None:
        self._storage.fetch_over(fetch)
        self._storage.fetch_given_up(fetch, component=fetch.component)
        component_pages.forget_fetch(fetch)
        component_pages.copy_ended()


def gap(first: int, end: int, here: set[int]) -> int:
    """The first position in [first, end) that is missing; `end` if none is, but at least `first`."""
    return next((at for at in range(first, end) if at not in here), max(first, end))


def positions_in(answer: StoredComponent | None, first: int, end: int) -> set[int]:
    """The positions [first, end) that an answer of storage has."""
    ranges = () if answer is None else answer.ranges
    return {at for begin, stop in ranges for at in range(max(begin, first), min(stop, end))}
