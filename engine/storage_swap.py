"""The storage that an engine uses, and how it is exchanged while requests go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidekv.backends.keys import storage_namespace
from tidekv.states import events
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.parts import Parts


class StorageInUse:
    """One storage engine or none, and those that were left and are not closed yet."""

    def __init__(self, parts: Parts, first: Storage | None) -> None:
        self.current: Storage | None = None
        self.retired: list[Storage] = []
        self._parts = parts
        self._first = first
        self._lock = asyncio.Lock()

    def own_first(self) -> None:
        """From here on the engine closes the storage that it was given."""
        self.current = self._first

    async def register_first(self) -> None:
        """Open the storage that the engine was given, if any, and tell the core. Raises what opening it raises."""
        if self._first is not None:
            await self._register(self._first)
            self._parts.effects.storage = self._first
            self._parts.front.post(events.StorageChanged(at_s=self._parts.driver.clock(), available=True))

    async def swap(self, storage: Storage | None) -> None:
        """Use this storage, or none, from now on: open the new one, drain the old one, swap, close the old one.

        Whatever raises before the swap, a cancellation too, leaves the old one in use and closes the new one.
        Raises InvalidRequest for the one that is in use already.
        """
        if storage is not None and self._parts.host is None:
            raise InvalidConfig("storage needs a host pool: its pages land there before they go to the device")
        async with self._lock:
            old = self.current
            if storage is not None and storage is old:
                raise InvalidRequest(f"{storage.uri} is attached already")
            await self._prepare(old, storage)
            self.current = self._parts.effects.storage = storage
            if storage is not None:
                self._tell(available=True)
            if old is not None:
                # Should closing be cut off, the engine's own end closes it once more.
                self.retired.append(old)
                await old.close()
                self.retired.remove(old)

    async def _prepare(self, old: Storage | None, new: Storage | None) -> None:
        """Open the new one and drain the old one; all of it, or nothing and the new one closed."""
        parts = self._parts
        is_told = False
        try:
            if new is not None:
                await self._register(new)
            if old is not None:
                is_told = True
                self._tell(available=False)
                # With ranks, the core hears of it when all of them do.
                await parts.calls.wait_until(lambda: not parts.core.books.storage_available)
                await parts.effects.storage_is_quiet()
            if not parts.is_open:
                raise EngineClosed("the engine was closed while storage was attached")
        except BaseException:
            if is_told:
                self._tell(available=True)
            if new is not None:
                await new.close()
            raise

    async def _register(self, storage: Storage) -> None:
        parts = self._parts
        assert parts.host is not None
        group = parts.rank_group
        place = {} if group is None else {"rank": group.rank, "ranks": group.ranks}
        namespace = storage_namespace(parts.identity, **place)
        await storage.register(parts.host.memory, parts.host.page, namespace=namespace, poller=parts.storage_poller)

    def _tell(self, *, available: bool) -> None:
        if self._parts.is_open:
            at_s = self._parts.driver.clock()
            self._parts.front.take_now(events.StorageChanged(at_s=at_s, available=available))
