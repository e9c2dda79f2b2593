"""Taking copies out of the prefix index, one node at a time or as many as are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tidekv.states.prefix.node import Node, TierName
from tidekv.states.prefix.tiers import DeviceTier, HostTier, Tier
from tidekv.states.prefix.tree import PageTree
from tidekv.states.types import PageIds

EvictionHook: TypeAlias = Callable[[Node, TierName], None]
"""Told of a node's copy before it goes. It must not change the index."""

SLACK_PER_POOL = 50


class Evictor:
    """How copies leave the tree: the hooks hear of it, the pages change hands, and a node without copies goes too."""

    __slots__ = ("_device", "_host", "_tree", "hooks")

    def __init__(self, tree: PageTree, device: DeviceTier, host: HostTier) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self.hooks: list[EvictionHook] = []

    def evict(self, tier: Tier, count: int) -> int:
        """Free `count` pages, or all that are evictable, by the policy's order; returns how many.

        Up to one page in SLACK_PER_POOL of the pool (2 %) is freed beyond `count`, rather than cutting the last victim
        in two: a cut costs as much as the rest of an eviction, and the next request needs pages as well. The tail of a
        short prompt can therefore be evicted as a whole.
        """
        freed: PageIds | None = None
        freed_count = 0
        queue, account, name = tier.queue, tier.account, tier.name
        slack = account.total // SLACK_PER_POOL
        try:
            while freed_count < count and (node := queue.pop()) is not None:
                try:
                    surplus = freed_count + node.page_count - count
                    # Void pages are one piece for whoever waits for them.
                    if surplus > slack and not node.void:
                        self._tree.split(node, surplus, lower_stays=node.device is not None and node.host is not None)
                    self._tell(node, name)
                except BaseException:
                    # A hook raised: this victim stays, and can be evicted as before.
                    queue.push(node)
                    raise
                freed_count += node.page_count
                pages = tier.detach(node)
                if freed is None:
                    freed = pages
                else:
                    freed += pages
                self._remove_if_bare(node)
        finally:
            # Also after a raise: the victims so far have left the tree, and nothing else knows their pages.
            if freed is not None:
                account.from_cache(freed)
        return freed_count

    def drop(self, tier: Tier, node: Node) -> None:
        """Free this copy of an unguarded node that has none below it."""
        self._tell(node, tier.name)
        tier.account.from_cache(tier.detach(node))
        self._remove_if_bare(node)

    def withdraw(self, node: Node) -> PageIds:
        """Take the device copy from an unguarded node that has none below it; the caller owns the pages."""
        pages = self._device.detach(node)
        self._device.account.own_cached(pages)
        self._remove_if_bare(node)
        return pages

    def drop_reclaiming(self, node: Node) -> PageIds:
        """Take a void node's device pages, which are draining, out of the tree, and free what is below them."""
        below = [other for other in node.subtree() if other.device is not None and other is not node]
        for other in reversed(below):
            self.drop(self._device, other)
        self._tell(node, "device")
        node.void = False
        self._device.protected += node.page_count
        self._device.unguard(node)
        pages = self._device.detach(node)
        self._remove_if_bare(node)
        return pages

    def _tell(self, node: Node, tier: TierName) -> None:
        for hook in self.hooks:
            hook(node, tier)

    def _remove_if_bare(self, node: Node) -> None:
        if node.device is None and node.host is None:
            self._tree.remove(node)
            self._device.queue.forget(node)
            self._host.queue.forget(node)
