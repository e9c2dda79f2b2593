"""Backups of components: what a finished request leaves of tails on the device goes on to the host.

A backup of full pages that has reached the end of its path asks for the tails of that boundary. A tail is copied whole
or not at all: where the device has not all of it, or the host has no room for it, nothing is. Each copy holds a lock of
its source and a pin of the place where it is to go, until it has ended. From there it goes on to storage
(`tidekv.states.components.puts`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyTail
from tidekv.states.types import PageIds, page_ids
from tidekv.states.components.puts import TailPuts
from tidekv.states.rollback import Undo

if TYPE_CHECKING:
    from tidekv.states.components.index import ComponentIndex, TailReceipt
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.prefix.node import Node
    from tidekv.states.storage.admission import StorageUse


class TailBackup:
    """Operation: a copy of one component's tail to the host."""

    __slots__ = ("_backups", "component", "first", "fresh", "lock", "node", "pin", "table")

    def __init__(
        self, backups: TailBackups, component: str, node: Node, first: int, lock: TailReceipt, pin: TailReceipt
    ) -> None:
        self._backups = backups
        self.component = component
        self.node = node
        self.first = first
        self.lock: TailReceipt | None = lock
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


class TailBackups:
    """All backups of components under way are operations; this file knows how they begin and end."""

    def __init__(self, state: CoreState, storage: StorageUse, index: ComponentIndex) -> None:
        self._state = state
        self._index = index
        self.puts = TailPuts(state, storage, index)

    def begin(self, leaf: Node) -> None:
        """Copy to the host what it lacks of the tails at the end of `leaf`, whose full pages are in both tiers."""
        for name in self._index.components:
            first, device = self._index.tail("device", name, leaf)
            _, host = self._index.tail("host", name, leaf)
            missing = [at for at in range(first, leaf.depth_pages) if at not in host]
            if missing and all(at in device for at in missing):
                self._copy(name, leaf, first, [device[at] for at in missing], host)

    def _copy(self, name: str, leaf: Node, first: int, sources: list[int], host: dict[int, int]) -> None:
        if self._index.host[name].room < len(sources):
            return
        with Undo() as undo:
            lock = self._index.lock(leaf, boundary=leaf.depth_pages)
            undo.callback(self._index.unlock, lock)
            pin = self._index.pin(leaf, boundary=leaf.depth_pages)
            undo.callback(self._index.unpin, pin)
            pages = self._index.take_host(name, len(sources))
            backup = TailBackup(self, name, leaf, first, lock, pin)
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
                CopyTail(
                    op=op,
                    component=name,
                    source="device",
                    source_pages=page_ids(sources),
                    target="host",
                    target_pages=pages,
                )
            )
            undo.keep()

    def ended(self, backup: TailBackup, error: str) -> None:
        """The copy is over; with an error its pages are garbage and given back."""
        if error:
            self._state.count("backups_failed")
        else:
            _, unused = self._index.insert("host", backup.component, backup.node, backup.first, backup.table)
            backup.fresh = unused
            # Its pin kept full pages from being looked at before they are evicted.
            self._state.write_due = True
        self.give_up(backup)

    def give_up(self, backup: TailBackup) -> None:
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
