"""Backups of components: what a finished request leaves of tails on the device goes on to the host.

A backup of full pages that has reached the end of its path asks for the tails of that boundary. A tail is copied whole
or not at all: where the device has not all of it, or the host has no room for it, nothing is. Each copy holds a lock of
its source and a pin of the place where it is to go, until it has ended. From there it goes on to storage
(`tidekv.states.components.backups`).

Puts of components: tails that are on the host go on to storage, where the full pages beside them are there.

A tail is put when the second of two things has happened: its backup has reached the host, and storage has the full
pages down to its boundary. So what the write policy keeps out of storage has no tails there either. A tail is put whole
or not at all. Each put holds a pin of what it reads until it has ended, and waits for fetches like any other put.

Its request may be long gone: the tokens that name its pages are the keys of the path (`Core.keys_put`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyComponent, StoreComponent
from tidekv.states.rollback import Rollback
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidekv.states.components.index import ComponentIndex, ComponentReceipt
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.prefix.node import Node
    from tidekv.states.storage.admission import StorageAdmission

STORE_DEADLINE_S = 60.0


class ComponentPut:
    """Operation: a put of one component's tail at the end of `leaf`, or the wait before it."""

    __slots__ = ("_puts", "component", "first", "host_pages", "leaf", "op", "pin")

    def __init__(self, puts: ComponentPuts, component: str, leaf: Node, first: int, host_pages: PageIds) -> None:
        self._puts = puts
        self.component = component
        self.leaf = leaf
        self.first = first
        self.host_pages = host_pages
        self.op = 0
        self.pin: ComponentReceipt | None = None

    def ended(self, event: Outcome, error: str) -> None:
        """Storage has the first of the pages, all of them if it did well."""
        self._puts.ended(self, self._puts.storage.put_ended(event))

    def late(self) -> None:
        """A put that waited for fetches waits no more; one under way is counted."""
        self._puts.is_late(self)

    def abandon(self) -> None:
        """Nothing reads the pages any more."""
        self._puts.give_up(self)


class ComponentPuts:
    """All puts of components under way are operations; this file knows how they begin and end."""

    def __init__(self, state: CoreState, storage: StorageAdmission, index: ComponentIndex) -> None:
        self._state = state
        self.storage = storage
        self._index = index
        self.waiting: dict[ComponentPut, None] = {}
        """Puts that give way to fetches, in order."""
        self._live: dict[ComponentPut, None] = {}
        """Puts that hold a pin."""

    def begin(self, leaf: Node, components: Iterable[str] = ()) -> None:
        """Put the tails at the end of `leaf`, of these components or of all, that the host has whole, if storage has
        the full pages. Raises nothing but BrokenInvariant: a cache tier never fails a request.
        """
        self._state.run_guarded(partial(self._begin, leaf, components), recover=lambda: None)

    def _begin(self, leaf: Node, components: Iterable[str]) -> None:
        if self.storage.is_usable and self._state.index.tree.is_stored(leaf):
            for name in components or self._index.components:
                first, pages = self._index.trailing_pages_of("host", name, leaf)
                if len(pages) == leaf.depth_pages - first:
                    ordered = page_ids(pages[at] for at in range(first, leaf.depth_pages))
                    self._start(ComponentPut(self, name, leaf, first, ordered))

    def _start(self, put: ComponentPut) -> None:
        state = self._state
        with Rollback() as undo:
            put.pin = self._index.pin(put.leaf, boundary=put.leaf.depth_pages)
            undo.callback(self._index.unpin, put.pin)
            # Puts at one leaf pin the same path: only those elsewhere take further pages from reads.
            if not self.storage.may_put_beside(any(other.leaf is not put.leaf for other in self._live)):
                return
            if state.settings.put_wait_s and self.storage.holds_puts:
                put.op = state.start_operation(put, deadline_s=state.settings.put_wait_s)
                self.waiting[put] = None
            else:
                self._put(put)
            self._live[put] = None
            undo.keep()

    def _put(self, put: ComponentPut) -> None:
        state = self._state
        with Rollback() as undo:
            op = state.start_operation(put, deadline_s=STORE_DEADLINE_S)
            undo.callback(state.operations.pop, op)
            state.emit(StoreComponent(op=op, component=put.component, first=put.first, host_pages=put.host_pages))
            undo.keep()
        put.op = op

    def put_now(self, put: ComponentPut) -> None:
        """Wait for fetches no longer. After a raise, `give_up` ends it."""
        self.waiting.pop(put, None)
        self._state.operations.pop(put.op, None)
        if self.storage.is_usable:
            self._put(put)
        else:
            self.give_up(put)

    def is_late(self, put: ComponentPut) -> None:
        """A put is late: it keeps its pin until it ends, and is counted. One that waited waits no more."""
        if put in self.waiting:
            self._state.run_guarded(partial(self.put_now, put), recover=put.abandon)
            return
        self._state.count("backups_late")
        self.storage.note(failed=True)

    def ended(self, put: ComponentPut, stored: int) -> None:
        """Storage has the first `stored` of the pages that it was given. After a raise, `give_up` ends it."""
        self._state.count("component_pages_stored", max(0, min(stored, len(put.host_pages))))
        self.give_up(put)

    def give_up(self, put: ComponentPut) -> None:
        """Nothing reads its pages any more: release them. Can be called again if it raised."""
        assert put.pin is not None
        self._index.unpin(put.pin)
        self._live.pop(put, None)
        self._state.pages_freed = True


class ComponentBackup:
    """Operation: a copy of one component's tail to the host."""

    __slots__ = ("_backups", "component", "first", "fresh", "lock", "node", "pin", "table")

    def __init__(
        self,
        backups: ComponentBackups,
        component: str,
        node: Node,
        first: int,
        lock: ComponentReceipt,
        pin: ComponentReceipt,
    ) -> None:
        self._backups = backups
        self.component = component
        self.node = node
        self.first = first
        self.lock: ComponentReceipt | None = lock
        self.pin = pin
        self.fresh: PageIds = page_ids()
        """Host pages that are its own: they are written to."""
        self.table: PageIds = page_ids()
        """Host pages of the whole tail, from position `first` on."""

    def ended(self, event: Outcome, error: str) -> None:
        """The tail is on the host, from where it goes on to storage."""
        self._backups.ended(self, error)
        self._backups.puts.begin(self.node, (self.component,))

    def late(self) -> None:
        """A late copy keeps what it holds until it ends, and is counted."""
        self._backups.is_late()

    def abandon(self) -> None:
        """Give back what the copy holds; what reached the host goes on to storage."""
        self._backups.give_up(self)
        self._backups.puts.begin(self.node, (self.component,))


class ComponentBackups:
    """All backups of components under way are operations; this file knows how they begin and end."""

    def __init__(self, state: CoreState, storage: StorageAdmission, index: ComponentIndex) -> None:
        self._state = state
        self._index = index
        self.puts = ComponentPuts(state, storage, index)

    def begin(self, leaf: Node) -> None:
        """Copy to the host what it lacks of the tails at the end of `leaf`, whose full pages are in both tiers."""
        for name in self._index.components:
            first, device = self._index.trailing_pages_of("device", name, leaf)
            _, host = self._index.trailing_pages_of("host", name, leaf)
            missing = [at for at in range(first, leaf.depth_pages) if at not in host]
            if missing and all(at in device for at in missing):
                self._copy(name, leaf, first, [device[at] for at in missing], host)

    def _copy(self, name: str, leaf: Node, first: int, sources: list[int], host: dict[int, int]) -> None:
        if self._index.host[name].room < len(sources):
            return
        with Rollback() as undo:
            lock = self._index.lock(leaf, boundary=leaf.depth_pages)
            undo.callback(self._index.unlock, lock)
            pin = self._index.pin(leaf, boundary=leaf.depth_pages)
            undo.callback(self._index.unpin, pin)
            pages = self._index.take_host(name, len(sources))
            backup = ComponentBackup(self, name, leaf, first, lock, pin)
            if pages is None:
                # What the tail has on the host already was all that could be evicted for the rest of it.
                undo.keep()
                self._state.run_guarded(partial(self.give_up, backup))
                return
            undo.callback(self._index.give_back, {name: pages}, "host")
            backup.fresh, fresh = pages, iter(pages)
            backup.table = page_ids(host[at] if at in host else next(fresh) for at in range(first, leaf.depth_pages))
            op = self._state.start_operation(backup, deadline_s=self._state.settings.copy_deadline_s)
            undo.callback(self._state.operations.pop, op)
            self._state.emit(
                CopyComponent(
                    op=op,
                    component=name,
                    source="device",
                    source_pages=page_ids(sources),
                    target="host",
                    target_pages=pages,
                )
            )
            undo.keep()

    def ended(self, backup: ComponentBackup, error: str) -> None:
        """The copy is over; with an error its pages are garbage and given back."""
        if error:
            self._state.count("backups_failed")
        else:
            _, unused = self._index.insert("host", backup.component, backup.node, backup.first, backup.table)
            backup.fresh = unused
            # Its pin kept full pages from being looked at before they are evicted.
            self._state.write_due = True
        self.give_up(backup)

    def give_up(self, backup: ComponentBackup) -> None:
        """The copy is over, and the host has what it was to have: release the rest. Can be called again."""
        self._index.give_back({backup.component: backup.fresh}, "host")
        backup.fresh = page_ids()
        if backup.lock is not None:
            self._index.unlock(backup.lock)
            backup.lock = None
        self._index.unpin(backup.pin)
        self._state.pages_freed = True

    def is_late(self) -> None:
        """A copy is late: it keeps what it holds until it ends, and is counted."""
        self._state.count("backups_late")
