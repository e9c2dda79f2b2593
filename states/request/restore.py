"""The restore of a prompt: grant, plan, commit, and giving everything back.

Methods that take an event are actions of the request machine; `tidekv.states.request.table` shows when they run. The
plan cuts the prompt's pages into four parts:

    [0, matched)             in device memory (L1), locked; a part may still be loading for another request
    [matched, host_end)      in host memory (L2), pinned; loaded by copy
    [host_end, promised)     in storage (L3), according to its answer, and then perhaps at a peer; loaded by fetch, then
                             copy
    [promised, page_count)   the delta: prefill writes it (span 0 of the room). With shared transfers, its full pages
                             are in the tree meanwhile (`tidekv.states.loads.shared_transfers`)

Any step may raise. `grant` and `commit` leave what they took in fields of the request, where `leave` finds it;
`fix_plan` takes back its own changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidekv.states.commands import Fallback, Recompute, ReportReady
from tidekv.states.events import Progressed
from tidekv.states.prefix.node import MatchResult
from tidekv.states.records.plan import Plan
from tidekv.states.records.request import Load, Request, RequestComponents
from tidekv.states.records.stages import Stage
from tidekv.states.request.plan_fetches import Adoption, PlanFetches
from tidekv.states.rollback import Rollback
from tidekv.states.settings import computes_rest
from tidekv.states.storage.source_split import pages_to_copy
from tidekv.states.types import NO_PAGES

if TYPE_CHECKING:
    from tidekv.states.backup.backups import Backups
    from tidekv.states.components.request_components import ComponentRestore
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import (
        ComponentLeft,
        Outcome,
        PlanDue,
        StorageDue,
        TransitionRaised,
    )
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.loads.loads import Loads
    from tidekv.states.loads.look_ahead import LookAhead
    from tidekv.states.loads.shared_transfers import SharedTransfers
    from tidekv.states.prefix.index import Node, Receipt
    from tidekv.states.request.early_ready import EarlyReady
    from tidekv.states.request.lending import Lending
    from tidekv.states.storage.admission import StorageAdmission
    from tidekv.states.storage.peer_fetches import PeerFetches
    from tidekv.states.types import PageIds


ANSWER_AGE_MAX_S = 1.0
"""At admission, storage is queried again if its answer did not cover the whole prompt and is older than this."""


class Recomputation:
    """Operation: the caller computes the rest of a prompt."""

    __slots__ = ("_state", "request")

    def __init__(self, state: CoreState, request: Request) -> None:
        self._state = state
        self.request = request

    def ended(self, event: Outcome, error: str) -> None:
        """Note the outcome, with which the request moves on or fails."""
        self.request.recompute.end(error)
        self._state.request_changed(self.request)

    def late(self) -> None:
        """Never called: the deadline of the request is the only one."""

    def abandon(self) -> None:
        """Do nothing: the pages belong to the request."""


class LateRecomputation:
    """Operation: a caller's computation that has outlived its request. Owns the device pages that it still writes."""

    __slots__ = ("_rules", "_state", "component_pages", "device_pages")

    def __init__(self, state: CoreState, rules: ComponentRestore | None, request: Request) -> None:
        self._state = state
        self._rules = rules
        self.device_pages: PageIds = request.held.give_up_own()
        self.component_pages: RequestComponents | None = request.give_up_components()

    def ended(self, event: Outcome, error: str) -> None:
        """Free the pages: the caller does not write to them any more."""
        self.abandon()

    def late(self) -> None:
        """Never called: only the end of the computation makes the pages safe to reuse."""

    def abandon(self) -> None:
        """Free the pages. Can be called again after an exception."""
        self._state.device.give_back(self.device_pages)
        self.device_pages = NO_PAGES[:]
        if self.component_pages is not None and self._rules is not None:
            self._rules.give_up(self.component_pages)
        self._state.pages_were_freed()


@dataclass(frozen=True, slots=True)
class PlanSources:
    """What brings the pages of a plan."""

    storage: StorageAdmission
    peers: PeerFetches
    rooms: Rooms
    loads: Loads
    shared_transfers: SharedTransfers
    lookahead: LookAhead
    component_pages: ComponentRestore | None


class Restore:
    """Actions of the request machine from PREALLOC to READY, and the grant."""

    def __init__(
        self,
        state: CoreState,
        sources: PlanSources,
        backups: Backups,
        lending: Lending,
        early: EarlyReady,
    ) -> None:
        self._state = state
        self._early = early
        self._lending = lending
        self._storage = sources.storage
        self._shared = sources.shared_transfers
        self._lookahead = sources.lookahead
        self._rooms = sources.rooms
        self._loads = sources.loads
        self._component_pages = sources.component_pages
        self._fetches = PlanFetches(
            state,
            sources.storage,
            sources.peers,
            sources.rooms,
            sources.loads,
            sources.lookahead,
            Adoption(state, sources.storage, sources.loads),
        )
        self._backups = backups
        self._insertions = 0
        """Number of insertions so far. `grant` skips a request that did not fit if nothing was inserted since."""

    # --- PREALLOC ---

    def ask_storage(self, request: Request, event: StorageDue) -> None:
        """Query storage, while the request waits, for the pages that neither device nor host has."""
        request.admission.ask()
        self._decide_rest(request)
        request.admission.spare_storage(is_spared=request.recompute.is_short)
        # An answer that came too late for the plan of the last generation serves this one, while it is young.
        if request.answer.answered_at_s == float("inf") or self._is_answer_old(request):
            self._ask_storage(request)

    def _is_answer_old(self, request: Request) -> bool:
        return request.answer.answered_at_s + ANSWER_AGE_MAX_S < self._state.now_s

    def _ask_storage(self, request: Request) -> None:
        if not self._storage.is_usable or request.restore_limit or request.answer.op:
            return
        request.answer.forget_time()
        components = {} if self._component_pages is None else self._component_pages.storage.wanted(request)
        self._fetches.ask(request, components)

    def grant(self, request: Request) -> bool:
        """Match the prompt, lock the match, and reserve device pages for the rest. All of it, or nothing and False.

        False as well if the request waits for storage from now on: the wait must not hold pages. It must not wait for
        storage already. After an exception, `leave` gives back what was taken so far.
        """
        state = self._state
        request.admission.note_quota(is_over=False)
        if request.lent is not None:
            return self._lending.grant(request, request.lent)
        self._decide_rest(request)
        if self._asks_after_all(request) or self._storage.awaits_measurement(request):
            return False
        charged_to = request.recompute.withheld_by(request.prefill)
        available = state.device.free + state.index.device_evictable
        if request.admission.short_version == self._insertions:
            # It did not fit before, and without insertions its match cannot have grown. Skips matching every waiting
            # request again whenever some pages are freed.
            admits = state.quota.admits(charged_to, request.admission.quota_need)
            request.admission.note_quota(is_over=not admits)
            if request.admission.over_quota or available < request.admission.short_need:
                return False
        match = self._match(request)
        # Lock before making room: eviction must not take the pages just matched.
        request.held.lock_at(state.index, match.device_node)
        reserve = state.settings.reserve_pages(tokens_max=request.tokens_max, held=request.page_count)
        needed = request.page_count - match.device_pages + reserve
        # The charge: pages that it takes, and cached ones that only this lock keeps from eviction.
        available_now = state.device.free + state.index.device_evictable
        charge = needed + available - available_now
        request.admission.note_quota(is_over=not state.quota.admits(charged_to, charge))
        if not request.admission.over_quota and needed <= available_now and self._asks_again(request, match):
            request.held.unlock(state.index)
            return False
        has_room = not request.admission.over_quota and state.make_device_room(needed)
        if not has_room or not (self._component_pages is None or self._component_pages.reserve(request, match)):
            request.held.unlock(state.index)
            request.admission.refuse(needed=needed, charge=charge, version=self._insertions)
            if request.admission.over_quota and request.admission.wait_for_quota():
                state.count("quota_waits")
            return False
        pages = state.device.take(needed)
        request.held.take(pages[: needed - reserve], pages[needed - reserve :])
        state.quota.charge(charged_to, charge)
        request.admission.charge(charged_to, charge)
        if match.host_node is not match.device_node:
            # The pin keeps the host part from eviction until `fix_plan` starts its copies.
            request.held.pin_at(state.index, match.host_node)
        request.held.match(match.device_pages)
        # Pages that another request is loading count as matched; this request waits for the same loads.
        for load, page_count in self._loads_on(match.device_node).items():
            self._loads.share(load, request, page_count)
        return True

    def _decide_rest(self, request: Request) -> None:
        """Decide whether the caller computes the rest because it is short, as long as the request has no grant."""
        threshold, recompute = self._state.settings.recompute_threshold, request.recompute
        is_open = threshold and request.can_recompute and not recompute.has_failed_short
        if not is_open or recompute.is_last_resort:
            return
        rest = request.prompt_tokens - self._device_match(request).device_pages * self._state.settings.page_size
        # Without a rest only the first token is missing, and no page is left that its computation may write to.
        recompute.choose_short(is_short=rest > 0 and computes_rest(rest, threshold=threshold))

    def _asks_after_all(self, request: Request) -> bool:
        """Query storage if it was not, since the rest was short, and pages of the prompt were evicted since.

        Returns whether to wait for the answer.
        """
        if request.admission.has_spared_storage and not request.recompute.is_short:
            request.admission.spare_storage(is_spared=False)
            self._ask_storage(request)
        return request.answer.is_awaited

    def _asks_again(self, request: Request, match: MatchResult) -> bool:
        """Query storage again, if its answer is of no use by now; return whether to wait for the new one.

        That is if the caches have lost pages since, so that the answer starts too late in the prompt, or if the answer
        is old and storage may have more pages by now.
        """
        is_gone = match.device_pages + match.host_pages < request.answer.first
        found_all = request.answer.first + request.answer.found >= request.full_pages
        if is_gone or (self._is_answer_old(request) and not found_all and request.ahead is None):
            self._ask_storage(request)
        return request.answer.is_awaited

    # --- MATCH ---

    def fix_plan(self, request: Request, event: PlanDue) -> None:
        """Fix the plan: start the loads of local tiers and ask prefill, or the caller, for the rest.

        After an exception everything is as before, commands included.
        """
        state = self._state
        # Match again: loads of other requests may have ended, failed or been added since the grant.
        match = self._match(request)
        # The match may have grown since the grant. The pages reserved for that part are not needed. It cannot have
        # shrunk, since it is locked.
        surplus = len(request.held.own) - (request.page_count - match.device_pages)
        assert surplus >= 0, "the locked match is shorter than at the grant"
        lock = request.held.lock
        assert lock is not None
        plan = Plan(match, request.held.own[surplus:])
        request.sources.decline("", 0)
        shared = self._loads_on(plan.node)
        commands_before, adopted = len(state.out), 0
        # Every change below registers its reversal first or at once: an exception anywhere must leave no load without
        # an owner and no command for an operation that does not exist.
        with Rollback() as undo:
            undo.callback(state.take_commands_back, commands_before)
            if request.restore_limit < 2:
                self._load_from_host(request, plan, undo)
            if request.restore_limit < 1 and plan.end >= plan.host_node.depth_pages:
                adopted = self._fetches.adopt_reads(request, plan, undo)
                self._fetches.load(request, plan, undo)
                self._fetches.load_from_peer(request, plan, undo)
            if self._component_pages is not None:
                self._component_pages.begin(request, plan, plan.host_node, undo)
                if request.early.is_wanted:
                    # Copies run one after the other, and the first layer is of no use without the component pages.
                    state.store_components_first(commands_before)
            published = self._shared.publish(request, plan, undo)
            node, pin = plan.node if published is None else published.nodes[-1], request.held.pin
            if node is not lock.node:
                # The longer lock first: whichever call raises, the pages stay protected.
                before, lock = lock, state.index.lock(node)
                undo.callback(state.index.unlock, lock)
                state.index.unlock(before)
                undo.callback(request.held.relock, state.index, before.node)
            if pin is not None:
                state.index.unpin(pin)
                undo.callback(request.held.pin_at, state.index, pin.node)
            if surplus:
                charged = request.admission.charged_to
                state.quota.discharge(charged, surplus)
                undo.callback(state.quota.charge, charged, surplus)
                state.device.give_back(request.held.own[:surplus])
                # The pool takes the pages given back last first, so this returns the same pages.
                undo.callback(state.device.take, surplus)
            op = self._ask_for_rest(request, plan, lock)
            undo.keep()
        # Only field and dictionary updates from here on: the request takes over what the plan has started.
        if surplus:
            request.admission.charge(request.admission.charged_to, -surplus)
            state.pages_were_freed()
        # The answer is used up: if what it promised is not delivered, the next plan needs another one.
        request.answer.forget_time()
        self._lookahead.adopted(request, adopted)
        request.held.plan(lock, plan.own, matched=match.device_pages, promised=plan.end)
        request.recompute.begin(op)
        for load, page_count in (*shared.items(), *((load, load.page_count) for load in plan.loads)):
            self._loads.share(load, request, page_count)
            if load.stage is Stage.FAILED:
                # It may have had no waiter with an open room. This request has one now: look for a sender again.
                state.load_failed(load)
        waiting = sum(load.waiters[request] for load in request.loads)
        # Loads that ended between grant and plan have counted their pages already; the rest is from L1.
        request.sources.note_rest(plan.end - waiting)
        if published is not None:
            request.held.hand_on(published.page_count)
            self._shared.published(request, published)
        if plan.loads or published is not None:
            self._insertions += 1
        if request.ahead is not None:
            # The plan's loads hold what they use of the look-ahead; the remainder can be released.
            state.request_was_planned(request)

    def _ask_for_rest(self, request: Request, plan: Plan, lock: Receipt) -> int:
        """Open a room for the pages after the plan's end, or ask the caller to compute them.

        Returns the operation of the computation, or 0 for a room.
        """
        state = self._state
        if not request.recompute.is_chosen:
            component_pages = None if self._component_pages is None else self._component_pages.promise(request)
            self._rooms.open(request, promised=plan.end, own=plan.own, component_pages=component_pages)
            return 0
        assert request.held.lock is not None
        resume_from = None if self._component_pages is None else self._component_pages.resume_from(plan.node)
        snapshots = None if self._component_pages is None else self._component_pages.snapshots_of(request)
        with Rollback() as undo:
            op = state.start_operation(Recomputation(state, request), deadline_s=float("inf"))
            undo.callback(state.operations.pop, op)
            state.emit(
                Recompute(
                    op=op,
                    request_id=request.request_id,
                    generation=request.generation,
                    first=plan.end,
                    pages=state.index.device_path(lock.node) + plan.own,
                    component_pages=None if request.component_pages is None else request.component_pages.table,
                    resume_from=resume_from,
                    snapshots=snapshots,
                    is_short=request.recompute.is_short,
                )
            )
            undo.keep()
        if request.recompute.is_short:
            state.count("short_rests")
        return op

    def _match(self, request: Request) -> MatchResult:
        """Return the cached part of the prompt.

        For a request that recomputes, the match ends before the first load: it has no room to extend into a load that
        fails.
        """
        if request.lent is not None:
            return self._lending.match(request, request.lent)
        if request.recompute.is_chosen and self._component_pages is not None:
            return self._component_pages.match(request)
        if not request.recompute.is_chosen:
            return self._state.index.match(request.namespace, request.keys)
        return self._device_match(request)

    def _device_match(self, request: Request) -> MatchResult:
        """Return the part of the prompt that is in place in device memory."""
        match = self._state.index.match(request.namespace, request.keys)
        path = self._state.index.path(match.device_node)
        leaf = match.device_node if not path else path[0].parent
        assert leaf is not None
        for node in path:
            if node.load is not None:
                break
            leaf = node
        return MatchResult(leaf.depth_pages, 0, leaf, leaf)

    def _loads_on(self, leaf: Node) -> dict[Load, int]:
        """Return the loads on the path to `leaf`, each with the number of its pages on that path."""
        loads: dict[Load, int] = {}
        for node in self._state.index.path(leaf):
            load = node.load
            if load is not None:
                assert isinstance(load, Load)
                loads[load] = loads.get(load, 0) + node.page_count
        return loads

    def _load_from_host(self, request: Request, plan: Plan, undo: Rollback) -> None:
        """Start copies of the matched host pages, in runs of whole nodes from the same tier.

        A run ends at `copy_run_pages`, and where pages that were fetched ahead begin or end: these count as L3. Pages
        that prefill sends sooner are left to it.
        """
        run: list[Node] = []
        ahead = request.ahead
        path = self._host_path(request, plan)
        for node in path:
            run.append(node)
            count = node.depth_pages - plan.end
            bounds = () if ahead is None else (ahead.first, ahead.joined)
            # A caller that begins early waits for the first layer of all pages: one copy brings it before the rest.
            is_full = count >= self._state.settings.copy_run_pages and not request.early.is_wanted
            if is_full or node is path[-1] or node.depth_pages in bounds:
                is_ahead = ahead is not None and ahead.first <= plan.end < ahead.joined
                tier = "l3" if is_ahead else "l2"
                load = self._loads.begin_copy(
                    plan.end, run, plan.own[:count], tier=tier, by_layer=request.early.is_wanted
                )
                undo.callback(self._loads.abandon, load)
                plan.add(load)
                run = []

    def _host_path(self, request: Request, plan: Plan) -> list[Node]:
        """Return the nodes in host memory to be copied; a node of which prefill sends the end sooner is split."""
        index = self._state.index
        path = [node for node in index.path(plan.host_node) if node.depth_pages > plan.end]
        if not path:
            return path
        end, host = path[-1].depth_pages, self._loads.source_load
        rest, is_old = request.page_count - end, not self._loads.is_measured
        count = pages_to_copy(end - plan.end, rest, host=host, link=self._rooms.source_load, is_old=is_old)
        if count == end - plan.end:
            return path
        self._state.count("l2_declined_pages", end - plan.end - count)
        request.sources.decline("copies_slower", end - plan.end - count)
        end = plan.end + count
        kept = [node for node in path if count and node.depth_pages - node.page_count < end]
        if kept and kept[-1].depth_pages > end:
            kept[-1] = index.split(kept[-1], end - kept[-1].depth_pages + kept[-1].page_count)
        return kept

    # --- READY ---

    def commit(self, request: Request, event: Progressed) -> None:
        """Enter the prompt in the cache and report the page table to the caller: all pages have arrived.

        Can be called again after an exception, and continues from there. Pages that have not joined the cache by then
        do not join it.
        """
        # Everything that can raise comes before ReportReady: after it, a failure would report a second end of the
        # same request. The retracted copy of the request is restored now, so its host pages can go.
        self._backups.release_retracted(request.request_id)
        state = self._state
        settings = state.settings
        assert request.held.lock is not None
        source = "recompute" if request.recompute.is_done else "transfer"
        sources = {tier: pages * settings.page_size for tier, pages in request.sources.pages.items()}
        # Tokens in `own`: all that no other source has brought.
        sources[source] = sources.get(source, 0) + request.prompt_tokens - sum(sources.values())
        request.held.tabulate(state.index)
        assert len(request.held.table) == request.page_count
        # A published delta is in the tree and locked already, since the plan.
        joins = request.cache and request.full_pages > request.held.lock.node.depth_pages
        # A caller that has begun already uses these very pages, so none of them is exchanged for one of the tree.
        joins = joins and not (request.room is not None and request.room.user_op)
        if request.held.inserted is not None or (joins and not request.fallbacks.gave_up("cache")):
            self.keep(request, request.keys)
        state.index.note_served(request.held.lock.node)
        component_pages = None if self._component_pages is None else self._component_pages.commit(request)
        room = request.room
        with Rollback() as undo:
            undo.callback(state.take_commands_back, len(state.out))
            if room is not None:
                self._rooms.receive(room)
                undo.callback(self._rooms.reopen, room)
            state.emit(
                ReportReady(
                    request_id=request.request_id,
                    generation=request.generation,
                    pages=request.held.table,
                    sources=sources,
                    reserve=request.held.reserve,
                    component_pages=component_pages,
                    fallbacks=request.fallbacks.made,
                )
            )
            self._discharge(request)
            undo.keep()
        self._early.complete(request, room)

    def keep(
        self,
        request: Request,
        keys: bytes,
        component_pages: tuple[ComponentLeft, ...] = (),
        *,
        holds: bool = False,
    ) -> int:
        """Insert the request's pages in the cache under `keys`, the keys of its full pages from the first on.

        If the cache has other pages for the same tokens, the request uses those and frees its own. Its lock moves to
        the end of the inserted path; `own` keeps the pages that are not in the tree. `component_pages` are inserted
        with them; `holds` is whether the request will continue from their end. Returns the number of pages that are new
        to the cache. Can be called again after an exception, and continues from there.
        """
        state = self._state
        if request.held.inserted is None:
            count = len(keys) // state.settings.key_bytes
            pages = request.held.table[:count]
            request.held.enter(state.index.insert(request.namespace, keys, pages, priority=request.priority), count)
        inserted = request.held.inserted
        assert inserted is not None and request.held.lock is not None, "a request whose pages are kept has no lock"
        # The lock comes first: until then, the tree's pages can be evicted.
        request.held.lock_at(state.index, inserted.node)
        request.held.give_back_duplicates(state.device)
        if self._component_pages is not None:
            self._component_pages.keep(request, component_pages, inserted.node, holds=holds)
        request.held.entered()
        self._insertions += 1
        state.pages_were_freed()
        return inserted.inserted_count

    # --- Leaving ---

    def leave(self, request: Request, *, settled: bool) -> None:
        """Give everything back; pages that prefill may still write to go to the quarantine.

        `settled` means that prefill does not write to them any more. Can be called again after an exception, and
        continues from there: every step clears the field that it has given back.
        """
        state = self._state
        self._early.leave(request)
        self._lending.note_received(request)
        # Loads before the room: a load that this room fills keeps its pages until the room has no writer, and finds
        # the room by the request.
        self._lookahead.drop(request)
        self._shared.leave(request, settled=settled)
        for load in list(request.loads):
            self._loads.leave(load, request)
        if request.room is not None:
            self._rooms.leave(request.room, settled=settled)
        elif request.recompute.op in state.operations:
            # The caller's computation writes to these pages until its outcome arrives. Freed now, they could belong
            # to another request by then.
            late = LateRecomputation(state, self._component_pages, request)
            state.replace_operation(request.recompute.op, late)
            request.recompute.forget()
        else:
            request.held.give_back_own(state.device)
        request.held.unlock(state.index)
        request.held.unpin(state.index)
        if self._component_pages is not None:
            self._component_pages.leave(request)
        state.device.give_back(request.held.reserve)
        request.held.give_up_reserve()
        self._discharge(request)
        self._storage.leave_query(request)
        state.preempted.pop(request, None)
        state.unserved.pop(request, None)

    def _discharge(self, request: Request) -> None:
        """End the charge of the request: its prefill does not delay it any more."""
        self._state.quota.discharge(*request.admission.discharge())
        # Another request of the same prefill may be within its quota now.
        self._state.pages_were_freed()

    # --- Raises ---

    def fall_back(self, request: Request, event: TransitionRaised) -> None:
        """Give up a tier after an exception: storage the first time, host memory as well the second time.

        `Request.restore_limit` applies this to the next plan; fetches of the current plan are cut here.
        """
        limit = request.restore_limit
        self.give_up(request, event, "nothing" if request.recompute.is_chosen else "storage" if limit < 2 else "host")
        self._lookahead.drop(request)
        for load in list(request.loads):
            self._loads.cut(load)

    def give_grant_back(self, request: Request, event: TransitionRaised) -> None:
        """Give a grant back after an exception of a waiting request, which waits on without storage."""
        self.give_up(request, event, "nothing" if request.recompute.is_chosen else "storage")
        self.leave(request, settled=True)
        request.forget_plan()

    def repeat(self, request: Request, event: TransitionRaised) -> None:
        """Let the receipt of a chunk or a commit that raised be repeated; the commit then caches nothing."""
        lock = request.held.lock
        joins = request.held.inserted is None and lock is not None and lock.node.depth_pages < request.full_pages
        joins = joins and request.lent is None
        self.give_up(request, event, "cache" if event.taking == Progressed.__name__ and joins else "nothing")

    def give_up(self, request: Request, event: TransitionRaised, what: str) -> None:
        """Count the exception, and note what the request gives up."""
        self._state.count("fallbacks_by_raise")
        request.fallbacks.note(event.detail)
        request.fallbacks.give_up(Fallback(event.rule, what, event.error))
