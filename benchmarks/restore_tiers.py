"""An engine with its prefill worker and the single stages, measured in turns, for the benchmark of restores.

Times are until READY. If storage is a disk, its files are dropped from the page cache before each read, and the
measurement is rejected if the bytes did not come from the disk.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.page_cache import Cached, NoDisk, disk_bytes
from benchmarks.restore_stages import Stages, open_stages
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

VOCABULARY = 1 << 16
LARGE = KVLayout(num_layers=16, num_kv_heads=8, head_dim=128, dtype="float16", page_size=16)
HALF_PAGES, LONG_PAGES, SHORT_PAGES = 256, 768, 64


def tokens_of(seed: int, count: int) -> bytes:
    """Return packed tokens."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.uint32).tobytes()


HALF = tokens_of(1, HALF_PAGES * LARGE.page_size)
# One more token, which is a page of its own, because the last page of a prompt is always sent.
END = tokens_of(2, 1)
OTHER, LONG = tokens_of(3, HALF_PAGES * LARGE.page_size), tokens_of(5, LONG_PAGES * LARGE.page_size)
# Prompts with the number of pages that come from storage.
PROMPTS = {
    "restore": (HALF + END, HALF_PAGES),
    "transfer": (OTHER + END, 0),
    "both": (HALF + OTHER, HALF_PAGES),
    "transfer_long": (LONG + END, 0),
    "both_long": (HALF + LONG, HALF_PAGES),
    "restore_short": (HALF[: 4 * SHORT_PAGES * LARGE.page_size] + END, SHORT_PAGES),
}
# The long ones are for the disk, which is about as slow as their transfers.
OF_DISKS = ("transfer_long", "both_long")


class Pair:
    """An engine, and its prefill worker in another process."""

    def __init__(self, engine: DecodeEngine, prefill: PrefillProcess) -> None:
        self.engine = engine
        self.address = prefill.address
        self.ready_at_s = 0.0
        self._names = 0
        # The CPU clock of another process, as computed by clock_getcpuclockid.
        self._clocks = (time.CLOCK_PROCESS_CPUTIME_ID, (~prefill._process.pid << 3) | 2)

    def cpu_s(self) -> float:
        """Return the processor time of both processes."""
        return sum(map(time.clock_gettime, self._clocks))

    async def ready(self, tokens: bytes, *, cache: bool = False) -> dict[str, int]:
        """Restore and finish a request; returns tokens by source, and sets `ready_at_s`."""
        self._names += 1
        request = DecodeRequest(
            request_id=f"r{self._names}", tokens=tokens, prefill=self.address, send_prompt=True, cache=cache
        )
        ready = await self.engine.restore(request)
        self.ready_at_s = time.perf_counter()
        await self.engine.finish(ready)
        await self.engine.wait_settled()
        return dict(ready.sources)

    async def forget(self) -> None:
        """Flush all tiers except storage."""
        await self.engine.flush(("l1", "l2"))


@dataclass
class Times:
    """Milliseconds of every measurement, by round, in one state of the page cache."""

    on_disk: bool
    spent_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Processor time of both processes."""

    def forget(self) -> None:
        """Drop the results of warm-up rounds."""
        self.spent_ms.clear()
        self.cpu_ms.clear()

    def median(self, name: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.spent_ms[name])

    def pipeline(self, kind: str) -> float:
        """Return the restore's share of the slower stage's speed."""
        return 1 / self.over_slower(f"restore{kind}", f"read{kind}", f"copy{kind}")

    def over_slower(self, what: str, first: str, second: str) -> float:
        """Return the median of a time over the slower of two others of the same round."""
        spent = self.spent_ms
        rounds = zip(spent[what], spent[first], spent[second], strict=True)
        return statistics.median(both / max(one, other) for both, one, other in rounds)


class TierRig:
    """An engine and the single stages, with their times measured in turns."""

    def __init__(self, pair: Pair, files: Cached, stages: Stages, read_ends_s: list[float]) -> None:
        self._pair = pair
        self._files = files
        self._stages = stages
        self._read_ends_s = read_ends_s

    async def run_round(self, times: Times) -> None:
        """Run every measurement once."""
        stages = self._stages
        if times.on_disk:
            await self._timed(times, "plain", stages.plain, HALF_PAGES, stages.files)
        else:
            # Files dropped last may be in the page cache again after this.
            await self._pair.forget()
            await self._restore(*PROMPTS["restore"])
            await stages.read(HALF_PAGES)
        for pages, kind in ((HALF_PAGES, ""), (SHORT_PAGES, "_short")):
            for name, work in (("read", stages.read), ("copy", stages.copy), ("untied", stages.both)):
                await self._timed(
                    times, name + kind, partial(work, pages), pages, stages.files if name != "copy" else None
                )
        for name, (prompt, restored) in PROMPTS.items():
            if times.on_disk or name not in OF_DISKS:
                await self._pair.forget()
                work = partial(self._restore, prompt, restored)
                await self._timed(times, name, work, restored, self._files if restored else None)

    async def _restore(self, prompt: bytes, restored: int) -> None:
        sources = await self._pair.ready(prompt)
        assert sources["l3"] == restored * LARGE.page_size, sources

    async def _timed(
        self, times: Times, name: str, work: Callable[[], Awaitable[None]], pages: int, files: Cached | None
    ) -> None:
        if files is not None and times.on_disk:
            files.drop()
        before_bytes, before_cpu_s, began_s = disk_bytes(), self._pair.cpu_s(), time.perf_counter()
        self._pair.ready_at_s = 0.0
        await work()
        # Until READY if there is a request, not until the end of the call.
        ended_s = self._pair.ready_at_s or time.perf_counter()
        times.spent_ms[name].append(1e3 * (ended_s - began_s))
        times.cpu_ms[name].append(1e3 * (self._pair.cpu_s() - before_cpu_s))
        if name == "restore":
            times.spent_ms["tail"].append(1e3 * (ended_s - self._read_ends_s[-1]))
        if files is not None:
            share = (disk_bytes() - before_bytes) / (pages * LARGE.page_bytes)
            if not (share > 0.9 if times.on_disk else share < 0.1):
                raise NoDisk(f"{name}: {share:.0%} of the bytes came from the disk")


@asynccontextmanager
async def tier_rig(folder: Path) -> AsyncIterator[TierRig]:
    """Open an engine that has HALF in storage, a prefill worker that has all prompts, and the stages."""
    order = PrefillOrder(
        name="prefill-0", fingerprint="s", layout=LARGE, num_pages=12 * HALF_PAGES,
        chunk_tokens=32 * LARGE.page_size, vocabulary=VOCABULARY,
    )  # fmt: skip
    storage = open_storage(f"file:{folder / 'engine'}?capacity={8 * HALF_PAGES * LARGE.page_bytes}")
    read_ends_s: list[float] = []
    get_into = storage.get_into

    async def noted(*arguments: Any, **options: Any) -> list[bool]:
        good = await get_into(*arguments, **options)
        read_ends_s.append(time.perf_counter())
        return good

    storage.get_into = noted  # type: ignore[method-assign]  # What it watches.
    async with (
        PrefillProcess(order) as prefill,
        DecodeEngine(
            EngineConfig(
                model="s",
                storage=StorageOptions(prefetch="wait_complete", prefetch_threshold_tokens=LARGE.page_size),
                default_deadline_s=300.0,
            ),
            device=DevicePool.allocate(LARGE, 5 * HALF_PAGES),
            host=HostPool.allocate(LARGE, 2 * HALF_PAGES),
            storage=storage,
            transport=NixlTransport(name="decode-0", dials=["127.0.0.1:*"]),
        ) as engine,
        open_stages(folder / "stages", LARGE, HALF_PAGES) as stages,
    ):
        pair = Pair(engine, prefill)
        await pair.ready(HALF, cache=True)
        # After this, prefill has all prompts.
        for prompt, _ in PROMPTS.values():
            await pair.ready(prompt)
        yield TierRig(pair, Cached(folder / "engine", "*.seg"), stages, read_ends_s)
