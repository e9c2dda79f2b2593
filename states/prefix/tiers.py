"""The tiers of the prefix index: evictable and protected pages, and the nodes that may be evicted next.

The two classes have the same rules, for the device side and the host side of a node. They are written out twice because
these are the hottest lines of a step, and access to a slot by a name in a variable costs twice as much.

A guard is counted at the node where a receipt is anchored, and once per guarded child at each node above. A walk
towards the root stops at the first node that was guarded before, so the cost of a lock below a shared prefix only
depends on the part that is not shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.namespace_shares import SharedEvictionQueue
from tidekv.states.prefix.node import Node, TierName
from tidekv.states.prefix.policies import EvictionPolicy, EvictionQueue
from tidekv.states.types import PageIds


class Tier(ABC):
    """Counters, eviction queue and page pool of one tier."""

    __slots__ = ("dirty_nodes", "evictable", "name", "pool", "protected", "queue", "receipts", "shares")

    def __init__(self, name: TierName, pool: PagePool, policy: EvictionPolicy, namespace_share: float) -> None:
        """`namespace_share` below 1 is the part of the pool above which a namespace loses pages first."""
        self.name = name
        self.pool = pool
        self.evictable = 0
        self.protected = 0
        self.receipts = 0
        self.shares: SharedEvictionQueue | None = None
        """The queue, if namespaces have shares."""
        if namespace_share < 1:
            self.shares = SharedEvictionQueue(policy, self.is_ready, max(int(namespace_share * pool.total), 1))
        self.queue = EvictionQueue(policy, self.is_ready) if self.shares is None else self.shares
        self.dirty_nodes: dict[Node, None] | None = None
        """Nodes that have changed, for `tidekv.engine.kv_events.watcher`. None if there is no watcher."""

    @abstractmethod
    def is_ready(self, node: Node) -> bool:
        """Whether this copy of the node may be evicted: it is an unguarded leaf of the tier."""

    @abstractmethod
    def guard(self, node: Node) -> None:
        """Add a guard: the node's copy and those above it must stay."""

    @abstractmethod
    def unguard(self, node: Node) -> None:
        """Remove a guard."""

    @abstractmethod
    def attach(self, node: Node, pages: PageIds) -> None:
        """Give the node this copy. The pages must be cached in the pool already, the node must not be guarded."""

    @abstractmethod
    def detach(self, node: Node) -> PageIds:
        """Remove this copy of an unguarded node without such children. Returns its pages, still cached in the pool."""


class DeviceTier(Tier):
    """The device tier."""

    __slots__ = ()

    def __init__(self, pool: PagePool, policy: EvictionPolicy, namespace_share: float = 1.0) -> None:
        super().__init__("device", pool, policy, namespace_share)

    def is_ready(self, node: Node) -> bool:
        """See Tier."""
        return not node.guarded and not node.device_children and node.device is not None and node.parent is not None

    def guard(self, node: Node) -> None:
        """See Tier."""
        pages = 0
        above: Node | None = node
        while above is not None:
            guarded = above.guarded
            above.guarded = guarded + 1
            if guarded:
                break
            pages += above.page_count
            above = above.parent
        self.evictable -= pages
        self.protected += pages

    def unguard(self, node: Node) -> None:
        """See Tier."""
        pages = 0
        above: Node | None = node
        while above is not None:
            guarded = above.guarded = above.guarded - 1
            if guarded:
                break
            pages += above.page_count
            parent = above.parent
            if parent is not None and not above.device_children:
                self.queue.push(above)
            above = parent
        self.evictable += pages
        self.protected -= pages

    def attach(self, node: Node, pages: PageIds) -> None:
        """See Tier."""
        assert node.device is None and node.parent is not None and not node.guarded and not node.device_children, node
        node.device = pages
        node.parent.device_children += 1
        self.evictable += node.page_count
        if self.shares is not None:
            self.shares.count_pages(node.namespace, node.page_count)
        self.queue.push(node)
        if self.dirty_nodes is not None:
            self.dirty_nodes[node] = None

    def detach(self, node: Node) -> PageIds:
        """See Tier."""
        pages, parent = node.device, node.parent
        assert pages is not None and parent is not None and not node.guarded and not node.device_children, node
        node.device = None
        self.evictable -= node.page_count
        parent.device_children -= 1
        if not parent.device_children and not parent.guarded and parent.parent is not None:
            self.queue.push(parent)
        if self.shares is not None:
            self.shares.count_pages(node.namespace, -node.page_count)
        if self.dirty_nodes is not None:
            self.dirty_nodes[node] = None
        return pages


class HostTier(Tier):
    """The host tier."""

    __slots__ = ("on_attach",)

    def __init__(self, pool: PagePool, policy: EvictionPolicy, namespace_share: float = 1.0) -> None:
        super().__init__("host", pool, policy, namespace_share)
        self.on_attach: Callable[[Node], None] | None = None
        """Called with each node that has got host pages, whose bytes are complete. It must not change the index."""

    def is_ready(self, node: Node) -> bool:
        """See Tier."""
        return not node.host_guarded and not node.host_children and node.host is not None and node.parent is not None

    def guard(self, node: Node) -> None:
        """See Tier."""
        pages = 0
        above: Node | None = node
        while above is not None:
            guarded = above.host_guarded
            above.host_guarded = guarded + 1
            if guarded:
                break
            pages += above.page_count
            above = above.parent
        self.evictable -= pages
        self.protected += pages

    def unguard(self, node: Node) -> None:
        """See Tier."""
        pages = 0
        above: Node | None = node
        while above is not None:
            guarded = above.host_guarded = above.host_guarded - 1
            if guarded:
                break
            pages += above.page_count
            parent = above.parent
            if parent is not None and not above.host_children:
                self.queue.push(above)
            above = parent
        self.evictable += pages
        self.protected -= pages

    def attach(self, node: Node, pages: PageIds) -> None:
        """See Tier."""
        assert node.host is None and node.parent is not None and not node.host_guarded and not node.host_children, node
        node.host = pages
        node.parent.host_children += 1
        self.evictable += node.page_count
        if self.shares is not None:
            self.shares.count_pages(node.namespace, node.page_count)
        self.queue.push(node)
        if self.dirty_nodes is not None:
            self.dirty_nodes[node] = None
        if self.on_attach is not None:
            self.on_attach(node)

    def detach(self, node: Node) -> PageIds:
        """See Tier."""
        pages, parent = node.host, node.parent
        assert pages is not None and parent is not None and not node.host_guarded and not node.host_children, node
        node.host = None
        self.evictable -= node.page_count
        parent.host_children -= 1
        if not parent.host_children and not parent.host_guarded and parent.parent is not None:
            self.queue.push(parent)
        if self.shares is not None:
            self.shares.count_pages(node.namespace, -node.page_count)
        if self.dirty_nodes is not None:
            self.dirty_nodes[node] = None
        return pages
