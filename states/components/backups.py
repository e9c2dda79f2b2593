"""Component pages on their way from the device to the host, and from the host to storage.

The *component pages of a boundary* are the window pages or the state snapshot that a request needs to continue from
that boundary (`tidekv.states.component_specs`).

- A *copy to the host* starts when a backup of full pages (`tidekv.states.backup.backups`) has reached the end of its
  path. It covers the whole set or does not start: the device must have all pages that the host lacks, and the host must
  have room for them. The copied pages join the index, and the write to storage starts.
- A *write to storage* starts when the host has all component pages of the boundary and storage has all full pages up to
  it: where the write policy keeps the full pages out, storage has no component pages. It waits while fetches are in
  flight. The request may have ended: page names come from the token keys of the path (`Core.keys_stored`).

Ownership. Until its command has ended, a copy owns its new host pages and holds two receipts: a device lock on the
source, and a host pin on the path that the pages will join. A write owns no pages; a host pin keeps those that it
reads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyPages, StorePages
from tidekv.states.events import PagesStored
from tidekv.states.rollback import Rollback
from tidekv.states.storage.circuit_breaker import STORE
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.prefix.component_index import ComponentIndex, ComponentReceipt
    from tidekv.states.prefix.node import Node
    from tidekv.states.storage.admission import StorageAdmission

STORE_DEADLINE_S = 60.0


class ComponentWrite:
    """Operation: a write of one component's pages at the end of `leaf`, or the wait before it."""

    __slots__ = ("_writes", "component", "first", "host_pages", "leaf", "op", "pin")

    def __init__(self, writes: ComponentWrites, component: str, leaf: Node, first: int, host_pages: PageIds) -> None:
        self._writes = writes
        self.component = component
        self.leaf = leaf
        self.first = first
        self.host_pages = host_pages
        self.op = 0
        self.pin: ComponentReceipt | None = None

    def ended(self, event: Outcome, error: str) -> None:
        """Record how many of the pages are stored, and release the pin."""
        self._writes.storage.store_ended(event)
        self._writes.ended(self, event.written if isinstance(event, PagesStored) else 0)

    def late(self) -> None:
        """Start a write that still waits for fetches; count a write in flight as late."""
        self._writes.is_late(self)

    def abandon(self) -> None:
        """Release the pin."""
        self._writes.give_up(self)


class ComponentWrites:
    """Starts, delays and ends the writes of component pages."""

    def __init__(self, state: CoreState, storage: StorageAdmission, index: ComponentIndex) -> None:
        self._state = state
        self.storage = storage
        self._index = index
        self.waiting: dict[ComponentWrite, None] = {}
        """Writes that wait for fetches to end, oldest first."""
        self._live: dict[ComponentWrite, None] = {}
        """Writes that hold a pin, waiting ones included."""

    def begin(self, leaf: Node, components: Iterable[str] = ()) -> None:
        """Store the component pages at the end of `leaf`: those of the named components, or of all.

        Skips components whose pages the host does not have completely, and does nothing unless storage has the full
        pages. Raises only BrokenInvariant, because a cache tier never fails a request.
        """
        self._state.run_guarded(partial(self._begin, leaf, components), recover=lambda: None)

    def _begin(self, leaf: Node, components: Iterable[str]) -> None:
        if self.storage.keeps_components and self._state.index.tree.is_stored(leaf):
            for name in components or self._index.components:
                first, pages = self._index.trailing_pages_of("host", name, leaf)
                if len(pages) == leaf.depth_pages - first:
                    ordered = page_ids(pages[at] for at in range(first, leaf.depth_pages))
                    self._start(ComponentWrite(self, name, leaf, first, ordered))

    def _start(self, write: ComponentWrite) -> None:
        state = self._state
        with Rollback() as undo:
            write.pin = self._index.pin(write.leaf, self._index.firsts(write.leaf.depth_pages))
            undo.callback(self._index.unpin, write.pin)
            # Writes at one leaf pin the same path. Only writes elsewhere take additional host pages away from reads.
            if not self.storage.may_store_beside(any(other.leaf is not write.leaf for other in self._live)):
                # Not by the rollback, which a raise would leave with the pin still held.
                undo.keep()
                state.run_guarded(partial(self.give_up, write))
                return
            if state.settings.store_wait_s and self.storage.holds_writes:
                write.op = state.start_operation(write, deadline_s=state.settings.store_wait_s)
                self.waiting[write] = None
            else:
                self._store(write)
            self._live[write] = None
            undo.keep()

    def _store(self, write: ComponentWrite) -> None:
        state = self._state
        with Rollback() as undo:
            op = state.start_operation(write, deadline_s=STORE_DEADLINE_S)
            undo.callback(state.operations.pop, op)
            state.emit(
                StorePages(
                    op=op, request_number=0, component=write.component, first=write.first, host_pages=write.host_pages
                )
            )
            undo.keep()
        write.op = op

    def store_now(self, write: ComponentWrite) -> None:
        """Start a waiting write although fetches are in flight. After a raise, `give_up` ends it."""
        self.waiting.pop(write, None)
        self._state.operations.pop(write.op, None)
        if self.storage.keeps_components:
            self._store(write)
        else:
            self.give_up(write)

    def is_late(self, write: ComponentWrite) -> None:
        """Start a write that still waits; count one in flight as late. The latter keeps its pin until it ends."""
        if write in self.waiting:
            self._state.run_guarded(partial(self.store_now, write), recover=write.abandon)
            return
        self._state.count("backups_late")
        self.storage.note(STORE, failed=True)

    def ended(self, write: ComponentWrite, written: int) -> None:
        """Count the pages that storage did not have, and release the pin. After a raise, `give_up` ends the write."""
        self._state.count("component_pages_stored", max(0, min(written, len(write.host_pages))))
        self.give_up(write)

    def give_up(self, write: ComponentWrite) -> None:
        """Release the pin: nothing reads the pages any more. Safe to call again after a raise."""
        assert write.pin is not None
        self._index.unpin(write.pin)
        self._live.pop(write, None)
        self._state.pages_were_freed()
        self._state.may_store()


class ComponentBackup:
    """Operation: a copy of one component's pages at a boundary to the host."""

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
        """Host pages that this copy owns and writes to."""
        self.table: PageIds = page_ids()
        """All host pages of the boundary, from position `first` on: new ones and those that the index had."""

    def ended(self, event: Outcome, error: str) -> None:
        """Add the pages to the index, and start their write to storage."""
        self._backups.ended(self, error)
        self._backups.writes.begin(self.node, (self.component,))

    def late(self) -> None:
        """Count the copy as late. It keeps its pages and receipts until it ends."""
        self._backups.is_late()

    def abandon(self) -> None:
        """Give back what the copy holds, and store what the host already has."""
        self._backups.give_up(self)
        self._backups.writes.begin(self.node, (self.component,))


class ComponentBackups:
    """Starts and ends the copies of component pages to the host."""

    def __init__(self, state: CoreState, storage: StorageAdmission, index: ComponentIndex) -> None:
        self._state = state
        self._index = index
        self.writes = ComponentWrites(state, storage, index)

    def begin(self, leaf: Node) -> None:
        """Copy to the host what it lacks of the component pages at the end of `leaf`.

        The full pages of `leaf` must be in both tiers.
        """
        for name in self._index.components:
            first, device = self._index.trailing_pages_of("device", name, leaf)
            _, host = self._index.trailing_pages_of("host", name, leaf)
            missing = [at for at in range(first, leaf.depth_pages) if at not in host]
            if not self._index.host[name].may_keep(len(missing)):
                continue
            if missing and all(at in device for at in missing):
                self._copy(name, leaf, first, [device[at] for at in missing], host)

    def _copy(self, name: str, leaf: Node, first: int, sources: list[int], host: dict[int, int]) -> None:
        if self._index.host[name].room < len(sources):
            return
        with Rollback() as undo:
            firsts = self._index.firsts(leaf.depth_pages)
            lock = self._index.lock(leaf, firsts)
            undo.callback(self._index.unlock, lock)
            pin = self._index.pin(leaf, firsts)
            undo.callback(self._index.unpin, pin)
            pages = self._index.take("host", name, len(sources))
            backup = ComponentBackup(self, name, leaf, first, lock, pin)
            if pages is None:
                # `room` counts pages that the pin has protected since: the boundary's own host pages. Without them
                # eviction cannot free enough for the missing ones.
                undo.keep()
                self._state.run_guarded(partial(self.give_up, backup))
                return
            undo.callback(self._index.give_back, {name: pages}, "host")
            backup.fresh, fresh = pages, iter(pages)
            backup.table = page_ids(host[at] if at in host else next(fresh) for at in range(first, leaf.depth_pages))
            op = self._state.start_operation(backup, deadline_s=self._state.settings.copy_deadline_s)
            undo.callback(self._state.operations.pop, op)
            self._state.emit(
                CopyPages(
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
        """Add the copied pages to the index; with an error they hold garbage and are given back."""
        if error:
            self._state.count("backups_failed")
        else:
            _, unused = self._index.insert("host", backup.component, backup.node, backup.first, backup.table)
            backup.fresh = unused
            # While the copy held its pin, write-back could not see these full pages as next to be evicted.
            self._state.may_write_back()
        self.give_up(backup)

    def give_up(self, backup: ComponentBackup) -> None:
        """Give back the host pages that the index did not take, and both receipts. Safe to call again after a raise."""
        self._index.give_back({backup.component: backup.fresh}, "host")
        backup.fresh = page_ids()
        if backup.lock is not None:
            self._index.unlock(backup.lock)
            backup.lock = None
        self._index.unpin(backup.pin)
        self._state.pages_were_freed()
        self._state.may_store()

    def is_late(self) -> None:
        """Count a late copy."""
        self._state.count("backups_late")
