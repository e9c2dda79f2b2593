"""Throttled storage and a throttled prefill worker, for benchmarks of what the core does with slow sources.

Run as a program it is the child of a `PrefillProcess` whose writes are throttled:
`PrefillProcess(order, command=throttled_prefill(bytes_per_s=1e7))`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from tidekv.backends.storage.base import Storage
from tidekv.engine.demo.prefill_process import run_child
from tidekv.states.types import PageIds
from tidekv.transports.base import PeerMemory
from tidekv.transports.nixl.transport import NixlTransport


class Throttle:
    """A line that serves in order at one rate. `bytes_per_s` can be changed for later calls."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def reserve(self, size_bytes: float) -> float:
        """Queue that many bytes; returns when they are through, on the clock of the running loop."""
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self.bytes_per_s
        return self._free_at_s

    async def until(self, at_s: float) -> None:
        """Wait until that time."""
        await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))


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


class ThrottledTransport(NixlTransport):
    """A transport whose writes are throttled together, as by one network card."""

    def __init__(self, *, name: str, bytes_per_s: float) -> None:
        super().__init__(name=name)
        self._throttle = Throttle(bytes_per_s)

    async def write(self, peer: PeerMemory, our_pages: PageIds, their_pages: PageIds) -> int:
        """See `Transport.write`."""
        written = await super().write(peer, our_pages, their_pages)
        await self._throttle.until(self._throttle.reserve(written))
        return written


def throttled_prefill(*, bytes_per_s: float) -> tuple[str, ...]:
    """Return the command of a `PrefillProcess` that sends at this rate."""
    return ("-m", __name__, str(bytes_per_s))


if __name__ == "__main__":
    rate = float(sys.argv[1])
    run_child(int(sys.argv[2]), lambda: ThrottledTransport(name="prefill-0", bytes_per_s=rate))
