"""An open directory at work: calls cut into chunks, each chunk through the index, the files and the checks.

    get:  index says where ─▶ pages read by NIXL ─▶ headers and checksums compared on a worker ─▶ true or a miss
    put:  slots reserved ─▶ pages written by NIXL, checksums taken meanwhile ─▶ headers written ─▶ published

Several chunks are under way at once, so that reading one overlaps checking another.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, TypeVar

from tidekv.backends.base import Poller
from tidekv.backends.storage.base import BufferOf, Verdict
from tidekv.backends.storage.calls import Call, all_settled
from tidekv.backends.storage.counts import Counts
from tidekv.backends.storage.file_options import FileOptions
from tidekv.backends.storage.nixl_io import NixlIO
from tidekv.backends.storage.page_io import PageIO, ThreadIO
from tidekv.backends.storage.place import Place
from tidekv.backends.storage.proofs import checksums, verify_pages, verify_stored, write_headers
from tidekv.states.errors import StorageFailed
from tidekv.states.shapes import PageIds, PoolMemory

# Descriptors of one chunk: with all chunks in flight far below what NIXL has room for.
CHUNK_PAGES_MAX: Final = 1024
READ_CHUNKS_IN_FLIGHT_MAX: Final = 4
WRITE_CHUNKS_IN_FLIGHT_MAX: Final = 2
TOUCHED_MAX: Final = 4096
# How old a hint may be while somebody keeps asking.
STALE_S: Final = 1.0

# What is wrong with the page itself, and not with how it was read: its entry goes, so that it can be put anew.
_BAD_PAGE: Final = ("missing", "truncated", "corrupt", "foreign")

T = TypeVar("T")
Chunk = Callable[[Sequence[bytes], PageIds], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class Threads:
    """Who may block: one thread for the index, some for files and checksums."""

    index: Executor
    workers: Executor


class _IndexFailed(StorageFailed):
    """The index could not be read or changed; `cause` is how it is counted."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the index cannot be used: {error}")
        code = getattr(error, "sqlite_errorname", "")
        self.cause = {"SQLITE_BUSY": "index busy", "SQLITE_FULL": "no space"}.get(code, "index failed")


class Shelf:
    """One open directory with one host pool. Its calls do not survive being cancelled: they are shielded outside."""

    def __init__(
        self,
        place: Place,
        io: PageIO,
        *,
        buffer_of: BufferOf,
        page_count: int,
        chunk_bytes: int,
        threads: Threads,
        counts: Counts,
        open_again: Callable[[], Awaitable[Shelf]],
    ) -> None:
        self._place = place
        self._io = io
        self._buffer_of = buffer_of
        self._threads = threads
        self._counts = counts
        self.open_again = open_again
        self.page_count = page_count
        self.page_bytes = place.segments.geometry.page_bytes
        self._chunk_pages = min(max(chunk_bytes // self.page_bytes, 1), CHUNK_PAGES_MAX)
        self._reads = asyncio.Semaphore(READ_CHUNKS_IN_FLIGHT_MAX)
        self._writes = asyncio.Semaphore(WRITE_CHUNKS_IN_FLIGHT_MAX)
        self._slot_by_key = place.index.mirror.slot_by_key
        self._catching_up: asyncio.Task[None] | None = None
        self._caught_up_s = time.monotonic()
        self._chunks_in_flight = 0

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
        counts: Counts,
    ) -> Shelf:
        """Open or make the directory. InvalidConfig if no page fits, StorageFailed if it or NIXL cannot be used."""
        loop = asyncio.get_running_loop()
        place = await loop.run_in_executor(
            threads.index, lambda: Place(options, namespace=namespace, page_bytes=pool.page_bytes)
        )
        io: PageIO
        io = plain = ThreadIO(place.segments, buffer_of, threads.workers)
        if options.io == "nixl":
            try:
                io = await loop.run_in_executor(
                    threads.workers,
                    lambda: NixlIO(place.segments, pool, poller, threads.workers, plain, queue=options.queue),
                )
            except BaseException:
                await loop.run_in_executor(threads.index, place.close)
                raise

        async def open_again() -> Shelf:
            return await cls.open(
                options,
                pool=pool,
                buffer_of=buffer_of,
                namespace=namespace,
                poller=poller,
                threads=threads,
                counts=counts,
            )

        return cls(
            place,
            io,
            buffer_of=buffer_of,
            page_count=pool.page_count,
            chunk_bytes=options.chunk,
            threads=threads,
            counts=counts,
            open_again=open_again,
        )

    @property
    def page_total(self) -> int:
        """Pages that the index has, as far as we know."""
        return len(self._slot_by_key)

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments of the directory when we last changed it."""
        return self._place.index.used_bytes

    @property
    def is_stale(self) -> bool:
        """True if other processes have not been asked for changes for a while."""
        return time.monotonic() - self._caught_up_s > STALE_S

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell which keys the index has, as far as we know."""
        known = self._slot_by_key
        return [key in known for key in keys]

    async def catch_up(self, timeout_s: float | None) -> None:
        """Learn what other processes changed, or go on with what is known if that takes too long."""
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.get_running_loop().create_task(self._bring_up(self._place.index.refresh))
            self._caught_up_s = time.monotonic()
        await asyncio.wait({self._catching_up}, timeout=timeout_s)

    async def get(self, call: Call, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Read and verify pages; the cause of a miss for each, empty for a hit."""
        if not all(self.exist(keys)):
            await self.catch_up(call.left_s())
        causes = await self._in_chunks(call, self._reads, self._get_chunk, keys, pages)
        if len(self._place.index.touched) >= TOUCHED_MAX:
            await self._bring_up(self._place.index.note_touched)
        return causes

    async def put(self, call: Call, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Write and publish pages; the cause of a failure for each, empty for a stored one."""
        return await self._in_chunks(call, self._writes, self._put_chunk, keys, pages)

    async def forget(self, pairs: Sequence[tuple[bytes, int | None]]) -> list[bool]:
        """Remove keys; where a slot is given, only if the key is in it still."""
        try:
            return await self._on_index(lambda: self._place.index.forget(pairs))
        except _IndexFailed as error:
            self._counts.failures[error.cause] += len(pairs)
            return [False] * len(pairs)

    async def clear(self) -> int:
        """Remove every page of the namespace. StorageFailed if the index cannot be changed."""
        removed = await self._on_index(self._place.index.clear)
        await self._close_dropped()
        return removed

    async def is_lost(self) -> bool:
        """True if the directory is not the one that was opened."""
        return await asyncio.get_running_loop().run_in_executor(self._threads.workers, self._place.is_lost)

    async def try_out(self) -> None:
        """Raise StorageFailed unless the index and the directory can be written and read."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads.index, self._place.try_out)
        except (OSError, sqlite3.Error) as error:
            raise StorageFailed(f"{self._place.options.root} cannot be used: {error}") from error

    def stored(self) -> Iterator[Sequence[tuple[bytes, int]]]:
        """Return what the index has, in parts fit for `verify`."""
        pairs = sorted(self._slot_by_key.copy().items(), key=lambda pair: pair[1])
        for first in range(0, len(pairs), self._chunk_pages):
            yield pairs[first : first + self._chunk_pages]

    async def verify(self, pairs: Sequence[tuple[bytes, int]]) -> list[Verdict]:
        """Read stored pages and tell which are whole."""
        keys, slots = [key for key, _ in pairs], [slot for _, slot in pairs]
        self._chunks_in_flight += 1
        try:
            causes = await self._on_worker(lambda: verify_stored(self._place.segments, keys, slots))
        finally:
            self._chunks_in_flight -= 1
        return [Verdict(key=key, ok=not cause, cause=cause) for key, cause in zip(keys, causes, strict=True)]

    async def close(self) -> None:
        """Close everything. No call may be under way."""
        if self._catching_up is not None:
            await asyncio.wait({self._catching_up})
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads.workers, self._io.close)
        await loop.run_in_executor(self._threads.index, self._place.close)

    async def _bring_up(self, work: Callable[[], None]) -> None:
        """Do what may as well be done later: if the index cannot now, that is counted, and the next change does it."""
        try:
            await self._on_index(work)
        except _IndexFailed as error:
            self._counts.failures[error.cause] += 1

    async def _in_chunks(
        self, call: Call, limit: asyncio.Semaphore, chunk: Chunk, keys: Sequence[bytes], pages: PageIds
    ) -> list[str]:
        """Do a call chunk by chunk, as many at once as the limit lets; what is not started in time is late."""
        causes = ["late"] * len(keys)
        firsts = iter(range(0, len(keys), self._chunk_pages))

        async def lane() -> None:
            for first in firsts:
                part = slice(first, first + self._chunk_pages)
                if await call.start(limit):
                    self._chunks_in_flight += 1
                    try:
                        causes[part] = await chunk(keys[part], pages[part])
                    finally:
                        self._chunks_in_flight -= 1
                        limit.release()

        lanes = min(-(-len(keys) // self._chunk_pages), max(READ_CHUNKS_IN_FLIGHT_MAX, WRITE_CHUNKS_IN_FLIGHT_MAX))
        if lanes == 1:
            await lane()
        elif lanes:
            await all_settled(lane() for _ in range(lanes))
        await self._close_dropped()
        return causes

    async def _close_dropped(self) -> None:
        """Close the files of segments that are gone, once no chunk is under way that may have found a page there.

        Those that start from now on find none: a segment is dropped from the mirror first.
        """
        dropped = self._place.index.mirror.dropped
        if self._chunks_in_flight or not dropped:
            return
        segments = [dropped.popleft() for _ in range(len(dropped))]

        def close() -> None:
            self._io.forget(segments)
            self._place.segments.close_some(segments)

        await self._on_worker(close)

    async def _get_chunk(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        found = [(at, slot) for at, key in enumerate(keys) if (slot := self._slot_by_key.get(key)) is not None]
        causes = ["missing"] * len(keys)
        if not found:
            return causes
        slots = [slot for _, slot in found]
        moved = await self._io.read(slots, [pages[at] for at, _ in found])
        whole = [(at, slot) for (at, slot), cause in zip(found, moved, strict=True) if not cause]
        for (at, _), cause in zip(found, moved, strict=True):
            causes[at] = cause

        def verify() -> list[str]:
            return verify_pages(
                self._place.segments,
                self._buffer_of,
                [keys[at] for at, _ in whole],
                [slot for _, slot in whole],
                [pages[at] for at, _ in whole],
            )

        if whole:
            for (at, _), cause in zip(whole, await self._on_worker(verify), strict=True):
                causes[at] = cause
        self._place.index.touched.extend(slot for at, slot in found if not causes[at])
        bad = [(keys[at], slot) for at, slot in found if causes[at] in _BAD_PAGE]
        if bad:
            await self.forget(bad)
        return causes

    async def _put_chunk(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        index, segments = self._place.index, self._place.segments
        try:
            slots = await self._on_index(lambda: index.reserve(len(keys)))
        except _IndexFailed as error:
            return [error.cause] * len(keys)
        kept = len(slots)
        sums: list[bytes] = []
        moved: list[str] = []

        async def take_checksums() -> None:
            sums.extend(await self._on_worker(lambda: checksums(self._buffer_of, pages[:kept])))

        async def move() -> None:
            moved.extend(await self._io.write(slots, pages[:kept]))

        await all_settled([move(), take_checksums()])
        good = [at for at in range(kept) if not moved[at]]

        def write() -> str:
            return write_headers(
                segments, [keys[at] for at in good], [slots[at] for at in good], [sums[at] for at in good]
            )

        cause = await self._on_worker(write) if good else ""
        if cause:
            good = []
        written = [(keys[at], slots[at]) for at in good]
        wasted = sorted(set(slots) - {slot for _, slot in written})
        causes = [moved[at] or cause for at in range(kept)] + ["full"] * (len(keys) - kept)
        try:
            done = await self._on_index(lambda: index.publish(written, wasted))
        except _IndexFailed as error:
            index.give_up(slots)
            return [given or error.cause for given in causes]
        for at, published in zip(good, done, strict=True):
            # Taken from us meanwhile: the segment was retired, or we were thought dead.
            causes[at] = "" if published else "reservation lost"
        return causes

    async def _on_index(self, work: Callable[[], T]) -> T:
        """Do something with the index; _IndexFailed if it could not be done, and nothing was changed."""
        index = self._place.index

        def job() -> T:
            try:
                return work()
            finally:
                self._counts.evictions += index.take_evictions()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads.index, job)
        except (sqlite3.Error, OSError) as error:
            raise _IndexFailed(error) from error

    async def _on_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads.workers, work)
