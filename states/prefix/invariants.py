"""Invariants of the prefix index, recounted from scratch: all that its fast paths rely on. O(tree); changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import PageState
from tidekv.states.prefix.node import KEPT_MAX, Node
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from tidekv.states.prefix.node import PageTree
    from tidekv.states.prefix.tiers import DeviceTier, HostTier, Tier


def check_index(tree: PageTree, device: DeviceTier, host: HostTier) -> None:
    """Raise BrokenInvariant at the first contradiction."""
    nodes = list(tree.nodes())
    for namespace, root in tree.roots.items():
        _require(
            root.is_root and root.parent is None and root.namespace == namespace, root, "is not the namespace's root"
        )
        _require(not root.device and not root.host and root.depth_pages == 0, root, "is a root with pages")
        _require(root.children or root.guarded or root.host_guarded, root, "is a root without children and receipts")
    for node in nodes:
        _check_links(node, tree.key_bytes)
        _check_copies(node)
    # Children before parents: a parent's counts are compared with those of its children, which must be right.
    for node in [*reversed(nodes), *tree.roots.values()]:
        _check_counts(node)
    _check_device(tree, device, nodes)
    _check_host(tree, host, nodes)


def _require(condition: object, node: Node, words: str) -> None:
    if not condition:
        raise BrokenInvariant(f"{node} {words}")


def _check_links(node: Node, key_bytes: int) -> None:
    parent = node.parent
    if parent is None:
        raise BrokenInvariant(f"{node} is in the tree without a parent")
    _require(node.first_key == node.edge[:key_bytes], node, "does not begin with its first page")
    _require(parent.children.get(node.first_key) is node, node, "is not its parent's child by its first page")
    _require(len(node.keys) == node.page_count * key_bytes > 0, node, "has an edge that is not its pages' keys")
    kept = node.keys.obj if isinstance(node.keys, memoryview) else node.keys
    _require(isinstance(kept, bytes), node, "has keys that are not a view of bytes")
    # A view keeps at most KEPT_MAX times its own length alive.
    _require(len(memoryview(kept)) <= KEPT_MAX * len(node.keys), node, "keeps more keys alive than it may")
    _require(node.depth_pages == parent.depth_pages + node.page_count, node, "is not at its depth")
    _require(node.namespace == parent.namespace, node, "is in another namespace than its parent")


def _check_copies(node: Node) -> None:
    parent = node.parent
    assert parent is not None
    _require(node.device is not None or node.host is not None, node, "has no copy")
    _require(node.device is None or len(node.device) == node.page_count, node, "has a wrong number of device pages")
    _require(node.host is None or len(node.host) == node.page_count, node, "has a wrong number of host pages")
    _require(node.device is None or parent.device is not None, node, "has device pages, its parent has none")
    _require(node.host is None or parent.host is not None, node, "has host pages, its parent has none")
    _require(
        node.device is not None or (node.load is None and not node.is_reclaiming),
        node,
        "has a load or is in RECLAIMING without device pages",
    )
    _require(node.load is None or not node.is_reclaiming, node, "has a load and is in RECLAIMING")


def _check_counts(node: Node) -> None:
    children = node.children.values()
    _require(node.device_children == sum(c.device is not None for c in children), node, "miscounts device children")
    _require(node.host_children == sum(c.host is not None for c in children), node, "miscounts host children")
    _require(node.anchored >= 0 and node.host_anchored >= 0, node, "has a negative number of receipts")
    guarded = node.anchored + sum(c.guarded > 0 for c in children) + (node.load is not None or node.is_reclaiming)
    _require(node.guarded == guarded, node, f"counts {node.guarded} guards, there are {guarded}")
    loading = node.load is not None and node.host is not None
    guarded = node.host_anchored + sum(c.host_guarded > 0 for c in children) + loading
    _require(node.host_guarded == guarded, node, f"counts {node.host_guarded} host guards, there are {guarded}")
    _require(not node.guarded or node.device is not None, node, "is guarded without device pages")
    _require(not node.host_guarded or node.host is not None, node, "is host-guarded without host pages")


def _check_device(tree: PageTree, tier: DeviceTier, nodes: list[Node]) -> None:
    cached, reclaiming = page_ids(), page_ids()
    evictable = protected = 0
    for node in nodes:
        if node.device is None:
            continue
        if node.is_reclaiming:
            reclaiming += node.device
            continue
        cached += node.device
        evictable += 0 if node.guarded else node.page_count
        protected += node.page_count if node.guarded else 0
    _check_tier(tree, tier, nodes, evictable=evictable, protected=protected)
    if not tier.pool.holds(cached, PageState.CACHED) or tier.pool.cached != len(cached):
        raise BrokenInvariant("the device pages of the index are not exactly the cached pages of the device pool")
    if not tier.pool.holds(reclaiming, PageState.DRAINING):
        raise BrokenInvariant("the pages of nodes in RECLAIMING are not draining, each once, in the device pool")


def _check_host(tree: PageTree, tier: HostTier, nodes: list[Node]) -> None:
    cached = page_ids()
    evictable = protected = 0
    for node in nodes:
        if node.host is not None:
            cached += node.host
            evictable += 0 if node.host_guarded else node.page_count
            protected += node.page_count if node.host_guarded else 0
    _check_tier(tree, tier, nodes, evictable=evictable, protected=protected)
    if not tier.pool.holds(cached, PageState.CACHED) or tier.pool.cached != len(cached):
        raise BrokenInvariant("the host pages of the index are not exactly the cached pages of the host pool")


def _check_tier(tree: PageTree, tier: Tier, nodes: list[Node], *, evictable: int, protected: int) -> None:
    if (tier.evictable, tier.protected) != (evictable, protected):
        raise BrokenInvariant(
            f"{tier.name}: recounted {evictable} evictable and {protected} protected pages,"
            f" the counters are {tier.evictable} and {tier.protected}"
        )
    roots = tree.roots.values()
    anchored = sum(node.anchored if tier.name == "device" else node.host_anchored for node in (*roots, *nodes))
    if tier.receipts != anchored:
        raise BrokenInvariant(f"{tier.name}: {anchored} receipts are anchored at nodes, {tier.receipts} were issued")
    ready = [node for node in nodes if tier.is_ready(node)]
    for node in ready:
        _require(node in tier.queue, node, f"may leave {tier.name}, but is not queued")
    if tier.shares is not None:
        held = [node for node in nodes if (node.device if tier.name == "device" else node.host) is not None]
        tier.shares.check_nodes(held, ready)
    tier.queue.check()
