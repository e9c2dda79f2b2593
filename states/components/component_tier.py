"""The books of one component in one tier: which of its pages the index keeps, at which nodes, and which may go.

Pages are kept by node and, within it, by position in the prompt: a split divides them by position, and receipts, which
cover a range of positions, with them. A node may lose its component pages and keep its full ones: those stay passable,
and are no end of a match any more. All pages of a node go together, since a tail with a hole serves nobody; nodes go in
the order in which they were last used. A node that somebody's receipt reaches into keeps its pages.

What always holds (`check` recounts it):

- a node with pages here has its full pages in this tier;
- every page kept is cached in the account, and every cached page is kept once;
- a node is guarded by exactly the guards whose range reaches into it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import PagePool, PageState
from tidekv.states.prefix.node import Node, TierName
from tidekv.states.types import PageIds, page_ids


class Guard:
    """Keeps the component pages at positions [first, end of `node`) until it is taken away."""

    __slots__ = ("first", "node")

    def __init__(self, node: Node, first: int) -> None:
        self.node = node
        self.first = first


class HeldPage:
    """What one node has of the component: pages by position, and the guards that reach into it."""

    __slots__ = ("guards", "pages")

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.guards: dict[Guard, None] = {}


class ComponentTier:
    """One component's pages in one tier of the index."""

    __slots__ = ("_guarded", "_idle", "account", "evictable", "name", "protected", "receipts")

    def __init__(self, name: TierName, account: PagePool) -> None:
        self.name: TierName = name
        self.account = account
        self.evictable = 0
        self.protected = 0
        self.receipts = 0
        """Live guards."""
        # By node, used longest ago first. Whoever has guards waits apart, so that eviction never walks past it.
        self._idle: OrderedDict[Node, HeldPage] = OrderedDict()
        self._guarded: dict[Node, HeldPage] = {}

    @property
    def room(self) -> int:
        """Pages that can be had: free ones, and those that nobody guards."""
        return self.account.free + self.evictable

    def pages_of(self, node: Node) -> dict[int, int]:
        """The node's component pages by position. Read it at once, and do not change it."""
        holding = self._find(node)
        return {} if holding is None else holding.pages

    def nodes(self) -> tuple[Node, ...]:
        """Every node that has pages or guards here: those that can be evicted, the next one first, then the others."""
        return (*self._idle, *self._guarded)

    def is_guarded(self, node: Node) -> bool:
        """Whether a guard keeps the node's component pages."""
        return node in self._guarded

    # --- Guards ---

    def guard(self, node: Node, first: int) -> Guard:
        """Keep what there is, and what will be, at positions [first, end of `node`)."""
        guard = Guard(node, first)
        self.receipts += 1
        for above in nodes_covering(node, first):
            holding = self._take(above)
            holding.guards[guard] = None
            self._put(above, holding)
        return guard

    def unguard(self, guard: Guard) -> None:
        """Take a guard away. What nobody else guards was used until now."""
        self.receipts -= 1
        # Nodes above first: a tail that has lost its first pages is of no use, and what is left of it goes next.
        for above in reversed(nodes_covering(guard.node, guard.first)):
            holding = self._take(above)
            del holding.guards[guard]
            self._put(above, holding)

    # --- Growing ---

    def enter(self, nodes: Iterable[Node], first: int, pages: PageIds) -> tuple[PageIds, PageIds]:
        """Enter pages, the caller's until now, at positions [first, first + len(pages)); `nodes` cover them, in order.

        Where there is a page already it wins. Returns the pages to use from now on, and those that are still the
        caller's; the tree's very own are neither new nor the caller's.
        """
        table, fresh, unused = page_ids(), page_ids(), page_ids()
        entered: list[tuple[Node, int, int]] = []
        for node in nodes:
            begin = max(first, node.depth_pages - node.page_count)
            end = min(first + len(pages), node.depth_pages)
            here = self.pages_of(node)
            for position in range(begin, end):
                ours = pages[position - first]
                theirs = here.get(position)
                if theirs is None:
                    fresh.append(ours)
                    entered.append((node, position, ours))
                elif theirs != ours:
                    unused.append(ours)
                table.append(ours if theirs is None else theirs)
        self.account.to_cache(fresh)
        for node, position, page in entered:
            holding = self._take(node)
            holding.pages[position] = page
            self._put(node, holding)
        return table, unused

    def use(self, nodes: Iterable[Node]) -> None:
        """These nodes' pages were used now."""
        for node in nodes:
            if node in self._idle:
                self._idle.move_to_end(node)

    def split(self, upper: Node, lower: Node) -> None:
        """The index cut `upper` off the front of `lower`. What is guarded in one part may not be in the other."""
        holding = self._take(lower)
        cut = upper.depth_pages
        for node in (upper, lower):
            part = HeldPage()
            part.pages = {at: page for at, page in holding.pages.items() if (at < cut) == (node is upper)}
            part.guards = {guard: None for guard in holding.guards if node is lower or guard.first < cut}
            self._put(node, part)

    # --- Shrinking ---

    def drop(self, node: Node) -> None:
        """Free the node's component pages, if there are any: the node loses its full pages in this tier, or nobody
        needs the window there any more. Raises BrokenInvariant where a guard keeps them.
        """
        if self.is_guarded(node):
            raise BrokenInvariant(f"{node} loses component pages in {self.account.name!r} that are guarded")
        if node in self._idle:
            self.account.from_cache(page_ids(self._take(node).pages.values()))

    def evict(self, count: int) -> int:
        """Free at least `count` pages, or all that nobody guards; returns how many."""
        before = self.evictable
        while before - self.evictable < count and self._idle:
            self.drop(next(iter(self._idle)))
        return before - self.evictable

    def check(self, nodes: set[Node], guards: Iterable[Guard]) -> None:
        """Recount everything: `nodes` are those of the tree that have full pages in this tier."""
        reached: dict[Node, set[Guard]] = {}
        for guard in (expected := list(guards)):
            for node in nodes_covering(guard.node, guard.first):
                reached.setdefault(node, set()).add(guard)
        kept = page_ids()
        for node, holding in (*self._idle.items(), *self._guarded.items()):
            first = node.depth_pages - node.page_count
            self._require(not holding.pages or node in nodes, node, "has no full pages in this tier")
            self._require(all(first <= at < node.depth_pages for at in holding.pages), node, "has pages of others")
            self._require(set(holding.guards) == reached.pop(node, set()), node, "is not guarded by those who say so")
            self._require(bool(holding.guards) == (node in self._guarded), node, "is in the wrong place")
            self._require(holding.pages or holding.guards, node, "has neither pages nor guards")
            kept.extend(holding.pages.values())
        if reached or self.receipts != len(expected):
            raise BrokenInvariant(f"{self.account.name}: guards reach into {list(reached)}, which do not know of it")
        if not self.account.holds(kept, PageState.CACHED) or self.account.cached != len(kept):
            raise BrokenInvariant(f"{self.account.name}: the pages kept are not those that are cached, each once")
        counted = tuple(sum(len(h.pages) for h in part.values()) for part in (self._idle, self._guarded))
        if counted != (self.evictable, self.protected):
            raise BrokenInvariant(
                f"{self.account.name}: counted {counted} evictable and protected pages, kept"
                f" {(self.evictable, self.protected)}"
            )

    def _find(self, node: Node) -> HeldPage | None:
        return self._idle.get(node) or self._guarded.get(node)

    def _take(self, node: Node) -> HeldPage:
        """What the node has, taken off the books; `_put` puts it where it belongs by then."""
        holding = self._guarded.pop(node, None)
        if holding is not None:
            self.protected -= len(holding.pages)
            return holding
        holding = self._idle.pop(node, None) or HeldPage()
        self.evictable -= len(holding.pages)
        return holding

    def _put(self, node: Node, holding: HeldPage) -> None:
        if holding.guards:
            self._guarded[node] = holding
            self.protected += len(holding.pages)
        elif holding.pages:
            self._idle[node] = holding
            self.evictable += len(holding.pages)

    def _require(self, condition: object, node: Node, words: str) -> None:
        if not condition:
            raise BrokenInvariant(f"{self.account.name}: {node} {words}")


def nodes_covering(node: Node, first: int) -> list[Node]:
    """The nodes of the positions [first, end of `node`), from below."""
    nodes = []
    while node.parent is not None and node.depth_pages > first:
        nodes.append(node)
        node = node.parent
    return nodes
