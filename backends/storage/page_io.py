"""How pages move between the host pool and slots: the contract of the two ways, and the plain one with threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

from tidekv.backends.storage.base import BufferOf
from tidekv.backends.storage.segments import Segments, failure_cause


class PageIO(Protocol):
    """Moves a chunk of pages. Returns when nothing moves any more, with a cause a page: empty if it went well.

    Not to be cancelled: whoever awaits it is shielded.
    """

    async def read(self, slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Read slots into host pages. Nothing is checked but that all bytes came."""

    async def write(self, slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Write host pages into slots."""

    def forget(self, segments: Sequence[int]) -> None:
        """Let go of the files of some segments, to which nothing moves any more. Blocks."""

    def close(self) -> None:
        """Give everything back. Blocks; nothing may be moving."""


class ThreadIO:
    """Plain preadv and pwrite on worker threads: the way without NIXL, and the one that finds out which page failed."""

    def __init__(self, segments: Segments, buffer_of: BufferOf, workers: Executor) -> None:
        self._segments = segments
        self._buffer_of = buffer_of
        self._workers = workers

    async def read(self, slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Read slots into host pages; see PageIO."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._read, slots, pages)

    async def write(self, slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        """Write host pages into slots; see PageIO."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._write, slots, pages)

    def forget(self, segments: Sequence[int]) -> None:
        """Do nothing: the files are somebody else's."""

    def close(self) -> None:
        """Do nothing: the threads and files are somebody else's."""

    def _read(self, slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        return [self._segments.read_page(slot, self._buffer_of(page)) for slot, page in zip(slots, pages, strict=True)]

    def _write(self, slots: Sequence[int], pages: Sequence[int]) -> list[str]:
        causes = []
        for slot, page in zip(slots, pages, strict=True):
            try:
                self._segments.write_page(slot, self._buffer_of(page))
            except OSError as error:
                causes.append(failure_cause(error))
            else:
                causes.append("")
        return causes
