"""Requests to store what storage lacks: runs of the core, their reports, and the line that says what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from tidekv.engine.decode.values import DrainOutcome
from tidekv.engine.log import engine_log
from tidekv.states import events
from tidekv.states.errors import RankLost

if TYPE_CHECKING:
    from tidekv.engine.decode.driver import Driver
    from tidekv.engine.decode.pending_calls import PendingCalls
    from tidekv.engine.decode.rank_driver import RankDriver
    from tidekv.states.commands import ReportStored
    from tidekv.states.core import Core

LOG = engine_log("tidekv.engine")


class StoringEngine(Protocol):
    """The parts of an engine that a run involves."""

    calls: PendingCalls
    core: Core
    front: Driver | RankDriver


class StoreCalls:
    """Begins and stops runs. One is under way at a time: a further one ends it."""

    def __init__(self, parts: StoringEngine) -> None:
        self._parts = parts
        self._call = 0

    def begin(self, within_s: float) -> asyncio.Future[ReportStored]:
        """Begin to store what storage lacks; the future has the report, at the latest after `within_s`.

        Raises InvalidRequest on a rank behind the first one, RankLost, EngineClosed.
        """
        self._call += 1
        call, parts = self._call, self._parts
        done = parts.calls.expect_stored(call)
        try:
            parts.front.post(events.StoreRequested(at_s=parts.front.clock(), call=call, within_s=within_s))
        except BaseException:
            parts.calls.unexpect_stored(call)
            raise
        return done

    def stop(self) -> None:
        """End the run under way: writes that have begun go on, and no further one begins."""
        parts = self._parts
        if not parts.calls.is_storing:
            return
        with suppress(RankLost):  # Then nothing is under way.
            parts.front.post(events.StoreRequested(at_s=parts.front.clock(), call=0, within_s=0.0))

    def outcome(self, live: list[str], reports: Sequence[ReportStored]) -> DrainOutcome:
        """Return what runs have done, and log it in one line. Each but the first has found what was stored before."""
        if not reports:
            return DrainOutcome(live)
        last, stored = reports[-1], sum(each.stored for each in reports)
        outcome = DrainOutcome(
            live,
            stored=stored,
            component_pages=sum(each.components_stored for each in reports),
            present=max(last.present + last.stored - stored, 0),
            left=last.left,
            failed=last.failed,
            seconds=sum(each.seconds for each in reports),
        )
        LOG.info(
            "stored what storage lacked",
            stored=outcome.stored,
            component_pages=outcome.component_pages,
            present=outcome.present,
            left=outcome.left,
            failed=outcome.failed,
            after_s=round(outcome.seconds, 3),
        )
        return outcome
