"""The published content of an engine, page by page, and its changes as events.

A page is published in a medium once it is there and can be reached there: on the device after the page before it on the
device, in any medium after the page before it in some medium. A page behind one that a load still fills is held back,
and published together with it. Each page is stored and removed once in each medium.

Pages that the index forgets stay published in STORAGE until storage drops them, the engine leaves that storage, or more
than `stored_pages_max` are remembered: then those forgotten first go.

Additions come before removals, and pages after the page before them, so a page that moves down a tier is never missing.

Within a server that publishes events itself, pages have the names that it gives them (`ServerNames`), and a page
without a name is held back. The device is the server's to publish, and so is the end of everything: `AllBlocksCleared`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice, pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from tidekv.backends.keys.chain import namespace_seed
from tidekv.backends.keys.page_keys import PageKeys
from tidekv.engine.kv_events.messages import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Medium,
    hash_of,
)
from tidekv.engine.kv_events.names import PageNames, Wording
from tidekv.engine.kv_events.server_names import ServerName, ServerNames

MEDIA: Final[tuple[Medium, ...]] = ("GPU", "CPU", "STORAGE")
ON_DEVICE, IN_STORAGE = 1, 4
_FULL: Final = 7
"""Bits of the full KV: one for each medium, in the order of MEDIA. Two for each component follow, of GPU and CPU."""
EVENT_PAGES_MAX: Final = 4096
"""Maximum pages of one event, so that a batch of one event is within its limits."""
STORED_PAGES_MAX: Final = 500_000


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
    renewed: int = 0
    """The period in which storage last confirmed that it has the pages."""


class EventGroup(NamedTuple):
    """What the events say of a group: a component, or the full KV, which is group 0."""

    kind: str
    window_tokens: int | None = None


FULL_ATTENTION: Final = EventGroup("full_attention")


class _Chain(NamedTuple):
    """The namespace of pages."""

    namespace: str

    seed: bytes
    names: PageNames


class _Page:
    """One page of one namespace.

    `held` says where it is, `shown` where it is published. A page that is nowhere stays known while it has children.
    """

    __slots__ = ("chain", "children", "depth", "digest", "held", "is_in_tree", "key", "name", "parent", "shown")

    def __init__(
        self, digest: bytes, key: bytes, parent: _Page | None, chain: _Chain, name: int | ServerName | None
    ) -> None:
        self.digest = digest
        self.name = name
        """A number, unless a server names pages; None until it has."""
        self.key = key
        self.parent = parent
        self.chain = chain
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: _Page | dict[_Page, None] | None = None
        """One child, or several. Most pages have one, and a dict would be the largest part of a page."""
        self.held = self.shown = 0
        self.is_in_tree = False

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """Its hashes in events: one, or one for each block of the server."""
        assert self.name is not None, "only pages with a name are published"
        return (self.name,) if isinstance(self.name, int) else self.name.hashes

    def add(self, child: _Page) -> None:
        """Note a new child."""
        if self.children is None:
            self.children = child
        elif isinstance(self.children, _Page):
            self.children = {self.children: None, child: None}
        else:
            self.children[child] = None

    def remove(self, child: _Page) -> None:
        """Forget a child."""
        if isinstance(self.children, dict):
            del self.children[child]
            if not self.children:
                self.children = None
        else:
            self.children = None

    def each_child(self) -> Iterable[_Page]:
        """Its children."""
        if self.children is None:
            return ()
        return (self.children,) if isinstance(self.children, _Page) else self.children


class _KnownNode(NamedTuple):
    """Pages of a node at its last look, and whether it was marked as stored then."""

    pages: list[_Page]
    is_marked: bool


Runs: TypeAlias = "list[tuple[int, list[_Page]]]"
"""Consecutive pages by the number of their place's bit."""


class KVContent:
    """Keeps the published content and returns changes as events. Call it from one thread only.

    `key_bytes` is the width of a page's key in bytes, and `bigrams` how it is built (see `PageKeys`). `groups` are the
    published components, from group 1 on; salted pages are the group behind them. Without `tokens`, `token_ids` is
    empty. With ServerNames as `wording`, a server names the pages, see `name`.
    """

    def __init__(
        self,
        *,
        page_size: int,
        key_bytes: int,
        bigrams: bool = False,
        groups: Sequence[EventGroup] = (),
        tokens: bool = True,
        wording: Wording | ServerNames | None = None,
        stored_pages_max: int = STORED_PAGES_MAX,
    ) -> None:
        self._has_tokens = tokens
        self._groups = (FULL_ATTENTION, *groups) if groups else ()
        self._salted_group = len(groups) + 1
        self._page_keys = PageKeys(page_size, bigrams=bigrams)
        self._key_bytes = key_bytes
        self._names = wording if isinstance(wording, ServerNames) else None
        # Events under a server's names have single tokens, as its own events do.
        self._wording = wording if isinstance(wording, Wording) else Wording(bigrams=bigrams and self._names is None)
        self._stored_pages_max = stored_pages_max
        self._chains: dict[str, _Chain] = {}
        self._pages: dict[bytes, _Page] = {}
        """By digest, in an order in which a page follows its parent."""
        self._by_name: dict[int, _Page] = {}
        """The same by published hash; of two with the same hash, one."""
        self._nodes: dict[int, _KnownNode] = {}
        self._forgotten: OrderedDict[_Page, None] = OrderedDict()
        """Pages that have left the tree and are in storage, or before one that is; forgotten first, first."""
        self._lost: dict[_Page, int] = {}
        """Pages that storage has dropped although their node is marked, by the latest period (`Seen.renewed`) then."""
        self._renewed = 0
        """The latest period in which storage has confirmed a node."""

    # --- Changes ---

    def begin(self, nodes: Sequence[Seen]) -> list[KVEvent]:
        """Return events that clear a consumer's knowledge of an earlier engine at this address, and list all nodes."""
        changes = self.changes(nodes, are_all=True)
        return changes if self._names is not None else [AllBlocksCleared(), *changes]

    def changes(self, nodes: Sequence[Seen], *, are_all: bool = False, has_left_storage: bool = False) -> list[KVEvent]:
        """Return the events for nodes that have changed. All other nodes must be unchanged since the last call, or gone
        if `are_all`. `has_left_storage`: no page of an earlier node is in storage any more.
        """
        old: dict[int, _KnownNode] = {}
        for node_id in list(self._nodes) if are_all else [node.node_id for node in nodes]:
            if (known := self._nodes.pop(node_id, None)) is not None:
                old[node_id] = known
        left = dict.fromkeys(page for known in old.values() for page in known.pages)
        marked = {page for known in old.values() if known.is_marked for page in known.pages}
        touched: dict[_Page, None] = {}
        if has_left_storage:
            self._lost.clear()
            for page in (*self._forgotten, *left):
                page.held &= ~IN_STORAGE
                touched[page] = None
        # Parents first: a page's digest needs that of the page before it, here and at the consumer.
        for node in sorted((node for node in nodes if node.edge), key=lambda node: node.depth_pages):
            pages = self._pages_of(node, old.get(node.node_id))
            is_marked = "STORAGE" in node.media
            self._renewed = max(self._renewed, node.renewed)
            self._nodes[node.node_id] = _KnownNode(pages, is_marked)
            held = sum(1 << MEDIA.index(medium) for medium in node.media)
            if self._names is not None:
                held &= ~ON_DEVICE
            for page in pages:
                # A page may be in storage although its node is not marked. Only a mark that goes says it is not.
                page.held = held if page in marked else held | page.held & IN_STORAGE
                page.is_in_tree = True
                left.pop(page, None)
                touched[page] = None
                if is_marked and page in self._lost:
                    if node.renewed <= self._lost[page]:
                        page.held &= ~IN_STORAGE
                    else:
                        del self._lost[page]
            for group, medium, positions in node.components:
                for at in positions:
                    pages[at].held |= 1 << (3 + 2 * (group - 1) + MEDIA.index(medium))
        for page in left:
            page.is_in_tree = False
            page.held &= IN_STORAGE
            self._lost.pop(page, None)
            touched[page] = None
        return self._settled(touched)

    def lost(self, digests: Iterable[bytes]) -> list[KVEvent]:
        """Return the events for pages that storage has dropped. Unknown ones are left out. The mark of a page's node
        counts again once storage has confirmed it in a later period.
        """
        touched: dict[_Page, None] = {}
        for digest in digests:
            page = self._pages.get(digest)
            if page is None or not page.held & IN_STORAGE:
                continue
            page.held &= ~IN_STORAGE
            touched[page] = None
            if page.is_in_tree:
                self._lost[page] = self._renewed
        return self._settled(touched)

    def keys_of(self, hashes: Sequence[int]) -> tuple[str, bytes]:
        """Return the namespace and the keys of a prompt's first pages, by their hashes, as far as these are a chain."""
        keys: list[bytes] = []
        before: _Page | None = None
        for name in hashes:
            page = self._by_name.get(name)
            if page is None or page.parent is not before:
                break
            keys.append(page.key)
            before = page
        return "" if before is None else before.chain.namespace, b"".join(keys)

    def name(self, namespace: str, tokens: bytes, names: Sequence[ServerName]) -> list[KVEvent]:
        """Name the first pages of a prompt as the server does. Returns the events for those that waited for a name."""
        assert self._names is not None, "a server names pages"
        touched: dict[_Page, None] = {}
        digests = self._page_keys.digests(tokens, prefix=self._chain(namespace).seed)
        for digest, name in zip(digests, names, strict=False):
            self._names.put(digest, name)
            page = self._pages.get(digest)
            if page is not None and page.name is None:
                page.name = name
                touched[page] = None
        return self._settled(touched)

    def forget_names(self) -> list[KVEvent]:
        """Return the events that withdraw all pages. Each one is held back until the server names it again."""
        assert self._names is not None, "a server names pages"
        self._names.clear()
        events = self._removed((page, page.shown) for page in self._pages.values())
        for page in self._pages.values():
            page.shown, page.name = 0, None
        return events

    def again(self) -> list[KVEvent]:
        """Return the events that publish everything again: the server has told its listeners that nothing is left."""
        for page in self._pages.values():
            page.shown = 0
        return self._settled(dict.fromkeys(self._pages.values()))

    def digests_in_storage(self, first: int, page_count: int) -> tuple[list[bytes], bool]:
        """Return the digests of those of `page_count` pages that are believed to be in storage, from a position of all
        pages on, and whether pages follow.
        """
        pages = islice(self._pages.values(), first, first + page_count)
        return [page.digest for page in pages if page.held & IN_STORAGE], first + page_count < len(self._pages)

    def whole(self) -> Iterator[KVEvent]:
        """Yield events that clear a consumer's knowledge, and list everything that is published now."""
        yield AllBlocksCleared()
        yield from self._stored((page, page.shown) for page in self._pages.values() if page.shown)

    def _settled(self, touched: dict[_Page, None]) -> list[KVEvent]:
        """Decide again where the touched pages and those behind them are published, and drop what is nowhere."""
        for page in touched:
            if page.is_in_tree:
                self._forgotten.pop(page, None)
            elif page.held or page.children is not None:
                self._forgotten.setdefault(page)
        self._forget_beyond_limit(touched)
        # By depth, so that a page is looked at after the one before it.
        order = count()
        heap = [(page.depth, next(order), page) for page in touched]
        heapq.heapify(heap)
        before: dict[_Page, int] = {}
        while heap:
            _, _, page = heapq.heappop(heap)
            shown = self._to_show(page)
            if shown == page.shown:
                continue
            changed = shown ^ page.shown
            before.setdefault(page, page.shown)
            page.shown, was = shown, page.shown
            if changed & ON_DEVICE or (not shown & _FULL) != (not was & _FULL):
                for child in page.each_child():
                    heapq.heappush(heap, (child.depth, next(order), child))
        events: list[KVEvent] = list(self._stored((page, page.shown & ~was) for page, was in before.items()))
        events += self._removed((page, was & ~page.shown) for page, was in before.items())
        for page in touched:
            self._drop(page)
        return events

    def _to_show(self, page: _Page) -> int:
        if page.name is None:
            return 0
        full = page.held & _FULL
        if page.parent is not None:
            if not page.parent.shown & _FULL:
                full = 0
            elif not page.parent.shown & ON_DEVICE:
                full &= ~ON_DEVICE
        return full | page.held & ~_FULL

    def _forget_beyond_limit(self, touched: dict[_Page, None]) -> None:
        """Take pages that only storage has out of it, with all behind them, until the limit holds."""
        while len(self._forgotten) > self._stored_pages_max:
            first, _ = self._forgotten.popitem(last=False)
            below = [first]
            for page in below:  # Grows. What is below a page outside of the tree is outside of it, too.
                below.extend(page.each_child())
                self._forgotten.pop(page, None)
                page.held = 0
                touched[page] = None

    def _drop(self, page: _Page) -> None:
        """Drop a page that is nowhere and has no page behind it, and those before it of which that is now true."""
        at: _Page | None = page
        while at is not None and not at.is_in_tree and not at.held and at.children is None:
            if self._pages.get(at.digest) is not at:
                return
            del self._pages[at.digest]
            if isinstance(at.name, int) and self._by_name.get(at.name) is at:
                del self._by_name[at.name]
            self._forgotten.pop(at, None)
            self._lost.pop(at, None)
            if at.parent is not None:
                at.parent.remove(at)
            at = at.parent

    # --- Pages ---

    def _pages_of(self, node: Seen, known: _KnownNode | None) -> list[_Page]:
        """Return the pages of a node, and make those that are new."""
        above = self._nodes[node.parent_id].pages[-1] if node.parent_id else None
        width = self._key_bytes
        page_count = len(node.edge) // width
        if known is not None and len(known.pages) >= page_count:
            # A node keeps its end: a split takes its first pages away.
            pages = known.pages[-page_count:]
            if pages[0].parent is above and pages[0].key == node.edge[:width] and pages[-1].key == node.edge[-width:]:
                return pages
        chain = self._chain(node.namespace) if above is None else above.chain
        pages = []
        for at, digest in enumerate(self._digests(node.edge, chain.seed if above is None else above.digest)):
            page = self._pages.get(digest)
            if page is None:
                key = node.edge[at * width : (at + 1) * width]
                name = hash_of(digest) if self._names is None else self._names.find(digest)
                page = self._pages[digest] = _Page(digest, key, above, chain, name)
                if isinstance(name, int):
                    self._by_name[name] = page
                if above is not None:
                    above.add(page)
            pages.append(page)
            above = page
        return pages

    def _chain(self, namespace: str) -> _Chain:
        chain = self._chains.get(namespace)
        if chain is None:
            if len(self._chains) >= CHAINS_MAX:
                # Pages keep the chains that they need; these are only found faster.
                self._chains.clear()
            chain = self._chains[namespace] = _Chain(namespace, self._seed(namespace), self._wording.of(namespace))
        return chain

    def _seed(self, namespace: str) -> bytes:
        return namespace_seed(namespace)

    def _digests(self, keys: bytes, above: bytes) -> list[bytes]:
        return self._page_keys.digests(self._page_keys.tokens_of(keys), prefix=above)

    # --- Events ---

    def _removed(self, pages: Iterable[tuple[_Page, int]]) -> list[KVEvent]:
        """Return events for pages that are gone from these places."""
        gone: dict[tuple[int, int | None], list[BlockHash]] = {}
        for page, bits in pages:
            for bit in _bits(bits):
                gone.setdefault((bit, self._group_of(bit, page.chain)), []).extend(page.hashes)
        return [
            BlockRemoved(names[first : first + EVENT_PAGES_MAX], _medium_of(bit), group)
            for (bit, group), names in sorted(gone.items(), key=lambda item: (item[0][0], item[0][1] or 0))
            for first in range(0, len(names), EVENT_PAGES_MAX)
        ]

    def _stored(self, pages: Iterable[tuple[_Page, int]]) -> Iterator[BlockStored]:
        """Yield an event for each run of pages. A run begins behind pages that are published, or in an earlier run."""
        runs: Runs = []
        open_runs: dict[tuple[_Page, int], list[_Page]] = {}
        for page, added in pages:
            for bit in _bits(added):
                run = open_runs.pop((page.parent, bit), None) if page.parent is not None else None
                if run is None or len(run) == EVENT_PAGES_MAX:
                    run = []
                    runs.append((bit, run))
                run.append(page)
                open_runs[page, bit] = run
        for bit, run in runs:
            yield self._event(bit, run)

    def _event(self, bit: int, run: list[_Page]) -> BlockStored:
        first, names = run[0], run[0].chain.names
        if self._names is not None:
            return self._servers_event(self._names, bit, run)
        group = self._group_of(bit, first.chain)
        is_component = bit >= len(MEDIA)
        spec = self._groups[group] if is_component and group is not None else FULL_ATTENTION
        return BlockStored(
            block_hashes=[one for page in run for one in page.hashes],
            parent_block_hash=None if first.parent is None else first.parent.hashes[-1],
            token_ids=self._tokens_of(b"".join([page.key for page in run])),
            block_size=self._page_keys.page_size,
            lora_id=None,
            medium=_medium_of(bit),
            lora_name=names.lora_name,
            extra_keys=(
                [(names.first_key,), *[None] * (len(run) - 1)]
                if first.parent is None and names.first_key is not None
                else None
            ),
            group_idx=group,
            kv_cache_spec_kind=None if group is None else spec.kind,
            kv_cache_spec_sliding_window=None if group is None else spec.window_tokens,
            cache_salt=names.cache_salt,
        )

    def _servers_event(self, names: ServerNames, bit: int, run: list[_Page]) -> BlockStored:
        """Return the event as the server would publish it of its device."""
        first, hashes = run[0], [one for page in run for one in page.hashes]
        assert isinstance(first.name, ServerName), "the server names pages"
        words = first.name.words
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if first.parent is None else first.parent.hashes[-1],
            token_ids=self._tokens_of(b"".join([page.key for page in run])),
            block_size=names.block_size,
            lora_id=words.lora_id,
            medium=_medium_of(bit),
            lora_name=words.lora_name,
            extra_keys=words.extra_keys(len(hashes), is_first=first.parent is None),
            group_idx=0,
            kv_cache_spec_kind=names.kind,
        )

    def _group_of(self, bit: int, chain: _Chain) -> int | None:
        if self._names is not None:
            return 0
        if bit >= len(MEDIA):
            return (bit - len(MEDIA)) // 2 + 1
        if chain.names.is_salted:
            return self._salted_group
        return 0 if self._groups else None

    def _tokens_of(self, keys: bytes) -> list[int] | list[tuple[int, int]]:
        """Return the tokens of whole pages: with pairs each with the next one, else without the one behind the last."""
        if not self._has_tokens:
            return []
        tokens: list[int] = np.frombuffer(self._page_keys.tokens_of(keys), dtype="<u4").tolist()
        if self._wording.pairs:
            return list(pairwise(tokens))
        return tokens[: len(keys) // self._key_bytes * self._page_keys.page_size]


CHAINS_MAX: Final = 10_000
"""Maximum namespaces of which the seed is kept ready."""


def _bits(held: int) -> Iterator[int]:
    at = 0
    while held:
        if held & 1:
            yield at
        held >>= 1
        at += 1


def _medium_of(bit: int) -> Medium:
    return MEDIA[bit] if bit < len(MEDIA) else MEDIA[(bit - len(MEDIA)) % 2]
