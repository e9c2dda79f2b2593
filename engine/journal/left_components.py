"""What callers left of components, said so that it holds in another run of the same requests, whose pages have other
ids: the third of its own pages, or the shared page at that position.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from tidekv.states.commands import Command, ReportReady
from tidekv.states.components.specs import ComponentTable
from tidekv.states.events import ComponentLeft, Event, FinishRequested, RetractRequested

Place: TypeAlias = "tuple[bool, int]"
"""Whether a page is one of the request's own, and which of those; else the position of a shared one."""
Left: TypeAlias = "tuple[str, int, tuple[Place, ...]]"
"""Component, first position, and the pages."""


class LeftComponents:
    """Follows one run: what its READY requests were given of components."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, ComponentTable]] = {}

    def note(self, given: Iterable[Command]) -> None:
        """Note what a step has told callers."""
        for command in given:
            if isinstance(command, ReportReady):
                self._tables[command.request_id] = {table.component: table for table in command.component_pages or ()}

    def places(self, event: Event) -> tuple[Left, ...]:
        """What an event of this run leaves; what is not the request's is left out."""
        if not isinstance(event, FinishRequested | RetractRequested):
            return ()
        tables = self._tables.get(event.request_id, {})
        found = []
        for tail in event.component_pages:
            table = tables.get(tail.component)
            if table is not None:
                own = {page: (True, at) for at, page in enumerate(table.own)}
                places = (own.get(page, (False, position)) for position, page in enumerate(tail.pages, tail.first))
                found.append((tail.component, tail.first, tuple(places)))
        return tuple(found)

    def leave(self, event: Event, left: tuple[Left, ...]) -> Event:
        """An event of another run, with the pages that it leaves in this one. A component whose pages are not all there
        is left out.
        """
        if not isinstance(event, FinishRequested | RetractRequested):
            return event
        tables = self._tables.get(event.request_id, {})
        component_pages = []
        for component, first, places in left:
            table = tables.get(component)
            pages = [] if table is None else [page for place in places if (page := _page_at(table, place)) is not None]
            if len(pages) == len(places):
                component_pages.append(ComponentLeft(component, first, tuple(pages)))
        return msgspec.structs.replace(event, component_pages=tuple(component_pages))


def _page_at(table: ComponentTable, place: Place) -> int | None:
    is_own, at = place
    pages, number = (table.own, at) if is_own else (table.pages, at - table.first)
    return pages[number] if 0 <= number < len(pages) else None
