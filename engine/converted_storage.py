"""Storage of one rank that also reads pages which instances of another number of ranks stored.

A page is stored as its writer holds it, and nothing is read twice or copied if reader and writer have as many ranks. A
key that is missing in the rank's own namespace is looked up in those of the other layouts (`stored_layouts`). A page
of another layout counts as there if all its sources have it, and as read if all of them were read and verified; then
this rank's slices are copied from staging pages to the host page:

    namespace of writer 0 ── get_into ──▶ staging page ──┐
                                                         ├── copy of slices ──▶ host page of this rank
    namespace of writer 1 ── get_into ──▶ staging page ──┘

Nothing is ever written to another layout. Engines for it are opened once the place has its namespaces, which is asked
when storage is attached, and after that when a look-up misses. Staging pages belong to one read until it has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from tidekv.backends.copies.slice_moves import SliceCopier
from tidekv.backends.host.pool import HostPool
from tidekv.backends.storage.base import Neighbors, StorageStatistics, Verdict, prefix_of, touch
from tidekv.backends.storage.calls import Call, Calls, all_settled
from tidekv.engine.log import engine_log
from tidekv.engine.stored_layouts import Source, StoredLayout
from tidekv.states.errors import InvalidConfig, InvalidRequest, OutOfMemory, StorageFailed
from tidekv.states.types import PageIds, PoolMemory, page_ids
from tidekv.transports.slices import exchange_of, pieces_of

if TYPE_CHECKING:
    from tidekv.backends.base import Poller
    from tidekv.backends.storage.base import BufferOf, Storage

LOG = engine_log("tidekv.engine")
T = TypeVar("T")
LOOK_S: Final = 5.0
"""Minimum seconds between two questions for layouts that were not there yet."""
STAGING_BYTES: Final = 8 << 20
"""Bytes of one batch of staging pages, over all sources of a layout."""
BATCHES: Final = 2
"""Batches of a layout that are read at once, so that one is read while the slices of another are copied."""


class LookUp(Protocol):
    """A way to ask an engine for keys: with or without noting that their pages are in use."""

    def __call__(
        self, storage: Storage, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes]
    ) -> Coroutine[object, object, list[bool]]:
        """Return which keys are probably there."""
        ...


class OpenSource:
    """One source of an open layout: its engine, and the way from its pages to the host pages."""

    def __init__(self, source: Source, storage: Storage, *, host: HostPool, copier: SliceCopier, pages: int) -> None:
        """`pages` is the number of staging pages."""
        self.storage = storage
        self.namespace = source.namespace
        self._host = host
        theirs = pieces_of(host.memory, host.layout.pieces)
        # Whole pages are read in place; they need no staging.
        sizes = [(cut.ours, cut.theirs, cut.rows * cut.row_bytes) for cut in source.cuts]
        pieces = source.layout.pieces
        self.is_whole = sizes == [(at, at, size) for at, size in enumerate(pieces)] and pieces == host.layout.pieces
        self.staging = host if self.is_whole else HostPool.allocate(source.layout, pages, pin=False)
        ours = pieces_of(self.staging.memory, pieces)
        exchange = exchange_of(source.cuts, ours=ours, theirs=theirs)
        self.copy = copier.copying(exchange.ours, exchange.theirs)

    async def register(self, poller: Poller) -> None:
        """Open the engine. Raises what it raises."""
        pool = self.staging
        await self.storage.register(pool.memory, pool.page, namespace=self.namespace, poller=poller)


class OpenLayout:
    """Pages of one other layout, which can be read."""

    def __init__(
        self, layout: StoredLayout, engines: Sequence[Storage], *, host: HostPool, copier: SliceCopier
    ) -> None:
        """`engines` are those of the sources, not opened yet."""
        self.width = layout.width
        page_bytes = sum(source.layout.page_bytes for source in layout.sources)
        self._batch_pages = max(STAGING_BYTES // page_bytes, 1)
        self.sources = [
            OpenSource(source, engine, host=host, copier=copier, pages=BATCHES * self._batch_pages)
            for source, engine in zip(layout.sources, engines, strict=True)
        ]
        count = self._batch_pages
        self._free = [page_ids(range(first, first + count)) for first in range(0, BATCHES * count, count)]
        self._limit = asyncio.Semaphore(BATCHES)

    async def look_up(
        self, ask: LookUp, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        """Return which keys all sources probably have."""
        answers = await _all_of(
            ask(source.storage, keys, timeout_s=timeout_s, prefix_keys=prefix_keys) for source in self.sources
        )
        return [all(flags) for flags in zip(*answers, strict=True)]

    async def get_into(
        self, call: Call, keys: Sequence[bytes], pages: PageIds, *, prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        """Read pages and copy our slices to these host pages; True for each that is there, whole."""
        valid = [False] * len(keys)
        if len(self.sources) == 1 and self.sources[0].is_whole:
            storage = self.sources[0].storage
            above = prefix_of(storage, prefix_keys)
            return await storage.get_into(keys, pages, timeout_s=_left_s(call), **above)
        firsts = iter(range(0, len(keys), self._batch_pages))

        async def lane() -> None:
            for first in firsts:
                if not await call.start(self._limit):
                    return
                staged = self._free.pop()
                try:
                    part = slice(first, first + self._batch_pages)
                    above = [*prefix_keys, *keys[:first]]
                    ours = staged[: len(keys[part])]
                    valid[part] = await self._get_batch(call, keys[part], pages[part], ours, above)
                finally:
                    self._free.append(staged)
                    self._limit.release()

        await all_settled(lane() for _ in range(min(BATCHES, -(-len(keys) // self._batch_pages))))
        return valid

    async def _get_batch(
        self, call: Call, keys: Sequence[bytes], pages: PageIds, staged: PageIds, prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        reads = (
            source.storage.get_into(keys, staged, timeout_s=_left_s(call), **prefix_of(source.storage, prefix_keys))
            for source in self.sources
        )
        whole = [all(flags) for flags in zip(*await _all_of(reads), strict=True)]
        # Only pages that every source had: a host page must not have slices of different ages.
        sources = page_ids(page for page, is_whole in zip(staged, whole, strict=True) if is_whole)
        targets = page_ids(page for page, is_whole in zip(pages, whole, strict=True) if is_whole)
        for source in self.sources if targets else []:
            await source.copy(sources, targets)
        return whole


class ConvertedStorage:
    """A `Storage` for one rank's pages that is registered already; the owner closes it, and with it `storage`.

    Calls of its own namespace go to `storage`. Its methods raise what `Storage` says.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        host: HostPool,
        layouts: Sequence[StoredLayout],
        copies: int,
        poller: Poller,
    ) -> None:
        """Open nothing. `copies` is the number of ranks that store the same pages."""
        self.storage = storage
        self.uri = storage.uri
        self._host = host
        self._waiting = list(layouts) if isinstance(storage, Neighbors) else []
        self._layouts: list[OpenLayout] = []
        self._copies = copies
        self._poller = poller
        self._copier = SliceCopier()
        self._calls = Calls(self.uri)
        self._looking: asyncio.Task[None] | None = None
        self._looked_at_s = float("-inf")
        self._converted = 0

    async def register(self, pool: PoolMemory, buffer_of: BufferOf, *, namespace: bytes, poller: Poller) -> None:
        """Raise InvalidRequest: it has a pool already."""
        raise InvalidRequest(f"{self.uri} has a pool already; open another engine for another pool")

    async def look(self) -> None:
        """Open the other layouts that the place has by now. A failure is logged, and they are looked for again."""
        self._begin_look()
        looking = self._looking
        if looking is not None:
            # Never cancelled: engines that are being opened would be left without an owner.
            await asyncio.wait({looking})
            # Not `self._looking`: another caller may have begun the next look meanwhile.
            looking.result()

    @property
    def takes_prefix_keys(self) -> bool:
        """Whether the engine does; see TakesPrefixKeys."""
        return bool(getattr(self.storage, "takes_prefix_keys", False))

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes] = ()) -> list[bool]:
        """Return which keys are there in any layout."""
        return await self._look_up(_exists, keys, timeout_s, prefix_keys)

    async def touch(self, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes] = ()) -> list[bool]:
        """Note which pages are in use, in each layout that they are in; see Touches."""
        return await self._look_up(touch, keys, timeout_s, prefix_keys)

    async def _look_up(
        self, ask: LookUp, keys: Sequence[bytes], timeout_s: float, prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        call = Call(timeout_s)
        found = await ask(self.storage, keys, timeout_s=timeout_s, prefix_keys=prefix_keys)
        if all(found) or not (self._layouts or self._waiting) or self._calls.closed:
            return found
        if time.monotonic() - self._looked_at_s >= LOOK_S:
            # Later look-ups have the answer; this one does not wait for it.
            self._begin_look()
        if not self._layouts or self._calls.closed:
            return found
        return await self._calls.run(lambda call: self._find(ask, call, keys, found, prefix_keys), _left_s(call))

    async def get_into(
        self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float, prefix_keys: Sequence[bytes] = ()
    ) -> list[bool]:
        """Read pages as they are in the rank's own namespace; convert those that only other layouts have."""
        call = Call(timeout_s)
        above = prefix_of(self.storage, prefix_keys)
        valid = await self.storage.get_into(keys, pages, timeout_s=timeout_s, **above)
        # A read that began before the close ends with what it has.
        if all(valid) or not self._layouts or self._calls.closed:
            return valid
        return await self._calls.run(lambda call: self._convert(call, keys, pages, valid, prefix_keys), _left_s(call))

    async def put_from(
        self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float, prefix_keys: Sequence[bytes] = ()
    ) -> list[bool]:
        """Store pages in the rank's own namespace."""
        above = prefix_of(self.storage, prefix_keys)
        if self._copies == 1:
            return await self.storage.put_from(keys, pages, timeout_s=timeout_s, **above)
        # Another rank stores the same pages: one that replaced them would make them miss to their readers meanwhile.
        call = Call(timeout_s)
        stored = await self.storage.exists(keys, timeout_s=timeout_s, **above)
        missing = [at for at, is_there in enumerate(stored) if not is_there]
        if not missing:
            return stored
        above = prefix_of(self.storage, [*prefix_keys, *keys[: missing[0]]])
        put = await self.storage.put_from(
            [keys[at] for at in missing], page_ids(pages[at] for at in missing), timeout_s=_left_s(call), **above
        )
        for at, is_there in zip(missing, put, strict=True):
            stored[at] = is_there
        return stored

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove keys in every layout; True for each that was there."""
        answers = [await engine.delete(keys) for engine in self._engines]
        return [any(flags) for flags in zip(*answers, strict=True)]

    async def clear(self) -> int:
        """Remove every page that this rank could read; returns how many there were in its own namespace."""
        await self.look()
        removed = await self.storage.clear()
        for engine in self._engines[1:]:
            await engine.clear()
        return removed

    async def probe(self) -> None:
        """Raise StorageFailed unless pages could be written and read now, in every layout."""
        for engine in self._engines:
            await engine.probe()

    def verify(self) -> AsyncIterator[Verdict]:
        """Read every page of the rank's own namespace."""
        return self.storage.verify()

    async def close(self) -> None:
        """Refuse further calls, wait for those that run, and close all engines."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.storage.close)
            stack.push_async_callback(self._copier.close)
            # The list that opening a layout may still append to, so not a callback for each.
            stack.push_async_callback(self._close_layouts)
            stack.push_async_callback(self._calls.drain)
            if self._looking is not None:
                stack.push_async_callback(asyncio.wait, {self._looking})

    def statistics(self) -> StorageStatistics:
        """Return the statistics of the rank's own namespace, with the pages that were converted."""
        own = self.storage.statistics()
        read = sum(engine.statistics().read_bytes for engine in self._engines)
        return dataclasses.replace(own, hits=own.hits + self._converted, converted=self._converted, read_bytes=read)

    @property
    def _engines(self) -> list[Storage]:
        return [self.storage, *(source.storage for layout in self._layouts for source in layout.sources)]

    async def _convert(
        self, call: Call, keys: Sequence[bytes], pages: PageIds, valid: list[bool], prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        for layout in self._layouts:
            missing = [at for at, is_valid in enumerate(valid) if not is_valid]
            if not missing or not call.may_start():
                break
            got = await layout.get_into(
                call,
                [keys[at] for at in missing],
                page_ids(pages[at] for at in missing),
                prefix_keys=[*prefix_keys, *keys[: missing[0]]],
            )
            for at, is_valid in zip(missing, got, strict=True):
                valid[at] = is_valid
            self._converted += sum(got)
        return valid

    async def _find(
        self, ask: LookUp, call: Call, keys: Sequence[bytes], found: list[bool], prefix_keys: Sequence[bytes]
    ) -> list[bool]:
        for layout in self._layouts:
            missing = [at for at, is_there in enumerate(found) if not is_there]
            if not missing or not call.may_start():
                break
            above = [*prefix_keys, *keys[: missing[0]]]
            answers = await layout.look_up(
                ask, [keys[at] for at in missing], timeout_s=_left_s(call), prefix_keys=above
            )
            for at, is_there in zip(missing, answers, strict=True):
                found[at] = is_there
        return found

    def _begin_look(self) -> None:
        if self._waiting and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._look(), name=f"looking at {self.uri}")

    async def _look(self) -> None:
        storage = self.storage
        assert isinstance(storage, Neighbors), "nothing is waited for at other engines"
        self._looked_at_s = time.monotonic()
        names = [source.namespace for layout in self._waiting for source in layout.sources]
        try:
            found = dict(zip(names, await storage.have_namespaces(names), strict=True))
            for layout in list(self._waiting):
                if all(found[source.namespace] for source in layout.sources):
                    await self._open(layout, storage)
        except StorageFailed as failed:
            LOG.warning("pages of other numbers of ranks cannot be looked for", storage=self.uri, cause=str(failed))

    async def _open(self, layout: StoredLayout, storage: Neighbors) -> None:
        """Open one layout. One that cannot be read here is given up, and logged."""
        engines: list[Storage] = [storage.sibling() for _ in layout.sources]
        try:
            # In a thread: staging pages are mapped when they are made.
            opened = await asyncio.to_thread(OpenLayout, layout, engines, host=self._host, copier=self._copier)
            await _all_of(source.register(self._poller) for source in opened.sources)
        except BaseException as error:
            await _all_of(engine.close() for engine in engines)
            if not isinstance(error, InvalidConfig | OutOfMemory):
                raise
            LOG.warning("pages of another number of ranks cannot be read", width=layout.width, cause=str(error))
        else:
            self._layouts.append(opened)
        self._waiting.remove(layout)

    async def _close_layouts(self) -> None:
        await _all_of(engine.close() for engine in self._engines[1:])


async def _exists(
    storage: Storage, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes]
) -> list[bool]:
    return await storage.exists(keys, timeout_s=timeout_s, **prefix_of(storage, prefix_keys))


async def _all_of(calls: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Run calls until every one has ended; return their results, or raise the first error. Must not be cancelled."""
    results: dict[int, T] = {}

    async def keep(at: int, call: Coroutine[object, object, T]) -> None:
        results[at] = await call

    if bodies := [keep(at, call) for at, call in enumerate(calls)]:
        await all_settled(bodies)
    return [results[at] for at in range(len(results))]


def _left_s(call: Call) -> float:
    left_s = call.left_s()
    return float("inf") if left_s is None else left_s
