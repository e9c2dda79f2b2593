"""The radix tree of the prefix index: nodes, receipts, the tree with its roots and edges, and the results of match and
insert. Independent of page pools and eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from tidekv.states.errors import BrokenInvariant
from tidekv.states.types import PageIds, page_ids

TierName = Literal["device", "host"]

Keys: TypeAlias = "bytes | memoryview"
"""Concatenated keys of pages: bytes, or a view of longer bytes. Compare with `bytes.startswith`, which takes both;
`==` on a view compares element by element and is slow."""

# A view keeps the whole bytes alive that it is a part of. It is used up to this multiple of its own length; beyond
# that, the part is copied.
KEPT_MAX = 4


class NodeLoad(Protocol):
    """The load that fills a node's device pages. The index stores it and calls it on splits."""

    def split(self, upper: Node, lower: Node) -> None:
        """Handle that the first pages of `lower`, a node of this load, have moved to the new node `upper`."""


class Node:
    """A run of pages after its parent's pages. Only the index may change it.

    A node in the tree has device pages, host pages, or both. A root is the empty prefix of its namespace. It has empty
    page lists, so that the rule "the parent has this copy as well" needs no exception.
    """

    __slots__ = (
        "anchored",
        "born",
        "children",
        "depth_pages",
        "device",
        "device_children",
        "first_key",
        "guarded",
        "hits",
        "host",
        "host_anchored",
        "host_children",
        "host_guarded",
        "is_reclaiming",
        "keys",
        "load",
        "namespace",
        "node_id",
        "page_count",
        "parent",
        "priority",
        "renewed",
        "served",
        "stored",
        "tick",
    )

    def __init__(
        self,
        node_id: int,
        *,
        namespace: str,
        keys: Keys,
        first_key: bytes,
        page_count: int,
        parent: Node | None,
        tick: int,
    ) -> None:
        self.node_id = node_id
        self.namespace = namespace
        self.keys = keys
        """The keys of its pages; `edge` returns them as bytes."""
        self.first_key = first_key
        """The key of its first page: the same object as in the parent's `children`, so its hash is cached."""
        self.page_count = page_count
        self.depth_pages: int = page_count + (parent.depth_pages if parent is not None else 0)
        """Pages from the root to this node's end."""
        self.parent = parent
        """None at a root, and at a node that is no longer in the tree."""
        self.children: dict[bytes, Node] = {}
        self.device: PageIds | None = None
        self.host: PageIds | None = None
        self.device_children = 0
        """Children that have device pages."""
        self.host_children = 0
        self.load: Any = None  # A Load. `Any`, since its owner would have to narrow it to its own class at every use.
        """The load that fills the device pages, until they are in place."""
        self.is_reclaiming = False
        """Whether the device pages are in RECLAIMING: they drain in place, and matches end before this node."""
        self.stored = 0
        """The storage (`PageTree.attachment`) in which its pages were last seen; 0 means none. A belief: storage may
        have evicted them since.
        """
        self.renewed = 0
        """The period (`StorageAdmission.renewal`) in which storage last confirmed that, and renewed their recency."""
        self.tick = tick
        self.born = tick
        self.hits = 0
        self.served = 0
        """Number of requests that became READY with its pages in their prompt."""
        self.priority = 0
        self.anchored = 0
        """Number of live device receipts anchored at this node."""
        self.guarded = 0
        """`anchored`, plus the children with guarded > 0, plus 1 with a load or in RECLAIMING. While it is above 0, the
        device pages cannot be evicted.
        """
        self.host_anchored = 0
        """Number of live host receipts anchored at this node."""
        self.host_guarded = 0
        """`host_anchored`, plus the children with host_guarded > 0, plus 1 with a load and host pages."""

    @property
    def lock_ref(self) -> int:
        """Number of live device receipts at or below this node. O(subtree), for checks."""
        return sum(node.anchored for node in self.subtree())

    @property
    def host_lock_ref(self) -> int:
        """Number of live host receipts at or below this node. O(subtree), for checks."""
        return sum(node.host_anchored for node in self.subtree())

    @property
    def is_root(self) -> bool:
        """Whether this node is the empty prefix."""
        return not self.page_count

    @property
    def edge(self) -> bytes:
        """The concatenated keys of its pages as bytes, copied if they are a view."""
        keys = self.keys
        return keys if isinstance(keys, bytes) else keys.tobytes()

    def subtree(self) -> Iterator[Node]:
        """Iterate over this node and all below, parents first. The order depends only on the calls made so far."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack.extend(reversed(node.children.values()))

    def __repr__(self) -> str:
        copies = "+".join(name for name, pages in (("device", self.device), ("host", self.host)) if pages is not None)
        first = self.depth_pages - self.page_count
        return f"<Node {self.node_id} {self.namespace!r} pages [{first}, {self.depth_pages}) {copies}>"


class Heat(NamedTuple):
    """What the order of eviction knows of a node: the fields of `Node` of these names. Ticks are those of one tree."""

    tick: int
    born: int
    hits: int
    priority: int


class Receipt:
    """One lock ("device") or pin ("host") of one tree. Needed to release it, which works once."""

    __slots__ = ("kind", "node", "released", "tree")

    def __init__(self, node: Node, kind: TierName, tree: object) -> None:
        self.node = node
        self.tree = tree
        self.kind: TierName = kind
        self.released = False

    def __repr__(self) -> str:
        return f"<Receipt {self.kind} of {self.node!r}{' released' if self.released else ''}>"


def make_root(node_id: int, namespace: str) -> Node:
    """Return a new root: the empty prefix of a namespace."""
    root = Node(node_id, namespace=namespace, keys=b"", first_key=b"", page_count=0, parent=None, tick=0)
    root.device = page_ids()
    root.host = page_ids()
    return root


def part_of(keys: Keys, first: int, end: int) -> Keys:
    """Return bytes [first, end) of `keys`: a view, or a copy if a view would keep too much alive (KEPT_MAX)."""
    count = end - first
    if count == len(keys):
        return keys
    if isinstance(keys, bytes):
        return memoryview(keys)[first:end] if len(keys) <= KEPT_MAX * count else keys[first:end]
    whole = keys.obj
    assert isinstance(whole, bytes), "a view of keys must be of bytes"
    part = keys[first:end]
    return part if len(whole) <= KEPT_MAX * count else part.tobytes()


def redeem(receipt: Receipt, kind: TierName, tree: object) -> Node:
    """Mark a receipt as given back and return its node.

    Raises BrokenInvariant if it is of another tree or kind, or was given back before.
    """
    if receipt.tree is not tree:
        raise BrokenInvariant(f"{receipt} is of another tree")
    if receipt.kind != kind:
        raise BrokenInvariant(f"{receipt} is not a {kind} receipt")
    if receipt.released:
        raise BrokenInvariant(f"{receipt} was given back before")
    receipt.released = True
    return receipt.node


class PageTree:
    """Nodes by namespace; `key_bytes` is the width of one page's key."""

    __slots__ = ("_next_id", "attachment", "dirty_nodes", "key_bytes", "on_split", "roots", "tick")

    def __init__(self, key_bytes: int) -> None:
        if key_bytes <= 0:
            raise BrokenInvariant(f"the key of a page cannot be {key_bytes} bytes wide")
        self.key_bytes = key_bytes
        self.roots: dict[str, Node] = {}
        """Roots of the namespaces in use. A root is dropped with its last node or receipt."""
        self.tick = 0
        """Logical clock of recency; advances by one per call that uses nodes."""
        self.attachment = 1
        """Number of the attached storage. `Node.stored` of an earlier number is not valid for this one."""
        self.dirty_nodes: dict[Node, None] | None = None
        """Nodes that have changed, for `tidekv.engine.kv_events.watcher`. None if there is no watcher."""
        self.on_split: list[Callable[[Node, Node], None]] = []
        """Hooks called after a split, with the new upper node and the lower one."""
        self._next_id = 0

    def root(self, namespace: str) -> Node:
        """Return the root of a namespace, or a new one, which `require` enters with its first child or receipt.

        A lookup in an unknown namespace therefore leaves nothing behind.
        """
        return self.roots.get(namespace) or make_root(self._new_id(), namespace)

    def require(self, node: Node) -> None:
        """Raise BrokenInvariant if the node is not in the tree. A root joins the tree here."""
        # A root without children and receipts is not kept, but may be the end of a match that is used now.
        if node.parent is None and (not node.is_root or self.roots.setdefault(node.namespace, node) is not node):
            raise BrokenInvariant(f"{node} is not in the tree")

    def drop_empty_root(self, root: Node) -> None:
        """Drop a root without children and receipts."""
        if not root.children and not root.guarded and not root.host_guarded:
            self.roots.pop(root.namespace, None)

    def add_child(
        self, parent: Node, keys: bytes, first: int, first_key: bytes, *, priority: int, heat: Heat | None = None
    ) -> Node:
        """Add a node for the keys `keys[first:]` below `parent`; `first_key` is the first of them.

        The node has no copy; the caller must attach one at once. With `heat` it is not as hot as one that is used now.
        """
        end = len(keys)
        if parent.parent is None:
            self.require(parent)
        node = Node(
            self._new_id(),
            namespace=parent.namespace,
            keys=part_of(keys, first, end),
            first_key=first_key,
            page_count=(end - first) // self.key_bytes,
            parent=parent,
            tick=self.tick,
        )
        node.priority = priority
        if heat is not None:
            node.tick, node.born, node.hits, node.priority = heat
        parent.children[first_key] = node
        return node

    def remove(self, node: Node) -> None:
        """Remove a node without copies from the tree."""
        parent = node.parent
        if parent is None or node.children or node.anchored or node.host_anchored:
            raise BrokenInvariant(f"{node} cannot leave the tree: it is gone, has children or live receipts")
        del parent.children[node.first_key]
        node.parent = None
        if parent.parent is None:
            self.drop_empty_root(parent)

    def split(self, lower: Node, page_count: int, *, lower_stays: bool = True) -> Node:
        """Move the first `page_count` pages to a new node above `lower`, and return it.

        Receipts stay anchored at `lower`, which keeps its end. `lower_stays=False` means that the lower part is about
        to leave the tree: its keys stay a view, however much that keeps alive.
        """
        parent = lower.parent
        assert parent is not None and 0 < page_count < lower.page_count, lower
        cut = page_count * self.key_bytes
        keys, first_key = lower.keys, lower.first_key
        upper = Node(
            self._new_id(),
            namespace=lower.namespace,
            keys=part_of(keys, 0, cut),
            first_key=first_key,
            page_count=page_count,
            parent=parent,
            tick=lower.tick,
        )
        upper.born, upper.hits, upper.priority, upper.stored = lower.born, lower.hits, lower.priority, lower.stored
        upper.served, upper.renewed = lower.served, lower.renewed
        if lower.device is not None:
            upper.device, lower.device = lower.device[:page_count], lower.device[page_count:]
            upper.device_children = 1
        if lower.host is not None:
            upper.host, lower.host = lower.host[:page_count], lower.host[page_count:]
            upper.host_children = 1
        # The upper node has one child, which guards it if guarded itself, and a load guards each of its nodes.
        load = upper.load = lower.load
        upper.guarded = (lower.guarded > 0) + (load is not None)
        upper.host_guarded = (lower.host_guarded > 0) + (load is not None and lower.host is not None)
        lower.keys = part_of(keys, cut, len(keys)) if lower_stays else memoryview(keys)[cut:]
        lower.first_key = bytes(keys[cut : cut + self.key_bytes])
        lower.page_count -= page_count
        lower.parent = upper
        upper.children[lower.first_key] = lower
        parent.children[first_key] = upper
        if load is not None:
            load.split(upper, lower)
        for hook in self.on_split:
            hook(upper, lower)
        self.touch(upper)
        self.touch(lower)
        return upper

    def touch(self, node: Node) -> None:
        """Mark the node as changed for the watcher, if there is one."""
        if self.dirty_nodes is not None:
            self.dirty_nodes[node] = None

    def shared_pages(self, edge: Keys, keys: bytes, at: int) -> int:
        """Return the number of leading pages that `edge` and `keys[at:]` share, at least one: the first is equal."""
        if keys.startswith(edge, at):
            return len(edge) // self.key_bytes
        width, rest = self.key_bytes, len(keys) - at
        if rest < len(edge) and keys.startswith(edge[:rest], at):
            return rest // width
        # Binary search: the first `same` pages are equal, the first `different` pages are not. Comparing ranges of
        # bytes is faster than a loop over pages.
        same, different = 1, min(len(edge), rest) // width
        while different - same > 1:
            middle = (same + different) // 2
            if keys.startswith(edge[same * width : middle * width], at + same * width):
                same = middle
            else:
                different = middle
        return same

    def is_stored(self, node: Node) -> bool:
        """Whether the node's pages are believed to be in the storage that is attached now."""
        return node.stored == self.attachment

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes except roots, parents first. The order depends only on the calls made so far."""
        for root in self.roots.values():
            nodes = root.subtree()
            next(nodes)
            yield from nodes

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


class MatchResult(msgspec.Struct, frozen=True, eq=False):
    """The longest cached prefix: `device_pages` pages in device memory, including loading ones, then `host_pages` in
    host memory. The nodes are the ends of both parts. Nothing is locked.
    """

    device_pages: int
    host_pages: int
    device_node: Node
    host_node: Node


class InsertResult(msgspec.Struct, frozen=True, eq=False):
    """The result of an insert, and the owners of its pages.

    `pages` is the page table of the whole prefix from now on; do not change it. The tree has taken over
    `inserted_count` of the caller's pages. The caller still owns `duplicates`, for which the tree has other pages, and
    `rejected`, from where on the tree could not take the prefix. `node` is the end of the tree's part.
    """

    node: Node
    pages: PageIds
    inserted_count: int
    duplicates: PageIds
    rejected: PageIds
