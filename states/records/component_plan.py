"""The plan of a request's component pages: which position gets its page from where, and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv.states.component_specs import ComponentTable
from tidekv.states.types import page_ids, without

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidekv.states.types import PageIds


class Snapshot:
    """A snapshot of a state that a caller takes while it computes: after `boundary` pages, in `page`."""

    __slots__ = ("boundary", "page", "place")

    def __init__(self, boundary: int, page: int, place: str) -> None:
        self.boundary = boundary
        self.page = page
        """One of the request's own pages of the state."""
        self.place = place
        """Why it is worth keeping, see `tidekv.states.components.snapshots`."""


class ComponentPlan:
    """What was decided for the component pages of one request. It owns no page and no receipt."""

    __slots__ = (
        "cause",
        "firsts",
        "hits",
        "joining",
        "missing",
        "received",
        "resumed_pages",
        "sent_from",
        "snapshots",
        "tables",
    )

    def __init__(self, firsts: dict[str, int] | None = None) -> None:
        self.firsts = firsts or {}
        """By component, the first position that the end of the prompt needs."""
        self.sent_from: dict[str, int] = {}
        """By component, the first position that prefill, or a recomputing caller, writes."""
        self.tables: dict[str, PageIds] = {}
        """By component, its pages at the prompt's end, at positions starting at that of `firsts`."""
        self.joining: dict[str, int] = {}
        """By component, how many leading pages of its table join the index when the request becomes ready."""
        self.snapshots: dict[str, list[Snapshot]] = {}
        """By state, the snapshots that a recomputing caller takes, until READY."""
        self.hits: dict[str, str] = {}
        """By state, the tier that has the record of the prompt's end. Empty once it is counted."""
        self.resumed_pages = 0
        """The page from which a recomputing caller continues. 0 once it is counted."""
        self.received: dict[str, int] = {}
        """By component, the first position that is copied from the pages of another request."""
        self.missing: dict[str, set[int]] = {}
        """By component, positions that have lost their source and are not asked of prefill yet."""
        self.cause = ""
        """Key of `LOST_CAUSES`: why the last ones have."""

    def place(self, component: str, table: PageIds, *, joining: int, sent_from: int) -> None:
        """Note the page table of a component, the number of its leading pages that join the index, and the first
        position that prefill or the caller writes.
        """
        self.tables[component], self.sent_from[component] = table, sent_from
        if joining:
            self.joining[component] = joining

    def receive(self, component: str, first: int) -> None:
        """Note that the pages of a component starting at `first` are copied from another request."""
        self.received[component] = first

    def receive_nothing(self) -> dict[str, int]:
        """Note that no other request brings anything any more; return what one was to bring."""
        received, self.received = self.received, {}
        return received

    def hit(self, component: str, tier: str) -> None:
        """Note the tier that has the record of a state at the prompt's end."""
        self.hits[component] = tier

    def resume(self, pages: int) -> None:
        """Note the page from which the caller continues to compute."""
        self.resumed_pages = pages

    def were_counted(self) -> None:
        """Note that hits and resumed pages were counted."""
        self.hits, self.resumed_pages = {}, 0

    def assign(self, component: str, snapshots: list[Snapshot]) -> None:
        """Note the snapshots of a state that the caller takes."""
        self.snapshots[component] = snapshots

    def exchange(self, component: str, positions: PageIds, fresh: PageIds) -> PageIds:
        """Put fresh pages at these positions; return those that were there."""
        first, table = self.firsts[component], self.tables[component][:]
        old = page_ids(table[at - first] for at in positions)
        for at, page in zip(positions, fresh, strict=True):
            table[at - first] = page
        self.tables[component] = table
        return old

    def begin_with(self, component: str, pages: PageIds) -> None:
        """Put other pages at the first positions of a component's table."""
        self.tables[component] = pages + self.tables[component][len(pages) :]

    def lose(self, component: str, positions: Iterable[int], cause: str) -> None:
        """Note positions that have lost their source, and the key of `LOST_CAUSES` that says why."""
        if lost := {*positions}:
            self.missing.setdefault(component, set()).update(lost)
        self.cause = cause

    def ask_prefill(self, component: str, first: int, count: int) -> None:
        """Note that prefill was asked for the missing pages of a component at [first, first + count)."""
        self.missing[component].difference_update(range(first, first + count))
        if not self.missing[component]:
            del self.missing[component]

    def ask_nothing(self) -> None:
        """Note that nothing is missing: the request leaves."""
        self.missing = {}

    def page_tables(self, own: dict[str, PageIds], *, is_early: bool = False) -> tuple[ComponentTable, ...]:
        """The page table of each component for the caller of a request that owns these pages.

        A caller that begins early must not write to the pages that are to join the index: these count as shared.
        """
        tables = []
        for name, pages in own.items():
            table = self.tables[name]
            ours = without(pages, table[: self.joining.get(name, 0)]) if is_early else pages
            tables.append(ComponentTable(name, self.firsts[name], table, ours))
        return tuple(tables)
