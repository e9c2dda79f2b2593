"""Runs many seeds over several processes, for `tidekv simulate`.

Every seed has windows or states, but for those of short rests, which models with further groups do not have. Of all
seeds, a part lends its device pages, and a part runs on several ranks; `shape_of` draws both.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeAlias

from simulation.faults import FAULTS, Chosen
from simulation.neighbours import has_neighbours
from simulation.simulate import Report, SimulationFailed, has_short_rests, lends_in, simulate

Outcome: TypeAlias = "tuple[Report | str, float]"
"""Report of a seed, or the text of its failure, and its CPU time in seconds."""

LENT_SHARE = 0.45
"""Share of the seeds in which host engines lend the device pages."""
RANKS_SHARE = 0.25
"""Share of the seeds that run on several ranks."""
REQUESTS_OF_RANKS = 0.25
"""Requests of such a seed, as a share of those of another one: every rank has its own core and tiers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a campaign runs a seed with, beside the settings that the seed draws."""

    requests: int
    ranks: int
    has_components: bool
    """Whether it has components in any case; otherwise the settings draw them."""
    lends: bool
    has_neighbours: bool


def shape_of(
    seed: int, requests: int, *, ranks: int | None = None, lends: bool = False, neighbours: bool = False
) -> Shape:
    """Draw the shape of a seed. With `ranks` every seed runs on so many, with `lends` every seed lends, and with
    `neighbours` every seed is of one rank, unless `ranks` says otherwise, and has other decode workers.
    """
    random = Random(f"shape {seed}")
    if ranks is None and not neighbours and random.random() < RANKS_SHARE:
        ranks, requests = random.choice((2, 3, 4)), max(1, round(requests * REQUESTS_OF_RANKS))
    lends = lends or lends_in(seed, LENT_SHARE)
    neighbours = (neighbours or has_neighbours(seed)) and (ranks or 1) == 1
    has_components = lends or not has_short_rests(seed)
    return Shape(requests, ranks or 1, has_components, lends, neighbours)


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
    lends: bool = False,
    neighbours: bool = False,
    progress: Callable[[], object] | None = None,
) -> Campaign:
    """Run `seeds` seeds of `requests` requests each, over `jobs` processes. A failing seed does not stop the others.

    With `ranks`, that many cores serve each request together; with `lends` every seed has lent device pages, with
    `neighbours` other decode workers. Otherwise `shape_of` draws these, and a seed on several ranks has fewer requests.
    """
    campaign = Campaign()
    began_s = time.perf_counter()
    shaped = partial(shape_of, requests=requests, ranks=ranks, lends=lends, neighbours=neighbours)
    one = partial(_run_seed, shaped=shaped, faults=faults, without=without)
    numbers = range(first_seed, first_seed + seeds)
    for seed, (outcome, cpu_s) in zip(numbers, _outcomes(numbers, jobs, one), strict=True):
        campaign.seeds += 1
        campaign.cpu_s += cpu_s
        if isinstance(outcome, str):
            campaign.failures[seed] = outcome
        else:
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


def _run_seed(seed: int, *, shaped: Callable[[int], Shape], faults: Chosen, without: Sequence[str]) -> Outcome:
    began_s = time.process_time()
    shape = shaped(seed)
    try:
        outcome: Report | str = simulate(
            seed,
            shape.requests,
            faults,
            ranks=shape.ranks,
            without=without,
            always_components=shape.has_components,
            lends=shape.lends,
            neighbours=shape.has_neighbours,
        )
    except SimulationFailed as failure:
        outcome = str(failure)
    return outcome, time.process_time() - began_s
