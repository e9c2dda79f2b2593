"""The order of eviction: policies, and the queue that applies them. Frees no pages itself."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from tidekv.states.errors import BrokenInvariant
from tidekv.states.prefix.node import Heat, Node

if TYPE_CHECKING:
    from tidekv.states.settings import EvictionName

Priority: TypeAlias = "tuple[int, ...]"
"""Sort key of eviction: the lowest is evicted first."""

Entry: TypeAlias = "tuple[Priority, int, Node]"
"""A node's priority when last computed, its number as the tie-breaker, and the node."""


class EvictionPolicy(ABC):
    """An order of eviction.

    The priority of a node may only grow. The queue recomputes it when the node's turn comes, not on every use, and
    would miss a priority that has become smaller.
    """

    @abstractmethod
    def priority(self, node: Node | Heat) -> Priority:
        """Return the node's sort key: the lowest is evicted first, ties by age of the node."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts first what was matched or inserted longest ago."""

    def priority(self, node: Node | Heat) -> Priority:
        """Order by the tick of the last touch."""
        return (node.tick,)


class LeastFrequentlyUsed(EvictionPolicy):
    """Evicts first what was matched least often, then longest ago."""

    def priority(self, node: Node | Heat) -> Priority:
        """Order by hits, then by the last touch."""
        return (node.hits, node.tick)


class SegmentedLeastRecentlyUsed(EvictionPolicy):
    """Evicts first what was matched fewer than `protected_hits` times, so that a long scan keeps shared prefixes."""

    def __init__(self, *, protected_hits: int = 2) -> None:
        self.protected_hits = protected_hits

    def priority(self, node: Node | Heat) -> Priority:
        """Order by segment, then by the last touch."""
        return (node.hits >= self.protected_hits, node.tick)


class FirstInFirstOut(EvictionPolicy):
    """Evicts first what was inserted first."""

    def priority(self, node: Node | Heat) -> Priority:
        """Order by the tick of the insertion."""
        return (node.born,)


class LowestPriority(EvictionPolicy):
    """Evicts first what was inserted with the lowest priority, then longest ago."""

    def priority(self, node: Node | Heat) -> Priority:
        """Order by the highest priority that an insert gave, then by the last touch."""
        return (node.priority, node.tick)


LRU = LeastRecentlyUsed()
LFU = LeastFrequentlyUsed()
SLRU = SegmentedLeastRecentlyUsed()
FIFO = FirstInFirstOut()
PRIORITY = LowestPriority()
POLICIES: Final[dict[EvictionName, EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "slru": SLRU,
    "fifo": FIFO,
    "priority": PRIORITY,
}
"""Policies by the name that `CoreSettings.eviction` gives them."""

# A queue is swept when more than half of its entries, plus this margin, are of removed nodes.
_STALE_MARGIN = 64


class EvictionQueue:
    """The evictable nodes of one tier by priority, updated lazily, so that using a node costs nothing.

    Most nodes arrive in the order in which they will be evicted. These are kept in a sorted line; only the others go
    into a heap.

    Every ready node must be in the queue, so code that makes a node ready pushes it. The queue may also hold nodes that
    are not ready any more (locked again, given a child, removed); `pop` skips these.
    """

    __slots__ = ("_heap", "_is_ready", "_line", "_policy", "_queued", "_stale_count")

    def __init__(self, policy: EvictionPolicy, is_ready: Callable[[Node], bool]) -> None:
        self._policy = policy
        self._is_ready = is_ready
        self._line: deque[Entry] = deque()
        """Entries in ascending order."""
        self._heap: list[Entry] = []
        self._queued: set[int] = set()
        self._stale_count = 0

    def __contains__(self, node: Node) -> bool:
        return node.node_id in self._queued

    def __len__(self) -> int:
        return len(self._heap) + len(self._line)

    def push(self, node: Node) -> None:
        """Add a node that became ready. A node that is in the queue keeps its one entry."""
        node_id = node.node_id
        if node_id not in self._queued:
            self._queued.add(node_id)
            self._enter((self._policy.priority(node), node_id, node))

    def pop(self) -> Node | None:
        """Remove and return the ready node with the lowest priority; None if no node is ready."""
        heap, line = self._heap, self._line
        while heap or line:
            # Node numbers are unique, so comparing entries never compares nodes.
            is_in_line = bool(line) and (not heap or line[0] < heap[0])
            priority, node_id, node = line[0] if is_in_line else heap[0]
            # Evaluated before the entry is taken out, so that a policy that raises loses no node.
            is_ready = self._is_ready(node)
            current = self._policy.priority(node) if is_ready else priority
            if is_in_line:
                line.popleft()
            else:
                heapq.heappop(heap)
            if not is_ready:
                self._queued.remove(node_id)
                self._stale_count -= node.parent is None
            elif current == priority:
                self._queued.remove(node_id)
                return node
            else:
                # Used since it was queued: its priority has grown, so queue it again further back.
                self._enter((current, node_id, node))
        return None

    def first(self, page_count: int) -> list[Node]:
        """Return the ready nodes with the lowest priorities, until they hold `page_count` pages. They stay queued."""
        nodes: list[Node] = []
        try:
            while page_count > 0 and (node := self.pop()) is not None:
                nodes.append(node)
                page_count -= node.page_count
        finally:
            for node in nodes:
                self.push(node)
        return nodes

    def forget(self, node: Node) -> None:
        """Note that a node has left the tree. Sweeps such entries once there are many."""
        if node.node_id not in self._queued:
            return
        self._stale_count += 1
        if self._stale_count > len(self) // 2 + _STALE_MARGIN:
            self._heap = [entry for entry in self._heap if entry[2].parent is not None]
            self._line = deque(entry for entry in self._line if entry[2].parent is not None)
            heapq.heapify(self._heap)
            self._queued = {entry[1] for entry in self._entries()}
            self._stale_count = 0

    def check(self) -> None:
        """Raise BrokenInvariant if the entries contradict the set of queued nodes, or are out of order."""
        entries = self._entries()
        if len(entries) != len(self._queued) or {entry[1] for entry in entries} != self._queued:
            raise BrokenInvariant("an eviction queue does not hold each of its nodes once")
        if self._stale_count != sum(node.parent is None for _, _, node in entries):
            raise BrokenInvariant("an eviction queue miscounts its nodes that have left the tree")
        for priority, _, node in entries:
            if self._policy.priority(node) < priority:
                raise BrokenInvariant(f"the priority of {node} fell while it was queued")
        if list(self._line) != sorted(self._line):
            raise BrokenInvariant("an eviction queue's line is out of order")

    def _enter(self, entry: Entry) -> None:
        line = self._line
        if not line or line[-1] < entry:
            line.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def _entries(self) -> list[Entry]:
        return [*self._line, *self._heap]
