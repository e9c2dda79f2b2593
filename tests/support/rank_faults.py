"""Faults that strike one rank alone: its storage, its copies, its prefill rank, and its books, planted by a test.

Each rank draws its own from a seed of its own: the same seed on all would hide what only unequal ranks show.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Literal, TypeAlias

from tidekv.states.errors import StorageFailed

if TYPE_CHECKING:
    import asyncio

    from tidekv.backends.copies import PageCopier
    from tidekv.backends.storage.base import Storage
    from tidekv.states.core import Core
    from tidekv.states.shapes import PageIds

Divergence: TypeAlias = Literal["index", "device pool", "host pool"]


class RankFaults:
    """Draws faults of one rank, and counts them by kind."""

    def __init__(self, rank: int, rate: float) -> None:
        self.random = Random(f"faults of rank {rank}")
        self.counts: dict[str, int] = {}
        self._rate = rate

    def hits(self, kind: str, share: float = 1.0) -> bool:
        """Whether a fault of this kind strikes now; `share` of the rate of all."""
        if self.random.random() >= self._rate * share:
            return False
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return True


class FailingStorage:
    """Storage that fails now and then."""

    def __init__(self, inner: Storage, faults: RankFaults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Whether each is there; or an error."""
        if self._faults.hits("storage_fails"):
            raise StorageFailed("injected")
        return await self._inner.exists(keys, timeout_s=timeout_s)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Read; or less than that."""
        flags = await self._inner.get_into(keys, pages, timeout_s=timeout_s)
        if self._faults.hits("storage_is_short"):
            good = self._faults.random.randrange(len(flags) + 1)
            return [*flags[:good], *([False] * (len(flags) - good))]
        return flags


class FailingCopier:
    """Copies that cannot be started now and then, for want of host memory."""

    def __init__(self, inner: PageCopier, faults: RankFaults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def to_device(self, host_pages: PageIds, device_pages: PageIds) -> asyncio.Future[None]:
        """Copy; or have no memory for it."""
        if self._faults.hits("copy_cannot_start", 0.5):
            raise MemoryError("injected: no staging memory on this rank")
        return self._inner.to_device(host_pages, device_pages)


def plant(core: Core, part: Divergence) -> None:
    """Change what one rank keeps, behind the back of its core: the ranks must find it, and name the part."""
    if part == "index":
        node = next(node for node in core.state.index.nodes() if node.edge)
        node.served += 1
    else:
        account = core.state.device if part == "device pool" else core.state.host
        account.free_pages[0], account.free_pages[1] = account.free_pages[1], account.free_pages[0]
