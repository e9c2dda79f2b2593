"""Kill test of writers and readers of one `file:` directory: `python -m benchmarks.storage_kills [KILLS]`.

Several processes at once fork children that open the directory, write and read it, and are killed (SIGKILL) some
milliseconds later, at any point: opening, reserving, writing, publishing, evicting, closing. Readers and this process
continuously check every byte of every page that they read. Afterwards the directory is opened again:

    no wrong byte       every page reported as present is whole; `verify` agrees
    no lost bound       the files were never larger than the capacity
    no stuck lock       nothing is reserved for dead processes, the index is sound, and every slot can be written again

Exits with 1 if one of these does not hold.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from tidekv.backends.storage import Storage, open_storage
from tidekv.states.types import PoolMemory, Segment, page_ids

PAGE_BYTES = 4096
POOL_PAGES = 16
KEYS = 160
CAPACITY_PAGES = 80
FORKERS = 4
LIFE_MAX_S = 0.08
TIMEOUT_S = 30.0
READER_WRONG = 3
"""Exit code of a child that read a page with a wrong byte."""


def key_of(number: int) -> bytes:
    """Return the key of a page."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def content_of(number: int) -> npt.NDArray[np.uint8]:
    """Return the page of that key, equal in every process."""
    seed = int.from_bytes(key_of(number)[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, np.uint8)


class Pages:
    """A host pool, and checked access to an engine on the directory."""

    def __init__(self) -> None:
        self.array = np.zeros((POOL_PAGES, PAGE_BYTES), np.uint8)
        segment = Segment(
            address=self.array.ctypes.data, piece_bytes=PAGE_BYTES, stride_bytes=PAGE_BYTES, page_count=POOL_PAGES
        )
        self._memory = PoolMemory(segments=(segment,), page_count=POOL_PAGES)

    async def open(self, root: Path) -> Storage:
        """Open the directory. Files are read and written by threads, because a poller would not survive a fork."""
        capacity = CAPACITY_PAGES * PAGE_BYTES
        engine = open_storage(f"file:{root}?io=threads&capacity={capacity}&chunk={4 * PAGE_BYTES}")
        await engine.register(
            self._memory,
            lambda page: memoryview(self.array[page]),
            namespace=b"n" * 32,
            poller=None,  # type: ignore[arg-type]  # io=threads polls nothing.
        )
        return engine

    async def put(self, engine: Storage, numbers: list[int]) -> int:
        """Store pages; returns the number of stored ones."""
        for page, number in enumerate(numbers):
            self.array[page] = content_of(number)
        keys = [key_of(number) for number in numbers]
        return sum(await engine.put_from(keys, page_ids(range(len(numbers))), timeout_s=TIMEOUT_S))

    async def get(self, engine: Storage, numbers: list[int]) -> tuple[int, int]:
        """Read pages; returns how many were found, and how many of those differ from what was put."""
        keys = [key_of(number) for number in numbers]
        found = await engine.get_into(keys, page_ids(range(len(numbers))), timeout_s=TIMEOUT_S)
        wrong = sum(
            there and not np.array_equal(self.array[page], content_of(number))
            for page, (number, there) in enumerate(zip(numbers, found, strict=True))
        )
        return sum(found), wrong


async def live(root: Path, seed: int) -> int:
    """Run a child: write or read until it is killed."""
    chooser = random.Random(seed)
    pages = Pages()
    writes = chooser.random() < 0.7
    while True:
        engine = await pages.open(root)
        for _ in range(chooser.randrange(1, 12)):
            numbers = chooser.sample(range(KEYS), POOL_PAGES)
            if writes:
                await pages.put(engine, numbers)
            elif (await pages.get(engine, numbers))[1]:
                return READER_WRONG
        await engine.close()


def fork_and_kill(root: Path, kills: int, seed: int) -> int:
    """Run a forker: kill children one after the other. Returns how many saw a wrong byte."""
    chooser = random.Random(seed)
    wrong = 0
    for child in range(kills):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = asyncio.run(live(root, seed * 100_003 + child))
            finally:
                os._exit(code)
        time.sleep(chooser.uniform(0.0, LIFE_MAX_S))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            wrong += 1
        os.write(1, b"k")
    return wrong


def used_bytes(root: Path) -> int:
    """Return the size of all files of pages."""
    return sum(file.stat().st_size for file in root.glob("*/*.seg"))


async def watch(root: Path, kills: int, seed: int) -> Counter[str]:
    """Start the forkers, read and write beside them until they end, and count the results."""
    counts: Counter[str] = Counter()
    shares = [kills // FORKERS + (number < kills % FORKERS) for number in range(FORKERS)]
    forkers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.storage_kills", "--forker", str(root), str(share), str(seed * 31 +
            number), stdout=asyncio.subprocess.PIPE,
        )
        for number, share in enumerate(shares)
    ]  # fmt: skip
    pages, chooser = Pages(), random.Random(seed)
    engine = await pages.open(root)

    async def count_kills(forker: asyncio.subprocess.Process) -> None:
        assert forker.stdout is not None
        while await forker.stdout.read(1):
            counts["killed"] += 1
        counts["children that ended by themselves, or saw a wrong byte"] += await forker.wait()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(count_kills(forker)) for forker in forkers]
        while not all(task.done() for task in tasks):
            found, wrong = await pages.get(engine, chooser.sample(range(KEYS), POOL_PAGES))
            counts["pages read here meanwhile"] += found
            counts["wrong pages"] += wrong
            counts["pages put here meanwhile"] += await pages.put(engine, chooser.sample(range(KEYS), 4))
            used = used_bytes(root)
            counts["largest size of all files"] = max(counts["largest size of all files"], used)
    await engine.close()
    return counts


async def examine(root: Path, counts: Counter[str]) -> None:
    """Open the remaining directory, and count violations."""
    started_s = time.perf_counter()
    pages = Pages()
    engine = await pages.open(root)
    counts["ms to open again"] = round((time.perf_counter() - started_s) * 1e3)
    with sqlite3.connect(root / "index.sqlite") as db:
        counts["slots reserved for the dead"] = db.execute("SELECT COUNT(*) FROM slots WHERE state=1").fetchone()[0]
        counts["index not sound"] = db.execute("PRAGMA integrity_check").fetchone()[0] != "ok"
    db.close()
    async for verdict in engine.verify():
        counts["pages found again"] += 1
        counts["pages found damaged"] += not verdict.ok
    for first in range(0, KEYS, POOL_PAGES):
        counts["wrong pages"] += (await pages.get(engine, list(range(first, first + POOL_PAGES))))[1]
    await engine.clear()
    for first in range(0, CAPACITY_PAGES // 2, POOL_PAGES):
        numbers = list(range(first, first + POOL_PAGES))
        counts["pages that could not be put"] += POOL_PAGES - await pages.put(engine, numbers)
        counts["pages that could not be put"] += POOL_PAGES - (await pages.get(engine, numbers))[0]
    await engine.close()
    counts["locks of the dead"] = len(list((root / "writers").iterdir()))


MUST_BE_ZERO = (
    "children that ended by themselves, or saw a wrong byte",
    "wrong pages",
    "pages found damaged",
    "slots reserved for the dead",
    "index not sound",
    "pages that could not be put",
    "locks of the dead",
)


async def main(kills: int, seed: int) -> bool:
    """Run, print the numbers, and return whether no violation was found."""
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "pages"
        counts = await watch(root, kills, seed)
        await examine(root, counts)
    table = Table("what", "count", title=f"kill -9 at {kills} moments, seed {seed}, {FORKERS} at once")
    for name, count in counts.items():
        table.add_row(name, str(int(count)))
    table.add_row("capacity", str(CAPACITY_PAGES * PAGE_BYTES))
    table.add_row("seconds", f"{time.perf_counter() - started_s:.1f}")
    Console().print(table)
    is_bounded = counts["largest size of all files"] <= CAPACITY_PAGES * PAGE_BYTES
    return is_bounded and counts["killed"] == kills and not any(counts[name] for name in MUST_BE_ZERO)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--forker"]:
        sys.exit(fork_and_kill(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    sys.exit(0 if asyncio.run(main(count, int(sys.argv[2]) if len(sys.argv) > 2 else 1)) else 1)
