"""Watch for pages that storage has evicted, so that KV events do not name them any longer.

Storage says how many pages it has evicted, not which. After each change of that number the published pages are looked
up, a part each second. What other processes evict is noticed when a request asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tidekv.backends.storage.base import Storage
from tidekv.engine.kv_events.content import KVContent
from tidekv.engine.kv_events.watcher import KVEventWatcher
from tidekv.engine.log import engine_log
from tidekv.transports.tasks import own_cancels_only

LOG = engine_log("tidekv.kv_events")
PERIOD_S: Final = 1.0
PART_PAGES: Final = 4096
"""Pages that are looked up in each period."""
LOOK_UP_S: Final = 5.0


class StoredPagesSweep:
    """Looks up published pages while storage evicts. `storage` and `watcher` return those in use."""

    def __init__(self, storage: Callable[[], Storage | None], watcher: Callable[[], KVEventWatcher | None]) -> None:
        self._storage = storage
        self._watcher = watcher
        self._seen: tuple[str, int] = ("", 0)
        """The storage and its evictions when the present round began."""
        self._at: int | None = None
        """The next position of the round under way."""

    async def run(self) -> None:
        """Look up parts until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.look()
            except Exception as error:
                # The next period tries the same part again; the breaker of the core counts what requests run into.
                LOG.debug("published pages could not be looked up in storage", cause=f"{type(error).__name__}: {error}")

    async def look(self) -> None:
        """Look up the next part, if storage has evicted pages."""
        storage, watcher = self._storage(), self._watcher()
        if storage is None or watcher is None:
            return
        if self._at is None:
            now = storage.uri, storage.statistics().evictions
            if now == self._seen:
                return
            # A round that begins with another storage has nothing to find, since its pages are all new.
            self._seen, self._at = now, 0 if now[1] else None
        if self._at is None:
            return
        digests, has_more = await self._part(watcher, self._at)
        there = await own_cancels_only(storage.exists(digests, timeout_s=LOOK_UP_S), "storage") if digests else []
        if storage is not self._storage():
            self._at = None
            return
        watcher.storage_lacks([digest for digest, has in zip(digests, there, strict=True) if not has])
        self._at = self._at + PART_PAGES if has_more else None

    async def _part(self, watcher: KVEventWatcher, first: int) -> tuple[list[bytes], bool]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[list[bytes], bool]] = loop.create_future()

        def delivered(part: tuple[list[bytes], bool]) -> None:
            if not found.done():
                found.set_result(part)

        def taken(content: KVContent) -> None:
            part = content.digests_in_storage(first, PART_PAGES)
            loop.call_soon_threadsafe(delivered, part)

        watcher.look(taken)
        async with asyncio.timeout(PERIOD_S):
            return await found
