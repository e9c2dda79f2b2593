"""Calls on READY requests: growth, finish, retract, drop. Also flush, which concerns no request."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidekv.states.commands import GiveReserve, ReportDropped, ReportFinished, ReportFlushed
from tidekv.states.events import GrowthTaken, RetractRequested
from tidekv.states.rollback import Rollback
from tidekv.states.types import NO_PAGES

if TYPE_CHECKING:
    from tidekv.states.backup.backups import Backups
    from tidekv.states.core_state import CoreState
    from tidekv.states.events import (
        AbortRequested,
        FinishRequested,
        FlushRequested,
        TransitionRaised,
    )
    from tidekv.states.prefix.node import TierName
    from tidekv.states.records.request import Request
    from tidekv.states.records.request_parts import Ending
    from tidekv.states.request.restore import Restore


FLUSH_PAGES_MAX = 4096
"""Pages that one step flushes at least, if there are so many. Each may be a node of the index."""


class Serving:
    """Actions of the request machine in READY, and flush."""

    def __init__(self, state: CoreState, restore: Restore, backups: Backups) -> None:
        self._state = state
        self._restore = restore
        self._backups = backups

    def grow(self, request: Request, event: GrowthTaken) -> None:
        """Move the pages that the caller took from the reserve to `own`, and refill the reserve.

        The refill includes the pages `wanted` at once. It gets what eviction can free, possibly nothing; after an
        exception the reserve is not refilled this time. An exception leaves everything as it was.
        """
        state = self._state
        taken, reserve = request.held.reserve[: event.page_count], request.held.reserve[event.page_count :]
        held = len(request.held.table) + len(taken)
        target = state.settings.reserve_pages(tokens_max=request.tokens_max, held=held)
        short = max(target - len(reserve), 0) + event.wanted
        count = min(max(short, 0), state.device.free + state.index.device_evictable)
        if short > 0 and (request.raises_of(type(event).__name__) or not (count and state.make_device_room(count))):
            count = 0
        with Rollback() as undo:
            pages = state.device.take(count) if count else NO_PAGES[:]
            undo.callback(state.device.give_back, pages)
            state.emit(GiveReserve(request_id=request.request_id, pages=pages))
            undo.keep()
        request.held.grow(taken, reserve + pages)

    def finish(self, request: Request, event: FinishRequested) -> None:
        """Keep prompt and output in the cache, back them up, give everything back.

        Can be called again after an exception: it continues from there and starts no backup.
        """
        ending = self._keep_all(request, event)
        ending.back_up(partial(self._back_up, request, retracts=False))
        self._restore.leave(request, settled=True)
        self._state.emit(
            ReportFinished(request_id=request.request_id, inserted=ending.inserted, fallbacks=request.fallbacks.made)
        )
        self._state.forget(request)

    def retract(self, request: Request, event: RetractRequested) -> None:
        """Like finish, but hold the backup in host memory until the request is resumed or dropped."""
        ending = self._keep_all(request, event)
        ending.back_up(partial(self._back_up, request, retracts=True))
        self._restore.leave(request, settled=True)
        self._state.forget(request)

    def drop(self, request: Request, event: AbortRequested) -> None:
        """Give everything back; the prompt's pages stay in the cache."""
        self._restore.leave(request, settled=True)
        self._state.emit(ReportDropped(request_id=request.request_id))
        self._state.forget(request)

    def flush(self, event: FlushRequested) -> None:
        """Drop every unlocked page of these tiers from the cache, or those of one namespace; in the next steps if they
        are many.
        """
        if event.namespace is not None and "l3" in event.tiers:
            # First: a page that is spared below may be used again, and must then be stored again.
            self._state.index.forget_stored_of(event.namespace)
        dropped = {tier: 0 for tier in event.tiers if tier != "l3"}
        self._state.begin_work(partial(self._flush, event, dropped, dict(dropped), list(dropped)))

    def _flush(self, event: FlushRequested, dropped: dict[str, int], spared: dict[str, int], left: list[str]) -> bool:
        """Drop the next pages of the tiers that are left; return whether there may be more."""
        while left:
            name: TierName = "device" if left[0] == "l1" else "host"
            freed, spared[left[0]] = self._state.index.flush(name, event.namespace, count=FLUSH_PAGES_MAX)
            dropped[left[0]] += freed
            self._state.pages_were_freed()
            if freed >= FLUSH_PAGES_MAX:
                return True
            del left[0]
        self._state.emit(ReportFlushed(call=event.call, dropped=dropped, spared=spared))
        return False

    def repeat(self, request: Request, event: TransitionRaised) -> None:
        """Let a step that raised be repeated: a finish without a backup, growth without new pages."""
        ending = request.ending
        gives_up = "backup" if ending.has_begun and not ending.is_backed_up else "nothing"
        self._restore.give_up(request, event, "growth" if event.taking == GrowthTaken.__name__ else gives_up)

    def _keep_all(self, request: Request, event: FinishRequested | RetractRequested) -> Ending:
        ending = request.ending
        ending.insert(lambda: self._insert(request, event))
        return ending

    def _insert(self, request: Request, event: FinishRequested | RetractRequested) -> int:
        """Insert the request's pages in the cache; return the number of those that are new to it."""
        settings = self._state.settings
        pages = len(request.held.table)
        if not settings.keep_output:
            pages = request.full_pages
        if not request.cache:
            return 0
        return self._restore.keep(
            request,
            event.keys[: pages * settings.key_bytes],
            event.component_pages,
            holds=isinstance(event, RetractRequested),
        )

    def _back_up(self, request: Request, *, retracts: bool) -> None:
        assert request.held.lock is not None
        if request.fallbacks.gave_up("backup"):
            self._backups.decline(request, retracts=retracts)
        else:
            self._backups.begin(request, request.held.lock.node, retracts=retracts)
