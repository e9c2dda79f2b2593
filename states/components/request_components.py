"""Component pages of a request, from its grant until it gives everything back.

With components a plan ends at a boundary that all of them serve. What the request needs of each component is taken with
the grant, in the same step as its full pages, or the request waits. It needs the component pages of the *end of the
prompt*, some of which may lie before the boundary:

    window page at [first, boundary)        the index's, shared; or the request's own, loaded from host or storage
    window page at [boundary, page_count)   the request's own, written by prefill
    state snapshot                          the request's own: a copy of the index's if the boundary is the end of the
                                            prompt, otherwise written by prefill

Pages that only storage has are read by way of the host (`tidekv.states.components.storage`).

A request owns its pages until one of the following:

- `commit` moves the loaded window pages to the index when the request becomes ready; the table keeps using them under
  the request's lock;
- `keep` moves what the caller leaves at the finish to the index;
- `leave` frees the rest. While copies into the pages are in flight, `RequestComponents` outlives its request and frees
  them when the last copy ends. Pages that prefill may still write to go to the quarantine of the room
  (`tidekv.states.handover.rooms`) before that. A recomputation in flight takes over everything instead, until it ends.

A window never needs more pages than cover it and the page being written. Each request gets that many own pages at once
and never asks for more: pages that the window has left are written again.

A component's pages of a boundary are complete or of no use. If a fetch from storage fails, the request starts over
without storage; if a copy fails, without host copies of components, and after another failure without any copies.

A caller that recomputes begins with the first page: no component pages are in place for a later beginning.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyComponent
from tidekv.states.components.specs import ComponentPages, ComponentTable
from tidekv.states.components.storage import (
    WITHOUT_COMPONENTS,
    WITHOUT_HOST,
    WITHOUT_STORAGE,
    ComponentStorage,
    preempt,
)
from tidekv.states.errors import BrokenInvariant
from tidekv.states.events import CopyEnded
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
    """Operation: a copy into a request's component pages."""

    __slots__ = ("_rules", "component_pages")

    def __init__(self, rules: ComponentRestore, component_pages: RequestComponents) -> None:
        self._rules = rules
        self.component_pages = component_pages

    def ended(self, event: Outcome, error: str) -> None:
        """Count the copy as ended; after an error the request starts over."""
        if isinstance(event, CopyEnded) and event.intact is not None:
            self._rules.note_damaged(self.component_pages)
        self._rules.copied(self.component_pages, error)

    def late(self) -> None:
        """Let the request start over with other pages."""
        self._rules.is_late(self.component_pages)

    def abandon(self) -> None:
        """Give the component pages back."""
        self._rules.give_up(self.component_pages)


class ComponentRestore:
    """Reserves, copies and gives back the component pages of requests."""

    def __init__(self, state: CoreState, storage: StorageAdmission, index: ComponentIndex) -> None:
        self._state = state
        self._index = index
        self.storage = ComponentStorage(state, storage, index, self.copy_of)

    # --- The grant ---

    def match(self, request: Request) -> MatchResult:
        """Match the prompt in the index and all components; after the grant, only up to the reserved boundary."""
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
        """Take what the request needs of every component; False if it cannot, with nothing taken."""
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
        for name, matched in reserved.component_pages.items():
            first = component_pages.firsts[name] = max(matched.first, needed[name])
            begin = max(first, reserved.boundary)
            remote = matched.own[len(matched.own) - spare[name] :] if components[name].is_shared else matched.own
            remote = remote[: request.page_count - begin]
            # A caller that recomputes writes to the same pages; prefill must not.
            component_pages.remote[name] = page_ids() if request.recomputes else remote
            component_pages.tables[name] = matched.table + remote if components[name].is_shared else matched.table
        holes = {name: matched.stored[0] for name, matched in reserved.component_pages.items() if matched.stored[0]}
        if holes and not request.stored_end:
            raise BrokenInvariant(f"the caches serve {request} at page {reserved.boundary}, but no tier holds {holes}")
        if not self.storage.reserve(component_pages):
            # As for full pages, a request does not wait for host memory.
            self.leave(request)
            request.component_limit = WITHOUT_STORAGE
            return False
        return True

    def does_with_less(self, request: Request) -> bool:
        """Whether a request that could not reserve retries at once with less; otherwise it waits for freed pages."""
        # If no request holds component pages, waiting would not free any.
        if request.stored_end and (request.component_limit or self._pools_unused()):
            request.component_limit = WITHOUT_STORAGE
            return True
        if request.component_limit < WITHOUT_COMPONENTS and self._pools_unused():
            request.component_limit = WITHOUT_COMPONENTS
            return True
        return False

    def _pools_unused(self) -> bool:
        """Whether no request holds component pages on the device, so that waiting for freed pages would never end."""
        tiers = self._index.device.values()
        return not any(tier.receipts or tier.account.owned or tier.account.draining for tier in tiers)

    # --- The plan ---

    def serves(self, request: Request, match: MatchResult) -> bool:
        """Whether the reservation still agrees with the match, and needs trusted tiers only."""
        component_pages = request.component_pages
        assert component_pages is not None
        if request.stored_end:
            return not request.restore_limit
        loads = any(len(matched.loads[0]) for matched in component_pages.reserved.component_pages.values())
        is_trusted = request.restore_limit < 2 or not (match.host_pages or loads)
        return is_trusted and match.device_pages + match.host_pages == component_pages.boundary

    def reaches(self, request: Request, end: int) -> bool:
        """Whether the planned loads reach the reserved boundary; if not, the request starts over."""
        component_pages = request.component_pages
        assert component_pages is not None
        if end < component_pages.boundary:
            preempt(self._state, component_pages, WITHOUT_STORAGE, "not all that storage has can be fetched")
        return end >= component_pages.boundary

    def begin(self, request: Request, node: Node, undo: Rollback) -> None:
        """Start the copies, and move the lock to `node`, the end of the plan. `undo` reverts everything."""
        component_pages = request.component_pages
        assert component_pages is not None
        assert component_pages.lock is not None
        undo.callback(self._lock_at, component_pages, component_pages.lock.full.node)
        self._lock_at(component_pages, node)
        undo.callback(self._forget_copies, component_pages)
        for name, matched in component_pages.reserved.component_pages.items():
            self._copy(component_pages, name, "host", matched.loads, undo)
            self._copy(component_pages, name, "device", matched.clones, undo)
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
        # Lock the new path before unlocking the old one, so that pages on both are protected throughout.
        lock = self._index.lock(node, boundary=component_pages.boundary)
        with Rollback() as undo:
            undo.callback(self._index.unlock, lock)
            self._index.unlock(component_pages.lock)
            undo.keep()
        component_pages.lock = lock

    def promise(self, request: Request) -> tuple[ComponentPages, ...]:
        """The pages of each component that prefill is to write."""
        component_pages = request.component_pages
        assert component_pages is not None
        return tuple(
            ComponentPages(name, max(component_pages.firsts[name], component_pages.boundary), pages)
            for name, pages in component_pages.remote.items()
        )

    # --- Copies ---

    def copy_of(self, component_pages: RequestComponents) -> ComponentCopy:
        """The operation of a copy into these component pages."""
        return ComponentCopy(self, component_pages)

    def copied(self, component_pages: RequestComponents, error: str) -> None:
        """Record the end of a copy. After an error the request starts over.

        If the request has left, the end of the last copy frees everything.
        """
        component_pages.copies -= 1
        if error:
            self._state.count("copies_failed")
            preempt(self._state, component_pages, WITHOUT_HOST, "a copy of a component failed")
        # A request that is still there may be able to move on; one that has left needs its pages freed.
        if component_pages.request is not None:
            self._state.dirty[component_pages.request] = None
        elif not component_pages.copies:
            self.give_up(component_pages)

    def note_damaged(self, component_pages: RequestComponents) -> None:
        """Record that a host page did not have its checksum: `give_up` drops the host pages of this boundary."""
        self._state.count("l2_damaged")
        component_pages.is_damaged = True

    def is_late(self, component_pages: RequestComponents) -> None:
        """Let the request start over with other pages, because a copy did not end in time."""
        self._state.count("copies_late")
        preempt(self._state, component_pages, WITHOUT_HOST, "a copy of a component did not end in time")

    # --- Ready, kept, left ---

    def commit(self, request: Request) -> tuple[ComponentTable, ...]:
        """Move the loaded window pages into the index, and return the tables for the caller. All pages are in place."""
        component_pages = request.component_pages
        assert component_pages is not None and component_pages.lock is not None
        component_pages.remote = {}
        for name, matched in component_pages.reserved.component_pages.items():
            if self._index.components[name].is_shared:
                # After an exception, the table has the index's pages as far as they were entered.
                self._enter(component_pages, name, matched.first, component_pages.tables[name][: len(matched.table)])
        self._release_pin(component_pages)
        return component_pages.table

    def keep(self, request: Request, left: tuple[ComponentLeft, ...], node: Node) -> None:
        """Move what the caller leaves of components into the index, up to `node`, the end of the kept full pages.

        Can be called again after an exception.
        """
        component_pages = request.component_pages
        assert component_pages is not None
        for entry in left:
            if (entry.component, entry.first) in component_pages.kept:
                # Entered before an exception.
                continue
            pages = page_ids(entry.pages[: max(0, node.depth_pages - entry.first)])
            first = component_pages.firsts[entry.component]
            shared = component_pages.tables[entry.component]
            for position, page in enumerate(pages, entry.first):
                is_shared = first <= position < first + len(shared) and shared[position - first] == page
                if page not in component_pages.own[entry.component] and not is_shared:
                    raise BrokenInvariant(
                        f"{request} leaves page {page} of {entry.component!r}, which it does not have"
                    )
            if not pages:
                # Everything lies beyond the kept full pages.
                continue
            _, unused = self._index.insert("device", entry.component, node, entry.first, pages)
            taken = without(pages, unused)
            component_pages.own[entry.component] = without(component_pages.own[entry.component], taken)
            component_pages.kept.add((entry.component, entry.first))

    def leave(self, request: Request) -> None:
        """Give everything back; if copies into the pages are in flight, when the last one ends."""
        if request.component_pages is None:
            return
        self.storage.abandon_fetches(request.component_pages)
        if not request.component_pages.copies:
            self.give_up(request.component_pages)
        request.component_pages.request = None
        request.component_pages = None

    def give_up(self, component_pages: RequestComponents) -> None:
        """Free the pages and give back the receipts: nothing writes to the pages any more. Safe to call again."""
        self._index.give_back(component_pages.own)
        component_pages.own = {}
        self.storage.give_back(component_pages)
        if component_pages.lock is not None:
            self._index.unlock(component_pages.lock)
            component_pages.lock = None
        self._release_pin(component_pages)
        self._state.pages_freed = True

    def _release_pin(self, component_pages: RequestComponents) -> None:
        pin = component_pages.pin
        if pin is None:
            return
        self._index.unpin(pin)
        component_pages.pin = None
        if component_pages.is_damaged:
            component_pages.is_damaged = False
            # A cache tier never fails a request: the pages stay in the index if a hook raises.
            drop = partial(self._index.drop_host_pages_of, pin.full.node, component_pages.boundary)
            self._state.run_guarded(drop, recover=lambda: None)

    def _enter(self, component_pages: RequestComponents, name: str, first: int, pages: PageIds) -> None:
        """Move pages into the index; where the index has another page already, the request uses that from now on."""
        assert component_pages.lock is not None
        table, unused = self._index.insert("device", name, component_pages.lock.full.node, first, pages)
        # Update the ownership before giving pages back, so that a raise from here on loses no page.
        component_pages.own[name] = without(component_pages.own[name], without(pages, unused))
        self._index.give_back({name: unused})
        component_pages.own[name] = without(component_pages.own[name], unused)
        component_pages.tables[name] = table + component_pages.tables[name][len(table) :]
