"""Restore or transfer: prompts that storage and prefill both have, over all ratios of link and disk speed.

All prompts are different. Most of each is in storage, none in host or device memory, and prefill has computed all of
it, so both sources can deliver every page except the last few, which only prefill has. `planned` is the default policy,
`prefetch` "soonest"; the others are fixed policies: always restore what storage has, always transfer, which is to have
no cache, and restore until the transfer is done. The product of both speeds is the same for every ratio.

The policy must beat each fixed one on average, without the requests that are in flight before any throughput is known:
these mostly use the transfer. It must not be worse than no cache at any quantile, those requests included.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import mean
from typing import TYPE_CHECKING

from benchmarks.published.prompts import Prompt, Stretch
from benchmarks.published.results import quantile, result_of
from benchmarks.published.setups import KI, PAGE_TOKENS, Speeds
from benchmarks.published.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

RATIOS = tuple(2.0**power for power in range(-4, 5))
"""Speed of the link over speed of the disk."""
PLANNED = "planned"
NO_CACHE = "always transfer"
POLICIES: dict[str, dict[str, object]] = {
    PLANNED: {"prefetch": "soonest"},
    "always restore": {"prefetch": "wait_complete"},
    NO_CACHE: {"prefetch": "wait_complete", "prefetch_threshold_tokens": 1 << 40},
    "restore until the transfer is done": {"prefetch": "best_effort"},
}


@dataclass(frozen=True, kw_only=True)
class SourcesSetup:
    """Parameters, all of them assumptions: only ratios count here, and the one that matters is swept."""

    token_bytes: float = 128 * KI
    bytes_per_s: float = 10e9
    """Speed of link and disk at a ratio of 1."""
    requests: int = 60
    prompt_pages: tuple[int, int] = (256, 1024)
    own_pages: int = 8
    """Pages of each prompt that storage does not have."""
    in_flight: tuple[int, ...] = (1, 8)


@dataclass(frozen=True)
class Raced:
    """Times to ready by policy, in seconds and in order of arrival, at one ratio and concurrency."""

    ratio: float
    in_flight: int
    ready_s: dict[str, tuple[float, ...]]

    @property
    def mean_s(self) -> dict[str, float]:
        """Mean time to ready by policy, without the requests that were in flight before anything was measured."""
        return {name: mean(times[self.in_flight :]) for name, times in self.ready_s.items()}

    @property
    def over_best_fixed(self) -> float:
        """Mean time of the planned policy over that of the best fixed one."""
        means = self.mean_s
        return means.pop(PLANNED) / min(means.values())

    def faster_than(self, policy: str) -> float:
        """Factor by which the planned policy is faster on average."""
        return self.mean_s[policy] / self.mean_s[PLANNED]

    def over_no_cache(self, share: float) -> float:
        """Quantile of the planned policy's times over that without cache."""
        return quantile(self.ready_s[PLANNED], share) / quantile(self.ready_s[NO_CACHE], share)


def race(setup: SourcesSetup | None = None, *, seed: int = 1) -> list[Raced]:
    """Run every policy at every ratio."""
    setup = setup or SourcesSetup()
    return [
        Raced(
            ratio,
            in_flight,
            {name: ready_s(setup, ratio, in_flight, policy, seed=seed) for name, policy in POLICIES.items()},
        )
        for in_flight in setup.in_flight
        for ratio in RATIOS
    ]


def ready_s(
    setup: SourcesSetup,
    ratio: float,
    in_flight: int,
    policy: dict[str, object],
    *,
    seed: int = 1,
    slow_down: float = 1.0,
) -> tuple[float, ...]:
    """Return the times to ready. Storage becomes `slow_down` times as slow after half of the requests."""
    speeds = Speeds(
        token_bytes=setup.token_bytes,
        prefill_workers=1,
        prefill_tokens_per_s=1e12,
        link_bytes_per_s=setup.bytes_per_s * ratio**0.5,
        storage_bytes_per_s=setup.bytes_per_s / ratio**0.5,
        copy_bytes_per_s=1e3 * setup.bytes_per_s,
        step_base_s=1e-6,
        step_request_s=0.0,
    )
    pages = 2 * (in_flight + 1) * setup.prompt_pages[1]
    world = World(speeds, {"device_pages": pages, "host_pages": pages, "growth_reserve_pages": 0, **policy}, cache=True)
    prompts = _prompts(setup, Random(seed))

    def ask_next() -> None:
        if len(world.served) == setup.requests // 2:
            world.reads.change_speed(speeds.storage_bytes_per_s / slow_down)
        prompt = next(prompts, None)
        if prompt is not None:
            world.store(prompt, prompt.tokens - setup.own_pages * PAGE_TOKENS)
            world.ask(prompt, 1, ask_next)

    for _ in range(in_flight):
        ask_next()
    world.run()
    return result_of(world, world.served, begun_at_s=0.0).first_token_s


def _prompts(setup: SourcesSetup, random: Random) -> Iterator[Prompt]:
    for number in range(1, setup.requests + 1):
        tokens = random.randint(*setup.prompt_pages) * PAGE_TOKENS
        yield Prompt(shared=Stretch(number, tokens))


def worst_over_best_fixed(raced: list[Raced]) -> float:
    """Return the maximum over all ratios of the planned policy's time over the best fixed one's."""
    return max(one.over_best_fixed for one in raced)


def faster_at_the_ends(raced: list[Raced]) -> float:
    """Return the factor by which the planned policy beats the wrong one at each end; the smaller of both.

    Wrong is "always transfer" with the slowest link, and "always restore" with the slowest disk.
    """
    slow_link = min(one.faster_than("always transfer") for one in raced if one.ratio == RATIOS[0])
    slow_disk = min(one.faster_than("always restore") for one in raced if one.ratio == RATIOS[-1])
    return min(slow_link, slow_disk)
