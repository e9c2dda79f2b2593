"""A fetch of component pages from storage, for one request."""

from __future__ import annotations

from tidekv.states.records.stages import ComponentStage
from tidekv.states.types import PageIds, page_ids


class ComponentFetch:
    """A fetch of one component's pages from storage. It owns the host pages; the request owns the device pages."""

    __slots__ = (
        "begun_at_s",
        "component",
        "device_pages",
        "host_pages",
        "op",
        "positions",
        "queued_pages",
        "stage",
    )

    def __init__(self, component: str, positions: PageIds, device_pages: PageIds) -> None:
        self.component = component
        self.positions = positions
        self.host_pages: PageIds = page_ids()
        self.device_pages = device_pages
        self.op = 0
        self.stage = ComponentStage.FETCHING
        self.begun_at_s = 0.0
        self.queued_pages = 0

    def own_host(self, pages: PageIds) -> None:
        """Own these host pages, and no others."""
        self.host_pages = pages

    def run_as(self, op: int) -> None:
        """Note the operation that the fetch waits for."""
        self.op = op

    def was_queued(self, at_s: float, queued_pages: int) -> None:
        """Note when the read began, and the pages of all reads under way then, its own included."""
        self.begun_at_s, self.queued_pages = at_s, queued_pages

    def copy(self, op: int) -> None:
        """Note that the pages were read, and that this operation copies them to the device."""
        self.op = op
        self.stage = ComponentStage.COPYING

    def cut(self, valid: int) -> None:
        """Reduce the fetch to its first `valid` pages; the caller owns the other host pages."""
        self.positions, self.host_pages = self.positions[:valid], self.host_pages[:valid]
        self.device_pages = self.device_pages[:valid]
