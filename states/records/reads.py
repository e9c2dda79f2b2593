"""Reads of host pages from storage, and the fetch of component pages for one request."""

from __future__ import annotations

from tidekv.states.records.stages import ComponentStage
from tidekv.states.types import PageIds, page_ids


class Read:
    """One read of host pages. It owns `host_pages`."""

    __slots__ = ("begun_at_s", "host_pages", "op", "queued_pages")

    def __init__(self, host_pages: PageIds) -> None:
        self.host_pages = host_pages
        self.op = 0
        self.begun_at_s = 0.0
        self.queued_pages = 0

    def own_host(self, pages: PageIds) -> None:
        """Own these host pages, and no others."""
        self.host_pages = pages

    def run_as(self, op: int) -> None:
        """Note the operation that it waits for."""
        self.op = op

    def was_queued(self, at_s: float, queued_pages: int) -> None:
        """Record when the read began, and how many pages were under way then, its own included."""
        self.begun_at_s, self.queued_pages = at_s, queued_pages


class ComponentFetch(Read):
    """A fetch of one component's pages from storage. It owns the host pages; the request owns the device pages."""

    __slots__ = ("component", "device_pages", "positions", "stage")

    def __init__(self, component: str, positions: PageIds, device_pages: PageIds) -> None:
        super().__init__(page_ids())
        self.component = component
        self.positions = positions
        self.device_pages = device_pages
        self.stage = ComponentStage.FETCHING

    def copy(self, op: int) -> None:
        """Note that the pages were read, and that this operation copies them to the device."""
        self.run_as(op)
        self.stage = ComponentStage.COPYING

    def cut(self, valid: int) -> None:
        """Reduce the fetch to its first `valid` pages; the caller owns the other host pages."""
        self.positions = self.positions[:valid]
        self.own_host(self.host_pages[:valid])
        self.device_pages = self.device_pages[:valid]
