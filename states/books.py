"""What all rules of the core share: settings, index, accounts, operations, deadlines, and the commands to give.

Rules write here and nowhere else. Nothing in this file decides anything.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final, TypeAlias

from tidekv.states.accounts import PageAccount
from tidekv.states.component_index import ComponentIndex
from tidekv.states.index import PrefixIndex
from tidekv.states.storage_use import StorageUse

if TYPE_CHECKING:
    from tidekv.states.backups import Backup
    from tidekv.states.commands import Command
    from tidekv.states.load import LateFetch, LateRecompute, Load
    from tidekv.states.lookahead import AheadRun
    from tidekv.states.request import Request
    from tidekv.states.request_tails import RequestTails
    from tidekv.states.settings import CoreSettings
    from tidekv.states.tail_moves import TailBackup
    from tidekv.states.tail_puts import TailPut
    from tidekv.states.tail_storage import TailFetch

    OfTails: TypeAlias = RequestTails | TailBackup | TailPut | TailFetch
    Owner: TypeAlias = Request | AheadRun | Load | LateFetch | LateRecompute | Backup | StorageUse | OfTails

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
    "tail_pages_stored",
    "transitions_raised",
)
"""Everything that `Books.count` counts, so that statistics have all counters from the start."""


class Books:
    """The state that rules share. One per core."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.device = PageAccount("device", settings.device_pages)
        self.host = PageAccount("host", settings.host_pages)
        self.index = PrefixIndex(key_bytes=settings.key_bytes, device=self.device, host=self.host)
        self.components: ComponentIndex | None = None
        """The index with components beside it, where there are any."""
        if settings.components:
            self.components = ComponentIndex(self.index, settings.components, page_size=settings.page_size)
        self.now_s = 0.0
        self.storage_available = False
        """Whether a storage engine is attached that is of use; `storage` says whether it may be asked now."""
        self.storage = StorageUse(self)
        self.out: list[Command] = []
        self.operations: dict[int, Owner] = {}
        self.requests: dict[str, Request] = {}
        self.dirty: dict[Request, None] = {}
        """Requests that may be able to move on, in the order in which they were touched."""
        self.homeless: dict[Request, str] = {}
        """Requests whose pages are lost to somebody else's writer, with the cause: they go back to the queue."""
        self.unfilled: dict[Load, None] = {}
        """Failed loads that somebody is to extend into, or that nobody needs any more."""
        self.landing: dict[Load, None] = {}
        """Loads of shared transfers of which something may have landed that others wait for."""
        self.settled_loads: list[Load] = []
        """Void loads that nobody writes to any more: their pages can be freed."""
        self.pages_freed = True
        """Whether something happened that may let a waiting request in."""
        self.ahead_due = False
        """Whether somebody who waits may fetch ahead that could not before."""
        self.ahead_over: dict[Request, None] = {}
        """Requests whose plan is made: what was fetched ahead for them is let go of."""
        self.write_due = False
        """Whether something happened that may leave too little that can be evicted without losing it."""
        self.write_credit = 0
        """Pages that may be copied ahead of eviction before somebody takes or leaves pages again."""
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._operation = 0
        self._deadlines: list[tuple[float, int, Owner, int]] = []
        self._deadline_number = 0

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of what happened."""
        self.counters[name] = self.counters.get(name, 0) + by

    def say(self, command: Command) -> None:
        """Give a command."""
        self.out.append(command)

    def begin(self, owner: Owner, *, deadline_s: float) -> int:
        """Number a new operation of `owner`, whose outcome is due within `deadline_s`."""
        self._operation += 1
        self.operations[self._operation] = owner
        self.remind(owner, self.now_s + deadline_s, op=self._operation)
        return self._operation

    def remind(self, owner: Owner, at_s: float, *, op: int = 0) -> None:
        """Let `owner` know when `at_s` has come; with `op`, only while that operation is in flight."""
        if at_s != float("inf"):
            self._deadline_number += 1
            heapq.heappush(self._deadlines, (at_s, self._deadline_number, owner, op))

    def next_deadline_s(self) -> float | None:
        """When the core wants to be told the time. Deadlines of what has ended meanwhile are dropped on the way."""
        while self._deadlines and not self._is_pending(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def pop_due(self) -> tuple[Owner, int] | None:
        """The next owner whose time has come, and the operation it waits for (0: the request itself)."""
        due = self.next_deadline_s()
        if due is None or due > self.now_s:
            return None
        _, _, owner, op = heapq.heappop(self._deadlines)
        return owner, op

    def _is_pending(self, entry: tuple[float, int, Owner, int]) -> bool:
        _, _, owner, op = entry
        if op:
            return self.operations.get(op) is owner
        return self.requests.get(getattr(owner, "request_id", "")) is owner

    def renew_write_credit(self) -> None:
        """Somebody took pages or left some, or it is to be done in another way: look at what is evicted next."""
        self.write_due = True
        self.write_credit = int(self.settings.device_pages * self.settings.write_back_ahead)

    def make_device_room(self, count: int) -> bool:
        """Evict until `count` device pages are free; False, and nothing evicted, where that cannot be."""
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
