"""Throttled storage, for benchmarks of what the core does with slow sources."""

from __future__ import annotations

from collections.abc import Sequence

from demo.link import Throttle
from tidekv.backends.storage.base import Storage
from tidekv.states.types import PageIds


class ThrottledStorage:
    """A storage engine whose reads are throttled; all other calls pass."""

    def __init__(self, storage: Storage, throttle: Throttle, *, page_bytes: int) -> None:
        self._storage = storage
        self._throttle = throttle
        self._page_bytes = page_bytes

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """See `Storage.get_into`."""
        through_at_s = self._throttle.reserve(len(keys) * self._page_bytes)
        good = await self._storage.get_into(keys, pages, timeout_s=timeout_s)
        await self._throttle.until(through_at_s)
        return good
