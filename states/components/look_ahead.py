"""Look-ahead of component pages: reads those of a prompt's end while the request waits for device memory.

The positions are those that a plan made now would fetch: the end of the prompt needs them, neither device nor host has
them, and storage has reported them without a gap. They are read into host pages that belong to the waiting request, as
the fetch of a plan would do. The plan adopts a read of exactly the positions that it fetches, so no page is read twice:

    read under way  ──adopt──▶ `ComponentFetch` in FETCHING, with the same operation
    read ended      ──adopt──▶ `ComponentFetch` in COPYING
    anything else   ──drop───▶ received pages are free; a read under way keeps its pages until it ends (`LateFetch`)

So look-ahead changes when bytes are read and never which ones: a plan that finds other positions fetches as if there
had been no look-ahead. What storage does not deliver in full or in time is taken out of its answer. Prefill sends it,
and the request, which has no plan, need not start over.

Budget, credit and limits are those of full pages (`tidekv.states.loads.look_ahead`). Component pages come first: they
are few, and a plan cannot end without them. Of several waiting requests that need the same page, only one reads it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import FetchPages
from tidekv.states.records.ahead import ComponentAhead
from tidekv.states.rollback import Rollback
from tidekv.states.storage_policy import FETCH_TIMEOUT_MAX_S
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from tidekv.states.components.storage import ComponentStorage
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import Outcome
    from tidekv.states.prefix.component_index import ComponentIndex
    from tidekv.states.records.ahead import Ahead
    from tidekv.states.records.request import Request
    from tidekv.states.storage.admission import StorageAdmission
    from tidekv.states.types import PageIds


class ComponentAheadRead:
    """Operation: one look-ahead read of component pages."""

    __slots__ = ("_lookahead", "_state", "_storage", "read", "request")

    def __init__(
        self,
        state: CoreState,
        lookahead: ComponentLookAhead,
        storage: StorageAdmission,
        request: Request,
        read: ComponentAhead,
    ) -> None:
        self._state = state
        self._lookahead = lookahead
        self._storage = storage
        self.request = request
        self.read = read

    def ended(self, event: Outcome, error: str) -> None:
        """Keep the pages for the request's plan if all of them are valid."""
        self._lookahead.read_ended(self.request, self.read, self._storage.fetch_ended(event))

    def late(self) -> None:
        """Give up the read; it continues without its request."""
        self._storage.fetch_is_late()
        # In its own `run_guarded`: the caller repeats a method that raises, which would count the call as late twice.
        self._state.run_guarded(partial(self._lookahead.is_late, self.request, self.read))

    def abandon(self) -> None:
        """Treat the request as if storage had nothing of this component."""
        self._lookahead.abandon(self.request, self.read)


class ComponentLookAhead:
    """All look-ahead reads of component pages of a core."""

    def __init__(
        self, state: CoreState, storage: StorageAdmission, index: ComponentIndex, components: ComponentStorage
    ) -> None:
        self._state = state
        self._storage = storage
        self._index = index
        self._components = components

    def start(self, request: Request, left: int) -> int:
        """Read ahead at most `left` component pages for a waiting request; return how many are under way now.

        A component is read whole or not at all. After an exception, the caller drops the request's look-ahead.
        """
        began = 0
        for name, first in self._components.needed_from(request).items() if request.answer.components else ():
            if request.ahead is not None and name in request.ahead.components:
                continue
            here = self._index.positions(request.namespace, request.keys, name, first)
            positions, _ = self._components.to_fetch(request, name, first, here)
            count = len(positions)
            if not count or count > left - began or self._is_under_way(request, name, positions):
                continue
            pages = self._components.take_host(request, name, count)
            if pages is None:
                continue
            self._read(request, ComponentAhead(name, positions, pages))
            began += count
        return began

    def _read(self, request: Request, read: ComponentAhead) -> None:
        """Start a read, which owns its host pages."""
        state, storage, count = self._state, self._storage, len(read.positions)
        deadline_s = state.settings.prefetch_deadline_s(
            count + storage.pages_in_flight, request.deadline_at_s - state.now_s
        )
        ahead = request.look_ahead(state.index.tree.attachment)
        with Rollback() as undo:
            undo.callback(self._index.give_back, {read.component: read.host_pages}, "host")
            operation = ComponentAheadRead(state, self, storage, request, read)
            read.run_as(state.start_operation(operation, deadline_s=deadline_s))
            undo.callback(state.operations.pop, read.op)
            state.emit(
                FetchPages(
                    op=read.op,
                    request_id=request.request_id,
                    component=read.component,
                    positions=read.positions,
                    host_pages=read.host_pages,
                    timeout_s=min(deadline_s, FETCH_TIMEOUT_MAX_S),
                )
            )
            undo.keep()
        ahead.add_component(read)
        storage.ahead_in_flight += 1
        storage.pages_in_flight += count
        read.was_queued(state.now_s, storage.pages_in_flight)
        storage.take(count)

    def _is_under_way(self, request: Request, name: str, positions: PageIds) -> bool:
        """Whether one of these pages, after the same tokens, is read ahead for another request."""
        width, wanted = self._state.settings.key_bytes, set(positions)
        for other in self._state.requests.values():
            if other is request or other.ahead is None or other.namespace != request.namespace:
                continue
            read = other.ahead.components.get(name)
            same = wanted.intersection(() if read is None else read.positions)
            if same and other.keys.startswith(request.keys[: (min(same) + 1) * width]):
                return True
        return False

    # --- Outcomes ---

    def read_ended(self, request: Request, read: ComponentAhead, valid: int) -> None:
        """Take the outcome of a read, whose first `valid` pages are verified. After an exception, `abandon` ends it."""
        count = len(read.positions)
        self._end_read(read)
        read.end()
        if valid < count:
            self._state.count("l3_pages_short", count - max(valid, 0))
            self._decline(request, read)
            return
        self._storage.note_throughput(begun_at_s=read.begun_at_s, pages=read.queued_pages)
        self._state.count("component_pages_fetched_ahead", count)

    def is_late(self, request: Request, read: ComponentAhead) -> None:
        """Give up a late read, which keeps its host pages until it ends."""
        self._state.count("l3_fetches_late")
        self._storage.note_throughput(begun_at_s=read.begun_at_s, pages=read.queued_pages)
        self._decline(request, read)

    def abandon(self, request: Request, read: ComponentAhead) -> None:
        """After an exception, continue without a read that has ended. Can be called again."""
        if not read.has_ended:
            read.end()
            self._end_read(read)
        self._decline(request, read)

    def _decline(self, request: Request, read: ComponentAhead) -> None:
        """Give up a read, and leave its component to prefill."""
        request.answer.forget_component(read.component)
        self.give_up(request, read)

    # --- Ends ---

    def give_up(self, request: Request, read: ComponentAhead) -> None:
        """Release a read's host pages, now or when it ends. Safe to call again."""
        if read.has_ended:
            self._index.give_back({read.component: read.host_pages}, "host")
            read.own_host(page_ids())
            self._state.pages_were_freed()
        else:
            self._storage.fetch_given_up(read, component=read.component)
            self._end_read(read)
        assert request.ahead is not None
        request.ahead.forget_component(read)

    def adopted(self, ahead: Ahead) -> None:
        """Remove the reads that are fetches of the request's plan now."""
        for read in [read for read in ahead.components.values() if read.is_adopted]:
            # `pages_in_flight` keeps counting their pages, now for a fetch.
            self._storage.ahead_in_flight -= not read.has_ended
            ahead.forget_component(read)

    def _end_read(self, read: ComponentAhead) -> None:
        """Remove a read from the counts of reads in flight."""
        self._storage.ahead_in_flight -= 1
        self._storage.pages_in_flight -= len(read.positions)
