"""How pages move between the host pool and slots, with their proofs: the contract of the two ways, and the plain one.

The plain way moves a few pages at a time and takes their checksums while they are in the processor's cache: memory is
what it waits for, and a second pass over all pages would cost as much as a third of the first. Neighbors in a segment
are one call of the system, whatever pages of the pool they are in, so that the interpreter is let go for long enough
that several threads do not fight for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Final, Protocol

import xxhash

from tidekv.backends.storage.base import BufferOf
from tidekv.backends.storage.proofs import NO_CHECKSUM, verify_headers, write_headers
from tidekv.backends.storage.records import page_checksum
from tidekv.backends.storage.segments import Run, Segments, failure_cause, slot_runs

# What is moved at once and then summed: less lets go of the interpreter too often, more has left the cache by then.
PIECE_BYTES: Final = 512 << 10
# The most buffers that one call of the system takes.
_BUFFERS_MAX: Final = 1024


class PageIO(Protocol):
    """Moves a chunk of pages. Returns when nothing moves any more, with a cause a page: empty if it went well.

    Not to be cancelled: whoever awaits it is shielded.
    """

    async def fetch(self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Read slots into host pages, and verify that they are the pages of the keys."""

    async def store(self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Write host pages into slots, and after them the headers that name their keys and checksums."""

    def forget(self, segments: Sequence[int]) -> None:
        """Let go of the files of some segments, to which nothing moves any more. Blocks."""

    def close(self) -> None:
        """Give everything back. Blocks; nothing may be moving."""


class ThreadIO:
    """Plain preadv and pwritev on worker threads: also the way that finds out which page of a list failed, and why."""

    def __init__(self, segments: Segments, buffer_of: BufferOf, workers: Executor) -> None:
        self._segments = segments
        self._buffer_of = buffer_of
        self._workers = workers
        self._pages_at_once = min(max(PIECE_BYTES // segments.geometry.page_bytes, 1), _BUFFERS_MAX)

    async def fetch(self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Read slots into host pages and verify them; see PageIO."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._fetch, keys, slots, pages)

    async def store(self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Write host pages and headers into slots; see PageIO."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._store, keys, slots, pages)

    def forget(self, segments: Sequence[int]) -> None:
        """Do nothing: the files are somebody else's."""

    def close(self) -> None:
        """Do nothing: the threads and files are somebody else's."""

    def _fetch(self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        causes = [""] * len(slots)
        checksums = [NO_CHECKSUM] * len(slots)
        for piece in self._pieces(slots):
            at, first = slice(piece.first, piece.first + piece.count), slots[piece.first]
            buffers = [self._buffer_of(page) for page in pages[at]]
            if len(buffers[0]) > PIECE_BYTES:
                causes[piece.first], checksums[piece.first] = self._fetch_large(first, buffers[0])
            elif self._segments.read_pages(first, buffers):
                checksums[at] = map(page_checksum, buffers)
            else:
                causes[at] = [
                    self._segments.read_page(slot, page) for slot, page in zip(slots[at], buffers, strict=True)
                ]
                checksums[at] = map(page_checksum, buffers)
        found = verify_headers(self._segments, keys, slots, checksums)
        return [cause or proof for cause, proof in zip(causes, found, strict=True)]

    def _fetch_large(self, slot: int, page: memoryview) -> tuple[str, bytes]:
        checksum = xxhash.xxh3_128()
        for first in range(0, len(page), PIECE_BYTES):
            part = page[first : first + PIECE_BYTES]
            if cause := self._segments.read_page(slot, part, first):
                return cause, NO_CHECKSUM
            checksum.update(part)
        return "", checksum.digest()

    def _store(self, keys: Sequence[bytes], slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        causes = [""] * len(slots)
        checksums = [NO_CHECKSUM] * len(slots)
        for piece in self._pieces(slots):
            at, first = slice(piece.first, piece.first + piece.count), slots[piece.first]
            buffers = [self._buffer_of(page) for page in pages[at]]
            if len(buffers[0]) > PIECE_BYTES:
                causes[piece.first], checksums[piece.first] = self._store_large(first, buffers[0])
                continue
            checksums[at] = map(page_checksum, buffers)
            if not self._segments.write_pages(first, buffers):
                causes[at] = [self._store_part(slot, page) for slot, page in zip(slots[at], buffers, strict=True)]
        return seal(self._segments, keys, slots, checksums, causes)

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
            self._segments.write_page(slot, part, first)
        except OSError as error:
            return failure_cause(error)
        return ""

    def _pieces(self, slots: Sequence[int]) -> Iterator[Run]:
        """Cut a batch of slots into pieces of neighbors."""
        for run in slot_runs(slots):
            for first in range(run.first, run.first + run.count, self._pages_at_once):
                yield Run(first, min(self._pages_at_once, run.first + run.count - first))


def seal(
    segments: Segments, keys: Sequence[bytes], slots: Sequence[int], checksums: Sequence[bytes], causes: list[str]
) -> list[str]:
    """Write the headers of those pages that have no cause against it; returns the causes, with what went wrong here."""
    good = [at for at, cause in enumerate(causes) if not cause]
    if not good:
        return causes
    if len(good) < len(slots):
        keys, slots, checksums = [keys[at] for at in good], [slots[at] for at in good], [checksums[at] for at in good]
    cause = write_headers(segments, keys, slots, checksums)
    return [given or cause for given in causes]
