"""Movement of pages between the host pool and slots, with their checksums: the contract, and the plain implementation.

The plain one moves a few pages at a time and takes their checksums while they are in the processor's cache: it is bound
by memory, and a second pass over all pages would cost a third of the first. Neighbors in a segment are one system call,
whichever pages of the pool they are in, so that the interpreter is released for long enough that several threads do not
contend for it. Threads share a chunk piece by piece, without the event loop in between, so that a thread that loses its
processor does not keep the others waiting for a large part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Final, Protocol

import xxhash

from tidekv.backends.storage.base import BufferOf
from tidekv.backends.storage.file.page_verify import NO_CHECKSUM, verify_headers, write_headers
from tidekv.backends.storage.file.records import are_headers, page_checksum
from tidekv.backends.storage.file.segments import Run, Segments, failure_cause, indices_of, slot_runs

# Bytes moved at once and then checksummed: less releases the interpreter too often, more has left the cache by then.
PIECE_BYTES: Final = 512 << 10
# Smaller parts of a chunk do not justify another thread.
_SHARE_BYTES_MIN: Final = 1 << 20
# Maximum buffers of one system call.
_BUFFERS_MAX: Final = 1024
# Maximum runs that the event loop reads at once: each is two system calls.
_CACHED_RUNS_MAX: Final = 8


LATE: Final = "late"
"""The cause of a page that was not started in time."""


class PageIO(Protocol):
    """Moves a chunk of pages. Returns when nothing moves any more, with a cause for each page, empty for success.

    Callers shield it from cancellation. `may_start` is called repeatedly, on any thread: once it returns False, pages
    that have not begun to move are late.
    """

    async def fetch(
        self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int], may_start: Callable[[], bool]
    ) -> list[str]:
        """Read slots into host pages, and verify that they are the pages of the keys."""

    async def store(
        self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int], may_start: Callable[[], bool]
    ) -> list[str]:
        """Write host pages into slots, then the headers with their keys and checksums."""

    def fetch_cached(self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]) -> bool:
        """Read a few slots into host pages at once, on this thread, if the kernel has all of them in memory; never
        waits. False: not all of them were read, or not all are the pages of the keys; `fetch` finds out why.
        """

    def forget(self, segments: Sequence[int]) -> None:
        """Release the files of some segments, to which nothing moves any more. Blocks."""

    def close(self) -> None:
        """Release everything. Blocks; nothing may be moving."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The pages of one call of ThreadIO, and the causes known so far."""

    keys: Sequence[bytes]
    slots: Sequence[int]
    pages: Sequence[int]
    causes: list[str]


class ThreadIO:
    """Plain preadv and pwritev on worker threads. Also finds out which page of a failed list is bad, and why."""

    def __init__(
        self, segments: Segments, buffer_of: BufferOf, workers: Executor, *, worker_count: int, chunk_bytes: int
    ) -> None:
        """`chunk_bytes` bounds what one thread takes at once."""
        page_bytes = segments.geometry.page_bytes
        self.segments = segments
        self.buffer_of = buffer_of
        self.workers = workers
        self._worker_count = worker_count
        self._fetching = 0
        self._pages_at_once = min(max(min(PIECE_BYTES, chunk_bytes) // page_bytes, 1), _BUFFERS_MAX)
        self._share_pages_min = max(min(_SHARE_BYTES_MIN, chunk_bytes) // page_bytes, 1)

    async def fetch(
        self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int], may_start: Callable[[], bool]
    ) -> list[str]:
        """Read slots into host pages and verify them; see PageIO."""
        orders = _in_order if self._fetching else _by_halves
        self._fetching += 1
        try:
            return await self._shared(self._fetch, orders, keys, slots, pages, may_start)
        finally:
            self._fetching -= 1

    async def store(
        self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int], may_start: Callable[[], bool]
    ) -> list[str]:
        """Write host pages and headers into slots; see PageIO."""
        return await self._shared(self._store, _by_halves, keys, slots, pages, may_start)

    def fetch_cached(self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]) -> bool:
        """Read a few slots into host pages at once, if the kernel has all of them in memory; see PageIO."""
        runs = slot_runs(slots)
        if len(runs) > _CACHED_RUNS_MAX:
            return False
        headers: list[bytes] = []
        buffers = [self.buffer_of(page) for page in pages]
        for run in runs:
            found = self.segments.read_cached(slots[run.first], buffers[run.first : run.first + run.count])
            if found is None:
                return False
            headers.append(found)
        return are_headers(
            b"".join(headers),
            self.segments.geometry,
            indices=indices_of(slots),
            keys=keys,
            checksums=list(map(page_checksum, buffers)),
        )

    def forget(self, segments: Sequence[int]) -> None:
        """Do nothing: the files have another owner."""

    def close(self) -> None:
        """Do nothing: the threads and files have another owner."""

    async def _shared(
        self,
        move: Callable[[_Batch, Iterator[Run]], None],
        orders: Callable[[Sequence[Run], int], list[Iterator[Run]]],
        keys: Sequence[bytes],
        slots: Sequence[int],
        pages: Sequence[int],
        may_start: Callable[[], bool],
    ) -> list[str]:
        """Move a batch on several workers, and wait for all of them."""
        batch = _Batch(keys, slots, pages, [LATE] * len(slots))
        loop = asyncio.get_running_loop()
        shares = min(self._worker_count, -(-len(slots) // self._share_pages_min))
        jobs = [
            loop.run_in_executor(self.workers, move, batch, takewhile(lambda _: may_start(), pieces))
            for pieces in orders(list(self._pieces(slots)), shares)
        ]
        if jobs:
            await asyncio.wait(jobs)
        for job in jobs:
            job.result()
        return batch.causes

    def _fetch(self, batch: _Batch, pieces: Iterator[Run]) -> None:
        done: list[int] = []
        checksums: list[bytes] = []
        for piece in pieces:
            at, first = slice(piece.first, piece.first + piece.count), batch.slots[piece.first]
            buffers = [self.buffer_of(page) for page in batch.pages[at]]
            done += range(at.start, at.stop)
            if len(buffers[0]) > PIECE_BYTES:
                batch.causes[at.start], checksum = self._fetch_large(first, buffers[0])
                checksums.append(checksum)
                continue
            if self.segments.read_pages(first, buffers):
                batch.causes[at] = [""] * piece.count
            else:
                batch.causes[at] = [
                    self.segments.read_page(slot, page) for slot, page in zip(batch.slots[at], buffers, strict=True)
                ]
            checksums += map(page_checksum, buffers)
        if not done:
            return
        proofs = verify_headers(
            self.segments, [batch.keys[at] for at in done], [batch.slots[at] for at in done], checksums
        )
        if any(proofs):
            for page, proof in zip(done, proofs, strict=True):
                batch.causes[page] = batch.causes[page] or proof

    def _fetch_large(self, slot: int, page: memoryview) -> tuple[str, bytes]:
        checksum = xxhash.xxh3_128()
        for first in range(0, len(page), PIECE_BYTES):
            part = page[first : first + PIECE_BYTES]
            if cause := self.segments.read_page(slot, part, first):
                return cause, NO_CHECKSUM
            checksum.update(part)
        return "", checksum.digest()

    def _store(self, batch: _Batch, pieces: Iterator[Run]) -> None:
        done: list[int] = []
        checksums: list[bytes] = []
        causes: list[str] = []
        for piece in pieces:
            at, first = slice(piece.first, piece.first + piece.count), batch.slots[piece.first]
            buffers = [self.buffer_of(page) for page in batch.pages[at]]
            done += range(at.start, at.stop)
            if len(buffers[0]) > PIECE_BYTES:
                cause, checksum = self._store_large(first, buffers[0])
                causes.append(cause)
                checksums.append(checksum)
                continue
            checksums += map(page_checksum, buffers)
            if self.segments.write_pages(first, buffers):
                causes += [""] * piece.count
            else:
                causes += [self._store_part(slot, page) for slot, page in zip(batch.slots[at], buffers, strict=True)]
        keys, slots = [batch.keys[at] for at in done], [batch.slots[at] for at in done]
        for page, cause in zip(done, seal(self.segments, keys, slots, checksums, causes), strict=True):
            batch.causes[page] = cause

    def _store_large(self, slot: int, page: memoryview) -> tuple[str, bytes]:
        checksum = xxhash.xxh3_128()
        for first in range(0, len(page), PIECE_BYTES):
            part = page[first : first + PIECE_BYTES]
            checksum.update(part)
            if cause := self._store_part(slot, part, first):
                return cause, NO_CHECKSUM
        return "", checksum.digest()

    def _store_part(self, slot: int, part: memoryview, first: int = 0) -> str:
        try:
            self.segments.write_page(slot, part, first)
        except OSError as error:
            return failure_cause(error)
        return ""

    def _pieces(self, slots: Sequence[int]) -> Iterator[Run]:
        """Cut a batch of slots into pieces of neighbors."""
        for run in slot_runs(slots):
            for first in range(run.first, run.first + run.count, self._pages_at_once):
                yield Run(first, min(self._pages_at_once, run.first + run.count - first))


def _by_halves(pieces: Sequence[Run], shares: int) -> list[Iterator[Run]]:
    """Return, for each of `shares` threads, the order in which it takes pieces; each piece is taken once.

    Even threads begin with the first half and odd ones with the second, which is in another file when pages are
    written; a thread that has finished its half continues with what is left of the other.
    """
    half = -(-len(pieces) // 2)
    first, second = iter(pieces[:half]), iter(pieces[half:])
    return [chain(second, first) if share % 2 else chain(first, second) for share in range(shares)]


def _in_order(pieces: Sequence[Run], shares: int) -> list[Iterator[Run]]:
    """Return the same order for all threads, for a batch that is read behind another one.

    Starting at both halves would jump back and forth over the whole of a prompt, and the kernel's read-ahead, which
    expects the next read where the last one ended, would always come too late.
    """
    return [iter(pieces)] * shares


def seal(
    segments: Segments, keys: Sequence[bytes], slots: Sequence[int], checksums: Sequence[bytes], causes: list[str]
) -> list[str]:
    """Write the headers of the pages without a cause; returns the causes, including failures of this step."""
    without_cause = [at for at, cause in enumerate(causes) if not cause]
    if not without_cause:
        return causes
    if len(without_cause) < len(slots):
        keys = [keys[at] for at in without_cause]
        slots = [slots[at] for at in without_cause]
        checksums = [checksums[at] for at in without_cause]
    cause = write_headers(segments, keys, slots, checksums)
    return [given or cause for given in causes]
