"""Cost at a hundred times the work: `python -m benchmarks.scaling --json FILE [--plot FILE]`.

Index, engine and journal do 1, 10 and 100 times the same work; figures are CPU times. The index has that factor of
requests and of pages, the engine that factor of requests in flight, the journal that factor of events, which are
written and then replayed. The result of each is its cost at 100 times the work, relative to n log n.

Python's cycle collector is set as docs/operating.md advises for much work, unless `--collector default` is given: with
its default thresholds it repeatedly scans all live objects, but only if there are many, so 1 time the work would not
include that cost.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import uvloop

from benchmarks.collector import set_collector
from benchmarks.engine import Load, Rig, measure  # Not that of the package: engine.py in this folder.
from benchmarks.figures import Figures, option_parser, over_n_log_n
from tidekv import Replayer
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import PrefixIndex, Receipt

Points: TypeAlias = list[tuple[float, float]]
"""Amounts of work, and CPU seconds."""

TIMES = (1, 10, 100)
INDEX_RUNS = {100: 1, 10: 3, 1: 31}
"""Runs at each factor in a round, of which the median counts; the smallest takes a millisecond."""
INDEX_ROUNDS = 5
INDEX_REQUESTS, INDEX_PAGES, PAGE, TURN_PAGES, LIVE = 300, 3000, 16, 16, 16
IN_FLIGHT = 40
JOURNAL_REQUESTS = 40
LOAD = Load(prompt_tokens=512, page_size=64, chunk_tokens=512, tiers=("l1", "l2"))


def index_s(times: int) -> float:
    """Return CPU seconds for growing conversations with 1.5 times as many pages as the index can hold."""
    requests, pages = INDEX_REQUESTS * times, INDEX_PAGES * times
    device = PagePool("device", pages)
    index = PrefixIndex(key_bytes=PAGE * 4, device=device, host=PagePool("host", pages))
    words = np.random.default_rng(1)
    talks: list[bytes] = [b""] * max(requests // 4, 1)
    held: deque[Receipt] = deque()
    spent_ns = 0
    gc.collect()
    for _ in range(requests):
        place = int(words.integers(len(talks)))
        talks[place] += words.integers(0, 100_000, PAGE * TURN_PAGES, dtype=np.uint32).tobytes()
        prompt = talks[place]
        began_ns = time.thread_time_ns()
        match = index.match("", prompt)
        receipt = index.lock(match.device_node)
        needed = len(prompt) // (PAGE * 4) - match.device_pages
        if (short := needed - device.free) > 0:
            index.evict_device(short)
        taken = device.take(needed)
        inserted = index.insert("", prompt, index.device_path(match.device_node) + taken)
        held.append(index.lock(inserted.node))
        index.unlock(receipt)
        if len(held) > LIVE:
            index.unlock(held.popleft())
        spent_ns += time.thread_time_ns() - began_ns
    return spent_ns / 1e9


def index_round(collector: str) -> Points:
    """Return requests and CPU seconds for each amount of work, measured in this process."""
    set_collector(collector)
    return sorted(
        (INDEX_REQUESTS * times, statistics.median(index_s(times) for _ in range(runs)))
        for times, runs in INDEX_RUNS.items()
    )


def index_points(collector: str) -> Points:
    """Return the round with the median growth.

    Each round has a process of its own, because its largest run takes a quarter longer in memory that was used before.
    """
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rounds = [pool.apply(index_round, (collector,)) for _ in range(INDEX_ROUNDS)]
    return sorted(rounds, key=lambda points: over_n_log_n(points[0], points[-1]))[INDEX_ROUNDS // 2]


def engine_s(times: int) -> float:
    """Return CPU seconds of one block with this factor of requests in flight."""
    in_flight = IN_FLIGHT * times
    found = uvloop.run(measure(LOAD, in_flight, 1 if times == TIMES[-1] else 5, journal=False, parts=False, show=0))
    return found.engine_us * in_flight / 1e6


async def write_journal(path: Path, requests: int) -> None:
    """Write the journal of a run with this many requests, 40 at a time."""
    rig = Rig(LOAD, IN_FLIGHT, str(path))
    async with rig.engine:
        for _ in range(requests // IN_FLIGHT):
            await rig.block()


def journal_point(times: int) -> tuple[float, float]:
    """Return the number of events, and CPU seconds of their replay."""
    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        path = Path(folder) / "run.journal"
        uvloop.run(write_journal(path, JOURNAL_REQUESTS * times))
        gc.collect()
        began_s = time.process_time()
        found = Replayer(path).run()
        assert found.complete
        return found.events, time.process_time() - began_s


MEASURES: dict[str, Callable[[str], Points]] = {
    "index": index_points,
    "engine": lambda _: [(IN_FLIGHT * times, engine_s(times)) for times in TIMES],
    "journal": lambda _: [journal_point(times) for times in TIMES],
}


def main() -> None:
    """Parse the options and measure."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--plot", type=Path, help="also write a plot to this .png or .svg file, and a dark one beside it"
    )
    parser.add_argument("--only", nargs="+", choices=tuple(MEASURES))
    parser.add_argument(
        "--collector", choices=("advised", "default"), default="advised", help="Python's cycle collector"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    set_collector(chosen.collector)
    with Figures(chosen.json) as figures:
        curves = {name: MEASURES[name](chosen.collector) for name in chosen.only or MEASURES}
        for name, points in curves.items():
            detail = ", ".join(f"{count:,.0f}: {seconds / count * 1e6:.1f} µs each" for count, seconds in points)
            figures.add(f"scaling.{name}", over_n_log_n(points[0], points[-1]), detail)
        if chosen.plot:
            from benchmarks.plots import plot_scaling, save_plot

            figure = plot_scaling(curves)
            save_plot(figure, chosen.plot)
            # The documentation shows the one that its reader prefers.
            save_plot(figure, chosen.plot.with_stem(f"{chosen.plot.stem}-dark"), palette="dark")


if __name__ == "__main__":
    main()
