"""Cost of checksums of pages: `python -m benchmarks.checksums [--json FILE]`.

Hashing alone: microseconds a page for pages of several sizes, in host memory (one piece), in a device pool (one piece
per layer and part), and of half of the heads, as ranks of unequal numbers exchange them; beside it a plain copy of the
same bytes. Then the time to ready of one prompt, with `page_checksums` over without: by transfer from a prefill worker
in another process, and from host memory. Both engines take turns, and the figure is the median of the ratios of all
rounds, because the speed of a machine drifts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figures
from benchmarks.restore_tiers import LARGE, VOCABULARY, Pair, tokens_of
from demo.prefill_process import PrefillOrder, PrefillProcess
from tidekv import DecodeEngine, DevicePool, EngineConfig, HostPool, KVLayout, NixlTransport
from tidekv.backends.checksums import PageHasher
from tidekv.states.types import page_ids
from tidekv.transports.slices import Cut, exchange_of

HASHED_BYTES = 64 << 20
"""Bytes of one measurement of hashing alone: more than the processor's caches hold."""
PAGES = 256
"""Pages of the prompt."""
SHAPES = {
    "16 KiB": KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16", page_size=16),
    "256 KiB": KVLayout(num_layers=16, num_kv_heads=4, head_dim=64, dtype="float16", page_size=16),
    "1 MiB": LARGE,
}


def best_s(work: Callable[[], object], rounds: int = 5) -> float:
    """Return the seconds of the fastest of several calls."""
    spent = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began_s)
    return min(spent)


def measure_hashing(figures: Figures, table: Table) -> None:
    """Measure hashing alone."""
    for name, layout in SHAPES.items():
        count = HASHED_BYTES // layout.page_bytes
        device, host, pages = (
            DevicePool.allocate(layout, count),
            HostPool.allocate(layout, count),
            page_ids(range(count)),
        )
        rows = layout.piece_bytes // layout.page_size
        cuts = [Cut(piece, piece, layout.page_size, rows // 2, 0, rows, 0, rows) for piece in range(layout.piece_count)]
        half = exchange_of(cuts, ours=device.memory, theirs=device.memory).ours
        target = np.zeros_like(host.array)
        page_us = [
            best_s(partial(PageHasher(memory).checksums, pages)) / count * 1e6
            for memory in (host.memory, device.memory, half)
        ]
        copy_us = best_s(partial(np.copyto, target, host.array)) / count * 1e6
        table.add_row(name, *(f"{us:.1f}" for us in (*page_us, copy_us)))
        words = f"{page_us[0]:.1f} µs a page in host memory, {page_us[1]:.1f} in device pieces, a copy {copy_us:.1f}"
        if layout is LARGE:
            figures.add("checksums.hash", page_us[0] / copy_us, words)


async def measure_restores(figures: Figures, rounds: int) -> None:
    """Measure the time to ready of both engines in turns."""
    order = PrefillOrder(
        name="prefill-0", fingerprint="c", layout=LARGE, num_pages=2 * PAGES, chunk_tokens=4096, vocabulary=VOCABULARY
    )
    tokens = tokens_of(6, PAGES * LARGE.page_size - 1)
    spent_ms: dict[tuple[str, bool], list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(PrefillProcess(order))
        pairs = {}
        for is_checked in (False, True):
            engine = DecodeEngine(
                EngineConfig(model="c", page_checksums=is_checked, default_deadline_s=300.0),
                device=DevicePool.allocate(LARGE, PAGES + 8),
                host=HostPool.allocate(LARGE, PAGES + 8),
                transport=NixlTransport(name=f"decode-{is_checked:d}", dials=["127.0.0.1:*"]),
            )
            pairs[is_checked] = Pair(await stack.enter_async_context(engine), prefill)

        async def timed(what: str, is_checked: bool) -> None:
            pair = pairs[is_checked]
            began_s = time.perf_counter()
            await pair.ready(tokens, cache=True)
            spent_ms[what, is_checked].append((pair.ready_at_s - began_s) * 1e3)

        for number in range(rounds + 1):
            for is_checked in (False, True) if number % 2 else (True, False):
                await pairs[is_checked].forget()
                await timed("transfer", is_checked)
                await pairs[is_checked].engine.flush(("l1",))
                await timed("host", is_checked)
            if not number:
                # The first round warms up: prefill computes the prompt in it.
                spent_ms.clear()
    for what in ("transfer", "host"):
        plain, checked = spent_ms[what, False], spent_ms[what, True]
        ratio = statistics.median(one / other for one, other in zip(checked, plain, strict=True))
        words = f"{statistics.median(checked):.0f} ms with, {statistics.median(plain):.0f} ms without, {PAGES} MiB"
        figures.add(f"checksums.{what}", ratio, words)
        print(f"time to ready by {what}: {ratio:.2f} times ({words})")


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--rounds", type=int, default=11)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("page", "host page", "device page", "half of its heads", "plain copy", title="µs a page")
    with tempfile.TemporaryDirectory() as folder, Figures(chosen.json or Path(folder) / "figures.json") as figures:
        measure_hashing(figures, table)
        Console().print(table)
        uvloop.run(measure_restores(figures, chosen.rounds))


if __name__ == "__main__":
    main()
