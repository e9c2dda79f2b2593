"""Sweep of a gain: every constant of a table is halved and doubled, and varied further while the gain falls.

The gain is that in time to first token. It has ended where it is at most `ENDED`. For a constant that was varied to
`FACTOR_MAX` without ending the gain, the table shows the smallest gain found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar

from benchmarks.published.setups import CapacitySetup, RoundsSetup

ENDED = 1.05
"""Ratio at or below which a gain has ended."""
FACTOR_MAX = 8.0
FALLS = 0.98
"""A gain that keeps more than this share when a constant is halved or doubled counts as not falling."""

Setup = TypeVar("Setup", CapacitySetup, RoundsSetup)
CapacityVary = Callable[[CapacitySetup, float], CapacitySetup]
RoundsVary = Callable[[RoundsSetup, float], RoundsSetup]


@dataclass(frozen=True)
class Gains:
    """Gains of the cache in one pair of arms, as ratios: larger is better."""

    first: float
    """Requests per second with the cache over without it; or p99 of the time to first token without it over with it."""
    first_token: float
    """Median (or mean) time to first token without the cache over with it."""


@dataclass(frozen=True)
class Swept(Generic[Setup]):
    """Gains by factor of one constant, and where they end."""

    name: str
    gains: dict[float, Gains]

    @property
    def ends(self) -> list[float]:
        """The factors below and above 1 at which the gain ends, interpolated linearly between two that were run."""
        found = []
        for outward in (
            sorted((f for f in self.gains if f <= 1), reverse=True),
            sorted(f for f in self.gains if f >= 1),
        ):
            for near, far in pairwise(outward):
                before, after = self.gains[near].first_token, self.gains[far].first_token
                if before > ENDED >= after:
                    found.append(near + (far - near) * (before - ENDED) / (before - after))
                    break
        return found

    @property
    def first_range(self) -> tuple[float, float]:
        """The smallest and the greatest `Gains.first` over all factors."""
        firsts = [gains.first for gains in self.gains.values()]
        return min(firsts), max(firsts)

    @property
    def least(self) -> tuple[float, float]:
        """The factor with the smallest gain in time to first token, and that gain."""
        return min(((factor, gains.first_token) for factor, gains in self.gains.items()), key=lambda pair: pair[1])


def sweep(
    setup: Setup, varied: Sequence[tuple[str, Callable[[Setup, float], Setup]]], measure: Callable[[Setup], Gains]
) -> list[Swept[Setup]]:
    """Measure with each constant halved and doubled, and further in the direction in which the gain falls."""
    middle = measure(setup)
    found = []
    for name, vary in varied:
        gains = {1.0: middle, 0.5: measure(vary(setup, 0.5)), 2.0: measure(vary(setup, 2.0))}
        for outward in (0.5, 2.0):
            factor = outward
            while ENDED < gains[factor].first_token < FALLS * gains[factor / outward].first_token:
                if not 1 / FACTOR_MAX < factor < FACTOR_MAX:
                    break
                factor *= outward
                gains[factor] = measure(vary(setup, factor))
        found.append(Swept[Setup](name, dict(sorted(gains.items()))))
    return found


def _speed(field: str) -> Callable[[Setup, float], Setup]:
    return lambda setup, factor: replace(
        setup, speeds=replace(setup.speeds, **{field: getattr(setup.speeds, field) * factor})
    )


def _size(field: str) -> CapacityVary:
    return lambda setup, factor: replace(setup, **{field: max(1, round(getattr(setup, field) * factor))})


CAPACITY_VARIED: tuple[tuple[str, CapacityVary], ...] = (
    ("link", _speed("link_bytes_per_s")),
    ("prefill speed", _speed("prefill_tokens_per_s")),
    ("step, fixed part", _speed("step_base_s")),
    ("step, part of each request", _speed("step_request_s")),
    ("device memory", _size("pool_tokens")),
    ("shared prefix", _size("prefix_tokens")),
    ("own suffix", _size("suffix_tokens")),
    ("output", _size("output_tokens")),
    ("in flight", _size("in_flight")),
)


def _rounds_tokens(field: str) -> RoundsVary:
    # Whole pages, as in the published rounds.
    return lambda setup, factor: replace(setup, **{field: max(64, round(getattr(setup, field) * factor / 64) * 64)})


ROUNDS_VARIED: tuple[tuple[str, RoundsVary], ...] = (
    ("link", _speed("link_bytes_per_s")),
    ("prefill speed", _speed("prefill_tokens_per_s")),
    ("storage", _speed("storage_bytes_per_s")),
    ("copies", _speed("copy_bytes_per_s")),
    ("host memory", lambda setup, factor: replace(setup, host_ratio=setup.host_ratio * factor)),
    ("output, which is reused", _rounds_tokens("output_tokens")),
    ("user's tokens, which are new", _rounds_tokens("user_tokens")),
)
