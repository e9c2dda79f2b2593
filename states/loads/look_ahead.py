"""Look-ahead: fetches a prompt's pages from storage to the host while the request waits for device memory.

A request in PREALLOC has queried storage. If storage has pages and device memory is short, look-ahead fetches them in
runs, as a plan would, but to host pages only, and at most `lookahead_pages_max` for all requests together:

    [0, first)       pages in the index when look-ahead began. They must all be in host memory, since host pages can
                     only join the tree below host pages; otherwise nothing is fetched ahead.
    [first, joined)  read and part of the tree, held there for the request by one pin
    [joined, end)    `runs`, in order: under way, or read after a run that is

Admission does not wait for look-ahead. When the request is admitted, its plan finds [first, joined) on the host like
other pages and copies them; they count as "l3", since storage brought them for this request. Runs still under way
become loads of the plan (`tidekv.states.request.plan_fetches`), so no page is read twice. Whatever the plan cannot use
is released, and so is everything if the request leaves (aborted, failed, sent back): received pages stay as ordinary
cache, and a read under way keeps its host pages until it ends (`LateFetch`).

Component pages of the prompt's end are read ahead by `tidekv.states.components.look_ahead`, within the same budget.

Look-ahead changes neither the order of the queue nor the use of device pages. It takes host pages as far as eviction
yields them. Pages it holds cannot be evicted until the request is admitted or gone; `lookahead_pages_max` bounds them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import FetchPages
from tidekv.states.components.look_ahead import ComponentLookAhead
from tidekv.states.records.ahead import AheadRun
from tidekv.states.rollback import Rollback
from tidekv.states.storage_policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from tidekv.states.components.storage import ComponentStorage
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.prefix.node import Node
    from tidekv.states.records.ahead import Ahead
    from tidekv.states.records.request import Request
    from tidekv.states.storage.admission import StorageAdmission


class AheadRead:
    """Operation: one look-ahead read."""

    __slots__ = ("_lookahead", "_state", "_storage", "request", "run")

    def __init__(
        self, state: CoreState, lookahead: LookAhead, storage: StorageAdmission, request: Request, run: AheadRun
    ) -> None:
        self._state = state
        self._lookahead = lookahead
        self._storage = storage
        self.request = request
        self.run = run

    def ended(self, event: Outcome, error: str) -> None:
        """Enter the verified pages in the tree as host pages."""
        self._lookahead.read_ended(self.request, self.run, self._storage.fetch_ended(event))

    def late(self) -> None:
        """Give up the read; it continues without its request."""
        self._storage.fetch_is_late()
        # In its own `run_guarded`: the caller repeats a method that raises, which would count the call as late twice.
        self._state.run_guarded(partial(self._lookahead.is_late, self.request, self.run))

    def abandon(self) -> None:
        """Treat the request as if storage had nothing for it."""
        self._lookahead.abandon(self.request)


class LookAhead:
    """All look-ahead reads of a core."""

    def __init__(self, state: CoreState, storage: StorageAdmission, components: ComponentStorage | None) -> None:
        self._state = state
        self._storage = storage
        self._components: ComponentLookAhead | None = None
        if state.components is not None and components is not None:
            self._components = ComponentLookAhead(state, storage, state.components, components)
        self.pages = 0
        """Host pages held or under way for waiting requests."""

    # --- Starting ---

    def start(self, request: Request) -> None:
        """Fetch ahead for a waiting request, if limits and policies allow it.

        After an exception, `abandon` releases what was begun.
        """
        if request.answer.op or not self._storage.is_usable or request.restore_limit:
            return
        if request.lent is not None:
            # It does not wait for device memory.
            return
        if self._components is not None:
            began = self._components.start(request, self._state.settings.lookahead_pages_max - self.pages)
            if request.ahead is not None:
                request.ahead.use(began)
                self.pages += began
        if request.ahead is None or request.ahead.pin is None:
            self._start_pages(request)

    def _start_pages(self, request: Request) -> None:
        """Fetch full pages ahead."""
        state = self._state
        settings = state.settings
        left = settings.lookahead_pages_max - self.pages
        threshold = max(settings.prefetch_threshold_tokens, 1)
        if not request.answer.found or left * settings.page_size < threshold:
            return
        match = state.index.match(request.namespace, request.keys)
        first = match.device_pages + match.host_pages
        wanted = min(request.answer.first + request.answer.found - first, left)
        if first < request.answer.first or wanted < 1 or not state.index.has_host(match.host_node):
            return
        if self._is_under_way(request, first):
            return
        deadline_s = settings.prefetch_deadline_s(wanted, request.deadline_at_s - state.now_s)
        allowed = self._storage.allowance(wanted, deadline_s)
        if allowed * settings.page_size < threshold:
            return
        ahead = request.look_ahead(state.index.tree.attachment)
        ahead.begin(first, state.index.pin(match.host_node))
        end = first + allowed
        while first < end and (pages := state.make_host_room(min(settings.fetch_run_pages, end - first))):
            self._fetch(request, ahead, first, pages, deadline_s)
            first += pages
        if not ahead.runs and ahead.pin is not None:
            state.index.unpin(ahead.pin)
            ahead.read_nothing()
            if not ahead.components:
                self.drop(request)

    def _fetch(self, request: Request, ahead: Ahead, first: int, count: int, deadline_s: float) -> None:
        state = self._state
        run = AheadRun(first=first)
        with Rollback() as undo:
            run.own_host(state.host.take(count))
            undo.callback(state.host.give_back, run.host_pages)
            run.run_as(
                state.start_operation(AheadRead(state, self, self._storage, request, run), deadline_s=deadline_s)
            )
            undo.callback(state.operations.pop, run.op)
            state.emit(
                FetchPages(
                    op=run.op,
                    request_id=request.request_id,
                    positions=page_ids(range(first, first + count)),
                    host_pages=run.host_pages,
                    timeout_s=min(deadline_s, FETCH_TIMEOUT_MAX_S),
                )
            )
            undo.keep()
        ahead.add_run(run)
        ahead.use(count)
        self.pages += count
        self._storage.take(count)
        self._storage.ahead_in_flight += 1
        self._storage.pages_in_flight += count
        run.was_queued(state.now_s, self._storage.pages_in_flight)

    def _is_under_way(self, request: Request, first: int) -> bool:
        """Whether page `first` of the same prefix is being fetched ahead for another request."""
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

    def read_ended(self, request: Request, run: AheadRun, valid: int) -> None:
        """Take the outcome of a read: its first `valid` pages are verified.

        After an exception, `abandon` gives back what is left.
        """
        state = self._state
        self._end_read(run)
        ahead = request.ahead
        assert ahead is not None
        run.end()
        count = len(run.host_pages)
        valid = max(0, min(valid, count))
        if valid == count:
            self._storage.note_throughput(begun_at_s=run.begun_at_s, pages=run.queued_pages)
        else:
            state.count("l3_pages_short", count - valid)
            # Later runs cannot join the tree across the gap. Without any valid page, the run itself goes as well.
            self._cut(ahead, ahead.runs.index(run) + (valid > 0))
            if valid:
                state.host.give_back(run.host_pages[valid:])
                run.own_host(run.host_pages[:valid])
        while ahead.runs and ahead.runs[0].has_ended:
            self._join(request, ahead, ahead.runs[0])
        state.pages_were_freed()

    def is_late(self, request: Request, run: AheadRun) -> None:
        """Give up a late read and the runs after it; the read keeps its host pages until it ends."""
        state = self._state
        state.count("l3_fetches_late")
        self._storage.note_throughput(begun_at_s=run.begun_at_s, pages=run.queued_pages)
        ahead = request.ahead
        assert ahead is not None
        self._cut(ahead, ahead.runs.index(run))

    def _join(self, request: Request, ahead: Ahead, run: AheadRun) -> None:
        """Enter a run that has been read in the tree as host pages, and extend the pin to it."""
        index = self._state.index
        width = self._state.settings.key_bytes
        count = len(run.host_pages)
        assert ahead.pin is not None
        keys = request.keys[run.first * width : (run.first + count) * width]
        node, left = index.insert_host(ahead.pin.node, keys, run.host_pages)
        run.own_host(left)
        self._state.count("pages_fetched_ahead", count - len(left))
        # Pin the longer path before releasing the shorter one: whichever call raises, the pages stay protected.
        with Rollback() as undo:
            pin = index.pin(node)
            undo.callback(index.unpin, pin)
            index.unpin(ahead.pin)
            undo.keep()
        ahead.join(pin, node.depth_pages)
        if ahead.attachment == index.tree.attachment:
            # Only if the same storage is still attached: another one may not have these pages.
            self._mark_stored(node, run.first)
        self._state.host.give_back(run.host_pages)
        run.own_host(page_ids())
        ahead.forget_runs(1)
        if node.depth_pages < run.first + count:
            # A node in RECLAIMING blocks the rest.
            self._cut(ahead, 0)

    def _mark_stored(self, node: Node, first: int) -> None:
        while node.parent is not None and node.depth_pages > first:
            self._state.index.mark_stored(node)
            node = node.parent

    # --- Ends ---

    def usable_runs(self, request: Request) -> list[AheadRun]:
        """Return the runs that the request's plan may adopt: reads under way, and runs that have arrived after one."""
        return list(request.ahead.runs) if request.ahead is not None and self._storage.is_usable else []

    def adopted(self, request: Request, count: int) -> None:
        """Remove the first `count` runs, which are loads of the request's plan now, and the adopted component reads."""
        if request.ahead is not None:
            # `pages_in_flight` keeps counting their pages, now for a load.
            self._storage.ahead_in_flight -= sum(not run.has_ended for run in request.ahead.runs[:count])
            request.ahead.forget_runs(count)
            if self._components is not None:
                self._components.adopted(request.ahead)

    def drop(self, request: Request) -> None:
        """Release everything that was fetched ahead for a request. Can be called again after an exception."""
        state = self._state
        ahead = request.ahead
        if ahead is None:
            return
        self._cut(ahead, 0)
        for read in list(ahead.components.values()):
            assert self._components is not None
            self._components.give_up(request, read)
        if ahead.pin is not None:
            state.index.unpin(ahead.pin)
            ahead.read_nothing()
        request.end_look_ahead()
        if ahead.taken:
            self.pages -= ahead.taken
            state.may_look_ahead()
            state.pages_were_freed()

    def abandon(self, request: Request) -> None:
        """After an exception, continue as if storage had nothing for the request. Can be called again."""
        request.answer.forget()
        self.drop(request)

    def _cut(self, ahead: Ahead, at: int) -> None:
        """Give up the runs from number `at` on."""
        state = self._state
        while len(ahead.runs) > at:
            run = ahead.runs[-1]
            if not run.has_ended:
                self._storage.fetch_given_up(run)
                self._end_read(run)
            else:
                state.host.give_back(run.host_pages)
            ahead.forget_last_run()

    def _end_read(self, run: AheadRun) -> None:
        """Remove a run's read from the counts of reads in flight."""
        self._storage.ahead_in_flight -= 1
        self._storage.pages_in_flight -= len(run.host_pages)
