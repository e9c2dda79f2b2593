"""Lent device pages: the embedder owns them and its own prefix cache, and lends them to one request at a time.

    embedder ──arrival, with pages and what they hold──▶ request ──outcome──▶ embedder

The prefix index has no device pages in this mode. A request is admitted at once. Host memory, storage and prefill fill
what its pages lack, by the same plan, states and deadlines as in any mode, and the request ends with READY: it has no
reserve, does not grow, and is not finished.

The outcome may be partial. If no prefill can send the rest, or the deadline passes, the request ends with a prefix of
its pages in place, and the embedder computes the rest. With components the prefix ends where windows and states can
continue (`tidekv.states.records.loan`).

Components. Their pages are lent with the same request, for the positions that the end of its prompt needs, and share
its outcome. They take the way of `tidekv.states.components.request_components`.

Pages that something may still write to are *draining*, as in any mode. A request that returns to the queue waits there
until none of its pages is draining. A request that ends gives its pages back only then, all at once, with its outcome:
until then `returning` holds both.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import ReportRestored
from tidekv.states.errors import BrokenInvariant
from tidekv.states.pages.page_pool import LentPool
from tidekv.states.prefix.node import MatchResult
from tidekv.states.rollback import Rollback
from tidekv.states.types import FULL, NO_PAGES

if TYPE_CHECKING:
    from tidekv.states.backup.backups import Backups
    from tidekv.states.backup.offers import Offers
    from tidekv.states.commands import ReportFailed
    from tidekv.states.components.request_components import ComponentRestore
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Progressed
    from tidekv.states.handover.rooms import Rooms
    from tidekv.states.records.loan import Loan
    from tidekv.states.records.request import Request
    from tidekv.states.storage.admission import StorageAdmission
    from tidekv.states.types import PageIds


class Lending:
    """Lent pages from the arrival of their request to their return."""

    def __init__(
        self,
        state: CoreState,
        storage: StorageAdmission,
        rooms: Rooms,
        offers: Offers,
        backups: Backups,
        component_pages: ComponentRestore | None,
    ) -> None:
        self._state = state
        self._component_pages = component_pages
        pools = {FULL: state.device}
        if state.components is not None:
            pools |= {name: tier.pool for name, tier in state.components.device.items()}
        self._pools = {name: pool for name, pool in pools.items() if isinstance(pool, LentPool)}
        """By group, the pool of the embedder's pages; empty if the core owns the device pages."""
        self._storage = storage
        self._rooms = rooms
        self._offers = offers
        self._backups = backups
        self.returning: dict[Loan, ReportRestored | ReportFailed] = {}
        """Loans of ended requests, each with the outcome to report when none of its pages has a writer any more."""
        self.due: dict[Loan, None] = {}
        """Loans in `returning` that are new, or of which a page has lost its writer."""
        self._drained_of: dict[str, dict[int, Loan]] = {}
        """By group, pages of loans in `returning` that had a writer when the loan was due, with the loan."""
        for group, pool in self._pools.items():
            pool.on_settle = partial(self._note_settled, self._drained_of.setdefault(group, {}))

    def lend(self, request: Request) -> None:
        """Take over the pages of a request that arrives. An exception leaves everything as it was."""
        if request.lent is None:
            return
        for group, pages in request.lent.lent.items():
            if read := self._offers.reads(group, pages):
                raise BrokenInvariant(f"pages {read} are lent to {request}, but an offer still reads them")
        with Rollback() as undo:
            self._lend(request.lent, undo)
            undo.keep()

    def _lend(self, groups: Loan, undo: Rollback) -> None:
        for group, pages in groups.lent.items():
            self._pools[group].lend(pages)
            undo.callback(self._pools[group].return_lent, pages)

    def _has_writers(self, groups: Loan) -> bool:
        return any(self._pools[group].has_writers(pages) for group, pages in groups.lent.items())

    # --- The restore ---

    def grant(self, request: Request, lent: Loan) -> bool:
        """Admit a request, unless something may still write to its pages on behalf of an earlier generation.

        After an exception, `Restore.leave` gives back what was taken so far.
        """
        if self._has_writers(lent):
            return False
        lent.forget_rest()
        match = self.match(request, lent)
        request.held.lock_at(self._state.index, match.device_node)
        request.held.pin_at(self._state.index, match.host_node)
        request.held.match(match.device_pages)
        request.held.take(lent.full.pages[match.device_pages :], NO_PAGES[:])
        if self._component_pages is not None:
            self._component_pages.hold_lent(request, lent)
        return True

    def match(self, request: Request, lent: Loan) -> MatchResult:
        """Return what is in place as the device part, and what host memory has beyond it."""
        found = self._state.index.match(request.namespace, request.keys)
        restored, end = lent.full.restored, found.host_node.depth_pages
        if end <= restored and self._component_pages is None:
            # The embedder has all of that: pinned, it would keep the room from pages that are to come.
            return MatchResult(restored, 0, found.device_node, found.device_node)
        return MatchResult(restored, max(end - restored, 0), found.device_node, found.host_node)

    def note_received(self, request: Request) -> None:
        """Note what the request's room has brought so far."""
        lent, room, held = request.lent, request.room, request.component_pages
        if lent is None or room is None:
            return
        for span in room.spans:
            pages = lent.full if span.component == FULL else lent.components[span.component]
            pages.note(span.first, span.received(room.ranks) - span.first, "transfer")
        # Prefill sends what was promised of components before the last chunk of span 0.
        if held is not None and room.ranks and len(room.spans[0].ended) == room.ranks:
            for name, first in held.plan.sent_from.items():
                lent.components[name].note(first, request.page_count - first, "transfer")

    def commit(self, request: Request, event: Progressed) -> None:
        """End the request: the whole prompt is in place."""
        state = self._state
        room, lock = request.room, request.held.lock
        assert room is not None and lock is not None
        self.note_received(request)
        leaf = state.index.match(request.namespace, request.keys).host_node
        if state.settings.write == "selective":
            # The policy counts the prompts that each page was a part of.
            state.index.note_served(leaf)
        if self._component_pages is not None and request.component_pages is not None:
            if request.component_pages.lock is not None:
                # Otherwise an exception has interrupted `leave`.
                self._component_pages.commit(request)
            self._component_pages.leave(request)
        with Rollback() as undo:
            undo.callback(state.take_commands_back, len(state.out))
            self._rooms.receive(room)
            undo.callback(self._rooms.reopen, room)
            state.index.unlock(lock)
            undo.keep()
        request.held.drop_lock()
        self._storage.leave_query(request)
        # Storage does not see hits on the device or the host, and would evict the pages as unused.
        self._backups.renew(leaf)
        self.end_with(request)

    # --- The return ---

    def end_with(self, request: Request, cause: str = "", detail: str = "") -> None:
        """Forget a request that holds nothing any more; report what is in place once its pages have no writer."""
        lent, settings = request.lent, self._state.settings
        assert lent is not None
        sources = lent.sources(prompt_tokens=request.prompt_tokens, page_size=settings.page_size)
        outcome = ReportRestored(
            request_id=request.request_id,
            generation=request.generation,
            restored_tokens=sum(sources.values()),
            sources=sources,
            cause=cause,
            detail=detail,
            fallbacks=request.fallbacks.made,
        )
        self._state.forget(request)
        self._owe(lent, outcome)

    def report_failed(self, request: Request, report: ReportFailed) -> None:
        """Report the failure of a request that has left: at once, or when its lent pages have no writer any more."""
        if request.lent is None:
            self._state.emit(report)
        else:
            self._owe(request.lent, report)

    def _owe(self, lent: Loan, outcome: ReportRestored | ReportFailed) -> None:
        self.returning[lent] = outcome
        self.due[lent] = None

    def _note_settled(self, drained_of: dict[int, Loan], pages: PageIds) -> None:
        self.due.update((drained_of[page], None) for page in pages if page in drained_of)

    def return_lent(self) -> None:
        """Return the pages of the first loan that is due, with its outcome, unless they have a writer. Can be called
        again after an exception.
        """
        lent = next(iter(self.due))
        if self._has_writers(lent):
            for group, pages in lent.lent.items():
                self._drained_of[group].update(dict.fromkeys(pages, lent))
        else:
            with Rollback() as undo:
                for group, pages in lent.lent.items():
                    self._pools[group].return_lent(pages)
                    undo.callback(self._pools[group].lend, pages)
                self._state.emit(self.returning[lent])
                undo.keep()
            del self.returning[lent]
            for group, pages in lent.lent.items():
                for page in pages:
                    self._drained_of[group].pop(page, None)
        del self.due[lent]
