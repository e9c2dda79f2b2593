"""Storage of an engine, and its exchange while requests run.

No wait here is without a deadline: a store that hangs can be replaced. Its calls in flight keep their host pages until
they end, and it is closed then, or at the engine's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tidekv.backends.storage.base import Neighbors
from tidekv.engine.converted_storage import ConvertedStorage
from tidekv.engine.log import engine_log, own_context
from tidekv.engine.ranks.group import place_of
from tidekv.engine.shared_storage import open_pages, sibling_for
from tidekv.engine.stored_layouts import RankLayout, layout_at, other_layouts
from tidekv.states import events
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, StorageFailed
from tidekv.states.validation import short
from tidekv.transports.tasks import own_cancels_only

if TYPE_CHECKING:
    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.host.pool import HostPool
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.decode.driver import Driver
    from tidekv.engine.decode.executor import Executor
    from tidekv.engine.decode.pending_calls import PendingCalls
    from tidekv.engine.decode.rank_driver import RankDriver
    from tidekv.engine.poller import PollerThread
    from tidekv.engine.ranks.group import RankGroup
    from tidekv.states.core import Core
    from tidekv.states.types import Identity
    from tidekv.transports.base import Transport


class Engine(Protocol):
    """Parts of an engine that an exchange of its storage involves."""

    core: Core
    calls: PendingCalls
    driver: Driver
    front: Driver | RankDriver
    executor: Executor
    host: HostPool | None
    components: dict[str, ComponentPools]
    identity: Identity
    rank_group: RankGroup | None
    storage_poller: PollerThread
    transport: Transport
    is_open: bool


LOG = engine_log("tidekv.engine")

START_S = 300.0
"""Maximum seconds to open the storage that an engine starts with, which may have to rebuild its index."""
CLEAR_S = 60.0
"""Default maximum seconds to clear storage."""


def check_storage(storage: object) -> None:
    """Raise InvalidConfig unless this is a storage engine or None. Engines of third parties inherit from nothing."""
    if storage is not None and not all(callable(getattr(storage, name, None)) for name in ("register", "close")):
        raise InvalidConfig(f"storage must be a URI or a storage engine, not {short(storage)}")


class Opened(NamedTuple):
    """Engines of a storage that was opened: for full pages, and by component."""

    full: Storage | None
    component_pages: dict[str, Storage]


class StorageInUse:
    """The storage engine, if any, and the former ones that are not closed yet."""

    def __init__(self, parts: Engine, first: Storage | None) -> None:
        self.current: Storage | None = None
        """The engine that calls go to: the given one, or one that reads other layouts by way of it."""
        self.component_pages: dict[str, Storage] = {}
        """By component, the engines of components that have host pages."""
        self.retired: list[Storage] = []
        self.place = place_of(parts.rank_group)
        """The rank whose pages these are."""
        self._runtime = parts
        self._first = first
        self.given = first
        """The storage in use, as the caller gave it."""
        self._lock = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    def own_first(self) -> None:
        """Take ownership of the given storage: the engine closes it from now on."""
        self.current = self._first

    async def register_first(self) -> None:
        """Open the storage that the engine was given, if any, and post that to the core. Raises what opening raises,
        StorageFailed if it takes longer than START_S.
        """
        if self._first is not None:
            opening = self._begin_register(self._first)
            self._use(self._first, await _opened(self._first, opening, asyncio.get_running_loop().time() + START_S))
            self._runtime.front.post(self._change(available=True))

    async def swap(self, storage: Storage | None, *, timeout_s: float) -> None:
        """Use this storage, or none, from now on: open the new one, drain the old one, swap, close the old one.

        A new storage that is not open in time raises StorageFailed. Calls of the old one that have not ended in time
        are left behind, with the host pages that they use; it is closed when they end, or with the engine. Any raise
        before the swap, a cancellation too, leaves the old one in use and closes the new one. Raises InvalidRequest for
        the storage that is in use already.
        """
        if storage is not None and self._runtime.host is None:
            raise InvalidConfig("storage needs a host pool: its pages are read into it before they go to the device")
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        async with self._turn(deadline_s):
            old = self.current
            if storage is not None and old is not None and storage is self.given:
                raise InvalidRequest(f"{storage.uri} is attached already")
            opened = await self._prepare(old, storage, deadline_s)
            left = [] if old is None else [old, *self.component_pages.values()]
            self._use(storage, opened)
            if storage is not None:
                self._tell(available=True)
            for engine in left:
                await self._leave(engine.close(), [engine], deadline_s)

    async def clear(self, *, timeout_s: float = CLEAR_S) -> tuple[int, int]:
        """Remove all stored pages. Returns the number of full pages removed, and of pages that may come back.

        Writes in flight are awaited for half of the time, since a later one would store pages again; what slower ones
        store is spared. Pages on the device and the host are stored again at their next use. Raises the errors of the
        engines, and StorageFailed if they take too long; the removal then continues in the background.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        async with self._turn(deadline_s):
            current = self.current
            if current is None:
                return 0, 0
            executor = self._runtime.executor
            self._tell(available=False)
            try:
                await self._drain(current, deadline_s - timeout_s / 2)
                spared = executor.pages_being_stored
                for engine in self.component_pages.values():
                    await _within(engine.clear(), engine.uri, "cleared", deadline_s)
                return await _within(current.clear(), current.uri, "cleared", deadline_s), spared
            finally:
                # To the core, it is another storage: of the former one it believes nothing any more.
                self._tell(available=True)

    def abandon_leaving(self) -> None:
        """Cancel the closing of former engines that hang, at the engine's end."""
        for task in self._leaving:
            task.cancel()

    @asynccontextmanager
    async def _turn(self, deadline_s: float) -> AsyncIterator[None]:
        """One exchange or flush at a time."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._lock.acquire()
        except TimeoutError:
            raise StorageFailed("another exchange or flush of storage has not ended; try again later") from None
        try:
            yield
        finally:
            self._lock.release()

    def _use(self, given: Storage | None, opened: Opened) -> None:
        self.given = given
        self.current, self.component_pages = opened
        self._runtime.executor.use(*opened)

    async def _prepare(self, old: Storage | None, new: Storage | None, deadline_s: float) -> Opened:
        """Open the new storage and drain the old one; on an error, close the new one."""
        parts = self._runtime
        has_warned = False
        opened = Opened(None, {})
        opening = None if new is None else self._begin_register(new)
        try:
            if new is not None and opening is not None:
                opened = await _opened(new, opening, deadline_s)
            if old is not None:
                has_warned = True
                self._tell(available=False)
                await self._drain(old, deadline_s)
            if not parts.is_open:
                raise EngineClosed("the engine was closed while storage was attached")
        except BaseException as error:
            if has_warned:
                self._tell(available=True)
            if new is not None and opening is not None:
                try:
                    await self._leave(_close_unused(new, opening), [new], deadline_s)
                except Exception as failure:
                    error.add_note(f"and closing {new.uri} raised {failure!r}")
            raise
        return opened

    async def _drain(self, old: Storage, deadline_s: float) -> None:
        """Wait until nothing uses the old storage, or until the deadline."""
        parts = self._runtime
        try:
            async with asyncio.timeout_at(deadline_s):
                # With ranks, the core takes the change when all of them do.
                await parts.calls.wait_until(lambda: not parts.core.state.storage_available)
        except TimeoutError:
            raise StorageFailed("not all ranks have attached or detached storage in time") from None
        try:
            async with asyncio.timeout_at(deadline_s):
                await parts.executor.storage_is_quiet()
        except TimeoutError:
            LOG.warning(
                "storage is left with calls in flight, which keep their host pages until they end",
                storage=old.uri,
                calls=parts.executor.storage_calls,
            )

    async def _leave(self, ending: Coroutine[object, object, None], engines: list[Storage], deadline_s: float) -> None:
        """Close unused engines until the deadline, and after that in the background.

        Raises errors of closing that occur before the deadline.
        """
        task = asyncio.get_running_loop().create_task(ending, name=f"closing {engines[0].uri}", context=self._context())
        self.retired += engines
        self._leaving.add(task)
        task.add_done_callback(partial(self._left, engines))
        # At least one turn of the loop: an engine without calls in flight closes in it.
        await asyncio.wait({task}, timeout=max(deadline_s - asyncio.get_running_loop().time(), 0.0))
        if task.done():
            task.result()
            return
        task.add_done_callback(_log_failure)
        LOG.warning("storage is not closed yet: its calls have not ended", storage=engines[0].uri)

    def _context(self) -> Context:
        """Storage outlives the request whose caller may have attached it."""
        return own_context(self._runtime.transport.instance)

    def _left(self, engines: Sequence[Storage], task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled() and task.exception() is None:
            # After an error the engine closes them again at its own end.
            for engine in engines:
                self.retired.remove(engine)

    def _begin_register(self, storage: Storage) -> asyncio.Task[Opened]:
        """Open a storage in its own task: a store that hangs may not even settle when it is cancelled."""
        return asyncio.get_running_loop().create_task(
            self._register(storage), name=f"opening {storage.uri}", context=self._context()
        )

    async def _register(self, storage: Storage) -> Opened:
        """Open a storage for full pages, and one for each component."""
        parts = self._runtime
        assert parts.host is not None
        layout = layout_at(self.place, parts.identity)
        full: Storage = storage
        component_pages: dict[str, Storage] = {}
        try:
            full = await self._open(storage, layout, "", parts.host)
            for name, pools in parts.components.items():
                if pools.host is None:
                    continue
                component_pages[name] = sibling_for(storage, name)
                component_pages[name] = await self._open(component_pages[name], layout, name, pools.host)
            for engine in (full, *component_pages.values()):
                if isinstance(engine, ConvertedStorage):
                    await engine.look()
        except BaseException:
            # The caller closes the storage itself, which an engine in front of it does, too.
            for engine in (*component_pages.values(), *([] if full is storage else [full])):
                await engine.close()
            raise
        return Opened(full, component_pages)

    async def _open(self, storage: Storage, layout: RankLayout, component: str, host: HostPool) -> Storage:
        """Open one engine; return it, or one that reads other layouts by way of it."""
        poller = self._runtime.storage_poller
        await open_pages(storage, host, layout, component, poller=poller, log=LOG)
        layouts, copies = other_layouts(layout, component), layout.ranks // layout.slice(component)[1]
        if copies == 1 and not (layouts and isinstance(storage, Neighbors)):
            return storage
        return ConvertedStorage(storage, host=host, layouts=layouts, copies=copies, poller=poller)

    def _tell(self, *, available: bool) -> None:
        if self._runtime.is_open:
            self._runtime.front.take_now(self._change(available=available))

    def _change(self, *, available: bool) -> events.StorageChanged:
        parts, capacity_pages = self._runtime, 0
        if available and self.current is not None and parts.host is not None:
            capacity_pages = self.current.statistics().capacity_bytes // parts.host.layout.page_bytes
        return events.StorageChanged(
            at_s=parts.driver.clock(),
            available=available,
            component_pages=available and bool(parts.components),
            capacity_pages=capacity_pages,
        )


async def _opened(storage: Storage, opening: asyncio.Task[Opened], deadline_s: float) -> Opened:
    """Wait until a storage is open. Raises errors of opening it, StorageFailed at the deadline."""
    try:
        await asyncio.wait({opening}, timeout=max(deadline_s - asyncio.get_running_loop().time(), 0.0))
    finally:
        if not opening.done():
            opening.cancel()
    if not opening.done():
        raise StorageFailed(f"{storage.uri} was not open in time; it hangs, or needs a longer timeout_s")
    return opening.result()


async def _close_unused(storage: Storage, opening: asyncio.Task[Opened]) -> None:
    """Close a storage that is no longer needed, once opening it has ended."""
    opening.cancel()
    await asyncio.wait({opening})
    opened = Opened(storage, {}) if opening.cancelled() or opening.exception() else opening.result()
    for engine in (*opened.component_pages.values(), opened.full):
        assert engine is not None
        await engine.close()


async def _within(call: Coroutine[object, object, int], uri: str, what: str, deadline_s: float) -> int:
    """Await a call into storage until the deadline; StorageFailed leaves it running."""
    task = asyncio.get_running_loop().create_task(
        own_cancels_only(call, uri), name=f"{uri} {what}", context=own_context()
    )
    try:
        await asyncio.wait({task}, timeout=max(deadline_s - asyncio.get_running_loop().time(), 0.0))
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        return task.result()
    task.add_done_callback(_log_failure)
    raise StorageFailed(f"{uri} was not {what} in time; it goes on")


def _log_failure(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        LOG.error("a task raised", task=task.get_name(), exc_info=error)
