"""Requests to store what storage lacks, or to hand the cache over: runs of the core, their reports, and the line that
says what became of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from tidekv.engine.decode.values import DrainOutcome
from tidekv.engine.log import engine_log
from tidekv.states import events
from tidekv.states.errors import EngineClosed, InvalidRequest, RankLost
from tidekv.states.validation import host_and_port

if TYPE_CHECKING:
    from tidekv.engine.config.engine_config import EngineConfig
    from tidekv.engine.decode.driver import Driver
    from tidekv.engine.decode.peer_cache import PeerCache
    from tidekv.engine.decode.pending_calls import PendingCalls
    from tidekv.engine.decode.rank_driver import RankDriver
    from tidekv.engine.ranks.group import RankGroup
    from tidekv.states.commands import ReportStored
    from tidekv.states.core import Core
    from tidekv.transports.base import Transport

LOG = engine_log("tidekv.engine")


class StoringEngine(Protocol):
    """The parts of an engine that a run involves."""

    calls: PendingCalls
    core: Core
    front: Driver | RankDriver
    peers: PeerCache | None
    rank_group: RankGroup | None
    transport: Transport


class StoreCalls:
    """Begins and stops runs. One is under way at a time: a further one ends it."""

    def __init__(self, parts: StoringEngine) -> None:
        self._parts = parts
        self._call = 0

    def begin(self, within_s: float, *, to: str = "", goes_on: bool = False) -> asyncio.Future[ReportStored]:
        """Begin to store what storage lacks, or to hand the cache over to the worker at `to`; the future has the
        report, at the latest after `within_s`. `goes_on` with the last run to the same worker.

        Raises InvalidRequest on a rank behind the first one, RankLost, EngineClosed.
        """
        self._call += 1
        call, parts = self._call, self._parts
        done = parts.calls.expect_stored(call)
        try:
            parts.front.post(
                events.StoreRequested(at_s=parts.front.clock(), call=call, within_s=within_s, to=to, goes_on=goes_on)
            )
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

    async def at_close(self, config: EngineConfig, *, has_storage: bool) -> None:
        """Hand the cache over to the successor that the options name, and store what storage lacks, for at most
        `close_store_s`; or end the run that a caller has left under way.
        """
        group, peers = self._parts.rank_group, config.cache_peers
        within_s = config.close_store_s if has_storage else 0.0
        if group is not None and group.rank:
            return  # The first rank's run is that of all.
        if not within_s and not peers.close_to:
            self.stop()
            return
        try:
            if to := peers.close_to:
                self.outcome([], [await self.begin(peers.close_s, to=to)], to=to)
            if within_s:
                self.outcome([], [await self.begin(within_s)])
        except (EngineClosed, RankLost):
            return  # The engine broke meanwhile, or has lost a rank: nothing more can be stored.

    def check_successor(self, to: str) -> None:
        """Raise InvalidRequest if the cache cannot be handed over to the worker at this address."""
        parts = self._parts
        if parts.peers is None or parts.peers.address is None:
            raise InvalidRequest("the cache cannot be handed over, since no worker reads it: set cache_peers.listen")
        address = parts.peers.address_of(to)
        host_and_port(address, "to")
        parts.transport.check_address(address)

    def outcome(self, live: list[str], reports: Sequence[ReportStored], *, to: str = "") -> DrainOutcome:
        """Return what runs have done, and log it in one line. Each but the first has found what was stored before."""
        if not reports:
            return DrainOutcome(live)
        last, stored = reports[-1], sum(each.stored for each in reports)
        outcome = DrainOutcome(
            live,
            stored=0 if to else stored,
            handed=stored if to else 0,
            component_pages=sum(each.components_stored for each in reports),
            present=max(last.present + last.stored - stored, 0),
            left=last.left,
            failed=last.failed,
            seconds=sum(each.seconds for each in reports),
            cause=last.cause,
        )
        if to:
            LOG.info(
                "handed the cache over",
                to=to,
                handed=outcome.handed,
                present=outcome.present,
                left=outcome.left,
                failed=outcome.failed,
                cause=outcome.cause or None,
                after_s=round(outcome.seconds, 3),
            )
            return outcome
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
