"""Restore or transfer in modeled time: `python -m benchmarks.planner --json FILE`, or `dev.py bench sources`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.figures import Figures
from benchmarks.published.sources import RATIOS, faster_at_the_ends, race, worst_over_best_fixed


def main() -> None:
    """Race all policies at all ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    chosen = parser.parse_args()
    with Figures(chosen.json) as figures:
        raced = race()
        worst = max(raced, key=lambda one: one.over_best_fixed)
        even = [f"{one.over_best_fixed:.2f} with {one.in_flight}" for one in raced if one.ratio == 1]
        figures.add(
            "planner.fixed",
            worst_over_best_fixed(raced),
            f"at {worst.ratio:g}:1 with {worst.in_flight} in flight; at 1:1 {', '.join(even)} in flight",
        )
        ends = [
            f"{one.ratio:g}:1 with {one.in_flight}: {one.faster_than('always restore'):.2f} and"
            f" {one.faster_than('always transfer'):.2f}"
            for one in raced
            if one.ratio in (RATIOS[0], RATIOS[-1])
        ]
        figures.add(
            "planner.ends", faster_at_the_ends(raced), f"always restore and always transfer at {'; '.join(ends)}"
        )


if __name__ == "__main__":
    main()
