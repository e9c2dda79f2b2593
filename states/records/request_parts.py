"""The records that a request holds, by owner of their fields.

A field is assigned by the methods of its record only; the rules call the method that says what happened. `Holdings`
takes, hands on and gives back; the other records are facts about the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tidekv.states.types import NO_PAGES, PageIds

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.commands import Fallback
    from tidekv.states.events import PrefillLost, StoredComponent
    from tidekv.states.pages.page_pool import PagePool
    from tidekv.states.prefix.index import PrefixIndex, Receipt
    from tidekv.states.prefix.node import InsertResult, Node


class Admission:
    """Progress of a request towards admission, and the charge of its grant."""

    __slots__ = (
        "charged",
        "charged_to",
        "has_asked",
        "has_spared_storage",
        "over_quota",
        "passed",
        "quota_need",
        "retry_at_s",
        "short_need",
        "short_version",
        "waited_for_quota",
        "waited_to_run",
    )

    def __init__(self) -> None:
        self.passed = 0
        """Requests behind it that were admitted first."""
        self.short_need = 0
        """Device pages that it needed when it was last refused."""
        self.short_version = -1
        """Number of insertions in the cache at that time."""
        self.quota_need = 0
        """Pages that its prefill would have been charged with at that time."""
        self.over_quota = False
        """Whether that refusal was because of the quota of its prefill."""
        self.waited_for_quota = False
        """Whether there was any such refusal."""
        self.waited_to_run = False
        """Whether it was first in the queue while as many requests ran as may."""
        self.charged = 0
        """Pages that its prefill is charged with, from the grant until READY."""
        self.charged_to = ""
        """That prefill, or "" if the caller computes the rest."""
        self.retry_at_s = 0.0
        """When it may leave the queue again, after its prefill was late, or host memory had no room for it."""
        self.has_asked = False
        """Whether storage was asked since the request last entered the queue."""
        self.has_spared_storage = False
        """Whether storage was not asked because the caller was to compute a short rest."""

    def enter_queue(self) -> None:
        """Enter the queue, for the first time or again: storage may be asked."""
        self.has_asked = False

    def ask(self) -> None:
        """Note that storage was asked, or need not be."""
        self.has_asked = True

    def spare_storage(self, *, is_spared: bool) -> None:
        """Note whether storage is not asked, since the rest is short."""
        self.has_spared_storage = is_spared

    def pause(self, until_s: float) -> None:
        """Keep the request in the queue until then."""
        self.retry_at_s = until_s

    def pass_by(self) -> None:
        """Count a younger request that was admitted first."""
        self.passed += 1

    def wait_to_run(self) -> bool:
        """Note that the request waits for the end of another; return whether it is the first time."""
        is_first, self.waited_to_run = not self.waited_to_run, True
        return is_first

    def note_quota(self, *, is_over: bool) -> None:
        """Note whether the quota of its prefill holds it back."""
        self.over_quota = is_over

    def refuse(self, *, needed: int, charge: int, version: int) -> None:
        """Note what the request needs, so that it is matched again only if it may fit."""
        self.short_need, self.quota_need, self.short_version = needed, charge, version

    def wait_for_quota(self) -> bool:
        """Note that the quota holds it back; return whether it is the first time."""
        is_first, self.waited_for_quota = not self.waited_for_quota, True
        return is_first

    def charge(self, prefill: str, pages: int) -> None:
        """Add pages that its prefill was charged with; a negative number takes them off."""
        self.charged_to = prefill
        self.charged += pages

    def discharge(self) -> tuple[str, int]:
        """Set the charge to 0; return its prefill and what it was."""
        charged, self.charged = self.charged, 0
        return self.charged_to, charged


class StorageAnswer:
    """The query of a request to storage, and its answer, which the next plan uses."""

    __slots__ = (
        "answered_at_s",
        "components",
        "first",
        "found",
        "is_awaited",
        "op",
        "queried_first",
    )

    def __init__(self) -> None:
        self.op = 0
        """The query under way; 0 if there is none."""
        self.queried_first = 0
        """First page of that query."""
        self.is_awaited = False
        """Whether admission waits for the answer."""
        self.answered_at_s = float("inf")
        """When storage gave an answer that no plan has used. Infinite if there is none, or if the query failed."""
        self.first = 0
        """First page that the answer is about."""
        self.found = 0
        """Pages that storage has, from there on."""
        self.components: tuple[StoredComponent, ...] = ()

    @property
    def end(self) -> int:
        """End of the pages that storage has."""
        return self.first + self.found

    def forget_time(self) -> None:
        """Note that no unused answer is there: a query is about to begin, or a plan has used the answer."""
        self.answered_at_s = float("inf")

    def ask(self, op: int, *, first: int, is_awaited: bool) -> None:
        """Note the query that was begun, for the pages starting at `first`."""
        self.op, self.queried_first, self.is_awaited = op, first, is_awaited

    def stop_waiting(self) -> None:
        """Let admission go on without the answer."""
        self.is_awaited = False

    def close(self) -> None:
        """Note that the query has ended, or is left to itself."""
        self.op, self.is_awaited = 0, False

    def take(
        self, *, at_s: float, error: str, found: int, full_pages: int, components: tuple[StoredComponent, ...]
    ) -> None:
        """Keep an answer, and end the query. An error, a late answer included, counts as no pages."""
        self.close()
        self.answered_at_s = float("inf") if error else at_s
        self.first = self.queried_first
        self.found = max(0, min(found, full_pages - self.first))
        self.components = components

    def forget(self) -> None:
        """Count the answer as one without pages."""
        self.found, self.components = 0, ()

    def forget_component(self, name: str) -> None:
        """Count the answer as one without pages of this component."""
        self.components = tuple(entry for entry in self.components if entry.component != name)


class Holdings:
    """What a request holds of the prefix index and of the device pool."""

    __slots__ = ("inserted", "lock", "matched", "own", "pin", "promised", "reserve", "table")

    def __init__(self) -> None:
        self.lock: Receipt | None = None
        """On the device pages of its prompt that are in the tree."""
        self.pin: Receipt | None = None
        """On those in host memory behind them, from the grant to the plan; None if there are none."""
        self.own: PageIds = NO_PAGES[:]
        """Device pages of the prompt that are not in the tree."""
        self.table: PageIds = NO_PAGES[:]
        """The page table of a READY request."""
        self.reserve: PageIds = NO_PAGES[:]
        """Device pages for the tokens that it will generate."""
        self.inserted: InsertResult | None = None
        """The result of inserting the request's pages in the tree, until the rest of `Restore.keep` is done."""
        self.matched = 0
        self.promised = 0

    # --- Receipts ---

    def lock_at(self, index: PrefixIndex, node: Node) -> None:
        """Lock the path to `node`, instead of the path that is locked."""
        if self.lock is not None and self.lock.node is node:
            return
        # New lock first: if it is refused, the request keeps the old one.
        lock = index.lock(node)
        if self.lock is not None:
            try:
                index.unlock(self.lock)
            except BaseException:
                index.unlock(lock)
                raise
        self.lock = lock

    def relock(self, index: PrefixIndex, node: Node) -> None:
        """Lock the path to `node` again, after the receipt was given back elsewhere."""
        self.lock = index.lock(node)

    def unlock(self, index: PrefixIndex) -> None:
        """Give the lock back, if there is one."""
        if self.lock is not None:
            index.unlock(self.lock)
            self.lock = None

    def drop_lock(self) -> None:
        """Forget the lock, which was given back already."""
        self.lock = None

    def pin_at(self, index: PrefixIndex, node: Node) -> None:
        """Pin the path to `node` in host memory."""
        self.pin = index.pin(node)

    def unpin(self, index: PrefixIndex) -> None:
        """Give the pin back, if there is one."""
        if self.pin is not None:
            index.unpin(self.pin)
            self.pin = None

    # --- Pages ---

    def take(self, own: PageIds, reserve: PageIds) -> None:
        """Take over the pages of a grant."""
        self.own, self.reserve = own, reserve

    def match(self, pages: int) -> None:
        """Note how many pages of the prompt the device had at the grant."""
        self.matched = pages

    def plan(self, lock: Receipt, own: PageIds, *, matched: int, promised: int) -> None:
        """Take over what a plan has left: its lock in place of the old one, and the pages behind its end. The old
        receipts were given back.
        """
        self.lock, self.pin, self.own = lock, None, own
        self.matched, self.promised = matched, promised

    def hand_on(self, count: int) -> None:
        """Hand the first `count` of its pages on to the tree."""
        self.own = self.own[count:]

    def take_back(self, pages: PageIds) -> None:
        """Take over pages that were in the tree; they precede its own."""
        self.own = pages + self.own

    def give_up_own(self) -> PageIds:
        """Return its own pages, which the caller of this method owns from now on."""
        pages, self.own = self.own, NO_PAGES[:]
        return pages

    def give_up_reserve(self) -> PageIds:
        """Return the reserve, which the caller of this method owns from now on."""
        pages, self.reserve = self.reserve, NO_PAGES[:]
        return pages

    def give_back_own(self, pool: PagePool) -> None:
        """Free its own pages."""
        pool.give_back(self.own)
        self.own = NO_PAGES[:]

    # --- READY ---

    def tabulate(self, index: PrefixIndex) -> None:
        """Make the page table from the locked path and its own pages, once."""
        if not self.table:
            assert self.lock is not None, "a request whose pages are kept has no lock"
            self.table = index.device_path(self.lock.node) + self.own

    def enter(self, inserted: InsertResult, count: int) -> None:
        """Note that the first `count` pages of the table were inserted in the tree. What the tree did not take stays
        with the request; `give_back_duplicates` frees a part of it.
        """
        # Set `own` to all that the tree did not take before the next call that can raise: `leave` frees what is in
        # `own`, so no page is lost and none is freed twice.
        kept = inserted.rejected + self.own[max(0, len(self.own) - (len(self.table) - count)) :]
        self.table = inserted.pages + self.table[count:]
        self.own = inserted.duplicates + kept
        self.inserted = inserted

    def give_back_duplicates(self, pool: PagePool) -> None:
        """Free the pages in whose place the tree has others."""
        assert self.inserted is not None
        duplicates = len(self.inserted.duplicates)
        if duplicates:
            pool.give_back(self.own[:duplicates])
            self.own = self.own[duplicates:]
            self.inserted = msgspec.structs.replace(self.inserted, duplicates=NO_PAGES[:])

    def entered(self) -> None:
        """Note that everything about the insertion is done."""
        self.inserted = None

    def grow(self, taken: PageIds, reserve: PageIds) -> None:
        """Append `taken`, pages of the reserve, to the own pages and the page table; `reserve` is what is left."""
        # New arrays instead of extended ones: earlier commands refer to the old arrays.
        self.own = self.own + taken
        self.table = self.table + taken
        self.reserve = reserve


class Fallbacks:
    """What a request gave up, and the exceptions that made it do so."""

    __slots__ = ("last_error", "made", "raised", "raises")

    def __init__(self) -> None:
        self.raised = 0
        """Exceptions that rules raised for this request."""
        self.raises: dict[tuple[str, str], int] = {}
        """The same by step: the state and the event. A step that succeeds is removed."""
        self.made: tuple[Fallback, ...] = ()
        """What the request gave up because rules raised, in order."""
        self.last_error = ""
        """Cause of the last fallback, as text for reports. No decision depends on it."""

    def count_raise(self, state: str, taking: str) -> int:
        """Count an exception of the step that handles `taking`; return the count of this step."""
        self.raised += 1
        count = self.raises[state, taking] = self.raises.get((state, taking), 0) + 1
        return count

    def raises_of(self, state: str, taking: str) -> int:
        """How often the step that handles `taking` has raised in this state."""
        return self.raises.get((state, taking), 0)

    def step_succeeded(self, state: str, taking: str) -> None:
        """Count the next exception of this step as a first one again."""
        self.raises.pop((state, taking), None)

    def note(self, error: str) -> None:
        """Note why the request gives something up, or ends."""
        self.last_error = error

    def give_up(self, fallback: Fallback) -> None:
        """Add what the request gives up because a rule raised."""
        self.made += (fallback,)

    def gave_up(self, what: str) -> bool:
        """Whether the request gave up `what`, one of `FALLBACKS`, because a rule raised."""
        return any(fallback.gave_up == what for fallback in self.made)


class RecomputeRecord:
    """The computation of the rest of a prompt by the caller."""

    __slots__ = ("computes_all", "error", "has_failed_short", "is_chosen", "is_done", "is_short", "op")

    def __init__(self) -> None:
        self.is_chosen = False
        """Whether the caller computes the pages that are not on the device: no prefill is left, or they are few."""
        self.is_short = False
        """Whether that is because they are few. It is decided again at each try to admit the request."""
        self.has_failed_short = False
        """Whether the caller has failed to compute so few: then prefill is asked."""
        self.computes_all = False
        """Whether it computes from the first page on, since the pools of components have no room for pages to continue
        from beside its own.
        """
        self.op = 0
        """The computation under way; 0 if there is none."""
        self.is_done = False
        """Whether it has ended without an error."""
        self.error = ""
        """Its error, once it has failed."""

    def choose(self) -> None:
        """Let the caller compute, starting with the next plan."""
        self.is_chosen = True

    def choose_short(self, *, is_short: bool) -> None:
        """Let the caller compute the rest of the prompt if it is short, else ask prefill for it."""
        self.is_chosen = self.is_short = is_short

    def give_short_up(self) -> None:
        """Ask prefill, starting with the next plan: the caller could not compute the short rest."""
        self.is_chosen = self.is_short = False
        self.has_failed_short, self.error = True, ""

    def compute_all(self) -> None:
        """Let the caller compute from the first page on."""
        self.computes_all = True

    def begin(self, op: int) -> None:
        """Note the computation that was begun."""
        self.op = op

    def end(self, error: str) -> None:
        """Note the outcome of the computation, which does not write to the pages any more."""
        self.op, self.is_done, self.error = 0, not error, error

    def forget(self) -> None:
        """Forget the computation of a plan that is given up."""
        # The error stays: the request fails of it, also if the step that fails it raises and runs again.
        self.op, self.is_done = 0, False

    @property
    def is_last_resort(self) -> bool:
        """Whether the caller computes because no prefill is left."""
        return self.is_chosen and not self.is_short

    def withheld_by(self, prefill: str) -> str:
        """Return the name of the prefill that withholds the request's pages: "" if the caller computes the rest."""
        return "" if self.is_chosen else prefill

    @property
    def has_begun(self) -> bool:
        """Whether the caller was asked."""
        return self.op > 0 or self.is_done or bool(self.error)


class EarlyRecord:
    """The early READY of a request (`tidekv.states.request.early_ready`)."""

    __slots__ = ("is_spoilt", "is_wanted", "layers", "op")

    def __init__(self, *, is_wanted: bool) -> None:
        self.is_wanted = is_wanted
        """Whether its caller begins with the first layer."""
        self.op = 0
        """Operation of an early READY whose pages the caller may still use, of this or an earlier generation."""
        self.layers = 0
        """Leading layers that its caller was reported to be in place. 0 without an early READY, or if it was lost."""
        self.is_spoilt = False
        """Whether its caller may have updated records of states before layers were lost, and may write to them yet."""

    def spoil(self, *, is_spoilt: bool) -> None:
        """Note that the records are not those of the prompt's end any more, or that prefill is asked for them."""
        self.is_spoilt = is_spoilt

    def begin(self, op: int, layers: int) -> None:
        """Note the first report."""
        self.op, self.layers = op, layers

    def report(self, layers: int) -> None:
        """Note a further report; 0 if the layers were lost, or all is in place."""
        self.layers = layers

    def end(self) -> None:
        """Note that the caller's use has ended."""
        self.op = 0


class Attempts:
    """Which of its prefills serves the present generation of a request."""

    __slots__ = ("attempts_max", "count", "first", "refusal", "retries_late")

    def __init__(self, attempts_max: int, *, retries_late: bool) -> None:
        self.attempts_max = attempts_max
        self.retries_late = retries_late
        """Whether a prefill that is only late is tried beyond `attempts_max`."""
        self.count = 0
        """Generations that ended by the loss of their prefill."""
        self.first = 0
        """Place of the prefill that is tried first: those before it gave way."""
        self.refusal: tuple[int, PrefillLost] | None = None
        """Generation of a request whose tiers go on without a prefill, and the loss of its room."""

    def refuse(self, generation: int, event: PrefillLost) -> None:
        """Note that no prefill sends what the tiers do not bring in this generation."""
        self.refusal = generation, event

    def try_next(self) -> None:
        """Use the next prefill."""
        self.count += 1

    def give_way(self, step: int) -> None:
        """Try the prefill `step` places further first."""
        self.first += step


class Sources:
    """Where the pages of a prompt came from, and which pages of storage and of peers were left there."""

    __slots__ = ("declined", "has_room_later", "pages", "peer_declined")

    def __init__(self) -> None:
        self.pages: dict[str, int] = {}
        self.declined: tuple[str, int] = ("", 0)
        """Key of `DECLINED` and the number of pages that storage has and the plan does not fetch. No decision depends
        on it.
        """
        self.peer_declined: tuple[str, int, str] = ("", 0, "")
        """Key of `PEER_DECLINED`, the number of pages that no tier has and no peer is asked for, and the peers."""
        self.has_room_later = False
        """Whether operations under way may free host memory, which had no room for pages of storage."""
        self.forget()

    def forget(self) -> None:
        """Forget a plan."""
        self.pages = {"l1": 0, "l2": 0, "l3": 0, "transfer": 0}
        self.declined = ("", 0)
        self.peer_declined = ("", 0, "")
        self.has_room_later = False

    def note(self, source: str, count: int) -> None:
        """Note that `count` pages are in place, from this source."""
        # Pages of peers are counted if there are any.
        self.pages[source] = self.pages.get(source, 0) + count

    def note_rest(self, count: int) -> None:
        """Note that of `count` pages those which no source has brought are from the device."""
        self.pages["l1"] += count - sum(self.pages.values())

    def decline(self, cause: str, count: int) -> None:
        """Note that `count` pages of storage, or of host memory, are not loaded."""
        self.declined = (cause, count)

    def decline_for_room(self, count: int, *, has_room_later: bool) -> None:
        """Note that host memory has no room for `count` pages of storage."""
        self.decline("no_host_page", count)
        self.has_room_later = has_room_later

    def decline_peer(self, cause: str, count: int, peers: str) -> None:
        """Note that `count` pages are not asked of a peer."""
        self.peer_declined = (cause, count, peers)


class Ending:
    """Progress of a finish or retract, so that it can continue after an exception."""

    __slots__ = ("has_begun", "inserted", "is_backed_up")

    def __init__(self) -> None:
        self.has_begun = False
        self.inserted = -1
        """Pages that were new to the cache; -1: not inserted yet."""
        self.is_backed_up = False
        """Whether its backup has begun, or there will be none."""

    def insert(self, insert: Callable[[], int]) -> None:
        """Begin the end, and insert the pages by `insert`, once."""
        self.has_begun = True
        if self.inserted < 0:
            self.inserted = insert()

    def back_up(self, begin: Callable[[], None]) -> None:
        """Begin the backup by `begin`, once."""
        if not self.is_backed_up:
            begin()
            self.is_backed_up = True
