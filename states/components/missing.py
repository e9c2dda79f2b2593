"""Component pages that no tier delivers: they are asked of prefill by an extend of the request's own room.

A source of component pages is a fetch from storage, a copy, or the room of another request (`shared_ends`). When it
fails, the request goes on, and keeps the pages that were to be filled:

    the source has failed             ──lost──▶ `missing`     ──ask──▶ a further span of the room, into the same pages
    a copy is late, and may write yet ──late──▶ fresh pages, `missing`, and the same; the old ones stay with the copy

Prefill has the pages until it knows that the whole room has arrived. It may write to them from the extend on, so they
are among the `remote` pages of the request.

If the pool of a component has no fresh page, a late copy is waited for: what it brings is as good as before. It is
looked at again after another deadline of a copy. So it is with lent pages, whose place is fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tidekv.states.records.causes import LOST_CAUSES
from tidekv.states.rollback import Rollback
from tidekv.states.types import page_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidekv.states.core_state import CoreState, Operation
    from tidekv.states.events import Outcome
    from tidekv.states.prefix.component_index import ComponentIndex, ComponentReceipt
    from tidekv.states.records.request import Request, RequestComponents, RoomRecord
    from tidekv.states.types import PageIds

    Extend: TypeAlias = Callable[[RoomRecord, str, int, PageIds], None]
    """Asks prefill for pages of a component, given with the first position, as a further span of a room."""


class LateComponentCopy:
    """Operation: a copy that no request waits for any more. It owns what it reads and writes until it has ended."""

    __slots__ = ("_missing", "component", "device_pages", "host_pages", "left", "lock", "pin")

    def __init__(self, missing: MissingPages, component: str) -> None:
        self._missing = missing
        self.component = component
        self.device_pages: PageIds = page_ids()
        self.host_pages: PageIds = page_ids()
        self.lock: ComponentReceipt | None = None
        self.pin: ComponentReceipt | None = None
        self.left: list[RequestComponents] = []
        """Component pages of left requests, which the copy keeps alive, and of those that wait for its end."""

    def ended(self, event: Outcome, error: str) -> None:
        """Give everything back."""
        self.abandon()

    def late(self) -> None:
        """Do nothing: the copy has no deadline any more."""

    def abandon(self) -> None:
        """Give everything back. Can be called again after an exception."""
        self._missing.copy_ended(self)


class MissingPages:
    """Component pages of requests that have lost their source."""

    def __init__(
        self, state: CoreState, index: ComponentIndex, extend: Extend, settle: Callable[[RequestComponents], None]
    ) -> None:
        """`settle` is called with component pages of a left request of which a copy has ended."""
        self._state = state
        self._index = index
        self._extend = extend
        self._settle = settle

    def lost(self, held: RequestComponents, component: str, positions: Iterable[int], cause: str) -> None:
        """Record that pages have lost their source, for `cause`, a key of `LOST_CAUSES`. Raises nothing.

        Nothing writes to them any more. If the request has left, nothing is missing.
        """
        if held.request is not None:
            held.plan.lose(component, positions, cause)
            self._state.component_pages_were_lost(held.request)

    def ask(self, request: Request) -> None:
        """Ask prefill for all missing pages of a request. Can be called again after an exception."""
        held, room = request.component_pages, request.room
        if held is None:
            return
        assert room is not None, "a request without a room has no source that fails"
        plan = held.plan
        for name, missing in list(plan.missing.items()):
            for first, count in _runs(sorted(missing)):
                at = first - plan.firsts[name]
                pages = plan.tables[name][at : at + count]
                self._extend(room, name, first, pages)
                held.let_write(name, pages)
                plan.ask_prefill(name, first, count)
        request.fallbacks.note(LOST_CAUSES[plan.cause])
        self._state.request_changed(request)

    # --- Late copies ---

    def late(
        self,
        operation: Operation,
        op: int,
        component: str,
        waiting: Sequence[tuple[RequestComponents, PageIds]],
        cause: str,
        *,
        host_pages: PageIds | None = None,
        kept: Sequence[RequestComponents] = (),
    ) -> bool:
        """Let the requests of a late copy go on without it, on fresh pages; False, with nothing changed, without any.

        `waiting` are the component pages that wait for the copy, each with the positions that it reads or writes.
        `host_pages` are those that it reads, if they are its own. Those in `kept` wait for its end.
        """
        live = [(held, self._own_positions(held, component, at)) for held, at in waiting if held.request is not None]
        count = sum(len(positions) for _, positions in live)
        fresh = None if self._state.settings.lends_device else self._index.take("device", component, count)
        if fresh is None:
            self._state.set_deadline(operation, self._state.now_s + self._state.settings.copy_deadline_s, op=op)
            return False
        copy = LateComponentCopy(self, component)
        with Rollback() as undo:
            undo.callback(self._index.give_back, {component: fresh})
            for held, _ in live:
                # What it reads must stay as it is, even if its request is over before it ends.
                if copy.lock is None and held.lock is not None:
                    copy.lock = self._index.lock(held.lock.full.node, held.plan.firsts)
                    undo.callback(self._index.unlock, copy.lock)
                if copy.pin is None and held.pin is not None:
                    copy.pin = self._index.pin(held.pin.full.node, held.plan.firsts)
                    undo.callback(self._index.unpin, copy.pin)
            undo.keep()
        if host_pages is not None:
            copy.host_pages = host_pages
        copy.left = [*kept, *(held for held, _ in waiting if held.request is None)]
        for held, positions in live:
            ours, fresh = fresh[: len(positions)], fresh[len(positions) :]
            copy.device_pages += held.exchange(component, positions, ours)
            held.copy_ended()
            self.lost(held, component, positions, cause)
        self._state.replace_operation(op, copy)
        return True

    @staticmethod
    def _own_positions(held: RequestComponents, component: str, positions: PageIds) -> PageIds:
        """The positions of pages that the request owns. The others are the index's, and are not written to."""
        first, table = held.plan.firsts[component], held.plan.tables[component]
        own = set(held.own[component])
        return page_ids(at for at in positions if table[at - first] in own)

    def copy_ended(self, copy: LateComponentCopy) -> None:
        """Free what a late copy has kept. Can be called again after an exception."""
        self._index.give_back({copy.component: copy.device_pages})
        copy.device_pages = page_ids()
        self._index.give_back({copy.component: copy.host_pages}, "host")
        copy.host_pages = page_ids()
        if copy.lock is not None:
            self._index.unlock(copy.lock)
            copy.lock = None
        if copy.pin is not None:
            self._index.unpin(copy.pin)
            copy.pin = None
        while copy.left:
            held = copy.left.pop()
            held.copy_ended()
            self._settle(held)
        self._state.pages_were_freed()


def _runs(positions: list[int]) -> list[tuple[int, int]]:
    """First position and length of each run of ascending positions."""
    runs: list[tuple[int, int]] = []
    for at in positions:
        if runs and sum(runs[-1]) == at:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((at, 1))
    return runs
