"""The `file:` engine: pages in segment files of a local directory, bounded, shared by processes, safe against crashes.

A page is written into a slot that the index reserved, then its header is written, then the index publishes it: after a
crash at any point the page is missing. A page that is read is checked against its header and checksum, so an index that
is behind, a file that is truncated or foreign, or a slot that holds another page by now is a miss. If the disk is full,
gone or read-only, puts return False and gets miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidekv.backends.base import Poller
from tidekv.backends.storage.base import (
    BufferOf,
    Holding,
    StorageStatistics,
    Verdict,
    check_keys,
    check_namespace,
    check_pairs,
    check_pool,
)
from tidekv.backends.storage.calls import Call, Calls
from tidekv.backends.storage.file.batch_io import Threads
from tidekv.backends.storage.file.file_store import FileStore
from tidekv.backends.storage.file.options import FileOptions, read_file_options
from tidekv.backends.storage.file.schema import file_holdings, file_namespaces, write_label
from tidekv.backends.storage.file.segments import namespace_directory
from tidekv.backends.storage.stats import StorageCounters
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest
from tidekv.states.types import PageIds, PoolMemory


def open_file(*, authority: str, path: str, options: Mapping[str, object]) -> FileStorage:
    """Make the engine of a `file:` URI."""
    if authority not in ("", "localhost"):
        raise InvalidConfig(f"file: storage is on this machine; write file:/path, not file://{authority}{path}")
    if not path:
        raise InvalidConfig("file: storage needs a directory; write file:/var/lib/tidekv?capacity=200GB")
    if "\0" in path:
        raise InvalidConfig("file: storage was given a path with a zero byte in it")
    return FileStorage(read_file_options(Path(path).expanduser().absolute(), options))


class FileStorage:
    """Pages in files of one directory, bounded in bytes; the least recently used ones make room."""

    def __init__(self, options: FileOptions) -> None:
        """Open nothing yet: `register` opens the directory."""
        self.uri = f"file:{options.root}?capacity={options.capacity}"
        self._options = options
        self._calls = Calls(self.uri)
        self._counts = StorageCounters()
        self._threads = Threads(
            index=ThreadPoolExecutor(1, thread_name_prefix="tidekv-file-index"),
            workers=worker_threads(options.threads, "tidekv-file-storage"),
        )
        self._registered = False
        self._namespace = b""
        self._file_store: FileStore | None = None
        # Stores whose directory was lost. Reads may still be running there, so they are closed at the end.
        self._lost: list[FileStore] = []
        self._closing: asyncio.Task[None] | None = None

    async def register(self, pool: PoolMemory, buffer_of: BufferOf, *, namespace: bytes, poller: Poller) -> None:
        """Open the directory for pages of this pool; see Storage."""
        if self._calls.closed:
            raise EngineClosed(f"{self.uri} is closed")
        if self._registered:
            raise InvalidRequest(f"{self.uri} has a pool already; open another engine for another pool")
        check_namespace(namespace)
        check_pool(pool)

        async def body(_: Call) -> None:
            try:
                self._file_store = await FileStore.open(
                    self._options,
                    pool=pool,
                    buffer_of=buffer_of,
                    namespace=namespace,
                    poller=poller,
                    threads=self._threads,
                    counts=self._counts,
                )
            finally:
                self._registered = self._file_store is not None

        self._registered = True
        await self._calls.run(body)
        self._namespace = namespace

    async def set_label(self, label: bytes) -> None:
        """Store the label of the namespace as a file beside its segments; see Labels."""
        self._ready()

        async def body(_: Call) -> None:
            directory = namespace_directory(self._options.root, self._namespace)
            await asyncio.get_running_loop().run_in_executor(self._threads.workers, write_label, directory, label)

        await self._calls.run(body)

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Return which keys are in the index; see Storage."""
        check_keys(keys)
        return await self._exist(self._ready(), keys, timeout_s)

    async def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Note in the index that pages are in use; see Touches."""
        check_keys(keys)
        file_store = self._ready()
        found = await self._exist(file_store, keys, timeout_s)
        file_store.touch(keys)
        return found

    async def _exist(self, file_store: FileStore, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        found = file_store.exist(keys)
        if all(found) or file_store.is_current:
            if file_store.is_stale:
                # Not awaited. This also picks up changes of a process that writes no tick.
                await file_store.catch_up(0)
            return found
        # Other processes may have put them since the last refresh.
        return file_store.exist(keys) if await file_store.catch_up(timeout_s) else found

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Read pages and verify them; see Storage."""
        file_store = self._ready()
        check_pairs(keys, pages, page_count=file_store.page_count, distinct_pages=True)

        if timeout_s > 0 and not self._calls.closed and file_store.get_cached(keys, pages):
            return self._counts.got([""] * len(keys), file_store.page_bytes)

        async def body(call: Call) -> list[bool]:
            return self._counts.got(await file_store.get(call, keys, pages), file_store.page_bytes)

        return await self._calls.run(body, timeout_s)

    async def put_from(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Write pages and publish them; see Storage."""
        file_store = self._ready()
        check_pairs(keys, pages, page_count=file_store.page_count, distinct_pages=False)

        async def body(call: Call) -> list[bool]:
            return self._counts.put(await file_store.put(call, keys, pages), file_store.page_bytes)

        return await self._calls.run(body, timeout_s)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove keys; see Storage."""
        file_store = self._ready()
        check_keys(keys)

        async def body(_: Call) -> list[bool]:
            return await file_store.forget(keys)

        return await self._calls.run(body)

    async def clear(self) -> int:
        """Remove every page of this namespace and its files; see Storage."""
        file_store = self._ready()

        async def body(_: Call) -> int:
            return await file_store.clear()

        return await self._calls.run(body)

    async def probe(self) -> None:
        """Write and read the directory; a lost one is opened again. See Storage."""
        self._ready()

        async def body(_: Call) -> None:
            file_store = self._ready()
            if await file_store.is_lost():
                opened = await file_store.open_again()
                if self._file_store is not file_store:
                    # Another probe was faster.
                    await opened.close()
                else:
                    self._lost.append(file_store)
                    self._file_store = opened
            await self._ready().try_out()

        await self._calls.run(body)

    async def verify(self) -> AsyncIterator[Verdict]:
        """Read and check every page; see Storage."""
        file_store = self._ready()
        await file_store.catch_up(None)
        for part in file_store.stored():

            async def body(_: Call, part: Sequence[tuple[bytes, int]] = part) -> list[Verdict]:
                return await file_store.verify(part)

            for verdict in await self._calls.run(body):
                yield verdict

    def sibling(self) -> FileStorage:
        """Make another engine of the same directory; both share its capacity. See Siblings."""
        return FileStorage(self._options)

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        """Ask the index; see Neighbors."""
        self._ready()

        async def body(_: Call) -> set[bytes]:
            root = self._options.root
            return await asyncio.get_running_loop().run_in_executor(self._threads.index, file_namespaces, root)

        found = await self._calls.run(body)
        return [namespace in found for namespace in namespaces]

    async def listed(self) -> AsyncIterator[Sequence[bytes]]:
        """Return the keys of this namespace; see Census."""
        file_store = self._ready()
        await file_store.catch_up(None)
        for part in file_store.stored():
            yield [key for key, _ in part]

    async def holdings(self) -> list[Holding]:
        """Return the namespaces of the directory; see Census."""
        return await asyncio.get_running_loop().run_in_executor(None, file_holdings, self._options.root)

    async def close(self) -> None:
        """Wait for the calls that run, and close the files; see Storage. A second call waits for the first, which goes
        on if its caller is cancelled: half closed, the directory would stay locked.
        """
        # One that failed is tried again, with what is left.
        task = self._closing
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._closing = asyncio.get_running_loop().create_task(self._close(), name=f"closing {self.uri}")
        await asyncio.shield(task)

    async def _close(self) -> None:
        shelves = [*self._lost, *([] if self._file_store is None else [self._file_store])]
        for file_store in shelves:
            file_store.hurry()
        await self._calls.drain()
        shelves = [*self._lost, *([] if self._file_store is None else [self._file_store])]
        self._file_store, self._lost = None, []
        for file_store in shelves:
            await file_store.close()
        self._threads.index.shutdown()
        self._threads.workers.shutdown()

    def statistics(self) -> StorageStatistics:
        """Return what the engine holds, and its counters. `used_bytes` counts against the capacity: whole segments."""
        file_store = self._file_store
        return self._counts.statistics(
            uri=self.uri,
            pages=0 if file_store is None else file_store.page_total,
            used_bytes=0 if file_store is None else file_store.used_bytes,
            capacity_bytes=self._options.capacity,
            calls_in_flight=len(self._calls),
        )

    def _ready(self) -> FileStore:
        if self._file_store is None:
            if self._calls.closed:
                raise EngineClosed(f"{self.uri} is closed")
            raise InvalidRequest(f"{self.uri} has no pool yet; register one first")
        return self._file_store


def worker_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return an executor of `count` threads that divide the caller's processors among them."""
    # Threads that copy pages sleep and wake all the time: for work, and for the interpreter, which they pass to each
    # other. A kernel that finds its few processors busy leaves a woken thread on the processor where it slept, so on a
    # small machine two threads shared one processor for whole batches while the other was idle.
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_divider(count))


def processors_of(number: int, count: int, allowed: Sequence[int]) -> set[int]:
    """Return the allowed processors of thread `number` of `count`: all, if there is not one for each thread."""
    return set(allowed[number::count] if len(allowed) >= count else allowed)


def _divider(count: int) -> Callable[[], None]:
    """Return the initializer that each of `count` threads calls once."""
    numbers = itertools.count()

    def divide() -> None:
        if sys.platform == "linux" and count > 1:
            thread = threading.get_native_id()
            # This is for speed only: if a sandbox forbids it, nothing is lost.
            with contextlib.suppress(OSError):
                allowed = sorted(os.sched_getaffinity(thread))
                os.sched_setaffinity(thread, processors_of(next(numbers), count, allowed))

    return divide
