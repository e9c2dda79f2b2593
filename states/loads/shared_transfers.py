"""Shared transfers: pages that prefill is sending for one request are in the tree, so that other requests share them.

With `share_transfers`, a plan enters the full pages of its delta in the tree as a load in RECEIVING (see
`tidekv.states.loads.loads`). The sender of the load is the request itself, by span 0 of its room. A request with the
same prefix matches these pages, waits for them as for any other load, and asks its own prefill at once for the rest:

    prompt of A   [ device | ~~~~ A's delta, under load ~~~~~~~~~~~ | last page ]     room of A: all of the delta
    prompt of B   [ device | ~~~~ the same pages ~~~~ | B's delta, under load | ]     room of B: its own rest only
                             0 ........ received ->

Pages are given to the requests that wait for them as they arrive. A load ends at the last page that another request
waits for and that has arrived from every prefill rank; the remainder continues as a load of its own. Pages that no
other request waits for end with the room, so a transfer that fails leaves no unused pages in the tree.

A waiter does not fail with the sender:

- A sender that leaves (aborted, failed, late, moved to the next prefill) takes along the pages that its prefill may
  still write. The load receives fresh pages and fails, and its oldest waiter extends into them at once, in its own
  room. Without waiters the pages leave the tree. Without fresh pages the load goes to RECLAIMING, and its waiters
  start over: nothing tells when the writer will have ended.
- A waiter that waits for nothing else waits at most `share_wait_s` while nothing arrives. Then the sender keeps its
  pages to itself, as if the transfer had never been shared, and the waiter extends into fresh ones.

Component pages belong to the end of one prompt. Requests with the same end share them by copies
(`tidekv.states.components.shared_ends`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.records.request import Load, Request
from tidekv.states.records.stages import Stage

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.loads.loads import Loads
    from tidekv.states.records.plan import Plan
    from tidekv.states.rollback import Rollback


class ShareWatch:
    """Operation: the watch on a load that another request's room fills. It only ends by its deadline."""

    __slots__ = ("_shared", "load")

    def __init__(self, shared: SharedTransfers, load: Load) -> None:
        self._shared = shared
        self.load = load

    def ended(self, event: Outcome, error: str) -> None:
        """Never called: there is no command, hence no outcome."""

    def late(self) -> None:
        """Check whether pages have arrived meanwhile."""
        self._shared.is_late(self.load)

    def abandon(self) -> None:
        """Do nothing: the watch holds nothing."""


class SharedTransfers:
    """Loads that the room of one request fills and that other requests wait for."""

    def __init__(self, state: CoreState, loads: Loads) -> None:
        self._state = state
        self._loads = loads

    # --- Starting ---

    def publish(self, request: Request, plan: Plan, undo: Rollback) -> Load | None:
        """Enter the full pages of the plan's delta in the tree, under a load that the request's room will fill.

        The tree takes over these pages, which are the first of `plan.own`. Returns None, with nothing changed, if the
        request does not share, or if a node in RECLAIMING or another load has the same keys.
        """
        state = self._state
        width, count = state.settings.key_bytes, request.full_pages - plan.end
        if not state.settings.share_transfers or not request.cache or request.restore_limit or count < 1:
            return None
        keys = request.keys[plan.end * width : request.full_pages * width]
        if keys[:width] in plan.node.children:
            return None
        load = Load(first=plan.end, tier="transfer", stage=Stage.RECEIVING)
        try:
            own = plan.own[:count]
            load.add_node(
                state.index.insert_pending(plan.node, request.namespace, keys, own, load, priority=request.priority)
            )
            self._loads.hold(load)
        except BaseException:
            self._loads.abandon(load)
            raise
        undo.callback(self._loads.abandon, load)
        return load

    def published(self, request: Request, load: Load) -> None:
        """Connect a published load to the request's room, whose span 0 fills it."""
        assert request.room is not None, "a published load has no room to fill it"
        self._loads.share(load, request, load.page_count)
        load.receive_from(request, request.room.spans[0])
        # Waiting requests with the same prefix need fewer device pages now.
        self._state.pages_were_freed()

    # --- Receiving ---

    def note_received(self, request: Request, *, is_complete: bool) -> None:
        """Queue the loads of the request's room from which pages may be handed over, after something has arrived."""
        for load in request.loads:
            if load.sender is request and load.span is not None and (is_complete or len(load.waiters) > 1):
                self._state.load_progressed(load)

    def take_received(self, load: Load) -> None:
        """End a load up to the last received page that another request waits for.

        Can be called again after an exception.
        """
        sender = load.sender
        if load.span is None or sender is None or sender.room is None:
            # The sender left after the load was queued.
            return
        received, is_complete = load.span.received(sender.room.ranks), sender.room.is_complete
        # The sender itself counts only once its room is complete: ending the load page by page for the sender would
        # split nodes for no other request, and would leave pages in the tree if the transfer fails.
        wanted = [count for request, count in load.waiters.items() if request is not sender or is_complete]
        at = max((count for count in wanted if load.first + count <= received), default=0)
        if not at:
            return
        if at < load.page_count:
            self._loads.split(load, at)
        shared = sum(count for request, count in load.waiters.items() if request is not sender)
        if shared:
            self._state.count("shared_transfer_pages", shared)
        self._loads.received(load)

    # --- The sender leaves ---

    def leave(self, request: Request, *, settled: bool) -> None:
        """Detach the loads that the request fills, before it leaves its room. `settled`: its prefill writes no more.

        Pages that its prefill may still write become the request's own. Loads for which there are no fresh pages stay
        with the request; `Loads.leave` reclaims them. Can be called again after an exception.
        """
        room = request.room
        if room is None or not request.loads or not self._state.settings.share_transfers:
            return
        filled = self._cut_by_need([load for load in request.loads if load.sender is request], request)
        if not filled:
            return
        # The lock ends at these pages and would keep `_take_back` from withdrawing them. Pages with other waiters stay
        # protected by the locks of those.
        request.held.unlock(self._state.index)
        is_written_to = not (settled or room.is_written)
        # From the end on, since a node can only be withdrawn when none is below it.
        for load in reversed(filled):
            if len(load.waiters) == 1:
                self._take_back(load, request)
        for load in filled:
            if len(load.waiters) > 1 and (not is_written_to or self._renew(load, request)):
                self._pass_on(load, request, "sender_left")

    def _cut_by_need(self, loads: list[Load], sender: Request) -> list[Load]:
        """Cut each load after the last page that another request waits for. Returns all parts in page order."""
        parts = list(loads)
        for load in loads:
            wanted = max((count for waiter, count in load.waiters.items() if waiter is not sender), default=0)
            if 0 < wanted < load.page_count:
                parts.append(self._loads.split(load, wanted))
        return sorted(parts, key=lambda load: load.first)

    def _take_back(self, load: Load, request: Request) -> None:
        """Move a load's pages from the tree to the request, from the end on, until a node with others below it.

        The load must have no other waiter.
        """
        index = self._state.index
        load.unlock(index)
        while load.nodes:
            node = load.nodes[-1]
            if node.guarded > 1 or node.device_children:
                return
            index.set_load(node, None)
            pages = index.withdraw_device(node)
            load.drop_node()
            request.held.take_back(pages)
        load.remove_waiter(request)
        self._loads.forget(load)

    def _renew(self, load: Load, request: Request) -> bool:
        """Give a load fresh device pages; the request owns the old ones. False, with nothing changed, without any."""
        old = self._loads.placement.renew(load)
        if old is None:
            return False
        request.held.take_back(old)
        return True

    def _pass_on(self, load: Load, request: Request, cause: str) -> None:
        """Fail a load on behalf of its sender, so that another waiter extends into it. Its pages have no writer."""
        load.remove_waiter(request)
        self._loads.fail(load, cause)
        self._state.count("shared_transfers_passed_on")

    # --- The sender is slow ---

    def watch(self, request: Request) -> None:
        """Set a deadline if the request only waits for another request's room."""
        load = self.waits_for(request)
        if load is not None and not load.op:
            # At most half of the remaining time, so that there is time to extend and receive the pages.
            left_s = request.deadline_at_s - self._state.now_s
            self._watch(load, min(self._state.settings.share_wait_s, max(left_s / 2, 0.0)))

    def _watch(self, load: Load, wait_s: float) -> None:
        assert load.sender is not None and load.sender.room is not None and load.span is not None
        load.note_received(load.span.received(load.sender.room.ranks))
        load.run_as(self._state.start_operation(ShareWatch(self, load), deadline_s=wait_s))

    @staticmethod
    def waits_for(request: Request) -> Load | None:
        """Return the first load that `request` awaits from another room; None unless its own room is complete."""
        first: Load | None = None
        for load in request.loads:
            if load.sender is not request and load.span is not None and (first is None or load.first < first.first):
                first = load
        return first if request.room is not None and request.room.is_complete else None

    def is_late(self, load: Load) -> None:
        """Handle the end of a watch: if nothing has arrived since it began, stop sharing the sender's transfer.

        Can be called again after an exception.
        """
        self._state.operations.pop(load.op, None)
        load.run_as(0)
        sender = load.sender
        if load.span is None or sender is None or sender.room is None:
            return
        if not any(self.waits_for(request) is load for request in load.waiters):
            return
        moves = load.span.received(sender.room.ranks) > load.received
        if moves or not self._make_private(sender):
            self._watch(load, self._state.settings.share_wait_s)

    def _make_private(self, sender: Request) -> bool:
        """Make the pages that a request's room has yet to bring the request's own; fail their loads for the waiters.

        Returns False, with nothing changed except for cuts, if device memory is short, or if a node below is in use.
        """
        state = self._state
        loads = self._cut_by_need(
            [load for load in sender.loads if load.sender is sender and load.span is not None], sender
        )
        # Check everything that could stop the change half-way first: fresh pages for all shared loads, and no device
        # pages of others below the nodes to be withdrawn.
        fresh = sum(load.page_count for load in loads if len(load.waiters) > 1)
        nodes = {node for load in loads if len(load.waiters) == 1 for node in load.nodes}
        if any(child not in nodes for node in nodes for child in node.children.values() if child.device is not None):
            return False
        if not state.make_device_room(fresh):
            return False
        above = loads[0].nodes[0].parent
        assert above is not None and sender.held.lock is not None
        sender.held.lock_at(state.index, above)
        for load in reversed(loads):
            if len(load.waiters) == 1:
                self._take_back(load, sender)
                assert not load.nodes, "nodes are below an unshared load"
            else:
                is_renewed = self._renew(load, sender)
                assert is_renewed, "there was room for all fresh pages before"
                self._pass_on(load, sender, "sender_slow")
        for load in loads:
            # Queue again, so that extends are sent in page order: the loop above ran from the end.
            state.requeue_failed(load)
        state.request_changed(sender)
        return True
