"""The part of a plan that storage and peers provide: query, adoption of look-ahead reads, fetches.

A plan divides the prompt's pages in three; this module is about the second part:

    [0, host_end)            in device and host memory: `tidekv.states.request.restore`
    [host_end, promised)     look-ahead reads that the plan adopts, then fetches of pages that storage has, then a fetch
                             of those that a peer may have
    [promised, page_count)   sent by prefill

The plan adopts look-ahead reads as loads, so that no page is read twice:

    AheadRun under way               ──adopt──▶ load in FETCHING, with the same operation
    AheadRun read, not in the tree ──adopt──▶ load in COPYING from the run's host pages, which are freed after it

With components, the same query asks for component pages as well (`tidekv.states.components.storage`). They do not
change the plan of full pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.commands import QueryStorage
from tidekv.states.events import NOBODY
from tidekv.states.loads.loads import LoadFetch
from tidekv.states.records.ahead import AheadRun
from tidekv.states.records.request import Load
from tidekv.states.records.stages import Stage
from tidekv.states.storage.source_split import pages_to_load
from tidekv.states.types import NO_PAGES

if TYPE_CHECKING:
    from tidekv.states.commands import Command
    from tidekv.states.core_state import CoreState, Operation
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.loads.loads import Loads
    from tidekv.states.loads.look_ahead import LookAhead
    from tidekv.states.prefix.node import Node
    from tidekv.states.records.plan import Plan
    from tidekv.states.records.request import Request
    from tidekv.states.rollback import Rollback
    from tidekv.states.storage.admission import StorageAdmission
    from tidekv.states.storage.fetch_source import FetchSource
    from tidekv.states.storage.peer_fetches import PeerFetches
    from tidekv.states.types import PageIds


class Adoption:
    """Turns look-ahead reads into loads, and back on rollback."""

    def __init__(self, state: CoreState, storage: StorageAdmission, loads: Loads) -> None:
        self._state = state
        self._storage = storage
        self._loads = loads

    def adopt(
        self,
        request: Request,
        run: AheadRun,
        parent: Node,
        keys: bytes,
        pages: PageIds,
        *,
        deadline_s: float,
        undo: Rollback,
    ) -> Load:
        """Turn a request's read into a load of a new child of `parent`.

        The load takes over the device pages `pages` from the caller. `undo` reverses the adoption.
        """
        state = self._state
        load = Load(first=run.first, tier="l3", stage=Stage.FETCHING)
        # Registered before the first change, since `_disown` also handles a partial adoption.
        undo.callback(self._disown, load, run, None if run.has_ended else state.operations[run.op])
        load.add_node(
            state.index.insert_pending(parent, request.namespace, keys, pages, load, priority=request.priority)
        )
        load.own_host(run.host_pages)
        self._loads.hold(load)
        if run.has_ended:
            self._loads.start_copy(load)
        else:
            # The read continues under its operation number; only the owner of the outcome changes.
            load.run_as(run.op)
            page_s = self._storage.source_load.page_s
            load.was_queued(run.begun_at_s, run.queued_pages, until_s=state.now_s + deadline_s, page_s=page_s)
            fetch = LoadFetch(self._loads, self._storage, load)
            state.replace_operation(load.op, fetch)
            state.set_deadline(fetch, state.now_s + deadline_s, op=load.op)
            self._storage.fetching[load] = len(pages)
        return load

    def _disown(self, load: Load, run: AheadRun, read: Operation | None) -> None:
        """Reverse an adoption in the step that made it: the read belongs to the look-ahead again."""
        load.own_host(NO_PAGES[:])
        self._storage.fetching.pop(load, None)
        self._loads.abandon(load)
        if read is not None:
            # Restore the same object: its deadline is still in the heap and is matched by identity.
            self._state.replace_operation(run.op, read)


class PlanFetches:
    """Queries storage for a request and starts the fetches of its plan."""

    def __init__(
        self,
        state: CoreState,
        storage: StorageAdmission,
        peers: PeerFetches,
        rooms: Rooms,
        loads: Loads,
        lookahead: LookAhead,
        adoption: Adoption,
    ) -> None:
        self._state = state
        self._storage = storage
        self._peers = peers
        self._rooms = rooms
        self._loads = loads
        self._lookahead = lookahead
        self._adoption = adoption

    def ask(self, request: Request, components_first: dict[str, int]) -> None:
        """Query storage for the pages that neither device nor host has, unless they are below the threshold.

        `components_first` are the first positions to ask for of components, by name.
        """
        state = self._state
        first = sum(state.index.probe_prefix(request.namespace, request.keys))
        if request.lent is not None:
            first = min(max(first, request.lent.full.restored), request.full_pages)
        count = request.full_pages - first
        is_worth = count > 0 and count * state.settings.page_size >= state.settings.prefetch_threshold_tokens
        if not is_worth and not components_first:
            return
        queried = count + sum(request.full_pages - first for first in components_first.values())

        def command(op: int) -> Command:
            return QueryStorage(
                op=op, request_id=request.request_id, first=first, count=count, components_first=components_first
            )

        self._storage.query(request, queried, command, first=first, pages=count if is_worth else 0)

    def adopt_reads(self, request: Request, plan: Plan, undo: Rollback) -> int:
        """Adopt look-ahead reads that continue the plan without a gap; return their number."""
        adopted = 0
        width = self._state.settings.key_bytes
        left_s = request.deadline_at_s - self._state.now_s
        for run in self._lookahead.usable_runs(request):
            count = len(run.host_pages)
            keys = request.keys[run.first * width : (run.first + count) * width]
            if run.first != plan.end or keys[:width] in plan.node.children:
                break
            deadline_s = self._state.settings.prefetch_deadline_s(count, left_s)
            own = plan.own[:count]
            load = self._adoption.adopt(request, run, plan.node, keys, own, deadline_s=deadline_s, undo=undo)
            plan.add(load)
            adopted += 1
        return adopted

    def load(self, request: Request, plan: Plan, undo: Rollback) -> None:
        """Start fetches of the pages that storage reported, as limits and host memory allow.

        Counts the pages that are not fetched in `l3_declined_pages` and notes the reason in `request.sources.declined`.
        """
        state = self._state
        settings = state.settings
        found_to = request.answer.end
        count = found_to - plan.end if request.answer.first <= plan.end else 0
        deadline_s = settings.prefetch_deadline_s(max(count, 0), request.deadline_at_s - state.now_s)
        allowed = self._storage.allowance(count, deadline_s) if self._storage.is_usable else 0
        threshold = max(settings.prefetch_threshold_tokens, 1)
        if count * settings.page_size < threshold:
            # The answer starts after the plan's end if pages before it were evicted since storage was asked.
            beyond = request.answer.found if request.answer.first > plan.end else 0
            request.sources.decline(*(("out_of_reach", beyond) if beyond else ("below_threshold", max(count, 0))))
            return
        if allowed * settings.page_size < threshold:
            state.count("l3_declined_pages", count)
            request.sources.decline("limit" if self._storage.is_usable else "storage_left_alone", count)
            return
        cause = "limit"
        if settings.prefetch == "soonest":
            sooner = self._sooner(request, plan, self._storage, allowed)
            if sooner < allowed:
                is_known = self._storage.source_load.page_s and self._rooms.source_load.page_s
                cause = "slower" if is_known else "unmeasured"
                allowed = sooner
        if allowed < count:
            state.count("l3_declined_pages", count - allowed)
            request.sources.decline(cause, count - allowed)
            found_to = plan.end + allowed
        self._fetch_to(request, plan, found_to, deadline_s, undo)

    def _sooner(self, request: Request, plan: Plan, source: FetchSource, allowed: int) -> int:
        """Return how many of the next `allowed` pages a source is to bring, so that the last page of all is early."""
        if request.prefills == NOBODY:
            return allowed
        settings = self._state.settings
        rest = request.page_count - plan.end - allowed
        shortest = -(-max(settings.prefetch_threshold_tokens, 1) // settings.page_size)
        tier, link = source.source_load.before(self._loads.source_load), self._rooms.source_load
        return pages_to_load(allowed, rest, tier=tier, link=link, is_old=not source.is_measured, shortest=shortest)

    def load_from_peer(self, request: Request, plan: Plan, undo: Rollback) -> None:
        """Start a fetch of the full pages that no tier has from the first peer of the request that may be asked.

        Counts the pages that it is not asked for in `peer_pages_declined`, and notes the reason in `request.sources`.
        """
        state, settings = self._state, self._state.settings
        count = request.full_pages - plan.end
        if not request.peers or count < 1:
            return
        peer = self._peers.choose(request.peers)
        deadline_s = self._peers.deadline_s(request.deadline_at_s - state.now_s)
        pages, cause = self._pages_of_peer(request, plan, count, deadline_s) if peer else (0, "paused")
        if pages < count:
            state.count("peer_pages_declined", count - pages)
            request.sources.decline_peer(cause, count - pages, peer or ", ".join(request.peers))
        if not pages:
            return
        width = settings.key_bytes
        keys = request.keys[plan.end * width : (plan.end + pages) * width]
        own = plan.own[:pages]
        load = self._loads.begin_fetch(request, plan.node, plan.end, keys, own, deadline_s=deadline_s, peer=peer)
        undo.callback(self._loads.abandon, load)
        state.count("peer_fetches")
        plan.add(load)

    def _pages_of_peer(self, request: Request, plan: Plan, count: int, deadline_s: float) -> tuple[int, str]:
        """Return how many of `count` pages a peer is asked for, and why it is not asked for the others.

        Makes room for them in host memory.
        """
        state, settings = self._state, self._state.settings
        shortest = max(-(-settings.prefetch_threshold_tokens // settings.page_size), 1)
        first_key = request.keys[plan.end * settings.key_bytes : (plan.end + 1) * settings.key_bytes]
        if not settings.host_pages:
            return 0, "no_host_page"
        if count < shortest:
            return 0, "below_threshold"
        if self._loads.placement.is_blocked(plan.node, first_key):
            return 0, "in_the_way"
        pages, cause = self._peers.allowance(count) if deadline_s > 0 else 0, "limit"
        if pages >= shortest and settings.prefetch == "soonest":
            sooner = self._sooner(request, plan, self._peers, pages)
            if sooner < pages:
                is_known = self._peers.source_load.page_s and self._rooms.source_load.page_s
                pages, cause = sooner, "slower" if is_known else "unmeasured"
        if pages < shortest:
            return 0, cause
        # Room last: it evicts, and the fetch takes the pages at once.
        room = state.make_host_room(pages)
        if room < pages:
            pages, cause = room, "no_host_page"
        return (pages if pages >= shortest else 0), cause

    def _fetch_to(self, request: Request, plan: Plan, found_to: int, deadline_s: float, undo: Rollback) -> None:
        state = self._state
        settings = state.settings
        width = settings.key_bytes
        while plan.end < found_to:
            first_key = request.keys[plan.end * width : (plan.end + 1) * width]
            pages = state.make_host_room(min(settings.fetch_run_pages, found_to - plan.end))
            if not pages or self._loads.placement.is_blocked(plan.node, first_key):
                # No host memory, or a node in RECLAIMING with the same keys is still in the tree. Prefill sends the
                # rest.
                state.count("l3_declined_pages", found_to - plan.end)
                # Add the pages that a limit has declined before: the reason is stored once, for all of them.
                missing = found_to - plan.end + request.sources.declined[1]
                if pages:
                    request.sources.decline("in_the_way", missing)
                else:
                    request.sources.decline_for_room(missing, has_room_later=bool(state.operations))
                return
            keys = request.keys[plan.end * width : (plan.end + pages) * width]
            load = self._loads.begin_fetch(request, plan.node, plan.end, keys, plan.own[:pages], deadline_s=deadline_s)
            undo.callback(self._loads.abandon, load)
            self._storage.take(pages)
            undo.callback(self._storage.take, -pages)
            plan.add(load)
