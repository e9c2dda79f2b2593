"""KV events from changed nodes of the prefix index: the difference between the published and the current content.

A node is marked as changed when it gets or loses a copy, is split, is filled or begins to be filled by a load, is
reclaimed, or is confirmed in storage. Marked nodes are compared with the published content after the step, because a
marked node may have its former content again, or have left the tree. Without a watcher no node is marked.

The loop's thread only copies the content of the changed nodes, in the order of the steps. The sending thread makes
hashes, differences and bytes from these copies (`KVContent`); equal copies give equal events.

With `components`, the pages of windows and states are published as well, each component as a group of its own: a page
of a window under the hash of the full page at its position, a record under that of the page that it follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from tidekv.engine.kv_events.content import EventGroup, KVContent, Seen
from tidekv.engine.kv_events.messages import KVEvent, Medium
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.events import Event
from tidekv.states.prefix.component_tier import ComponentTier
from tidekv.states.prefix.index import PrefixIndex
from tidekv.states.prefix.node import Node
from tidekv.states.settings import CoreSettings

ANSWER_S: Final = 1.0
"""Maximum wait for the sending thread."""
KINDS: Final = {"window": "sliding_window", "state": "mamba"}
"""Kinds of components, as the events name them."""


def watch(index: PrefixIndex) -> dict[Node, None]:
    """Mark changed nodes from now on; returns them in the order of their first change. The watcher empties the dict.

    An index has one such dict, and can have only one watcher.
    """
    if index.tree.dirty_nodes is None:
        index.tree.dirty_nodes = index.device_tier.dirty_nodes = index.host_tier.dirty_nodes = {}
    return index.tree.dirty_nodes


def groups_of(settings: CoreSettings) -> list[EventGroup]:
    """The groups of a core's components."""
    return [EventGroup(KINDS[component.kind], component.window_tokens or None) for component in settings.components]


MakeEvents = Callable[[], Iterable[KVEvent]]


class Outlet(Protocol):
    """Makes and sends events in the order of the calls."""

    @property
    def has_room(self) -> bool:
        """Whether `publish` may be called."""

    def publish(self, make: MakeEvents, whole: MakeEvents) -> None:
        """Make events later and send them as one batch; no events make no batch. Never blocks.

        `whole` makes the events of all that is published after them, for subscribers that begin there.
        """


class ServerEvents(NamedTuple):
    """The outlet of an engine's events within a server that publishes its own, and the content they are made of."""

    outlet: Outlet
    content: KVContent


class KVEventWatcher:
    """Publishes the changes of one core. Create it before the core's first step, and call `stepped` for every step."""

    def __init__(self, core: Core, outlet: Outlet, content: KVContent, *, components: bool = False) -> None:
        """With `components` their pages are published, too; the content must have been made with `groups_of` then."""
        self._tree = core.state.index.tree
        self._touched = watch(core.state.index)
        self._attachment = self._tree.attachment
        self._outlet = outlet
        self._components = core.state.components if components else None
        self._content = content
        self._is_behind = not outlet.has_room
        """Published and current content differ by unknown changes, because the queue was full."""
        self._has_begun = False
        self._catch_up()

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """Publish what the step has changed."""
        dirty_nodes = self._touched
        if self._is_behind:
            dirty_nodes.clear()
            self._catch_up()
            return
        if self._attachment != self._tree.attachment:
            # Another storage, or none: no page is known to be stored any more.
            self._catch_up()
            dirty_nodes.clear()
            return
        if not dirty_nodes:
            return
        if self._outlet.has_room:
            self._publish(partial(self._content.changes, [self._seen(node) for node in dirty_nodes]))
        else:
            self._is_behind = True
        dirty_nodes.clear()

    def storage_lacks(self, digests: Sequence[bytes]) -> None:
        """Publish that storage has dropped these pages, as far as they are known."""
        if digests and self._outlet.has_room:
            self._publish(partial(self._content.lost, digests))

    async def keys_of(self, prompts: Sequence[Sequence[int]]) -> list[tuple[str, bytes]]:
        """Return namespace and keys of prompts by the published hashes of their first pages, as far as these follow one
        another. Raises TimeoutError if the sending thread does not answer in time.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[tuple[str, bytes]]] = loop.create_future()

        def delivered(keys: list[tuple[str, bytes]]) -> None:
            if not found.done():
                found.set_result(keys)

        def take(content: KVContent) -> None:
            loop.call_soon_threadsafe(delivered, [content.keys_of(hashes) for hashes in prompts])

        self.look(take)
        async with asyncio.timeout(ANSWER_S):
            return await found

    def look(self, take: Callable[[KVContent], None]) -> None:
        """Call `take` with the content, in the sending thread. It must change nothing, and not keep it."""

        def made() -> Sequence[KVEvent]:
            take(self._content)
            return ()

        if self._outlet.has_room:
            self._publish(made)

    def _publish(self, make: MakeEvents) -> None:
        self._outlet.publish(make, self._content.whole)

    def _catch_up(self) -> None:
        """Compare all nodes, as soon as the queue has a place."""
        if not self._outlet.has_room:
            self._is_behind = True
            return
        nodes = [self._seen(node) for node in self._tree.nodes()]
        if self._has_begun:
            has_left_storage = self._attachment != self._tree.attachment
            self._publish(
                partial(self._content.changes, nodes, are_all=True, has_left_storage=has_left_storage),
            )
        else:
            self._publish(partial(self._content.begin, nodes))
        self._is_behind, self._has_begun, self._attachment = False, True, self._tree.attachment

    def _seen(self, node: Node) -> Seen:
        """Copy the content of a node. Pages that a load still fills, or that drain, do not count."""
        parent = node.parent
        if parent is None:
            return Seen(node.node_id, 0, 0, "", b"", ())
        found: list[Medium] = []
        if node.device is not None and node.load is None and not node.is_reclaiming:
            found.append("GPU")
        if node.host is not None:
            found.append("CPU")
        if self._tree.is_stored(node):
            found.append("STORAGE")
        above = 0 if parent.is_root else parent.node_id
        seen = self._seen_components(node) if self._components is not None else ()
        media = tuple(found)
        return Seen(node.node_id, above, node.depth_pages, node.namespace, node.edge, media, seen, node.renewed)

    def _seen_components(self, node: Node) -> tuple[tuple[int, Medium, tuple[int, ...]], ...]:
        assert self._components is not None
        first, found = node.depth_pages - node.page_count, []
        for group, name in enumerate(self._components.components, start=1):
            places: tuple[tuple[Medium, ComponentTier], ...] = (
                ("GPU", self._components.device[name]),
                ("CPU", self._components.host[name]),
            )
            for medium, tier in places:
                if pages := tier.pages_of(node):
                    found.append((group, medium, tuple(sorted(at - first for at in pages))))
        return tuple(found)
