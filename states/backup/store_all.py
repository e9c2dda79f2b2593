"""Storing everything: what storage lacks of the pages that device and host have, before this worker goes away.

    scan the tree ──▶ ends of paths that storage lacks ──▶ hottest end: a backup of its path ──▶ ... ──▶ scan again
         ▲                                                  at most WRITES_MAX writes at once               │
         └──────────────────── storage has got something since the last scan ──────────────────────────────┘

A page is of no use without all pages before it, so whole paths are written, by the same backups as those of finished
requests (`tidekv.states.backup.backups`): pages that only the device has go to the host first, and component pages of
the end follow. The hottest end, which eviction would take last, comes first. What the policy keeps out of storage
(`write_tokens_min`, rare pages with "selective") stays out, and so does what a storage of known capacity could only
hold in place of hotter pages.

A copy to the host may have to evict host pages. Those that storage lacks are stored before it, since they may have no
other copy.

A path of which storage got a part only, or nothing since others had the host memory, is tried again after the others.
The last scan finds no end that has not had its turn since storage got its last page. While the breaker is open, nothing
is started. At the end of its time a run is reported as it is: writes under way go on, as those of finished requests do.

A run to another decode worker does the same with that worker in place of storage. What it has is known from its answers
only, in this run and the one that this one goes on with. Neither the policy of storage nor its breaker counts. If that
worker refuses further prompts, since it cannot be reached, or has no room but for what it uses more, the run ends.

Ownership. A run owns nothing: its backups hold their receipts until they end.
"""

from __future__ import annotations

import heapq
from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.backup.backups import Backup
from tidekv.states.commands import ReportStored
from tidekv.states.components.backups import ComponentBackup, ComponentWrite
from tidekv.states.core_state import STORE, Continuation
from tidekv.states.prefix.policies import POLICIES
from tidekv.states.rollback import Rollback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidekv.states.backup.backups import Backups
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome, PromptHanded, StoreRequested
    from tidekv.states.prefix.node import Node
    from tidekv.states.storage.admission import StorageAdmission

WRITES_MAX = 4
"""Maximum backups and writes of component pages under way when another one is started."""
PART_NODES = 2048
"""Nodes that one step looks at."""
PART_ENDS = 256
"""Ends of paths that one step takes from the queue."""


class StoreRun:
    """Operation: one request to store everything. Its deadline is the end of its time."""

    __slots__ = (
        "_store_all",
        "begun",
        "begun_at_s",
        "begun_marked",
        "brought",
        "call",
        "cause",
        "declined",
        "failed",
        "is_refused",
        "is_scanned",
        "lacking",
        "marked_before",
        "op",
        "present",
        "progress_before",
        "queue",
        "stack",
        "started",
        "there",
        "to",
        "tried",
        "until_s",
        "with_components",
    )

    def __init__(
        self, store_all: StoreAll, event: StoreRequested, *, at_s: float, begun: dict[str, int], marked: int
    ) -> None:
        self._store_all = store_all
        self.call = event.call
        self.to = event.to
        """The address of the worker that the cache is handed to; empty: it is stored."""
        self.until_s = at_s + event.within_s
        self.there: dict[Node, None] = {}
        """Nodes whose pages that worker has."""
        self.brought = 0
        """Pages that it got by this run."""
        self.is_refused = False
        """Whether it takes no further prompt."""
        self.cause = ""
        """Its last word about pages that it does not take."""
        self.op = 0
        self.begun_at_s = at_s
        self.begun = begun
        """The counters at its begin."""
        self.begun_marked = marked
        """`StoreAll._pages_marked` at its begin."""
        self.stack: list[tuple[Node, bool]] | None = None
        """Nodes that the scan under way has yet to look at, each with whether storage lacks a page above it."""
        self.is_scanned = False
        """Whether the first scan has ended."""
        self.queue: list[tuple[tuple[int, ...], int, Node]] = []
        """Ends of paths to write, as a heap with the hottest first."""
        self.tried: dict[Node, None] = {}
        """Ends of paths that had their turn since the last scan before which storage got a page."""
        self.with_components: dict[Node, None] = {}
        """Ends with component pages that had their turn."""
        self.started: dict[Backup, Node] = {}
        """Its backups that are not known to have ended, with the ends that they were begun for."""
        self.declined: dict[Node, None] = {}
        """Ends whose write did not begin beside others; they get another turn when these have ended."""
        self.failed: dict[Node, None] = {}
        """Nodes whose last write failed."""
        self.present = 0
        """Pages that storage had at the first scan."""
        self.lacking = 0
        """Pages that storage lacked at the last scan, as far as that has come."""
        self.marked_before = 0
        """`StoreAll._pages_marked` when the last scan began."""
        self.progress_before = 0

    def began(self, op: int) -> None:
        """Note the number of this operation."""
        self.op = op

    def ended(self, event: Outcome, error: str) -> None:
        """Do nothing: without a command there is no outcome."""

    def late(self) -> None:
        """Report, because the time is over."""
        self._store_all.report(self)

    def abandon(self) -> None:
        """Do nothing: see `ended`."""


class StoreAll:
    """Stores everything on request, or hands it over. One run at a time."""

    def __init__(self, state: CoreState, storage: StorageAdmission, backups: Backups) -> None:
        self._state = state
        self._storage = storage
        self._backups = backups
        self._policy = POLICIES[state.settings.eviction]
        self._pages_there = 0
        """Pages of which it became known so far that the worker of a run has them."""
        self.run: StoreRun | None = None
        self._to = ""
        """The worker that the last run handed the cache to. The next run may go on with that; empty: it stored."""
        self._there: dict[Node, None] = {}
        """Nodes whose pages that worker has."""
        state.index.tree.on_split.append(self._has_split)

    @property
    def pages_left(self) -> int:
        """Pages that storage lacks while a run is under way, as far as they are known; 0 without a run."""
        return 0 if self.run is None else self._left(self.run)

    def take(self, event: StoreRequested) -> None:
        """End the run under way, which is reported as it is, and begin another one unless its time is 0."""
        if self.run is not None:
            self.report(self.run)
        state = self._state
        run = StoreRun(self, event, at_s=state.now_s, begun=dict(state.counters), marked=self._pages_marked(event.to))
        if event.goes_on and self._to == event.to:
            run.there = self._there
        if event.within_s <= 0:
            self._emit_report(run)
            return
        with Rollback() as undo:
            op = self._state.start_operation(run, deadline_s=event.within_s)
            undo.callback(self._state.end_operation, op)
            run.began(op)
            self._state.storing_began()
            undo.keep()
        self.run = run
        self._to, self._there = run.to, run.there

    def look(self) -> None:
        """Start what may be written now; end the run if nothing is left. Safe to call again after a raise."""
        state, run = self._state, self.run
        state.begin_ahead(STORE)
        if run is None:
            return
        self._take_ended(run)
        if run.stack is not None:
            return  # The last part of the scan causes the next look.
        if not run.is_scanned:
            self._begin_scan(run)
        elif not (state.settings.host_pages and (run.to or state.storage_available)):
            self.report(run)
        elif run.is_refused:
            if not run.started:
                self.report(run)
        elif not self._is_held_back(run):
            # Otherwise the end of the breaker's back-off causes the next look.
            self._start_writes(run)
            if not run.queue and not self._writes(run):
                # Pages may have been left since the scan, and a path that was written in part may fit now.
                self._begin_scan(run)

    # --- The end ---

    def report(self, run: StoreRun) -> None:
        """End a run. Can be called again after an exception."""
        if self.run is not run:
            return
        with Rollback() as undo:
            undo.callback(self._state.take_commands_back, len(self._state.out))
            self._emit_report(run)
            self._state.end_operation(run.op)
            self._state.storing_ended()
            undo.keep()
        self.run = None

    def _emit_report(self, run: StoreRun) -> None:
        counters = self._state.counters
        stored, again = (counters[name] - run.begun[name] for name in ("pages_stored", "pages_stored_again"))
        if run.to:
            stored, again = run.brought, 0
        found = max(self._pages_marked(run.to) - run.begun_marked - (stored - again), 0)
        left = self._left(run)
        lacking = (node for node in run.failed if node.parent is not None and not self._is_there(run, node))
        failed = sum(node.page_count for node in lacking)
        components = counters["component_pages_stored"] - run.begun["component_pages_stored"]
        self._state.emit(
            ReportStored(
                call=run.call,
                stored=stored,
                components_stored=0 if run.to else components,
                present=run.present + found,
                left=left,
                failed=min(failed, left),
                seconds=self._state.now_s - run.begun_at_s,
                cause=run.cause if left else "",
            )
        )

    def _left(self, run: StoreRun) -> int:
        return max(run.lacking - (self._pages_marked(run.to) - run.marked_before), 0)

    # --- What is there ---

    def _is_there(self, run: StoreRun, node: Node) -> bool:
        """Whether storage, or the worker that the cache is handed to, has the pages of a node."""
        return node in run.there if run.to else self._state.index.tree.is_stored(node)

    def _has_split(self, upper: Node, lower: Node) -> None:
        # Between two runs as well: the second one would offer the upper part once more.
        if lower in self._there:
            self._there[upper] = None

    def _pages_marked(self, to: str) -> int:
        """Pages of which it became known so far that storage has them, or the worker of a run, each time that it was
        not known.
        """
        return self._pages_there if to else self._backups.pages_marked

    def _take_answer(self, run: StoreRun, backup: Backup, answer: PromptHanded) -> None:
        """Note what the worker has of a path, and why not more."""
        run.brought += answer.brought
        self._state.count("pages_handed", answer.brought)
        run.is_refused |= answer.refuses
        run.cause = answer.error or run.cause
        # An answer may end within a node.
        for node in self._state.index.path(backup.leaf):
            first = node.depth_pages - node.page_count
            if first < answer.there < node.depth_pages and not node.is_reclaiming:
                node = self._state.index.split(node, answer.there - first)
            if node.depth_pages <= answer.there and node not in run.there:
                run.there[node] = None
                self._pages_there += node.page_count

    # --- Scans ---

    def _begin_scan(self, run: StoreRun) -> None:
        state = self._state
        with Rollback() as undo:
            undo.callback(self._drop_scan, run)
            if self._progress(run) > run.progress_before:
                run.tried.clear()
            for leaf in run.declined:
                run.tried.pop(leaf, None)
            run.declined.clear()
            roots = state.index.tree.roots.values()
            run.stack = [(child, False) for root in roots for child in root.children.values()]
            run.lacking, run.marked_before = 0, self._pages_marked(run.to)
            run.progress_before = self._progress(run)
            state.begin_work(partial(self._scan, run))
            undo.keep()

    def _progress(self, run: StoreRun) -> int:
        """A number that grows with what may let a path be written that could not be before: a damaged host page was
        dropped, of which the device may have another copy, or storage has got a page.
        """
        # What is damaged is not dropped while it is offered, so another offer would find it again.
        return self._pages_marked(run.to) + (0 if run.to else self._state.counters["l2_damaged"])

    def _drop_scan(self, run: StoreRun) -> None:
        run.stack = None

    def _scan(self, run: StoreRun) -> bool:
        """Look at the next nodes; return whether there are more."""
        if run.stack is None or self.run is not run:
            return False
        for _ in range(PART_NODES):
            if not run.stack:
                self._end_scan(run)
                return False
            node, lacks_above = run.stack[-1]
            # A node that was split meanwhile has kept its end and all below it.
            below = [] if node.parent is None or not _is_whole(node) else self._look_at(run, node, lacks_above)
            run.stack.pop()
            run.stack += below
        return True

    def _look_at(self, run: StoreRun, node: Node, lacks_above: bool) -> list[tuple[Node, bool]]:
        """Queue a node if it is the end of a path to write; return the nodes below it."""
        stored = self._is_there(run, node)
        lacks = lacks_above or not stored
        if not stored:
            run.lacking += node.page_count
        elif not run.is_scanned:
            run.present += node.page_count
        below = [child for child in node.children.values() if _is_whole(child)]
        has_components = not run.to and self._has_components(node)
        is_end = lacks and (not below or has_components) and node not in run.tried
        # Whether storage has the component pages of an end is not known: each such end has one turn.
        if is_end or (has_components and node not in run.with_components):
            heat = self._policy.priority(node)
            heapq.heappush(run.queue, (tuple(-part for part in heat), node.node_id, node))
        return [(child, lacks) for child in reversed(below)]

    def _end_scan(self, run: StoreRun) -> None:
        has_found = bool(run.queue)
        run.stack = None
        was_first, run.is_scanned = not run.is_scanned, True
        if has_found or was_first:
            self._state.may_store()
        else:
            self.report(run)

    def _has_components(self, node: Node) -> bool:
        """Whether device or host has component pages that belong to the end of a node."""
        components = self._state.components
        if components is None:
            return False
        last = node.depth_pages - 1
        return any(last in tier.pages_of(node) for tier in components.tiers)

    # --- Writes ---

    def _is_held_back(self, run: StoreRun) -> bool:
        """Whether no write may start now."""
        return not run.to and self._storage.is_open

    def _writes(self, run: StoreRun) -> int:
        if run.to:
            return len(run.started)
        kinds = (Backup, ComponentBackup, ComponentWrite)
        return sum(isinstance(operation, kinds) for operation in self._state.operations.values())

    def _take_ended(self, run: StoreRun) -> None:
        live = set(self._backups)
        for backup in [backup for backup in run.started if backup not in live]:
            if backup.there is not None:
                self._take_answer(run, backup, backup.there)
            path = self._state.index.path(backup.leaf)
            for node in path:
                run.failed.pop(node, None)
            if backup.has_failed:
                run.failed.update((node, None) for node in path if not self._is_there(run, node))
            if backup.was_declined:
                run.declined[run.started[backup]] = None
            del run.started[backup]

    def _start_writes(self, run: StoreRun) -> None:
        for _ in range(PART_ENDS):
            if not run.queue or self._writes(run) >= WRITES_MAX or self._is_held_back(run):
                return
            leaf = run.queue[0][-1]
            if self._is_due(run, leaf):
                if self._is_being_written(run, leaf) or not self._has_room_for(run, leaf):
                    return
                self._start(run, leaf)
            else:
                run.tried[leaf] = None
            run.with_components[leaf] = None
            heapq.heappop(run.queue)
        if run.queue:
            Continuation(self._state, self._look_again)

    def _look_again(self) -> bool:
        self._state.may_store()
        return False

    def _start(self, run: StoreRun, leaf: Node) -> None:
        run.tried[leaf] = None
        if run.to:
            run.started[self._backups.hand(leaf, run.to, until_s=run.until_s)] = leaf
        else:
            run.started[self._backups.store(leaf)] = leaf

    def _is_due(self, run: StoreRun, leaf: Node) -> bool:
        """Whether a path is still there, and the policy and the capacity of storage allow to write what it lacks."""
        state, settings = self._state, self._state.settings
        if run.to:
            path = state.index.path(leaf)
            return bool(path) and all(map(_is_whole, path)) and not all(self._is_there(run, node) for node in path)
        if leaf.parent is None or leaf.depth_pages * settings.page_size < settings.write_tokens_min:
            return False
        path = state.index.path(leaf)
        if not all(map(_is_whole, path)):
            return False
        lacking = next((node for node in path if not state.index.tree.is_stored(node)), None)
        if lacking is None:
            return self._storage.keeps_components and self._has_components(leaf)
        if settings.write == "selective" and lacking.served < settings.write_hits_min:
            return False
        capacity = self._storage.capacity_pages
        return not capacity or self._pages_named() + self._lacking(leaf) <= capacity

    def _is_being_written(self, run: StoreRun, leaf: Node) -> bool:
        """Whether a write under way has the first page of a path that storage lacks, which would be written twice."""
        index = self._state.index
        first = next((node for node in index.path(leaf) if not self._is_there(run, node)), None)
        return first is not None and any(first in index.path(backup.leaf) for backup in self._of_run(run))

    def _of_run(self, run: StoreRun) -> Iterable[Backup]:
        """Backups whose writes matter to a run: its own, to another worker; all of them, to storage."""
        return run.started if run.to else self._backups

    def _pages_named(self) -> int:
        """Pages of device and host that storage has, or will have when the writes under way have ended."""
        assert self.run is not None
        marked = self._backups.pages_marked - self.run.begun_marked
        return self.run.present + marked + sum(self._lacking(backup.leaf) for backup in self._backups)

    def _lacking(self, leaf: Node) -> int:
        """Number of pages of a path that storage lacks."""
        index = self._state.index
        return sum(node.page_count for node in index.path(leaf) if not index.tree.is_stored(node))

    def _has_room_for(self, run: StoreRun, leaf: Node) -> bool:
        """Whether host memory can take the device pages of a path now without losing pages that storage lacks, which
        begin to be stored otherwise.
        """
        state, path = self._state, self._state.index.path(leaf)
        short = sum(node.page_count for node in path if node.host is None) - state.host.free
        # What other writes read comes free when they end: until then only a part would fit. The path's own pages stay.
        own = sum(node.page_count for node in path if node.host is not None and not node.host_guarded)
        waits = short > state.index.host_evictable - own and self._writes(run) > 0
        for victim in state.index.first_to_go("host", short) if short > 0 else ():
            if self._is_there(run, victim) or not self._is_due(run, victim):
                continue
            if any(victim in state.index.path(backup.leaf) for backup in self._of_run(run)):
                waits = True
            elif victim not in run.tried and self._writes(run) < WRITES_MAX:
                self._start(run, victim)
                waits = True
        return not waits


def _is_whole(node: Node) -> bool:
    """Whether device or host has all bytes of a node's pages, and will keep them."""
    return not node.is_reclaiming and (node.host is not None or node.load is None)
