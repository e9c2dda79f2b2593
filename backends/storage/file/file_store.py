"""An open directory: splits calls into chunks, within their deadlines and limits.

Several chunks run at once, so that reading one overlaps checking another.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

from tidekv.backends.base import Poller
from tidekv.backends.storage.base import BufferOf, Verdict
from tidekv.backends.storage.calls import Call, all_settled
from tidekv.backends.storage.file.batch_io import BatchIO, Threads
from tidekv.backends.storage.file.directory import Directory
from tidekv.backends.storage.file.nixl_io import NixlIO
from tidekv.backends.storage.file.options import FileOptions
from tidekv.backends.storage.file.page_io import LATE, PageIO, ThreadIO
from tidekv.backends.storage.file.page_verify import verify_stored
from tidekv.backends.storage.stats import StorageCounters
from tidekv.states.errors import StorageFailed, cause_of
from tidekv.states.types import PageIds, PoolMemory

# Bytes that are looked up and read, or reserved, written and published, at once: with less, the event loop contends
# with the threads for the interpreter. Less is written than read, so that one chunk is published while another is
# written. The pages are descriptors of NIXL, which has room for many times as many.
READ_CHUNK_BYTES: Final = 64 << 20
WRITE_CHUNK_BYTES: Final = 32 << 20
CHUNK_PAGES_MAX: Final = 1024
READ_CHUNKS_IN_FLIGHT_MAX: Final = 2
WRITE_CHUNKS_IN_FLIGHT_MAX: Final = 2
TOUCHED_MAX: Final = 4096
# Maximum pages of a read on the event loop.
CACHED_PAGES_MAX: Final = 32
# Maximum age of a hint while `exists` is called all the time.
STALE_S: Final = 1.0

T = TypeVar("T")
Chunk = Callable[[Call, Sequence[bytes], PageIds], Awaitable[list[str]]]


class FileStore:
    """One open directory with one host pool. Callers shield its calls: they must not be cancelled."""

    def __init__(
        self,
        place: Directory,
        io: PageIO,
        *,
        buffer_of: BufferOf,
        page_count: int,
        threads: Threads,
        counts: StorageCounters,
        open_again: Callable[[], Awaitable[FileStore]],
    ) -> None:
        self._place = place
        self._io = io
        self._chunks = BatchIO(place, io, threads, counts)
        self._threads = threads
        self.open_again = open_again
        self.page_count = page_count
        self.page_bytes = place.segments.geometry.page_bytes
        self._read_pages = min(max(READ_CHUNK_BYTES // self.page_bytes, 1), CHUNK_PAGES_MAX)
        self._write_pages = min(max(WRITE_CHUNK_BYTES // self.page_bytes, 1), CHUNK_PAGES_MAX)
        self._reads = asyncio.Semaphore(READ_CHUNKS_IN_FLIGHT_MAX)
        self._writes = asyncio.Semaphore(WRITE_CHUNKS_IN_FLIGHT_MAX)
        self._slot_by_key = place.index.mirror.slot_by_key
        self._catching_up: asyncio.Task[bool | None] | None = None
        self._noting: asyncio.Task[None] | None = None
        self._caught_up_s = time.monotonic()
        self._chunks_in_flight = 0
        self._cached_bytes_max = place.options.inline
        self._read_this_turn = False

    @classmethod
    async def open(
        cls,
        options: FileOptions,
        *,
        pool: PoolMemory,
        buffer_of: BufferOf,
        namespace: bytes,
        poller: Poller,
        threads: Threads,
        counts: StorageCounters,
    ) -> FileStore:
        """Open or create the directory. InvalidConfig if no page fits, StorageFailed if the directory or NIXL cannot be
        used.
        """
        loop = asyncio.get_running_loop()
        place = await loop.run_in_executor(
            threads.index, lambda: Directory(options, namespace=namespace, page_bytes=pool.page_bytes)
        )
        plain = ThreadIO(
            place.segments, buffer_of, threads.workers, worker_count=options.threads, chunk_bytes=options.chunk
        )
        io: PageIO = plain
        if options.io == "nixl":
            try:
                io = await loop.run_in_executor(
                    threads.workers,
                    lambda: NixlIO(plain, pool, poller, queue=options.queue, chunk_bytes=options.chunk),
                )
            except BaseException:
                await loop.run_in_executor(threads.index, place.close)
                raise

        async def open_again() -> FileStore:
            return await cls.open(
                options,
                pool=pool,
                buffer_of=buffer_of,
                namespace=namespace,
                poller=poller,
                threads=threads,
                counts=counts,
            )

        opened = cls(
            place,
            io,
            buffer_of=buffer_of,
            page_count=pool.page_count,
            threads=threads,
            counts=counts,
            open_again=open_again,
        )
        # Not awaited: the calls that need what the index has wait for it themselves.
        await opened.catch_up(0)
        return opened

    @property
    def page_total(self) -> int:
        """Number of pages in the index, as of the last refresh."""
        return len(self._slot_by_key)

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments of the directory, as of our last change."""
        return self._place.index.used_bytes

    @property
    def is_stale(self) -> bool:
        """True if changes of other processes were not read for STALE_S."""
        return time.monotonic() - self._caught_up_s > STALE_S

    @property
    def is_current(self) -> bool:
        """True if no process has changed the index since the last refresh; False also if that is unknown."""
        return self._place.index.is_current

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys the index has, as of the last refresh."""
        return list(map(self._slot_by_key.__contains__, keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that those of these pages that are there are in use; written to the index by its next change, or now if
        they are many.
        """
        slots = map(self._slot_by_key.get, keys)
        self._place.index.touch(slot for slot in slots if slot is not None)
        self._note_many_touched()

    async def catch_up(self, timeout_s: float | None) -> bool:
        """Read what other processes changed; after the timeout, continue with what is known. False if they have changed
        nothing.
        """
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.get_running_loop().create_task(self._chunks.bring_up(self._place.index.refresh))
            self._caught_up_s = time.monotonic()
        await asyncio.wait({self._catching_up}, timeout=timeout_s)
        return not self._catching_up.done() or self._catching_up.result() is not False

    def get_cached(self, keys: Sequence[bytes], pages: PageIds) -> bool:
        """Read and verify a few small pages on the event loop itself, if the kernel has them in memory: that takes less
        of the loop than a thread would. Once a turn of the loop, so that many such reads do not block it. False: not
        all could be read; use `get`.
        """
        if self._read_this_turn or not 0 < len(keys) <= CACHED_PAGES_MAX:
            return False
        if len(keys) * self.page_bytes > self._cached_bytes_max or not self._chunks.get_cached(keys, pages):
            return False
        self._read_this_turn = True
        asyncio.get_running_loop().call_soon(self._end_turn)
        self._note_many_touched()
        return True

    async def get(self, call: Call, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Read and verify pages; the cause of a miss for each, empty for a hit."""
        if not self.is_current and not all(self.exist(keys)):
            await self.catch_up(call.left_s())
        causes = await self._in_chunks(
            call, keys, pages, size=self._read_pages, limit=self._reads, chunk=self._chunks.get
        )
        self._note_many_touched()
        return causes

    async def put(self, call: Call, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Write and publish pages; the cause of a failure for each, empty for a stored one."""
        return await self._in_chunks(
            call, keys, pages, size=self._write_pages, limit=self._writes, chunk=self._chunks.put
        )

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove keys; True for each that was there."""
        return await self._chunks.forget([(key, None) for key in keys])

    async def clear(self) -> int:
        """Remove every page of the namespace. StorageFailed if the index cannot be changed."""
        removed = await self._chunks.on_index(self._place.index.clear)
        await self._close_dropped()
        return removed

    async def is_lost(self) -> bool:
        """True if the path no longer holds the directory that was opened."""
        return await asyncio.get_running_loop().run_in_executor(self._threads.workers, self._place.is_lost)

    async def try_out(self) -> None:
        """Raise StorageFailed unless the index and the directory can be written and read."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads.index, self._place.try_out)
        except (OSError, sqlite3.Error) as error:
            raise StorageFailed(f"{self._place.options.root} cannot be used: {cause_of(error)}") from error

    def stored(self) -> Iterator[Sequence[tuple[bytes, int]]]:
        """Yield what the index has, in parts fit for `verify`."""
        pairs = sorted(self._slot_by_key.copy().items(), key=lambda pair: pair[1])
        for first in range(0, len(pairs), self._write_pages):
            yield pairs[first : first + self._write_pages]

    async def verify(self, pairs: Sequence[tuple[bytes, int]]) -> list[Verdict]:
        """Read stored pages and return which are whole; those that are removed or replaced meanwhile are left out."""
        keys, slots = [key for key, _ in pairs], [slot for _, slot in pairs]
        self._chunks_in_flight += 1
        try:
            causes = await self._chunks.on_worker(lambda: verify_stored(self._place.segments, keys, slots))
        finally:
            self._chunks_in_flight -= 1
        if any(causes):
            # A change and not a refresh: another process erases a header before its removal is visible in the index.
            await self._chunks.bring_up(self._place.index.note_touched)
        return [
            Verdict(key=key, ok=not cause, cause=cause)
            for key, slot, cause in zip(keys, slots, causes, strict=True)
            if not cause or self._slot_by_key.get(key) == slot
        ]

    def hurry(self) -> None:
        """Stop waiting for the index while another process has it locked: changes fail instead."""
        self._place.index.hurry()

    async def close(self) -> None:
        """Close everything. No call may be running."""
        begun = {task for task in (self._catching_up, self._noting) if task is not None}
        if begun:
            await asyncio.wait(begun)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads.workers, self._io.close)
        await loop.run_in_executor(self._threads.index, self._place.close)

    def _end_turn(self) -> None:
        self._read_this_turn = False

    def _note_many_touched(self) -> None:
        """Write down which slots were used, if they are many and that is not running already. Only `close` waits for
        it.
        """
        if len(self._place.index.touched) >= TOUCHED_MAX and (self._noting is None or self._noting.done()):
            self._noting = asyncio.get_running_loop().create_task(self._chunks.bring_up(self._place.index.note_touched))

    async def _in_chunks(
        self, call: Call, keys: Sequence[bytes], pages: PageIds, *, size: int, limit: asyncio.Semaphore, chunk: Chunk
    ) -> list[str]:
        """Run a call in chunks of `size`, as many at once as the limit allows; what is not started in time is late."""
        causes = [LATE] * len(keys)
        firsts = iter(range(0, len(keys), size))

        async def lane() -> None:
            for first in firsts:
                part = slice(first, first + size)
                if await call.start(limit):
                    self._chunks_in_flight += 1
                    try:
                        causes[part] = await chunk(call, keys[part], pages[part])
                    finally:
                        self._chunks_in_flight -= 1
                        limit.release()

        lanes = min(-(-len(keys) // size), max(READ_CHUNKS_IN_FLIGHT_MAX, WRITE_CHUNKS_IN_FLIGHT_MAX))
        if lanes == 1:
            await lane()
        elif lanes:
            await all_settled(lane() for _ in range(lanes))
        await self._close_dropped()
        return causes

    async def _close_dropped(self) -> None:
        """Close the files of dropped segments, once no chunk runs that may have found a page there.

        Later chunks find none: a segment is dropped from the mirror first.
        """
        dropped = self._place.index.mirror.dropped
        if self._chunks_in_flight or not dropped:
            return
        segments = [dropped.popleft() for _ in range(len(dropped))]

        def close() -> None:
            self._io.forget(segments)
            self._place.segments.close_some(segments)

        await self._chunks.on_worker(close)
