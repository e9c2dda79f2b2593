"""Designs of an embedded store, compared: `python -m benchmarks.storage_candidates [--help]`.

    a file a page            open, one read or write, close; the directory is the index
    segments, plain preadv   fixed slots in large files, one call per run of neighbors, shared by two threads
    segments, NIXL           the same slots moved by NIXL's POSIX plugin, by aio and by io_uring
    index in SQLite          a row per slot, in write-ahead mode: a run of slots published, then loaded from scratch
    index in LMDB            the same in LMDB (pip install lmdb; reported as not measured without it)

First pages, without checksums, so that only the way they move differs; then the index by itself, for as many pages as
there are; then the time to open an engine with 100,000 pages. Figures compare only on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.storage_baselines import Candidate, baselines, forget_cached, pool_pages
from tidekv.backends.storage import open_storage
from tidekv.engine.poller import PollerThread
from tidekv.states.types import PoolMemory, Segment, page_ids

BATCH_BYTES = 64 << 20
OPENED_PAGES = 100_000
OPENED_PAGE_BYTES = 4096
KINDS = ("write", "read", "cold read")


class SqliteIndex:
    """A table of slots, as in the engine."""

    name = "SQLite, write-ahead"

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path / "index.sqlite", isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=NORMAL")
        self.db.execute("CREATE TABLE slots(slot INTEGER PRIMARY KEY, state INTEGER, seq INTEGER, key BLOB)")
        self.db.execute("CREATE INDEX by_change ON slots(seq)")

    def publish(self, first: int, keys: Sequence[bytes]) -> None:
        """Put the keys into slots from `first` on, in one transaction and one statement."""
        self.db.execute("BEGIN IMMEDIATE")
        self.db.execute(
            "WITH RECURSIVE run(slot) AS (SELECT ?1 UNION ALL SELECT slot + 1 FROM run WHERE slot < ?2) INSERT INTO "
            "slots SELECT slot, 2, ?1, substr(?3, (slot - ?1) * 32 + 1, 32) FROM run",
            (first, first + len(keys) - 1, b"".join(keys)),
        )
        self.db.execute("COMMIT")

    def load(self) -> int:
        """Read everything, as a starting process does."""
        return len({key: slot for slot, key in self.db.execute("SELECT slot, key FROM slots")})

    def close(self) -> None:
        """Close the file."""
        self.db.close()


class LmdbIndex:
    """Key to slot in LMDB. Look-ups by change, by owner and by age would each need another database."""

    name = "LMDB"

    def __init__(self, path: Path) -> None:
        import lmdb  # type: ignore[import-not-found]  # For this benchmark only.

        self.env: Any = lmdb.open(str(path), map_size=1 << 30, sync=False)  # It has no types.

    def publish(self, first: int, keys: Sequence[bytes]) -> None:
        """Put the keys and their slots, in one transaction."""
        with self.env.begin(write=True) as change, change.cursor() as cursor:
            cursor.putmulti([(key, (first + at).to_bytes(8, "little")) for at, key in enumerate(keys)])

    def load(self) -> int:
        """Read everything, as a starting process does."""
        with self.env.begin() as view:
            return len({bytes(key): int.from_bytes(slot, "little") for key, slot in view.cursor()})

    def close(self) -> None:
        """Close the files."""
        self.env.close()


def key_of(number: int) -> bytes:
    """Return a page key."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


async def move(candidates: Sequence[Candidate], page_bytes: int, rounds: int) -> Table:
    """Measure the throughput of pages, in MB/s."""
    speeds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        keys = [key_of(turn << 32 | at) for at in range(BATCH_BYTES // page_bytes)]
        for kind in KINDS:
            for candidate in candidates:
                if kind == "cold read":
                    forget_cached(candidate)
                await (candidate.put if kind == "write" else candidate.get)(keys)
                speed = BATCH_BYTES / (time.perf_counter() - candidate.started_at_s) / 1e6
                if turn:  # The first round creates files.
                    speeds.setdefault((candidate.name, kind), []).append(speed)
    table = Table("", *KINDS, title=f"pages of {page_bytes >> 10} KiB, MB/s, medians of {rounds}")
    for candidate in candidates:
        table.add_row(candidate.name, *(f"{statistics.median(speeds[candidate.name, kind]):.0f}" for kind in KINDS))
    return table


def compare_indices(root: Path, count: int, batch: int) -> Table:
    """Measure the cost of an index per page: published in batches, and loaded at once."""
    table = Table("", "publish, µs a page", f"load {count} pages, ms", title=f"index, {batch} pages a transaction")
    makers: list[Callable[[Path], SqliteIndex | LmdbIndex]] = [SqliteIndex, LmdbIndex]
    for make in makers:
        path = root / make.__name__
        path.mkdir()
        try:
            index = make(path)
        except ImportError:
            table.add_row("LMDB", "not measured: pip install lmdb", "")
            continue
        keys = [key_of(number) for number in range(count)]
        started_at_s = time.perf_counter()
        for first in range(0, count, batch):
            index.publish(first, keys[first : first + batch])
        published_s = time.perf_counter() - started_at_s
        started_at_s = time.perf_counter()
        assert index.load() == count
        loaded_s = time.perf_counter() - started_at_s
        index.close()
        table.add_row(index.name, f"{published_s / count * 1e6:.2f}", f"{loaded_s * 1e3:.0f}")
    return table


async def time_opening(root: Path, count: int) -> tuple[float, float]:
    """Return the seconds to open a directory of this many pages with the engine, and to open it without its index."""
    pages = np.random.default_rng(1).integers(0, 256, (4096, OPENED_PAGE_BYTES), np.uint8)
    segment = Segment(
        address=pages.ctypes.data,
        piece_bytes=OPENED_PAGE_BYTES,
        stride_bytes=OPENED_PAGE_BYTES,
        page_count=len(pages),
    )
    poller = PollerThread()
    poller.start()

    async def opened() -> tuple[Any, float]:  # The engine, and seconds to open it.
        storage = open_storage(f"file:{root}", {"capacity": 4 * count * OPENED_PAGE_BYTES})
        started_at_s = time.perf_counter()
        await storage.register(
            PoolMemory(segments=(segment,), page_count=len(pages)),
            lambda page: memoryview(pages[page]),
            namespace=b"b" * 32,
            poller=poller,
        )
        return storage, time.perf_counter() - started_at_s

    storage, _ = await opened()
    for first in range(0, count, len(pages)):
        keys = [key_of(number) for number in range(first, min(first + len(pages), count))]
        assert all(await storage.put_from(keys, page_ids(range(len(keys))), timeout_s=60))
    await storage.close()
    times = []
    for lose in (False, True):
        if lose:
            (root / "index.sqlite").unlink()
        storage, took_s = await opened()
        assert storage.statistics().pages == count
        assert all(await storage.get_into([key_of(count - 1)], page_ids([0]), timeout_s=60))
        await storage.close()
        times.append(took_s)
    await poller.close()
    return times[0], times[1]


async def measure(root: Path, page_kib: Sequence[int], rounds: int, console: Console) -> None:
    """Measure everything and print it."""
    for kib in page_kib:
        candidates = baselines(root, pool_pages(kib << 10, BATCH_BYTES))
        console.print(await move(candidates, kib << 10, rounds))
        for candidate in candidates:
            await candidate.close()
            for path in candidate.files():
                path.unlink()
        (root / "pages").rmdir()
    console.print(compare_indices(root, OPENED_PAGES, batch=512))
    opened_s, rebuilt_s = await time_opening(root / "opened", OPENED_PAGES)
    verdict = "pass" if opened_s < 2 else "short"
    console.print(f"{verdict}: {OPENED_PAGES:,} pages opened in {opened_s:.2f} s (less than 2 s wanted)")
    console.print(f"the same without its index, which is rebuilt from the segments: {rebuilt_s:.2f} s")


def main() -> None:
    """Run on a directory given, or a temporary one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", help="directory for the files; a temporary one by default")
    parser.add_argument("--page-kib", type=int, nargs="*", default=[64, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tidekv-bench-", dir=given.directory))
    try:
        asyncio.run(measure(root, given.page_kib, given.rounds, Console(width=110)))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
