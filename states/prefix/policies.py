"""In which order cached pages go: policies, and the queue that asks them. It frees nothing itself."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from tidekv.states.errors import BrokenInvariant
from tidekv.states.prefix.node import Node

Priority: TypeAlias = "tuple[int, ...]"
"""What goes first compares lowest."""

Entry: TypeAlias = "tuple[Priority, int, Node]"
"""A node with the priority that it had when it was last looked at, and its number, which decides between equals."""


class EvictionPolicy(ABC):
    """An order of eviction.

    A node's priority may only grow over its life: the queue looks at it again when the node's turn comes, not at every
    touch, and would miss one that became smaller.
    """

    @abstractmethod
    def priority(self, node: Node) -> Priority:
        """Tell the node's place in the order: lowest goes first. Ties go by age of the node."""


class LeastRecentlyUsed(EvictionPolicy):
    """Forget first what was matched or inserted longest ago."""

    def priority(self, node: Node) -> Priority:
        """Order by the tick of the last touch."""
        return (node.tick,)


class LeastFrequentlyUsed(EvictionPolicy):
    """Forget first what was matched least often, then longest ago."""

    def priority(self, node: Node) -> Priority:
        """Order by hits, then by the last touch."""
        return (node.hits, node.tick)


class SegmentedLeastRecentlyUsed(EvictionPolicy):
    """Forget first what was never matched `protected_hits` times: one long scan does not push out what is shared."""

    def __init__(self, *, protected_hits: int = 2) -> None:
        self.protected_hits = protected_hits

    def priority(self, node: Node) -> Priority:
        """Order by segment, then by the last touch."""
        return (node.hits >= self.protected_hits, node.tick)


class FirstInFirstOut(EvictionPolicy):
    """Forget first what was inserted first."""

    def priority(self, node: Node) -> Priority:
        """Order by the tick of the insertion."""
        return (node.born,)


class LowestPriority(EvictionPolicy):
    """Forget first what was inserted with the lowest priority, then longest ago."""

    def priority(self, node: Node) -> Priority:
        """Order by the highest priority that an insert gave, then by the last touch."""
        return (node.priority, node.tick)


LRU = LeastRecentlyUsed()
LFU = LeastFrequentlyUsed()
SLRU = SegmentedLeastRecentlyUsed()
FIFO = FirstInFirstOut()
PRIORITY = LowestPriority()

# So many entries of removed nodes may stay in a queue, beyond half of it, before it is swept.
_STALE_MARGIN = 64


class EvictionQueue:
    """The nodes of one tier that may be evicted, by priority; lazily kept, so that a touch costs nothing.

    Most nodes come in the order in which they are to go: those wait in a line, and only the others in a heap.

    It may hold nodes that are not ready any more (locked again, given a child, gone): they are passed over when their
    turn comes. It must hold every node that is ready, so whoever makes a node ready pushes it.
    """

    __slots__ = ("_heap", "_is_ready", "_line", "_policy", "_queued", "_stale_count")

    def __init__(self, policy: EvictionPolicy, is_ready: Callable[[Node], bool]) -> None:
        self._policy = policy
        self._is_ready = is_ready
        self._line: deque[Entry] = deque()
        """Ascending."""
        self._heap: list[Entry] = []
        self._queued: set[int] = set()
        self._stale_count = 0

    def __contains__(self, node: Node) -> bool:
        return node.node_id in self._queued

    def __len__(self) -> int:
        return len(self._heap) + len(self._line)

    def push(self, node: Node) -> None:
        """Queue a node that became ready; one that is queued already keeps its one entry."""
        node_id = node.node_id
        if node_id not in self._queued:
            self._queued.add(node_id)
            self._enter((self._policy.priority(node), node_id, node))

    def pop(self) -> Node | None:
        """Take out the ready node of the lowest priority; None where no node is ready."""
        heap, line = self._heap, self._line
        while heap or line:
            # No two entries have the same number, so nodes themselves are never compared.
            is_in_line = bool(line) and (not heap or line[0] < heap[0])
            priority, node_id, node = line[0] if is_in_line else heap[0]
            # Before the entry is taken out: a policy that raises loses no node.
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
                self._enter((current, node_id, node))
        return None

    def first(self, page_count: int) -> list[Node]:
        """List the ready nodes of the lowest priorities, until they hold so many pages. They stay in the queue."""
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
        """Take note that a node left the tree: its entry, if any, is swept once there are many such."""
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
        """Raise BrokenInvariant where the heap and what is known to be in it differ, or an order could be missed."""
        entries = self._entries()
        if len(entries) != len(self._queued) or {entry[1] for entry in entries} != self._queued:
            raise BrokenInvariant("an eviction queue does not hold each of its nodes once")
        if self._stale_count != sum(node.parent is None for _, _, node in entries):
            raise BrokenInvariant("an eviction queue miscounts its nodes that left the tree")
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
