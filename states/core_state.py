"""What all rules of the core share: settings, index, page accounts, operations, deadlines, and the commands to give.

Rules write to it and read from it; nothing here decides anything, and nothing here names a rule. What a rule starts
outside of the core is an `Operation`, which knows what its outcome means:

    rule ──start_operation──▶ CoreState.operations ──outcome event──▶ Operation.ended
                                      │  └──deadline has come──▶ Operation.late
                                      └──`ended` raised──▶ Operation.abandon

What a rule leaves for others to do in the same step is put in one of the work queues; `tidekv.states.core` says in
which order they are emptied.
"""

from __future__ import annotations

import heapq
import sys
import traceback
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from tidekv.states.commands import Fallback
from tidekv.states.components.index import ComponentIndex
from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.commands import Command
    from tidekv.states.events import Event, Outcome
    from tidekv.states.request.request import Load, Request
    from tidekv.states.settings import CoreSettings


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
    "l2_pages_dropped",
    "l3_breaker_closed",
    "l3_breaker_opened",
    "l3_declined_pages",
    "l3_fetches_cut",
    "l3_fetches_late",
    "l3_pages_short",
    "l3_probes_failed",
    "l3_puts_declined",
    "l3_queries_failed",
    "l3_queries_late",
    "loads_void",
    "outcomes_late",
    "pages_backed_up",
    "pages_fetched_ahead",
    "pages_stored",
    "prefill_retries",
    "recomputes",
    "sent_back",
    "shared_transfer_pages",
    "shared_transfers_passed_on",
    "component_pages_stored",
    "transitions_raised",
)
"""Everything that `CoreState.count` counts, so that statistics have all counters from the start."""


class Raise(msgspec.Struct, frozen=True):
    """A rule that raised, and that the core survived."""

    rule: str
    """The rule, as `Class.method`: one of the functions of this package."""
    request_id: str
    """The request that falls back; empty if the rule is of no single request."""
    error: str
    """The exception in one line."""
    detail: str
    """The traceback."""


DISPATCHING = (
    "tidekv.states.core",
    "tidekv.states.core_state",
    "tidekv.states.request.machine",
    "tidekv.states.request.table",
)
"""Modules that call rules."""


def rule_of(error: BaseException) -> str:
    """Name the first function below the dispatching of the core that was running when `error` was raised."""
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_qualname
        module = frame.f_globals.get("__name__", "")
        if module.startswith("tidekv.") and module not in DISPATCHING:
            break
    return name


class Operation(Protocol):
    """Something under way outside of the core. It has one outcome, which settles pages even if it is late."""

    def ended(self, event: Outcome, error: str) -> None:
        """Take the outcome. The operation is out of `CoreState.operations` already; `error` is empty for success."""
        ...

    def late(self) -> None:
        """Its deadline has come while it is under way. It runs once more if it raises."""
        ...

    def abandon(self) -> None:
        """Give back what is held after `ended` has raised: nothing is under way any more."""
        ...


class CoreState:
    """The state that rules share. One per core."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.device = PagePool("device", settings.device_pages)
        self.host = PagePool("host", settings.host_pages)
        self.index = PrefixIndex(key_bytes=settings.key_bytes, device=self.device, host=self.host)
        self.components: ComponentIndex | None = None
        """The index with components beside it, if there are any."""
        if settings.components:
            self.components = ComponentIndex(self.index, settings.components, page_size=settings.page_size)
        self.now_s = 0.0
        self.storage_available = False
        """Whether a storage engine is attached that is of use; `StorageAdmission` says whether it may be asked now."""
        self.out: list[Command] = []
        """Commands of this step, in the order in which they are to be started."""
        self.operations: dict[int, Operation] = {}
        self.requests: dict[str, Request] = {}
        self.raises: list[Raise] = []
        """Rules that raised in this step, in order."""
        self.raise_watchers: list[Callable[[Request | None], None]] = []
        """Called by `note_raise`, with the request that falls back, while the exception is handled. They change nothing
        and never raise.
        """
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)

        # Work queues: what a rule leaves for others to do in the same step.
        self.answers: dict[Request, Event] = {}
        """Outcomes of requests' own operations, which the request machine takes."""
        self.preempted: dict[Request, str] = {}
        """Requests that lost their pages to another writer, with the cause: they go back to the queue."""
        self.failed_loads: dict[Load, None] = {}
        """Loads that failed: a sharer extends into them, or they are given up if they have none."""
        self.progressed_loads: dict[Load, None] = {}
        """Loads of shared transfers of which something may have landed that other requests wait for."""
        self.dirty: dict[Request, None] = {}
        """Requests that may be able to move on, in the order in which they were touched."""
        self.reclaimable_loads: list[Load] = []
        """Void loads without a writer: their pages can be freed."""
        self.pages_freed = True
        """Whether something happened that may let a waiting request in."""
        self.ahead_over: dict[Request, None] = {}
        """Requests whose plan is made: what was fetched ahead for them is released."""
        self.ahead_due = False
        """Whether a waiting request may fetch ahead that could not before."""
        self.write_due = False
        """Whether something happened that may leave too little that can be evicted without losing it."""
        self.write_credit = 0
        """Pages that may be copied ahead of eviction before pages are taken or left again."""

        self._operation = 0
        self._deadlines: list[tuple[float, int, Operation | Request, int]] = []
        self._deadline_number = 0

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of what happened."""
        self.counters[name] = self.counters[name] + by

    def emit(self, command: Command) -> None:
        """Give a command."""
        self.out.append(command)

    def forget(self, request: Request) -> None:
        """Drop a request that is over: late outcomes of it only settle pages."""
        del self.requests[request.request_id]
        self.dirty.pop(request, None)

    def note_raise(self, request: Request | None = None) -> Raise:
        """Record the exception that is being handled: a rule raised, and the core survives it; `request` falls back."""
        error = sys.exception()
        assert error is not None, "a raise is noted while it is handled"
        self.count("transitions_raised")
        raised = Raise(
            rule=rule_of(error),
            request_id="" if request is None else request.request_id,
            error="".join(traceback.format_exception_only(error)).strip().splitlines()[-1],
            detail=traceback.format_exc(),
        )
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
        """Run a rule that no transition depends on. If it raises, run `recover`, or else the rule once more; `request`,
        if there is one, gives up that much.
        """
        try:
            rule()
        except BrokenInvariant:
            raise
        except Exception:
            raised = self.note_raise(request)
            if request is not None:
                request.fallbacks += (Fallback(raised.rule, gives_up, raised.error),)
            (recover or rule)()

    # --- Operations and deadlines ---

    def start_operation(self, operation: Operation, *, deadline_s: float) -> int:
        """Number a new operation, whose outcome is due within `deadline_s`."""
        self._operation += 1
        self.operations[self._operation] = operation
        self.set_deadline(operation, self.now_s + deadline_s, op=self._operation)
        return self._operation

    def set_deadline(self, waiting: Operation | Request, at_s: float, *, op: int = 0) -> None:
        """Have `pop_due` return an operation, while it is under way as `op`, or a live request once `at_s` has come."""
        if at_s != float("inf"):
            self._deadline_number += 1
            heapq.heappush(self._deadlines, (at_s, self._deadline_number, waiting, op))

    def next_deadline_s(self) -> float | None:
        """When the core needs the time. Deadlines of what has ended meanwhile are dropped on the way."""
        while self._deadlines and not self._is_pending(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def pop_due(self) -> Operation | Request | None:
        """The next operation or request whose time has come."""
        due = self.next_deadline_s()
        if due is None or due > self.now_s:
            return None
        return heapq.heappop(self._deadlines)[2]

    def _is_pending(self, entry: tuple[float, int, Operation | Request, int]) -> bool:
        _, _, waiting, op = entry
        if op:
            return self.operations.get(op) is waiting
        return self.requests.get(getattr(waiting, "request_id", "")) is waiting

    # --- Room in the pools ---

    def renew_write_credit(self) -> None:
        """Look again at what is evicted next: pages were taken or left, or are to be written in another way."""
        self.write_due = True
        self.write_credit = int(self.settings.device_pages * self.settings.write_back_ahead)

    def make_device_room(self, count: int) -> bool:
        """Evict until `count` device pages are free. False, with nothing evicted, if that is impossible."""
        short = count - self.device.free
        if short <= 0:
            return True
        if short > self.index.device_evictable:
            return False
        self.index.evict_device(short)
        return self.device.free >= count

    def make_host_room(self, count: int) -> int:
        """Evict host pages until `count` are free, or as many as can be; the number that is free, at most `count`."""
        short = count - self.host.free
        if short > 0:
            self.index.evict_host(min(short, self.index.host_evictable))
        return min(count, self.host.free)
