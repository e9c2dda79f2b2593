"""The published tables on a modeled clock: `python -m benchmarks.paper --json FILE`.

`python3 dev.py bench paper` prints them in full. See `benchmarks.published` for method and sources.

The figures beside published ones are no verdict on tidekv: they show how far a model with the core's real decisions
agrees with what others have published. The rows use the constants that were fixed before the first run. Both p99 of the
rounds are inputs of the model: what it says about p99 is the sweep. The default policy has bounds: what it gains, and
that it is never worse than no cache with any constant at an end of its range.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.figures import Figures
from benchmarks.published.results import quantile
from benchmarks.published.setups import ASSUMED_PREFETCH, RoundsSetup
from benchmarks.published.sweep import FACTOR_MAX, ROUNDS_VARIED
from benchmarks.published.tables import DEFAULT_PREFETCH, RoundsArms, rounds_arms, run_paper


def less(gain: float) -> float:
    """Return a ratio of times as percent saved."""
    return 100 * (1 - 1 / gain)


def add_rounds(figures: Figures, name: str, arms: RoundsArms) -> None:
    """Add the figures of the rounds with one prefetch policy."""
    before, after = arms.without.all, arms.cached.all
    means = f"{before.first_token_mean_s:.2f} s to {after.first_token_mean_s:.2f} s (published: 15.36 to 9.33)"
    figures.add(f"{name}.mean", less(arms.gains.first_token), means)
    p99 = [quantile(arm.first_token_s, 0.99) for arm in (before, after)]
    figures.add(f"{name}.p99", less(arms.gains.first), f"{p99[0]:.2f} s to {p99[1]:.2f} s (published: 48.87 to 23.51)")


def add_ends(figures: Figures, setup: RoundsSetup) -> None:
    """Add the worst p50 and p99 over those without a cache, of each constant at both ends of its range."""
    worst_over: dict[float, tuple[float, str]] = {}
    for name, vary in ROUNDS_VARIED:
        for factor in (1 / FACTOR_MAX, FACTOR_MAX):
            arms = rounds_arms(vary(setup, factor))
            for share in (0.5, 0.99):
                ours, theirs = (quantile(arm.all.first_token_s, share) for arm in (arms.cached, arms.without))
                worst_over[share] = max(worst_over.get(share, (0.0, "")), (ours / theirs, f"{name} x {factor:g}"))
    for share, (over, where) in worst_over.items():
        figures.add(f"swept.p{100 * share:g}", over, where)


def main() -> None:
    """Run all tables once, and the rounds at both ends of the sweep with the default policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    chosen = parser.parse_args()
    with Figures(chosen.json) as figures:
        paper = run_paper(swept=False)
        capacity, by_token, rounds = paper.capacity, paper.token_step, paper.rounds
        rates = [f"{a.without.requests_per_s:.3f} to {a.cached.requests_per_s:.3f}" for a in (capacity, by_token)]
        figures.add(
            "capacity.requests",
            capacity.gains.first,
            f"{rates[0]} (published: 1.243 to 1.608); with a step of 40 + 0.7 n ms and an assumed prefill {rates[1]}, "
            f"{by_token.gains.first:.2f} times, with the prefill of the row {paper.token_step_alone.gains.first:.2f}",
        )
        seconds = [quantile(arm.first_token_s, 0.5) for arm in (capacity.without, capacity.cached)]
        figures.add(
            "capacity.first_token",
            capacity.gains.first_token,
            f"{seconds[0]:.1f} s to {seconds[1]:.2f} s (published: 71.9 s to 6.99 s)",
        )
        figures.add(
            "capacity.bytes",
            100 * capacity.bytes_saved,
            f"from an empty cache; {100 * paper.warm.bytes_saved:.1f} % with one request before",
        )
        tokens_ms = [arm.all.token_s * 1e3 for arm in (rounds.without, rounds.cached)]
        figures.add(
            "rounds.token",
            100 * rounds.token_more,
            f"{tokens_ms[0]:.2f} ms to {tokens_ms[1]:.2f} ms (published: 40.31 to 41.32)",
        )
        figures.note(
            f"prefetch: {ASSUMED_PREFETCH} is assumed of the published rounds, {DEFAULT_PREFETCH} is the default"
        )
        add_rounds(figures, "rounds", rounds)
        add_rounds(figures, "rounds_default", paper.rounds_default)
        add_ends(figures, RoundsSetup(prefetch=DEFAULT_PREFETCH))


if __name__ == "__main__":
    main()
