"""The bare radix tree under the prefix index: roots, nodes and edges. It knows nothing of accounts or evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tidekv.states.errors import BrokenInvariant
from tidekv.states.prefix.node import Keys, Node, make_root, part_of


class PageTree:
    """Nodes by namespace; `key_bytes` is the width of one page's key."""

    __slots__ = ("_next_id", "attachment", "dirty_nodes", "key_bytes", "on_split", "roots", "tick")

    def __init__(self, key_bytes: int) -> None:
        if key_bytes <= 0:
            raise BrokenInvariant(f"a page's key cannot be {key_bytes} bytes wide")
        self.key_bytes = key_bytes
        self.roots: dict[str, Node] = {}
        """The namespaces in use; an empty one goes with its last node or receipt."""
        self.tick = 0
        """The logical clock of recency: one a call that uses nodes."""
        self.attachment = 1
        """Counts what was attached as storage: what is known of an earlier one is not known of this one."""
        self.dirty_nodes: dict[Node, None] | None = None
        """See `tidekv.engine.kv_events.watcher`."""
        self.on_split: list[Callable[[Node, Node], None]] = []
        """Told of a split that has been made: the upper node, which is new, and the lower one."""
        self._next_id = 0

    def root(self, namespace: str) -> Node:
        """Find the root of a namespace, or make one, which joins the tree with its first child or receipt (`require`).

        A look at an unknown namespace therefore leaves nothing behind.
        """
        return self.roots.get(namespace) or make_root(self._new_id(), namespace)

    def require(self, node: Node) -> None:
        """Raise BrokenInvariant if the node is not in the tree (any more). A root joins it."""
        # A root without children and receipts is not kept. It may still be the end of a match, which is used now.
        if node.parent is None and (not node.is_root or self.roots.setdefault(node.namespace, node) is not node):
            raise BrokenInvariant(f"{node} is not in the tree")

    def drop_empty_root(self, root: Node) -> None:
        """Forget a namespace that nothing is left of."""
        if not root.children and not root.guarded and not root.host_guarded:
            self.roots.pop(root.namespace, None)

    def add_child(self, parent: Node, keys: bytes, first: int, first_key: bytes, *, priority: int) -> Node:
        """Add a node of the pages `keys[first:]`, of which the first has the key `first_key`, below `parent`. It has no
        copy yet, which the caller mends at once.
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
        parent.children[first_key] = node
        return node

    def remove(self, node: Node) -> None:
        """Take a node without copies out of the tree."""
        parent = node.parent
        if parent is None or node.children or node.anchored or node.host_anchored:
            raise BrokenInvariant(f"{node} cannot leave the tree: it is gone, has children or live receipts")
        del parent.children[node.first_key]
        node.parent = None
        if parent.parent is None:
            self.drop_empty_root(parent)

    def split(self, lower: Node, page_count: int, *, lower_stays: bool = True) -> Node:
        """Cut the first `page_count` pages off into a new node above, and return that. Receipts stay where they end.

        Where the lower part is about to leave the tree, its keys are not copied, however much they keep alive.
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
        upper.served = lower.served
        if lower.device is not None:
            upper.device, lower.device = lower.device[:page_count], lower.device[page_count:]
            upper.device_children = 1
        if lower.host is not None:
            upper.host, lower.host = lower.host[:page_count], lower.host[page_count:]
            upper.host_children = 1
        # A load guards each of its nodes; what is guarded below guards once more.
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
        """Note for whoever watches that the node is no longer what it was."""
        if self.dirty_nodes is not None:
            self.dirty_nodes[node] = None

    def shared_pages(self, edge: Keys, keys: bytes, at: int) -> int:
        """Count the pages that `edge` and `keys[at:]` begin with together. The first is known to be the same."""
        if keys.startswith(edge, at):
            return len(edge) // self.key_bytes
        width, rest = self.key_bytes, len(keys) - at
        if rest < len(edge) and keys.startswith(edge[:rest], at):
            return rest // width
        # The first `same` pages are the same, the first `different` are not: halve what is between, by whole compares.
        same, different = 1, min(len(edge), rest) // width
        while different - same > 1:
            middle = (same + different) // 2
            if keys.startswith(edge[same * width : middle * width], at + same * width):
                same = middle
            else:
                different = middle
        return same

    def is_stored(self, node: Node) -> bool:
        """Tell whether the node's pages were in the storage that is attached now, when last seen."""
        return node.stored == self.attachment

    def nodes(self) -> Iterator[Node]:
        """Walk all nodes but the roots, parents first, in an order that depends on the calls made so far alone."""
        for root in self.roots.values():
            nodes = root.subtree()
            next(nodes)
            yield from nodes

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
