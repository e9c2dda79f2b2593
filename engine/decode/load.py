"""The load of an engine, as routers ask for it."""

from __future__ import annotations

from typing import Final

import msgspec

from tidekv.engine.kv_events.load_publisher import LoadStat
from tidekv.states.core import Core

LOOKED_UP_MAX: Final = 256
"""Maximum waiting requests whose cached prefix is looked up in one reading; the others count as uncached."""


class PoolLoad(msgspec.Struct, frozen=True):
    """Pages of a pool. Evictable pages are cached and unused: a request may have them at once."""

    total: int
    free: int
    evictable: int


class EngineLoad(msgspec.Struct, frozen=True):
    """Requests, pages and tokens of an engine at one moment."""

    requests_waiting: int
    """In the queue, without pages."""
    requests_running: int
    """With pages: being restored, READY, or giving back."""
    requests_max: int
    """Limit of running requests; 0 if there is none."""
    device: PoolLoad
    host: PoolLoad
    tokens_used: int
    """Device memory that is neither free nor evictable, in tokens."""
    tokens_max: int
    """Device memory in tokens."""
    tokens_waiting: int
    """Prompt tokens of the queue."""
    tokens_waiting_uncached: int
    """Of these, tokens that neither device nor host memory had when they were first seen here."""

    @property
    def usage(self) -> float:
        """Share of device memory that is neither free nor evictable."""
        return self.tokens_used / self.tokens_max if self.tokens_max else 0.0

    def as_message(self, rank: int) -> LoadStat:
        """Return the load in the words of SGLang's routers."""
        return LoadStat(
            num_running_reqs=self.requests_running,
            num_waiting_reqs=self.requests_waiting,
            num_tokens=self.tokens_used,
            max_total_num_tokens=self.tokens_max,
            attn_dp_rank=rank,
            num_waiting_uncached_tokens=self.tokens_waiting_uncached,
            num_total_tokens=self.tokens_used + self.tokens_waiting,
            max_running_requests=self.requests_max,
        )


class LoadReader:
    """Reads the load of one core after the other. Call it on the engine's loop."""

    def __init__(self) -> None:
        self._uncached: dict[int, int] = {}
        """By number of a waiting request, the tokens that were nowhere here at its first reading."""

    def read(self, core: Core) -> EngineLoad:
        """Return the present load."""
        state, page_size = core.state, core.settings.page_size
        waiting = [request for request in state.requests.values() if request.waits_for_admission]
        uncached: dict[int, int] = {}
        for request in waiting:
            known = self._uncached.get(request.request_number)
            if known is None:
                known = request.prompt_tokens
                if len(uncached) < LOOKED_UP_MAX:
                    known -= page_size * sum(state.index.probe_prefix(request.namespace, request.keys))
            uncached[request.request_number] = known
        self._uncached = uncached
        device = PoolLoad(state.device.total, state.device.free, state.index.device_evictable)
        return EngineLoad(
            requests_waiting=len(waiting),
            requests_running=core.running,
            requests_max=core.settings.running_max,
            device=device,
            host=PoolLoad(state.host.total, state.host.free, state.index.host_evictable),
            tokens_used=(device.total - device.free - device.evictable) * page_size,
            tokens_max=device.total * page_size,
            tokens_waiting=sum(request.prompt_tokens for request in waiting),
            tokens_waiting_uncached=sum(uncached.values()),
        )
