"""The storage that an engine uses, and how it is exchanged while requests go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from tidekv.backends.keys import component_namespace, storage_namespace
from tidekv.backends.storage.siblings import Siblings
from tidekv.states import events
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.host import HostPool
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.calls import Calls
    from tidekv.engine.driver import Driver
    from tidekv.engine.effects import Effects
    from tidekv.engine.poller import PollerThread
    from tidekv.engine.rank_driver import RankDriver
    from tidekv.engine.rank_group import RankGroup
    from tidekv.states.core import Core
    from tidekv.states.shapes import Identity


class Engine(Protocol):
    """The parts of an engine that an exchange of its storage concerns."""

    core: Core
    calls: Calls
    driver: Driver
    front: Driver | RankDriver
    effects: Effects
    host: HostPool | None
    components: dict[str, ComponentPools]
    identity: Identity
    rank_group: RankGroup | None
    storage_poller: PollerThread
    is_open: bool


class StorageInUse:
    """One storage engine or none, and those that were left and are not closed yet."""

    def __init__(self, parts: Engine, first: Storage | None) -> None:
        self.current: Storage | None = None
        self.tails: dict[str, Storage] = {}
        """Beside it, by component, the engines of those that have host pages."""
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
            tails = await self._register(self._first)
            self._use(self._first, tails)
            at_s = self._parts.driver.clock()
            self._parts.front.post(events.StorageChanged(at_s=at_s, available=True, tails=bool(self._parts.components)))

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
            tails = await self._prepare(old, storage)
            left = [] if old is None else [old, *self.tails.values()]
            self._use(storage, tails)
            if storage is not None:
                self._tell(available=True)
            # Should closing be cut off, the engine's own end closes them once more.
            self.retired += left
            for engine in left:
                await engine.close()
                self.retired.remove(engine)

    def _use(self, storage: Storage | None, tails: dict[str, Storage]) -> None:
        self.current = self._parts.effects.storage = storage
        self.tails = tails
        self._parts.effects.tails.storages = tails

    async def _prepare(self, old: Storage | None, new: Storage | None) -> dict[str, Storage]:
        """Open the new one and drain the old one; all of it, or nothing and the new one closed. Returns the engines of
        components beside the new one.
        """
        parts = self._parts
        is_told = False
        tails: dict[str, Storage] = {}
        try:
            if new is not None:
                tails = await self._register(new)
            if old is not None:
                is_told = True
                self._tell(available=False)
                # With ranks, the core hears of it when all of them do.
                await parts.calls.wait_until(lambda: not parts.core.state.storage_available)
                await parts.effects.storage_is_quiet()
            if not parts.is_open:
                raise EngineClosed("the engine was closed while storage was attached")
        except BaseException:
            if is_told:
                self._tell(available=True)
            for engine in (new, *tails.values()):
                if engine is not None:
                    await engine.close()
            raise
        return tails

    async def _register(self, storage: Storage) -> dict[str, Storage]:
        """Open a storage for full pages, and one beside it for each component."""
        parts = self._parts
        assert parts.host is not None
        group = parts.rank_group
        place = {} if group is None else {"rank": group.rank, "ranks": group.ranks}
        namespace = storage_namespace(parts.identity, **place)
        poller = parts.storage_poller
        await storage.register(parts.host.memory, parts.host.page, namespace=namespace, poller=poller)
        tails: dict[str, Storage] = {}
        try:
            for name, pools in parts.components.items():
                if pools.host is None:
                    continue
                if not isinstance(storage, Siblings):
                    raise InvalidConfig(
                        f"{storage.uri} cannot hold component {name!r}: it makes no engine for pages of another size;"
                        " see tidekv.backends.storage.siblings"
                    )
                tails[name] = storage.sibling()
                theirs = component_namespace(namespace, name)
                await tails[name].register(pools.host.memory, pools.host.page, namespace=theirs, poller=poller)
        except BaseException:
            for engine in tails.values():
                await engine.close()
            raise
        return tails

    async def clear(self) -> int:
        """Forget all that is stored; returns how many full pages there were. Raises what the engines raise."""
        for engine in self.tails.values():
            await engine.clear()
        return 0 if self.current is None else await self.current.clear()

    def _tell(self, *, available: bool) -> None:
        if self._parts.is_open:
            at_s = self._parts.driver.clock()
            tails = available and bool(self._parts.components)
            self._parts.front.take_now(events.StorageChanged(at_s=at_s, available=available, tails=tails))
