"""Fuzz what comes from outside, with a fresh seed: `python3 dev.py fuzz --seconds 3600`.

The seed is printed first. A finding prints its target and the seed of its one input: `--target NAME --seed N --one`
repeats it.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
import traceback
from random import Random

from tests.fuzz.targets import TARGETS

BATCH = 200
"""Inputs of one target before the next target's turn."""


def main() -> int:
    """Run the targets in turn until the time is up or an input is a finding."""
    parser = argparse.ArgumentParser(prog="dev.py fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(48))
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--one", action="store_true", help="one input, whose seed is the given one")
    given = parser.parse_args()
    logging.disable()  # Refusals are logged, hundreds a second.
    targets = given.target or list(TARGETS)
    print(f"fuzz: seed {given.seed}, {', '.join(targets)}", flush=True)
    counts = dict.fromkeys(targets, 0)
    ends_at, seed = time.monotonic() + given.seconds, given.seed
    while True:
        for name in targets:
            for _ in range(1 if given.one else BATCH):
                try:
                    TARGETS[name](Random(seed))
                except Exception:
                    traceback.print_exc()
                    print(f"fuzz: a finding. Repeat it: python3 dev.py fuzz --target {name} --seed {seed} --one")
                    return 1
                counts[name] += 1
                seed += not given.one
        if given.one or time.monotonic() > ends_at:
            print("fuzz: no finding in " + ", ".join(f"{count:,} of {name}" for name, count in counts.items()))
            return 0


if __name__ == "__main__":
    sys.exit(main())
