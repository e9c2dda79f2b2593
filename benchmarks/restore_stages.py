"""The stages of a restore by themselves: storage to host, host to device, the disk only, and both stages at once.

They have their own pools and directory, and as many threads as an engine has, so that they can be measured in turns
with one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.page_cache import Cached
from tidekv import DevicePool, HostPool, KVLayout, open_storage
from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.storage.base import Storage
from tidekv.engine.poller import PollerThread
from tidekv.states.types import page_ids

PLAIN_THREADS, PLAIN_BYTES = 2, 1 << 20


class Stages:
    """Pages in storage, and as many others in host memory."""

    def __init__(self, storage: Storage, copier: PageCopier, host: HostPool, folder: Path, pages: int) -> None:
        self._storage = storage
        self._copier = copier
        self._keys = [hashlib.sha256(str(page).encode()).digest() for page in range(pages)]
        self._read_pages, self._copy_pages = page_ids(range(pages)), page_ids(range(pages, 2 * pages))
        self._device_pages = page_ids(range(pages))
        self._memory = host.array[:pages].reshape(-1)
        self._folder = folder
        self._plain_file = folder / "plain.seg"
        self._threads = ThreadPoolExecutor(PLAIN_THREADS)
        self.files: Cached

    async def put(self) -> None:
        """Store the pages that are read later."""
        assert all(await self._storage.put_from(self._keys, self._read_pages, timeout_s=60.0))
        self._plain_file.write_bytes(self._memory)
        self.files = Cached(self._folder, "*.seg")

    async def read(self, pages: int) -> None:
        """Read the first `pages` pages from storage to host memory, verified, in one call."""
        got = self._storage.get_into(self._keys[:pages], self._read_pages[:pages], timeout_s=60.0)
        assert all(await got)

    async def copy(self, pages: int) -> None:
        """Copy from host memory to device memory, in one call."""
        await self._copier.to_device(self._copy_pages[:pages], self._device_pages[:pages])

    async def both(self, pages: int) -> None:
        """Run both at once with different pages, so that no stage waits for the other."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.read(pages))
            group.create_task(self.copy(pages))

    async def plain(self) -> None:
        """Read as many bytes of a file by preadv, and do nothing else."""
        file = os.open(self._plain_file, os.O_RDONLY)
        try:
            firsts = range(0, len(self._memory), PLAIN_BYTES)
            loop = asyncio.get_running_loop()
            reads = [loop.run_in_executor(self._threads, self._plain_part, file, first) for first in firsts]
            await asyncio.wait(reads)
            assert all(read.result() for read in reads)
        finally:
            os.close(file)

    def _plain_part(self, file: int, first: int) -> bool:
        part = self._memory[first : first + PLAIN_BYTES]
        done = 0
        while done < len(part) and (count := os.preadv(file, [part[done:]], first + done)):
            done += count
        return done == len(part)


@asynccontextmanager
async def open_stages(folder: Path, layout: KVLayout, pages: int) -> AsyncIterator[Stages]:
    """Open the stages on an empty directory."""
    host, device = HostPool.allocate(layout, 2 * pages), DevicePool.allocate(layout, pages)
    content = np.random.default_rng(0).integers(0, 256, (2 * pages, layout.page_bytes), dtype=np.uint8)
    host.write_pages(range(2 * pages), torch.from_numpy(content))
    poller = PollerThread()
    poller.start()
    copier = PageCopier(device, host)
    copier.start()
    storage = open_storage(f"file:{folder / 'store'}?capacity={4 * pages * layout.page_bytes}")
    try:
        await storage.register(host.memory, host.page, namespace=b"b" * 32, poller=poller)
        stages = Stages(storage, copier, host, folder, pages)
        await stages.put()
        yield stages
    finally:
        await storage.close()
        await copier.close()
        await poller.close()
