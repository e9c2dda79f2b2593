"""Shares of namespaces in one tier: eviction takes from namespaces above their share before it takes from others.

A share is not a reservation. A namespace may fill a tier that no other uses; it then loses pages first, down to its
share, when pages are needed. Within a namespace, and among namespaces within their shares, the policy decides.

Each evictable node is in two queues: one for the whole tier, and one for its namespace, which is only used while that
is above its share. A node that one of them returned may still be in the other, which skips it if it is not ready.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.errors import BrokenInvariant
from tidekv.states.prefix.policies import EvictionPolicy, EvictionQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tidekv.states.prefix.node import Node


class SharedEvictionQueue(EvictionQueue):
    """The evictable nodes of one tier in the order of eviction, with a maximum of `share_pages` for each namespace."""

    __slots__ = ("_build", "_by_namespace", "_over", "_pages", "share_pages")

    def __init__(self, policy: EvictionPolicy, is_ready: Callable[[Node], bool], share_pages: int) -> None:
        super().__init__(policy, is_ready)
        self.share_pages = share_pages
        self._build = partial(EvictionQueue, policy, is_ready)
        self._pages: dict[str, int] = {}
        """Pages in the tier by namespace, evictable or not."""
        self._by_namespace: dict[str, EvictionQueue] = {}
        self._over: dict[str, None] = {}
        """Namespaces above their share, in the order in which they exceeded it."""

    def count_pages(self, namespace: str, change: int) -> None:
        """Note that pages of a namespace have entered the tier, or left it."""
        pages = self._pages.get(namespace, 0) + change
        if pages > self.share_pages:
            self._over[namespace] = None
        else:
            self._over.pop(namespace, None)
        if pages:
            self._pages[namespace] = pages
        else:
            self._pages.pop(namespace, None)
            self._by_namespace.pop(namespace, None)

    def excess(self, namespace: str) -> int:
        """Return the pages of a namespace above its share."""
        return max(self._pages.get(namespace, 0) - self.share_pages, 0)

    def push(self, node: Node) -> None:
        """See EvictionQueue."""
        super().push(node)
        queue = self._by_namespace.get(node.namespace)
        if queue is None:
            queue = self._by_namespace[node.namespace] = self._build()
        queue.push(node)

    def pop(self) -> Node | None:
        """Remove and return the first ready node of the namespaces above their shares; without any, of all."""
        for namespace in self._over:
            queue = self._by_namespace.get(namespace)
            node = None if queue is None else queue.pop()
            if node is not None:
                return node
        return super().pop()

    def first(self, page_count: int) -> list[Node]:
        """See EvictionQueue. A namespace above its share is first only as far as it is above."""
        chosen: dict[Node, None] = {}
        popped: list[Node] = []
        try:
            for namespace in self._over:
                excess = self.excess(namespace)
                queue = self._by_namespace.get(namespace)
                while queue is not None and min(excess, page_count) > 0 and (node := queue.pop()) is not None:
                    popped.append(node)
                    chosen[node] = None
                    excess -= node.page_count
                    page_count -= node.page_count
            while page_count > 0 and (node := super().pop()) is not None:
                popped.append(node)
                if node not in chosen:
                    chosen[node] = None
                    page_count -= node.page_count
        finally:
            for node in popped:
                self.push(node)
        return list(chosen)

    def forget(self, node: Node) -> None:
        """See EvictionQueue."""
        super().forget(node)
        queue = self._by_namespace.get(node.namespace)
        if queue is not None:
            queue.forget(node)

    def check(self) -> None:
        """See EvictionQueue."""
        super().check()
        for queue in self._by_namespace.values():
            queue.check()

    def check_nodes(self, held: Iterable[Node], ready: Iterable[Node]) -> None:
        """Raise BrokenInvariant unless these are the nodes with pages in the tier, and those that may leave it."""
        counted = Counter[str]()
        for node in held:
            counted[node.namespace] += node.page_count
        if counted != Counter(self._pages):
            raise BrokenInvariant(f"namespaces have {dict(counted)} pages, {self._pages} are counted")
        if set(self._over) != {namespace for namespace, pages in counted.items() if pages > self.share_pages}:
            raise BrokenInvariant(f"{list(self._over)} are noted as above their share of {self.share_pages} pages")
        for node in ready:
            if node not in self._by_namespace.get(node.namespace, ()):
                raise BrokenInvariant(f"{node} may be evicted, but is not queued in its namespace")
