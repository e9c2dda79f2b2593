"""The components of a prefix index: their pages on device and host, beside the full KV.

The tree, its full pages, receipts and evictions are those of the prefix index. Beside it each component has a
`ComponentTier` per tier, with its own pool, pages, guards and order of eviction. This module connects the two:

- *Sources.* The pages of a component that device and host have on a path. A restore uses them for the end of its
  prompt; they never change how far the full KV is restored.
- *Match.* For a computation that continues on the device: the longest boundary that the full KV and every component
  serve from device and host memory together.
- *Lock and pin.* One receipt protects the full pages down to a node and the component pages from given positions on.
- *Splits and evictions.* The prefix index reports both. A node that loses its full pages in a tier loses its component
  pages there as well. A component's pool that runs short evicts component pages only.

Ownership: `take` and `give_back` move pages between the pools and their owners, `insert` moves them from an owner to
the index, `drain` and `settle` move device pages of an owner into the quarantine and out of it.

A core without components uses the prefix index directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidekv.states.component_specs import Component, longest_boundary, served_boundaries
from tidekv.states.errors import BrokenInvariant, InvalidConfig
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.component_tier import ComponentTier, Guard, nodes_covering
from tidekv.states.prefix.index import MatchResult, Node, PrefixIndex, Receipt
from tidekv.states.prefix.node import TierName
from tidekv.states.types import PageIds, page_ids


class ComponentReceipt:
    """Proof of one lock ("device") or pin ("host") of a path with component pages; required once, to give it back."""

    __slots__ = ("full", "guards")

    def __init__(self, full: Receipt, guards: dict[str, Guard]) -> None:
        self.full = full
        self.guards = guards


class ComponentIndex:
    """All components of one prefix index. Wrong calls raise BrokenInvariant, because they are bugs of the caller."""

    def __init__(
        self,
        index: PrefixIndex,
        components: Sequence[Component],
        *,
        page_size: int,
        device_pool: type[PagePool] = PagePool,
    ) -> None:
        if len({component.name for component in components}) != len(components):
            raise InvalidConfig(f"components have one name each, not {[component.name for component in components]}")
        self.index = index
        self.components = {component.name: component for component in components}
        self.device = {
            c.name: ComponentTier(
                "device",
                device_pool(f"device {c.name}", c.device_pages),
                index.tree.touch,
                cached_max=c.device_snapshots_max,
            )
            for c in components
        }
        """By component, its pages on the device."""
        self.host = {
            c.name: ComponentTier(
                "host", PagePool(f"host {c.name}", c.host_pages), index.tree.touch, cached_max=c.host_snapshots_max
            )
            for c in components
        }
        self._trailing_pages = {component.name: component.trailing_pages(page_size) for component in components}
        self._receipts: dict[ComponentReceipt, None] = {}
        index.tree.on_split.append(self._split)
        index.on_evict.append(self._full_copy_goes)

    @property
    def tiers(self) -> tuple[ComponentTier, ...]:
        """All component tiers: for each component the device tier, then the host tier."""
        return tuple(tier for name in self.components for tier in (self.device[name], self.host[name]))

    # --- Matching ---

    def match(self, namespace: str, keys: bytes, *, use_host: bool = True, with_pending: bool = True) -> MatchResult:
        """Find the longest prefix of `keys` that the index and all components serve, and make its end a node.

        Without `use_host` nothing is to be loaded: full pages and component pages are all on the device. Without
        `with_pending`, the match ends before the first page that a load has yet to fill.
        """
        pages = sum(self.probe_prefix(namespace, keys, use_host=use_host, with_pending=with_pending))
        match = self.index.match(namespace, keys[: pages * self.index.tree.key_bytes])
        for name in self.components:
            nodes = nodes_covering(match.host_node, self._first(name, pages))[::-1]
            self.device[name].use(nodes)
            self.host[name].use(nodes)
        return match

    def probe_prefix(
        self, namespace: str, keys: bytes, *, use_host: bool = True, with_pending: bool = True
    ) -> tuple[int, int]:
        """Return the numbers of device pages and of further host pages that `match` would find. Changes nothing.

        Without `with_pending`, device pages that a load has yet to fill are not counted.
        """
        device_pages, host_pages = self.index.probe_prefix(namespace, keys, with_pending=with_pending)
        limit = device_pages + host_pages if use_host else device_pages
        nodes = self._nodes_of(namespace, keys, limit)
        served = [
            served_boundaries(sorted(self._positions(name, nodes, use_host=use_host)), self._trailing_pages[name])
            for name in self.components
        ]
        boundary = longest_boundary(limit, served)
        device_pages = min(device_pages, boundary)
        return device_pages, boundary - device_pages

    def sources(self, name: str, node: Node, first: int) -> tuple[dict[int, int], dict[int, int]]:
        """The pages of one component at positions from `first` on, on the path to `node`: device pages and host pages,
        each by position.
        """
        path = nodes_covering(node, first)
        device, host = (
            {at: page for above in path for at, page in tier.pages_of(above).items() if at >= first}
            for tier in (self.device[name], self.host[name])
        )
        return device, host

    def positions(self, namespace: str, keys: bytes, name: str, first: int) -> set[int]:
        """The positions of a prompt, from `first` on, at which device or host has a page of one component, as far as
        they have its full pages.
        """
        nodes = self._nodes_of(namespace, keys, sum(self.index.probe_prefix(namespace, keys)))
        return self._positions(name, [node for node in nodes if node.depth_pages > first])

    def trailing_pages_of(self, tier: TierName, name: str, node: Node) -> tuple[int, dict[int, int]]:
        """The first position of the component pages at the end of `node`, and those that this tier has, by position."""
        first = self._first(name, node.depth_pages)
        pages: dict[int, int] = {}
        for above in nodes_covering(node, first):
            pages.update(self._tier(tier)[name].pages_of(above))
        return first, {at: page for at, page in pages.items() if at >= first}

    def branch_points(self, namespace: str, keys: bytes) -> list[int]:
        """The boundaries of a prompt up to which the device has its full pages, and where cached prompts part: among
        themselves, or from this one. In ascending order.
        """
        width = self.index.tree.key_bytes
        pages, _ = self.index.probe_prefix(namespace, keys)
        nodes = self._nodes_of(namespace, keys, pages)
        points = [node.depth_pages for node in nodes if len(node.children) > 1 and node.depth_pages <= pages]
        if nodes and pages < len(keys) // width and pages not in points:
            last = nodes[-1]
            if last.depth_pages > pages or last.children:
                points.append(pages)
        return points

    def is_branch(self, leaf: Node, boundary: int) -> bool:
        """Whether cached prompts part at a boundary of the path to `leaf`."""
        node = nodes_covering(leaf, boundary - 1)[-1]
        return node.depth_pages == boundary and len(node.children) > 1

    def firsts(self, boundary: int) -> dict[str, int]:
        """By component, the first position needed to continue from `boundary`."""
        return {name: self._first(name, boundary) for name in self.components}

    # --- Receipts ---

    def lock(self, node: Node, firsts: Mapping[str, int]) -> ComponentReceipt:
        """Protect the full device pages down to `node`, and component pages above its end, by component from the first
        position on.
        """
        return self._hold(self.index.lock(node), self.device, firsts)

    def unlock(self, receipt: ComponentReceipt) -> None:
        """Give back a receipt of `lock`."""
        self._release(receipt, self.device)
        self.index.unlock(receipt.full)

    def pin(self, node: Node, firsts: Mapping[str, int]) -> ComponentReceipt:
        """Protect the host pages down to `node`: the full ones, and component pages from the first positions on."""
        return self._hold(self.index.pin(node), self.host, firsts)

    def unpin(self, receipt: ComponentReceipt) -> None:
        """Give back a receipt of `pin`."""
        self._release(receipt, self.host)
        self.index.unpin(receipt.full)

    # --- Taking and giving back ---

    def take(self, tier: TierName, name: str, count: int) -> PageIds | None:
        """Take pages of a component's pool, evicting others if necessary; None, without any eviction, if too few."""
        of_component = self._tier(tier)[name]
        if of_component.room < count:
            return None
        of_component.evict(count - of_component.pool.free)
        return of_component.pool.take(count)

    def give_back(self, pages: Mapping[str, PageIds], tier: TierName = "device") -> None:
        """Free owned pages, by component."""
        for name, ours in pages.items():
            self._tier(tier)[name].pool.give_back(ours)

    def drain(self, pages: Mapping[str, PageIds]) -> None:
        """Move owned device pages into the quarantine, because prefill may still write to them."""
        for name, ours in pages.items():
            self.device[name].pool.drain(ours)

    def settle(self, pages: Mapping[str, PageIds]) -> None:
        """Free device pages in the quarantine, after the last writer has stopped."""
        for name, ours in pages.items():
            self.device[name].pool.settle(ours)

    # --- Inserting and evicting ---

    def insert(self, tier: TierName, name: str, node: Node, first: int, pages: PageIds) -> tuple[PageIds, PageIds]:
        """Move complete pages of a component into the index, at positions [first, first + len(pages)) of the path to
        `node`. Pages that the index already has are kept.

        Returns the pages to use from now on, and those that the caller still owns. An inserted snapshot must not be
        written to any more. The node at its position ends there from now on. A snapshot that the bound of its tier has
        no room for is not inserted, and stays the caller's.
        """
        nodes = nodes_covering(node, first)[::-1]
        self.index.tree.require(node)
        if not 0 <= first <= first + len(pages) <= node.depth_pages:
            raise BrokenInvariant(f"{name}: positions [{first}, {first + len(pages)}) are not above the end of {node}")
        for above in nodes:
            if above.is_reclaiming or (above.device if tier == "device" else above.host) is None:
                raise BrokenInvariant(f"{name}: {above} has no full {tier} pages that component pages could go with")
        into = self._tier(tier)[name]
        if self.components[name].is_shared:
            return into.enter(nodes, first, pages)
        table, unused = page_ids(), page_ids()
        for position, page in enumerate(pages, first):
            ending = self._node_ending_at(node, position + 1)
            here = into.pages_of(ending).get(position)
            if here is None and not into.make_room_to_keep(1):
                table.append(page)
                unused.append(page)
                continue
            used, left = into.enter([ending], position, page_ids([page]))
            table += used
            unused += left
        return table, unused

    def _node_ending_at(self, leaf: Node, boundary: int) -> Node:
        """The node on the path to `leaf` that ends at `boundary`, after a split if a node continues beyond it."""
        node = nodes_covering(leaf, boundary - 1)[-1]
        if node.depth_pages == boundary:
            return node
        return self.index.split(node, boundary - (node.depth_pages - node.page_count))

    def drop(self, tier: TierName, name: str, node: Node) -> None:
        """Free a node's pages of one component that are no longer needed. Raises BrokenInvariant if guarded."""
        self._tier(tier)[name].drop(node)

    def drop_host_pages_of(self, node: Node, firsts: Mapping[str, int]) -> None:
        """Free the host pages of all components on the path to `node`, by component from the first position on, except
        those that a guard protects.
        """
        for name, tier in self.host.items():
            for above in nodes_covering(node, firsts[name]):
                if not tier.is_guarded(above):
                    tier.drop(above)

    def evict(self, tier: TierName, name: str, count: int) -> int:
        """Free at least `count` pages of one component's pool, or all evictable ones; returns how many were freed.

        Full pages stay. The least recently used nodes lose their component pages first.
        """
        return self._tier(tier)[name].evict(count)

    def check(self) -> None:
        """Recount everything of all components; raises BrokenInvariant at the first contradiction."""
        nodes = list(self.index.nodes())
        on_device = {node for node in nodes if node.device is not None}
        on_host = {node for node in nodes if node.host is not None}
        for name in self.components:
            for tiers, full in ((self.device, on_device), (self.host, on_host)):
                kind = tiers[name].name
                guards = [receipt.guards[name] for receipt in self._receipts if receipt.full.kind == kind]
                tiers[name].check(full, guards)
                tiers[name].pool.check()
        if any(receipt.full.released for receipt in self._receipts):
            raise BrokenInvariant("the full part of a component receipt was given back without its guards")

    # --- Reports of the prefix index ---

    def _split(self, upper: Node, lower: Node) -> None:
        for name in self.components:
            self.device[name].split(upper, lower)
            self.host[name].split(upper, lower)

    def _full_copy_goes(self, node: Node, tier: TierName) -> None:
        for books in self._tier(tier).values():
            books.drop(node)

    # --- Helpers ---

    def _tier(self, tier: TierName) -> dict[str, ComponentTier]:
        return self.device if tier == "device" else self.host

    def _first(self, name: str, boundary: int) -> int:
        return max(0, boundary - self._trailing_pages[name])

    def _positions(self, name: str, nodes: list[Node], *, use_host: bool = True) -> set[int]:
        """The positions at which the index has pages of a component at these nodes."""
        positions: set[int] = set()
        for node in nodes:
            positions.update(self.device[name].pages_of(node))
            if use_host:
                positions.update(self.host[name].pages_of(node))
        return positions

    def _nodes_of(self, namespace: str, keys: bytes, pages: int) -> list[Node]:
        """The nodes that cover the first `pages` full pages, which are in the index; the last node may exceed them."""
        nodes: list[Node] = []
        node, width = self.index.tree.roots.get(namespace), self.index.tree.key_bytes
        while node is not None and node.depth_pages < pages:
            at = node.depth_pages * width
            node = node.children[keys[at : at + width]]
            nodes.append(node)
        return nodes

    def _hold(self, full: Receipt, tiers: dict[str, ComponentTier], firsts: Mapping[str, int]) -> ComponentReceipt:
        guards = {name: tiers[name].guard(full.node, firsts[name]) for name in self.components}
        receipt = ComponentReceipt(full, guards)
        self._receipts[receipt] = None
        return receipt

    def _release(self, receipt: ComponentReceipt, tiers: dict[str, ComponentTier]) -> None:
        if receipt not in self._receipts or receipt.full.kind != ("device" if tiers is self.device else "host"):
            raise BrokenInvariant(f"{receipt.full} is not such a receipt of components, or was given back before")
        del self._receipts[receipt]
        for name, guard in receipt.guards.items():
            tiers[name].unguard(guard)
