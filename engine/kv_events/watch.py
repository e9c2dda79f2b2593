"""A watcher of the core's steps that hands over what has changed in the prefix index, to be told as KV events.

On the loop's thread it only copies what a few nodes hold: hashes, differences and bytes are made where the events are
sent. "STORAGE" means that this engine has seen the page in storage; when the index forgets the page, so does whoever
listens, although storage may still have it.
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
from tidekv.states.node import Node
from tidekv.states.touched import watch

MakeEvents = Callable[[], Sequence[KVEvent]]


class Outlet(Protocol):
    """Where events are made and sent, in the order of the calls."""

    @property
    def has_room(self) -> bool:
        """Whether `publish` may be called."""

    def publish(self, make: MakeEvents) -> None:
        """Make events, later, and send them as one batch; none are no batch. Never blocks."""


class KVEventWatcher:
    """Give it the core of a live run before its first step, and `stepped` every step."""

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
        """What was told is not what was: nothing at first, or changes were lost because too many waited."""
        self._catch_up()

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """Hand over what the step has changed."""
        touched = self._touched
        if self._is_behind:
            touched.clear()
            self._catch_up()
            return
        if self._attachment != self._tree.attachment:
            # Another storage, or none: of no page it is known that it is there.
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
        """Tell all that there is, as soon as there is room for it."""
        if self._outlet.has_room:
            self._is_behind = False
            self._attachment = self._tree.attachment
            self._outlet.publish(partial(self._teller.anew, [self._seen(node) for node in self._tree.nodes()]))

    def _seen(self, node: Node) -> Seen:
        """Copy what a node holds: pages count not while a load still fills them, nor where they drain."""
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
