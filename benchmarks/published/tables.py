"""The published tables as reproduced by the modeled world."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.published.capacity import run_capacity
from benchmarks.published.results import Result, quantile
from benchmarks.published.rounds import Rounds, run_rounds
from benchmarks.published.setups import LINKS_BYTES_PER_S, TOKEN_STEP_S, CapacitySetup, RoundsSetup
from benchmarks.published.sweep import CAPACITY_VARIED, ROUNDS_VARIED, Gains, Setup, Swept, sweep
from tidekv.engine.config.engine_config import EngineConfig

DEFAULT_PREFETCH = EngineConfig().storage.prefetch
LOW_IN_FLIGHT = 30
HIGH_IN_FLIGHT = 256


@dataclass(frozen=True)
class CapacityArms:
    """The capacity effect without and with the decode cache."""

    without: Result
    cached: Result

    @property
    def gains(self) -> Gains:
        """Gains in requests per second and in median time to first token."""
        return Gains(
            self.cached.requests_per_s / self.without.requests_per_s,
            quantile(self.without.first_token_s, 0.5) / quantile(self.cached.first_token_s, 0.5),
        )

    @property
    def bytes_saved(self) -> float:
        """The share of the baseline's bytes that prefill did not send."""
        return 1 - self.cached.sent_bytes / self.without.sent_bytes


@dataclass(frozen=True)
class RoundsArms:
    """The rounds without and with host memory and storage."""

    without: Rounds
    cached: Rounds

    @property
    def gains(self) -> Gains:
        """Gains in p99 and mean of the time to first token."""
        return Gains(
            quantile(self.without.all.first_token_s, 0.99) / quantile(self.cached.all.first_token_s, 0.99),
            self.without.all.first_token_mean_s / self.cached.all.first_token_mean_s,
        )

    @property
    def token_more(self) -> float:
        """Relative increase of the time per output token with the cache."""
        return self.cached.all.token_s / self.without.all.token_s - 1


def capacity_arms(setup: CapacitySetup, seed: int = 1) -> CapacityArms:
    """Run both arms in the same world."""
    return CapacityArms(run_capacity(setup, cache=False, seed=seed), run_capacity(setup, cache=True, seed=seed))


def rounds_arms(setup: RoundsSetup, seed: int = 1) -> RoundsArms:
    """Run both arms in the same world."""
    return RoundsArms(run_rounds(setup, cache=False, seed=seed), run_rounds(setup, cache=True, seed=seed))


@dataclass(frozen=True)
class AtLink:
    """The gains of both tables at one link speed: of the rounds with the assumed policy, and with the default one."""

    bytes_per_s: float
    capacity: Gains
    rounds: Gains
    rounds_default: Gains


@dataclass(frozen=True)
class Paper:
    """All tables."""

    capacity: CapacityArms
    warm: CapacityArms
    """`capacity` with one request of the prefix served before."""
    token_step: CapacityArms
    """`capacity` with steps by the published milliseconds per token, and prefill as fast as its GPUs are."""
    token_step_alone: CapacityArms
    """`capacity` with these steps, and prefill as slow as in the other runs."""
    high: CapacityArms
    """`capacity` with more requests in flight."""
    low: CapacityArms
    """`capacity` with so few in flight that all fit without the cache, too; this run was not published."""
    rounds: RoundsArms
    rounds_default: RoundsArms
    """The rounds with the prefetch policy that is the default of tidekv."""
    rounds_alone: RoundsArms
    """The rounds, if prefill does not read what decode has stored."""
    capacity_swept: tuple[Swept[CapacitySetup], ...] = ()
    low_swept: tuple[Swept[CapacitySetup], ...] = ()
    rounds_swept: tuple[Swept[RoundsSetup], ...] = ()
    rounds_default_swept: tuple[Swept[RoundsSetup], ...] = ()
    links: tuple[AtLink, ...] = ()


def run_paper(
    capacity: CapacitySetup | None = None, rounds: RoundsSetup | None = None, *, seed: int = 1, swept: bool = True
) -> Paper:
    """Run all tables. With `swept`, run them at every link speed, and vary every constant from half to double and on to
    the end of the gain.
    """
    capacity, rounds = capacity or CapacitySetup(), rounds or RoundsSetup()
    base_s, request_s = TOKEN_STEP_S
    slow_prefill = replace(capacity.speeds, step_base_s=base_s, step_request_s=request_s)
    low = replace(capacity, in_flight=LOW_IN_FLIGHT)
    default = replace(rounds, prefetch=DEFAULT_PREFETCH)
    paper = Paper(
        capacity=capacity_arms(capacity, seed),
        warm=capacity_arms(replace(capacity, warm=True), seed),
        token_step=capacity_arms(capacity.by_token_step(), seed),
        token_step_alone=capacity_arms(replace(capacity, speeds=slow_prefill), seed),
        high=capacity_arms(replace(capacity, in_flight=HIGH_IN_FLIGHT), seed),
        low=capacity_arms(low, seed),
        rounds=rounds_arms(rounds, seed),
        rounds_default=rounds_arms(default, seed),
        rounds_alone=rounds_arms(replace(rounds, prefill_reads_storage=False), seed),
    )
    if not swept:
        return paper
    link_alone = [(name, vary) for name, vary in CAPACITY_VARIED if name in ("link", "prefill speed")]
    return replace(
        paper,
        capacity_swept=tuple(sweep(capacity, CAPACITY_VARIED, lambda setup: capacity_arms(setup, seed).gains)),
        low_swept=tuple(sweep(low, link_alone, lambda setup: capacity_arms(setup, seed).gains)),
        rounds_swept=rounds_sweep(rounds, seed),
        rounds_default_swept=rounds_sweep(default, seed),
        links=tuple(_at_link(capacity, rounds, default, bytes_per_s, seed) for bytes_per_s in LINKS_BYTES_PER_S),
    )


def rounds_sweep(setup: RoundsSetup, seed: int = 1) -> tuple[Swept[RoundsSetup], ...]:
    """Vary every constant of the rounds."""
    return tuple(sweep(setup, ROUNDS_VARIED, lambda varied: rounds_arms(varied, seed).gains))


def _at_link(
    capacity: CapacitySetup, rounds: RoundsSetup, default: RoundsSetup, bytes_per_s: float, seed: int
) -> AtLink:
    return AtLink(
        bytes_per_s,
        capacity_arms(_with_link(capacity, bytes_per_s), seed).gains,
        rounds_arms(_with_link(rounds, bytes_per_s), seed).gains,
        rounds_arms(_with_link(default, bytes_per_s), seed).gains,
    )


def _with_link(setup: Setup, bytes_per_s: float) -> Setup:
    return replace(setup, speeds=replace(setup.speeds, link_bytes_per_s=bytes_per_s))
