"""Shared transfers: what prefill is sending for one request is in the tree while it comes, so that others wait for it.

With `share_transfers`, a plan enters the full pages of its delta in the tree as a load that is FILLING (see
`tidekv.states.loads.loads`): its filler is the request itself, by span 0 of its room. A request with the same prefix
matches these pages, waits for them as for any other load, and asks its own prefill for what follows them, at once:

    prompt of A   [ device | ~~~~ A's delta, under load ~~~~~~~~~~~ | last page ]     room of A: all of the delta
    prompt of B   [ device | ~~~~ the same pages ~~~~ | B's delta, under load | ]     room of B: its own rest only
                             0 ........ landed ->

Pages are handed over as they land: a load ends at the farthest page that another request waits for and that has come
from every prefill rank; what follows goes on as a load of its own. What no other request waits for ends with its room,
so that a transfer which fails leaves nothing unused in the tree.

A sharer does not fail with the filler:

- A filler that leaves (aborted, failed, late, sent to the next prefill) takes the pages that its prefill may still
  write to with it. The load gets fresh ones, has failed, and is extended into by its oldest sharer at once, in the room
  that it has. If no sharer is left the pages leave the tree. If there are no fresh pages the load is void, as
  one with a late copy: its sharers start over.
- A sharer that waits for nothing else waits `share_wait_s` while nothing lands. Then the filler is left alone with
  its pages, as if the transfer had never been shared, and the sharer extends into fresh ones.

Workers with components share nothing before READY: their tails come with the end of a prompt, of which others have a
part alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.request.request import Load, Request, Stage

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.loads.loads import Loads
    from tidekv.states.request.plan import Plan
    from tidekv.states.rollback import Rollback


class ShareWatch:
    """Operation: the wait for a load that another request's room fills. It ends by its deadline."""

    __slots__ = ("_shared", "load")

    def __init__(self, shared: SharedTransfers, load: Load) -> None:
        self._shared = shared
        self.load = load

    def ended(self, event: Outcome, error: str) -> None:
        """No command was given, so no outcome comes."""

    def late(self) -> None:
        """See whether the load has moved meanwhile."""
        self._shared.is_late(self.load)

    def abandon(self) -> None:
        """It holds nothing."""


class SharedTransfers:
    """What rooms bring for more than the request that opened them."""

    def __init__(self, state: CoreState, loads: Loads) -> None:
        self._state = state
        self._loads = loads

    # --- Starting ---

    def publish(self, request: Request, plan: Plan, undo: Rollback) -> Load | None:
        """Enter the full pages of the plan's delta in the tree, under a load that the request's room is to fill.

        None, and nothing is changed, where that is not to be, or void pages are in the way. The pages are the first of
        `plan.own`, and belong to the tree from now on.
        """
        state = self._state
        width, count = state.settings.key_bytes, request.full_pages - plan.end
        if not state.settings.share_transfers or state.components is not None:
            return None
        if not request.cache or request.restore_limit or count < 1:
            return None
        keys = request.keys[plan.end * width : request.full_pages * width]
        if keys[:width] in plan.node.children:
            return None
        load = Load(first=plan.end, tier="transfer", stage=Stage.RECEIVING)
        try:
            load.nodes.append(state.index.insert_pending(plan.node, request.namespace, keys, plan.own[:count], load))
            self._loads.hold(load)
        except BaseException:
            self._loads.abandon(load)
            raise
        undo.callback(self._loads.abandon, load)
        return load

    def published(self, request: Request, load: Load) -> None:
        """The room of a published load is open: its span 0 fills it."""
        assert request.room is not None, "the promise is given"
        self._loads.share(load, request, load.page_count)
        load.filler, load.span = request, request.room.spans[0]
        # Requests that wait for device memory may need less of it now.
        self._state.pages_freed = True

    # --- Landing ---

    def note_landed(self, request: Request) -> None:
        """The room of a request has brought something: look what others may have of it."""
        room = request.room
        for load in request.loads:
            is_own = load.filler is request and load.span is not None
            if is_own and (len(load.sharers) > 1 or (room is not None and room.is_complete)):
                self._state.progressed_loads[load] = None

    def take_landed(self, load: Load) -> None:
        """End a load up to the farthest page that has landed and that another request waits for. Can be called again
        if it raised.
        """
        filler = load.filler
        if load.span is None or filler is None or filler.room is None:
            return
        landed, is_complete = load.span.landed(filler.room.ranks), filler.room.is_complete
        wanted = [count for request, count in load.sharers.items() if request is not filler or is_complete]
        at = max((count for count in wanted if load.first + count <= landed), default=0)
        if not at:
            return
        if at < load.page_count:
            self._loads.split(load, at)
        shared = sum(count for request, count in load.sharers.items() if request is not filler)
        if shared:
            self._state.count("shared_transfer_pages", shared)
        self._loads.handed_over(load)

    # --- The filler leaves ---

    def leave(self, request: Request, *, settled: bool) -> None:
        """The request, which is about to leave its room, fills loads no longer. `settled`: they have no writer.

        The pages that its prefill may write to are the request's own from now on. Loads that this cannot be done for
        stay with the request: they are void when it leaves them. Can be called again, where it raised.
        """
        room = request.room
        if room is None or not request.loads or not self._state.settings.share_transfers:
            return
        filled = self._cut_by_need([load for load in request.loads if load.filler is request], request)
        if not filled:
            return
        if request.lock is not None:
            # It ends at these pages; their other sharers have locked them, too.
            self._state.index.unlock(request.lock)
            request.lock = None
        is_written_to = not (settled or room.is_written)
        for load in reversed(filled):
            if len(load.sharers) == 1:
                self._take_back(load, request)
        for load in filled:
            if len(load.sharers) > 1 and (not is_written_to or self._renew(load, request)):
                self._pass_on(load, request, "sender_left")

    def _cut_by_need(self, loads: list[Load], filler: Request) -> list[Load]:
        """Cut loads where what others wait for ends. Returns all parts, in the order of their pages."""
        parts = list(loads)
        for load in loads:
            wanted = max((count for sharer, count in load.sharers.items() if sharer is not filler), default=0)
            if 0 < wanted < load.page_count:
                parts.append(self._loads.split(load, wanted))
        return sorted(parts, key=lambda load: load.first)

    def _take_back(self, load: Load, request: Request) -> None:
        """Take pages without another sharer out of the tree, from the end on, as far as nothing is below them."""
        index = self._state.index
        if load.lock is not None:
            index.unlock(load.lock)
            load.lock = None
        while load.nodes:
            node = load.nodes[-1]
            if node.guarded > 1 or node.device_children:
                return
            index.set_load(node, None)
            pages = index.withdraw_device(node)
            load.nodes.pop()
            request.own = pages + request.own
        del load.sharers[request], request.loads[load]
        self._loads.forget(load)

    def _renew(self, load: Load, request: Request) -> bool:
        """Give a load fresh pages; those it had are the request's own. False, and nothing is changed, without room."""
        state = self._state
        if not state.make_device_room(load.page_count):
            return False
        fresh = state.device.take(load.page_count)
        # From here on nothing raises.
        state.device.to_cache(fresh)
        old, at = load.device_pages, 0
        for node in load.nodes:
            node.device = fresh[at : at + node.page_count]
            state.index.tree.touch(node)
            at += node.page_count
        state.device.own_cached(old)
        request.own = old + request.own
        return True

    def _pass_on(self, load: Load, request: Request, cause: str) -> None:
        """Fail a load whose pages have no writer and other sharers: one of them is to extend into it."""
        del load.sharers[request], request.loads[load]
        load.cause = cause
        self._loads.fail(load)
        self._state.count("shared_transfers_passed_on")

    # --- The filler is slow ---

    def watch(self, request: Request) -> None:
        """Set a deadline if the request waits for nothing but another request's room."""
        load = self.waits_for(request)
        if load is not None and not load.op:
            left_s = request.deadline_at_s - self._state.now_s
            self._watch(load, min(self._state.settings.share_wait_s, max(left_s / 2, 0.0)))

    def _watch(self, load: Load, wait_s: float) -> None:
        assert load.filler is not None and load.filler.room is not None and load.span is not None
        load.landed = load.span.landed(load.filler.room.ranks)
        load.op = self._state.start_operation(ShareWatch(self, load), deadline_s=wait_s)

    @staticmethod
    def waits_for(request: Request) -> Load | None:
        """The first load that another request's room is to bring, of a request that has all that its own was to."""
        first: Load | None = None
        for load in request.loads:
            if load.filler is not request and load.span is not None and (first is None or load.first < first.first):
                first = load
        return first if request.room is not None and request.room.is_complete else None

    def is_late(self, load: Load) -> None:
        """A sharer has waited for long: if nothing has landed meanwhile, the filler goes on alone. Can be called
        again, where it raised.
        """
        self._state.operations.pop(load.op, None)
        load.op = 0
        filler = load.filler
        if load.span is None or filler is None or filler.room is None:
            return
        if not any(self.waits_for(request) is load for request in load.sharers):
            return
        moves = load.span.landed(filler.room.ranks) > load.landed
        if moves or not self._leave_alone(filler):
            self._watch(load, self._state.settings.share_wait_s)

    def _leave_alone(self, filler: Request) -> bool:
        """Make what a request's room is still to bring the request's own. False, and nothing but cuts is changed, where
        device memory is short or void pages are in the way.
        """
        state = self._state
        loads = self._cut_by_need(
            [load for load in filler.loads if load.filler is filler and load.span is not None], filler
        )
        fresh = sum(load.page_count for load in loads if len(load.sharers) > 1)
        nodes = {node for load in loads if len(load.sharers) == 1 for node in load.nodes}
        if any(child not in nodes for node in nodes for child in node.children.values() if child.device is not None):
            return False
        if not state.make_device_room(fresh):
            return False
        above = loads[0].nodes[0].parent
        assert above is not None and filler.lock is not None
        lock = state.index.lock(above)
        try:
            state.index.unlock(filler.lock)
        except BaseException:
            state.index.unlock(lock)
            raise
        filler.lock = lock
        for load in reversed(loads):
            if len(load.sharers) == 1:
                self._take_back(load, filler)
                assert not load.nodes, "nothing is below what nobody shares"
            else:
                is_renewed = self._renew(load, filler)
                assert is_renewed, "room was made for all of them"
                self._pass_on(load, filler, "sender_slow")
        for load in loads:
            if load in state.failed_loads:
                # Prefill is asked in the order of the pages.
                del state.failed_loads[load]
                state.failed_loads[load] = None
        state.dirty[filler] = None
        return True
