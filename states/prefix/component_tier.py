"""Pages of one component that the prefix index keeps in one tier, and the order of their eviction.

Pages are stored by node and, within a node, by position in the prompt. Splitting a node divides its pages, and the
guards that reach into it, by position. A node may lose its component pages and keep its full ones: matches then pass
through it and cannot end there. All pages of a node are evicted together, because a set of component pages with a hole
serves no boundary. A snapshot serves a boundary by itself: the index ends a node there, so it is evicted by itself.
Eviction takes the least recently used node first, and skips nodes that a guard protects.

Ownership: pages in this tier are owned by the index (`CACHED` in the page pool). `enter` moves pages from their owner
to the index, `drop` and `evict` make them free.

Invariants, recounted by `check`:

- a node with pages here has its full pages in this tier;
- every kept page is cached in the page pool, and every cached page is kept exactly once;
- a node is guarded by exactly the guards whose range reaches into it;
- not more than `cached_max` pages are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import PagePool, PageState
from tidekv.states.prefix.node import Node, TierName
from tidekv.states.types import PageIds, page_ids


class Guard:
    """Protects the component pages at positions [first, end of `node`) until it is removed."""

    __slots__ = ("first", "node")

    def __init__(self, node: Node, first: int) -> None:
        self.node = node
        self.first = first


class HeldPage:
    """One node's pages by position, and the guards that reach into the node."""

    __slots__ = ("guards", "pages")

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.guards: dict[Guard, None] = {}


class ComponentTier:
    """Pages of one component in one tier of the prefix index."""

    __slots__ = (
        "_guarded",
        "_idle",
        "cached_max",
        "evictable",
        "evicted",
        "name",
        "on_drop",
        "on_enter",
        "pool",
        "protected",
        "receipts",
        "touch",
    )

    def __init__(
        self, name: TierName, pool: PagePool, touch: Callable[[Node], None], *, cached_max: int | None = None
    ) -> None:
        """`touch` is called with each node that gets or loses pages. At most `cached_max` pages are kept."""
        self.name: TierName = name
        self.touch = touch
        self.pool = pool
        self.on_enter: Callable[[Node, int, int], None] | None = None
        """Called with node, position and page for each page that is kept from now on, whose bytes are complete."""
        self.on_drop: Callable[[Iterable[int]], None] | None = None
        """Called with pages before they are free."""
        self.cached_max = pool.total if cached_max is None else cached_max
        self.evicted = 0
        """Pages evicted so far to make room for others."""
        self.evictable = 0
        self.protected = 0
        self.receipts = 0
        """Number of live guards."""
        # Least recently used first. Guarded nodes are kept apart, so that eviction never has to skip them.
        self._idle: OrderedDict[Node, HeldPage] = OrderedDict()
        self._guarded: dict[Node, HeldPage] = {}

    @property
    def room(self) -> int:
        """Pages that can be taken now: the free ones, and the unguarded ones after their eviction."""
        return self.pool.free + self.evictable

    def pages_of(self, node: Node) -> dict[int, int]:
        """The node's component pages by position. Valid until the next change; the caller must not modify it."""
        holding = self._find(node)
        return {} if holding is None else holding.pages

    def nodes(self) -> tuple[Node, ...]:
        """All nodes with pages or guards: the evictable ones in order of eviction, then the guarded ones."""
        return (*self._idle, *self._guarded)

    def is_guarded(self, node: Node) -> bool:
        """Whether a guard protects the node's component pages."""
        return node in self._guarded

    # --- Guards ---

    def guard(self, node: Node, first: int) -> Guard:
        """Protect the present and future pages at positions [first, end of `node`)."""
        guard = Guard(node, first)
        self.receipts += 1
        for above in nodes_covering(node, first):
            holding = self._take(above)
            holding.guards[guard] = None
            self._put(above, holding)
        return guard

    def unguard(self, guard: Guard) -> None:
        """Remove a guard. Nodes without another guard become the most recently used ones."""
        self.receipts -= 1
        # Upper nodes first: eviction then takes them first, followed by the lower nodes, which are of no use without
        # them.
        for above in reversed(nodes_covering(guard.node, guard.first)):
            holding = self._take(above)
            del holding.guards[guard]
            self._put(above, holding)

    # --- Growing ---

    def enter(self, nodes: Iterable[Node], first: int, pages: PageIds) -> tuple[PageIds, PageIds]:
        """Move the caller's pages at positions [first, first + len(pages)) into the index; `nodes` cover them in order.

        A page that the index already has at a position is kept. Returns the pages to use from now on, and the given
        pages that the caller still owns. A given page that the index already keeps at its position changes nothing.
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
        self.pool.to_cache(fresh)
        for node, position, page in entered:
            holding = self._take(node)
            holding.pages[position] = page
            self._put(node, holding)
            self.touch(node)
            if self.on_enter is not None:
                self.on_enter(node, position, page)
        return table, unused

    def may_keep(self, count: int) -> bool:
        """Whether `count` further pages can be kept within `cached_max`, by evicting others if necessary."""
        return self.pool.cached + count <= self.cached_max + self.evictable and count <= self.cached_max

    def make_room_to_keep(self, count: int) -> bool:
        """Evict until `count` further pages can be kept within `cached_max`; False, without any eviction, if not."""
        if not self.may_keep(count):
            return False
        self.evict(self.pool.cached + count - self.cached_max)
        return True

    def use(self, nodes: Iterable[Node]) -> None:
        """Mark the nodes' pages as used now."""
        for node in nodes:
            if node in self._idle:
                self._idle.move_to_end(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Divide pages and guards after the index cut `upper` off the front of `lower`.

        A guard that begins below the cut protects `lower` only.
        """
        holding = self._take(lower)
        cut = upper.depth_pages
        for node in (upper, lower):
            part = HeldPage()
            part.pages = {at: page for at, page in holding.pages.items() if (at < cut) == (node is upper)}
            part.guards = {guard: None for guard in holding.guards if node is lower or guard.first < cut}
            self._put(node, part)

    # --- Shrinking ---

    def drop(self, node: Node) -> None:
        """Free the node's component pages, if it has any.

        Called if the node loses its full pages in this tier, or a window there is no longer needed. Raises
        BrokenInvariant if a guard protects them.
        """
        if self.is_guarded(node):
            raise BrokenInvariant(f"{node} loses component pages in {self.pool.name!r} that are guarded")
        if node in self._idle:
            pages = page_ids(self._take(node).pages.values())
            if self.on_drop is not None:
                self.on_drop(pages)
            self.pool.from_cache(pages)
            self.touch(node)

    def evict(self, count: int) -> int:
        """Free at least `count` pages, or all unguarded ones if there are fewer; returns how many were freed."""
        before = self.evictable
        while before - self.evictable < count and self._idle:
            self.drop(next(iter(self._idle)))
        self.evicted += before - self.evictable
        return before - self.evictable

    def check(self, nodes: set[Node], guards: Iterable[Guard]) -> None:
        """Recount everything; `nodes` are the tree's nodes with full pages in this tier. Raises BrokenInvariant."""
        reached: dict[Node, set[Guard]] = {}
        for guard in (expected := list(guards)):
            for node in nodes_covering(guard.node, guard.first):
                reached.setdefault(node, set()).add(guard)
        kept = page_ids()
        for node, holding in (*self._idle.items(), *self._guarded.items()):
            first = node.depth_pages - node.page_count
            self._require(not holding.pages or node in nodes, node, "has no full pages in this tier")
            self._require(
                all(first <= at < node.depth_pages for at in holding.pages), node, "has pages outside its range"
            )
            same_guards = set(holding.guards) == reached.pop(node, set())
            self._require(same_guards, node, "is not guarded by exactly the guards that reach into it")
            self._require(bool(holding.guards) == (node in self._guarded), node, "is in the wrong queue")
            self._require(holding.pages or holding.guards, node, "has neither pages nor guards")
            kept.extend(holding.pages.values())
        if reached or self.receipts != len(expected):
            raise BrokenInvariant(f"{self.pool.name}: guards reach into {list(reached)}, where they are missing")
        if not self.pool.holds(kept, PageState.CACHED) or self.pool.cached != len(kept):
            raise BrokenInvariant(f"{self.pool.name}: the pages kept are not the cached pages, each exactly once")
        if len(kept) > self.cached_max:
            raise BrokenInvariant(f"{self.pool.name}: {len(kept)} pages are kept, at most {self.cached_max} may be")
        counted = tuple(sum(len(h.pages) for h in part.values()) for part in (self._idle, self._guarded))
        if counted != (self.evictable, self.protected):
            raise BrokenInvariant(
                f"{self.pool.name}: counted {counted} evictable and protected pages, kept"
                f" {(self.evictable, self.protected)}"
            )

    def _find(self, node: Node) -> HeldPage | None:
        return self._idle.get(node) or self._guarded.get(node)

    def _take(self, node: Node) -> HeldPage:
        """Take the node's entry out of its queue; `_put` files it again by its new content."""
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
            raise BrokenInvariant(f"{self.pool.name}: {node} {words}")


def nodes_covering(node: Node, first: int) -> list[Node]:
    """The nodes that cover positions [first, end of `node`), the lowest first."""
    nodes = []
    while node.parent is not None and node.depth_pages > first:
        nodes.append(node)
        node = node.parent
    return nodes
