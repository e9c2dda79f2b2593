"""The published tables on a modeled clock, without the sweep: `python -m benchmarks.paper --json FILE`.

`python3 dev.py bench paper` prints them and sweeps every constant. See `benchmarks.published` for method and sources.

The rows use the constants that were fixed before the first run. Next to the capacity effect stands the result with
decoding steps by the published milliseconds per token and a prefill speed assumed later; no row depends on it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.figures import Figures
from benchmarks.published.results import quantile
from benchmarks.published.tables import run_paper


def main() -> None:
    """Run all tables once."""
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
            f"{rates[0]} (published: 1.243 to 1.608, 1.29 times); not counted: with a step of 40 + 0.7 n ms and an "
            f"assumed prefill {rates[1]}, {by_token.gains.first:.2f} times, with the prefill of the row "
            f"{paper.token_step_alone.gains.first:.2f}",
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
        first, last = rounds.without.all, rounds.cached.all
        figures.add(
            "rounds.mean",
            100 * (1 - 1 / rounds.gains.first_token),
            f"{first.first_token_mean_s:.2f} s to {last.first_token_mean_s:.2f} s (published: 15.36 to 9.33)",
        )
        p99 = [quantile(arm.first_token_s, 0.99) for arm in (first, last)]
        figures.add(
            "rounds.p99",
            100 * (1 - 1 / rounds.gains.first),
            f"{p99[0]:.2f} s to {p99[1]:.2f} s (published: 48.87 to 23.51)",
        )
        figures.add(
            "rounds.token",
            100 * rounds.token_more,
            f"{first.token_s * 1e3:.2f} ms to {last.token_s * 1e3:.2f} ms (published: 40.31 to 41.32)",
        )


if __name__ == "__main__":
    main()
