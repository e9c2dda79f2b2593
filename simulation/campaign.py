"""Runs many seeds over several processes, for `tidekv simulate`.

A seed is two runs (`shapes_of`): most of its requests on one rank, the others on several. In one of them host engines
lend the device pages. Both have windows or states, but for short rests, which models with further groups do not have.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from simulation.faults import FAULTS, Chosen
from simulation.neighbours import draws_neighbours
from simulation.simulate import Report, SimulationFailed, has_short_rests, simulate

if TYPE_CHECKING:
    from simulation.world import World

Outcome: TypeAlias = "tuple[list[Report | str], float]"
"""Reports of a seed, or the texts of failures, and its CPU time in seconds."""

REQUESTS_OF_RANKS = 0.25
"""Share of a seed's requests that run on several ranks, each of which has its own core and tiers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a campaign runs a seed with, beside the settings that the seed draws."""

    requests: int
    ranks: int
    has_components: bool
    """Whether it has components in any case; otherwise the settings draw them."""
    lends: bool
    has_neighbours: bool


def simulate_shape(
    seed: int,
    shape: Shape,
    faults: Chosen,
    without: Collection[str],
    watch: Callable[[World], None] | None = None,
) -> Report:
    """Run a seed in a shape. See `simulate`."""
    return simulate(
        seed,
        shape.requests,
        faults,
        ranks=shape.ranks,
        without=without,
        always_components=shape.has_components,
        lends=shape.lends,
        neighbours=shape.has_neighbours,
        watch=watch,
    )


def shapes_of(
    seed: int, requests: int, *, ranks: int | None = None, lends: bool | None = None, neighbours: bool = False
) -> tuple[Shape, ...]:
    """Draw the runs of a seed. With `ranks` it is one run on so many, with `neighbours` there are other decode workers
    in every run; `lends` says for every run whether host engines lend the device pages.
    """
    random = Random(f"shape {seed}")
    several, is_lent_first = random.choice((2, 3, 4)), random.random() < 0.5
    few = max(1, round(requests * REQUESTS_OF_RANKS))
    runs = [(ranks, requests)] if ranks is not None else [(1, max(1, requests - few)), (several, few)]
    shapes = []
    for number, (count, share) in enumerate(runs):
        is_lent = is_lent_first == (number == 0) if lends is None else lends
        has_neighbours = neighbours or draws_neighbours(seed)
        has_components = is_lent or not has_short_rests(seed)
        shapes.append(Shape(share, count, has_components, is_lent, has_neighbours))
    return tuple(shapes)


@dataclass(slots=True)
class Campaign:
    """Sums over all seeds."""

    seeds: int = 0
    requests: int = 0
    events: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FAULTS, 0)))
    counters: Counter[str] = field(default_factory=Counter)
    component_pages: Counter[str] = field(default_factory=Counter)
    """Operations on components, on the first rank."""
    early: Counter[str] = field(default_factory=Counter)
    """Counts of callers that began with the first layers of their prompts, on the first rank."""
    failures: dict[int, str] = field(default_factory=dict)
    """Text of the failure of each failed seed."""


def run_campaign(
    *,
    first_seed: int,
    seeds: int,
    requests: int,
    faults: Chosen = "all",
    jobs: int = 1,
    ranks: int | None = None,
    without: Sequence[str] = (),
    lends: bool | None = None,
    neighbours: bool = False,
    progress: Callable[[], object] | None = None,
) -> Campaign:
    """Run `seeds` seeds of `requests` requests each, over `jobs` processes. A failing seed does not stop the others.

    `ranks`, `lends` and `neighbours` are those of `shapes_of`.
    """
    campaign = Campaign()
    began_s = time.perf_counter()
    shaped = partial(shapes_of, requests=requests, ranks=ranks, lends=lends, neighbours=neighbours)
    one = partial(_run_seed, shaped=shaped, faults=faults, without=without)
    numbers = range(first_seed, first_seed + seeds)
    for seed, (outcomes, cpu_s) in zip(numbers, _outcomes(numbers, jobs, one), strict=True):
        campaign.seeds += 1
        campaign.cpu_s += cpu_s
        for outcome in outcomes:
            if isinstance(outcome, str):
                campaign.failures[seed] = outcome
                continue
            campaign.requests += outcome.requests
            campaign.events += outcome.events
            campaign.ends.update(outcome.ends)
            campaign.faults.update(outcome.faults)
            campaign.component_pages.update(outcome.component_pages)
            campaign.early.update(outcome.early)
            campaign.counters.update(outcome.counters)
        if progress is not None:
            progress()
    campaign.wall_s = time.perf_counter() - began_s
    return campaign


def _outcomes(seeds: range, jobs: int, one: Callable[[int], Outcome]) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(one, seeds)
        return
    # Spawned, not forked: a forked child would inherit locks that threads of the parent hold.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(one, seeds, chunksize=4)


def _run_seed(
    seed: int, *, shaped: Callable[[int], tuple[Shape, ...]], faults: Chosen, without: Sequence[str]
) -> Outcome:
    began_s = time.process_time()
    outcomes: list[Report | str] = []
    for shape in shaped(seed):
        try:
            outcomes.append(simulate_shape(seed, shape, faults, without))
        except SimulationFailed as failure:
            outcomes.append(str(failure))
    return outcomes, time.process_time() - began_s
