"""The prefix index with components beside it: a match ends where the full KV *and* every component can go on.

The tree is the one of the prefix index, and so are its full pages, receipts and evictions. Beside it, each component
has its own books in each tier (`tidekv.states.components.component_tier`): its own pool, pages, guards, order of
eviction. What ties them together is here:

- *MatchResult.* The longest boundary whose tail is whole, for every component, in device and host memory together: what
of a
  tail is on the device is used there, what is missing there is loaded from the host. The match then ends at that page,
  as if the index had no more; full pages beyond it are passable and of no use.
- *Lock and pin.* One receipt keeps the full pages down to a node and the tails of one boundary.
- *Reserve.* All that a request needs of every component, or nothing: the tails locked, fresh pages for what is to be
  loaded, and a record of its own for each state, since it will be written in place. A shared record is copied.
- *Splits and evictions.* The index tells of both. A node that loses its full pages in a tier loses its component pages
  there as well; the other way round, a component's pool that is short takes component pages alone.

A core without components has none of this: the index then runs as it does without this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidekv.states.components.component_tier import ComponentTier, Guard, reach
from tidekv.states.components.specs import Component, Ranges, longest_boundary, served_boundaries
from tidekv.states.errors import BrokenInvariant, InvalidConfig
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import MatchResult, Node, PrefixIndex, Receipt
from tidekv.states.prefix.node import TierName
from tidekv.states.types import PageIds, page_ids


class ComponentReceipt:
    """The proof of one lock ("device") or pin ("host") of a path with its tails; giving it back needs it, once."""

    __slots__ = ("full", "guards")

    def __init__(self, full: Receipt, guards: dict[str, Guard]) -> None:
        self.full = full
        self.guards = guards


class ComponentMatch(msgspec.Struct, frozen=True, eq=False):
    """What a request has of one component at its boundary.

    `table` holds the device pages of the tail at positions [first, boundary); of a state always one, the record to go
    on with, at boundary 0 as well. `own` are those that are the caller's: of the tail, then the spare ones that it
    asked for. Of those of the tail, `loads` are to be copied from host pages, `clones` from device pages of the index,
    both as source and target; a record at boundary 0 is from nowhere.
    """

    first: int
    table: PageIds
    own: PageIds
    loads: tuple[PageIds, PageIds]
    clones: tuple[PageIds, PageIds]
    stored: tuple[PageIds, PageIds]
    """Positions that neither tier has, and the pages for them: they are to come from storage."""


class Reserved(msgspec.Struct, frozen=True, eq=False):
    """The tails of one boundary by component, with the receipts that keep what they use and are loaded from."""

    boundary: int
    lock: ComponentReceipt
    pin: ComponentReceipt
    component_pages: dict[str, ComponentMatch]


class ComponentIndex:
    """The books of all components of one prefix index. Wrong calls raise BrokenInvariant: they are our bugs."""

    def __init__(self, index: PrefixIndex, components: Sequence[Component], *, page_size: int) -> None:
        if len({component.name for component in components}) != len(components):
            raise InvalidConfig(f"components have one name each, not {[component.name for component in components]}")
        self.index = index
        self.components = {component.name: component for component in components}
        self.device = {
            c.name: ComponentTier("device", PagePool(f"device {c.name}", c.device_pages)) for c in components
        }
        """By component: its books on the device."""
        self.host = {c.name: ComponentTier("host", PagePool(f"host {c.name}", c.host_pages)) for c in components}
        self._trailing_pages = {component.name: component.trailing_pages(page_size) for component in components}
        self._receipts: dict[ComponentReceipt, None] = {}
        index.tree.on_split.append(self._split)
        index.on_evict.append(self._full_copy_goes)

    @property
    def tiers(self) -> tuple[ComponentTier, ...]:
        """All books: of each component those on the device, then those on the host."""
        return tuple(tier for name in self.components for tier in (self.device[name], self.host[name]))

    # --- Finding ---

    def match(self, namespace: str, keys: bytes, *, use_host: bool = True) -> MatchResult:
        """Find the longest prefix of `keys` that the index and all components can serve, and make its end a node.

        Without `use_host` nothing is to be loaded: full pages and tails are all on the device.
        """
        pages = sum(self.probe_prefix(namespace, keys, use_host=use_host))
        match = self.index.match(namespace, keys[: pages * self.index.tree.key_bytes])
        for name in self.components:
            tail = reach(match.host_node, self._first(name, pages))[::-1]
            self.device[name].use(tail)
            self.host[name].use(tail)
        return match

    def probe_prefix(
        self, namespace: str, keys: bytes, *, use_host: bool = True, with_pending: bool = True
    ) -> tuple[int, int]:
        """Tell the lengths that `match` would find, in device and further in host pages, changing nothing at all.

        Without `with_pending`, device pages that a load is still to fill are not counted.
        """
        device_pages, host_pages = self.index.probe_prefix(namespace, keys, with_pending=with_pending)
        limit = device_pages + host_pages if use_host else device_pages
        boundary = longest_boundary(limit, self.served(namespace, keys, limit, {}, use_host=use_host))
        device_pages = min(device_pages, boundary)
        return device_pages, boundary - device_pages

    def served(
        self, namespace: str, keys: bytes, pages: int, stored: Mapping[str, set[int]], *, use_host: bool = True
    ) -> list[Ranges]:
        """Tell the boundaries that each component serves: by what the index has beside the first `pages` pages, which
        are in it, and by the positions that storage has.
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
        """How many component pages a request that goes on from `boundary` would need of storage; of its full pages the
        first `in_index` are in the index.
        """
        nodes = self._nodes_of(namespace, keys, in_index)
        count = 0
        for name in self.components:
            first = max(self._first(name, boundary), needed_from.get(name, 0))
            here = self._positions(name, nodes)
            count += sum(at not in here for at in range(first, boundary))
        return count

    def tail(self, tier: TierName, name: str, node: Node) -> tuple[int, dict[int, int]]:
        """Where the tail at the end of `node` begins, and which pages of it this tier has, by position."""
        first = self._first(name, node.depth_pages)
        pages: dict[int, int] = {}
        for above in reach(node, first):
            pages.update(self._tier(tier)[name].pages_of(above))
        return first, {at: page for at, page in pages.items() if at >= first}

    # --- Receipts ---

    def lock(self, node: Node, *, boundary: int) -> ComponentReceipt:
        """Protect full device pages down to `node`, and the device pages of the tails of `boundary` as far as there."""
        return self._hold(self.index.lock(node), self.device, boundary)

    def unlock(self, receipt: ComponentReceipt) -> None:
        """Give back a receipt of `lock`."""
        self._let_go(receipt, self.device)
        self.index.unlock(receipt.full)

    def pin(self, node: Node, *, boundary: int) -> ComponentReceipt:
        """Protect what host pages there are down to `node`: full ones, and those of the tails of `boundary`."""
        return self._hold(self.index.pin(node), self.host, boundary)

    def unpin(self, receipt: ComponentReceipt) -> None:
        """Give back a receipt of `pin`."""
        self._let_go(receipt, self.host)
        self.index.unpin(receipt.full)

    # --- Going on from a match ---

    def reserve(
        self,
        match: MatchResult,
        spare: Mapping[str, int],
        needed_from: Mapping[str, int] | None = None,
        *,
        boundary: int | None = None,
    ) -> Reserved | None:
        """Take, for a request that goes on from a match just made, what it needs of every component, and `spare` more
        pages by name; None, with nothing changed but the order of eviction, where a pool is short even so. Who has the
        end of its tail written by somebody else needs nothing of positions before `needed_from`. With `boundary` it
        goes on from there, and storage brings what the index does not have up to it.

        Nothing of it is in the index yet. When the copies are done, shared pages can be entered (`insert`).
        """
        if boundary is None:
            boundary = match.device_pages + match.host_pages
        lock = self.lock(match.device_node, boundary=boundary)
        pin = self.pin(match.host_node, boundary=boundary)
        # What is needed is guarded from here on: what can still be evicted is of no use to this request.
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
            component_pages[name] = self._tail(
                name, match.host_node, boundary, firsts[name], positions, tier.account.take(wanted[name])
            )
        return Reserved(boundary, lock, pin, component_pages)

    def release(self, reserved: Reserved) -> None:
        """Give back the receipts of what was reserved. Its pages stay the caller's."""
        self.unlock(reserved.lock)
        self.unpin(reserved.pin)

    def take_host(self, name: str, count: int) -> PageIds | None:
        """Take host pages of a component, evicting others; None, and nothing is evicted, where there are fewer."""
        tier = self.host[name]
        if tier.room < count:
            return None
        tier.evict(count - tier.account.free)
        return tier.account.take(count)

    def give_back(self, pages: Mapping[str, PageIds], tier: TierName = "device") -> None:
        """Make owned pages, by component, free."""
        for name, ours in pages.items():
            self._tier(tier)[name].account.give_back(ours)

    def drain(self, pages: Mapping[str, PageIds]) -> None:
        """Put owned device pages into the quarantine: prefill may still write to them."""
        for name, ours in pages.items():
            self.device[name].account.drain(ours)

    def settle(self, pages: Mapping[str, PageIds]) -> None:
        """Free device pages of the quarantine."""
        for name, ours in pages.items():
            self.device[name].account.settle(ours)

    # --- Growing and shrinking ---

    def insert(self, tier: TierName, name: str, node: Node, first: int, pages: PageIds) -> tuple[PageIds, PageIds]:
        """Enter pages of a component, whose bytes are in place, at positions [first, first + len(pages)) of the path to
        `node`. What the index has already wins.

        Returns the pages to use from now on, and those that are still the caller's. A record that is entered must not
        be written any more.
        """
        nodes = reach(node, first)[::-1]
        self.index.tree.require(node)
        if not 0 <= first <= first + len(pages) <= node.depth_pages:
            raise BrokenInvariant(f"{name}: positions [{first}, {first + len(pages)}) are not above the end of {node}")
        for above in nodes:
            if above.void or (above.device if tier == "device" else above.host) is None:
                raise BrokenInvariant(f"{name}: {above} has no full {tier} pages that component pages could go with")
        return self._tier(tier)[name].enter(nodes, first, pages)

    def drop(self, tier: TierName, name: str, node: Node) -> None:
        """Free a node's pages of one component, which nobody needs any more. Raises where a receipt keeps them."""
        self._tier(tier)[name].drop(node)

    def evict(self, tier: TierName, name: str, count: int) -> int:
        """Free at least `count` pages of one component's pool, or all that are evictable; returns how many. Full pages
        stay, and what was used longest ago goes first.
        """
        return self._tier(tier)[name].evict(count)

    def check(self) -> None:
        """Recount all books of all components; raises BrokenInvariant, in words, at the first contradiction."""
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
            raise BrokenInvariant("the full part of a receipt was given back without its tails")

    # --- Told by the index ---

    def _split(self, upper: Node, lower: Node) -> None:
        for name in self.components:
            self.device[name].split(upper, lower)
            self.host[name].split(upper, lower)

    def _full_copy_goes(self, node: Node, tier: TierName) -> None:
        for books in self._tier(tier).values():
            books.drop(node)

    # --- Parts ---

    def _tier(self, tier: TierName) -> dict[str, ComponentTier]:
        return self.device if tier == "device" else self.host

    def _first(self, name: str, boundary: int) -> int:
        return max(0, boundary - self._trailing_pages[name])

    def _positions(self, name: str, nodes: list[Node], *, use_host: bool = True) -> set[int]:
        """Where the index has pages of a component at these nodes."""
        positions: set[int] = set()
        for node in nodes:
            positions.update(self.device[name].pages_of(node))
            if use_host:
                positions.update(self.host[name].pages_of(node))
        return positions

    def _nodes_of(self, namespace: str, keys: bytes, pages: int) -> list[Node]:
        """The nodes that the first `pages` pages, which are in the index, lie in; the last one maybe in part."""
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

    def _let_go(self, receipt: ComponentReceipt, tiers: dict[str, ComponentTier]) -> None:
        if receipt not in self._receipts or receipt.full.kind != ("device" if tiers is self.device else "host"):
            raise BrokenInvariant(f"{receipt.full} is not such a receipt of components, or was given back before")
        del self._receipts[receipt]
        for name, guard in receipt.guards.items():
            tiers[name].unguard(guard)

    def _missing(self, name: str, node: Node, boundary: int, first: int) -> list[int]:
        """The positions for which a request needs a page of its own. Of a state that is its record, wherever it is."""
        if not self.components[name].is_shared:
            return [first]
        here = {at for above in reach(node, first) for at in self.device[name].pages_of(above)}
        return [at for at in range(first, boundary) if at not in here]

    def _tail(
        self, name: str, node: Node, boundary: int, first: int, missing: list[int], own: PageIds
    ) -> ComponentMatch:
        device: dict[int, int] = {}
        host: dict[int, int] = {}
        for above in reach(node, first):
            device.update(self.device[name].pages_of(above))
            host.update(self.host[name].pages_of(above))
        ours = dict(zip(missing, own, strict=False))
        loads, clones, stored = ((page_ids(), page_ids()) for _ in range(3))
        for position, page in ours.items():
            if position >= boundary:
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
