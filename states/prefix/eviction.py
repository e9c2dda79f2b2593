"""Removal of copies from the prefix index: by eviction, one node at a time, or after RECLAIMING."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from tidekv.states.prefix.node import Node, PageTree, TierName
from tidekv.states.prefix.tiers import DeviceTier, HostTier, Tier
from tidekv.states.types import PageIds

EvictionHook: TypeAlias = Callable[[Node, TierName], None]
"""Called before a node loses its copy in a tier. It must not change the index."""

SLACK_PER_POOL = 50
"""An eviction may free one page in so many of the pool beyond what was asked for."""


class Evictor:
    """Removes copies from the tree: calls the hooks, settles the pages, and removes nodes that have no copy left."""

    __slots__ = ("_device", "_host", "_tree", "hooks", "over_share")

    def __init__(self, tree: PageTree, device: DeviceTier, host: HostTier) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self.hooks: list[EvictionHook] = []
        self.over_share = 0
        """Pages evicted so far because their namespace was above its share."""

    def evict(self, tier: Tier, count: int) -> int:
        """Free `count` pages, or all that are evictable, in the policy's order; return their number.

        Frees up to one page in SLACK_PER_POOL of the pool (2 %) beyond `count` rather than splitting the last victim: a
        split costs as much as the rest of an eviction, and the next request needs pages as well. The end of a short
        prompt can therefore be evicted as a whole. A namespace above its share loses no more than that either, before
        the policy decides among all.
        """
        freed: PageIds | None = None
        freed_count = 0
        queue, pool, name = tier.queue, tier.pool, tier.name
        slack = pool.total // SLACK_PER_POOL
        try:
            while freed_count < count and (node := queue.pop()) is not None:
                try:
                    surplus = freed_count + node.page_count - count
                    excess = 0 if tier.shares is None else tier.shares.excess(node.namespace)
                    if excess:
                        surplus = max(surplus, node.page_count - excess)
                    # A node in RECLAIMING is never split: its load returns its pages as a whole.
                    if surplus > slack and not node.is_reclaiming:
                        self._tree.split(node, surplus, lower_stays=node.device is not None and node.host is not None)
                    self._run_hooks(node, name)
                except BaseException:
                    # A hook raised: this victim stays, and must be in the queue to be evicted later.
                    queue.push(node)
                    raise
                freed_count += node.page_count
                self.over_share += min(node.page_count, excess)
                pages = tier.detach(node)
                if freed is None:
                    freed = pages
                else:
                    freed += pages
                self._remove_if_bare(node)
        finally:
            # Also after an exception: the victims so far have left the tree, and no other record has their pages.
            if freed is not None:
                pool.from_cache(freed)
        return freed_count

    def drop(self, tier: Tier, node: Node) -> None:
        """Free the copy of an unguarded node without such copies below it."""
        self._run_hooks(node, tier.name)
        tier.pool.from_cache(tier.detach(node))
        self._remove_if_bare(node)

    def drop_all(self, tier: Tier, nodes: Sequence[Node], count: int) -> tuple[int, int]:
        """Free the copies of these nodes, parents first, that are ready to be evicted once those below are gone: at
        least `count` pages, or all. Returns the numbers of pages freed and, if that is all, of pages that stay.
        """
        freed = stayed = 0
        for node in reversed(nodes):
            if freed >= count:
                break
            if (node.device if tier is self._device else node.host) is None:
                continue
            if tier.is_ready(node):
                freed += node.page_count
                self.drop(tier, node)
            else:
                stayed += node.page_count
        return freed, stayed

    def withdraw(self, node: Node) -> PageIds:
        """Remove the device copy of an unguarded node without device copies below it; the caller owns the pages."""
        pages = self._device.detach(node)
        self._device.pool.own_cached(pages)
        self._remove_if_bare(node)
        return pages

    def drop_reclaiming(self, node: Node) -> PageIds:
        """Remove the device pages, still draining, of a node in RECLAIMING, and free the device copies below it."""
        # By closure, no node below may keep a device copy when this one loses its own.
        below = [other for other in node.subtree() if other.device is not None and other is not node]
        for other in reversed(below):
            self.drop(self._device, other)
        self._run_hooks(node, "device")
        # `set_reclaiming` took the pages out of `protected`. Add them, since `unguard` moves them to `evictable`, from
        # where `detach` takes them.
        node.is_reclaiming = False
        self._device.protected += node.page_count
        self._device.unguard(node)
        pages = self._device.detach(node)
        self._remove_if_bare(node)
        return pages

    def _run_hooks(self, node: Node, tier: TierName) -> None:
        for hook in self.hooks:
            hook(node, tier)

    def _remove_if_bare(self, node: Node) -> None:
        if node.device is None and node.host is None:
            self._tree.remove(node)
            self._device.queue.forget(node)
            self._host.queue.forget(node)
