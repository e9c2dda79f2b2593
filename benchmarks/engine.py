"""CPU time of the engine per request: `python -m benchmarks.engine`.

One decode engine with device, host and storage tiers and a journal serves prompts of 4,096 tokens, the first half of
which is cached: for a third of the requests in device memory, for a third in host memory, for a third in storage. The
other half comes from a scripted prefill (`engine_rig.py`), chunk by chunk, and only once all requests of a block are in
flight. A request is restored, grows by 64 tokens, and is finished, which backs it up to both lower tiers. All pools are
full before a block begins, so every page must be evicted first.

The figure is the CPU time of the process over a block, all threads, from the first call until nothing is in flight and
the journal is written, without the time of script and storage; per request, the median of the blocks. The figures by
part come from samples of the loop's thread in further blocks, by the innermost frame that belongs to a part, and from
the CPU time of each thread. Pages are tiny, so that moving bytes does not dominate.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections import Counter
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.collector import set_collector
from benchmarks.engine_rig import KeyStorage, Script, ScriptedTransport
from benchmarks.engine_sampler import Sampler, thread_times
from tidekv import (
    AdmissionOptions,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    JournalOptions,
    KVLayout,
    PeerOptions,
    ReadyRequest,
    StorageOptions,
)
from tidekv.engine.journal.journal import COALESCE_S

VOCABULARY = 32000
OUTPUT_TOKENS = 64
TIERS = ("l1", "l2", "l3")
IDLE_S = 2.0


@dataclass(frozen=True)
class Load:
    """Description of the requests to serve."""

    prompt_tokens: int
    page_size: int
    chunk_tokens: int
    tiers: tuple[str, ...]

    @property
    def layout(self) -> KVLayout:
        """Return the smallest possible pages."""
        return KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="bfloat16", page_size=self.page_size)


@dataclass
class Figures:
    """Results at one number of requests in flight. Times are CPU in µs per request, medians of the blocks."""

    in_flight: int
    blocks: int
    engine_us: float
    restore_us: float
    """From the first call until all are READY."""
    finish_us: float
    """From there until everything is backed up."""
    blocks_us: list[float]
    rig_us: float
    """Time of script and storage, which is not included in the figures."""
    events: float
    journal_bytes: float
    threads_us: dict[str, float] = field(default_factory=dict)
    parts_us: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """Results of one block. Times are CPU seconds."""

    restore_s: float
    """Until all were READY."""
    finish_s: float
    """From there until everything was backed up."""
    rig_s: float
    """Time of script and storage, which is not included in the two."""
    sources: Counter[str]
    """Tokens by source."""
    threads_s: dict[str, float]
    """By thread; empty without a sampler."""


class Rig:
    """One engine, and blocks of requests for it."""

    def __init__(self, load: Load, in_flight: int, journal: str | None, *, seed: int = 0) -> None:
        self.load = load
        self.in_flight = in_flight
        self.requests = 0
        self._random = random.Random(seed)
        self._pages = -(-(load.prompt_tokens + OUTPUT_TOKENS) // load.page_size) + 1
        # Room for the requests in flight and their cached halves, and for little else.
        self._device_pages = int(max(in_flight, 8) * self._pages * 1.25)
        self._host_pages = 2 * self._device_pages
        self.script = Script(chunk_pages=load.chunk_tokens // load.page_size, page_size=load.page_size)
        self.storage = KeyStorage()
        self.engine = DecodeEngine(
            EngineConfig(
                model="synthetic",
                journal=JournalOptions(path=journal),
                default_deadline_s=3600.0,
                loop_stall_report_s=5.0,
                admission=AdmissionOptions(prefill_share=1.0),  # The script answers when all requests have rooms.
                # Thousands that arrive at once wait for seconds: storage is asked and waited for all the same.
                storage=StorageOptions(
                    prefetch="wait_complete", query_deadline_s=600.0, fetch_deadline_share=0.0, breaker_failures=0
                ),
                peer=PeerOptions(silence_s=600.0, lease_s=600.0),  # The script answers no pings.
            ),
            device=DevicePool.allocate(load.layout, self._device_pages),
            host=HostPool.allocate(load.layout, self._host_pages),
            storage=self.storage,
            transport=ScriptedTransport(self.script),
        )

    @property
    def rig_cpu_s(self) -> float:
        """CPU time of script and storage."""
        return self.script.cpu_s + self.storage.cpu_s

    def tokens(self, count: int) -> array[int]:
        """Return tokens that were not used before."""
        packed = self._random.randbytes(2 * count)
        return array("I", array("H", packed))

    async def prepare(self) -> list[array[int]]:
        """Return prompts for a block, with their first halves in the tiers.

        The rest of the pools holds unrelated pages.
        """
        half = self.load.prompt_tokens // 2
        prefixes: dict[str, list[array[int]]] = {tier: [] for tier in TIERS}
        for number in range(self.in_flight):
            prefixes[self.load.tiers[number % len(self.load.tiers)]].append(self.tokens(half))
        if prefixes["l3"]:
            await self._serve_all(prefixes["l3"])
        if prefixes["l3"] or not self.requests:
            await self._fill(self._host_pages)
        if prefixes["l2"]:
            await self._serve_all(prefixes["l2"])
            await self._fill(self._device_pages)
        if prefixes["l1"]:
            await self._serve_all(prefixes["l1"])
        rest = self.load.prompt_tokens - half
        return [prefix + self.tokens(rest) for tier in TIERS for prefix in prefixes[tier]]

    async def _fill(self, pages: int) -> None:
        """Serve prompts until this many pages were taken."""
        count = -(-pages // (self.load.prompt_tokens // self.load.page_size))
        await self._serve_all([self.tokens(self.load.prompt_tokens) for _ in range(count)])

    async def _serve_all(self, prompts: list[array[int]]) -> None:
        for at in range(0, len(prompts), 256):
            some = prompts[at : at + 256]
            self.script.expected = 1
            async with asyncio.TaskGroup() as group:
                for prompt in some:
                    group.create_task(self._serve(prompt))
        await self.engine.wait_settled()

    async def _serve(self, prompt: array[int]) -> None:
        await self._finish(await self._restore(prompt), b"")

    async def _restore(self, prompt: array[int]) -> ReadyRequest:
        self.requests += 1
        return await self.engine.restore(
            DecodeRequest(request_id=f"request-{self.requests}", tokens=prompt, prefill="prefill")
        )

    async def _finish(self, ready: ReadyRequest, output: array[int] | bytes) -> None:
        if output:
            self.engine.grow(ready, OUTPUT_TOKENS)
        await self.engine.finish(ready, output)

    async def block(self, sampler: AbstractContextManager[object] | None = None) -> Block:
        """Serve one block; `sampler` is entered while its requests are served."""
        prompts = await self.prepare()
        outputs = [self.tokens(OUTPUT_TOKENS) for _ in prompts]
        await asyncio.sleep(3 * COALESCE_S)
        self.script.expected = len(prompts)
        gc.collect()
        threads = thread_times() if sampler else {}
        with sampler or nullcontext():
            rig_s, started_s = self.rig_cpu_s, time.process_time()
            async with asyncio.TaskGroup() as group:
                restores = [group.create_task(self._restore(prompt)) for prompt in prompts]
            ready_s, rig_ready_s = time.process_time(), self.rig_cpu_s
            async with asyncio.TaskGroup() as group:
                for restore, output in zip(restores, outputs, strict=True):
                    group.create_task(self._finish(restore.result(), output))
            await self.engine.wait_settled()
            await asyncio.sleep(3 * COALESCE_S)
            ended_s, rig_end_s = time.process_time(), self.rig_cpu_s
        spent = {name: s - threads.get(name, 0.0) for name, s in thread_times().items()} if sampler else {}
        sources: Counter[str] = Counter()
        for restore in restores:
            sources.update(restore.result().sources)
        return Block(
            restore_s=ready_s - started_s - (rig_ready_s - rig_s),
            finish_s=ended_s - ready_s - (rig_end_s - rig_ready_s),
            rig_s=rig_end_s - rig_s,
            sources=sources,
            threads_s=spent,
        )


async def measure(load: Load, in_flight: int, blocks: int, *, journal: bool, parts: bool, show: int) -> Figures:
    """Return the figures at one number of requests in flight."""
    with tempfile.TemporaryDirectory(prefix="tidekv-") as folder:
        path = Path(folder) / "run.journal"
        rig = Rig(load, in_flight, str(path) if journal else None)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(rig.engine)
            await rig.block()
            taken = [await rig.block() for _ in range(blocks)]
            cached = {tier: taken[-1].sources[tier] / in_flight for tier in TIERS}
            expected = load.prompt_tokens // 2
            assert abs(sum(cached.values()) - expected) <= 1, f"a request found {cached} tokens, not {expected}"
            assert all(cached[tier] > 0 for tier in load.tiers[:in_flight]), cached
            scale = 1e6 / in_flight
            totals = [(block.restore_s + block.finish_s) * scale for block in taken]
            figures = Figures(
                in_flight=in_flight,
                blocks=blocks,
                engine_us=statistics.median(totals),
                restore_us=statistics.median([block.restore_s for block in taken]) * scale,
                finish_us=statistics.median([block.finish_s for block in taken]) * scale,
                blocks_us=[round(total, 1) for total in totals],
                rig_us=statistics.median([block.rig_s for block in taken]) * scale,
                events=int(str(rig.engine.statistics()["events"])) / rig.requests,
                journal_bytes=_size_of(path) / rig.requests,
            )
            if parts:
                await _by_part(rig, figures, min(max(512 // in_flight, 1), 40), show)
    return figures


async def _by_part(rig: Rig, figures: Figures, blocks: int, show: int) -> None:
    sampler = Sampler()
    spent: Counter[str] = Counter()
    for _ in range(blocks):
        spent.update((await rig.block(sampler)).threads_s)
    count = blocks * rig.in_flight
    total = sum(sampler.parts.values())
    loop_us = spent.pop("MainThread") / count * 1e6
    figures.parts_us = {part: round(ticks / total * loop_us, 1) for part, ticks in sampler.parts.most_common()}
    figures.threads_us = {name: round(s / count * 1e6, 1) for name, s in spent.most_common() if s / count > 1e-6}
    if show:
        for line, ticks in sampler.lines.most_common(show):
            print(f"{ticks / total * loop_us:8.1f} µs  {line}", file=sys.stderr)


async def measure_idle(load: Load) -> float:
    """Return the share of a core that an idle engine takes after having served requests."""
    rig = Rig(load, 16, None)
    async with rig.engine:
        await rig.block()
        started_s, at_s = time.process_time(), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        return (time.process_time() - started_s) / (time.perf_counter() - at_s)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 256, 1024, 4096])
    parser.add_argument("--requests", type=int, default=1024, help="minimum requests at each number in flight")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS), help="where cached halves are")
    parser.add_argument("--no-journal", action="store_true")
    parser.add_argument(
        "--collector",
        choices=("default", "advised"),
        default="default",
        help="Python's cycle collector: its default, or as docs/operating.md advises for many requests in flight",
    )
    parser.add_argument("--no-parts", action="store_true", help="skip the sampling by part")
    parser.add_argument("--lines", type=int, default=0, help="number of functions with the most samples to show")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    set_collector(options.collector)
    load = Load(options.prompt_tokens, options.page_size, options.chunk_tokens, tuple(options.tiers))
    found = []
    for in_flight in options.in_flight:
        blocks = min(max(-(-options.requests // in_flight), 2), 200)
        figures = uvloop.run(
            measure(
                load,
                in_flight,
                blocks,
                journal=not options.no_journal,
                parts=not options.no_parts,
                show=options.lines,
            )
        )
        found.append(figures)
    idle = uvloop.run(measure_idle(load))
    if options.json:
        print(json.dumps({"load": asdict(load), "page_bytes": load.layout.page_bytes, "idle_cpu": idle,
                          "figures": [asdict(figures) for figures in found]}, indent=1))  # fmt: skip
        return
    console = Console(width=160)
    console.print(
        f"prompts of {load.prompt_tokens} tokens, half of them cached in {'/'.join(load.tiers)}; pages of "
        f"{load.page_size} tokens and {load.layout.page_bytes} bytes; chunks of {load.chunk_tokens} tokens"
    )
    table = Table("in flight", "µs a request", "to READY", "after", "spread", "events", "journal bytes", "by part")
    for figures in found:
        parts = " ".join(f"{name} {us:.0f}" for name, us in figures.parts_us.items())
        threads = " ".join(f"{name} {us:.0f}" for name, us in figures.threads_us.items())
        table.add_row(
            str(figures.in_flight),
            f"{figures.engine_us:.0f}",
            f"{figures.restore_us:.0f}",
            f"{figures.finish_us:.0f}",
            f"{min(figures.blocks_us):.0f} to {max(figures.blocks_us):.0f}",
            f"{figures.events:.1f}",
            f"{figures.journal_bytes:.0f}",
            f"{parts}; threads: {threads}",
        )
    console.print(table)
    console.print(f"idle: {idle:.2%} of a core")


if __name__ == "__main__":
    main()
