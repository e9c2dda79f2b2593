"""One chunk of a call: through the index, the files and the checks, with the cause of each page that fails.

get:  index says where ─▶ pages read, their checksums compared with their headers ─▶ true or a miss
put:  slots reserved ─▶ pages written, checksums taken meanwhile, then headers written ─▶ published
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, TypeVar

from tidekv.backends.storage.calls import Call
from tidekv.backends.storage.counts import Counts
from tidekv.backends.storage.page_io import PageIO
from tidekv.backends.storage.place import Place
from tidekv.states.errors import StorageFailed
from tidekv.states.shapes import PageIds

# What is wrong with the page itself, and not with how it was read: its entry goes, so that it can be put anew.
_BAD_PAGE: Final = ("missing", "truncated", "corrupt", "foreign")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Threads:
    """Who may block: one thread for the index, some for files and checksums."""

    index: Executor
    workers: Executor


class IndexFailed(StorageFailed):
    """The index could not be read or changed; `cause` is how it is counted."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the index cannot be used: {error}")
        code = getattr(error, "sqlite_errorname", "")
        self.cause = {"SQLITE_BUSY": "index busy", "SQLITE_FULL": "no space"}.get(code, "index failed")


class Chunks:
    """Does chunks on an open directory. What it starts does not survive being cancelled: it is shielded outside."""

    def __init__(self, place: Place, io: PageIO, threads: Threads, counts: Counts) -> None:
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
        """Remove pages that are not whole. One that the index no longer has in its slot was removed or replaced by
        another process while it was read: that is no damage, it is missing.
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
        """Read and verify a few pages at once, on the event loop, if the kernel has all of them in memory. False: they
        were not all got, and nothing was decided about any of them.
        """
        slots = list(map(self._slot_by_key.get, keys))
        found = sorted([(slot, at) for at, slot in enumerate(slots) if slot is not None])
        if len(found) < len(keys):
            return False
        in_order = [slot for slot, _ in found]
        if not self._io.fetch_cached([keys[at] for _, at in found], in_order, [pages[at] for _, at in found]):
            return False
        self._place.index.touched.extend(in_order)
        return True

    async def _fetch(
        self, call: Call, found: list[tuple[int, int]], keys: Sequence[bytes], pages: PageIds, causes: list[str]
    ) -> list[tuple[int, int]]:
        """Read slots into the pages at some positions and note the causes; return those that hold no such page."""
        if not found:
            return []
        # In the order of the files, so that neighbors are read at once, in whatever order they are asked for.
        found.sort()
        slots = [slot for slot, _ in found]
        read = await self._io.fetch(
            [keys[at] for _, at in found], slots, [pages[at] for _, at in found], call.may_start
        )
        for (_, at), cause in zip(found, read, strict=True):
            causes[at] = cause
        if any(read):
            self._place.index.touched.extend(slot for slot, at in found if not causes[at])
            return [(slot, at) for slot, at in found if causes[at] in _BAD_PAGE]
        self._place.index.touched.extend(slots)
        return []

    async def put(self, call: Call, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Write and publish pages; the cause of a failure for each, empty for a stored one.

        The index is changed twice for all of them, since that costs the same for one as for many.
        """
        index = self._place.index
        try:
            slots = await self.on_index(lambda: index.reserve(len(keys)))
        except IndexFailed as error:
            return [error.cause] * len(keys)
        kept = len(slots)
        moved = await self._io.store(keys[:kept], slots, pages[:kept], call.may_start) if kept else []
        good = [at for at in range(kept) if not moved[at]]
        written = [(keys[at], slots[at]) for at in good]
        wasted = [slots[at] for at in range(kept) if moved[at]]
        causes = moved + ["full"] * (len(keys) - kept)
        try:
            done = await self.on_index(lambda: index.publish(written, wasted))
        except IndexFailed as error:
            index.give_up(slots)
            return [given or error.cause for given in causes]
        for at, published in zip(good, done, strict=True):
            # Taken from us meanwhile: the segment was retired, or we were thought dead.
            causes[at] = "" if published else "reservation lost"
        return causes

    async def forget(self, pairs: Sequence[tuple[bytes, int | None]]) -> list[bool]:
        """Remove keys; where a slot is given, only if the key is in it still."""
        try:
            return await self.on_index(lambda: self._place.index.forget(pairs))
        except IndexFailed as error:
            self._counts.failures[error.cause] += len(pairs)
            return [False] * len(pairs)

    async def bring_up(self, work: Callable[[], T]) -> T | None:
        """Do what may as well be done later: if the index cannot now, that is counted, and the next change does it."""
        try:
            return await self.on_index(work)
        except IndexFailed as error:
            self._counts.failures[error.cause] += 1
            return None

    async def on_index(self, work: Callable[[], T]) -> T:
        """Do something with the index; IndexFailed if it could not be done, and nothing was changed."""
        index = self._place.index

        def job() -> T:
            try:
                return work()
            finally:
                self._counts.evictions += index.take_evictions()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads.index, job)
        except (sqlite3.Error, OSError) as error:
            raise IndexFailed(error) from error

    async def on_worker(self, work: Callable[[], T]) -> T:
        """Do something that blocks, but not with the index."""
        return await asyncio.get_running_loop().run_in_executor(self._threads.workers, work)
