"""How fast the `file:` engine is, beside what one would write by hand: `python benchmarks/storage.py [DIRECTORY]`.

In each round every candidate does the same work right after the other, since the speed of a machine drifts; ratios are
medians over rounds. Work is one batch of pages: put under new keys, then got back from the page cache, then got again
after the kernel was told to forget the files. The others neither check a page nor survive a crash:

    file a page     a synchronous store: open, one read or write, close
    raw             one file, one preadv or pwrite a page, in one thread
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from tidekv.backends.storage import Storage, open_storage
from tidekv.engine.poller import PollerThread
from tidekv.states.shapes import PageIds, PoolMemory, Segment, page_ids

ROUNDS = 9
BATCH_BYTES = 64 << 20
PAGE_BYTES = (64 << 10, 1 << 20)
LAG_PAUSE_S = 0.001
TIMEOUT_S = 300.0

Pages = npt.NDArray[np.uint8]


class Candidate(Protocol):
    """Something that stores the pages of one pool under keys."""

    name: str

    async def put(self, keys: list[bytes]) -> None: ...

    async def get(self, keys: list[bytes]) -> None: ...

    def files(self) -> list[Path]: ...


class FilePerPage:
    """The simplest store that works."""

    name = "file a page"

    def __init__(self, directory: Path, pages: Pages) -> None:
        self.directory, self.pages = directory, pages
        directory.mkdir()

    async def put(self, keys: list[bytes]) -> None:
        for old in self.directory.iterdir():
            old.unlink()
        self.started_at_s = time.perf_counter()
        for page, key in zip(self.pages, keys, strict=True):
            file = os.open(self.directory / key.hex(), os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(file, page)
            os.close(file)

    async def get(self, keys: list[bytes]) -> None:
        self.started_at_s = time.perf_counter()
        for page, key in zip(self.pages, keys, strict=True):
            file = os.open(self.directory / key.hex(), os.O_RDONLY)
            os.readv(file, [page])
            os.close(file)

    def files(self) -> list[Path]:
        return list(self.directory.iterdir())


class Raw:
    """One file, pages at fixed places, no keys."""

    name = "raw"

    def __init__(self, path: Path, pages: Pages) -> None:
        self.path, self.pages = path, pages
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    async def put(self, keys: list[bytes]) -> None:
        self.started_at_s = time.perf_counter()
        for at, page in enumerate(self.pages):
            os.pwrite(self.file, page, at * len(page))

    async def get(self, keys: list[bytes]) -> None:
        self.started_at_s = time.perf_counter()
        for at, page in enumerate(self.pages):
            os.preadv(self.file, [page], at * len(page))

    def files(self) -> list[Path]:
        return [self.path]


class Engine:
    """The engine under test; its store holds three batches, so that puts make room as they do in service."""

    def __init__(self, name: str, storage: Storage, directory: Path, count: int) -> None:
        self.name, self.storage, self.directory = name, storage, directory
        self.ids: PageIds = page_ids(range(count))

    async def put(self, keys: list[bytes]) -> None:
        self.started_at_s = time.perf_counter()
        assert all(await self.storage.put_from(keys, self.ids, timeout_s=TIMEOUT_S))

    async def get(self, keys: list[bytes]) -> None:
        self.started_at_s = time.perf_counter()
        assert all(await self.storage.get_into(keys, self.ids, timeout_s=TIMEOUT_S))

    def files(self) -> list[Path]:
        return list(self.directory.glob("*/*.seg"))


async def timed(candidate: Candidate, work: Callable[[list[bytes]], Awaitable[None]], keys: list[bytes]) -> float:
    """Return MB/s of one batch. The candidate says when its work began: what it tidies up before does not count."""
    await work(keys)
    started_at_s: float = candidate.started_at_s  # type: ignore[attr-defined]  # Set by every put and get above.
    return BATCH_BYTES / (time.perf_counter() - started_at_s) / 1e6


def forget_cached(candidate: Candidate) -> None:
    """Write the candidate's files to disk and tell the kernel to drop them from its cache."""
    for path in candidate.files():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


async def lag_ms_p99(work: Callable[[], Awaitable[None]]) -> float:
    """Return by how much the loop was late while something ran, at the 99th percentile."""
    late_ms: list[float] = []
    running = asyncio.ensure_future(work())
    while not running.done():
        asked_at_s = time.perf_counter()
        await asyncio.sleep(LAG_PAUSE_S)
        late_ms.append((time.perf_counter() - asked_at_s - LAG_PAUSE_S) * 1e3)
    await running
    return float(np.percentile(late_ms, 99))


async def bench(page_bytes: int, root: Path, console: Console) -> None:
    """Compare the candidates at one page size and print the table."""
    count = BATCH_BYTES // page_bytes
    raw = np.zeros(BATCH_BYTES + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    pages = raw[start : start + BATCH_BYTES].reshape(count, page_bytes)
    pages[:] = np.random.default_rng(page_bytes).integers(0, 256, pages.shape, np.uint8)
    segment = Segment(address=pages.ctypes.data, piece_bytes=page_bytes, stride_bytes=page_bytes, page_count=count)
    poller = PollerThread()
    poller.start()
    engines = []
    for name, options in (
        ("file: nixl", "io=nixl&queue=aio"),
        ("file: nixl uring", "io=nixl&queue=uring"),
        ("file: threads", "io=threads"),
    ):
        directory = root / f"{page_bytes}-{name.replace(' ', '-')}"
        storage = open_storage(f"file:{directory}?{options}", {"capacity": 3 * BATCH_BYTES + (16 << 20)})
        await storage.register(
            PoolMemory(segments=(segment,), page_count=count),
            lambda page: memoryview(pages[page]),
            namespace=b"b" * 32,
            poller=poller,
        )
        engines.append(Engine(name, storage, directory, count))
    candidates: list[Candidate] = [
        FilePerPage(root / f"{page_bytes}-pages", pages),
        Raw(root / f"{page_bytes}-raw", pages),
        *engines,
    ]
    results: dict[tuple[str, str], list[float]] = {}
    for turn in range(ROUNDS + 1):
        keys = [hashlib.sha256(f"{page_bytes}-{turn}-{at}".encode()).digest() for at in range(count)]
        for kind in ("write", "read", "cold read"):
            for candidate in candidates:
                if kind == "cold read":
                    forget_cached(candidate)
                speed = await timed(candidate, candidate.put if kind == "write" else candidate.get, keys)
                if turn:  # The first round makes files.
                    results.setdefault((candidate.name, kind), []).append(speed)
    engine = engines[0]
    started_at_s = time.perf_counter()
    for _ in range(10):
        await engine.storage.exists(keys[:1000], timeout_s=1)
    exists_us = (time.perf_counter() - started_at_s) / 10 / min(1000, count) * 1e6
    idle = await lag_ms_p99(lambda: asyncio.sleep(0.5))
    busy = await lag_ms_p99(lambda: put_and_get(engine, keys))
    table = Table(title=f"{count} pages of {page_bytes >> 10} KiB, MB/s (and how many times a file a page, raw)")
    for column in ("", "write", "read", "cold read"):
        table.add_column(column, justify="right")
    for candidate in candidates:
        table.add_row(candidate.name, *(cell(results, candidate.name, kind) for kind in ("write", "read", "cold read")))
    console.print(table)
    console.print(
        f"exists: {exists_us:.2f} µs a key; loop late p99: idle {idle:.2f} ms, reading and writing {busy:.2f} ms\n"
    )
    for engine in engines:
        await engine.storage.close()
    await poller.close()


async def put_and_get(engine: Engine, keys: list[bytes]) -> None:
    """Keep an engine busy for a while."""
    for _ in range(5):
        await engine.put(keys)
        await engine.get(keys)


def cell(results: dict[tuple[str, str], list[float]], name: str, kind: str) -> str:
    """Say a candidate's median speed and its median ratio to each baseline."""
    speeds = results[name, kind]
    ratios = [
        statistics.median(ours / theirs for ours, theirs in zip(speeds, results[other, kind], strict=True))
        for other in (FilePerPage.name, Raw.name)
    ]
    return f"{statistics.median(speeds):.0f} ({ratios[0]:.2f}x, {ratios[1]:.2f}x)"


def main() -> None:
    """Run on a directory given, or a temporary one."""
    root = Path(tempfile.mkdtemp(prefix="tidekv-bench-", dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        for page_bytes in PAGE_BYTES:
            asyncio.run(bench(page_bytes, root, Console(width=120)))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
