"""One chunk of a call: index, files and checks, with a cause for each page that fails.

get:  look up slots ─▶ read pages, compare their checksums with their headers ─▶ hit or miss
put:  reserve slots ─▶ write pages, take checksums meanwhile, then write headers ─▶ publish
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, TypeVar

from tidekv.backends.storage.calls import Call
from tidekv.backends.storage.file.directory import Directory
from tidekv.backends.storage.file.page_io import PageIO
from tidekv.backends.storage.file.segments import NO_SPACE
from tidekv.backends.storage.stats import StorageCounters
from tidekv.states.errors import StorageFailed
from tidekv.states.types import PageIds

# Causes that concern the page itself, not the read: its entry is removed, so that it can be put again.
_BAD_PAGE: Final = ("missing", "truncated", "corrupt", "foreign")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads that may block: one for the index, some for files and checksums."""

    index: Executor
    workers: Executor


class IndexFailed(StorageFailed):
    """The index could not be read or changed; `cause` is the name of its counter."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the index cannot be used: {error}")
        code = getattr(error, "sqlite_errorname", "")
        self.cause = {"SQLITE_BUSY": "index busy", "SQLITE_FULL": NO_SPACE}.get(code, "index failed")


class BatchIO:
    """Runs chunks on an open directory. Callers shield it: work that it has started must not be cancelled."""

    def __init__(self, place: Directory, io: PageIO, threads: Threads, counts: StorageCounters) -> None:
        self._place = place
        self._io = io
        self._threads = threads
        self._counts = counts
        self._slot_by_key = place.index.mirror.slot_by_key

    async def get(self, call: Call, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Read and verify pages; the cause of a miss for each, empty for a hit."""
        causes = ["missing"] * len(keys)
        slots = list(map(self._slot_by_key.get, keys))
        found = [(slot, at) for at, slot in enumerate(slots) if slot is not None]
        bad = await self._fetch(call, found, keys, pages, causes)
        if bad:
            await self._forget_bad(bad, keys, causes)
            # The mirror is current now: a page that another process replaced is in another slot.
            moved = [(new, at) for old, at in bad if (new := self._slot_by_key.get(keys[at])) not in (None, old)]
            bad = await self._fetch(call, moved, keys, pages, causes)
            if bad:
                await self._forget_bad(bad, keys, causes)
        return causes

    async def _forget_bad(self, bad: list[tuple[int, int]], keys: Sequence[bytes], causes: list[str]) -> None:
        """Remove pages that are not whole. If the index no longer has a page in its slot, another process removed or
        replaced it during the read: that is a miss, not damage.
        """
        try:
            removed = await self.on_index(lambda: self._place.index.forget([(keys[at], slot) for slot, at in bad]))
        except IndexFailed as error:
            self._counts.failures[error.cause] += len(bad)
            return
        for (_, at), was_there in zip(bad, removed, strict=True):
            if not was_there:
                causes[at] = "missing"

    def get_cached(self, keys: Sequence[bytes], pages: PageIds) -> bool:
        """Read and verify a few pages at once, on the event loop, if the kernel has all of them in memory. False: at
        least one could not be read, and nothing was decided about any of them.
        """
        slots = list(map(self._slot_by_key.get, keys))
        found = sorted([(slot, at) for at, slot in enumerate(slots) if slot is not None])
        if len(found) < len(keys):
            return False
        in_order = [slot for slot, _ in found]
        if not self._io.fetch_cached([keys[at] for _, at in found], in_order, [pages[at] for _, at in found]):
            return False
        self._place.index.touch(in_order)
        return True

    async def _fetch(
        self, call: Call, found: list[tuple[int, int]], keys: Sequence[bytes], pages: PageIds, causes: list[str]
    ) -> list[tuple[int, int]]:
        """Read slots into the pages at the given positions and note the causes; returns the slots that hold no such
        page.
        """
        if not found:
            return []
        # In file order, so that neighbors are one read whatever the order of the request.
        found.sort()
        slots = [slot for slot, _ in found]
        read = await self._io.fetch(
            [keys[at] for _, at in found], slots, [pages[at] for _, at in found], call.may_start
        )
        for (_, at), cause in zip(found, read, strict=True):
            causes[at] = cause
        if any(read):
            self._place.index.touch(slot for slot, at in found if not causes[at])
            return [(slot, at) for slot, at in found if causes[at] in _BAD_PAGE]
        self._place.index.touch(slots)
        return []

    async def put(self, call: Call, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Write and publish pages; the cause of a failure for each, empty for a stored one.

        Pages for which the disk has no space are written once more, in the place of older ones.
        """
        causes = await self._put(call, keys, pages)
        full = [at for at, cause in enumerate(causes) if cause == NO_SPACE]
        if full and call.may_start():
            self._place.index.note_disk_full()
            again = await self._put(call, [keys[at] for at in full], [pages[at] for at in full])
            for at, cause in zip(full, again, strict=True):
                causes[at] = cause
        return causes

    async def _put(self, call: Call, keys: Sequence[bytes], pages: Sequence[int]) -> list[str]:
        """Write and publish pages, with the cause of each failure.

        The index changes twice for the whole chunk, since a change costs the same for one page as for many.
        """
        index = self._place.index
        try:
            slots = await self.on_index(lambda: index.reserve(len(keys)))
        except IndexFailed as error:
            return [error.cause] * len(keys)
        kept = len(slots)
        moved = await self._io.store(keys[:kept], slots, pages[:kept], call.may_start) if kept else []
        without_cause = [at for at in range(kept) if not moved[at]]
        written = [(keys[at], slots[at]) for at in without_cause]
        wasted = [slots[at] for at in range(kept) if moved[at]]
        causes = moved + ["full"] * (len(keys) - kept)
        try:
            done = await self.on_index(lambda: index.publish(written, wasted))
        except IndexFailed as error:
            index.give_up(slots)
            return [given or error.cause for given in causes]
        for at, published in zip(without_cause, done, strict=True):
            # Another process took the slot: the segment was retired, or this writer was considered dead.
            causes[at] = "" if published else "reservation lost"
        return causes

    async def forget(self, pairs: Sequence[tuple[bytes, int | None]]) -> list[bool]:
        """Remove keys; if a slot is given, only if the key is still in it."""
        try:
            return await self.on_index(lambda: self._place.index.forget(pairs))
        except IndexFailed as error:
            self._counts.failures[error.cause] += len(pairs)
            return [False] * len(pairs)

    async def bring_up(self, work: Callable[[], T]) -> T | None:
        """Do work that may as well be done later: if the index is not available now, that is counted, and the next
        change does it.
        """
        try:
            return await self.on_index(work)
        except IndexFailed as error:
            self._counts.failures[error.cause] += 1
            return None

    async def on_index(self, work: Callable[[], T]) -> T:
        """Run work on the index's thread. Raises IndexFailed, with nothing changed."""
        index = self._place.index

        def job() -> T:
            try:
                return index.with_room(work)
            finally:
                self._counts.evictions += index.take_evictions()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads.index, job)
        except (sqlite3.Error, OSError) as error:
            raise IndexFailed(error) from error

    async def on_worker(self, work: Callable[[], T]) -> T:
        """Run blocking work that does not use the index."""
        return await asyncio.get_running_loop().run_in_executor(self._threads.workers, work)
