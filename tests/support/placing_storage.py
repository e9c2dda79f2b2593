"""Storage engines over memory: one that notes by which prompt pages are placed, and one without siblings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidekv.backends.storage import open_storage
from tidekv.backends.storage.base import Neighbors, Storage, touch
from tidekv.backends.storage.memory import MemoryStorage
from tidekv.states.types import PageIds


class PlacingStorage:
    """Memory that notes, for each call with keys, those of the prompt up to its last page."""

    takes_prefix_keys = True

    def __init__(self, engine: Storage | None = None, calls: list[tuple[str, list[bytes]]] | None = None) -> None:
        """`calls`: where to note them, of an engine's siblings as well."""
        self.engine = engine or open_storage("memory:")
        self.uri = self.engine.uri
        self.calls = [] if calls is None else calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    # Since Python 3.12 `isinstance` with a protocol does not see what `__getattr__` returns.
    def sibling(self) -> PlacingStorage:
        assert isinstance(self.engine, Neighbors)
        return PlacingStorage(self.engine.sibling(), self.calls)

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        assert isinstance(self.engine, Neighbors)
        return await self.engine.have_namespaces(namespaces)

    def _note(self, name: str, prefix_keys: Sequence[bytes], keys: Sequence[bytes]) -> None:
        self.calls.append((name, [*prefix_keys, *keys]))

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes]) -> list[bool]:
        self._note("exists", prefix_keys, keys)
        return await self.engine.exists(keys, timeout_s=timeout_s)

    async def touch(self, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes]) -> list[bool]:
        self._note("touch", prefix_keys, keys)
        return await touch(self.engine, keys, timeout_s=timeout_s)

    async def get_into(
        self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float, prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        self._note("get", prefix_keys, keys)
        return await self.engine.get_into(keys, pages, timeout_s=timeout_s)

    async def put_from(
        self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float, prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        self._note("put", prefix_keys, keys)
        return await self.engine.put_from(keys, pages, timeout_s=timeout_s)


class PlainStorage:
    """An engine that cannot be opened once more: it has what `Storage` asks for, and nothing else."""

    def __init__(self) -> None:
        self._inner = MemoryStorage(capacity_bytes=1 << 20)
        self.uri = "plain:"
        for name in ("register", "exists", "get_into", "put_from", "delete", "clear", "probe", "close", "statistics"):
            setattr(self, name, getattr(self._inner, name))
