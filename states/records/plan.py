"""The plan of a restore while it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidekv.states.prefix.node import MatchResult
    from tidekv.states.records.request import Load
    from tidekv.states.types import PageIds


class Plan:
    """A plan in progress: the loads so far, where they end, and the device pages left for the rest."""

    __slots__ = ("end", "host_node", "loads", "node", "own")

    def __init__(self, match: MatchResult, own: PageIds) -> None:
        self.node = match.device_node
        self.host_node = match.host_node
        self.end = match.device_pages
        self.own = own
        self.loads: list[Load] = []

    def add(self, load: Load) -> None:
        """Append a load, which uses the next pages of `own`."""
        page_count = load.page_count
        self.loads.append(load)
        if load.nodes:
            self.node = load.nodes[-1]
        self.end += page_count
        self.own = self.own[page_count:]
