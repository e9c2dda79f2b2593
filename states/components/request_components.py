"""What a request has of components: its tails, from the grant until it gives everything back.

With components a plan ends at a boundary that all of them can serve, and what the request needs of each is taken with
the grant, in the same step as its full pages, or the request waits. Of a component it needs the tail at the *prompt's
end*, part of which may lie before the boundary:

    positions of a window    [first, boundary)       of the index, shared; or loaded from the host into own pages
                             [boundary, page_count)  own, written by prefill
    the record of a state    own: a copy of the index's, where the boundary is the prompt's end; else prefill's

What storage alone has of [first, boundary) comes to own pages, too, by way of the host
(`tidekv.states.components.storage`).

A window never grows beyond its tail and the page that is being written, so each request gets that many own pages at
once and never asks for more: what the window has left behind is written again. All of a component or nothing: where a
fetch from storage fails, the request starts over without storage; where a copy fails, it trusts no host copies of
components, and after another failure no copies at all.

A caller that computes by itself begins with the first page: its tails would have to be in place before it begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import CopyComponent
from tidekv.states.components.specs import ComponentPages, ComponentTable
from tidekv.states.components.storage import (
    WITHOUT_COMPONENTS,
    WITHOUT_HOST,
    WITHOUT_STORAGE,
    ComponentStorage,
    distrust,
)
from tidekv.states.errors import BrokenInvariant
from tidekv.states.request.request import Request, RequestComponents
from tidekv.states.rollback import Rollback
from tidekv.states.types import PageIds, page_ids, without

if TYPE_CHECKING:
    from tidekv.states.components.index import ComponentIndex
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import ComponentLeft, Outcome
    from tidekv.states.prefix.node import MatchResult, Node, TierName
    from tidekv.states.storage.admission import StorageAdmission


class ComponentCopy:
    """Operation: a copy into a request's tails."""

    __slots__ = ("_rules", "component_pages")

    def __init__(self, rules: ComponentRestore, component_pages: RequestComponents) -> None:
        self._rules = rules
        self.component_pages = component_pages

    def ended(self, event: Outcome, error: str) -> None:
        """The request waits for one copy less, or starts over."""
        self._rules.copied(self.component_pages, error)

    def late(self) -> None:
        """The request starts over on other pages."""
        self._rules.is_late(self.component_pages)

    def abandon(self) -> None:
        """Give the tails back."""
        self._rules.give_up(self.component_pages)


class ComponentRestore:
    """The steps of requests with components."""

    def __init__(self, state: CoreState, storage: StorageAdmission, index: ComponentIndex) -> None:
        self._state = state
        self._index = index
        self.storage = ComponentStorage(state, storage, index, self.copy_of)

    # --- The grant ---

    def match(self, request: Request) -> MatchResult:
        """What the index and all components have of the prompt; once it is granted, no more than was reserved for."""
        width = self._state.settings.key_bytes
        if request.component_pages is not None:
            return self._index.index.match(request.namespace, request.keys[: request.component_pages.boundary * width])
        request.stored_end = self.storage.boundary(request)
        if request.stored_end:
            return self._index.index.match(request.namespace, request.keys[: request.stored_end * width])
        keys = b"" if request.recomputes or request.component_limit >= WITHOUT_COMPONENTS else request.keys
        use_host = request.restore_limit < 2 and request.component_limit < WITHOUT_HOST
        return self._index.match(request.namespace, keys, use_host=use_host)

    def reserve(self, request: Request, match: MatchResult) -> bool:
        """Take what the request needs of every component, or nothing and False."""
        page_size = self._state.settings.page_size
        components = self._index.components
        spare = {name: c.live_pages(page_size) if c.is_shared else 0 for name, c in components.items()}
        needed = self.storage.needed_from(request)
        here = match.device_pages + match.host_pages
        reserved = self._index.reserve(match, spare, needed, boundary=request.stored_end or here)
        if reserved is None:
            return False
        component_pages = request.component_pages = RequestComponents(request, reserved)
        component_pages.fetched_pages = reserved.boundary - here
        for name, tail in reserved.component_pages.items():
            first = component_pages.firsts[name] = max(tail.first, needed[name])
            begin = max(first, reserved.boundary)
            remote = tail.own[len(tail.own) - spare[name] :] if components[name].is_shared else tail.own
            remote = remote[: request.page_count - begin]
            # A caller that computes by itself writes to the same pages; prefill does not.
            component_pages.remote[name] = page_ids() if request.recomputes else remote
            component_pages.tables[name] = tail.table + remote if components[name].is_shared else tail.table
        holes = {name: tail.stored[0] for name, tail in reserved.component_pages.items() if tail.stored[0]}
        if holes and not request.stored_end:
            raise BrokenInvariant(f"the caches serve {request} at page {reserved.boundary}, and nobody holds {holes}")
        if not self.storage.reserve(component_pages):
            # As for full pages, host memory is not waited for.
            self.leave(request)
            request.component_limit = WITHOUT_STORAGE
            return False
        return True

    def does_with_less(self, request: Request) -> bool:
        """Whether a request that could not reserve tries with less at once; else it waits for freed pages."""
        if request.stored_end and (request.component_limit or self._is_alone()):
            request.component_limit = WITHOUT_STORAGE
            return True
        if request.component_limit < WITHOUT_COMPONENTS and self._is_alone():
            request.component_limit = WITHOUT_COMPONENTS
            return True
        return False

    def _is_alone(self) -> bool:
        """Whether no request holds anything of components: waiting for them would be in vain."""
        tiers = self._index.device.values()
        return not any(tier.receipts or tier.account.owned or tier.account.draining for tier in tiers)

    # --- The plan ---

    def serves(self, request: Request, match: MatchResult) -> bool:
        """Whether what was reserved still goes with what the index has, and with the tiers that are trusted."""
        component_pages = request.component_pages
        assert component_pages is not None
        if request.stored_end:
            return not request.restore_limit
        loads = any(len(tail.loads[0]) for tail in component_pages.reserved.component_pages.values())
        is_trusted = request.restore_limit < 2 or not (match.host_pages or loads)
        return is_trusted and match.device_pages + match.host_pages == component_pages.boundary

    def reaches(self, request: Request, end: int) -> bool:
        """Whether loads bring the plan to the boundary that was reserved for; else the request starts over."""
        component_pages = request.component_pages
        assert component_pages is not None
        if end < component_pages.boundary:
            distrust(self._state, component_pages, WITHOUT_STORAGE, "not all that storage has can be fetched")
        return end >= component_pages.boundary

    def begin(self, request: Request, node: Node, undo: Rollback) -> None:
        """Start the copies, and lock the tails to `node`, the end of the plan. `undo` takes all of it back."""
        component_pages = request.component_pages
        assert component_pages is not None
        assert component_pages.lock is not None
        undo.callback(self._lock_at, component_pages, component_pages.lock.full.node)
        self._lock_at(component_pages, node)
        undo.callback(self._forget_copies, component_pages)
        for name, tail in component_pages.reserved.component_pages.items():
            self._copy(component_pages, name, "host", tail.loads, undo)
            self._copy(component_pages, name, "device", tail.clones, undo)
        self.storage.begin(request, component_pages, undo)

    def _copy(
        self,
        component_pages: RequestComponents,
        name: str,
        source: TierName,
        pages: tuple[PageIds, PageIds],
        undo: Rollback,
    ) -> None:
        if not pages[0]:
            return
        op = self._state.start_operation(self.copy_of(component_pages), deadline_s=self._state.settings.copy_deadline_s)
        undo.callback(self._state.operations.pop, op)
        component_pages.copies += 1
        self._state.emit(
            CopyComponent(
                op=op, component=name, source=source, source_pages=pages[0], target="device", target_pages=pages[1]
            )
        )

    def _forget_copies(self, component_pages: RequestComponents) -> None:
        component_pages.copies = 0

    def _lock_at(self, component_pages: RequestComponents, node: Node) -> None:
        assert component_pages.lock is not None
        lock = self._index.lock(node, boundary=component_pages.boundary)
        with Rollback() as undo:
            undo.callback(self._index.unlock, lock)
            self._index.unlock(component_pages.lock)
            undo.keep()
        component_pages.lock = lock

    def promise(self, request: Request) -> tuple[ComponentPages, ...]:
        """What prefill is to send of each component."""
        component_pages = request.component_pages
        assert component_pages is not None
        return tuple(
            ComponentPages(name, max(component_pages.firsts[name], component_pages.boundary), pages)
            for name, pages in component_pages.remote.items()
        )

    # --- Copies ---

    def copy_of(self, component_pages: RequestComponents) -> ComponentCopy:
        """The operation of a copy into these tails."""
        return ComponentCopy(self, component_pages)

    def copied(self, component_pages: RequestComponents, error: str) -> None:
        """A copy is over."""
        component_pages.copies -= 1
        if error:
            self._state.count("copies_failed")
            distrust(self._state, component_pages, WITHOUT_HOST, "a copy of a component failed")
        if component_pages.request is not None:
            self._state.dirty[component_pages.request] = None
        elif not component_pages.copies:
            self.give_up(component_pages)

    def is_late(self, component_pages: RequestComponents) -> None:
        """A copy did not end in time: the request starts over on other pages."""
        self._state.count("copies_late")
        distrust(self._state, component_pages, WITHOUT_HOST, "a copy of a component did not end in time")

    # --- The ends ---

    def commit(self, request: Request) -> tuple[ComponentTable, ...]:
        """Everything is here: what was loaded of windows joins the index. Returns the tables for the caller."""
        component_pages = request.component_pages
        assert component_pages is not None and component_pages.lock is not None
        component_pages.remote = {}
        for name, tail in component_pages.reserved.component_pages.items():
            if self._index.components[name].is_shared:
                # As far as it was entered before a raise, the table has the index's pages.
                self._enter(component_pages, name, tail.first, component_pages.tables[name][: len(tail.table)])
        self._let_go_of_sources(component_pages)
        return component_pages.table

    def keep(self, request: Request, left: tuple[ComponentLeft, ...], node: Node) -> None:
        """Enter what the caller has left of components into the index, as far as the full pages reach: to `node`.
        Can be called again if it raised.
        """
        component_pages = request.component_pages
        assert component_pages is not None
        for tail in left:
            if (tail.component, tail.first) in component_pages.kept:
                # It was entered before a raise.
                continue
            pages = page_ids(tail.pages[: max(0, node.depth_pages - tail.first)])
            first = component_pages.firsts[tail.component]
            shared = component_pages.tables[tail.component]
            for position, page in enumerate(pages, tail.first):
                is_shared = first <= position < first + len(shared) and shared[position - first] == page
                if page not in component_pages.own[tail.component] and not is_shared:
                    raise BrokenInvariant(f"{request} leaves page {page} of {tail.component!r}, which it does not have")
            if not pages:
                # All of it lies beyond what is kept.
                continue
            _, unused = self._index.insert("device", tail.component, node, tail.first, pages)
            taken = without(pages, unused)
            component_pages.own[tail.component] = without(component_pages.own[tail.component], taken)
            component_pages.kept.add((tail.component, tail.first))

    def leave(self, request: Request) -> None:
        """Give everything back; pages that copies still write to when those have ended."""
        if request.component_pages is None:
            return
        self.storage.let_go(request.component_pages)
        if not request.component_pages.copies:
            self.give_up(request.component_pages)
        request.component_pages.request = None
        request.component_pages = None

    def give_up(self, component_pages: RequestComponents) -> None:
        """The pages have no writer any more: they are free, and so is what was locked. Can be called again."""
        self._index.give_back(component_pages.own)
        component_pages.own = {}
        self.storage.give_back(component_pages)
        if component_pages.lock is not None:
            self._index.unlock(component_pages.lock)
            component_pages.lock = None
        self._let_go_of_sources(component_pages)
        self._state.pages_freed = True

    def _let_go_of_sources(self, component_pages: RequestComponents) -> None:
        if component_pages.pin is not None:
            self._index.unpin(component_pages.pin)
            component_pages.pin = None

    def _enter(self, component_pages: RequestComponents, name: str, first: int, pages: PageIds) -> None:
        """The index takes what it does not have; where it has another page, that is used from now on."""
        assert component_pages.lock is not None
        table, unused = self._index.insert("device", name, component_pages.lock.full.node, first, pages)
        # Said before anything is given back, so that a raise from here on loses no page.
        component_pages.own[name] = without(component_pages.own[name], without(pages, unused))
        self._index.give_back({name: unused})
        component_pages.own[name] = without(component_pages.own[name], unused)
        component_pages.tables[name] = table + component_pages.tables[name][len(table) :]
