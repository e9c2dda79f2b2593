"""Look-ahead: what storage has of a prompt that waits for device memory is brought to the host meanwhile.

A request in PREALLOC has asked storage already. Where storage has something and device memory is short, the pages are
fetched in runs, as a plan would, but to host pages only, and no more than `lookahead_pages_max` over all requests:

    [0, first)       what the index had when it began; on the host to its end, or else nothing is fetched ahead: host
                     pages can only join the tree below host pages
    [first, joined)  landed and part of the tree, held there for the request by one pin
    [joined, end)    `runs`, in order: under way, or landed behind one that is

Admission does not wait for it. When the request is admitted, its plan finds [first, joined) on the host like any other
page, and loads it by copy; these tokens count as "l3", since storage brought them for this request. Runs that are still
under way become loads of the plan (`tidekv.states.request.plan`), so that no page is read twice. What the plan cannot
use, and everything if the request leaves (aborted, failed, sent back), is released: landed pages are cache as any
other, and a read that is under way keeps its host pages until it ends (`LateFetch`).

Neither place in the queue nor device pages depend on it. Host pages come as eviction gives them, and none where that is
nothing; those that are held cannot be evicted until the request is admitted or gone, which the bound keeps in bounds.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import FetchPages
from tidekv.states.request.request import Ahead, AheadRun, Request
from tidekv.states.rollback import Rollback
from tidekv.states.storage.policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.prefix.node import Node
    from tidekv.states.storage.admission import StorageAdmission


class AheadRead:
    """Operation: one read ahead."""

    __slots__ = ("_lookahead", "_state", "_storage", "run")

    def __init__(self, state: CoreState, lookahead: LookAhead, storage: StorageAdmission, run: AheadRun) -> None:
        self._state = state
        self._lookahead = lookahead
        self._storage = storage
        self.run = run

    def ended(self, event: Outcome, error: str) -> None:
        """What is good joins the tree on the host."""
        self._lookahead.landed(self.run, self._storage.fetch_ended(event))

    def late(self) -> None:
        """The read goes on without its request."""
        self._storage.call_is_late()
        # Guarded by itself: a second try must not count the call as late twice.
        self._state.run_guarded(partial(self._lookahead.is_late, self.run))

    def abandon(self) -> None:
        """Its request goes on as if storage had nothing."""
        self._lookahead.abandon(self.run.request)


class LookAhead:
    """All that is fetched ahead."""

    def __init__(self, state: CoreState, storage: StorageAdmission) -> None:
        self._state = state
        self._storage = storage
        self.pages = 0
        """Host pages that are held, or under way, for requests that wait."""

    # --- Starting ---

    def start(self, request: Request) -> None:
        """Fetch ahead for a request that waits, if that is to be. After a raise, `abandon` returns what was begun."""
        state = self._state
        settings = state.settings
        left = settings.lookahead_pages_max - self.pages
        threshold = max(settings.prefetch_threshold_tokens, 1)
        if (
            request.ahead is not None
            or request.query_op
            or not request.stored_found
            or left * settings.page_size < threshold
        ):
            return
        if not self._storage.is_usable or request.restore_limit or state.components is not None:
            # With components, how far a plan reaches is not known before everything is reserved.
            return
        match = state.index.match(request.namespace, request.keys)
        first = match.device_pages + match.host_pages
        wanted = min(request.stored_first + request.stored_found - first, left)
        if first < request.stored_first or wanted < 1 or not state.index.has_host(match.host_node):
            return
        if self._is_under_way(request, first):
            return
        deadline_s = settings.prefetch_deadline_s(wanted, request.deadline_at_s - state.now_s)
        allowed = self._storage.allowance(wanted, deadline_s)
        if allowed * settings.page_size < threshold:
            return
        ahead = request.ahead = Ahead(first=first, attachment=state.index.tree.attachment)
        ahead.pin = state.index.pin(match.host_node)
        end = first + allowed
        while first < end and (pages := state.make_host_room(min(settings.fetch_run_pages, end - first))):
            self._fetch(request, ahead, first, pages, deadline_s)
            first += pages
        if not ahead.runs:
            self.drop(request)

    def _fetch(self, request: Request, ahead: Ahead, first: int, count: int, deadline_s: float) -> None:
        state = self._state
        run = AheadRun(request, first=first)
        with Rollback() as undo:
            run.host_pages = state.host.take(count)
            undo.callback(state.host.give_back, run.host_pages)
            run.op = state.start_operation(AheadRead(state, self, self._storage, run), deadline_s=deadline_s)
            undo.callback(state.operations.pop, run.op)
            state.emit(
                FetchPages(
                    op=run.op,
                    request_id=request.request_id,
                    first=first,
                    host_pages=run.host_pages,
                    timeout_s=min(deadline_s, FETCH_TIMEOUT_MAX_S),
                )
            )
            undo.keep()
        ahead.runs.append(run)
        ahead.taken += count
        self.pages += count
        self._storage.take(count)
        self._storage.ahead_in_flight += 1
        self._storage.pages_in_flight += count
        run.begun_at_s, run.queued_pages = state.now_s, self._storage.pages_in_flight

    def _is_under_way(self, request: Request, first: int) -> bool:
        """Whether the same page is being fetched ahead for another request."""
        width = self._state.settings.key_bytes
        keys = request.keys[: (first + 1) * width]
        return any(
            other.ahead is not None
            and other.namespace == request.namespace
            and any(run.first == first for run in other.ahead.runs)
            and other.keys.startswith(keys)
            for other in self._state.requests.values()
            if other is not request
        )

    # --- Outcomes ---

    def landed(self, run: AheadRun, good: int) -> None:
        """A read has ended with its first `good` pages verified. After a raise, `abandon` gives back what is left."""
        state = self._state
        self._is_over(run)
        ahead = run.request.ahead
        assert ahead is not None
        run.is_landed = True
        count = len(run.host_pages)
        good = max(0, min(good, count))
        if good == count:
            self._storage.note_throughput(begun_at_s=run.begun_at_s, pages=run.queued_pages)
        else:
            state.count("l3_pages_short", count - good)
            # Where nothing has come, the run itself is of no use either.
            self._cut(ahead, ahead.runs.index(run) + (good > 0))
            if good:
                state.host.give_back(run.host_pages[good:])
                run.host_pages = run.host_pages[:good]
        while ahead.runs and ahead.runs[0].is_landed:
            self._join(ahead, ahead.runs[0])
        state.pages_freed = True

    def is_late(self, run: AheadRun) -> None:
        """A read is late: it keeps its host pages until it ends, and what follows it is of no use."""
        state = self._state
        state.count("l3_fetches_late")
        self._storage.note_throughput(begun_at_s=run.begun_at_s, pages=run.queued_pages)
        ahead = run.request.ahead
        assert ahead is not None
        self._cut(ahead, ahead.runs.index(run))

    def _join(self, ahead: Ahead, run: AheadRun) -> None:
        """Make what has landed host pages of the tree, and hold it there."""
        index = self._state.index
        request = run.request
        width = self._state.settings.key_bytes
        count = len(run.host_pages)
        assert ahead.pin is not None
        keys = request.keys[run.first * width : (run.first + count) * width]
        node, run.host_pages = index.insert_host(ahead.pin.node, keys, run.host_pages)
        self._state.count("pages_fetched_ahead", count - len(run.host_pages))
        with Rollback() as undo:
            pin = index.pin(node)
            undo.callback(index.unpin, pin)
            index.unpin(ahead.pin)
            undo.keep()
        ahead.pin = pin
        ahead.joined = node.depth_pages
        if ahead.attachment == index.tree.attachment:
            self._mark_stored(node, run.first)
        self._state.host.give_back(run.host_pages)
        run.host_pages = page_ids()
        del ahead.runs[0]
        if node.depth_pages < run.first + count:
            # Void pages are in the way of the rest.
            self._cut(ahead, 0)

    def _mark_stored(self, node: Node, first: int) -> None:
        while node.parent is not None and node.depth_pages > first:
            self._state.index.mark_stored(node)
            node = node.parent

    # --- Ends ---

    def usable_runs(self, request: Request) -> list[AheadRun]:
        """What the plan of a request may go on with: reads under way, and pages that have landed behind one."""
        return list(request.ahead.runs) if request.ahead is not None and self._storage.is_usable else []

    def adopted(self, request: Request, count: int) -> None:
        """The first `count` runs are loads of the request's plan now."""
        if request.ahead is not None:
            # Their pages are in flight as before, for a load.
            self._storage.ahead_in_flight -= sum(not run.is_landed for run in request.ahead.runs[:count])
            del request.ahead.runs[:count]

    def drop(self, request: Request) -> None:
        """Release what was fetched ahead for a request. Can be called again if it raised."""
        state = self._state
        ahead = request.ahead
        if ahead is None:
            return
        self._cut(ahead, 0)
        if ahead.pin is not None:
            state.index.unpin(ahead.pin)
            ahead.pin = None
        request.ahead = None
        if ahead.taken:
            self.pages -= ahead.taken
            state.ahead_due = state.pages_freed = True

    def abandon(self, request: Request) -> None:
        """A step for this request raised: it goes on as if storage had nothing. Can be called again."""
        request.stored_found = 0
        self.drop(request)

    def _cut(self, ahead: Ahead, at: int) -> None:
        """Give up the runs from number `at` on."""
        state = self._state
        while len(ahead.runs) > at:
            run = ahead.runs[-1]
            if not run.is_landed:
                self._storage.fetch_given_up(run.op, run.host_pages)
                self._is_over(run)
            else:
                state.host.give_back(run.host_pages)
            ahead.runs.pop()

    def _is_over(self, run: AheadRun) -> None:
        """The run waits for its read no longer."""
        self._storage.ahead_in_flight -= 1
        self._storage.pages_in_flight -= len(run.host_pages)
