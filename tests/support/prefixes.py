"""Prefixes as models of the index know them, in pages of one token."""

from __future__ import annotations

from tidekv.states.prefix.index import Node

Prefix = tuple[str, tuple[int, ...]]
"""A namespace, and the tokens."""


def keys(*tokens: int) -> bytes:
    """Return the keys of pages of one token each."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def prefix_of(node: Node) -> Prefix:
    """The prefix that ends with this node."""
    edges = []
    above: Node | None = node
    while above is not None:
        edges.append(above.edge)
        above = above.parent
    packed = b"".join(reversed(edges))
    return node.namespace, tuple(int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4))
