"""The state that all rules of the core share: settings, index, page pools, operations, deadlines, commands.

Rules read and write it. This module makes no decision and imports no rule module. An effect outside of the core that a
rule starts is an `Operation`, which handles its own outcome:

    rule ──start_operation──▶ CoreState.operations ──outcome event──▶ Operation.ended
                                      │  └──deadline passed──▶ Operation.late
                                      └──`ended` raised──▶ Operation.abandon

Work that a rule leaves for other rules of the same step goes to one of the work queues. `tidekv.states.core` defines
the order in which they are processed.
"""

from __future__ import annotations

import heapq
from math import nextafter
from typing import TYPE_CHECKING, Final, Protocol

from tidekv.states.commands import CopyPages, Fallback
from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import LentPool, PagePool
from tidekv.states.pages.prefill_quota import PrefillQuota
from tidekv.states.prefix.component_index import ComponentIndex
from tidekv.states.prefix.index import PrefixIndex
from tidekv.states.prefix.policies import POLICIES
from tidekv.states.raises import raise_of
from tidekv.states.records.request import Request
from tidekv.states.types import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tidekv.states.commands import Command
    from tidekv.states.events import Outcome
    from tidekv.states.raises import Raise
    from tidekv.states.records.request import Load
    from tidekv.states.settings import CoreSettings
    from tidekv.states.storage_policy import StoragePolicy


COUNTERS: Final = (
    "backups_failed",
    "backups_late",
    "calls_late",
    "chunks_foreign",
    "chunks_repeated",
    "copies_failed",
    "copies_late",
    "extends",
    "fallbacks_by_raise",
    "frames_foreign",
    "frames_late",
    "l1_pages_dropped",
    "l2_damaged",
    "l2_declined_pages",
    "l2_pages_dropped",
    "l2_pages_found",
    "l3_breaker_closed",
    "l3_breaker_opened",
    "l3_declined_pages",
    "l3_fetches_cut",
    "l3_fetches_late",
    "l3_pages_short",
    "hints_accepted",
    "hints_clipped",
    "hints_deferred",
    "hints_missing",
    "hints_rejected",
    "l3_probes_failed",
    "l3_puts_declined",
    "l3_queries_failed",
    "l3_queries_late",
    "l3_queries_outwaited",
    "late_retries",
    "loads_reclaimed",
    "offered_pages_declined",
    "outcomes_late",
    "pages_backed_up",
    "pages_fetched_ahead",
    "pages_handed",
    "pages_passed",
    "pages_passed_lost",
    "pages_prefetched",
    "pages_shared",
    "pages_stored",
    "pages_stored_again",
    "pages_taken",
    "peer_fetches",
    "peer_fetches_cut",
    "peer_fetches_late",
    "peer_pages_declined",
    "peer_pages_short",
    "prefill_retries",
    "quota_waits",
    "quota_ways_given",
    "recomputes",
    "running_waits",
    "sent_back",
    "shared_component_pages",
    "shared_ends_passed_on",
    "shared_transfer_pages",
    "shared_transfers_passed_on",
    "short_rests",
    "component_pages_fetched_ahead",
    "component_pages_stored",
    "transitions_raised",
)
"""All counters of `CoreState.count`, so that statistics show each of them from the start."""


LOOK_AHEAD, WRITE_BACK, STORE, PASS = "look ahead", "write back", "store", "pass"
"""Work that only prepares for later, see `CoreState.ahead_due`."""


class Operation(Protocol):
    """An effect under way outside of the core. It has exactly one outcome, which settles its pages even if late."""

    def ended(self, event: Outcome, error: str) -> None:
        """Handle the outcome; `error` is empty for success.

        The operation has been removed from `CoreState.operations` already.
        """
        ...

    def late(self) -> None:
        """Handle a deadline that passed while the operation is under way. Called once more if it raises."""
        ...

    def abandon(self) -> None:
        """Give back what the operation holds after `ended` has raised. Nothing is under way any more."""
        ...


class Continuation:
    """Operation: work that goes on in the next steps, one part in each: no step may stop the event loop for long.

    Only its deadline ends it. It owns nothing, and the audit holds between two parts.
    """

    __slots__ = ("_op", "_part", "_state")

    def __init__(self, state: CoreState, part: Callable[[], bool]) -> None:
        self._state = state
        self._part = part
        self._op = state.start_operation(self, deadline_s=state.next_step_s() - state.now_s)

    def late(self) -> None:
        """Do the next part. If it raises, `run_guarded` calls this once more."""
        if self._part():
            self._state.set_deadline(self, self._state.next_step_s(), op=self._op)
        else:
            self._state.end_operation(self._op)

    def ended(self, event: Outcome, error: str) -> None:
        """Never called: no command has this operation's number."""

    def abandon(self) -> None:
        """Never called, see `ended`."""


class CoreState:
    """The shared state of one core."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        pool = LentPool if settings.lends_device else PagePool
        self.device = pool("device", settings.device_pages)
        self.host = PagePool("host", settings.host_pages)
        self.index = PrefixIndex(
            key_bytes=settings.key_bytes,
            device=self.device,
            host=self.host,
            policy=POLICIES[settings.eviction],
            namespace_share=settings.namespace_share,
        )
        self.components: ComponentIndex | None = None
        """The index of component pages. None if the model has no components."""
        if settings.components:
            self.components = ComponentIndex(
                self.index, settings.components, page_size=settings.page_size, device_pool=pool
            )
        self.quota = PrefillQuota(settings.prefill_quota_pages)
        self.now_s = 0.0
        self.storage_available = False
        """Whether a usable storage engine is attached. `StorageAdmission` decides whether it may be called now."""
        self.out: list[Command] = []
        """Commands of this step, in the order in which the driver must start them."""
        self.operations: dict[int, Operation] = {}
        self.requests: dict[str, Request] = {}
        self.raises: list[Raise] = []
        """Rules that raised in this step, in order."""
        self.raise_watchers: list[Callable[[Request | None], None]] = []
        """Called by `note_raise` with the request that falls back, if any. They change nothing and never raise."""
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)

        # Work queues: work that a rule leaves for other rules of the same step. Dictionaries serve as ordered sets.
        self.preempted: dict[Request, str] = {}
        """Requests that lost their pages to another writer, with the cause. They return to the admission queue."""
        self.unserved: dict[Request, None] = {}
        """Requests whose component pages have lost their source, to be asked of prefill."""
        self.failed_loads: dict[Load, None] = {}
        """Failed loads, into which a waiter extends; without waiters, they are given up."""
        self.progressed_loads: dict[Load, None] = {}
        """Loads of shared transfers of which pages may have arrived that other requests wait for."""
        self.dirty: dict[Request, None] = {}
        """Requests that have changed and may be able to move on, in order of the change."""
        self.reclaimable_loads: list[Load] = []
        """Loads in RECLAIMING without a writer, whose pages can be freed."""
        self.admission_due: set[str] = set()
        """Not empty if a change may allow the admission of a waiting request, or pages of loads can be freed."""
        self.ahead_over: dict[Request, None] = {}
        """Planned requests whose remaining look-ahead reads can be released."""
        self.ahead_due: set[str] = set()
        """What a change may have made due: LOOK_AHEAD for a waiting request, WRITE_BACK since too few evictable pages
        have a copy in a lower tier, STORE for the next write of the run that stores everything, PASS for the copies of
        pages that pass through host memory.
        """
        self.is_storing = False
        """Whether such a run is under way."""
        self.has_waiting_passages = False
        """Whether pages that are to pass through host memory wait for room there."""
        self.write_credit = 0
        """Pages that write-back may still copy before the next `renew_write_credit`."""

        self._operation = 0
        self._deadlines: list[tuple[float, int, Operation | Request, int]] = []
        self._deadline_number = 0

    def count(self, name: str, by: int = 1) -> None:
        """Add `by` to a counter of COUNTERS."""
        self.counters[name] = self.counters[name] + by

    def emit(self, command: Command) -> None:
        """Add a command to this step."""
        self.out.append(command)

    def take_commands_back(self, count: int) -> None:
        """Remove all commands of this step behind the first `count`: what emitted them is undone."""
        del self.out[count:]

    def store_components_first(self, count: int) -> None:
        """Move copies of components before the other commands that follow the first `count`."""
        self.out[count:] = sorted(
            self.out[count:], key=lambda command: not (isinstance(command, CopyPages) and command.component != FULL)
        )

    # --- Steps ---

    def begin_step(self, at_s: float) -> list[Command]:
        """Begin a step at this time, which never runs backwards; return the list that its commands are added to."""
        self.now_s = max(self.now_s, at_s)
        if self.raises:
            self.raises = []
        self.out = []
        return self.out

    # --- What happened, for other rules of the same step ---

    def pages_were_freed(self) -> None:
        """Note that a waiting request may be admitted now, the pages of a load be freed, or a passage go on."""
        self.admission_due.add("pages")
        if self.has_waiting_passages:
            self.ahead_due.add(PASS)

    def begin_admission(self) -> None:
        """Note that all waiting requests are about to be tried."""
        self.admission_due.clear()

    def begin_ahead(self, work: str) -> None:
        """Note that one of `ahead_due` is about to be done."""
        self.ahead_due.discard(work)

    def passage_waits(self) -> None:
        """Note that pages that are to pass through host memory wait for room there."""
        self.has_waiting_passages = True

    def passages_were_tried(self) -> None:
        """Note that all of them are about to be tried."""
        self.has_waiting_passages = False
        self.begin_ahead(PASS)

    def may_look_ahead(self) -> None:
        """Note that pages may be fetched ahead for a waiting request now."""
        self.ahead_due.add(LOOK_AHEAD)

    def may_write_back(self) -> None:
        """Note that too few evictable pages may have a copy in a lower tier now."""
        self.ahead_due.add(WRITE_BACK)

    def storing_began(self) -> None:
        """Note that a run has begun that stores everything."""
        self.is_storing = True
        self.may_store()

    def storing_ended(self) -> None:
        """Note that no such run is under way any more."""
        self.is_storing = False
        self.begin_ahead(STORE)

    def may_store(self) -> None:
        """Note that the next write of such a run may start now, if there is one."""
        if self.is_storing:
            self.ahead_due.add(STORE)

    def request_changed(self, request: Request) -> None:
        """Note that a request may be able to move on."""
        self.dirty[request] = None

    def request_was_planned(self, request: Request) -> None:
        """Note that the remaining look-ahead reads of a request can be released."""
        self.ahead_over[request] = None

    def pages_were_lost(self, request: Request, cause: str) -> None:
        """Note that something may still write to pages of a request, which starts over. The first cause counts."""
        self.preempted.setdefault(request, cause)

    def component_pages_were_lost(self, request: Request) -> None:
        """Note that component pages of a request have lost their source, and are to be asked of prefill."""
        self.unserved[request] = None

    def load_failed(self, load: Load) -> None:
        """Note that a load has lost its source, or may have found a waiter that can extend into it."""
        self.failed_loads[load] = None

    def requeue_failed(self, load: Load) -> None:
        """Move a load to the end of the failed ones, if it is one of them."""
        if load in self.failed_loads:
            del self.failed_loads[load]
            self.failed_loads[load] = None

    def load_progressed(self, load: Load) -> None:
        """Note that pages of a shared transfer may have arrived that other requests wait for."""
        self.progressed_loads[load] = None

    def writers_have_left(self, loads: Iterable[Load]) -> None:
        """Note that nothing writes to the pages of these loads in RECLAIMING any more."""
        self.reclaimable_loads += [load for load in loads if load not in self.reclaimable_loads]
        self.pages_were_freed()

    def take_reclaimable_loads(self) -> list[Load]:
        """Return the loads whose pages can be freed, and forget them."""
        loads, self.reclaimable_loads = self.reclaimable_loads, []
        return loads

    def policy_changed(self, policy: StoragePolicy) -> None:
        """Replace the policies of the settings."""
        self.settings = self.settings.with_policy(policy)

    def storage_was_attached(self, *, is_usable: bool) -> None:
        """Note whether a usable storage engine is attached now."""
        self.storage_available = is_usable

    def request_arrived(self, request: Request) -> None:
        """Add a request."""
        self.requests[request.request_id] = request

    def forget(self, request: Request) -> None:
        """Remove a request that has ended. Later outcomes of its operations only settle pages."""
        del self.requests[request.request_id]
        self.dirty.pop(request, None)

    def note_raise(self, request: Request | None = None) -> Raise:
        """Record the exception that is being handled, which the core survives; `request` falls back."""
        raised = raise_of(request)
        self.count("transitions_raised")
        self.raises.append(raised)
        for watcher in self.raise_watchers:
            watcher(request)
        return raised

    def run_guarded(
        self,
        rule: Callable[[], None],
        recover: Callable[[], None] | None = None,
        *,
        request: Request | None = None,
        gives_up: str = "nothing",
    ) -> None:
        """Run a rule that no transition depends on. If it raises, run `recover`, or the rule once more without it.

        `request`, if given, records `gives_up` as a fallback then. BrokenInvariant, and an exception of `recover` or of
        the second run, leave the step.
        """
        try:
            rule()
        except BrokenInvariant:
            raise
        except Exception:
            raised = self.note_raise(request)
            if request is not None:
                request.fallbacks.give_up(Fallback(raised.rule, gives_up, raised.error))
            (recover or rule)()

    # --- Operations and deadlines ---

    def start_operation(self, operation: Operation, *, deadline_s: float) -> int:
        """Register an operation whose outcome is due within `deadline_s`; return its number."""
        self._operation += 1
        self.operations[self._operation] = operation
        self.set_deadline(operation, self.now_s + deadline_s, op=self._operation)
        return self._operation

    def begin_work(self, part: Callable[[], bool]) -> None:
        """Do the first part of some work now, and if it returns that there is more, the others in the next steps."""
        if part():
            Continuation(self, part)

    def replace_operation(self, op: int, operation: Operation) -> None:
        """Let `operation` handle the outcome of the operation under way as number `op`."""
        self.operations[op] = operation

    def end_operation(self, op: int) -> None:
        """Forget an operation: its outcome, if there will be one, changes nothing."""
        self.operations.pop(op, None)

    def set_deadline(self, waiting: Operation | Request, at_s: float, *, op: int = 0) -> None:
        """Make `pop_due` return a live request, or an operation under way as number `op`, from `at_s` on."""
        if at_s != float("inf"):
            self._deadline_number += 1
            heapq.heappush(self._deadlines, (at_s, self._deadline_number, waiting, op))

    def next_step_s(self) -> float:
        """Return the earliest time after this step: a deadline at it is due in the next step that the clock causes."""
        return nextafter(self.now_s, float("inf"))

    def next_deadline_s(self) -> float | None:
        """Return the next deadline, or None. Drops entries of requests and operations that have ended."""
        while self._deadlines and not self._is_pending(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def pop_due(self) -> Operation | Request | None:
        """Remove and return the next operation or request whose deadline has passed; None if there is none."""
        due = self.next_deadline_s()
        if due is None or due > self.now_s:
            return None
        return heapq.heappop(self._deadlines)[2]

    def _is_pending(self, entry: tuple[float, int, Operation | Request, int]) -> bool:
        # By identity: a request id may be in use again, and an operation may have been replaced under its number.
        _, _, waiting, op = entry
        if op:
            return self.operations.get(op) is waiting
        return isinstance(waiting, Request) and self.requests.get(waiting.request_id) is waiting

    # --- Room in the pools ---

    def renew_write_credit(self) -> None:
        """Let write-back look at the next pages to be evicted again, after a change of usage or policy."""
        self.ahead_due.add(WRITE_BACK)
        self.write_credit = int(self.settings.device_pages * self.settings.write_back_ahead)

    def use_write_credit(self, count: int) -> None:
        """Take copies of write-back from its credit."""
        self.write_credit -= count

    def make_device_room(self, count: int) -> bool:
        """Evict until `count` device pages are free. Returns False, with nothing evicted, if that is impossible."""
        short = count - self.device.free
        if short <= 0:
            return True
        if short > self.index.device_evictable:
            return False
        self.index.evict_device(short)
        return self.device.free >= count

    def make_host_room(self, count: int) -> int:
        """Evict host pages until `count` are free, or all that are evictable; return how many of `count` are free."""
        short = count - self.host.free
        if short > 0:
            self.index.evict_host(min(short, self.index.host_evictable))
        return min(count, self.host.free)
