"""Cost of the tiers in combination: `python -m benchmarks.restore --json FILE`.

A decode engine with a `file:` store, and a prefill worker in another process that keeps prefixes, so that it only
sends. Pages are 1 MiB of 16 tokens. Measured are: 4,096 tokens from storage through the host to the device, relative to
the slower of the two stages by itself; a prompt of which half comes from storage and half by transfer, relative to
either half by itself; and the number of loads of a prefix of 10,000 tokens that 50 waiting requests share.

Storage is a disk. The same with files in the page cache is reported next to it: reads are then copies by the processor,
like those to the device and the transfer, so the limit is set by two processors: both stages at once and independent,
or the processor time of restore and transfer. Also reported are 1,024 tokens from storage, and a transfer that takes
about as long as the restore. Everything is measured in turns, round by round, because the speed of a machine drifts; a
figure is the median of the ratios of each round.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from operator import add
from pathlib import Path

import torch
import uvloop

from benchmarks.figures import Figures, option_parser
from benchmarks.page_cache import NoDisk
from benchmarks.restore_tiers import HALF_PAGES, LONG_PAGES, SHORT_PAGES, VOCABULARY, Pair, Times, tier_rig, tokens_of
from demo.prefill_process import PrefillOrder, PrefillProcess
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    NixlTransport,
    StorageOptions,
    open_storage,
)

SMALL = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, dtype="bfloat16", page_size=16)
SHARED_TOKENS, WAITERS = 10_000, 50
PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def measure_tiers(figures: Figures, rounds: int, folder: Path) -> None:
    """Measure pipeline and overlap, from disk and from memory."""
    disk, memory = Times(on_disk=True), Times(on_disk=False)
    async with tier_rig(folder) as rig:
        for number in range(rounds + 1):
            for times in (disk, memory):
                await rig.run_round(times)
                if not number:
                    times.forget()
    add_both(figures, "restore.pipeline", [pipeline(times) for times in (disk, memory)])
    of_disk = overlap(disk, {"": HALF_PAGES, "_long": LONG_PAGES})
    add_both(figures, "restore.overlap", [of_disk, overlap(memory, {"": HALF_PAGES})])


def add_both(figures: Figures, name: str, found: list[tuple[float, str]]) -> None:
    """Add the figure from disk with the comments on both, and the figure from memory under its own name."""
    (figure, words), (cached, cached_words) = found
    figures.add(name, figure, f"{words}. Files in memory: {cached:.3g}, {cached_words}")
    figures.add(f"{name}_cached", cached, cached_words)


def pipeline(times: Times) -> tuple[float, str]:
    """Return the restore's percentage of the slower stage's speed, and a comment with both stages by themselves."""
    middle = {name: f"{times.median(name):.0f} ms" for name in times.spent_ms}
    untied, short = 100 / times.over_slower("untied", "read", "copy"), 100 * times.pipeline("_short")
    plain = f"the disk alone {middle['plain']}, " if times.on_disk else ""
    return 100 * times.pipeline(""), (
        f"{middle['restore']} for {HALF_PAGES} MiB; {plain}storage alone {middle['read']}, copies alone"
        f" {middle['copy']}, both at once and untied {middle['untied']} ({untied:.0f} %); READY"
        f" {times.median('tail'):.1f} ms after the last read; {SHORT_PAGES} MiB {middle['restore_short']}"
        f" ({short:.0f} %)"
    )


def overlap(times: Times, transfers: dict[str, int]) -> tuple[float, str]:
    """Return the time of simultaneous restore and transfer over the slower of the two.

    The figure is that of the first transfer; the others are in the comment, with the time that all processors would
    need for the work of both.
    """
    words, ratios = [f"restore {times.median('restore'):.0f} ms"], []
    for kind, pages in transfers.items():
        ratios.append(times.over_slower(f"both{kind}", "restore", f"transfer{kind}"))
        alone_ms, both_ms = times.median(f"transfer{kind}"), times.median(f"both{kind}")
        work_ms = statistics.median(map(add, times.cpu_ms["restore"], times.cpu_ms[f"transfer{kind}"]))
        words.append(
            f"transfer of {pages} MiB {alone_ms:.0f} ms, both {both_ms:.0f} ms"
            f" ({ratios[-1]:.2f}; {work_ms / PROCESSORS:.0f} ms of {PROCESSORS} processors)"
        )
    return ratios[0], "; ".join(words)


async def measure_sharing(figures: Figures) -> None:
    """Measure 50 simultaneous requests with one prefix in storage."""
    prefix = tokens_of(4, SHARED_TOKENS // SMALL.page_size * SMALL.page_size)
    prefix_pages = len(prefix) // 4 // SMALL.page_size
    num_pages = prefix_pages + 4 * WAITERS
    order = PrefillOrder(
        name="prefill-0", fingerprint="s", layout=SMALL, num_pages=4 * num_pages, chunk_tokens=4096,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    async with (
        PrefillProcess(order) as prefill,
        DecodeEngine(
            EngineConfig(
                model="s",
                storage=StorageOptions(prefetch="wait_complete", prefetch_threshold_tokens=16),
                default_deadline_s=300.0,
            ),
            device=DevicePool.allocate(SMALL, num_pages),
            host=HostPool.allocate(SMALL, num_pages),
            storage=open_storage("memory:?capacity=64MB"),
            transport=NixlTransport(name="decode-0", dials=["127.0.0.1:*"]),
        ) as engine,
    ):
        pair = Pair(engine, prefill)
        await pair.ready(prefix, cache=True)
        await pair.forget()
        before = engine._runtime.storage.statistics().hits
        async with asyncio.TaskGroup() as group:
            for number in range(WAITERS):
                tail = tokens_of(100 + number, SMALL.page_size)
                group.create_task(_hold(engine, prefill.address, f"s{number}", prefix + tail))
        read = engine._runtime.storage.statistics().hits - before
    figures.add("restore.loads", read / prefix_pages, f"{read} pages read for {WAITERS} requests with {prefix_pages}")


async def _hold(engine: DecodeEngine, address: str, name: str, tokens: bytes) -> None:
    request = DecodeRequest(request_id=name, tokens=tokens, prefill=address, send_prompt=True)
    await engine.finish(await engine.restore(request))


async def measure(figures: Figures, rounds: int, parent: Path | None) -> None:
    """Run all measurements in turn."""
    await measure_sharing(figures)
    with tempfile.TemporaryDirectory(prefix="tidekv-bench-", dir=parent) as folder:
        try:
            await measure_tiers(figures, rounds, Path(folder))
        except NoDisk as error:
            figures.missing("restore.pipeline", str(error))
            figures.missing("restore.overlap", str(error))


def main() -> None:
    """Parse the options and measure."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; the one for temporary files by default"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with Figures(chosen.json) as figures:
        uvloop.run(measure(figures, chosen.rounds, chosen.folder))


if __name__ == "__main__":
    main()
