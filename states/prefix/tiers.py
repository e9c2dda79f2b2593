"""The books of one tier of the prefix index: which pages are evictable, which are protected, who may go next.

The two classes say the same thing about a node's device side and its host side. They are spelled out because they are
the hottest lines of a step, and reaching a slot by a name in a variable costs twice as much.

Guards are counted where a receipt is anchored and once per guarded child, so that a walk towards the root ends at the
first node that is guarded anyway: locking below a shared prefix costs as much as the part that is not shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.node import Node, TierName
from tidekv.states.prefix.policies import EvictionPolicy, EvictionQueue
from tidekv.states.types import PageIds


class Tier(ABC):
    """What the index needs of a tier's books."""

    __slots__ = ("account", "dirty_nodes", "evictable", "name", "protected", "queue", "receipts")

    def __init__(self, name: TierName, account: PagePool, policy: EvictionPolicy) -> None:
        self.name = name
        self.account = account
        self.evictable = 0
        self.protected = 0
        self.receipts = 0
        self.queue = EvictionQueue(policy, self.is_ready)
        self.dirty_nodes: dict[Node, None] | None = None
        """See `tidekv.engine.kv_events.watcher`."""

    @abstractmethod
    def is_ready(self, node: Node) -> bool:
        """Tell whether this copy of the node may be evicted now: an unguarded leaf of the tier."""

    @abstractmethod
    def guard(self, node: Node) -> None:
        """Count one more reason why the node's copy, and those above it, must stay."""

    @abstractmethod
    def unguard(self, node: Node) -> None:
        """Count one reason less."""

    @abstractmethod
    def attach(self, node: Node, pages: PageIds) -> None:
        """Give the node this copy. The pages are cached already; the node is not guarded."""

    @abstractmethod
    def detach(self, node: Node) -> PageIds:
        """Take this copy from an unguarded node without such children, and return its pages, which are still cached."""


class DeviceTier(Tier):
    """The books of device pages."""

    __slots__ = ()

    def __init__(self, account: PagePool, policy: EvictionPolicy) -> None:
        super().__init__("device", account, policy)

    def is_ready(self, node: Node) -> bool:
        """See Tier."""
        return not node.guarded and not node.device_children and node.device is not None and node.parent is not None

    def guard(self, node: Node) -> None:
        """See Tier."""
        while True:
            guarded = node.guarded
            node.guarded = guarded + 1
            if guarded:
                return
            self.evictable -= node.page_count
            self.protected += node.page_count
            parent = node.parent
            if parent is None:
                return
            node = parent

    def unguard(self, node: Node) -> None:
        """See Tier."""
        while True:
            guarded = node.guarded = node.guarded - 1
            if guarded:
                return
            self.evictable += node.page_count
            self.protected -= node.page_count
            parent = node.parent
            if parent is None:
                return
            if not node.device_children:
                self.queue.push(node)
            node = parent

    def attach(self, node: Node, pages: PageIds) -> None:
        """See Tier."""
        assert node.device is None and node.parent is not None and not node.guarded and not node.device_children, node
        node.device = pages
        node.parent.device_children += 1
        self.evictable += node.page_count
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
        if self.dirty_nodes is not None:
            self.dirty_nodes[node] = None
        return pages


class HostTier(Tier):
    """The books of host pages."""

    __slots__ = ()

    def __init__(self, account: PagePool, policy: EvictionPolicy) -> None:
        super().__init__("host", account, policy)

    def is_ready(self, node: Node) -> bool:
        """See Tier."""
        return not node.host_guarded and not node.host_children and node.host is not None and node.parent is not None

    def guard(self, node: Node) -> None:
        """See Tier."""
        while True:
            guarded = node.host_guarded
            node.host_guarded = guarded + 1
            if guarded:
                return
            self.evictable -= node.page_count
            self.protected += node.page_count
            parent = node.parent
            if parent is None:
                return
            node = parent

    def unguard(self, node: Node) -> None:
        """See Tier."""
        while True:
            guarded = node.host_guarded = node.host_guarded - 1
            if guarded:
                return
            self.evictable += node.page_count
            self.protected -= node.page_count
            parent = node.parent
            if parent is None:
                return
            if not node.host_children:
                self.queue.push(node)
            node = parent

    def attach(self, node: Node, pages: PageIds) -> None:
        """See Tier."""
        assert node.host is None and node.parent is not None and not node.host_guarded and not node.host_children, node
        node.host = pages
        node.parent.host_children += 1
        self.evictable += node.page_count
        self.queue.push(node)
        if self.dirty_nodes is not None:
            self.dirty_nodes[node] = None

    def detach(self, node: Node) -> PageIds:
        """See Tier."""
        pages, parent = node.host, node.parent
        assert pages is not None and parent is not None and not node.host_guarded and not node.host_children, node
        node.host = None
        self.evictable -= node.page_count
        parent.host_children -= 1
        if not parent.host_children and not parent.host_guarded and parent.parent is not None:
            self.queue.push(parent)
        if self.dirty_nodes is not None:
            self.dirty_nodes[node] = None
        return pages
