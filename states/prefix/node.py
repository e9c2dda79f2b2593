"""What the prefix index is made of: nodes and receipts. Plain values, no rules.

What the prefix index answers with: what was found of a prefix, and what became of the pages of an insert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from tidekv.states.errors import BrokenInvariant
from tidekv.states.types import PageIds, page_ids

TierName = Literal["device", "host"]

Keys: TypeAlias = "bytes | memoryview"
"""Keys of pages, one after the other: bytes of their own, or a view of longer ones. Compare prompts with them by
`bytes.startswith`, which takes both; `==` of a view compares element by element."""

# A part keeps all of the bytes alive that it is a part of: up to so many times its own length, it is not copied.
KEPT_MAX = 4


class Load(Protocol):
    """Whatever is filling a node's device pages; the index only keeps it, and tells it of splits."""

    def split(self, upper: Node, lower: Node) -> None:
        """Take note that `lower`, a node of this load, lost its first pages to the new node `upper`."""


class Node:
    """A run of pages below its parent's pages. Read it freely; only the index changes it.

    A node in the tree has device pages, host pages, or both. A root stands for the empty prefix of its namespace: it
    has empty page lists, so that "the parent has this copy" needs no exception.
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
        "keys",
        "load",
        "namespace",
        "node_id",
        "page_count",
        "parent",
        "priority",
        "served",
        "stored",
        "tick",
        "void",
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
        """The keys of its pages; `edge` gives them as bytes."""
        self.first_key = first_key
        """The key of its first page, the very object by which its parent finds it: its hash is known."""
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
        self.load: Any = None  # A Load; its owner, whose own class it is, would have to narrow it at every use.
        """What fills the device pages, until they are there."""
        self.void = False
        """The device pages are draining in place: matches end before this node."""
        self.stored = 0
        """The attachment of storage (`PageTree.attachment`) in which its pages were seen there; 0: none."""
        self.tick = tick
        self.born = tick
        self.hits = 0
        self.served = 0
        """Requests that became READY with its pages in their prompt."""
        self.priority = 0
        self.anchored = 0
        """Live device receipts of exactly this node."""
        self.guarded = 0
        """`anchored`, plus children with guarded > 0, plus 1 under load or void: while > 0, its device pages stay."""
        self.host_anchored = 0
        """Live host receipts of exactly this node."""
        self.host_guarded = 0
        """`host_anchored`, plus children with host_guarded > 0, plus 1 with host pages under load."""

    @property
    def lock_ref(self) -> int:
        """Live device receipts at or below this node: O(subtree), for checks."""
        return sum(node.anchored for node in self.subtree())

    @property
    def host_lock_ref(self) -> int:
        """Live host receipts at or below this node: O(subtree), for checks."""
        return sum(node.host_anchored for node in self.subtree())

    @property
    def is_root(self) -> bool:
        """Whether this node stands for the empty prefix."""
        return not self.page_count

    @property
    def edge(self) -> bytes:
        """The keys of its pages, one after the other: a copy where they are part of longer ones."""
        keys = self.keys
        return keys if isinstance(keys, bytes) else keys.tobytes()

    def subtree(self) -> Iterator[Node]:
        """Walk this node and all below it, parents first, in an order that depends on the calls made so far alone."""
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


class Receipt:
    """The proof of one lock ("device") or pin ("host") of one tree; giving it back needs it, and works once."""

    __slots__ = ("kind", "node", "released", "tree")

    def __init__(self, node: Node, kind: TierName, tree: object) -> None:
        self.node = node
        self.tree = tree
        self.kind: TierName = kind
        self.released = False

    def __repr__(self) -> str:
        return f"<Receipt {self.kind} of {self.node!r}{' released' if self.released else ''}>"


def make_root(node_id: int, namespace: str) -> Node:
    """Make the node of the empty prefix of a namespace."""
    root = Node(node_id, namespace=namespace, keys=b"", first_key=b"", page_count=0, parent=None, tick=0)
    root.device = page_ids()
    root.host = page_ids()
    return root


def part_of(keys: Keys, first: int, end: int) -> Keys:
    """Bytes [first, end) of `keys`: a view where that keeps little alive that it does not need, otherwise a copy."""
    count = end - first
    if count == len(keys):
        return keys
    if isinstance(keys, bytes):
        return memoryview(keys)[first:end] if len(keys) <= KEPT_MAX * count else keys[first:end]
    whole = keys.obj
    assert isinstance(whole, bytes), "views are made here alone, of bytes"
    part = keys[first:end]
    return part if len(whole) <= KEPT_MAX * count else part.tobytes()


def redeem(receipt: Receipt, kind: TierName, tree: object) -> Node:
    """Mark a receipt as given back, and return its node. Raises BrokenInvariant for a wrong one, or another tree's."""
    if receipt.tree is not tree:
        raise BrokenInvariant(f"{receipt} is of another tree")
    if receipt.kind != kind:
        raise BrokenInvariant(f"{receipt} is no {kind} receipt")
    if receipt.released:
        raise BrokenInvariant(f"{receipt} was given back before")
    receipt.released = True
    return receipt.node


class MatchResult(msgspec.Struct, frozen=True, eq=False):
    """The longest prefix found: `device_pages` pages in device memory (also such under load), then `host_pages` in host
    memory. The nodes are where each part ends; nothing is locked yet.
    """

    device_pages: int
    host_pages: int
    device_node: Node
    host_node: Node


class InsertResult(msgspec.Struct, frozen=True, eq=False):
    """What became of the pages of an insert.

    [0, n) of the prefix: `pages`, the page table to use from now on; read it, do not change it. `inserted_count` of the
    caller's pages are now the tree's. `duplicates` and `rejected` are still the caller's: the first because the tree
    has such a page already, the second because the tree could not take the prefix from there on. `node` is where the
    tree's part ends.
    """

    node: Node
    pages: PageIds
    inserted_count: int
    duplicates: PageIds
    rejected: PageIds
