"""First rounds of the default storage policy, on real processes: `python -m benchmarks.first_rounds --json FILE`.

A decode engine restores the same prompts in four rounds, over NIXL on the loopback, from a prefill worker in another
process. Device and host are flushed after each prompt, so that from the second round on it comes from storage or from
prefill. Reads from storage and writes of prefill are throttled. Three engines do the same in
turn, batch by batch: one with the default options, one that always waits for storage, one that has no storage.

The first figure is the worst over all cells (speed of storage over that of prefill, tokens of a prompt, requests at
once) of the time to ready from the second round on, over the better of always and never in the same cell. Each cell is
measured REPEATS times with new engines; a round counts, of each of its requests, the median of these: a machine that
does other things stalls a process for longer than such a request takes. Differences below FLOOR_S count as none, and
so does a round in which the default fetched the same pages as the better one.

The second figure needs no quiet machine: what the plans chose. Of prompts of at least CHOICE_TOKENS, it is the share
that the default fetched from a storage that is much faster than prefill, at the worst of the rounds from the second on.

The file has all cells; benchmarks/results/README.md is generated from it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.collector import set_collector
from benchmarks.figures import option_parser
from benchmarks.throttled import ThrottledStorage
from demo.artefact import write_artefact
from demo.link import Throttle
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

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=128, dtype="float16", page_size=16)
VOCABULARY = 1 << 16
LINK_TOKEN_S = 20e-6
"""Time of a token on the link from prefill."""
LENGTHS = (256, 1024, 4096, 8192)
SPEEDS = (16.0, 0.25)
"""Speed of storage over that of the link."""
AT_ONCE = (1, 4)
PROMPTS = 4
ROUNDS = 4
REPEATS = 3
CHOICE_TOKENS = 1024
"""A shorter prompt takes as long from either source: its time is that of the calls."""
FLOOR_S = 0.002
"""A mean that is longer by less than this is not longer."""
ARMS = ("default", "always", "never")


@dataclass
class Cell:
    """Times to ready in seconds: by arm and round."""

    speed: float
    tokens: int
    at_once: int
    ready_s: dict[tuple[str, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By arm, round and prompt; one of each repeat."""
    fetched: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    """By arm and round, the tokens from storage of each request: what its plan chose."""

    def means_s(self, arm: str) -> list[float]:
        """Return of each round the mean over its prompts; of a prompt counts the median."""
        return [
            statistics.fmean(statistics.median(self.ready_s[arm, number, one]) for one in range(PROMPTS))
            for number in range(ROUNDS)
        ]

    def fetched_shares(self) -> list[float]:
        """Return the share of the prompts that the default fetched from storage, by round."""
        return [statistics.fmean(self.fetched["default", number]) / self.tokens for number in range(ROUNDS)]

    @property
    def over_better(self) -> float:
        """The worst round of the default from the second on, over the better of always and never. A round in which it
        fetched what that one fetched is none: the same plans differ by the machine only.
        """
        worst = 1.0
        for number in range(1, ROUNDS):
            ours = self.means_s("default")[number]
            better = min(ARMS[1:], key=lambda arm: self.means_s(arm)[number])
            theirs = self.means_s(better)[number]
            if ours >= theirs + FLOOR_S and self.fetched["default", number] != self.fetched[better, number]:
                worst = max(worst, ours / theirs)
        return worst

    @property
    def name(self) -> str:
        """The conditions."""
        return f"{self.tokens:,} tokens, {self.at_once} at once, storage x {self.speed:g}"

    def as_json(self) -> dict[str, object]:
        """Return the conditions and the figures of this cell."""
        return {
            "speed": self.speed,
            "tokens": self.tokens,
            "at_once": self.at_once,
            "over_better": self.over_better,
            "ready_ms": {arm: [1000 * mean for mean in self.means_s(arm)] for arm in ARMS},
            "fetched": self.fetched_shares(),
        }


def prompt(number: int, tokens: int) -> bytes:
    """Return packed tokens; the last one is on a page of its own, which only prefill has."""
    return np.random.default_rng((number, tokens)).integers(0, VOCABULARY, tokens + 1, dtype=np.uint32).tobytes()


class Arm:
    """One engine, and the names of its requests."""

    def __init__(self, engine: DecodeEngine, address: str) -> None:
        self._engine = engine
        self._address = address
        self._names = 0

    async def restore(self, prompts: Sequence[bytes]) -> list[tuple[float, int]]:
        """Restore prompts at the same time; return of each the seconds to ready, and its tokens from storage. Only
        storage keeps them.
        """
        restored = await asyncio.gather(*(self._restored(tokens) for tokens in prompts))
        await self._engine.wait_settled()
        await self._engine.flush(("l1", "l2"))
        return restored

    async def _restored(self, tokens: bytes) -> tuple[float, int]:
        self._names += 1
        request = DecodeRequest(request_id=f"r{self._names}", tokens=tokens, prefill=self._address, send_prompt=True)
        began_s = time.perf_counter()
        ready = await self._engine.restore(request)
        taken_s = time.perf_counter() - began_s
        await self._engine.finish(ready)
        return taken_s, ready.sources.get("l3", 0)


class Bench:
    """A prefill worker that has computed all prompts, and folders for the stores."""

    def __init__(self, prefill: PrefillProcess, folder: Path) -> None:
        self._prefill = prefill
        self._folder = folder
        self._engines = 0

    async def measure(self, cell: Cell) -> None:
        """Run all rounds of a cell with new engines and empty stores."""
        async with AsyncExitStack() as stack:
            arms = {arm: await stack.enter_async_context(self._arm(cell, arm)) for arm in ARMS}
            for number in range(ROUNDS):
                for first in range(0, PROMPTS, cell.at_once):
                    prompts = [prompt(one, cell.tokens) for one in range(first, first + cell.at_once)]
                    # Alternate the order, so that no arm is always the one after the longest pause.
                    for arm in ARMS if number % 2 else reversed(ARMS):
                        for one, (ready_s, fetched) in enumerate(await arms[arm].restore(prompts), first):
                            cell.ready_s[arm, number, one].append(ready_s)
                            cell.fetched[arm, number].append(fetched)

    @asynccontextmanager
    async def _arm(self, cell: Cell, arm: str) -> AsyncIterator[Arm]:
        self._engines += 1
        pages = (cell.tokens // LAYOUT.page_size + 1) * 2 * (cell.at_once + 1)
        storage = None
        if arm != "never":
            throttle = Throttle(LAYOUT.page_bytes / (LINK_TOKEN_S * LAYOUT.page_size) * cell.speed)
            uri = f"file:{self._folder / str(self._engines)}?capacity={16 * pages * LAYOUT.page_bytes}"
            storage = ThrottledStorage(open_storage(uri), throttle, page_bytes=LAYOUT.page_bytes)
        options = StorageOptions(prefetch="wait_complete") if arm == "always" else StorageOptions()
        async with DecodeEngine(
            EngineConfig(model="s", storage=options, default_deadline_s=60.0),
            device=DevicePool.allocate(LAYOUT, pages),
            host=HostPool.allocate(LAYOUT, pages),
            storage=storage,  # type: ignore[arg-type]  # It passes on the rest.
            transport=NixlTransport(name=f"decode-{self._engines}", dials=["127.0.0.1:*"]),
        ) as engine:
            yield Arm(engine, self._prefill.address)


@asynccontextmanager
async def open_bench(folder: Path, lengths: Sequence[int]) -> AsyncIterator[Bench]:
    """Start a throttled prefill worker that has computed all prompts."""
    pages = sum(PROMPTS * (tokens // LAYOUT.page_size + 1) for tokens in lengths)
    order = PrefillOrder(
        name="prefill-0",
        fingerprint="s",
        layout=LAYOUT,
        num_pages=pages + 4 * (max(lengths) // LAYOUT.page_size + 1),
        chunk_tokens=1 << 16,
        vocabulary=VOCABULARY,
        link_bytes_per_s=LAYOUT.page_bytes / (LINK_TOKEN_S * LAYOUT.page_size),
    )
    async with PrefillProcess(order) as prefill:
        for tokens in lengths:
            for number in range(PROMPTS):
                await prefill.compute(prompt(number, tokens))
        yield Bench(prefill, folder)


def lines_of(cells: Sequence[Cell]) -> Iterator[str]:
    """The table of all cells, as lines of text: means of each round, in milliseconds."""
    yield f"{'':44} {'over better':>11}" + "".join(f"{arm + ', ms a round':>32}" for arm in ARMS) + "  default fetched"
    for cell in cells:
        means = ("".join(f"{1000 * mean:8.1f}" for mean in cell.means_s(arm)) for arm in ARMS)
        shares = " ".join(f"{share:4.0%}" for share in cell.fetched_shares())
        yield f"{cell.name:44} {cell.over_better:11.2f}" + "".join(means) + f"  {shares}"


async def measure(lengths: Sequence[int], speeds: Sequence[float], at_once: Sequence[int]) -> list[Cell]:
    """Measure all cells, and print the table."""
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        async with open_bench(Path(folder), lengths) as bench:
            for cell in (Cell(speed, tokens, few) for speed in speeds for tokens in lengths for few in at_once):
                for _ in range(REPEATS):
                    await bench.measure(cell)
                cells.append(cell)
                print(*list(lines_of(cells))[0 if len(cells) == 1 else -1 :], sep="\n", flush=True)
    return cells


def figures_of(cells: Sequence[Cell]) -> dict[str, object]:
    """Return both figures with their cells, and all cells."""
    worst = max(cells, key=lambda cell: cell.over_better)
    figures: dict[str, object] = {"over_better": worst.over_better, "over_better_in": worst.name}
    clear = [cell for cell in cells if cell.speed > 1 and cell.tokens >= CHOICE_TOKENS]
    if clear:
        least = min(clear, key=lambda cell: min(cell.fetched_shares()[1:]))
        figures |= {"fetched": min(least.fetched_shares()[1:]), "fetched_in": least.name}
    return figures | {"cells": [cell.as_json() for cell in cells]}


def main() -> None:
    """Parse the options and measure."""
    parser = option_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--speeds", type=float, nargs="+", default=SPEEDS, help="storage speed over link speed")
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE, help="requests at once; divisors of 4")
    chosen = parser.parse_args()
    set_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cells = runner.run(measure(chosen.lengths, chosen.speeds, chosen.at_once))
    write_artefact(chosen.json, figures_of(cells), "python3 dev.py bench first-rounds")


if __name__ == "__main__":
    main()
