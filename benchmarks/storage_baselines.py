"""Hand-written alternatives to a storage engine, for the benchmarks of storage: no checks of pages, no crash safety, no
limit of size.

    FilePerPage    a synchronous store: open, one read or write, close
    Raw            one file, one preadv or pwrite per page, in one thread or shared by several
    RawNixl        one file, one transfer of NIXL's POSIX plugin for all pages, polled without a pause
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.uint8]


class Candidate(Protocol):
    """A store for the pages of one pool. `started_at_s` is when the work of the last call began, after its cleanup."""

    name: str
    started_at_s: float

    async def put(self, keys: Sequence[bytes]) -> None:
        """Store every page of the pool under the key beside it."""

    async def get(self, keys: Sequence[bytes]) -> None:
        """Read every page of the pool back."""

    def files(self) -> list[Path]:
        """Return the files that hold the pages."""

    async def close(self) -> None:
        """Close everything."""


class FilePerPage:
    """The simplest store that works."""

    started_at_s = 0.0

    def __init__(self, directory: Path, pages: Pages) -> None:
        self.name = "a file a page"
        self.directory, self.pages = directory, pages
        directory.mkdir()

    async def put(self, keys: Sequence[bytes]) -> None:
        """Write each page to a new file."""
        for old in self.directory.iterdir():
            old.unlink()
        self.started_at_s = time.perf_counter()
        for page, key in zip(self.pages, keys, strict=True):
            file = os.open(self.directory / key.hex(), os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(file, page)
            os.close(file)

    async def get(self, keys: Sequence[bytes]) -> None:
        """Read each page from its file."""
        self.started_at_s = time.perf_counter()
        for page, key in zip(self.pages, keys, strict=True):
            file = os.open(self.directory / key.hex(), os.O_RDONLY)
            os.readv(file, [page])
            os.close(file)

    def files(self) -> list[Path]:
        """Return the files that hold the pages."""
        return list(self.directory.iterdir())

    async def close(self) -> None:
        """Do nothing: no file is open."""


class Raw:
    """Pages at fixed places of one file, without keys."""

    started_at_s = 0.0

    def __init__(self, path: Path, pages: Pages, *, threads: int) -> None:
        self.name = f"raw preadv, {threads} thread{'s' * (threads > 1)}"
        self.path, self.pages = path, pages
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        cuts = np.linspace(0, len(pages), threads + 1).astype(int)
        self.parts = [range(first, last) for first, last in itertools.pairwise(cuts)]
        self.threads = ThreadPoolExecutor(threads)

    async def put(self, keys: Sequence[bytes]) -> None:
        """Write each page to its place."""
        self._run(lambda at: os.pwrite(self.file, self.pages[at], at * self.pages.shape[1]))

    async def get(self, keys: Sequence[bytes]) -> None:
        """Read each page from its place."""
        self._run(lambda at: os.preadv(self.file, [self.pages[at]], at * self.pages.shape[1]))

    def files(self) -> list[Path]:
        """Return the file that holds the pages."""
        return [self.path]

    async def close(self) -> None:
        """Close the file."""
        self.threads.shutdown()
        os.close(self.file)

    def _run(self, move: Callable[[int], int]) -> None:
        def part(pages: range) -> None:
            for at in pages:
                move(at)

        self.started_at_s = time.perf_counter()
        if len(self.parts) == 1:
            part(self.parts[0])
        else:
            # Blocking is harmless, since nothing else runs on this benchmark's loop.
            list(self.threads.map(part, self.parts))


class RawNixl:
    """Pages at fixed places of one file, moved by NIXL's POSIX plugin only."""

    started_at_s = 0.0

    def __init__(self, path: Path, pages: Pages, *, queue: str) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        from nixl import _api as nixl

        self.name = f"raw NIXL, {queue}"
        self.path = path
        count, page_bytes = pages.shape
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.file, pages.nbytes)
        self.agent: Any = nixl.nixl_agent(  # NIXL has no types.
            f"bench-{uuid.uuid4()}", nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        )
        self.agent.create_backend("POSIX", {f"use_{queue}": "true"})
        memory = [(pages.ctypes.data, pages.nbytes, 0, "")]
        self.registered = [
            self.agent.register_memory(memory, "DRAM"),
            self.agent.register_memory([(0, pages.nbytes, self.file, "")], "FILE"),
        ]
        self.lists = [
            self.agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", np.array([[pages.ctypes.data, page_bytes, 0, page_bytes, count]], np.uint64), "DRAM"
            ),
            self.agent.prep_xfer_dlist(
                self.agent.name, np.array([[0, page_bytes, self.file, page_bytes, count]], np.uint64), "FILE"
            ),
        ]
        # Every second page first: otherwise NIXL would merge all of them into one descriptor, which is not faster.
        self.order = np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)]).astype(np.int32)

    async def put(self, keys: Sequence[bytes]) -> None:
        """Write each page to its place."""
        self._run("WRITE")

    async def get(self, keys: Sequence[bytes]) -> None:
        """Read each page from its place."""
        self._run("READ")

    def files(self) -> list[Path]:
        """Return the file that holds the pages."""
        return [self.path]

    async def close(self) -> None:
        """Release the agent and close the file."""
        for prepared in self.lists:
            self.agent.release_dlist_handle(prepared)
        for registered in self.registered:
            self.agent.deregister_memory(registered)
        self.agent = self.lists = self.registered = None  # type: ignore[assignment]  # Releases the agent at once.
        os.close(self.file)

    def _run(self, operation: str) -> None:
        self.started_at_s = time.perf_counter()
        handle = self.agent.make_prepped_xfer(operation, self.lists[0], self.order, self.lists[1], self.order)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", state
        self.agent.release_xfer_handle(handle)


def baselines(root: Path, pages: Pages) -> list[Candidate]:
    """Return every baseline, each with files of its own below `root`."""
    return [
        FilePerPage(root / "pages", pages),
        Raw(root / "raw-1", pages, threads=1),
        Raw(root / "raw-2", pages, threads=2),
        RawNixl(root / "nixl-aio", pages, queue="aio"),
        RawNixl(root / "nixl-uring", pages, queue="uring"),
    ]


def pool_pages(page_bytes: int, batch_bytes: int) -> Pages:
    """Return a pool of random pages that starts at a multiple of 4096, as a host pool does."""
    raw = np.zeros(batch_bytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    pages = raw[start : start + batch_bytes].reshape(batch_bytes // page_bytes, page_bytes)
    pages[:] = np.random.default_rng(page_bytes).integers(0, 256, pages.shape, np.uint8)
    return pages


def forget_cached(candidate: Candidate) -> None:
    """Write the candidate's files to disk and drop them from the page cache."""
    for path in candidate.files():
        with opened(path) as file:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for reading for the duration of the block."""
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)
