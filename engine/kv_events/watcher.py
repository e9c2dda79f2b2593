"""KV events from changed nodes of the prefix index: the difference between the published and the current content.

A node is marked as changed when it gets or loses a copy, is split, is filled or begins to be filled by a load, is
reclaimed, or is seen in storage. Marked nodes are compared with the published content after the step, because a marked
node may have its former content again, or have left the tree. Without a watcher no node is marked.

The loop's thread only copies the content of the changed nodes, in the order of the steps. The sending thread makes
hashes, differences and bytes from these copies; equal copies give equal events. Additions precede removals, so a page
that moves down a tier is never missing.

With `components`, the pages of windows and states are published as well, each component as a group of its own: a page
of a window under the hash of the full page at its position, a record under that of the page that it follows.

"STORAGE" means that this engine has seen the page in storage. When the index forgets a page, consumers are sent its
removal, although storage may still have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from tidekv.backends.keys.chain import namespace_seed
from tidekv.backends.keys.page_keys import PageKeys
from tidekv.engine.kv_events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Medium,
    hash_of,
    name_of,
)
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.events import Event
from tidekv.states.prefix.component_tier import ComponentTier
from tidekv.states.prefix.index import PrefixIndex
from tidekv.states.prefix.node import Node
from tidekv.states.settings import CoreSettings


def watch(index: PrefixIndex) -> dict[Node, None]:
    """Mark changed nodes from now on; returns them in the order of their first change. The watcher empties the dict.

    An index has one such dict, and can have only one watcher.
    """
    if index.tree.dirty_nodes is None:
        index.tree.dirty_nodes = index.device_tier.dirty_nodes = index.host_tier.dirty_nodes = {}
    return index.tree.dirty_nodes


MEDIA: Final[tuple[Medium, ...]] = ("GPU", "CPU", "STORAGE")


class Seen(NamedTuple):
    """A node as it was after a step. `parent_id` is 0 below a root; `edge` is empty if the node has left the tree."""

    node_id: int
    parent_id: int
    depth_pages: int
    namespace: str
    edge: bytes
    media: tuple[Medium, ...]
    components: tuple[tuple[int, Medium, tuple[int, ...]], ...] = ()
    """For components: group, medium, and which pages of the node have one there, counted from its first."""


class Group(NamedTuple):
    """What the events say of a group: a component, or the full KV, which is group 0."""

    kind: str
    window_tokens: int | None = None


FULL_ATTENTION: Final = Group("full_attention")
KINDS: Final = {"window": "sliding_window", "state": "mamba"}
"""Kinds of components, as the events name them."""
Place: TypeAlias = "tuple[int, Medium]"
"""Group and medium."""


class _Published:
    """Published content of a node: the hashes of its pages, the key of the last one, and what is in which place."""

    __slots__ = ("hashes", "last_digest", "places")

    def __init__(self, digests: list[bytes], node: Seen) -> None:
        self.last_digest = digests[-1]
        self.hashes = [hash_of(digest) for digest in digests]
        self.places: dict[Place, Sequence[int]] = {(0, medium): range(len(digests)) for medium in node.media}
        self.places |= {(group, medium): pages for group, medium, pages in node.components}


class KVEventTracker:
    """Keeps the published content and returns changes as events. Call it from one thread only.

    `key_bytes` is the width of a page's key in bytes, and `bigrams` how it is built (see `PageKeys`). `groups` are the
    published components, from group 1 on. Without `tokens`, `token_ids` is empty.
    """

    def __init__(
        self,
        *,
        page_size: int,
        key_bytes: int,
        bigrams: bool = False,
        groups: Sequence[Group] = (),
        tokens: bool = True,
    ) -> None:
        self._has_tokens = tokens
        self._groups = (FULL_ATTENTION, *groups) if groups else ()
        self._page_keys = PageKeys(page_size, bigrams=bigrams)
        self._key_bytes = key_bytes
        self._published: dict[int, _Published] = {}

    def snapshot(self, nodes: Sequence[Seen]) -> list[KVEvent]:
        """Return events that clear a consumer's knowledge of this engine, or of its predecessor, and list all nodes."""
        self._published.clear()
        return [AllBlocksCleared(), *self.changes(nodes)]

    def changes(self, nodes: Sequence[Seen]) -> list[KVEvent]:
        """Return the events for nodes that have changed. All other nodes must be unchanged since the last call."""
        # Hashes that the changed nodes had, by place. `_stored` removes those that are still there; the rest is gone.
        before: dict[Place, dict[int, None]] = {(0, medium): {} for medium in MEDIA}
        for node in nodes:
            published = self._published.pop(node.node_id, None)
            if published is not None:
                for place, pages in published.places.items():
                    before.setdefault(place, {}).update(dict.fromkeys(published.hashes[at] for at in pages))
        events: list[KVEvent] = []
        # Parents first: a page's hash needs the hash of the page before it, here and at the consumer.
        for node in sorted((node for node in nodes if node.edge), key=lambda node: node.depth_pages):
            published = self._published[node.node_id] = _Published(self._digests_of(node), node)
            for place, pages in published.places.items():
                events.extend(self._stored(node, published, place, pages, before.setdefault(place, {})))
        for (group, medium), hashes in before.items():
            if hashes:
                events.append(BlockRemoved(list(hashes), medium, group if self._groups else None))
        return events

    def _stored(
        self, node: Seen, published: _Published, place: Place, pages: Sequence[int], before: dict[int, None]
    ) -> Iterator[BlockStored]:
        """Yield an event for each run of pages that were not published, and remove those that were from `before`."""
        fresh = [False] * len(published.hashes)
        for at in pages:
            fresh[at] = before.pop(published.hashes[at], False) is False
        group, medium = place
        spec = self._groups[group] if self._groups else None
        first, count, width = 0, len(fresh), self._key_bytes
        while first < count:
            if not fresh[first]:
                first += 1
                continue
            end = fresh.index(False, first) if False in fresh[first:] else count
            yield BlockStored(
                block_hashes=published.hashes[first:end],
                parent_block_hash=published.hashes[first - 1] if first else self._hash_above(node),
                token_ids=self._tokens_of(node.edge[first * width : end * width]),
                block_size=self._page_keys.page_size,
                lora_id=None,
                medium=medium,
                lora_name=None,
                # Hashed: with its name, a program that reaches an engine could use the cache of the namespace.
                extra_keys=[(name_of(node.namespace),)] * (end - first) if node.namespace else None,
                group_idx=None if spec is None else group,
                kv_cache_spec_kind=None if spec is None else spec.kind,
                kv_cache_spec_sliding_window=None if spec is None else spec.window_tokens,
            )
            first = end

    def _digests_of(self, node: Seen) -> list[bytes]:
        above = self._published[node.parent_id].last_digest if node.parent_id else namespace_seed(node.namespace)
        return self._page_keys.digests(self._page_keys.tokens_of(node.edge), prefix=above)

    def _tokens_of(self, keys: bytes) -> list[int]:
        """Return the tokens of whole pages, without the one after the last page that a bigram key includes."""
        if not self._has_tokens:
            return []
        tokens: list[int] = np.frombuffer(self._page_keys.tokens_of(keys), dtype="<u4").tolist()
        return tokens[: len(keys) // self._key_bytes * self._page_keys.page_size]

    def _hash_above(self, node: Seen) -> int | None:
        return self._published[node.parent_id].hashes[-1] if node.parent_id else None


def groups_of(settings: CoreSettings) -> list[Group]:
    """The groups of a core's components."""
    return [Group(KINDS[component.kind], component.window_tokens or None) for component in settings.components]


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
        self,
        core: Core,
        outlet: Outlet,
        *,
        tracker: KVEventTracker | None = None,
        bigrams: bool = False,
        components: bool = False,
        tokens: bool = True,
    ) -> None:
        """With `components` their pages are published, too. A `tracker` must have been made with `groups_of` then."""
        self._tree = core.state.index.tree
        self._touched = watch(core.state.index)
        self._attachment = self._tree.attachment
        self._outlet = outlet
        settings = core.settings
        self._components = core.state.components if components else None
        self._tracker = tracker or KVEventTracker(
            page_size=settings.page_size,
            key_bytes=settings.key_bytes,
            bigrams=bigrams,
            groups=groups_of(settings) if components else (),
            tokens=tokens,
        )
        self._is_behind = True
        """Published and current content differ by unknown changes: at the start, or after changes were dropped because
        the queue was full."""
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
            self._attachment = self._tree.attachment
            dirty_nodes.update(dict.fromkeys(self._tree.nodes()))
        if not dirty_nodes:
            return
        if self._outlet.has_room:
            self._outlet.publish(partial(self._tracker.changes, [self._seen(node) for node in dirty_nodes]))
        else:
            self._is_behind = True
        dirty_nodes.clear()

    def _catch_up(self) -> None:
        """Publish the whole content, as soon as the queue has a place."""
        if self._outlet.has_room:
            self._is_behind = False
            self._attachment = self._tree.attachment
            self._outlet.publish(partial(self._tracker.snapshot, [self._seen(node) for node in self._tree.nodes()]))

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
        return Seen(node.node_id, above, node.depth_pages, node.namespace, node.edge, tuple(found), seen)

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
