"""Pages as objects of a Mooncake Store, named {prefix}/{namespace}/p/{page key}, each with its header.

After a failed call of Mooncake's, bytes may still arrive. So it never touches host pages: it reads and writes the
memory of a `MooncakeLink`, and pages are copied from there and verified after the copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import mmap
import queue
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np

from tidekv.backends.storage.base import BufferOf, Holding
from tidekv.backends.storage.key_lru import LruPages, key_at_end
from tidekv.backends.storage.mooncake.link import MooncakeLink
from tidekv.backends.storage.mooncake.options import MooncakeOptions, read_mooncake_options
from tidekv.backends.storage.page_header import PageHeader
from tidekv.backends.storage.remote import NO_SERVICE, Limits, RemoteStorage, ServerFailed, as_namespace
from tidekv.backends.storage.stats import StorageCounters
from tidekv.states.errors import InvalidConfig, StorageFailed
from tidekv.states.types import PageIds, PoolMemory

T = TypeVar("T")

DELETE_PAGES: Final = 1000


def open_mooncake(*, authority: str, path: str, options: Mapping[str, object]) -> RemoteStorage:
    """Make the engine of a `mooncake:` URI."""
    if importlib.util.find_spec("mooncake") is None:
        raise InvalidConfig("mooncake: storage needs mooncake-transfer-engine-non-cuda: pip install 'tidekv[mooncake]'")
    settings = read_mooncake_options(authority, path, options)
    host, port = settings.master
    limits = Limits(capacity_bytes=settings.capacity, chunk_bytes=settings.chunk, lanes=settings.clients)
    return RemoteStorage(f"mooncake://{host}:{port}?prefix={settings.prefix}", lambda: MooncakePages(settings), limits)


class MooncakePages(LruPages):
    """The page service of the mooncake: engine; see PageService."""

    def __init__(self, options: MooncakeOptions) -> None:
        super().__init__(delete_max=DELETE_PAGES)
        self._options = options
        self._threads = ThreadPoolExecutor(options.clients, thread_name_prefix="tidekv-mooncake-storage")
        self._links: queue.SimpleQueue[MooncakeLink] = queue.SimpleQueue()
        self._written: dict[bytes, asyncio.Future[None]] = {}
        self._key_lru.complete = True
        self._prefix = ""

    async def open(
        self, envelope: PageHeader, pool: PoolMemory, buffer_of: BufferOf, *, pages_max: int, counts: StorageCounters
    ) -> None:
        """Connect once; the other clients are started when they are needed."""
        self._envelope, self._buffer_of, self._pages_max, self._counts = envelope, buffer_of, pages_max, counts
        self._prefix = f"{self._options.prefix}/{envelope.namespace.hex()}/p/"
        self._slots = max(1, self._options.chunk // envelope.page_bytes)

        def start() -> None:
            count = range(self._options.clients)
            links = [MooncakeLink(self._options, slots=self._slots, slot_bytes=envelope.value_bytes) for _ in count]
            links[0].start()
            for link in links:
                self._links.put(link)

        await asyncio.get_running_loop().run_in_executor(self._threads, start)

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the master."""
        return await self._on_link(lambda link: link.exist(self._names(keys)))

    async def get(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Read pages, and copy those that are whole into the pool."""
        causes = await self._causes(
            len(keys), lambda link: self._read(link, keys, lambda at: self._buffer_of(pages[at]))
        )
        await self._note_reads(keys, causes)
        return causes

    async def put(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Store pages."""

        def write(link: MooncakeLink) -> list[str]:
            for key, page, value in zip(keys, pages, link.values, strict=False):
                self._envelope.wrap(key, self._buffer_of(page), value)
            return link.write(self._names(keys), self._envelope.value_bytes)

        async with self._writing(keys):
            return await self._causes(len(keys), write)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove pages."""
        gone = await self._on_link(lambda link: link.remove(self._names(keys))) if keys else []
        self._key_lru.gone(keys)
        return gone

    async def clear(self) -> int:
        """Remove all pages of the namespace, including those of other processes."""
        removed = await self._on_link(lambda link: link.remove_below(self._prefix))
        self._key_lru.gone(list(self._key_lru))
        return removed

    async def probe(self) -> None:
        """Store an object and read it back: the store's own health check is not reliable."""
        name = [f"{self._prefix.removesuffix('p/')}probe/{uuid.uuid4().hex}"]
        mark = uuid.uuid4().bytes

        def try_out(link: MooncakeLink) -> None:
            link.values[0][: len(mark)] = mark
            causes: list[int | str] = [*link.write(name, len(mark))]
            if causes == [""]:
                link.values[0][: len(mark)] = bytes(len(mark))
                causes = link.read(name, len(mark))
                link.remove(name)
            if causes != [len(mark)]:
                raise ServerFailed(str(causes[0]), "the store did not take and give back an object")
            if link.values[0][: len(mark)] != mark:
                raise StorageFailed("the store does not give back what was stored just now")

        await self._on_link(try_out)

    async def stored(self) -> AsyncIterator[Sequence[bytes]]:
        """Yield the keys of the namespace as the master lists them, or those that this process knows."""
        names = await self._on_link(lambda link: link.names_below(self._prefix))
        yield list(self._key_lru) if names is None else [key for name in names if (key := key_at_end(name))]

    async def verify(self, keys: Sequence[bytes]) -> list[str]:
        """Read pages into memory of its own."""
        page = np.empty(self._envelope.page_bytes, np.uint8).data
        causes: list[str] = []
        for first in range(0, len(keys), self._slots):
            part = keys[first : first + self._slots]

            def read(link: MooncakeLink, part: Sequence[bytes] = part) -> list[str]:
                return self._read(link, part, lambda _: page)

            causes += await self._causes(len(part), read)
        if NO_SERVICE.intersection(causes):
            raise StorageFailed(self.last_error)
        return causes

    async def set_label(self, label: bytes) -> None:
        """Store nothing: the master may evict any key."""

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        """Return that none is known: the store records objects only."""
        return [False] * len(namespaces)

    async def holdings(self) -> list[Holding]:
        """Count the master's keys by namespace; it does not return their lengths."""

        def look() -> list[Holding]:
            prefix = self._options.prefix + "/"
            names = MooncakeLink(self._options, slots=1, slot_bytes=mmap.PAGESIZE).names_below(prefix)
            if names is None:
                raise InvalidConfig(
                    "mooncake: give the option admin, such as http://master:9003, to list what is there"
                )
            counted = Counter(name.removeprefix(prefix).partition("/p/")[0] for name in names)
            return [
                Holding(namespace=namespace, page_bytes=None, pages=count)
                for digest, count in sorted(counted.items())
                if (namespace := as_namespace(digest)) is not None
            ]

        return await asyncio.get_running_loop().run_in_executor(self._threads, look)

    async def close(self) -> None:
        """End the clients."""

        def end() -> None:
            while not self._links.empty():
                self._links.get().close()

        await asyncio.get_running_loop().run_in_executor(self._threads, end)
        self._threads.shutdown(wait=False)

    def _read(self, link: MooncakeLink, keys: Sequence[bytes], buffer_of: Callable[[int], memoryview]) -> list[str]:
        found = link.read(self._names(keys), self._envelope.value_bytes)
        return [
            one if isinstance(one, str) else self._envelope.unwrap(key, link.values[at][:one], buffer_of(at))
            for at, (key, one) in enumerate(zip(keys, found, strict=True))
        ]

    async def _causes(self, count: int, work: Callable[[MooncakeLink], list[str]]) -> list[str]:
        try:
            causes = await self._on_link(work)
        except ServerFailed as error:
            self.last_error = str(error)
            return [error.cause] * count
        if failed := NO_SERVICE.intersection(causes):
            self.last_error = f"{min(failed)}: the store could not be asked"
        return causes

    async def _delete(self, keys: Sequence[bytes]) -> None:
        await self._on_link(lambda link: link.remove(self._names(keys)))

    @contextlib.asynccontextmanager
    async def _writing(self, keys: Sequence[bytes]) -> AsyncIterator[None]:
        """Wait until no call of this process writes any of these keys: the store refuses the second of two writers."""
        while others := {self._written[key] for key in keys if key in self._written}:
            await asyncio.wait(others)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._written.update(dict.fromkeys(keys, done))
        try:
            yield
        finally:
            done.set_result(None)
            for key in keys:
                del self._written[key]

    async def _on_link(self, work: Callable[[MooncakeLink], T]) -> T:
        def run() -> T:
            link = self._links.get()
            try:
                return work(link)
            finally:
                self._links.put(link)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]
