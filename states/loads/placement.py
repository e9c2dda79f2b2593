"""Placement of loads: where the device pages of a load are while their contents are on their way.

`TreePlacement`  in nodes of the prefix index, where other requests find and share them
`LentPlacement`  in pages that the embedder lends to one request: no node has them, and the load ends with its request

A core uses one of them for all its loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tidekv.states.records.request import Load
from tidekv.states.rollback import Rollback
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.prefix.index import Node
    from tidekv.states.records.request import Request


class Placement(Protocol):
    """Rules about the device pages of loads."""

    ends_with_request: bool
    """Whether a load serves one request only, and ends when that request leaves."""

    def place_copy(self, load: Load, nodes: list[Node], pages: PageIds) -> None:
        """Make `pages`, from the caller, the destination of a load of nodes in host memory.

        They are the pages of the nodes from `load.first` on. After an exception, `Loads.abandon` reverses the rest.
        """
        ...

    def place_fetch(self, load: Load, request: Request, parent: Node, keys: bytes, pages: PageIds) -> None:
        """Make `pages`, from the caller, the destination of a load of `keys` from storage, below `parent`."""
        ...

    def is_blocked(self, parent: Node, first_key: bytes) -> bool:
        """Whether a node in the way keeps a load of this key from being placed below `parent`."""
        ...

    def hold(self, load: Load) -> None:
        """Protect the destination of a new load."""
        ...

    def publish(self, load: Load) -> None:
        """Give fetched host pages to the tree, if the pages before them are in host memory too.

        Otherwise the pages stay with the load and only serve as the source of its copy: the tree keeps no host pages
        below a node without any.
        """
        ...

    def pin_source(self, load: Load) -> PageIds:
        """Protect the source of the load's copy, if it belongs to the tree; return its host pages."""
        ...

    def renew(self, load: Load) -> PageIds | None:
        """Give a load fresh device pages; the caller owns the old ones. None, with nothing changed, without any."""
        ...

    def cut(self, load: Load, at: int) -> Load:
        """Cut a load at its page `at`. `load` keeps the first part; the rest is returned, without waiters."""
        ...

    def drain(self, load: Load) -> None:
        """Give up the destination while a writer may still write to it. Can be called again after an exception."""
        ...

    def take_drained(self, load: Load) -> PageIds:
        """Take the next pages of a load in RECLAIMING without a writer, still draining, from the end on.

        Empty at the end of the load, or if pages below are in use.
        """
        ...


class TreePlacement:
    """Device pages in nodes of the prefix index, under a lock of the load."""

    ends_with_request = False

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def place_copy(self, load: Load, nodes: list[Node], pages: PageIds) -> None:
        """See Placement."""
        for node in nodes:
            at = node.depth_pages - node.page_count - load.first
            self._state.index.give_device(node, pages[at : at + node.page_count], load)
            load.add_node(node)

    def place_fetch(self, load: Load, request: Request, parent: Node, keys: bytes, pages: PageIds) -> None:
        """See Placement."""
        index = self._state.index
        load.add_node(index.insert_pending(parent, request.namespace, keys, pages, load, priority=request.priority))

    def is_blocked(self, parent: Node, first_key: bytes) -> bool:
        """See Placement."""
        return first_key in parent.children

    def hold(self, load: Load) -> None:
        """See Placement."""
        load.was_locked(self._state.index.lock(load.nodes[-1]))

    def publish(self, load: Load) -> None:
        """See Placement."""
        state = self._state
        for node in load.nodes if load.tier == "l3" else ():
            state.index.mark_stored(node)
        parent = load.nodes[0].parent
        assert parent is not None
        if not state.index.has_host(parent):
            return
        for node in load.nodes:
            ours = load.host_pages[: node.page_count]
            if node.host is None:
                state.index.give_host(node, ours)
            else:
                # A look-ahead read of another request has brought the same pages meanwhile.
                state.host.give_back(ours)
            load.own_host(load.host_pages[node.page_count :])

    def pin_source(self, load: Load) -> PageIds:
        """See Placement."""
        if load.host_pages:
            return load.host_pages
        load.copy_from(self._state.index.pin(load.nodes[-1]))
        source = page_ids()
        for node in load.nodes:
            assert node.host is not None
            source += node.host
        return source

    def renew(self, load: Load) -> PageIds | None:
        """See Placement."""
        state = self._state
        if not state.make_device_room(load.page_count):
            return None
        fresh = state.device.take(load.page_count)
        # Nothing below raises, so nodes and page pool cannot end up with different pages.
        state.device.to_cache(fresh)
        old, at = load.device_pages, 0
        for node in load.nodes:
            node.device = fresh[at : at + node.page_count]
            state.index.tree.touch(node)
            at += node.page_count
        state.device.own_cached(old)
        return old

    def cut(self, load: Load, at: int) -> Load:
        """See Placement."""
        index = self._state.index
        kept = pages = 0
        while pages + load.nodes[kept].page_count <= at:
            pages += load.nodes[kept].page_count
            kept += 1
        if pages < at:
            # `Load.split` inserts the new upper node before the lower one.
            index.split(load.nodes[kept], at - pages)
            kept += 1
        rest = Load(first=load.first + at, tier=load.tier, stage=load.stage)
        # The calls that can raise come first and are reversible. The assignments after them cannot raise.
        with Rollback() as undo:
            shorter = index.lock(load.nodes[kept - 1])
            undo.callback(index.unlock, shorter)
            for node in load.nodes[kept:]:
                index.set_load(node, rest)
                undo.callback(index.set_load, node, load)
            undo.keep()
        # The lock of the whole load ends at the same node as the rest, so the rest takes it over.
        load.hand_rest(rest, at, lock=shorter)
        return rest

    def drain(self, load: Load) -> None:
        """See Placement."""
        # Hides all nodes from matches. `node.is_reclaiming` keeps a second call after an exception from draining twice.
        for node in load.nodes:
            if not node.is_reclaiming:
                self._state.index.set_reclaiming(node)

    def take_drained(self, load: Load) -> PageIds:
        """See Placement."""
        pages = self._state.index.drop_reclaiming(load.nodes[-1]) if load.nodes else None
        if pages is None:
            # A receipt or load is below: try again when pages are freed.
            return page_ids()
        load.drop_node()
        return pages


class LentPlacement:
    """Device pages lent to the load's only waiter, which stay lent until the request has its outcome."""

    ends_with_request = True

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def place_copy(self, load: Load, nodes: list[Node], pages: PageIds) -> None:
        """See Placement."""
        source = self._host_pages(nodes[-1], load.first)
        load.copy_from(self._state.index.pin(nodes[-1]), source)
        load.lend(pages)

    def place_fetch(self, load: Load, request: Request, parent: Node, keys: bytes, pages: PageIds) -> None:
        """See Placement."""
        load.lend(pages)

    def is_blocked(self, parent: Node, first_key: bytes) -> bool:
        """See Placement."""
        return False

    def hold(self, load: Load) -> None:
        """See Placement."""

    def publish(self, load: Load) -> None:
        """See Placement."""
        index, width = self._state.index, self._state.settings.key_bytes
        (request,) = load.waiters
        begin, end = load.first * width, (load.first + load.page_count) * width
        found = index.match(request.namespace, request.keys[:begin])
        if found.host_node.depth_pages < load.first:
            return
        node, left = index.insert_host(found.host_node, request.keys[begin:end], load.host_pages)
        load.own_host(left)
        # Before the pin: a pin that no load holds yet would be lost if this raised.
        source = self._host_pages(node, load.first)
        load.copy_from(index.pin(node), source)
        # Pages that were in the tree already, because another request has brought them meanwhile.
        self._state.host.give_back(load.host_pages)
        load.own_host(page_ids())
        while load.tier == "l3" and node.parent is not None and node.depth_pages > load.first:
            index.mark_stored(node)
            node = node.parent

    def pin_source(self, load: Load) -> PageIds:
        """See Placement."""
        return load.source or load.host_pages

    def renew(self, load: Load) -> PageIds | None:
        """See Placement. The place of lent pages is fixed."""
        return None

    def cut(self, load: Load, at: int) -> Load:
        """See Placement."""
        assert load.pin is None, "a load is cut before the source of its copy is pinned"
        rest = Load(first=load.first + at, tier=load.tier, stage=load.stage)
        load.hand_rest(rest, at)
        return rest

    def drain(self, load: Load) -> None:
        """See Placement."""
        if not load.is_drained:
            self._state.device.drain(load.lent)
            load.was_drained()

    def take_drained(self, load: Load) -> PageIds:
        """See Placement."""
        return load.take_lent()

    def _host_pages(self, leaf: Node, first: int) -> PageIds:
        """Return the host pages from page `first` on of the path to `leaf`."""
        pages = page_ids()
        for node in self._state.index.path(leaf):
            at = node.depth_pages - node.page_count
            if node.depth_pages > first:
                assert node.host is not None
                pages += node.host[max(first - at, 0) :]
        return pages
