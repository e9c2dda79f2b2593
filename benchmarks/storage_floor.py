"""Upper bound for an engine that checks its pages, and detection of disturbances, for the benchmark of storage.

Checked    copies and checksums and nothing else: two threads with a file and a processor each, no index, no event loop
Others     processor time that other programs use meanwhile
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash

from benchmarks.storage_baselines import Pages
from tidekv.backends.storage.file.engine import worker_threads

# Fits in a processor's cache, so that the checksum does not read memory again.
PIECE_BYTES: Final = 512 << 10
SHARE_MAX: Final = 0.1
PAUSE_S: Final = 0.1
WAIT_S_MAX: Final = 3.0


class Checked:
    """Moves the pages of one pool, half by each thread, with a checksum of each page."""

    started_at_s = 0.0

    def __init__(self, path: Path, pages: Pages, *, threads: int = 2) -> None:
        self.name = f"copy and xxh3, {threads} threads"
        self.page_bytes = pages.shape[1]
        self.paths = [path.with_name(f"{path.name}-{number}") for number in range(threads)]
        self.descriptors = [os.open(file, os.O_RDWR | os.O_CREAT, 0o600) for file in self.paths]
        self.parts = [[memoryview(page) for page in pages[number::threads]] for number in range(threads)]
        self.threads = worker_threads(threads, "checked")

    async def put(self, keys: Sequence[bytes]) -> None:
        """Compute the checksum of each page and write it."""
        self._run("write")

    async def get(self, keys: Sequence[bytes]) -> None:
        """Read each page and compute its checksum."""
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
        # Blocking is harmless, since nothing else runs on this benchmark's loop.
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
        """Yield the units that are moved at once: offset in the file, and memory."""
        at_once = PIECE_BYTES // self.page_bytes
        for at in range(0, len(pages), max(at_once, 1)):
            if at_once:
                yield at * self.page_bytes, pages[at : at + at_once]
                continue
            for first in range(0, self.page_bytes, PIECE_BYTES):
                yield at * self.page_bytes + first, [pages[at][first : first + PIECE_BYTES]]


class Others:
    """Measures the use by other programs.

    Kernel threads are excluded, since they write this process's pages to disk.
    """

    def __init__(self) -> None:
        self._used_s, self._at_s = _others_s(), time.perf_counter()

    def begin(self) -> None:
        """Wait a while for the others to pause, and start measuring."""
        until_s = time.perf_counter() + WAIT_S_MAX
        while True:
            self._used_s, self._at_s = _others_s(), time.perf_counter()
            time.sleep(PAUSE_S)
            if not self.disturb() or time.perf_counter() > until_s:
                break
        self._used_s, self._at_s = _others_s(), time.perf_counter()

    def disturb(self) -> bool:
        """Whether they used more than SHARE_MAX of one processor since `begin`."""
        return _others_s() - self._used_s > SHARE_MAX * (time.perf_counter() - self._at_s)


def _others_s() -> float:
    """Return the processor seconds that all programs except this process have used so far."""
    with Path("/proc/stat").open() as file:
        # User, nice, system, idle, iowait, irq, softirq, steal.
        ticks = [int(word) for word in file.readline().split()[1:9]]
    kernel = sum(_kernel_ticks(path) for path in Path("/proc").iterdir() if path.name.isdigit())
    own = os.times()
    return (sum(ticks) - ticks[3] - ticks[4] - kernel) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def _kernel_ticks(process: Path) -> int:
    """Return the ticks that a kernel thread has used; 0 for any other process, and for one that has just ended."""
    try:
        words = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12]) if "2" in (words[1], process.name) else 0
