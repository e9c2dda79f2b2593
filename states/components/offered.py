"""Component pages of an offer, on their way from the embedder's device pages to host memory and storage.

An offer has the component pages of its end: all pages of a window that a computation which continues there needs, the
record of a state. Those that host memory lacks are copied beside the full pages (`tidekv.states.backup.offers`). They
join the index when the full pages before that end are in host memory, and are then stored by the rules of
`tidekv.states.components.backups`. Where host memory has no room for them, or does not get all full pages before them,
they pass through it (`tidekv.states.storage.passing`); so do the last pages of a window without those before them.

A component is declined if its pages may not pass, if a copy failed, or if the offer that brings the full pages before
its own fails. The copies own their host pages until these join the index.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import CopyPages
from tidekv.states.rollback import Rollback
from tidekv.states.types import PageIds, page_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidekv.states.components.backups import ComponentBackups
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome, PagesOffered
    from tidekv.states.prefix.component_index import ComponentIndex
    from tidekv.states.prefix.node import Node
    from tidekv.states.storage.passing import Passage, Passages


class OfferedCopy:
    """Operation: the copy of the offered pages of one component that host memory lacks."""

    __slots__ = ("_offered", "component", "device_pages", "host_pages", "is_copying", "op", "positions")

    def __init__(self, offered: OfferedComponents, component: str, positions: PageIds, device_pages: PageIds) -> None:
        self._offered = offered
        self.component = component
        self.positions = positions
        self.device_pages = device_pages
        self.host_pages: PageIds = page_ids()
        """Host pages that it owns."""
        self.op = 0
        self.is_copying = False

    def ended(self, event: Outcome, error: str) -> None:
        """Let the pages join the index together with the full pages."""
        self._offered.copied(self, error)

    def late(self) -> None:
        """Count the copy as late. It still reads the pages."""
        self._offered.is_late()

    def abandon(self) -> None:
        """Give the host pages back, and let the offer end."""
        self._offered.copied(self, "raised")


class OfferedComponents:
    """The component pages of one offer."""

    def __init__(
        self,
        state: CoreState,
        index: ComponentIndex,
        backups: ComponentBackups,
        passages: Passages,
        event: PagesOffered,
        on_copied: Callable[[], None],
    ) -> None:
        """`on_copied` is called after the end of each copy, and of the last one of pages that pass."""
        self._state = state
        self._index = index
        self._backups = backups
        self._passages = passages
        self._event = event
        self._on_copied = on_copied
        self._end = len(event.keys) // state.settings.key_bytes
        self.copies: list[OfferedCopy] = []
        self.passages: list[Passage] = []
        self.declined: list[str] = []
        """Components whose pages are not, and will not be, in host memory by this offer."""

    @property
    def is_copying(self) -> bool:
        """Whether copies read the embedder's pages, or may still begin."""
        return any(copy.is_copying for copy in self.copies) or any(passage.reads for passage in self.passages)

    @property
    def pages_read(self) -> dict[str, PageIds]:
        """By component, the pages of the embedder that copies read."""
        copied = {copy.component: copy.device_pages for copy in self.copies}
        return copied | {passage.group: passage.device_pages for passage in self.passages}

    @property
    def has_pages(self) -> bool:
        """Whether host pages are to join the index."""
        return any(copy.host_pages for copy in self.copies)

    def begin(self, *, is_reached: bool) -> None:
        """Start the copies. `is_reached`: the full pages up to the end are in host memory, or on their way there."""
        for component in self._event.offered_components:
            begin = partial(self._begin, component, is_reached=is_reached)
            self._state.run_guarded(begin, recover=partial(self._decline, component))

    def _begin(self, component: str, *, is_reached: bool) -> None:
        pages, event = self._event.offered_components[component], self._event
        first, tier = self._end - len(pages), self._index.host[component]
        here = self._index.positions(event.namespace, event.keys, component, first)
        missing = page_ids(at for at in range(first, self._end) if at not in here)
        if not missing:
            return
        needed = self._index.components[component].trailing_pages(self._state.settings.page_size)
        is_whole = len(pages) == min(needed, self._end)
        if not (is_reached and is_whole) or tier.room < len(missing) or not tier.may_keep(len(missing)):
            self._pass(component, missing[0], page_ids(pages[missing[0] - first :]))
            return
        copy = OfferedCopy(self, component, missing, page_ids(pages[at - first] for at in missing))
        state = self._state
        with Rollback() as undo:
            taken = self._index.take("host", component, len(missing))
            assert taken is not None, "there was room for it before"
            undo.callback(self._index.give_back, {component: taken}, "host")
            copy.op = state.start_operation(copy, deadline_s=state.settings.copy_deadline_s)
            undo.callback(state.operations.pop, copy.op)
            state.emit(
                CopyPages(
                    op=copy.op,
                    component=component,
                    source="device",
                    source_pages=copy.device_pages,
                    target="host",
                    target_pages=taken,
                )
            )
            copy.host_pages, copy.is_copying = taken, True
            self.copies.append(copy)
            undo.keep()

    def _pass(self, component: str, first: int, pages: PageIds) -> None:
        passage = self._passages.begin(self._event, component, first, pages)
        if passage is None:
            self._decline(component)
            return
        self.passages.append(passage)
        if passage.reads:
            passage.on_read = partial(self._passed, passage)
        else:
            self._note_passed(passage)

    def _passed(self, passage: Passage) -> None:
        self._note_passed(passage)
        self._on_copied()

    def _note_passed(self, passage: Passage) -> None:
        """Decline the component if not all of its pages were copied: nothing reads them any more."""
        if passage.passed < len(passage.device_pages):
            self._decline(passage.group)

    def _decline(self, component: str) -> None:
        if component not in self.declined:
            self.declined.append(component)

    def copied(self, copy: OfferedCopy, error: str) -> None:
        """Note the end of a copy. Can be called again after an exception."""
        if error:
            self._state.count("backups_failed")
            self._give_up(copy)
        copy.is_copying = False
        self._on_copied()

    def is_late(self) -> None:
        """Count a late copy."""
        self._state.count("backups_late")

    def join(self, leaf: Node) -> None:
        """Let the copied pages join the index, if `leaf` is the offered end, and begin their writes. Raises nothing but
        BrokenInvariant: a component of which the index does not get all pages is declined.
        """
        if leaf.depth_pages == self._end:
            for copy in [copy for copy in self.copies if copy.host_pages]:
                self._state.run_guarded(partial(self._join, copy, leaf), recover=partial(self._give_up, copy))

    def _join(self, copy: OfferedCopy, leaf: Node) -> None:
        for position in copy.positions:
            _, unused = self._index.insert("host", copy.component, leaf, position, copy.host_pages[:1])
            # Update the ownership before giving pages back, so that a raise from here on loses no page.
            copy.host_pages = unused + copy.host_pages[1:]
            if unused:
                self._index.give_back({copy.component: unused}, "host")
                copy.host_pages = copy.host_pages[len(unused) :]
        first, pages = self._index.trailing_pages_of("host", copy.component, leaf)
        if len(pages) < leaf.depth_pages - first:
            self._decline(copy.component)
        else:
            self._backups.writes.begin(leaf, (copy.component,))

    def give_up(self) -> None:
        """Give back the host pages that have not joined the index. Can be called again after an exception."""
        for copy in self.copies:
            if copy.host_pages:
                self._give_up(copy)

    def _give_up(self, copy: OfferedCopy) -> None:
        self._decline(copy.component)
        self._index.give_back({copy.component: copy.host_pages}, "host")
        copy.host_pages = page_ids()
