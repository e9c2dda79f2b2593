"""The radix tree of the prefix index: roots, nodes and edges. Independent of page pools and eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tidekv.states.errors import BrokenInvariant
from tidekv.states.prefix.node import Heat, Keys, Node, make_root, part_of


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
