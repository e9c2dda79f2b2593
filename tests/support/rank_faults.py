"""Faults on a single rank: in its storage, its copies, its prefill rank, and in the state of its core.

Each rank has a seed of its own: with equal seeds, faults that show only between unequal ranks would stay hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Literal, TypeAlias

from tidekv.states.errors import CopyFailed, StorageFailed

if TYPE_CHECKING:
    from tidekv.backends.copies.copier import LayeredCopy, PageCopier
    from tidekv.backends.storage.base import Storage
    from tidekv.states.core import Core
    from tidekv.states.types import PageIds

Divergence: TypeAlias = Literal["index", "device pool", "host pool"]


class RankFaults:
    """Draws the faults of one rank, and counts them by kind."""

    def __init__(self, rank: int, rate: float) -> None:
        self.random = Random(f"faults of rank {rank}")
        self.counts: dict[str, int] = {}
        self._rate = rate

    def hits(self, kind: str, share: float = 1.0) -> bool:
        """Decide whether a fault of this kind strikes now, at `share` of the common rate."""
        if self.random.random() >= self._rate * share:
            return False
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return True


class FailingStorage:
    """Storage that occasionally fails."""

    def __init__(self, inner: Storage, faults: RankFaults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Look up keys, or raise."""
        if self._faults.hits("storage_fails"):
            raise StorageFailed("injected")
        return await self._inner.exists(keys, timeout_s=timeout_s)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Read pages, or only some of them."""
        flags = await self._inner.get_into(keys, pages, timeout_s=timeout_s)
        if self._faults.hits("storage_is_short"):
            valid = self._faults.random.randrange(len(flags) + 1)
            return [*flags[:valid], *([False] * (len(flags) - valid))]
        return flags


class FailingCopier:
    """Copies that occasionally cannot be started for lack of host memory, or lose their last layer."""

    def __init__(self, inner: PageCopier, faults: RankFaults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def to_device(self, host_pages: PageIds, device_pages: PageIds) -> asyncio.Future[None]:
        """Copy, or raise MemoryError."""
        if self._faults.hits("copy_cannot_start", 0.5):
            raise MemoryError("injected: no staging memory on this rank")
        return self._inner.to_device(host_pages, device_pages)

    def to_device_by_layer(
        self, host_pages: PageIds, device_pages: PageIds, on_layers: Callable[[int], None]
    ) -> LayeredCopy:
        """Copy layer by layer; the last layer takes a while, so that callers begin before it, or fails."""
        copy = self._inner.to_device_by_layer(host_pages, device_pages, on_layers)
        copy.done = asyncio.ensure_future(_end_late(copy.done, fails=self._faults.hits("layer_fails")))
        return copy


async def _end_late(done: asyncio.Future[None], *, fails: bool) -> None:
    await done
    await asyncio.sleep(0.2)
    if fails:
        raise CopyFailed("injected: the last layer did not arrive on this rank")


def plant(core: Core, part: Divergence) -> None:
    """Corrupt the state of one rank behind its core's back. The ranks must detect it, and name the part."""
    if part == "index":
        node = next(node for node in core.state.index.nodes() if node.edge)
        node.served += 1
    else:
        pool = core.state.device if part == "device pool" else core.state.host
        pool.free_pages[0], pool.free_pages[1] = pool.free_pages[1], pool.free_pages[0]
