"""`python -m simulation --seed N --requests N`: run the core against a simulated environment."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from simulation import FAULTS, SimulationFailed, simulate


def main() -> int:
    """Run the seeds of the command line; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, counted up from the first")
    parser.add_argument("--requests", type=int, default=1000, help="requests per seed")
    parser.add_argument("--faults", default="all", help=f"all, none, or names, comma-separated: {', '.join(FAULTS)}")
    options = parser.parse_args()
    chosen = options.faults if options.faults in ("all", "none") else options.faults.split(",")
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    events = 0
    began_s = time.process_time()
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            report = simulate(seed, options.requests, chosen)
        except SimulationFailed as failure:
            print(failure, file=sys.stderr)
            return 1
        ends.update(report.ends)
        faults.update(report.faults)
        counters.update(report.counters)
        events += report.events
    took_s = time.process_time() - began_s
    requests = options.requests * options.seeds
    print(f"{requests} requests, {events} events, {took_s:.1f} CPU seconds, {requests / took_s:.0f} requests a second")
    print("ends:", dict(ends.most_common()))
    print("faults:", sum(faults.values()), dict(faults.most_common()))
    print("core:", dict(sorted(counters.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
