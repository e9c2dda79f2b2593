"""Nodes and receipts of the prefix index, and the results of match and insert. Plain values, no rules."""

from __future__ import annotations

from collections.abc import Iterator
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
