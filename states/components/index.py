"""The prefix index with components: a match ends where the full KV *and* every component allow a request to continue.

The tree, its full pages, receipts and evictions are those of the prefix index. Beside it each component has a
`ComponentTier` per tier, with its own pool, pages, guards and order of eviction. This module connects the two:

- *Match.* The longest boundary that every component serves, from device and host memory together: pages on the device
  are used there, pages missing there are loaded from the host. The match then ends at that boundary, as if the index
  had no more; full pages beyond it can be passed through and are of no use.
- *Lock and pin.* One receipt protects the full pages down to a node and the component pages of one boundary.
- *Reserve.* All that a request needs of every component, or nothing: the pages of the boundary locked, new pages for
  what is to be loaded, and a snapshot of its own for each state, because the model writes to it in place. Shared
  snapshots are copied.
- *Splits and evictions.* The prefix index reports both. A node that loses its full pages in a tier loses its component
  pages there as well. A component's pool that runs short evicts component pages only.

Ownership: `reserve`, `take_host` and `give_back` move pages between the pools and their owners, `insert` moves them
from an owner to the index, `drain` and `settle` move device pages of an owner into the quarantine and out of it.

A core without components uses the prefix index directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidekv.states.components.component_tier import ComponentTier, Guard, nodes_covering
from tidekv.states.components.specs import Component, Ranges, longest_boundary, served_boundaries
from tidekv.states.errors import BrokenInvariant, InvalidConfig
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import MatchResult, Node, PrefixIndex, Receipt
from tidekv.states.prefix.node import TierName
from tidekv.states.types import PageIds, page_ids


class ComponentReceipt:
    """Proof of one lock ("device") or pin ("host") of a path with component pages; required once, to give it back."""

    __slots__ = ("full", "guards")

    def __init__(self, full: Receipt, guards: dict[str, Guard]) -> None:
        self.full = full
        self.guards = guards


class ComponentMatch(msgspec.Struct, frozen=True, eq=False):
    """Pages of one component that a request has at its boundary.

    `table`: device pages at positions [first, boundary). Of a state it is always one page, the snapshot to continue
    from, also at boundary 0. `own`: the pages that the request owns: first those of the table, then the spare ones. The
    other pages of the table are the index's. Own pages of the table are filled from host pages (`loads`), from device
    pages of the index (`clones`), both given as source and target, or from storage (`stored`). A snapshot at boundary 0
    has no source, nor has one that prefill writes.
    """

    first: int
    table: PageIds
    own: PageIds
    loads: tuple[PageIds, PageIds]
    clones: tuple[PageIds, PageIds]
    stored: tuple[PageIds, PageIds]
    """Positions that neither tier has, and the own pages for them: storage is to deliver them."""


class Reserved(msgspec.Struct, frozen=True, eq=False):
    """Component pages of one boundary, with the receipts that protect what they use and are loaded from."""

    boundary: int
    lock: ComponentReceipt
    pin: ComponentReceipt
    component_pages: dict[str, ComponentMatch]


class ComponentIndex:
    """All components of one prefix index. Wrong calls raise BrokenInvariant, because they are bugs of the caller."""

    def __init__(self, index: PrefixIndex, components: Sequence[Component], *, page_size: int) -> None:
        if len({component.name for component in components}) != len(components):
            raise InvalidConfig(f"components have one name each, not {[component.name for component in components]}")
        self.index = index
        self.components = {component.name: component for component in components}
        self.device = {
            c.name: ComponentTier("device", PagePool(f"device {c.name}", c.device_pages)) for c in components
        }
        """By component, its pages on the device."""
        self.host = {c.name: ComponentTier("host", PagePool(f"host {c.name}", c.host_pages)) for c in components}
        self._trailing_pages = {component.name: component.trailing_pages(page_size) for component in components}
        self._receipts: dict[ComponentReceipt, None] = {}
        index.tree.on_split.append(self._split)
        index.on_evict.append(self._full_copy_goes)

    @property
    def tiers(self) -> tuple[ComponentTier, ...]:
        """All component tiers: for each component the device tier, then the host tier."""
        return tuple(tier for name in self.components for tier in (self.device[name], self.host[name]))

    # --- Matching ---

    def match(self, namespace: str, keys: bytes, *, use_host: bool = True) -> MatchResult:
        """Find the longest prefix of `keys` that the index and all components serve, and make its end a node.

        Without `use_host` nothing is to be loaded: full pages and component pages are all on the device.
        """
        pages = sum(self.probe_prefix(namespace, keys, use_host=use_host))
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
        boundary = longest_boundary(limit, self.served(namespace, keys, limit, {}, use_host=use_host))
        device_pages = min(device_pages, boundary)
        return device_pages, boundary - device_pages

    def served(
        self, namespace: str, keys: bytes, pages: int, stored: Mapping[str, set[int]], *, use_host: bool = True
    ) -> list[Ranges]:
        """The boundaries that each component serves, in the order of components.

        They are served by the component pages beside the first `pages` full pages, which must be in the index, together
        with the positions in storage.
        """
        nodes = self._nodes_of(namespace, keys, pages)
        served = []
        for name in self.components:
            positions = self._positions(name, nodes, use_host=use_host) | stored.get(name, set())
            served.append(served_boundaries(sorted(positions), self._trailing_pages[name]))
        return served

    def count_only_stored(
        self, namespace: str, keys: bytes, boundary: int, *, in_index: int, needed_from: Mapping[str, int]
    ) -> int:
        """Count the component pages that only storage has and a request continuing from `boundary` needs.

        The first `in_index` full pages of the boundary are in the index.
        """
        nodes = self._nodes_of(namespace, keys, in_index)
        count = 0
        for name in self.components:
            first = max(self._first(name, boundary), needed_from.get(name, 0))
            here = self._positions(name, nodes)
            count += sum(at not in here for at in range(first, boundary))
        return count

    def trailing_pages_of(self, tier: TierName, name: str, node: Node) -> tuple[int, dict[int, int]]:
        """The first position of the component pages at the end of `node`, and those that this tier has, by position."""
        first = self._first(name, node.depth_pages)
        pages: dict[int, int] = {}
        for above in nodes_covering(node, first):
            pages.update(self._tier(tier)[name].pages_of(above))
        return first, {at: page for at, page in pages.items() if at >= first}

    # --- Receipts ---

    def lock(self, node: Node, *, boundary: int) -> ComponentReceipt:
        """Protect the full device pages down to `node`, and the component pages of `boundary` above its end."""
        return self._hold(self.index.lock(node), self.device, boundary)

    def unlock(self, receipt: ComponentReceipt) -> None:
        """Give back a receipt of `lock`."""
        self._release(receipt, self.device)
        self.index.unlock(receipt.full)

    def pin(self, node: Node, *, boundary: int) -> ComponentReceipt:
        """Protect the host pages down to `node`: the full ones, and the component pages of `boundary`."""
        return self._hold(self.index.pin(node), self.host, boundary)

    def unpin(self, receipt: ComponentReceipt) -> None:
        """Give back a receipt of `pin`."""
        self._release(receipt, self.host)
        self.index.unpin(receipt.full)

    # --- Reserving and giving back ---

    def reserve(
        self,
        match: MatchResult,
        spare: Mapping[str, int],
        needed_from: Mapping[str, int] | None = None,
        *,
        boundary: int | None = None,
    ) -> Reserved | None:
        """Take what a request that continues from a new match needs of every component, and `spare` more pages by name.

        Returns None if a pool has too few free and evictable pages; then only the order of eviction has changed. If
        prefill writes the last component pages, the request needs no positions before `needed_from`. With `boundary` it
        continues from there, and storage delivers what the index lacks up to it.

        The request owns the taken pages. After the copies, shared pages can be moved into the index (`insert`).
        """
        if boundary is None:
            boundary = match.device_pages + match.host_pages
        lock = self.lock(match.device_node, boundary=boundary)
        pin = self.pin(match.host_node, boundary=boundary)
        # From here on the needed pages are guarded: pages that can still be evicted are of no use to this request.
        firsts = {
            name: min(boundary, max(self._first(name, boundary), (needed_from or {}).get(name, 0)))
            for name in self.components
        }
        missing = {name: self._missing(name, match.host_node, boundary, firsts[name]) for name in self.components}
        wanted = {name: len(positions) + spare.get(name, 0) for name, positions in missing.items()}
        if any(self.device[name].room < count for name, count in wanted.items()):
            self.unlock(lock)
            self.unpin(pin)
            return None
        component_pages = {}
        for name, positions in missing.items():
            tier = self.device[name]
            tier.evict(wanted[name] - tier.account.free)
            component_pages[name] = self._match_of(
                name, match.host_node, boundary, firsts[name], positions, tier.account.take(wanted[name])
            )
        return Reserved(boundary, lock, pin, component_pages)

    def release(self, reserved: Reserved) -> None:
        """Give back the receipts of a reservation. Its pages stay with their owner."""
        self.unlock(reserved.lock)
        self.unpin(reserved.pin)

    def take_host(self, name: str, count: int) -> PageIds | None:
        """Take host pages of a component, evicting others if necessary; None, without any eviction, if too few."""
        tier = self.host[name]
        if tier.room < count:
            return None
        tier.evict(count - tier.account.free)
        return tier.account.take(count)

    def give_back(self, pages: Mapping[str, PageIds], tier: TierName = "device") -> None:
        """Free owned pages, by component."""
        for name, ours in pages.items():
            self._tier(tier)[name].account.give_back(ours)

    def drain(self, pages: Mapping[str, PageIds]) -> None:
        """Move owned device pages into the quarantine, because prefill may still write to them."""
        for name, ours in pages.items():
            self.device[name].account.drain(ours)

    def settle(self, pages: Mapping[str, PageIds]) -> None:
        """Free device pages in the quarantine, after the last writer has stopped."""
        for name, ours in pages.items():
            self.device[name].account.settle(ours)

    # --- Inserting and evicting ---

    def insert(self, tier: TierName, name: str, node: Node, first: int, pages: PageIds) -> tuple[PageIds, PageIds]:
        """Move complete pages of a component into the index, at positions [first, first + len(pages)) of the path to
        `node`. Pages that the index already has are kept.

        Returns the pages to use from now on, and those that the caller still owns. An inserted snapshot must not be
        written to any more.
        """
        nodes = nodes_covering(node, first)[::-1]
        self.index.tree.require(node)
        if not 0 <= first <= first + len(pages) <= node.depth_pages:
            raise BrokenInvariant(f"{name}: positions [{first}, {first + len(pages)}) are not above the end of {node}")
        for above in nodes:
            if above.void or (above.device if tier == "device" else above.host) is None:
                raise BrokenInvariant(f"{name}: {above} has no full {tier} pages that component pages could go with")
        return self._tier(tier)[name].enter(nodes, first, pages)

    def drop(self, tier: TierName, name: str, node: Node) -> None:
        """Free a node's pages of one component that are no longer needed. Raises BrokenInvariant if guarded."""
        self._tier(tier)[name].drop(node)

    def drop_host_pages_of(self, node: Node, boundary: int) -> None:
        """Free the host pages of all components at a boundary on the path to `node`, except those that a guard
        protects.
        """
        for name, tier in self.host.items():
            for above in nodes_covering(node, self._first(name, boundary)):
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
                tiers[name].account.check()
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

    def _hold(self, full: Receipt, tiers: dict[str, ComponentTier], boundary: int) -> ComponentReceipt:
        guards = {name: tiers[name].guard(full.node, self._first(name, boundary)) for name in self.components}
        receipt = ComponentReceipt(full, guards)
        self._receipts[receipt] = None
        return receipt

    def _release(self, receipt: ComponentReceipt, tiers: dict[str, ComponentTier]) -> None:
        if receipt not in self._receipts or receipt.full.kind != ("device" if tiers is self.device else "host"):
            raise BrokenInvariant(f"{receipt.full} is not such a receipt of components, or was given back before")
        del self._receipts[receipt]
        for name, guard in receipt.guards.items():
            tiers[name].unguard(guard)

    def _missing(self, name: str, node: Node, boundary: int, first: int) -> list[int]:
        """The positions for which a request needs its own page. For a state that is always the snapshot."""
        if not self.components[name].is_shared:
            return [first]
        here = {at for above in nodes_covering(node, first) for at in self.device[name].pages_of(above)}
        return [at for at in range(first, boundary) if at not in here]

    def _match_of(
        self, name: str, node: Node, boundary: int, first: int, missing: list[int], own: PageIds
    ) -> ComponentMatch:
        device: dict[int, int] = {}
        host: dict[int, int] = {}
        for above in nodes_covering(node, first):
            device.update(self.device[name].pages_of(above))
            host.update(self.host[name].pages_of(above))
        ours = dict(zip(missing, own, strict=False))
        loads, clones, stored = ((page_ids(), page_ids()) for _ in range(3))
        for position, page in ours.items():
            if position >= boundary:
                # A snapshot without a source: the boundary is 0, or prefill writes the snapshot.
                continue
            kind, source = stored, position
            if position in device:
                kind, source = clones, device[position]
            elif position in host:
                kind, source = loads, host[position]
            kind[0].append(source)
            kind[1].append(page)
        end = first + 1 if not self.components[name].is_shared else boundary
        table = page_ids(ours[at] if at in ours else device[at] for at in range(first, end))
        return ComponentMatch(first, table, own, loads, clones, stored)
