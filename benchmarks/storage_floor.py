"""What bounds an engine that checks its pages, and whether a measurement was disturbed; for the benchmark of storage.

Checked    copies and checksums and nothing else: two threads, a file and a processor each, no index, no event loop
Others     how much of the processors other programs take meanwhile
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash
from storage_baselines import Pages

from tidekv.backends.storage.file import worker_threads

# What fits in a processor's cache, so that summing it does not read memory again.
PIECE_BYTES: Final = 512 << 10
SHARE_MAX: Final = 0.1
PAUSE_S: Final = 0.1
WAIT_S_MAX: Final = 3.0


class Checked:
    """Moves the pages of one pool, each thread its half, and takes the checksum of each page beside it."""

    started_at_s = 0.0

    def __init__(self, path: Path, pages: Pages, *, threads: int = 2) -> None:
        self.name = f"copy and xxh3, {threads} threads"
        self.page_bytes = pages.shape[1]
        self.paths = [path.with_name(f"{path.name}-{number}") for number in range(threads)]
        self.descriptors = [os.open(file, os.O_RDWR | os.O_CREAT, 0o600) for file in self.paths]
        self.parts = [[memoryview(page) for page in pages[number::threads]] for number in range(threads)]
        self.threads = worker_threads(threads, "checked")

    async def put(self, keys: Sequence[bytes]) -> None:
        """Sum and write each page."""
        self._run("write")

    async def get(self, keys: Sequence[bytes]) -> None:
        """Read and sum each page."""
        self._run("read")

    def files(self) -> list[Path]:
        """Return the files that hold the pages."""
        return self.paths

    async def close(self) -> None:
        """Close the files."""
        self.threads.shutdown()
        for file in self.descriptors:
            os.close(file)

    def _run(self, operation: str) -> None:
        self.started_at_s = time.perf_counter()
        # Nothing else runs meanwhile: this is a benchmark's own loop.
        list(self.threads.map(lambda number: self._move(operation, number), range(len(self.parts))))

    def _move(self, operation: str, number: int) -> None:
        file = self.descriptors[number]
        for offset, buffers in self._pieces(self.parts[number]):
            if operation == "read":
                os.preadv(file, buffers, offset)
            for buffer in buffers:
                xxhash.xxh3_128_digest(buffer)
            if operation == "write":
                os.pwritev(file, buffers, offset)

    def _pieces(self, pages: Sequence[memoryview]) -> Iterator[tuple[int, Sequence[memoryview]]]:
        """Return what is moved at once: where it begins in the file, and its memory."""
        at_once = PIECE_BYTES // self.page_bytes
        for at in range(0, len(pages), max(at_once, 1)):
            if at_once:
                yield at * self.page_bytes, pages[at : at + at_once]
                continue
            for first in range(0, self.page_bytes, PIECE_BYTES):
                yield at * self.page_bytes + first, [pages[at][first : first + PIECE_BYTES]]


class Others:
    """Watches what other programs use. Kernel threads are left out: they write the pages of this one to disk."""

    def __init__(self) -> None:
        self._used_s, self._at_s = _others_s(), time.perf_counter()

    def begin(self) -> None:
        """Wait a while for the others to pause, and measure from here."""
        until_s = time.perf_counter() + WAIT_S_MAX
        while True:
            self._used_s, self._at_s = _others_s(), time.perf_counter()
            time.sleep(PAUSE_S)
            if not self.disturb() or time.perf_counter() > until_s:
                break
        self._used_s, self._at_s = _others_s(), time.perf_counter()

    def disturb(self) -> bool:
        """True if they took more than SHARE_MAX of one processor since the beginning."""
        return _others_s() - self._used_s > SHARE_MAX * (time.perf_counter() - self._at_s)


def _others_s() -> float:
    """Return the seconds of processors that all programs but this process used so far."""
    with Path("/proc/stat").open() as file:
        # User, nice, system, then idle and waiting for disks, then interrupts and what the hypervisor took.
        ticks = [int(word) for word in file.readline().split()[1:9]]
    kernel = sum(_kernel_ticks(path) for path in Path("/proc").iterdir() if path.name.isdigit())
    own = os.times()
    return (sum(ticks) - ticks[3] - ticks[4] - kernel) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def _kernel_ticks(process: Path) -> int:
    """Return what a kernel thread used; 0 for any other process, and for one that has just ended."""
    try:
        words = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12]) if "2" in (words[1], process.name) else 0
