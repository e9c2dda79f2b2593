"""Insertion of complete prefixes in the prefix index. Pages already in the tree win; missing ones are added."""

from __future__ import annotations

import numpy as np

from tidekv.states.prefix.node import Heat, InsertResult, Node, PageTree
from tidekv.states.prefix.tiers import DeviceTier, HostTier
from tidekv.states.types import NO_PAGES, PageIds


def insert_prefix(
    tree: PageTree, tier: DeviceTier, root: Node, keys: bytes, pages: PageIds, priority: int
) -> InsertResult:
    """Insert `pages`, one for each key, below `root`. See PrefixIndex.insert.

    After the walk down, by position:

        [0, len(table))       device pages of the tree; the caller's are duplicates, unless they are the same pages
        [len(table), first)   host pages of the tree; the caller's become their device pages
        [first, stop)         a new leaf; empty if pages in RECLAIMING or of another load stopped the walk
        [stop, count)         rejected
    """
    count, width = len(pages), tree.key_bytes
    tree.tick = tick = tree.tick + 1
    node = root
    table, duplicates, rejected = NO_PAGES[:], NO_PAGES[:], NO_PAGES[:]
    host_only: list[Node] = []
    first, stop = 0, count
    first_key = b""
    while first < count:
        at = first * width
        first_key = keys[at : at + width]
        child = node.children.get(first_key)
        if child is None:
            break
        shared, theirs = child.page_count, child.device
        if not keys.startswith(child.keys, at):
            shared = tree.shared_pages(child.keys, keys, at)
            theirs = None if theirs is None else theirs[:shared]
        ours = pages[first : first + shared]
        if child.is_reclaiming or (child.load is not None and theirs != ours):
            # The contents of these pages are not in place, so the caller cannot use them instead of its own. Its own
            # pages may be the tree's further down, where they are not the caller's to keep.
            rejected, stop = _not_of_tree(tree, node, keys, pages, first), first
            break
        node = child if shared == child.page_count else tree.split(child, shared)
        node.tick = tick
        if node.priority < priority:
            node.priority = priority
        if theirs is None:
            host_only.append(node)
        else:
            table += theirs
            if theirs != ours:
                duplicates += _differing(ours, theirs)
        first += shared
    fresh = pages[len(table) : stop]
    # Only splits have happened so far. `to_cache` checks all pages before any is entered, so if it raises, the index is
    # unchanged.
    tier.pool.to_cache(fresh)
    for above in host_only:
        tier.attach(above, pages[above.depth_pages - above.page_count : above.depth_pages])
    if first < stop:
        node = tree.add_child(node, keys, first * width, first_key, priority=priority)
        tier.attach(node, fresh if not host_only else pages[first:])
    table += fresh if stop == count else pages[len(table) :]
    return InsertResult(node, table, len(fresh), duplicates, rejected)


def insert_host_pages(
    tree: PageTree, tier: HostTier, node: Node, keys: bytes, pages: PageIds, heat: Heat | None = None
) -> tuple[Node, PageIds]:
    """Insert host pages, taken over from the caller, for `keys` below `node`, which has host pages itself. `heat` is
    that of a new node.

    Returns the node where they end, and the pages that the caller still owns: the tree has other host pages for the
    same keys, or a node in RECLAIMING stopped the walk.
    """
    width, count, first = tree.key_bytes, len(pages), 0
    unused = NO_PAGES[:]
    first_key = b""
    while first < count:
        first_key = keys[first * width : (first + 1) * width]
        child = node.children.get(first_key)
        if child is None:
            break
        if child.is_reclaiming:
            return node, unused + pages[first:]
        shared = tree.shared_pages(child.keys, keys, first * width)
        node = child if shared == child.page_count else tree.split(child, shared)
        ours = pages[first : first + shared]
        if node.host is not None:
            unused += ours
        else:
            tier.pool.to_cache(ours)
            tier.attach(node, ours)
            if node.load is not None:
                tier.guard(node)
        first += shared
    if first < count:
        tier.pool.to_cache(pages[first:])
        node = tree.add_child(node, keys, first * width, first_key, priority=0, heat=heat)
        tier.attach(node, pages[first:])
    return node, unused


def _not_of_tree(tree: PageTree, node: Node, keys: bytes, pages: PageIds, first: int) -> PageIds:
    """Return those of `pages[first:]` that the tree below `node` does not hold at the same position."""
    ours = NO_PAGES[:]
    width, count = tree.key_bytes, len(pages)
    while first < count:
        child = node.children.get(keys[first * width : (first + 1) * width])
        if child is None:
            break
        shared = tree.shared_pages(child.keys, keys, first * width)
        run = pages[first : first + shared]
        ours += run if child.device is None else _differing(run, child.device[:shared])
        first += shared
        if shared < child.page_count:
            break
        node = child
    return ours + pages[first:]


def _differing(ours: PageIds, theirs: PageIds) -> PageIds:
    """Return the pages of `ours` that differ from the page in `theirs` at the same position."""
    first, second = np.frombuffer(ours, dtype=np.int32), np.frombuffer(theirs, dtype=np.int32)
    pages = NO_PAGES[:]
    pages.frombytes(first[first != second].tobytes())
    return pages
