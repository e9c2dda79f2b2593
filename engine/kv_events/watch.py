"""From what changes in the prefix index to KV events: a watcher of the core's steps.

After a step it looks at the nodes that the step has touched, compares what they hold now with what was told, and tells
the difference: first what is new, then what is gone, so that a page that moved down a tier is never missing. The same
steps give the same events. "STORAGE" means that this engine has seen the page in storage; when the index forgets the
page, so does whoever listens, although storage may still have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tidekv.backends.keys import page_digests
from tidekv.engine.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Medium, hash_of
from tidekv.states.commands import Command
from tidekv.states.core import Core
from tidekv.states.events import Event
from tidekv.states.node import Node
from tidekv.states.touched import watch

MEDIA: tuple[Medium, ...] = ("GPU", "CPU", "STORAGE")


class _Told:
    """What was told of a node: the keys of its pages, the hashes they are published by, and where they are."""

    __slots__ = ("digests", "hashes", "media")

    def __init__(self, digests: list[bytes], media: tuple[Medium, ...]) -> None:
        self.digests = digests
        self.hashes = [hash_of(digest) for digest in digests]
        self.media = media


class KVEventWatcher:
    """Give it the core of a live run before its first step, and `stepped` every step. `publish` takes what to tell."""

    def __init__(self, core: Core, publish: Callable[[Sequence[KVEvent]], None]) -> None:
        self._tree = core.books.index.tree
        self._page_size = core.settings.page_size
        self._touched = watch(core.books.index)
        self._attachment = self._tree.attachment
        self._told: dict[Node, _Told] = {}
        self._publish = publish
        # Whoever has heard of an earlier engine at this place must forget what that one had.
        publish([AllBlocksCleared()])

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """Tell what the step has changed."""
        if self._attachment != self._tree.attachment:
            # Another storage, or none: of no page it is known that it is there.
            self._attachment = self._tree.attachment
            self._touched.update(dict.fromkeys(self._told))
        if not self._touched:
            return
        nodes = list(self._touched)
        self._touched.clear()
        events = self._changes(nodes)
        if events:
            self._publish(events)

    def _changes(self, nodes: list[Node]) -> list[KVEvent]:
        before: dict[Medium, dict[int, None]] = {medium: {} for medium in MEDIA}
        for node in nodes:
            told = self._told.pop(node, None)
            if told is not None:
                for medium in told.media:
                    before[medium].update(dict.fromkeys(told.hashes))
        events: list[KVEvent] = []
        # Parents first: a page's hash needs that of the page before it, here and at whoever listens.
        for node in sorted((node for node in nodes if node.parent is not None), key=lambda node: node.depth_pages):
            told = self._told[node] = _Told(self._digests_of(node), self._media_of(node))
            for medium in told.media:
                events.extend(self._stored(node, told, medium, before[medium]))
        for medium, hashes in before.items():
            if hashes:
                events.append(BlockRemoved(list(hashes), medium))
        return events

    def _stored(self, node: Node, told: _Told, medium: Medium, before: dict[int, None]) -> Iterator[BlockStored]:
        """Yield an event for each run of pages that were not told of; strike out those that were."""
        fresh = [before.pop(page_hash, False) is False for page_hash in told.hashes]
        first, count = 0, len(fresh)
        while first < count:
            if not fresh[first]:
                first += 1
                continue
            end = fresh.index(False, first) if False in fresh[first:] else count
            width = self._tree.key_bytes
            yield BlockStored(
                block_hashes=told.hashes[first:end],
                parent_block_hash=told.hashes[first - 1] if first else self._hash_above(node),
                token_ids=self._tokens_of(node.edge[first * width : end * width]),
                block_size=self._page_size,
                lora_id=None,
                medium=medium,
                lora_name=None,
                extra_keys=[(node.namespace,)] * (end - first) if node.namespace else None,
            )
            first = end

    def _media_of(self, node: Node) -> tuple[Medium, ...]:
        """Where a node's pages can be had: not while a load still fills them, nor where they drain."""
        found: list[Medium] = []
        if node.device is not None and node.load is None and not node.void:
            found.append("GPU")
        if node.host is not None:
            found.append("CPU")
        if self._tree.is_stored(node):
            found.append("STORAGE")
        return tuple(found)

    def _digests_of(self, node: Node) -> list[bytes]:
        parent = node.parent
        assert parent is not None, "roots have no pages"
        prefix = b"" if parent.is_root else self._told[parent].digests[-1]
        return page_digests(node.edge, self._page_size, namespace=node.namespace, prefix=prefix)

    def _tokens_of(self, edge: bytes) -> list[int]:
        """The keys of a live run are packed tokens."""
        tokens: list[int] = np.frombuffer(edge, dtype="<u4").tolist()
        return tokens

    def _hash_above(self, node: Node) -> int | None:
        assert node.parent is not None, "roots have no pages"
        return None if node.parent.is_root else self._told[node.parent].hashes[-1]
