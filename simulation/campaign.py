"""Runs many seeds over several processes, for `tidekv simulate`."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from simulation.faults import FAULTS, Chosen
from simulation.rank import FAULTS as RANK_FAULTS
from simulation.ranks import RanksFailed, RanksReport, simulate_ranks
from simulation.simulate import Report, SimulationFailed, lends_in, simulate

Outcome: TypeAlias = "tuple[Report | RanksReport | str, float]"
"""Report of a seed, or the text of its failure, and its CPU time in seconds."""


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
    """Operations on components; with ranks, those of the first rank."""
    early: Counter[str] = field(default_factory=Counter)
    """Counts of callers that began with the first layers of their prompts; with ranks, those of the first rank."""
    failures: dict[int, str] = field(default_factory=dict)
    """Text of the failure of each failed seed."""


def run_campaign(
    *,
    first_seed: int,
    seeds: int,
    requests: int,
    faults: Chosen = "all",
    jobs: int = 1,
    ranks: int = 0,
    without: Sequence[str] = (),
    always_components: bool = False,
    lends: bool = False,
    progress: Callable[[], object] | None = None,
) -> Campaign:
    """Run `seeds` seeds of `requests` requests each, over `jobs` processes. A failing seed does not stop the others.

    With `ranks`, that many cores serve each request together. With `always_components` every seed has components,
    with `lends` lent device pages. Otherwise the seed draws both.
    """
    campaign = Campaign()
    if ranks:
        campaign.faults = Counter(dict.fromkeys(RANK_FAULTS, 0))
    began_s = time.perf_counter()
    one = partial(
        _run_seed,
        requests=requests,
        faults=faults,
        ranks=ranks,
        without=without,
        always_components=always_components,
        lends=lends,
    )
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
            if isinstance(outcome, Report):
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
    seed: int,
    *,
    requests: int,
    faults: Chosen,
    ranks: int,
    without: Sequence[str],
    always_components: bool,
    lends: bool,
) -> Outcome:
    began_s = time.process_time()
    # In plain seeds, too, pages of components are lent.
    lends = lends or lends_in(seed)
    try:
        outcome: Report | RanksReport | str
        if ranks:
            with_faults = faults != "none"
            outcome = simulate_ranks(
                seed, ranks, requests, with_faults=with_faults, always_components=always_components, lends=lends
            )
        else:
            outcome = simulate(
                seed, requests, faults, without=without, always_components=always_components, lends=lends
            )
    except (SimulationFailed, RanksFailed) as failure:
        outcome = str(failure)
    return outcome, time.process_time() - began_s
