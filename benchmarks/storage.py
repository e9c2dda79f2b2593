"""Speed of the `file:` engine relative to hand-written baselines: `python -m benchmarks.storage [--help]`.

In each round every candidate does the same work directly after the other, because the speed of a machine drifts; ratios
are medians over rounds. The work is one batch of pages: put under new keys, then read back from the page cache, then
read again after the files were dropped from the page cache. All use the same memory. Engines compute checksums and are
limited to three batches, so that they evict as in service; `storage_baselines.py` describes what the baselines do and
omit. The last of three ratios is to copies and checksums by two threads and nothing else (`storage_floor.py`), the
upper bound for an engine that checks its pages on two processors.

Measurements disturbed by other programs are repeated at most twice; the number of those still disturbed is printed.
Then one line for each target: pass or short. The loop's lag is compared with an idle loop of another process that runs
at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.storage_baselines import Candidate, Pages, baselines, forget_cached, pool_pages
from benchmarks.storage_floor import Checked, Others
from tidekv.backends.storage import Storage, open_storage
from tidekv.engine.poller import PollerThread
from tidekv.states.types import PageIds, PoolMemory, Segment, page_ids

BATCH_BYTES = 64 << 20
KINDS = ("write", "read", "cold read")
LAG_PAUSE_S = 0.001
LAG_S = 3.0
LAG_ABOVE_IDLE_MS_MAX = 2.0
EXISTS_KEYS = 1000
EXISTS_US_MAX = 1.0
TIMEOUT_S = 300.0
SMALL_PAGE_BYTES = 64 << 10
# Minimum ratio to a file per page for small pages, and to the fastest raw way for others.
SMALL_PAGES = {"write": 5.0, "read": 2.0}
LARGE_PAGES = {"write": 0.8, "read": 0.9}
ATTEMPTS_MAX = 3
FLOOR = "copy and xxh3, 2 threads"
RAW = ("raw preadv, 1 thread", "raw NIXL, aio", "raw NIXL, uring")

Speeds = dict[tuple[str, str], list[float]]


@dataclass(frozen=True, slots=True)
class Target:
    """One target, and its result."""

    what: str
    wanted: str
    got: float
    reached: bool


class Engine:
    """The engine under test."""

    started_at_s = 0.0

    def __init__(self, name: str, storage: Storage, directory: Path, count: int) -> None:
        self.name, self.storage, self.directory = name, storage, directory
        self.ids: PageIds = page_ids(range(count))

    async def put(self, keys: Sequence[bytes]) -> None:
        """Store every page of the pool."""
        self.started_at_s = time.perf_counter()
        assert all(await self.storage.put_from(keys, self.ids, timeout_s=TIMEOUT_S))

    async def get(self, keys: Sequence[bytes]) -> None:
        """Read every page of the pool back."""
        self.started_at_s = time.perf_counter()
        assert all(await self.storage.get_into(keys, self.ids, timeout_s=TIMEOUT_S))

    def files(self) -> list[Path]:
        """Return the files that hold the pages."""
        return list(self.directory.glob("*/*.seg"))

    async def close(self) -> None:
        """Close the engine."""
        await self.storage.close()


def keys_of(page_bytes: int, turn: int, attempt: int = 0) -> list[bytes]:
    """Return new keys for a batch."""
    count = max(BATCH_BYTES // page_bytes, 1)
    return [hashlib.sha256(f"{page_bytes}-{turn}-{attempt}-{at}".encode()).digest() for at in range(count)]


async def open_engine(name: str, options: str, root: Path, pages: Pages, poller: PollerThread) -> Engine:
    """Open an engine with the pool's pages registered."""
    count, page_bytes = pages.shape
    directory = root / name.replace(" ", "-").replace(":", "").replace(",", "")
    storage = open_storage(f"file:{directory}?{options}", {"capacity": 3 * BATCH_BYTES + (32 << 20)})
    # In the same form as a host pool passes its pages.
    memory = memoryview(pages.reshape(-1))
    segment = Segment(address=pages.ctypes.data, piece_bytes=page_bytes, stride_bytes=page_bytes, page_count=count)
    await storage.register(
        PoolMemory(segments=(segment,), page_count=count),
        lambda page: memory[page * page_bytes : (page + 1) * page_bytes],
        namespace=b"b" * 32,
        poller=poller,
    )
    return Engine(name, storage, directory, count)


async def race(
    candidates: Sequence[Candidate], page_bytes: int, rounds: int, kinds: Sequence[str]
) -> tuple[Speeds, list[bytes], int]:
    """Return MB/s of each candidate in each round, the keys of the last, and how many figures were disturbed."""
    speeds: Speeds = {}
    others, disturbed = Others(), 0
    for turn in range(rounds + 1):
        keys = keys_of(page_bytes, turn)
        # The first one changes each round, because each candidate leaves the caches in a state that affects the next.
        order = (*candidates[turn % len(candidates) :], *candidates[: turn % len(candidates)])
        if "write" not in kinds:
            # Everything that is read must exist.
            for candidate in order:
                await candidate.put(keys)
        for kind in kinds:
            for attempt in range(ATTEMPTS_MAX):
                if kind == "write":
                    keys = keys_of(page_bytes, turn, attempt)
                others.begin()
                found = {candidate.name: await once(candidate, kind, keys) for candidate in order}
                if not turn or not others.disturb():
                    break
            else:
                disturbed += 1
            if turn:  # The first round creates files.
                for name, speed in found.items():
                    speeds.setdefault((name, kind), []).append(speed)
    return speeds, keys, disturbed


async def once(candidate: Candidate, kind: str, keys: Sequence[bytes]) -> float:
    """Return MB/s of one candidate for one batch."""
    if kind == "cold read":
        forget_cached(candidate)
    await (candidate.put if kind == "write" else candidate.get)(keys)
    return BATCH_BYTES / (time.perf_counter() - candidate.started_at_s) / 1e6


def ratio(speeds: Speeds, ours: str, theirs: Sequence[str], kind: str) -> float:
    """Return the ratio of our speed to the fastest of some others, as the median over rounds."""
    fastest = max(theirs, key=lambda name: statistics.median(speeds[name, kind]))
    pairs = zip(speeds[ours, kind], speeds[fastest, kind], strict=True)
    return statistics.median(one / other for one, other in pairs)


def show(speeds: Speeds, candidates: Sequence[Candidate], page_bytes: int, kinds: Sequence[str]) -> Table:
    """Return a table of the speeds, with ratios to a file per page, the fastest raw way and the floor."""
    count = BATCH_BYTES // page_bytes
    title = f"{count} pages of {page_bytes >> 10} KiB, MB/s (times a file a page, the fastest raw, the fastest checked)"
    table = Table(title=title)
    table.add_column("")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for candidate in candidates:
        cells = [
            f"{statistics.median(speeds[candidate.name, kind]):.0f} "
            f"({ratio(speeds, candidate.name, ['a file a page'], kind):.2f}, "
            f"{ratio(speeds, candidate.name, RAW, kind):.2f}, {ratio(speeds, candidate.name, [FLOOR], kind):.2f})"
            for kind in kinds
        ]
        table.add_row(candidate.name, *cells)
    return table


def speed_targets(speeds: Speeds, engine: str, page_bytes: int) -> list[Target]:
    """Judge one engine's speeds at one page size."""
    small = page_bytes <= SMALL_PAGE_BYTES
    wanted, others = (SMALL_PAGES, ["a file a page"]) if small else (LARGE_PAGES, list(RAW))
    targets = []
    for kind, least in wanted.items():
        got = ratio(speeds, engine, others, kind)
        what = f"{kind} {page_bytes >> 10} KiB, times {'a file a page' if small else 'the fastest raw'}"
        targets.append(Target(what, f"{least} or more", round(got, 3), got >= least))
    return targets


async def exists_us(engine: Engine, keys: Sequence[bytes]) -> float:
    """Return µs per key of an existence look-up, in batches."""
    asked = list(keys[:EXISTS_KEYS])
    costs = []
    for _ in range(50):
        started_at_s = time.perf_counter()
        await engine.storage.exists(asked, timeout_s=TIMEOUT_S)
        costs.append((time.perf_counter() - started_at_s) / len(asked) * 1e6)
    return statistics.median(costs)


async def late_ms(running: Callable[[], bool]) -> list[float]:
    """Return the loop's lag for each of many short sleeps while `running`."""
    late: list[float] = []
    while running():
        asked_at_s = time.perf_counter()
        await asyncio.sleep(LAG_PAUSE_S)
        late.append((time.perf_counter() - asked_at_s - LAG_PAUSE_S) * 1e3)
    return late


async def lag_ms_p99(engine: Engine, keys: Sequence[bytes]) -> tuple[float, float]:
    """Return the loop's p99 lag while the engine works, and that of an idle loop in another process meanwhile."""
    idle = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.storage",
        "--idle-loop",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert idle.stdout is not None
    # The process prints a line when it has started.
    await idle.stdout.readline()
    until_s = time.monotonic() + LAG_S

    async def work() -> None:
        while time.monotonic() < until_s:
            await engine.put(keys)
            for _ in range(4):
                await engine.get(keys)

    busy = asyncio.create_task(work())
    late = await late_ms(lambda: not busy.done())
    await busy
    answer, _ = await idle.communicate(b"")
    return float(np.percentile(late, 99)), float(answer)


async def idle_loop() -> None:
    """Run an idle loop until standard input ends, and print its p99 lag."""
    loop = asyncio.get_running_loop()
    print("started", flush=True)
    ended = loop.run_in_executor(None, sys.stdin.read)
    print(np.percentile(await late_ms(lambda: not ended.done()), 99))


async def bench(
    page_bytes: int, root: Path, options: dict[str, str], rounds: int, kinds: Sequence[str], console: Console
) -> tuple[Speeds, list[Target]]:
    """Compare the candidates at one page size, print the table, and judge the first engine."""
    pages = pool_pages(page_bytes, BATCH_BYTES)
    poller = PollerThread()
    poller.start()
    engines = [await open_engine(name, text, root, pages, poller) for name, text in options.items()]
    candidates: list[Candidate] = [*baselines(root, pages), Checked(root / "checked", pages), *engines]
    speeds, keys, disturbed = await race(candidates, page_bytes, rounds, kinds)
    console.print(show(speeds, candidates, page_bytes, kinds))
    console.print(f"{disturbed} of {rounds * len(kinds)} comparisons were disturbed by other programs")
    first = engines[0]
    targets = speed_targets(speeds, first.name, page_bytes) if {"write", "read"} <= set(kinds) else []
    if len(keys) >= EXISTS_KEYS:
        for what, asked in (("are there", keys), ("are not", keys_of(page_bytes, -1))):
            cost = await exists_us(first, asked)
            targets.append(
                Target(f"exists, 1,000 keys that {what}, µs a key", "1 or less", round(cost, 3), cost <= EXISTS_US_MAX)
            )
    busy, idle = await lag_ms_p99(first, keys)
    what = f"loop late at p99, {page_bytes >> 10} KiB, ms above an idle loop's {idle:.2f}"
    above = busy - idle
    targets.append(Target(what, "2 or less", round(above, 2), above <= LAG_ABOVE_IDLE_MS_MAX))
    for candidate in candidates:
        await candidate.close()
    await poller.close()
    return speeds, targets


def main() -> None:
    """Run on a directory given, or a temporary one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", help="directory for the files; a temporary one by default")
    parser.add_argument("--page-kib", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--engines", nargs="+", metavar="OPTIONS", help="options of each engine; the first is judged")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--idle-loop", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.idle_loop:
        asyncio.run(idle_loop())
        return
    texts = given.engines or ["", "io=nixl&queue=aio", "io=nixl&queue=uring"]
    options = {f"file:, {text or 'default'}": text for text in texts}
    console = Console(width=130)
    root = Path(tempfile.mkdtemp(prefix="tidekv-bench-", dir=given.directory))
    figures: dict[str, object] = {}
    targets: list[Target] = []
    try:
        for kib in given.page_kib:
            (root / str(kib)).mkdir()
            speeds, reached = asyncio.run(
                bench(kib << 10, root / str(kib), options, given.rounds, given.kinds, console)
            )
            shutil.rmtree(root / str(kib))
            targets += reached
            figures[f"{kib} KiB, MB/s"] = {f"{name}: {kind}": found for (name, kind), found in speeds.items()}
    finally:
        shutil.rmtree(root)
    for target in targets:
        verdict = "[green]pass [/]" if target.reached else "[red]short[/]"
        console.print(f"{verdict} {target.what}: {target.got} ({target.wanted})", highlight=False)
    if given.json:
        given.json.write_text(json.dumps(figures | {"targets": [asdict(target) for target in targets]}, indent=1))


if __name__ == "__main__":
    main()
