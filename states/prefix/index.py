"""The prefix index: which prefixes have their pages in device or host memory. A radix tree over pages.

One tree a namespace; below its root each node holds a run of pages with their keys and one page list a copy.
Keys are opaque and of fixed width; whole edges are compared by one call, and only a mismatch is searched for its page.

What always holds (`check` recounts it):

- Children of a node differ in their first page; they are found by it.
- Closure: a node with device pages has a parent with device pages, and so for host pages. A path therefore reads, from
  the root: device (and maybe host) pages, then pages in host memory alone.
- A node without any copy is not in the tree.
- A guarded node keeps its pages: receipts, loads and void pages guard their node and all above it.

Matching splits nodes so that what was matched ends at a node. In a split the lower part stays the same object, with the
receipts that are anchored there; the new upper part gets the first pages. All walks are loops, however deep the tree.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.eviction import EvictionHook, Evictor
from tidekv.states.prefix.insertion import insert_host_pages, insert_prefix
from tidekv.states.prefix.invariants import check_index
from tidekv.states.prefix.node import InsertResult, Load, MatchResult, Node, Receipt, TierName, redeem
from tidekv.states.prefix.policies import LRU, EvictionPolicy
from tidekv.states.prefix.tiers import DeviceTier, HostTier, Tier
from tidekv.states.prefix.tree import PageTree
from tidekv.states.types import NO_PAGES, PageIds

__all__ = ["EvictionHook", "InsertResult", "Load", "MatchResult", "Node", "PrefixIndex", "Receipt"]


class PrefixIndex:
    """The prefix index over a device account and a host account. Wrong calls raise BrokenInvariant: they are our bugs.

    `key_bytes` is the width of one page's key.
    """

    def __init__(self, *, key_bytes: int, device: PagePool, host: PagePool, policy: EvictionPolicy = LRU) -> None:
        self.tree = PageTree(key_bytes)
        self.device_tier = DeviceTier(device, policy)
        self.host_tier = HostTier(host, policy)
        self._dropping = Evictor(self.tree, self.device_tier, self.host_tier)

    @property
    def on_evict(self) -> list[EvictionHook]:
        """Hooks that are told of a node's copy before it goes; add yours here. They must not change the index."""
        return self._dropping.hooks

    # --- Counters: pages, O(1) ---

    @property
    def device_evictable(self) -> int:
        """Device pages that `evict_device` can free."""
        return self.device_tier.evictable

    @property
    def device_protected(self) -> int:
        """Device pages that receipts and loads keep. Void pages count nowhere."""
        return self.device_tier.protected

    @property
    def host_evictable(self) -> int:
        """Host pages that `evict_host` can free."""
        return self.host_tier.evictable

    @property
    def host_protected(self) -> int:
        """Host pages that receipts and loads keep."""
        return self.host_tier.protected

    # --- Finding ---

    def match(self, namespace: str, keys: bytes) -> MatchResult:
        """Find the longest prefix of `keys` and make its end a node. Its nodes were used now, and hit once more."""
        self._count_pages(keys)
        tree = self.tree
        width, end, at = tree.key_bytes, len(keys), 0
        tree.tick = tick = tree.tick + 1
        node = device_node = tree.root(namespace)
        while at < end:
            child = node.children.get(keys[at : at + width])
            if child is None or child.void:
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
        """Tell the lengths that `match` would find, in device and further in host pages, changing nothing at all.

        Without `with_pending`, device pages that a load is still to fill are not counted.
        """
        self._count_pages(keys)
        is_on_device = True
        tree = self.tree
        width, end, at = tree.key_bytes, len(keys), 0
        device_pages = pages = 0
        node = tree.roots.get(namespace)
        while node is not None and at < end:
            child = node.children.get(keys[at : at + width])
            if child is None or child.void:
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

    def path(self, node: Node) -> list[Node]:
        """List the nodes from below the root down to `node`."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def device_path(self, node: Node) -> PageIds:
        """List the device pages from the root to the end of `node`; the list is the caller's."""
        pages = NO_PAGES[:]
        for above in self.path(node):
            if above.device is None:
                raise BrokenInvariant(f"{above} has no device pages")
            pages += above.device
        return pages

    def has_host(self, node: Node) -> bool:
        """Tell whether everything down to the end of `node` is in host memory."""
        return node.host is not None

    def has_child(self, parent: Node, namespace: str, first_key: bytes) -> bool:
        """Tell whether a child of `parent` begins with the page of this key, void or not."""
        if parent.namespace != namespace:
            raise BrokenInvariant(f"{parent} is not of namespace {namespace!r}")
        return first_key in parent.children

    def nodes(self) -> Iterator[Node]:
        """Walk all nodes but the roots, parents first, in an order that depends on the calls made so far alone."""
        return self.tree.nodes()

    # --- Receipts ---

    def lock(self, node: Node) -> Receipt:
        """Protect the device pages from the root down to the end of `node` until the receipt is given back."""
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
        """Protect what host pages there are from the root down to the end of `node` until the receipt is given back.

        The receipt is anchored where they end.
        """
        self.tree.require(node)
        while node.host is None:
            assert node.parent is not None, "a root has host pages, though none"
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
        """Enter a prefix whose every page is in place: `pages[i]` holds what `keys` say of page `i`.

        The caller owns the pages, but for those that are the tree's very pages at their position. Where the tree has
        another device page, the tree's is used from now on; where it has a host page only, ours becomes its device
        page; what it does not have becomes a new node. It stops before void pages, and before pages under load that are
        not ours. See Inserted for who owns what then. `priority` raises that of the nodes on the path.
        """
        count = self._count_pages(keys)
        if len(pages) != count:
            raise BrokenInvariant(f"{len(pages)} pages were given for {count} keys")
        return insert_prefix(self.tree, self.device_tier, self.tree.root(namespace), keys, pages, priority)

    def insert_host(self, node: Node, keys: bytes, pages: PageIds) -> tuple[Node, PageIds]:
        """Enter host pages for the keys that follow `node`; tells where they end, and which stay the caller's."""
        self.tree.require(node)
        if node.host is None or len(pages) != self._count_pages(keys):
            raise BrokenInvariant(f"{len(pages)} host pages cannot be entered below {node}")
        return insert_host_pages(self.tree, self.host_tier, node, keys, pages)

    def insert_pending(
        self,
        parent: Node,
        namespace: str,
        keys_suffix: bytes,
        device_pages: PageIds,
        load: Load | None = None,
        *,
        priority: int = 0,
    ) -> Node:
        """Add a child of `parent` whose device pages, the caller's until now, are about to be filled by `load`."""
        count, first_key = self._count_pages(keys_suffix), keys_suffix[: self.tree.key_bytes]
        self.tree.require(parent)
        if parent.namespace != namespace:
            raise BrokenInvariant(f"{parent} is not of namespace {namespace!r}")
        if parent.device is None or parent.void:
            raise BrokenInvariant(f"{parent} has no device pages to go on from")
        if not count or len(device_pages) != count:
            raise BrokenInvariant(f"{len(device_pages)} pages were given for {count} keys")
        if first_key in parent.children:
            raise BrokenInvariant(f"{parent} has a child with that first page")
        self.device_tier.account.to_cache(device_pages)
        self.tree.tick += 1
        node = self.tree.add_child(parent, keys_suffix, 0, first_key, priority=priority)
        self.device_tier.attach(node, device_pages[:])
        self.set_load(node, load)
        return node

    def give_device(self, node: Node, pages: PageIds, load: Load | None = None) -> None:
        """Give a node that is in host memory alone device pages, the caller's until now, which `load` fills."""
        parent = self._parent_of(node)
        if node.device is not None or len(pages) != node.page_count:
            raise BrokenInvariant(f"{node} cannot be given {len(pages)} device pages")
        if parent.device is None or parent.void:
            raise BrokenInvariant(f"{parent}, above {node}, has no device pages")
        self.device_tier.account.to_cache(pages)
        self.device_tier.attach(node, pages[:])
        self.set_load(node, load)

    def give_host(self, node: Node, pages: PageIds) -> None:
        """Give a node host pages that hold its bytes, the caller's until now."""
        parent = self._parent_of(node)
        if node.host is not None or len(pages) != node.page_count:
            raise BrokenInvariant(f"{node} cannot be given {len(pages)} host pages")
        if parent.host is None:
            raise BrokenInvariant(f"{parent}, above {node}, has no host pages")
        self.host_tier.account.to_cache(pages)
        self.host_tier.attach(node, pages[:])
        if node.load is not None:
            self.host_tier.guard(node)

    # --- Marking ---

    def split(self, node: Node, page_count: int) -> Node:
        """Cut the first `page_count` pages off into a new node above `node`, and return that. `node` keeps the rest."""
        self._parent_of(node)
        if not 0 < page_count < node.page_count or node.void:
            raise BrokenInvariant(f"{node} cannot be split after {page_count} pages")
        return self.tree.split(node, page_count)

    def note_served(self, leaf: Node) -> None:
        """A request was served with everything down to `leaf`."""
        node = leaf
        while node.parent is not None:
            node.served += 1
            node = node.parent

    def mark_stored(self, node: Node) -> None:
        """Note that the node's pages are in storage."""
        self._parent_of(node)
        node.stored = self.tree.attachment
        self.tree.touch(node)

    def forget_stored(self) -> None:
        """Another storage is attached: of no node it is known that its pages are there."""
        self.tree.attachment += 1

    def set_load(self, node: Node, load: Load | None) -> None:
        """Note that `load` fills the node's device pages, or with None that it is over.

        A load guards the pages of its node, those in host memory too.
        """
        if load is node.load:
            return
        self._parent_of(node)
        if node.device is None or node.void:
            raise BrokenInvariant(f"{node} has no device pages that could be under load")
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
        """Give the node's device pages up while somebody may still write to them: they drain in place (the account's
        condition is changed here), no load fills them, and no match passes the node until `drop_reclaiming`.
        """
        self._parent_of(node)
        if node.device is None or node.void:
            raise BrokenInvariant(f"{node} has no device pages that could be given up")
        self.device_tier.account.drain_cached(node.device)
        node.void = True
        self.tree.touch(node)
        # The guard of the load, if there was one, goes on as that of the void pages.
        if node.load is None:
            self.device_tier.guard(node)
        elif node.host is not None:
            self.host_tier.unguard(node)
        node.load = None
        self.device_tier.protected -= node.page_count

    # --- Shrinking ---

    def drop_reclaiming(self, node: Node) -> PageIds | None:
        """Take void pages out of the tree, once nobody can write to them: they are returned, still draining, for the
        caller to settle. Device copies below, which no match can reach, are freed. None, and nothing is changed, where
        a receipt, load or void node at or below the node stands against it.
        """
        self._parent_of(node)
        if not node.void:
            raise BrokenInvariant(f"{node} is not void")
        if node.guarded > 1:
            return None
        return self._dropping.drop_reclaiming(node)

    def drop_device(self, node: Node) -> None:
        """Free the device pages of a node that nothing guards and that has none below it."""
        self._parent_of(node)
        if node.device is None or node.guarded or node.device_children:
            raise BrokenInvariant(f"{node} cannot lose its device pages: none, guarded, or needed by a child")
        self._dropping.drop(self.device_tier, node)

    def drop_host(self, node: Node) -> None:
        """Free the host pages of a node that nothing guards there and that has none below it."""
        self._parent_of(node)
        if node.host is None or node.host_guarded or node.host_children:
            raise BrokenInvariant(f"{node} cannot lose its host pages: none, guarded, or needed by a child")
        self._dropping.drop(self.host_tier, node)

    def withdraw_device(self, node: Node) -> PageIds:
        """Take back device pages that were given and never written: they are the caller's again. Nobody is told."""
        self._parent_of(node)
        if node.device is None or node.guarded or node.device_children:
            raise BrokenInvariant(f"{node} cannot lose its device pages: none, guarded, or needed by a child")
        return self._dropping.withdraw(node)

    def first_to_go(self, tier: TierName, count: int) -> list[Node]:
        """List the leaves of a tier that eviction would take first, until they hold `count` pages; takes none."""
        return (self.device_tier if tier == "device" else self.host_tier).queue.first(count)

    def evict_device(self, count: int) -> int:
        """Free at least `count` device pages, or all that are evictable; returns how many. What is in host memory too
        stays there. Up to 2 % of the pool more is freed than needed: the last victim is cut in two only beyond that.
        """
        return self._dropping.evict(self.device_tier, count)

    def evict_host(self, count: int) -> int:
        """Free at least `count` host pages, or all that are evictable; returns how many. See `evict_device`."""
        return self._dropping.evict(self.host_tier, count)

    def flush(self, tier: TierName) -> tuple[int, int]:
        """Free all evictable pages of a tier; returns how many, and how many were spared because they are protected."""
        books: Tier = self.device_tier if tier == "device" else self.host_tier
        return self._dropping.evict(books, books.evictable), books.protected

    def check(self) -> None:
        """Recount everything from scratch, O(tree); raises BrokenInvariant, in words, at the first contradiction."""
        check_index(self.tree, self.device_tier, self.host_tier)

    def _parent_of(self, node: Node) -> Node:
        if node.parent is None:
            raise BrokenInvariant(f"{node} is a root, or not in the tree")
        return node.parent

    def _count_pages(self, keys: bytes) -> int:
        width = self.tree.key_bytes
        if len(keys) % width:
            raise BrokenInvariant(f"{len(keys)} bytes are no whole number of keys of {width}")
        return len(keys) // width
