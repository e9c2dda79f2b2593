"""The prefix index: a radix tree of the prefixes whose pages are in device or host memory.

There is one tree per namespace. Below its root, each node holds a run of pages: their keys, and a page list for each
copy (device, host). Keys are opaque and of fixed width. An edge is compared by one call; only after a mismatch is the
differing page searched for.

Invariants (`check` recounts them):

- Children of a node differ in the key of their first page, by which they are found.
- Closure: the parent of a node with device pages has device pages, and the same for host pages. From the root, a path
  has device pages (and possibly host pages) first, then only host pages.
- Every node except roots has at least one copy.
- A guarded node keeps its pages. Receipts, loads and pages in RECLAIMING guard their node and all nodes above it.

Pages in RECLAIMING have been given up while a writer may still write to them. They stay in the tree
(`Node.is_reclaiming`), hide their node and all below it from matches, and drain in their pool until `drop_reclaiming`.

Matching splits nodes, so that the match ends at a node. In a split the lower part keeps the node object and the
receipts anchored there; a new node above gets the first pages. All walks are loops: the depth is not bounded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.eviction import EvictionHook, Evictor
from tidekv.states.prefix.insertion import insert_host_pages, insert_prefix
from tidekv.states.prefix.invariants import check_index
from tidekv.states.prefix.node import (
    Heat,
    InsertResult,
    MatchResult,
    Node,
    NodeLoad,
    PageTree,
    Receipt,
    TierName,
    redeem,
)
from tidekv.states.prefix.policies import LRU, EvictionPolicy
from tidekv.states.prefix.tiers import DeviceTier, HostTier, Tier
from tidekv.states.types import NO_PAGES, PageIds

__all__ = ["EvictionHook", "InsertResult", "MatchResult", "Node", "NodeLoad", "PrefixIndex", "Receipt"]


ALL = sys.maxsize
"""More pages than a pool can have."""


class PrefixIndex:
    """The prefix index over a device pool and a host pool. `key_bytes` is the width of one page's key.

    Wrong calls raise BrokenInvariant and change nothing: they are bugs of tidekv.
    """

    def __init__(
        self,
        *,
        key_bytes: int,
        device: PagePool,
        host: PagePool,
        policy: EvictionPolicy = LRU,
        namespace_share: float = 1.0,
    ) -> None:
        self.tree = PageTree(key_bytes)
        self.device_tier = DeviceTier(device, policy, namespace_share)
        self.host_tier = HostTier(host, policy, namespace_share)
        self._dropping = Evictor(self.tree, self.device_tier, self.host_tier)

    @property
    def on_evict(self) -> list[EvictionHook]:
        """Hooks called before a node loses a copy. Append to the list to add one. They must not change the index."""
        return self._dropping.hooks

    # --- Counters: pages, O(1) ---

    @property
    def device_evictable(self) -> int:
        """Device pages that `evict_device` can free."""
        return self.device_tier.evictable

    @property
    def device_protected(self) -> int:
        """Device pages that receipts and loads keep. Pages in RECLAIMING are neither evictable nor protected."""
        return self.device_tier.protected

    @property
    def host_evictable(self) -> int:
        """Host pages that `evict_host` can free."""
        return self.host_tier.evictable

    @property
    def host_protected(self) -> int:
        """Host pages that receipts and loads keep."""
        return self.host_tier.protected

    @property
    def evicted_over_share(self) -> int:
        """Pages evicted so far, in both tiers, because their namespace was above its share."""
        return self._dropping.over_share

    # --- Finding ---

    def match(self, namespace: str, keys: bytes) -> MatchResult:
        """Return the longest cached prefix of `keys`, after a split if it ends within a node.

        Updates recency and hits of its nodes.
        """
        self._count_pages(keys)
        tree = self.tree
        width, end, at = tree.key_bytes, len(keys), 0
        tree.tick = tick = tree.tick + 1
        node = device_node = tree.root(namespace)
        while at < end:
            child = node.children.get(keys[at : at + width])
            if child is None or child.is_reclaiming:
                break
            if not keys.startswith(child.keys, at):
                child = tree.split(child, tree.shared_pages(child.keys, keys, at))
            node = child
            node.tick = tick
            node.hits += 1
            if node.device is not None:
                device_node = node
            at += len(node.keys)
        device_pages = device_node.depth_pages
        return MatchResult(device_pages, node.depth_pages - device_pages, device_node, node)

    def probe_prefix(self, namespace: str, keys: bytes, *, with_pending: bool = True) -> tuple[int, int]:
        """Return the numbers of device pages and of further host pages that `match` would find. Changes nothing.

        Without `with_pending`, device pages that a load has yet to fill are not counted.
        """
        self._count_pages(keys)
        is_on_device = True
        tree = self.tree
        width, end, at = tree.key_bytes, len(keys), 0
        device_pages = pages = 0
        node = tree.roots.get(namespace)
        while node is not None and at < end:
            child = node.children.get(keys[at : at + width])
            if child is None or child.is_reclaiming:
                break
            if child.load is not None and not with_pending:
                if child.host is None:
                    break
                is_on_device = False
            whole = keys.startswith(child.keys, at)
            pages += child.page_count if whole else tree.shared_pages(child.keys, keys, at)
            if child.device is not None and is_on_device:
                device_pages = pages
            at += len(child.keys)
            node = child if whole else None
        return device_pages, pages - device_pages

    def host_end(self, namespace: str, keys: bytes) -> Node:
        """Return the last node of the cached prefix of `keys` that has host pages, after a split if the prefix ends
        within it; perhaps a root. The prefix counts as no more recently used.
        """
        self._count_pages(keys)
        tree, at = self.tree, 0
        node = tree.root(namespace)
        while at < len(keys):
            child = node.children.get(keys[at : at + tree.key_bytes])
            if child is None or child.host is None or child.is_reclaiming:
                break
            if not keys.startswith(child.keys, at):
                return tree.split(child, tree.shared_pages(child.keys, keys, at))
            node = child
            at += len(child.keys)
        return node

    def heat_of(self, node: Node) -> tuple[int, int, int, int]:
        """Return the heat of a node in the form that another tree takes (`heat_from`): how many uses of the cache ago
        it was used and inserted, its hits and its priority.
        """
        tick = self.tree.tick
        return (tick - node.tick, tick - node.born, node.hits, node.priority)

    def heat_from(self, heat: tuple[int, int, int, int]) -> Heat:
        """Return the heat of a node of another tree, as it compares with nodes of this one.

        Uses are the measure, and not seconds: of two caches under the same load, that is how soon eviction comes. In a
        tree that is younger, ticks are below zero.
        """
        used, born, hits, priority = heat
        return Heat(self.tree.tick - used, self.tree.tick - born, hits, priority)

    def warm(self, node: Node, heat: Heat) -> None:
        """Make the path to `node` at least as hot as this."""
        for above in self.path(node):
            above.tick, above.born = max(above.tick, heat.tick), max(above.born, heat.born)
            above.hits, above.priority = max(above.hits, heat.hits), max(above.priority, heat.priority)

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from below the root down to `node`."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def device_path(self, node: Node) -> PageIds:
        """Return the device pages from the root to the end of `node`, as a new list."""
        pages = NO_PAGES[:]
        for above in self.path(node):
            if above.device is None:
                raise BrokenInvariant(f"{above} has no device pages")
            pages += above.device
        return pages

    def has_host(self, node: Node) -> bool:
        """Whether all pages down to the end of `node` are in host memory."""
        # By closure, a node with host pages has ancestors with host pages.
        return node.host is not None

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes except roots, parents first. The order depends only on the calls made so far."""
        return self.tree.nodes()

    # --- Receipts ---

    def lock(self, node: Node) -> Receipt:
        """Protect the device pages from the root to the end of `node` until the receipt is given back."""
        self.tree.require(node)
        if node.device is None:
            raise BrokenInvariant(f"{node} has no device pages to lock")
        node.anchored += 1
        self.device_tier.receipts += 1
        self.device_tier.guard(node)
        return Receipt(node, "device", self.tree)

    def unlock(self, receipt: Receipt) -> None:
        """Give back a receipt of `lock`."""
        node = redeem(receipt, "device", self.tree)
        node.anchored -= 1
        self.device_tier.receipts -= 1
        self.device_tier.unguard(node)
        if node.parent is None:
            self.tree.drop_empty_root(node)

    def pin(self, node: Node) -> Receipt:
        """Protect the host pages on the path from the root to `node` until the receipt is given back.

        The receipt is anchored at the last node of the path that has host pages.
        """
        self.tree.require(node)
        while node.host is None:
            assert node.parent is not None, "the root has an empty list of host pages"
            node = node.parent
        node.host_anchored += 1
        self.host_tier.receipts += 1
        self.host_tier.guard(node)
        return Receipt(node, "host", self.tree)

    def unpin(self, receipt: Receipt) -> None:
        """Give back a receipt of `pin`."""
        node = redeem(receipt, "host", self.tree)
        node.host_anchored -= 1
        self.host_tier.receipts -= 1
        self.host_tier.unguard(node)
        if node.parent is None:
            self.tree.drop_empty_root(node)

    # --- Growing ---

    def insert(self, namespace: str, keys: bytes, pages: PageIds, *, priority: int = 0) -> InsertResult:
        """Insert a complete prefix: device page `pages[i]` holds the page with the i-th key.

        The caller owns the pages, except those that are the tree's own pages at the same position. If the tree has
        another device page there, that one is used from now on; if it has a host page only, the caller's page becomes
        its device page; if it has none, a new node is added. The insert stops before pages in RECLAIMING, and before
        loading pages that are not the caller's. InsertResult states the owners afterwards. `priority` is a minimum
        for the nodes on the path.
        """
        count = self._count_pages(keys)
        if len(pages) != count:
            raise BrokenInvariant(f"{len(pages)} pages were given for {count} keys")
        return insert_prefix(self.tree, self.device_tier, self.tree.root(namespace), keys, pages, priority)

    def insert_host(self, node: Node, keys: bytes, pages: PageIds, *, heat: Heat | None = None) -> tuple[Node, PageIds]:
        """Insert host pages for `keys` below `node`. Returns the node where they end, and the pages not taken over.

        `heat` is that of pages that are new to the tree; None: they are used now.
        """
        self.tree.require(node)
        if node.host is None or len(pages) != self._count_pages(keys):
            raise BrokenInvariant(f"{len(pages)} host pages cannot be entered below {node}")
        return insert_host_pages(self.tree, self.host_tier, node, keys, pages, heat)

    def insert_pending(
        self,
        parent: Node,
        namespace: str,
        keys_suffix: bytes,
        device_pages: PageIds,
        load: NodeLoad | None = None,
        *,
        priority: int = 0,
    ) -> Node:
        """Add a child of `parent` whose device pages, taken over from the caller, `load` will fill."""
        count, first_key = self._count_pages(keys_suffix), keys_suffix[: self.tree.key_bytes]
        self.tree.require(parent)
        if parent.namespace != namespace:
            raise BrokenInvariant(f"{parent} is not of namespace {namespace!r}")
        if parent.device is None or parent.is_reclaiming:
            raise BrokenInvariant(f"{parent} has no device pages to add a child to")
        if not count or len(device_pages) != count:
            raise BrokenInvariant(f"{len(device_pages)} pages were given for {count} keys")
        if first_key in parent.children:
            raise BrokenInvariant(f"{parent} already has a child with the same first page")
        self.device_tier.pool.to_cache(device_pages)
        self.tree.tick += 1
        node = self.tree.add_child(parent, keys_suffix, 0, first_key, priority=priority)
        self.device_tier.attach(node, device_pages[:])
        self.set_load(node, load)
        return node

    def give_device(self, node: Node, pages: PageIds, load: NodeLoad | None = None) -> None:
        """Give a node with host pages only device pages, taken over from the caller, which `load` fills."""
        parent = self._parent_of(node)
        if node.device is not None or len(pages) != node.page_count:
            raise BrokenInvariant(f"{node} cannot be given {len(pages)} device pages")
        if parent.device is None or parent.is_reclaiming:
            raise BrokenInvariant(f"{parent}, above {node}, has no device pages")
        self.device_tier.pool.to_cache(pages)
        self.device_tier.attach(node, pages[:])
        self.set_load(node, load)

    def give_host(self, node: Node, pages: PageIds) -> None:
        """Give a node host pages, taken over from the caller, that hold its bytes."""
        parent = self._parent_of(node)
        if node.host is not None or len(pages) != node.page_count:
            raise BrokenInvariant(f"{node} cannot be given {len(pages)} host pages")
        if parent.host is None:
            raise BrokenInvariant(f"{parent}, above {node}, has no host pages")
        self.host_tier.pool.to_cache(pages)
        self.host_tier.attach(node, pages[:])
        if node.load is not None:
            self.host_tier.guard(node)

    # --- Marking ---

    def split(self, node: Node, page_count: int) -> Node:
        """Move the first `page_count` pages to a new node above `node`, and return it. `node` keeps the rest."""
        self._parent_of(node)
        if not 0 < page_count < node.page_count or node.is_reclaiming:
            raise BrokenInvariant(f"{node} cannot be split after {page_count} pages")
        return self.tree.split(node, page_count)

    def note_served(self, leaf: Node) -> None:
        """Count a request that became READY with the path to `leaf`."""
        node = leaf
        while node.parent is not None:
            node.served += 1
            node = node.parent

    def mark_stored(self, node: Node, *, renewed: int = 0) -> None:
        """Note that the node's pages are in the attached storage, which has renewed them in period `renewed`."""
        self._parent_of(node)
        if node.stored != self.tree.attachment or renewed > node.renewed:
            self.tree.touch(node)
        node.stored, node.renewed = self.tree.attachment, renewed

    def unmark_stored(self, node: Node) -> None:
        """Note that the attached storage does not have all of the node's pages."""
        self._parent_of(node)
        if node.stored == self.tree.attachment:
            node.stored = 0
            self.tree.touch(node)

    def forget_stored(self) -> None:
        """Forget which pages are in storage: it was exchanged, detached or emptied."""
        self.tree.attachment += 1

    def set_load(self, node: Node, load: NodeLoad | None) -> None:
        """Note that `load` fills the node's device pages; None ends the load.

        A load guards the device and host pages of its node.
        """
        if load is node.load:
            return
        self._parent_of(node)
        if node.device is None or node.is_reclaiming:
            raise BrokenInvariant(f"{node} has no device pages that a load could fill")
        before, node.load = node.load, load
        self.tree.touch(node)
        if before is None:
            self.device_tier.guard(node)
            if node.host is not None:
                self.host_tier.guard(node)
        elif load is None:
            self.device_tier.unguard(node)
            if node.host is not None:
                self.host_tier.unguard(node)

    def set_reclaiming(self, node: Node) -> None:
        """Give up the node's device pages while a writer may still write to them.

        The pages drain in place, no load fills them, and no match passes the node until `drop_reclaiming`.
        """
        self._parent_of(node)
        if node.device is None or node.is_reclaiming:
            raise BrokenInvariant(f"{node} has no device pages to reclaim")
        self.device_tier.pool.drain_cached(node.device)
        node.is_reclaiming = True
        self.tree.touch(node)
        # Pages in RECLAIMING hold one guard. A load's guard is reused for it; without a load, add one.
        if node.load is None:
            self.device_tier.guard(node)
        elif node.host is not None:
            self.host_tier.unguard(node)
        node.load = None
        self.device_tier.protected -= node.page_count

    # --- Shrinking ---

    def drop_reclaiming(self, node: Node) -> PageIds | None:
        """Remove the device pages of a node in RECLAIMING that has no writer any more.

        Returns the pages, still draining, for the caller to settle. Frees device copies below, which no match can
        reach. Returns None, with nothing changed, if a receipt, a load or another node in RECLAIMING at or below this
        node guards it.
        """
        self._parent_of(node)
        if not node.is_reclaiming:
            raise BrokenInvariant(f"{node} is not in RECLAIMING")
        # One guard is the node's own.
        if node.guarded > 1:
            return None
        return self._dropping.drop_reclaiming(node)

    def drop_device(self, node: Node) -> None:
        """Free the device pages of an unguarded node without device pages below it."""
        self._parent_of(node)
        if node.device is None or node.guarded or node.device_children:
            raise BrokenInvariant(f"{node} cannot lose its device pages: none, guarded, or needed by a child")
        self._dropping.drop(self.device_tier, node)

    def drop_host(self, node: Node) -> None:
        """Free the host pages of a node without host guards and without host pages below it."""
        self._parent_of(node)
        if node.host is None or node.host_guarded or node.host_children:
            raise BrokenInvariant(f"{node} cannot lose its host pages: none, guarded, or needed by a child")
        self._dropping.drop(self.host_tier, node)

    def drop_host_path(self, node: Node) -> None:
        """Free the host pages of a node and of all nodes below it. Does nothing if one of them has a host guard."""
        self._parent_of(node)
        # Guards count in all nodes above theirs.
        if node.host is not None and not node.host_guarded:
            for below in reversed([other for other in node.subtree() if other.host is not None]):
                self._dropping.drop(self.host_tier, below)

    def withdraw_device(self, node: Node) -> PageIds:
        """Return device pages that were given to a node and never written to the caller, without calling hooks."""
        self._parent_of(node)
        if node.device is None or node.guarded or node.device_children:
            raise BrokenInvariant(f"{node} cannot lose its device pages: none, guarded, or needed by a child")
        return self._dropping.withdraw(node)

    def first_to_go(self, tier: TierName, count: int) -> list[Node]:
        """Return the leaves that eviction would take next, until they hold `count` pages. Evicts nothing."""
        return (self.device_tier if tier == "device" else self.host_tier).queue.first(count)

    def evict_device(self, count: int) -> int:
        """Free at least `count` device pages, or all that are evictable; return their number. Host copies stay.

        Frees up to 2 % of the pool more than `count` if that avoids splitting the last victim (`Evictor.evict`).
        """
        return self._dropping.evict(self.device_tier, count)

    def evict_host(self, count: int) -> int:
        """Free at least `count` host pages, or all that are evictable; return their number. See `evict_device`."""
        return self._dropping.evict(self.host_tier, count)

    def flush(self, tier: TierName, namespace: str | None = None, *, count: int = ALL) -> tuple[int, int]:
        """Free evictable pages of a tier, or those that one namespace has there: at least `count`, or all. Returns the
        numbers of freed pages and, if that is fewer than `count`, of those that stay, since a receipt, a load or a
        writer needs them or pages behind them.
        """
        flushed: Tier = self.device_tier if tier == "device" else self.host_tier
        if namespace is None:
            return self._dropping.evict(flushed, min(count, flushed.evictable)), flushed.protected
        return self._dropping.drop_all(flushed, self._nodes_of(namespace), count)

    def edges_of(self, namespace: str) -> list[tuple[int, bytes]]:
        """Return the keys of each node of a namespace, with the place of its parent in this list; -1 for a root."""
        nodes = self._nodes_of(namespace)
        places = {node: place for place, node in enumerate(nodes)}
        return [(-1 if node.parent is None else places.get(node.parent, -1), node.edge) for node in nodes]

    def forget_stored_of(self, namespace: str) -> None:
        """Forget which pages of a namespace are in storage."""
        for node in self._nodes_of(namespace):
            self.unmark_stored(node)

    def _nodes_of(self, namespace: str) -> list[Node]:
        """Return the nodes of a namespace without its root, parents first."""
        root = self.tree.roots.get(namespace)
        return [] if root is None else [node for node in root.subtree() if node is not root]

    def check(self) -> None:
        """Recount everything from scratch, O(tree). Raises BrokenInvariant at the first contradiction."""
        check_index(self.tree, self.device_tier, self.host_tier)

    def _parent_of(self, node: Node) -> Node:
        if node.parent is None:
            raise BrokenInvariant(f"{node} is a root, or not in the tree")
        return node.parent

    def _count_pages(self, keys: bytes) -> int:
        width = self.tree.key_bytes
        if len(keys) % width:
            raise BrokenInvariant(f"{len(keys)} bytes are not a whole number of keys of {width} bytes")
        return len(keys) // width
