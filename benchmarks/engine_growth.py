"""Cost per request with many in flight relative to few: `python -m benchmarks.engine_growth --json FILE`.

Two engines of `engine.py` in one process, under its load: one serves blocks of 256 requests, the other of 4,096. A
round consists of blocks of the first, one block of the second, and blocks of the first again, so that a machine that
slows down for minutes affects both. The figure is the median of the rounds. Python's cycle collector is set as
docs/operating.md advises for this many in flight.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from benchmarks.collector import set_collector
from benchmarks.engine import TIERS, Load, Rig  # Not that of the package: engine.py here.
from benchmarks.figures import Figures, option_parser

LOAD = Load(prompt_tokens=4096, page_size=64, chunk_tokens=512, tiers=TIERS)
FEW_BLOCKS = 3
"""Number of small blocks before the large one, and after it."""


async def block_us(rig: Rig) -> float:
    """Return CPU µs per request of one block."""
    block = await rig.block()
    return (block.restore_s + block.finish_s) * 1e6 / rig.in_flight


async def measure(figures: Figures, few: int, many: int, rounds: int) -> None:
    """Measure rounds of both, after one warm-up block of each."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidekv-bench-")))
        rigs = [Rig(LOAD, in_flight, str(folder / f"{in_flight}.journal")) for in_flight in (few, many)]
        for rig in rigs:
            await stack.enter_async_context(rig.engine)
            await rig.block()
        ratios, detail = [], []
        for _ in range(rounds):
            before = [await block_us(rigs[0]) for _ in range(FEW_BLOCKS)]
            many_us = await block_us(rigs[1])
            few_us = statistics.median([*before, *[await block_us(rigs[0]) for _ in range(FEW_BLOCKS)]])
            ratios.append(many_us / few_us)
            detail.append(f"{many_us:.0f} over {few_us:.0f} µs")
            figures.add("engine.growth", statistics.median(ratios), "; ".join(detail))


def main() -> None:
    """Parse the options and measure."""
    parser = option_parser(__doc__)
    parser.add_argument("--few", type=int, default=256)
    parser.add_argument("--many", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    set_collector()
    with Figures(chosen.json) as figures:
        uvloop.run(measure(figures, chosen.few, chosen.many, chosen.rounds))


if __name__ == "__main__":
    main()
