"""From what nodes of the prefix index hold to KV events: the difference between what was told and what is.

It works on copies of what the loop's thread saw, in the order in which that was seen, so it may run in another thread.
First comes what is new, then what is gone, so that a page that moved down a tier is never missing. The same copies give
the same events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from tidekv.backends.keys import namespace_seed
from tidekv.backends.page_keys import PageKeys
from tidekv.engine.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Medium, hash_of

MEDIA: Final[tuple[Medium, ...]] = ("GPU", "CPU", "STORAGE")


class Seen(NamedTuple):
    """A node as it was after a step. `parent_id` is 0 below a root; `edge` is empty where it has left the tree."""

    node_id: int
    parent_id: int
    depth_pages: int
    namespace: str
    edge: bytes
    media: tuple[Medium, ...]


class _Told:
    """What was told of a node: the keys of its pages, the hashes they are published by, and where they are."""

    __slots__ = ("digests", "hashes", "media")

    def __init__(self, digests: list[bytes], media: tuple[Medium, ...]) -> None:
        self.digests = digests
        self.hashes = [hash_of(digest) for digest in digests]
        self.media = media


class KVEventTeller:
    """Keeps what was told. All calls come from one thread; `key_bytes` is the width of a page's key, and `bigrams` how
    it is made (see `PageKeys`).
    """

    def __init__(self, *, page_size: int, key_bytes: int, bigrams: bool = False) -> None:
        self._page_keys = PageKeys(page_size, bigrams=bigrams)
        self._key_bytes = key_bytes
        self._told: dict[int, _Told] = {}

    def anew(self, nodes: Sequence[Seen]) -> list[KVEvent]:
        """Tell everything: who listens forgets what it knew of this engine, and of an earlier one at its place."""
        self._told.clear()
        return [AllBlocksCleared(), *self.changes(nodes)]

    def changes(self, nodes: Sequence[Seen]) -> list[KVEvent]:
        """Tell what differs from what was told of these nodes; nothing else has changed."""
        before: dict[Medium, dict[int, None]] = {medium: {} for medium in MEDIA}
        for node in nodes:
            told = self._told.pop(node.node_id, None)
            if told is not None:
                for medium in told.media:
                    before[medium].update(dict.fromkeys(told.hashes))
        events: list[KVEvent] = []
        # Parents first: a page's hash needs that of the page before it, here and at whoever listens.
        for node in sorted((node for node in nodes if node.edge), key=lambda node: node.depth_pages):
            told = self._told[node.node_id] = _Told(self._digests_of(node), node.media)
            for medium in told.media:
                events.extend(self._stored(node, told, medium, before[medium]))
        for medium, hashes in before.items():
            if hashes:
                events.append(BlockRemoved(list(hashes), medium))
        return events

    def _stored(self, node: Seen, told: _Told, medium: Medium, before: dict[int, None]) -> Iterator[BlockStored]:
        """Yield an event for each run of pages that were not told of; strike out those that were."""
        fresh = [before.pop(page_hash, False) is False for page_hash in told.hashes]
        first, count, width = 0, len(fresh), self._key_bytes
        while first < count:
            if not fresh[first]:
                first += 1
                continue
            end = fresh.index(False, first) if False in fresh[first:] else count
            yield BlockStored(
                block_hashes=told.hashes[first:end],
                parent_block_hash=told.hashes[first - 1] if first else self._hash_above(node),
                token_ids=self._tokens_of(node.edge[first * width : end * width]),
                block_size=self._page_keys.page_size,
                lora_id=None,
                medium=medium,
                lora_name=None,
                extra_keys=[(node.namespace,)] * (end - first) if node.namespace else None,
            )
            first = end

    def _digests_of(self, node: Seen) -> list[bytes]:
        above = self._told[node.parent_id].digests[-1] if node.parent_id else namespace_seed(node.namespace)
        return self._page_keys.digests(self._page_keys.tokens_of(node.edge), prefix=above)

    def _tokens_of(self, keys: bytes) -> list[int]:
        """The tokens of whole pages: not the one after the last of them, which a key may have as well."""
        tokens: list[int] = np.frombuffer(self._page_keys.tokens_of(keys), dtype="<u4").tolist()
        return tokens[: len(keys) // self._key_bytes * self._page_keys.page_size]

    def _hash_above(self, node: Seen) -> int | None:
        return self._told[node.parent_id].hashes[-1] if node.parent_id else None
