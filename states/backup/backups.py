"""Backups: writing what finished requests leave on the device to the host and to storage.

A backup walks the path of a finished request from the root. The first run of pages without a host copy is copied to new
host pages; after the copy these join the tree. Then the pages of the path that are on the host are stored, as
far as it lacks them. A backup takes as many host pages as eviction can free: if there are too few it stops there, and
nothing else suffers.

*Stored* is a belief. Storage evicts what it does not see in use, and a hit on the device or the host is not seen there.
So a write names the whole path: storage is asked for all of it, is told that it is in use, and is given what it lacks.
Without anything to store, a path that was not named in this period (`StorageAdmission.renewal`) is named as well.
Where storage has a gap, the marks of all pages behind it are dropped: without their beginning they are worthless.

Ownership. From its start until the copy has ended, a backup holds a device receipt for the path, so no page under copy
can be evicted, and a host receipt for the part of the path that is on the host already. It owns the new host pages
until they join the tree. A write owns no pages: a host receipt protects those that it reads until it has ended. The
host pages of a retracted request have one more receipt, until the request resumes or is dropped.

Before this worker goes away, `tidekv.states.backup.store_all` starts backups of all paths that storage lacks. Or their
last step is no write: the path is offered to the worker that takes this one's place, which reads it from the host. The
host receipt protects it until that one has answered.

With write-back (`tidekv.states.backup.write_back`) a finished request is not backed up. Copies and writes start for
leaves that are about to be evicted, and each backup ends after its one step.

Ranges are counted in pages from the root, never in nodes, because nodes may split while a copy is in flight.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyPages, ForgetTokens, HandPrompt, ReportRetracted, StorePages
from tidekv.states.components.backups import ComponentWrite
from tidekv.states.events import PagesStored, PromptHanded
from tidekv.states.rollback import Rollback
from tidekv.states.storage.admission import Measurement
from tidekv.states.storage.circuit_breaker import STORE
from tidekv.states.storage.passing import PassedBatch
from tidekv.states.storage.taken_prompts import TakenPart
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tidekv.states.components.backups import ComponentBackups
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.prefix.index import Node, Receipt
    from tidekv.states.records.request import Request
    from tidekv.states.storage.admission import StorageAdmission

STORE_DEADLINE_S = 60.0
AHEAD_MAX = 4
"""Maximum copies ahead of eviction in flight, and as many writes. What they hold cannot be evicted meanwhile."""


class Backup:
    """Operation: the current step of a backup: a copy to the host, a write to storage, or the wait before a write.

    The path is that of a finished or retracted request or, without a request, that of a leaf about to be evicted.
    """

    __slots__ = (
        "_backups",
        "brought",
        "copies_ahead",
        "fallbacks",
        "first",
        "handing",
        "hands_to",
        "has_failed",
        "host_pages",
        "leaf",
        "lock",
        "op",
        "pin",
        "renews",
        "request_id",
        "request_number",
        "retracts",
        "stores_all",
        "storing",
        "there",
        "unmarked",
        "until_s",
        "was_declined",
    )

    def __init__(self, backups: Backups, request: Request | None, leaf: Node, *, retracts: bool = False) -> None:
        self._backups = backups
        self.request_id = "" if request is None else request.request_id
        self.request_number = 0 if request is None else request.request_number
        self.fallbacks = () if request is None else request.fallbacks.made
        self.leaf = leaf
        self.copies_ahead = False
        """Whether it copies, for no request, pages that are about to be evicted."""
        self.brought = False
        """Whether a page has got another copy by this backup."""
        self.stores_all = False
        """Whether it stores its path whatever `write` says, since this worker is about to go away."""
        self.was_declined = False
        """Whether its write did not begin, since the host memory that others hold is too much."""
        self.has_failed = False
        """Whether a copy or a write of it has failed."""
        self.retracts = retracts
        self.lock: Receipt | None = None
        self.pin: Receipt | None = None
        self.renews = False
        """Whether it writes only what storage is believed to have."""
        self.first = 0
        """First page of the copy to the host."""
        self.unmarked = 0
        """Number of pages of the write that storage is not believed to have."""
        self.op = 0
        self.host_pages: PageIds = page_ids()
        self.storing = False
        self.hands_to = ""
        """The address of the worker that its path is handed to."""
        self.until_s = 0.0
        """When the time for that is over."""
        self.handing = False
        """Whether that worker was offered the path, and has not answered."""
        self.there: PromptHanded | None = None
        """Its answer."""

    def ended(self, event: Outcome, error: str) -> None:
        """Continue with the write to storage after a copy; end after the write."""
        if self.handing:
            self._backups.handed(self, event, error)
        elif self.storing:
            self._backups.stored(self, self._backups.storage.store_ended(event), event)
            if isinstance(event, PagesStored) and event.intact is not None:
                self._backups.drop_damaged(self, event.intact)
        else:
            self._backups.copied(self, error)

    def late(self) -> None:
        """Start a write that still waits for fetches; count a copy or write in flight as late."""
        self._backups.is_late(self)

    def abandon(self) -> None:
        """End the backup at its current state."""
        self._backups.abandon(self)


class Backups:
    """All backups of a core, and the host pages that retracted requests hold."""

    def __init__(self, state: CoreState, storage: StorageAdmission, component_pages: ComponentBackups | None) -> None:
        self._state = state
        self.storage = storage
        self._component_pages = component_pages
        self._live: dict[Backup, None] = {}
        self.waiting: dict[Backup, None] = {}
        """Writes that wait for fetches to end, oldest first."""
        self._retracted: dict[str, tuple[Receipt, Callable[[], None]] | None] = {}
        """By request: the receipt of its host pages, and the call that gives it back. None: it holds nothing."""
        self._retracting: dict[str, Backup] = {}
        self.pages_marked = 0
        """Pages that writes have marked as stored so far, each time that they were not."""

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Backup]:
        return iter(self._live)

    @property
    def held(self) -> list[Receipt]:
        """Receipts of retracted requests."""
        return [held[0] for held in self._retracted.values() if held is not None]

    @property
    def retracted_requests(self) -> int:
        """Number of requests whose KV is held in host memory until they are resumed."""
        return len(self._retracted)

    def begin(self, request: Request, leaf: Node, *, retracts: bool = False) -> None:
        """Back up the path that ends at `leaf`. With `retracts`, hold it in host memory and report that."""
        if self._state.settings.write == "back" and not retracts:
            self._state.renew_write_credit()
            self._state.emit(ForgetTokens(request_number=request.request_number))
            self.renew(leaf)
            return
        backup = Backup(self, request, leaf, retracts=retracts)
        if retracts:
            self._retracting[request.request_id] = backup
        self._start(backup, self._begin, request)

    def decline(self, request: Request, *, retracts: bool) -> None:
        """Begin no backup of this request, since a rule raised before: nothing is held for it in host memory."""
        state = self._state
        with Rollback() as undo:
            undo.callback(state.take_commands_back, len(state.out))
            state.emit(ForgetTokens(request_number=request.request_number))
            if retracts:
                state.emit(
                    ReportRetracted(request_id=request.request_id, held_pages=0, fallbacks=request.fallbacks.made)
                )
            undo.keep()
        if retracts:
            self._retracted[request.request_id] = None

    def copy_ahead(self, leaf: Node) -> None:
        """Copy to the host the pages of the path to `leaf` that are only on the device.

        Does nothing if too many copies ahead are in flight, or one of them covers a part of the same pages.
        """
        path = self._state.index.path(leaf)
        if any(node.is_reclaiming or node.load is not None for node in path):
            # The pages above the leaf are still under load, or will never arrive.
            return
        head = next((node for node in path if node.host is None), None)
        ahead = [backup for backup in self._live if backup.copies_ahead]
        if head is None or len(ahead) >= AHEAD_MAX:
            return
        if any(head in self._state.index.path(backup.leaf) for backup in ahead):
            return
        backup = Backup(self, None, leaf)
        backup.copies_ahead = True
        self._start(backup, self._begin)

    def store_ahead(self, leaf: Node) -> None:
        """Store the path to `leaf`, which is on the host completely, unless too many writes are in flight."""
        if (
            sum(not (backup.request_number or backup.copies_ahead or backup.renews) for backup in self._live)
            < AHEAD_MAX
        ):
            self._start(Backup(self, None, leaf), self._begin_store)

    def renew(self, leaf: Node) -> None:
        """Tell storage that what it has of the path to `leaf` is in use, if that is due, and find out what it has lost.

        What is lost is stored again as far as it is on the host.
        """
        # A cache tier never fails a request.
        self._state.run_guarded(partial(self._renew, leaf), recover=lambda: None)

    def _renew(self, leaf: Node) -> None:
        if self.storage.is_usable and self._to_store(leaf, renews=True).is_due:
            backup = Backup(self, None, leaf)
            backup.renews = True
            self._start(backup, self._begin_renewal)

    def renew_ahead(self, leaf: Node) -> None:
        """Renew the path to a leaf about to be evicted, unless too many renewals are in flight."""
        if sum(backup.renews for backup in self._live) < AHEAD_MAX:
            self.renew(leaf)

    def store_path(self, leaf: Node) -> None:
        """Store the path to `leaf`, which is on the host completely; with write-back, what it had before."""
        if self._state.settings.write == "back":
            self.renew(leaf)
        elif self.storage.is_usable:
            self._start(Backup(self, None, leaf), self._begin_store)

    def store(self, leaf: Node) -> Backup:
        """Store the path to `leaf`, pages that only the device has by way of the host, and the component pages at its
        end. Returns the backup, which may have ended already.
        """
        backup = Backup(self, None, leaf)
        backup.stores_all = True
        self._start(backup, self._begin_store if leaf.device is None else self._begin)
        return backup

    def hand(self, leaf: Node, to: str, *, until_s: float) -> Backup:
        """Offer the path to `leaf` to the worker at `to`, pages that only the device has by way of the host. Returns
        the backup, which may have ended already.
        """
        backup = Backup(self, None, leaf)
        backup.hands_to, backup.until_s = to, until_s
        self._start(backup, self._begin_offer if leaf.device is None else self._begin)
        return backup

    def keys_stored(self, op: int) -> tuple[str, bytes]:
        """Namespace and keys, from the first page on, of an operation without a request, or of component pages."""
        backup = self._state.operations[op]
        if isinstance(backup, Measurement | TakenPart):
            return backup.namespace, backup.keys
        if isinstance(backup, PassedBatch):
            return backup.passage.namespace, backup.passage.keys
        assert isinstance(backup, Backup | ComponentWrite)
        return backup.leaf.namespace, b"".join(node.edge for node in self._state.index.path(backup.leaf))

    def _start(self, backup: Backup, begin: Callable[[Backup], None], request: Request | None = None) -> None:
        self._live[backup] = None
        # A cache tier never fails a request.
        recover = backup.abandon if request is None else partial(self._abandon_for, backup, request)
        self._state.run_guarded(partial(begin, backup), recover=recover, request=request, gives_up="backup")

    def _abandon_for(self, backup: Backup, request: Request) -> None:
        backup.fallbacks = request.fallbacks.made
        self.abandon(backup)

    def _begin_store(self, backup: Backup) -> None:
        self._pin(backup, backup.leaf)
        self._store_in_turn(backup)

    def _begin_offer(self, backup: Backup) -> None:
        self._pin(backup, backup.leaf)
        self._offer(backup)

    def _begin_renewal(self, backup: Backup) -> None:
        if backup.leaf.device is not None:
            # What is on the device only has to stay in the tree until storage has answered.
            backup.lock = self._state.index.lock(backup.leaf)
        self._pin(backup, self._host_leaf(backup.leaf))
        self._store_in_turn(backup)

    def _begin(self, backup: Backup) -> None:
        leaf = backup.leaf
        backup.lock = self._state.index.lock(leaf)
        host_leaf = self._host_leaf(leaf)
        # The part that is on the host must stay there: copied pages can only join the tree below their parent's.
        self._pin(backup, host_leaf)
        backup.first = 0 if host_leaf is None else host_leaf.depth_pages
        count = self._state.make_host_room(leaf.depth_pages - backup.first)
        if backup.copies_ahead:
            self._state.use_write_credit(count)
        if count:
            self._copy(backup, count)
        else:
            self._copied(backup)

    def copied(self, backup: Backup, error: str) -> None:
        """Let the copied pages join the tree; with an error they hold garbage and are given back."""
        if error:
            self._state.count("backups_failed")
            backup.has_failed = True
            self._state.host.give_back(backup.host_pages)
            backup.host_pages = page_ids()
        else:
            self._join_tree(backup)
        self._copied(backup)

    def stored(self, backup: Backup, stored: int, event: Outcome) -> None:
        """Mark what storage has of the path, drop the marks of the rest, and start the writes of component pages."""
        state, renewal = self._state, self.storage.renewal()
        written = max(event.written, 0) if isinstance(event, PagesStored) else 0
        state.count("pages_stored", written)
        state.count("pages_stored_again", max(written - backup.unmarked, 0))
        has_answered = isinstance(event, PagesStored) and not event.error
        backup.has_failed |= not has_answered or (isinstance(event, PagesStored) and event.intact is not None)
        for node in state.index.path(backup.leaf):
            was_marked = state.index.tree.is_stored(node)
            if node.depth_pages <= stored:
                state.index.mark_stored(node, renewed=renewal)
                backup.brought |= not was_marked
                self.pages_marked += 0 if was_marked else node.page_count
            elif has_answered and was_marked:
                state.index.unmark_stored(node)
                # With write-back, its only other copy may be the one that storage has lost.
                backup.brought = True
        if self._component_pages is not None:
            self._component_pages.writes.begin(backup.leaf)
        self.storage.measure(backup.leaf, min(stored, backup.leaf.depth_pages))
        self._end(backup)

    def drop_damaged(self, backup: Backup, intact: int) -> None:
        """Drop from host memory what follows the first `intact` pages of a write that has ended: a page is damaged.

        Unless a receipt protects it: then the next copy of it finds the damage again.
        """
        self._state.count("l2_damaged")
        # The backup is over: after an exception the pages stay, and there is nothing to abandon.
        drop = partial(self._drop_host_page, backup.leaf, intact)
        self._state.run_guarded(drop, recover=lambda: None)

    def _drop_host_page(self, leaf: Node, page: int) -> None:
        for node, first in self._ranges(leaf):
            if first <= page < first + node.page_count:
                self._state.index.drop_host_path(node)
                return

    def abandon(self, backup: Backup) -> None:
        """End a backup of which a step raised, with nothing in flight. Safe to call again after a raise."""
        state = self._state
        state.count("backups_failed")
        backup.has_failed = True
        state.operations.pop(backup.op, None)
        self.waiting.pop(backup, None)
        state.host.give_back(backup.host_pages)
        backup.host_pages = page_ids()
        if backup.retracts:
            self._report_retracted(backup, None)
        self._unlock(backup)
        self._end(backup)

    def release_retracted(self, request_id: str) -> None:
        """Release the host pages that a retracted request holds, or is about to hold."""
        backup = self._retracting.pop(request_id, None)
        if backup is not None:
            backup.retracts = False
        held = self._retracted.get(request_id)
        if held is not None and not held[0].released:
            held[1]()
        self._retracted.pop(request_id, None)

    def is_late(self, backup: Backup) -> None:
        """Start a write that still waits; count a write or copy in flight as late, which keeps its receipts."""
        if backup in self.waiting:
            self.store_now(backup)
            return
        self._state.count("backups_late")
        if backup.storing:
            self.storage.note(STORE, failed=True)

    def store_now(self, backup: Backup) -> None:
        """Start a waiting write although fetches are in flight."""
        del self.waiting[backup]
        self._state.operations.pop(backup.op, None)
        self._state.run_guarded(partial(self._store_late, backup), recover=backup.abandon)

    # --- Steps ---

    def _copy(self, backup: Backup, count: int) -> None:
        backup.host_pages = self._state.host.take(count)
        device_pages = page_ids()
        for node, first in self._ranges(backup.leaf):
            if first >= backup.first:
                assert node.device is not None
                device_pages += node.device
        backup.op = self._state.start_operation(backup, deadline_s=self._state.settings.copy_deadline_s)
        self._state.emit(
            CopyPages(
                op=backup.op,
                source="device",
                source_pages=device_pages[:count],
                target="host",
                target_pages=backup.host_pages,
            )
        )

    def _join_tree(self, backup: Backup) -> None:
        index = self._state.index
        for node, first in self._ranges(backup.leaf):
            if first < backup.first or not backup.host_pages:
                continue
            ours = backup.host_pages[: node.page_count]
            if node.host is not None:
                # Another backup of the same path has finished before this one.
                self._state.host.give_back(ours)
            else:
                # The host may have had room for a part of this node only.
                index.give_host(node if len(ours) == node.page_count else index.split(node, len(ours)), ours)
                self._state.count("pages_backed_up", len(ours))
                backup.brought = True
            backup.host_pages = backup.host_pages[len(ours) :]

    def _offer(self, backup: Backup) -> None:
        """Offer a path, which is on the host, to the worker that takes this one's place."""
        state, leaf = self._state, backup.leaf
        timeout_s = backup.until_s - state.now_s
        if timeout_s <= 0:
            self._end(backup)
            return
        # Its outcome ends it: the driver waits no longer than the time-out.
        backup.op = state.start_operation(backup, deadline_s=float("inf"))
        backup.handing = True
        state.emit(
            HandPrompt(
                op=backup.op,
                peer=backup.hands_to,
                page_count=leaf.depth_pages,
                heat=state.index.heat_of(leaf),
                timeout_s=timeout_s,
            )
        )

    def handed(self, backup: Backup, event: Outcome, error: str) -> None:
        """Note the answer to an offer."""
        if isinstance(event, PromptHanded):
            pages = backup.leaf.depth_pages
            there = max(0, min(event.there, pages))
            brought = max(0, min(event.brought, there))
            backup.there = PromptHanded(
                at_s=event.at_s,
                op=event.op,
                there=there,
                brought=brought,
                error=event.error,
                refuses=event.refuses,
            )
        backup.has_failed = bool(error)
        self._end(backup)

    def _copied(self, backup: Backup) -> None:
        state = self._state
        host_leaf = self._host_leaf(backup.leaf)
        if backup.hands_to:
            self._pin(backup, host_leaf)
            self._unlock(backup)
            if host_leaf is None:
                self._end(backup)
            else:
                backup.leaf = host_leaf
                self._offer(backup)
            return
        # Component pages first: their copies lock the path before this backup gives up its own lock.
        if self._component_pages is not None and host_leaf is not None:
            self._component_pages.begin(host_leaf)
        if backup.retracts:
            self._report_retracted(backup, host_leaf)
        stores = self.storage.is_usable and (state.settings.write != "back" or backup.stores_all)
        self._pin(backup, host_leaf if stores else None)
        self._unlock(backup)
        if backup.pin is None:
            self._end(backup)
            return
        assert host_leaf is not None
        backup.leaf = host_leaf
        self._store_in_turn(backup)

    def _store_in_turn(self, backup: Backup) -> None:
        state = self._state
        # Waiting writes hold host pages too, so they count like those in flight.
        others = bool(self.waiting) or any(other.storing for other in self._live)
        if not self.storage.may_store_beside(others):
            backup.was_declined = True
            self._end(backup)
            return
        path = self._to_store(backup.leaf, renews=backup.renews)
        if state.settings.store_wait_s and self.storage.holds_writes and path.is_due:
            self.waiting[backup] = None
            backup.op = state.start_operation(backup, deadline_s=state.settings.store_wait_s)
        else:
            self._store(backup, path)

    def _store_late(self, backup: Backup) -> None:
        # Another backup may have stored a part of its path meanwhile.
        self._store(backup, self._to_store(backup.leaf, renews=backup.renews))

    def _store(self, backup: Backup, path: PathToStore) -> None:
        state = self._state
        if not path.is_due or not self.storage.is_usable:
            if backup.stores_all and self._component_pages is not None:
                self._component_pages.writes.begin(backup.leaf)
            self._end(backup)
            return
        if backup.renews:
            # While it waited, another backup may have brought more of the path to the host: that is stored as well.
            self._pin(backup, self._host_leaf(backup.leaf))
        backup.unmarked = path.unmarked
        backup.op = state.start_operation(backup, deadline_s=STORE_DEADLINE_S)
        backup.storing = True
        state.emit(
            StorePages(op=backup.op, request_number=backup.request_number, host_pages=path.host_pages, asked=path.asked)
        )

    def _end(self, backup: Backup) -> None:
        self._pin(backup, None)
        if backup.renews:
            self._unlock(backup)
        if backup.request_number:
            self._state.emit(ForgetTokens(request_number=backup.request_number))
        del self._live[backup]
        self._state.pages_were_freed()
        self._state.may_store()
        if backup.brought:
            self._state.may_write_back()

    def _report_retracted(self, backup: Backup, host_leaf: Node | None) -> None:
        held = 0 if host_leaf is None else host_leaf.depth_pages
        # If the report raises, the caller never learns of the held pages: nothing may be held then.
        with Rollback() as undo:
            pin = None if host_leaf is None else self._pin_retracted(host_leaf)
            if pin is not None:
                undo.callback(pin[1])
            self._state.emit(ReportRetracted(request_id=backup.request_id, held_pages=held, fallbacks=backup.fallbacks))
            undo.keep()
        self._retracted[backup.request_id] = pin
        del self._retracting[backup.request_id]
        backup.retracts = False

    def _pin_retracted(self, leaf: Node) -> tuple[Receipt, Callable[[], None]]:
        """Protect the host pages down to `leaf`, and the present and future component pages of that boundary."""
        index, components = self._state.index, self._state.components
        if components is None:
            pin = index.pin(leaf)
            return pin, partial(index.unpin, pin)
        component_pages = components.pin(leaf, components.firsts(leaf.depth_pages))
        return component_pages.full, partial(components.unpin, component_pages)

    def _unlock(self, backup: Backup) -> None:
        if backup.lock is not None:
            self._state.index.unlock(backup.lock)
            backup.lock = None
        self._state.pages_were_freed()

    def _pin(self, backup: Backup, node: Node | None) -> None:
        """Protect the host pages down to `node` from now on, and no others."""
        # The new receipt comes first: pages under both must not become evictable in between. If giving back the old one
        # raises, the backup is left with exactly that one.
        index = self._state.index
        pin = None if node is None else index.pin(node)
        if backup.pin is not None:
            try:
                index.unpin(backup.pin)
            except BaseException:
                if pin is not None:
                    index.unpin(pin)
                raise
        backup.pin = pin

    # --- Ranges of a path ---

    def _ranges(self, leaf: Node) -> list[tuple[Node, int]]:
        """The nodes of a path, each with the number of its first page."""
        return [(node, node.depth_pages - node.page_count) for node in self._state.index.path(leaf)]

    def _host_leaf(self, leaf: Node) -> Node | None:
        """The last node of the path that is on the host; None if there is none."""
        # By closure, all nodes above it are on the host as well.
        while leaf.host is None:
            assert leaf.parent is not None, "the root has an empty list of host pages"
            leaf = leaf.parent
        return None if leaf.is_root else leaf

    def _to_store(self, leaf: Node, *, renews: bool = False) -> PathToStore:
        """Return what a write of the path names: its first pages, as far as the policy allows; with `renews`, as far as
        storage is believed to have them.
        """
        settings, is_stored = self._state.settings, self._state.index.tree.is_stored
        path = PathToStore()
        if leaf.depth_pages * settings.page_size < settings.write_tokens_min:
            return path
        for node in self._state.index.path(leaf):
            if not is_stored(node):
                is_rare = settings.write == "selective" and node.served < settings.write_hits_min
                if renews or node.host is None or is_rare:
                    break
                path.unmarked += node.page_count
            if node.host is None:
                path.asked += node.page_count
            else:
                path.host_pages += node.host
            path.is_due |= not self.storage.is_renewed(node)
        return path


class PathToStore:
    """Leading pages of a path: on the host, then in storage only as far as is known."""

    __slots__ = ("asked", "host_pages", "is_due", "unmarked")

    def __init__(self) -> None:
        self.host_pages: PageIds = page_ids()
        self.asked = 0
        """Number of pages behind `host_pages` that storage is only asked for."""
        self.unmarked = 0
        """Number of pages that storage is not believed to have."""
        self.is_due = False
        """Whether storage may lack one of them, or was not told in this period that they are in use."""
