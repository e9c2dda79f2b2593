"""What the prefix index answers with: what was found of a prefix, and what became of the pages of an insert."""

from __future__ import annotations

import msgspec

from tidekv.states.prefix.node import Node
from tidekv.states.types import PageIds


class Match(msgspec.Struct, frozen=True, eq=False):
    """The longest prefix found: `device_pages` pages in device memory (also such under load), then `host_pages` in host
    memory. The nodes are where each part ends; nothing is locked yet.
    """

    device_pages: int
    host_pages: int
    device_node: Node
    host_node: Node


class Inserted(msgspec.Struct, frozen=True, eq=False):
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
