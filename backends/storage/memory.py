"""The `memory:` engine: pages in this process's memory, for tests and small set-ups.

An engine and its siblings share a place: the pages of each namespace, which are lost when the last of them is closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tidekv.backends.base import Poller
from tidekv.backends.storage.base import (
    BufferOf,
    StorageStatistics,
    Verdict,
    check_keys,
    check_namespace,
    check_pairs,
    check_pool,
    first_distinct,
)
from tidekv.backends.storage.calls import Call, Calls
from tidekv.backends.storage.file.records import page_checksum
from tidekv.backends.storage.options import Size, UriOption, read_options
from tidekv.backends.storage.stats import StorageCounters
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest
from tidekv.states.types import PageIds, PoolMemory

OPTIONS: Final[Mapping[str, UriOption]] = {"capacity": Size()}
CAPACITY_DEFAULT_BYTES: Final = 1 << 30

_Work = Callable[[Call], list[str]]


class _Stored(NamedTuple):
    """A page, and the checksum of its bytes when they were stored."""

    page: npt.NDArray[np.uint8]
    checksum: bytes


def open_memory(*, authority: str, path: str, options: Mapping[str, object]) -> MemoryStorage:
    """Make the engine of a `memory:` URI."""
    if authority or path:
        raise InvalidConfig("a memory: URI names no place; write memory: or memory:?capacity=1GB")
    values = read_options("the memory: engine", options, OPTIONS)
    capacity = values.get("capacity", CAPACITY_DEFAULT_BYTES)
    assert isinstance(capacity, int)
    return MemoryStorage(capacity_bytes=capacity)


_Pages = OrderedDict[bytes, _Stored]


class _Place:
    """The pages of an engine and its siblings."""

    def __init__(self) -> None:
        self.namespaces: dict[bytes, _Pages] = {}
        self.engines = 0
        """Engines that are not closed."""
        # Held for each page: engines of the same namespace have threads of their own.
        self.lock = threading.Lock()


class MemoryStorage:
    """Pages in a dict, at most `capacity_bytes` of a namespace; the least recently used is evicted first."""

    def __init__(self, *, capacity_bytes: int, place: _Place | None = None) -> None:
        self._place = place or _Place()
        self._place.engines += 1
        self.uri = f"memory:?capacity={capacity_bytes}"
        self._capacity_bytes = capacity_bytes
        self._pages: _Pages = OrderedDict()
        self._counts = StorageCounters()
        self._calls = Calls(self.uri)
        # One thread, so that calls take effect one after the other and no page is copied on the loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidekv-memory-storage")
        self._buffer_of: BufferOf | None = None
        self._page_bytes = 0
        self._page_count = 0

    async def register(self, pool: PoolMemory, buffer_of: BufferOf, *, namespace: bytes, poller: Poller) -> None:
        """Prepare the engine; see Storage."""
        if self._calls.closed:
            raise EngineClosed(f"{self.uri} is closed")
        if self._buffer_of is not None:
            raise InvalidRequest(f"{self.uri} has a pool already; open another engine for another pool")
        check_namespace(namespace)
        check_pool(pool)
        if pool.page_bytes > self._capacity_bytes:
            raise InvalidConfig(f"memory: capacity {self._capacity_bytes} holds no page of {pool.page_bytes} bytes")
        self._buffer_of, self._page_bytes, self._page_count = buffer_of, pool.page_bytes, pool.page_count
        self._pages = self._place.namespaces.setdefault(namespace, self._pages)

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Return which keys are there; see Storage."""
        self._ready()
        check_keys(keys)
        return [key in self._pages for key in keys]

    async def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Note that pages are in use; see Touches."""
        self._ready()
        check_keys(keys)

        def touch_all(_: Call) -> list[str]:
            return ["" if was_there else "missing" for was_there in self._note_used(keys)]

        causes = await self._calls.run(lambda call: self._on_thread(call, touch_all), timeout_s)
        return [not cause for cause in causes]

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Read pages; see Storage."""
        buffer_of = self._ready()
        check_pairs(keys, pages, page_count=self._page_count, distinct_pages=True)

        def get_one(key: bytes, page: int) -> str:
            found = self._pages.get(key)
            if found is None:
                return "missing"
            buffer = buffer_of(page)
            np.copyto(np.frombuffer(buffer, np.uint8), found.page)
            # Checked in the host page, so that the copy is covered too.
            if page_checksum(buffer) != found.checksum:
                self._pages.pop(key, None)
                return "corrupt"
            return ""

        def get_all(call: Call) -> list[str]:
            causes = [
                self._locked(get_one, key, page) if call.may_start() else "late"
                for key, page in zip(keys, pages, strict=True)
            ]
            self._note_used([key for key, cause in zip(keys, causes, strict=True) if not cause])
            return causes

        async def body(call: Call) -> list[bool]:
            return self._counts.got(await self._on_thread(call, get_all), self._page_bytes)

        return await self._calls.run(body, timeout_s)

    async def put_from(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Store pages; see Storage."""
        buffer_of = self._ready()
        check_pairs(keys, pages, page_count=self._page_count, distinct_pages=False)

        def put_one(key: bytes, page: int) -> str:
            # numpy copies without holding the interpreter; tobytes() would stop the loop for each page.
            stored = np.empty(self._page_bytes, np.uint8)
            np.copyto(stored, np.frombuffer(buffer_of(page), np.uint8))
            self._pages[key] = _Stored(stored, page_checksum(stored.data))
            # Pages of this call are at the end, so none of them makes room for another one.
            self._pages.move_to_end(key)
            while len(self._pages) * self._page_bytes > self._capacity_bytes:
                self._pages.popitem(last=False)
                self._counts.evictions += 1
            return ""

        fitting = first_distinct(keys, self._capacity_bytes // self._page_bytes)

        def put_all(call: Call) -> list[str]:
            causes = [
                self._locked(put_one, key, page) if call.may_start() else "late"
                for key, page in zip(keys[:fitting], pages[:fitting], strict=True)
            ]
            self._note_used([key for key, cause in zip(keys[:fitting], causes, strict=True) if not cause])
            return causes + ["full"] * (len(keys) - fitting)

        async def body(call: Call) -> list[bool]:
            return self._counts.put(await self._on_thread(call, put_all), self._page_bytes)

        return await self._calls.run(body, timeout_s)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove keys; see Storage."""
        self._ready()
        check_keys(keys)

        def delete_all(_: Call) -> list[str]:
            return ["" if self._pages.pop(key, None) is not None else "missing" for key in keys]

        return [not cause for cause in await self._calls.run(lambda call: self._on_thread(call, delete_all))]

    async def clear(self) -> int:
        """Remove every page; see Storage."""
        self._ready()

        def clear_all(_: Call) -> list[str]:
            with self._place.lock:
                forgotten = [""] * len(self._pages)
                self._pages.clear()
            return forgotten

        return len(await self._calls.run(lambda call: self._on_thread(call, clear_all)))

    def sibling(self) -> MemoryStorage:
        """Make another engine of the same place with the same capacity; see Siblings."""
        return MemoryStorage(capacity_bytes=self._capacity_bytes, place=self._place)

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        """Return which namespaces the place has; see Neighbors."""
        self._ready()
        return [namespace in self._place.namespaces for namespace in namespaces]

    async def probe(self) -> None:
        """Check that the engine is open: memory does not fail."""
        self._ready()

    async def verify(self) -> AsyncIterator[Verdict]:
        """Check each page; see Storage."""
        self._ready()
        for key in list(self._pages):

            def check(_: Call, key: bytes = key) -> list[str]:
                found = self._pages.get(key)
                if found is None:
                    return ["missing"]
                return ["" if page_checksum(found.page.data) == found.checksum else "corrupt"]

            async def body(call: Call, check: _Work = check) -> list[str]:
                return await self._on_thread(call, check)

            (cause,) = await self._calls.run(body)
            # A page that was removed meanwhile is no damage.
            if cause != "missing":
                yield Verdict(key=key, ok=not cause, cause=cause)

    async def close(self) -> None:
        """Wait for the calls that run; the last engine of the place drops its pages. See Storage."""
        is_open = not self._calls.closed
        await self._calls.drain()
        self._thread.shutdown()
        if is_open:
            self._place.engines -= 1
            if not self._place.engines:
                self._place.namespaces.clear()
                self._pages.clear()

    def statistics(self) -> StorageStatistics:
        """Return what the engine holds, and its counters."""
        return self._counts.statistics(
            uri=self.uri,
            pages=len(self._pages),
            used_bytes=len(self._pages) * self._page_bytes,
            capacity_bytes=self._capacity_bytes,
            calls_in_flight=len(self._calls),
        )

    def _ready(self) -> BufferOf:
        if self._calls.closed:
            raise EngineClosed(f"{self.uri} is closed")
        if self._buffer_of is None:
            raise InvalidRequest(f"{self.uri} has no pool yet; register one first")
        return self._buffer_of

    def _note_used(self, keys: Sequence[bytes]) -> list[bool]:
        """Move pages to the end that is evicted last, the first one last of all; returns which are there."""
        with self._place.lock:
            there = [key in self._pages for key in keys]
            for key, is_there in zip(reversed(keys), reversed(there), strict=True):
                if is_there:
                    self._pages.move_to_end(key)
        return there

    def _locked(self, work: Callable[[bytes, int], str], key: bytes, page: int) -> str:
        with self._place.lock:
            return work(key, page)

    async def _on_thread(self, call: Call, work: _Work) -> list[str]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, call)
