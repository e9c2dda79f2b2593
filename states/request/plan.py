"""A plan in the making: how much of a prompt loads bring, and what is left for prefill. Plain values, no rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.types import PageIds

if TYPE_CHECKING:
    from tidekv.states.prefix.results import Match
    from tidekv.states.prefix.node import Node
    from tidekv.states.request.request import Load


class Plan:
    """A plan while it is made: how far the loads reach, where that ends, and the pages that are left."""

    __slots__ = ("end", "host_node", "loads", "node", "own")

    def __init__(self, match: Match, own: PageIds) -> None:
        self.node = match.device_node
        self.host_node = match.host_node
        self.end = match.device_pages
        self.own = own
        self.loads: list[Load] = []

    def add(self, load: Load, node: Node, page_count: int) -> None:
        """One more load, which took so many of the pages and ends at `node`."""
        self.loads.append(load)
        self.node = node
        self.end += page_count
        self.own = self.own[page_count:]
