"""Results of a modeled run: requests per second, times, and bytes by source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.published.world import Served, World


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of one arm of a table, over all its requests."""

    requests: int
    duration_s: float
    first_token_s: tuple[float, ...]
    """Time to first token of every request, in order of arrival."""
    latency_s: tuple[float, ...]
    token_s: float
    """Mean time per output token, without the first one."""
    prompt_tokens: int
    sources: dict[str, int]
    sent_bytes: float
    extends: int

    @property
    def requests_per_s(self) -> float:
        """Finished requests per second, over the whole run."""
        return self.requests / self.duration_s

    @property
    def first_token_mean_s(self) -> float:
        """Mean time to first token."""
        return sum(self.first_token_s) / self.requests


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not exceeded by this share of all values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def result_of(world: World, requests: Sequence[Served], *, begun_at_s: float, sent_before: float = 0.0) -> Result:
    """Summarize a world in which nothing is under way any more."""
    tokens = sum(request.output_tokens - 1 for request in requests) or 1
    return Result(
        requests=len(requests),
        duration_s=max(request.done_at_s for request in requests) - begun_at_s,
        first_token_s=tuple(request.first_token_s for request in requests),
        latency_s=tuple(request.done_at_s - request.arrived_at_s for request in requests),
        token_s=sum(request.done_at_s - request.ready_at_s for request in requests) / tokens,
        prompt_tokens=sum(request.prompt.tokens for request in requests),
        sources=dict(world.ledger.sources),
        sent_bytes=world.link.served - sent_before,
        extends=world.core.statistics().get("extends", 0),
    )
