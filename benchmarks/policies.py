"""Default storage policy against no cache, on real processes: `python -m benchmarks.policies --json FILE`.

A decode engine restores prompts that storage, host memory and a prefill worker in another process have, over NIXL on
the loopback. Reads from storage and writes of prefill are throttled, from a link 16 times as slow as storage to one 16
times as fast. The same prompts are restored in turn by an engine with the default options, by one without cache (every
page comes from prefill), and by the latter once more, as a control: what the control differs by is the machine's noise.

Every prompt is asked for three times: from storage only, from host memory only, and with its first half in host memory
and its second half in storage. Each has eight more pages that only prefill has. All engines are new ones in every
round, so that connecting to prefill, and requests before the first measurement, count as well. Nothing is put in
storage (`write_tokens_min`): it has the same pages in every cell.

The figures are the worst over all cells (ratio, number of requests in flight) of the median of the paired ratios of the
times to ready, by kind of prompt, and of the ratio of the 99th percentiles of all requests of a cell.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import uvloop

from benchmarks.collector import set_collector
from benchmarks.figures import Figures, option_parser
from benchmarks.published.results import quantile
from benchmarks.throttled import ThrottledStorage
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
OWN_PAGES = 8
"""Pages of each prompt that only prefill has."""
HALF_PAGES = (48, 96)
"""Pages of half a prompt, smallest and largest."""
PAGE_S = 0.002
"""Time of a page on the throttled link: some 0.2 s for a prompt. What the engine itself costs is small beside it."""
RATIOS = tuple(2.0**power for power in range(-4, 5))
"""Speed of the link over that of storage."""
KINDS = ("storage", "host", "both")
ARMS = ("default", "no cache", "control")


@dataclass(frozen=True)
class Setup:
    """Size of a run."""

    ratios: Sequence[float]
    in_flight: Sequence[int]
    rounds: int
    prompts: int
    """Prompts of each round. A multiple of every number in flight."""
    policy: str = ""
    """Fetch policy in place of the default one."""


@dataclass
class Cell:
    """Times to ready in seconds at one ratio and concurrency: by arm and kind, in the order of the requests."""

    ratio: float
    in_flight: int
    ready_s: dict[tuple[str, str], list[float]] = field(
        default_factory=lambda: {(arm, kind): [] for arm in ARMS for kind in KINDS}
    )

    def paired_median(self, kind: str, *, arm: str = ARMS[0]) -> float:
        """Return the median of the ratios of an arm's time and that without cache, request by request."""
        pairs = zip(self.ready_s[arm, kind], self.ready_s["no cache", kind], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def over_no_cache(self, share: float, *, arm: str = ARMS[0]) -> float:
        """Return the ratio of a quantile of all requests' times to ready."""
        ours, theirs = (
            quantile([one for kind in KINDS for one in self.ready_s[a, kind]], share) for a in (arm, ARMS[1])
        )
        return ours / theirs

    @property
    def name(self) -> str:
        """The ratio of the speeds, and the number in flight."""
        ratio = f"{self.ratio:g}:1" if self.ratio >= 1 else f"1:{1 / self.ratio:g}"
        return f"{ratio} with {self.in_flight}"


class Prompts:
    """Prompts of a run: what storage has of each, and the tails that it has not."""

    def __init__(self, count: int, *, seed: int = 1) -> None:
        random = Random(seed)
        self._halves = [random.randint(*HALF_PAGES) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._halves)

    def stored(self, number: int) -> bytes:
        """Return the part of a prompt that storage has: two halves."""
        return _tokens(number, 0, 2 * self._halves[number] * LAYOUT.page_size)

    def asked(self, number: int, kind: str) -> bytes:
        """Return the prompt that is asked for."""
        halves = 2 if kind == "both" else 1
        end = halves * self._halves[number] * LAYOUT.page_size
        tail = _tokens(number, 1 + KINDS.index(kind), OWN_PAGES * LAYOUT.page_size)
        return self.stored(number)[: 4 * end] + tail

    @property
    def pages(self) -> int:
        """Pages of all of them."""
        return sum(2 * half + len(KINDS) * (OWN_PAGES + 1) for half in self._halves)


def _tokens(number: int, part: int, count: int) -> bytes:
    return np.random.default_rng((number, part)).integers(0, VOCABULARY, count, dtype=np.uint32).tobytes()


class Arm:
    """One engine, and the names of its requests."""

    def __init__(self, engine: DecodeEngine, address: str, *, cache: bool) -> None:
        self._engine = engine
        self._address = address
        self._cache = cache
        self._names = 0

    async def restore(self, prompts: Sequence[bytes]) -> list[float]:
        """Restore prompts at the same time; returns the seconds to ready of each. The device keeps nothing."""
        await self._engine.flush(("l1",))
        ready_s = await asyncio.gather(*(self._ready_s(tokens) for tokens in prompts))
        await self._engine.wait_settled()
        return ready_s

    async def _ready_s(self, tokens: bytes) -> float:
        self._names += 1
        request = DecodeRequest(
            request_id=f"r{self._names}", tokens=tokens, prefill=self._address, send_prompt=True, cache=self._cache
        )
        began_s = time.perf_counter()
        ready = await self._engine.restore(request)
        taken_s = time.perf_counter() - began_s
        await self._engine.finish(ready)
        return taken_s


class Bench:
    """The processes and the storage of a run."""

    def __init__(self, setup: Setup, prompts: Prompts, prefill: PrefillProcess, uri: str) -> None:
        self._setup = setup
        self._prompts = prompts
        self._prefill = prefill
        self._uri = uri
        self._throttle = Throttle(1.0)
        self._engines = 0

    async def run(self) -> AsyncIterator[Cell]:
        """Measure every cell, one after the other."""
        for in_flight in self._setup.in_flight:
            for ratio in self._setup.ratios:
                self._throttle.bytes_per_s = LAYOUT.page_bytes / PAGE_S / ratio
                cell = Cell(ratio, in_flight)
                for number in range(self._setup.rounds):
                    async with AsyncExitStack() as stack:
                        arms = {arm: await stack.enter_async_context(self._arm(cached=arm == ARMS[0])) for arm in ARMS}
                        await self._run_round(cell, arms, number)
                yield cell

    async def _run_round(self, cell: Cell, arms: dict[str, Arm], number: int) -> None:
        first = number * self._setup.prompts
        for at in range(first, first + self._setup.prompts, cell.in_flight):
            for kind in KINDS:
                prompts = [self._prompts.asked(one, kind) for one in range(at, at + cell.in_flight)]
                # Alternate the order, so that no arm is always the one after the longest pause.
                for arm in ARMS if (at // cell.in_flight) % 2 else reversed(ARMS):
                    cell.ready_s[arm, kind] += await arms[arm].restore(prompts)

    @asynccontextmanager
    async def _arm(self, *, cached: bool) -> AsyncIterator[Arm]:
        """Open an engine with the default options, or one that keeps and finds nothing."""
        self._engines += 1
        storage = open_storage(self._uri) if cached else None
        prefetch = self._setup.policy or StorageOptions().prefetch
        device = DevicePool.allocate(LAYOUT, 2 * max(self._setup.in_flight) * 2 * (HALF_PAGES[1] + OWN_PAGES))
        async with DecodeEngine(
            EngineConfig(
                model="s",
                storage=StorageOptions(prefetch=prefetch, write_tokens_min=1 << 30),  # type: ignore[arg-type]  # It checks.
                default_deadline_s=300.0,
            ),
            device=device,
            host=HostPool.allocate(LAYOUT, self._prompts.pages) if cached else None,
            storage=storage and ThrottledStorage(storage, self._throttle, page_bytes=LAYOUT.page_bytes),  # type: ignore[arg-type]  # It passes on the rest.
            transport=NixlTransport(name=f"decode-{self._engines}", dials=["127.0.0.1:*"]),
        ) as engine:
            yield Arm(engine, self._prefill.address, cache=cached)


@asynccontextmanager
async def open_bench(setup: Setup, folder: Path) -> AsyncIterator[Bench]:
    """Fill a store with the prompts, and start a throttled prefill worker that has computed all of them."""
    prompts = Prompts(setup.rounds * setup.prompts)
    order = PrefillOrder(
        name="prefill-0", fingerprint="s", layout=LAYOUT, num_pages=prompts.pages + 1024, chunk_tokens=1 << 16,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    uri = f"file:{folder / 'pages'}?capacity={8 * prompts.pages * LAYOUT.page_bytes}"
    await _fill(prompts, order, uri)
    slow = msgspec.structs.replace(order, link_bytes_per_s=LAYOUT.page_bytes / PAGE_S)
    async with PrefillProcess(slow) as prefill:
        for number in range(len(prompts)):
            for kind in KINDS:
                await prefill.compute(prompts.asked(number, kind))
        yield Bench(setup, prompts, prefill, uri)


async def _fill(prompts: Prompts, order: PrefillOrder, uri: str) -> None:
    async with (
        PrefillProcess(order) as prefill,
        DecodeEngine(
            EngineConfig(model="s", default_deadline_s=300.0),
            device=DevicePool.allocate(LAYOUT, 4 * HALF_PAGES[1]),
            host=HostPool.allocate(LAYOUT, 4 * HALF_PAGES[1]),
            storage=open_storage(uri),
            transport=NixlTransport(name="decode-fill", dials=["127.0.0.1:*"]),
        ) as engine,
    ):
        arm = Arm(engine, prefill.address, cache=True)
        for number in range(len(prompts)):
            await arm.restore([prompts.stored(number)])


def lines_of(cells: Sequence[Cell]) -> Iterator[str]:
    """The table of all cells, as lines of text."""
    yield f"{'link:storage':16} {'p50 ' + ', '.join(KINDS):>24} {'p99':>6} {'control p50':>12} {'p99':>6}"
    for cell in cells:
        medians = " ".join(f"{cell.paired_median(kind):7.2f}" for kind in KINDS)
        control = statistics.median(cell.paired_median(kind, arm="control") for kind in KINDS)
        yield (
            f"{cell.name:16} {medians:>24} {cell.over_no_cache(0.99):6.2f} {control:12.2f}"
            f" {cell.over_no_cache(0.99, arm='control'):6.2f}"
        )


async def measure(figures: Figures, setup: Setup) -> None:
    """Measure all cells and add the figures."""
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        async with open_bench(setup, Path(folder)) as bench:
            async for cell in bench.run():
                cells.append(cell)
                print(list(lines_of(cells))[-1], flush=True)
    for line in lines_of(cells):
        figures.note(line)
    add_figures(figures, cells)


def add_figures(figures: Figures, cells: Sequence[Cell]) -> None:
    """Add the worst cell of each figure, with the noise that the control shows."""
    requests = sum(len(times) for times in cells[0].ready_s.values()) // len(ARMS)
    noise = [cell.over_no_cache(0.99, arm="control") for cell in cells]
    spread = f"{requests} requests a cell; the control's p99 is {min(noise):.2f} to {max(noise):.2f} of its like"
    p50 = max((cell.paired_median(kind), f"{kind} at {cell.name}") for cell in cells for kind in KINDS)
    p99 = max((cell.over_no_cache(0.99), f"at {cell.name}") for cell in cells)
    figures.add("policies.p50", p50[0], p50[1])
    figures.add("policies.p99", p99[0], f"{p99[1]}; {spread}")
    best = min((cell.over_no_cache(0.5), f"at {cell.name}") for cell in cells)
    figures.add("policies.best", best[0], best[1])


def main() -> None:
    """Parse the options and measure."""
    parser = option_parser(__doc__)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="link speed over storage speed")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each cell, each with a new engine")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a round, each asked for three times")
    parser.add_argument("--policy", default="", help="a fetch policy in place of the default one")
    chosen = parser.parse_args()
    set_collector()
    setup = Setup(chosen.ratios, chosen.in_flight, chosen.rounds, chosen.prompts, chosen.policy)
    with Figures(chosen.json) as figures, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(figures, setup))


if __name__ == "__main__":
    main()
