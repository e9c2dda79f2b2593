"""Pages that an earlier process left in host memory: they join the tree before the first request.

Their bytes are complete, but may have changed since: whatever copies or stores them verifies them first, and reports a
damaged page as it does for any other page in host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.errors import IllegalEvent
from tidekv.states.pages.page_pool import PageState
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import FoundComponent, FoundRun, HostPagesFound
    from tidekv.states.prefix.index import Node

BEGINNING = -1
"""`FoundRun.after` of the first pages of a prompt."""


class FoundPages:
    """Enters found host pages in the prefix index."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def take(self, event: HostPagesFound) -> None:
        """Enter all runs in the tree. Raises IllegalEvent, having changed nothing, for pages that are not free."""
        state, width = self._state, self._state.settings.key_bytes
        pages = [page for run in event.runs for page in run.pages]
        if any(not run.pages or len(run.keys) != len(run.pages) * width for run in event.runs):
            raise IllegalEvent("runs of found host pages need one key for each page")
        if not all(0 <= page < state.host.total for page in pages):
            raise IllegalEvent(f"found host pages are not pages of a pool of {state.host.total}")
        if not state.host.holds(page_ids(pages), PageState.FREE):
            raise IllegalEvent("found host pages are not free, or are named twice")
        of_components = self._by_component(event)
        state.host.take_named(page_ids(pages))
        ends: dict[int, Node] = {}
        for run in event.runs:
            self._enter(run, ends)
        for name, found in of_components.items():
            self._enter_component(name, found)

    def _enter(self, run: FoundRun, ends: dict[int, Node]) -> None:
        """Enter a run below the end of the one before it; `ends` has the ends of runs, by their last page."""
        state, tree = self._state, self._state.index.tree
        above = tree.root(run.namespace) if run.after == BEGINNING else ends.get(run.after)
        pages = page_ids(run.pages)
        if above is None:
            state.host.give_back(pages)
            return
        # Each run is used later than those before it, so the least recently written pages are evicted first.
        tree.tick += 1
        ends[run.pages[-1]], unused = state.index.insert_host(above, run.keys, pages)
        # Two records for one place in a prompt: the older one is kept.
        state.host.give_back(unused)
        state.count("l2_pages_found", len(run.pages) - len(unused))

    def _by_component(self, event: HostPagesFound) -> dict[str, list[FoundComponent]]:
        """Return the found pages of each component. Raises IllegalEvent for pages that are not free pages of one."""
        index = self._state.components
        by_component: dict[str, list[FoundComponent]] = {}
        for found in event.component_pages:
            if index is None or found.component not in index.host:
                raise IllegalEvent(f"found host pages are of an unknown component {found.component!r}")
            by_component.setdefault(found.component, []).append(found)
        for name, several in by_component.items():
            assert index is not None
            pool, pages = index.host[name].pool, [found.page for found in several]
            in_pool = all(0 <= page < pool.total for page in pages)
            if not in_pool or not pool.holds(page_ids(pages), PageState.FREE):
                raise IllegalEvent(f"found host pages of {name!r} are not free pages of its pool, each named once")
        return by_component

    def _enter_component(self, name: str, several: list[FoundComponent]) -> None:
        index = self._state.components
        assert index is not None
        index.host[name].pool.take_named(page_ids(found.page for found in several))
        places = {
            page: (node, node.depth_pages - node.page_count + at)
            for node in self._state.index.nodes()
            for at, page in enumerate(node.host or ())
        }
        for found in several:
            place = places.get(found.beside)
            left = page_ids((found.page,))
            if place is not None:
                # A node keeps its end when it is split, and its first pages go to a node above it.
                node, position = place
                _, left = index.insert("host", name, node, position, left)
            index.give_back({name: left}, "host")
