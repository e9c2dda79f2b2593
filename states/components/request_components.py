"""Component pages of a request, from its grant until it gives everything back.

A request needs the component pages of the *end of its prompt*: the trailing pages of a window, the snapshot of a state.
They do not depend on how far the full KV is restored. For each component, its positions are served from the first one
on by the nearest source that has the page: device, host, storage. Prefill writes the pages from the first position on
that none of them has, up to the end of the prompt:

    position        5    6    7    8 (partial)
    window          L1   L2   L3   prefill        [first, sent_from) cached, [sent_from, page_count) sent
    window          L1   .    L3   prefill        6 is missing: prefill sends 6, 7 and 8
    state                          prefill        its only position: the end of the prompt

    window page on the device               the index's, shared
    window page on the host or in storage   loaded into a page that joins the index when the request becomes ready; if
                                            the pool has no further page, into one of the request's own
    window page of prefill                  the request's own
    state snapshot                          the request's own, a copy if it is cached, because the model writes to it

Each request takes as many own pages as it will ever need with its grant, in the same step as its full pages, or waits:
a window never needs more pages than cover it and the page being written, and pages that it has left are written again.
With `SnapshotPolicy.per_request` it gets spare records of each state as well, as far as the pool has room.

A request owns its pages until one of the following:

- `commit` moves loaded window pages to the index; the table keeps using them under the request's lock;
- `commit` moves the snapshots that a recomputing caller has taken to the index;
- `keep` moves what the caller leaves at the finish to the index, snapshots only where the policy keeps them;
- `leave` frees the rest. While copies into the pages are in flight, `RequestComponents` outlives its request and frees
  them when the last copy ends. Pages that prefill may still write to go to the quarantine of the room
  (`tidekv.states.handover.rooms`) before that. A recomputation in flight takes over everything instead, until it ends.

What a source does not deliver is asked of prefill by an extend (`tidekv.states.components.missing`), and the request
goes on.

With lent pages (`tidekv.states.request.lending`) each position has the page that the embedder lends for it. Those that
are in place count as device pages; nothing joins the index, and `leave` gives the pages back to the embedder's request.
If copies into them are under way then, they are draining until the last one ends.

A caller that recomputes needs a page at which the full KV and every component can continue: the longest such boundary
on the device that is not the end of the prompt. It reads the component pages of that boundary, which stay the index's
and are locked from the grant on, and writes its own pages, those for the end of the prompt.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyPages
from tidekv.states.component_specs import ComponentPages, ComponentTable
from tidekv.states.components.missing import MissingPages
from tidekv.states.components.shared_ends import SharedEnds
from tidekv.states.components.snapshots import Snapshots
from tidekv.states.components.storage import ComponentStorage, gap
from tidekv.states.errors import BrokenInvariant
from tidekv.states.events import CopyEnded
from tidekv.states.records.reads import ComponentFetch
from tidekv.states.records.request import Request, RequestComponents
from tidekv.states.rollback import Rollback
from tidekv.states.types import PageIds, page_ids, without

if TYPE_CHECKING:
    from tidekv.states.components.missing import Extend
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import ComponentLeft, Outcome
    from tidekv.states.prefix.component_index import ComponentIndex, ComponentReceipt
    from tidekv.states.prefix.node import MatchResult, Node, TierName
    from tidekv.states.records.loan import Loan
    from tidekv.states.records.plan import Plan
    from tidekv.states.storage.admission import StorageAdmission


class ComponentCopy:
    """Operation: a copy into a request's pages of one component, at `positions`.

    `fetch` owns the host pages that it reads, if they are not the index's.
    """

    __slots__ = ("_rules", "component", "component_pages", "fetch", "is_counted", "op", "positions")

    def __init__(
        self,
        rules: ComponentRestore,
        component_pages: RequestComponents,
        component: str,
        positions: PageIds,
        fetch: ComponentFetch | None = None,
    ) -> None:
        self._rules = rules
        self.component_pages = component_pages
        self.component = component
        self.positions = positions
        self.fetch = fetch
        self.op = 0
        self.is_counted = False
        """Whether it was counted as late."""

    def ended(self, event: Outcome, error: str) -> None:
        """Count the copy as ended; after an error its pages are asked of prefill."""
        if isinstance(event, CopyEnded) and event.intact is not None:
            self._rules.note_damaged(self.component_pages)
        self._rules.copied(self, error)

    def late(self) -> None:
        """Ask prefill for the pages, into fresh ones."""
        self._rules.is_late(self)

    def abandon(self) -> None:
        """Let the request move on; if it has left, give its component pages back."""
        self._rules.settle(self.component_pages)


class ComponentRestore:
    """Reserves, copies and gives back the component pages of requests."""

    def __init__(self, state: CoreState, storage: StorageAdmission, index: ComponentIndex, extend: Extend) -> None:
        self._state = state
        self._index = index
        self.missing = MissingPages(state, index, extend, self.settle)
        self.storage = ComponentStorage(state, storage, index, self.missing, self._copy_fetched)
        self.snapshots = Snapshots(state.settings.snapshots, index, page_size=state.settings.page_size)
        self.shared_ends = SharedEnds(state, self.missing, self.settle)

    # --- The grant ---

    def match(self, request: Request) -> MatchResult:
        """Match the prompt for a request that recomputes: up to the boundary that it locked, or the longest one."""
        settings, held = self._state.settings, request.component_pages
        if held is not None and held.lock is not None:
            keys = request.keys[: held.lock.full.node.depth_pages * settings.key_bytes]
            return self._index.index.match(request.namespace, keys)
        # The last token is always computed: it leads to the first token of the output.
        pages = (request.prompt_tokens - 1) // settings.page_size
        keys = b"" if request.recompute.computes_all else request.keys[: pages * settings.key_bytes]
        # Without pages that a load has yet to fill: this request has no room to extend into a load that fails.
        return self._index.match(request.namespace, keys, use_host=False, with_pending=False)

    def reserve(self, request: Request, match: MatchResult) -> bool:
        """Take all pages that the request will need of every component; False if it cannot, with nothing taken."""
        page_size = self._state.settings.page_size
        wanted = {name: component.live_pages(page_size) for name, component in self._index.components.items()}
        lock: ComponentReceipt | None = None
        if request.recompute.is_chosen:
            # Taking pages must not evict those that the computation continues from.
            lock = self._index.lock(match.device_node, self._index.firsts(match.device_pages))
        if not self._has_room(wanted):
            if lock is not None:
                self._state.run_guarded(partial(self._index.unlock, lock))
                if self._has_room(wanted):
                    # The pages in the way are those just locked, so waiting might never end.
                    request.recompute.compute_all()
                    self._state.pages_were_freed()
            return False
        component_pages = request.hold_components()
        if lock is not None:
            component_pages.was_locked(lock)
        for name, count in wanted.items():
            # After an exception, `leave` finds what was taken so far.
            pages = self._index.take("device", name, count)
            assert pages is not None, "there was room for it before"
            component_pages.take(name, pages)
        for name in self.snapshots.states:
            spare = self._index.take("device", name, self.snapshots.spare_pages(request, name))
            component_pages.take(name, spare or page_ids())
        return True

    def _has_room(self, wanted: dict[str, int]) -> bool:
        return all(self._index.device[name].room >= count for name, count in wanted.items())

    def hold_lent(self, request: Request, groups: Loan) -> None:
        """Take the component pages that the embedder lends for a request, instead of those of a pool."""
        component_pages = request.hold_components()
        for name, pages in groups.components.items():
            component_pages.take(name, pages.lent)

    # --- The plan ---

    def begin(self, request: Request, plan: Plan, host_node: Node, undo: Rollback) -> None:
        """Choose the source of every component page, and start copies and fetches. `undo` reverts everything.

        `host_node` is the end of the matched host path.
        """
        component_pages = request.component_pages
        assert component_pages is not None
        undo.callback(component_pages.revert_plan, component_pages.own, component_pages.lock)
        firsts = self.storage.needed_from(request)
        component_pages.begin_plan(firsts)
        if component_pages.lock is None:
            lock = self._index.lock(plan.node, firsts)
            component_pages.was_locked(lock)
            undo.callback(self._index.unlock, lock)
        if self._uses_host(request):
            pin = self._index.pin(host_node, firsts)
            component_pages.was_pinned(pin)
            undo.callback(self._index.unpin, pin)
        sender = self.shared_ends.sender_for(request)
        for name in self._index.components:
            self._choose(request, component_pages, name, plan, host_node, undo, is_filled=sender is not None)
        if sender is not None and component_pages.plan.received:
            self.shared_ends.join(component_pages, sender, undo)
        elif any(component_pages.remote.values()):
            self.shared_ends.offer(request, component_pages, undo)
        if request.recompute.is_chosen:
            component_pages.plan.resume(plan.end)
            for name in self.snapshots.states:
                spare = component_pages.own[name].tolist()[1:]
                component_pages.plan.assign(name, self.snapshots.assign(request, name, spare, first=plan.end))

    @staticmethod
    def _uses_host(request: Request) -> bool:
        return request.restore_limit < 2

    def _choose(
        self,
        request: Request,
        component_pages: RequestComponents,
        name: str,
        plan: Plan,
        host_node: Node,
        undo: Rollback,
        *,
        is_filled: bool,
    ) -> None:
        """Choose the sources of one component. If `is_filled`, another room brings what prefill would send."""
        first, is_shared = component_pages.plan.firsts[name], self._index.components[name].is_shared
        device, host = self._index.sources(name, host_node, first)
        lent = None if request.lent is None else request.lent.components[name]
        if lent is not None:
            # What is in place stays there: a record as well, since no other request has the page.
            device, is_shared = lent.in_place(), True
        if request.recompute.is_chosen and not is_shared:
            # A caller that recomputes writes the record of the prompt's end.
            device = {}
        if not self._uses_host(request):
            host = {}
        here = {*device, *host}
        fetched, sent_from = self.storage.to_fetch(request, name, first, here)
        read = self.storage.read_ahead(request, name, fetched)
        landing = page_ids()
        if fetched and read is None:
            taken = self.storage.take_host(request, name, len(fetched))
            if taken is None:
                fetched, sent_from = page_ids(), gap(first, request.full_pages, here)
            else:
                landing = taken
                undo.callback(self._index.give_back, {name: taken}, "host")
        if lent is not None:
            # A page that is written in part, which no tier of ours ever has, may be in place.
            sent_from = max(sent_from, lent.restored)
        shared = {at: device[at] for at in range(first, sent_from) if is_shared and at in device}
        filled = [at for at in range(first, sent_from) if at not in shared]
        own = component_pages.own[name] if lent is None else lent.pages
        joining = page_ids()
        # Only pages whose full pages are in the tree can join the index.
        if is_shared and filled and sent_from <= plan.end and lent is None:
            joining = self._index.take("device", name, len(filled)) or page_ids()
            undo.callback(self._index.give_back, {name: joining})
            component_pages.take(name, joining)
        every = range(first, request.page_count)
        positions = (*filled, *range(sent_from, request.page_count)) if lent is None else every
        targets = dict(zip(positions, (*joining, *own), strict=False))
        table = page_ids(shared[at] if at in shared else targets[at] for at in range(first, request.page_count))
        # A caller that recomputes writes to the same pages; prefill must not.
        is_sent = not (request.recompute.is_chosen or is_filled)
        component_pages.let_write(name, table[sent_from - first :] if is_sent else page_ids())
        component_pages.plan.place(
            name,
            table,
            joining=sent_from - first if joining else 0,
            sent_from=request.page_count if is_filled else sent_from,
        )
        if is_filled and sent_from < request.page_count:
            component_pages.plan.receive(name, sent_from)
        if not self._index.components[name].is_shared and sent_from == request.page_count:
            tier = "storage" if fetched else "device" if first in device else "host"
            component_pages.plan.hit(name, tier)
        of_device = {at: device[at] for at in filled if at in device}
        of_host = {at: host[at] for at in filled if at in host and at not in device}
        self._copy(component_pages, name, "host", of_host, targets, undo)
        self._copy(component_pages, name, "device", of_device, targets, undo)
        if fetched:
            fetch = ComponentFetch(name, fetched, page_ids(targets[at] for at in fetched))
            if read is not None:
                self.storage.adopt(request, component_pages, fetch, read, undo)
            else:
                fetch.own_host(landing)
                self.storage.begin(request, component_pages, fetch, undo)

    def _copy(
        self,
        component_pages: RequestComponents,
        name: str,
        source: TierName,
        sources: dict[int, int],
        targets: dict[int, int],
        undo: Rollback,
    ) -> None:
        if not sources:
            return
        copy = ComponentCopy(self, component_pages, name, page_ids(sources))
        self._start(copy, source, page_ids(sources.values()), page_ids(targets[at] for at in sources), undo)
        component_pages.copy_began()

    def _start(
        self, copy: ComponentCopy, source: TierName, source_pages: PageIds, target_pages: PageIds, undo: Rollback
    ) -> None:
        """Start a copy to device pages. `undo` reverts it."""
        state = self._state
        copy.op = state.start_operation(copy, deadline_s=state.settings.copy_deadline_s)
        undo.callback(state.operations.pop, copy.op)
        state.emit(
            CopyPages(
                op=copy.op,
                component=copy.component,
                source=source,
                source_pages=source_pages,
                target="device",
                target_pages=target_pages,
            )
        )

    def _copy_fetched(self, component_pages: RequestComponents, fetch: ComponentFetch) -> int:
        """Start the copy of what a fetch has brought to the device; returns its operation."""
        copy = ComponentCopy(self, component_pages, fetch.component, fetch.positions, fetch)
        with Rollback() as undo:
            self._start(copy, "host", fetch.host_pages, fetch.device_pages, undo)
            undo.keep()
        return copy.op

    def promise(self, request: Request) -> tuple[ComponentPages, ...]:
        """The pages of each component that prefill is to write."""
        component_pages = request.component_pages
        assert component_pages is not None
        return tuple(
            ComponentPages(name, component_pages.plan.sent_from[name], pages)
            for name, pages in component_pages.remote.items()
        )

    def snapshots_of(self, request: Request) -> dict[str, dict[int, int]]:
        """By state, the page for the snapshot after each of these numbers of pages, for a caller that recomputes."""
        component_pages = request.component_pages
        assert component_pages is not None
        taken = component_pages.plan.snapshots.items()
        return {name: {each.boundary: each.page for each in snapshots} for name, snapshots in taken}

    def resume_from(self, node: Node) -> tuple[ComponentPages, ...]:
        """The component pages from which a computation continues at the end of `node`; none at the first page."""
        pages = []
        for name in self._index.components:
            first, device = self._index.trailing_pages_of("device", name, node)
            pages.append(ComponentPages(name, first, page_ids(device[at] for at in range(first, node.depth_pages))))
        return tuple(pages)

    # --- Copies ---

    def copied(self, copy: ComponentCopy, error: str) -> None:
        """Record the end of a copy. After an error its pages are asked of prefill.

        If the request has left, the end of the last copy frees everything. After a raise, `settle` continues.
        """
        component_pages = copy.component_pages
        if copy.fetch is not None:
            self._state.run_guarded(partial(self.storage.copied, component_pages, copy.fetch))
        component_pages.copy_ended()
        request = component_pages.request
        if error:
            self._state.count("copies_failed")
            self.missing.lost(component_pages, copy.component, copy.positions, "component_copy_failed")
        elif request is not None and request.lent is not None:
            for position in copy.positions:
                request.lent.components[copy.component].note(position, 1, "l2" if copy.fetch is None else "l3")
        self.settle(component_pages)

    def settle(self, component_pages: RequestComponents) -> None:
        """Let the request move on after the end of a copy; if it has left, free its pages after the last one."""
        if component_pages.request is not None:
            self._state.request_changed(component_pages.request)
        elif not component_pages.copies:
            self.give_up(component_pages)

    def note_damaged(self, component_pages: RequestComponents) -> None:
        """Record that a host page did not have its checksum: `give_up` drops the host pages of this boundary."""
        self._state.count("l2_damaged")
        component_pages.note_damage(is_damaged=True)

    def is_late(self, copy: ComponentCopy) -> None:
        """Ask prefill for the pages of a copy that did not end in time, into fresh ones. Can be called again."""
        if not copy.is_counted:
            copy.is_counted = True
            self._state.count("copies_late")
        held, fetch = copy.component_pages, copy.fetch
        if held.request is None:
            # It keeps its pages until the copy ends.
            return
        waiting = [(held, copy.positions)]
        host_pages = None if fetch is None else fetch.host_pages
        is_over = self.missing.late(
            copy, copy.op, copy.component, waiting, "component_copy_late", host_pages=host_pages
        )
        if is_over and fetch is not None:
            # The late copy has its host pages now.
            fetch.own_host(page_ids())
            held.forget_fetch(fetch)

    # --- Ready, kept, left ---

    def commit(self, request: Request) -> tuple[ComponentTable, ...]:
        """Move the loaded window pages into the index, and return the tables for the caller. All pages are in place."""
        component_pages = request.component_pages
        assert component_pages is not None and component_pages.lock is not None
        self.shared_ends.leave(component_pages)
        component_pages.write_ended()
        plan = component_pages.plan
        # A caller that has begun already uses the pages of the table, so none of them is exchanged.
        is_used = request.room is not None and request.room.user_op > 0
        for name, count in plan.joining.items():
            # After an exception, the table has the index's pages as far as they were entered.
            self._enter(component_pages, name, plan.tables[name][:count], exchanges=not is_used)
        for name, taken in plan.snapshots.items():
            while taken:
                snapshot = taken.pop()
                # If the prompt did not join the cache, there are no full pages that it could go with.
                if request.held.lock is not None and snapshot.boundary <= request.held.lock.node.depth_pages:
                    place = snapshot.place
                    self._keep_snapshot(
                        component_pages, name, request.held.lock.node, snapshot.boundary, snapshot.page, place
                    )
        self._release_pin(component_pages)
        self.snapshots.note_served(plan.hits, plan.resumed_pages)
        plan.were_counted()
        return component_pages.table

    def keep(self, request: Request, left: tuple[ComponentLeft, ...], node: Node, *, holds: bool) -> None:
        """Move what the caller leaves of components into the index, up to `node`, the end of the kept full pages.

        `holds` keeps a snapshot at that end whatever the policy is, because a retracted request continues from it. Can
        be called again after an exception.
        """
        component_pages = request.component_pages
        assert component_pages is not None
        for entry in left:
            if (entry.component, entry.first) in component_pages.kept:
                # Entered before an exception.
                continue
            pages = page_ids(entry.pages[: max(0, node.depth_pages - entry.first)])
            first = component_pages.plan.firsts[entry.component]
            shared = component_pages.plan.tables[entry.component]
            for position, page in enumerate(pages, entry.first):
                is_shared = first <= position < first + len(shared) and shared[position - first] == page
                if page not in component_pages.own[entry.component] and not is_shared:
                    raise BrokenInvariant(
                        f"{request} leaves page {page} of {entry.component!r}, which it does not have"
                    )
            if not pages:
                # Everything lies beyond the kept full pages.
                continue
            if self._index.components[entry.component].is_shared:
                _, unused = self._index.insert("device", entry.component, node, entry.first, pages)
                component_pages.give_up(entry.component, without(pages, unused))
            else:
                for boundary, page in enumerate(pages, entry.first + 1):
                    place = self.snapshots.place_of(boundary, prompt_pages=request.full_pages, node=node, holds=holds)
                    self._keep_snapshot(component_pages, entry.component, node, boundary, page, place)
            component_pages.note_kept(entry.component, entry.first)

    def _keep_snapshot(
        self, component_pages: RequestComponents, name: str, node: Node, boundary: int, page: int, place: str
    ) -> None:
        """Move a snapshot into the index for this place. With "" it stays the request's, and so it does if the index
        has one at that boundary, or no room within its bound.
        """
        unused = page_ids([page])
        if place and page in component_pages.own[name]:
            _, unused = self._index.insert("device", name, node, boundary - 1, unused)
        if not unused:
            component_pages.give_up(name, (page,))
        self.snapshots.note_kept(name, place, is_kept=not unused)

    def leave(self, request: Request) -> None:
        """Give everything back; if copies into the pages are in flight, when the last one ends."""
        if request.component_pages is None:
            return
        request.component_pages.plan.ask_nothing()
        self.shared_ends.leave(request.component_pages)
        self.storage.abandon_fetches(request.component_pages)
        if not request.component_pages.copies:
            self.give_up(request.component_pages)
        elif request.lent is not None:
            self._drain(request.component_pages)
        request.component_pages.request_left()
        request.give_up_components()

    def _drain(self, component_pages: RequestComponents) -> None:
        """Keep lent pages from the embedder while copies may write to them. Can be called again after an exception."""
        for name, pages in component_pages.own.items():
            self._index.drain({name: pages})
            component_pages.drain(name)

    def give_up(self, component_pages: RequestComponents) -> None:
        """Free the pages and give back the receipts: nothing writes to the pages any more. Safe to call again."""
        self._index.give_back(component_pages.own)
        component_pages.pages_were_freed()
        self._index.settle(component_pages.draining)
        component_pages.drained()
        self.storage.give_back(component_pages)
        component_pages.unlock(self._index)
        self._release_pin(component_pages)
        self._state.pages_were_freed()

    def _release_pin(self, component_pages: RequestComponents) -> None:
        pin = component_pages.pin
        if pin is None:
            return
        self._index.unpin(pin)
        component_pages.was_pinned(None)
        if component_pages.is_damaged:
            component_pages.note_damage(is_damaged=False)
            # A cache tier never fails a request: the pages stay in the index if a hook raises.
            drop = partial(self._index.drop_host_pages_of, pin.full.node, component_pages.plan.firsts)
            self._state.run_guarded(drop, recover=lambda: None)

    def _enter(self, component_pages: RequestComponents, name: str, pages: PageIds, *, exchanges: bool) -> None:
        """Move pages into the index. If the index has another page already, the request uses that from now on, or, if
        it does not exchange pages, keeps its own.
        """
        assert component_pages.lock is not None
        first, node = component_pages.plan.firsts[name], component_pages.lock.full.node
        table, unused = self._index.insert("device", name, node, first, pages)
        # Update the ownership before giving pages back, so that a raise from here on loses no page.
        component_pages.give_up(name, without(pages, unused))
        if not exchanges:
            return
        self._index.give_back({name: unused})
        component_pages.give_up(name, unused)
        component_pages.plan.begin_with(name, table)
