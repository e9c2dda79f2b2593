"""Watcher of the core's steps that passes changes of the prefix index on as KV events.

On the loop's thread it only copies the content of the changed nodes: hashes, differences and bytes are made in the
sending thread. "STORAGE" means that this engine has seen the page in storage. When the index forgets a page, consumers
are sent its removal, although storage may still have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tidekv.engine.kv_events.messages import KVEvent, Medium
from tidekv.engine.kv_events.tell import KVEventTeller, Seen
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.events import Event
from tidekv.states.prefix.node import Node
from tidekv.states.prefix.dirty_nodes import watch

MakeEvents = Callable[[], Sequence[KVEvent]]


class Outlet(Protocol):
    """Makes and sends events in the order of the calls."""

    @property
    def has_room(self) -> bool:
        """Whether `publish` may be called."""

    def publish(self, make: MakeEvents) -> None:
        """Make events later and send them as one batch; no events make no batch. Never blocks."""


class KVEventWatcher:
    """Publishes the changes of one core. Create it before the core's first step, and call `stepped` for every step."""

    def __init__(
        self, core: Core, outlet: Outlet, *, teller: KVEventTeller | None = None, bigrams: bool = False
    ) -> None:
        self._tree = core.state.index.tree
        self._touched = watch(core.state.index)
        self._attachment = self._tree.attachment
        self._outlet = outlet
        settings = core.settings
        self._teller = teller or KVEventTeller(
            page_size=settings.page_size, key_bytes=settings.key_bytes, bigrams=bigrams
        )
        self._is_behind = True
        """Published and current content differ by unknown changes: at the start, or after changes were dropped because
        the queue was full."""
        self._catch_up()

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """Publish what the step has changed."""
        touched = self._touched
        if self._is_behind:
            touched.clear()
            self._catch_up()
            return
        if self._attachment != self._tree.attachment:
            # Another storage, or none: no page is known to be stored any more.
            self._attachment = self._tree.attachment
            touched.update(dict.fromkeys(self._tree.nodes()))
        if not touched:
            return
        if self._outlet.has_room:
            self._outlet.publish(partial(self._teller.changes, [self._seen(node) for node in touched]))
        else:
            self._is_behind = True
        touched.clear()

    def _catch_up(self) -> None:
        """Publish the whole content, as soon as the queue has a place."""
        if self._outlet.has_room:
            self._is_behind = False
            self._attachment = self._tree.attachment
            self._outlet.publish(partial(self._teller.anew, [self._seen(node) for node in self._tree.nodes()]))

    def _seen(self, node: Node) -> Seen:
        """Copy the content of a node. Pages that a load still fills, or that drain, do not count."""
        parent = node.parent
        if parent is None:
            return Seen(node.node_id, 0, 0, "", b"", ())
        found: list[Medium] = []
        if node.device is not None and node.load is None and not node.void:
            found.append("GPU")
        if node.host is not None:
            found.append("CPU")
        if self._tree.is_stored(node):
            found.append("STORAGE")
        above = 0 if parent.is_root else parent.node_id
        return Seen(node.node_id, above, node.depth_pages, node.namespace, node.edge, tuple(found))
