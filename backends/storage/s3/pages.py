"""Pages as objects of a bucket.

    {prefix}/{namespace}/meta              page bytes, so that pages of two sizes are never mixed
    {prefix}/{namespace}/p/{page key}      header and page

An object is written whole or not at all, so a page is never half there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from tidekv.backends.storage.base import BufferOf, Holding
from tidekv.backends.storage.calls import all_settled
from tidekv.backends.storage.key_lru import LruPages, key_at_end
from tidekv.backends.storage.label import LABEL_BYTES_MAX
from tidekv.backends.storage.page_header import PageHeader
from tidekv.backends.storage.remote import (
    NO_SERVICE,
    SIZE_DIGITS_MAX,
    Limits,
    RemoteStorage,
    ServerFailed,
    as_namespace,
    page_bytes_of,
)
from tidekv.backends.storage.s3.options import S3Options, read_s3_options
from tidekv.backends.storage.stats import StorageCounters
from tidekv.states.errors import InvalidConfig, StorageFailed
from tidekv.states.types import PageIds, PoolMemory

if TYPE_CHECKING:
    from obstore import ObjectMeta

    from tidekv.backends.storage.s3.link import S3Link
    from tidekv.backends.storage.s3.options import S3Options

T = TypeVar("T")

THREADS: Final = 2
DELETE_OBJECTS: Final = 1000
LISTING_WAIT_S: Final = 2.0


def open_s3(*, authority: str, path: str, options: Mapping[str, object]) -> RemoteStorage:
    """Make the engine of an `s3:` URI."""
    if importlib.util.find_spec("obstore") is None:
        raise InvalidConfig("s3: storage needs obstore: pip install 'tidekv[s3]'")
    settings = read_s3_options(authority, path, options)
    at = "" if settings.endpoint is None else f"?endpoint={settings.endpoint}"
    # A page is a request, so a chunk is a page: the deadline of a call is checked before each.
    limits = Limits(capacity_bytes=settings.capacity, chunk_bytes=1, lanes=settings.connections)
    return RemoteStorage(f"s3://{settings.bucket}/{settings.prefix}{at}", lambda: S3Pages(settings), limits)


class S3Pages(LruPages):
    """The page service of the s3: engine; see PageService."""

    _link: S3Link
    _envelope: PageHeader
    _buffer_of: BufferOf

    def __init__(self, options: S3Options) -> None:
        super().__init__(delete_max=DELETE_OBJECTS)
        self._options = options
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tidekv-s3-storage")
        self._requests = asyncio.Semaphore(options.connections)
        self._listing: asyncio.Task[None] | None = None
        self._closed = False
        self._prefix = ""

    async def open(
        self, envelope: PageHeader, pool: PoolMemory, buffer_of: BufferOf, *, pages_max: int, counts: StorageCounters
    ) -> None:
        """Check that the bucket can be used, and list what is there; a long listing continues in the background."""
        self._envelope, self._buffer_of, self._pages_max, self._counts = envelope, buffer_of, pages_max, counts
        self._prefix = f"{self._options.prefix}/{envelope.namespace.hex()}"

        await self._connect()
        await self._greet()
        self._listing = asyncio.get_running_loop().create_task(self._list_old())
        await asyncio.wait({self._listing}, timeout=LISTING_WAIT_S)

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return what this process knows, and ask for the others as long as some are found.

        Each costs a request. Keys are asked in order, `connections` at a time; a round that finds nothing is the last.
        """
        found = [key in self._key_lru for key in keys]
        unknown = [at for at, known in enumerate(found) if not known]

        async def ask(at: int) -> None:
            found[at] = await self._link.size(self._page(keys[at])) == self._envelope.value_bytes

        for first in range(0, len(unknown), self._options.connections):
            asked = unknown[first : first + self._options.connections]
            await all_settled(ask(at) for at in asked)
            there = [keys[at] for at in asked if found[at]]
            self._key_lru.used(there)
            if not there:
                break
        return found

    async def get(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Read pages into the pool."""

        async def get_one(at: int) -> str:
            return await self._read(keys[at], lambda: self._buffer_of(pages[at]))

        causes = await self._each(len(keys), get_one)
        await self._note_reads(keys, causes)
        return causes

    async def put(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Write pages."""

        async def put_one(at: int) -> str:
            def wrap() -> memoryview:
                value = np.empty(self._envelope.value_bytes, np.uint8).data
                self._envelope.wrap(keys[at], self._buffer_of(pages[at]), value)
                return value

            await self._link.put(self._page(keys[at]), await self._on_thread(wrap))
            return ""

        return await self._each(len(keys), put_one)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove pages. The server does not report what was there, so it is asked before."""
        sizes: list[int | None] = [None] * len(keys)

        async def ask(at: int) -> str:
            sizes[at] = await self._link.size(self._page(keys[at]))
            return ""

        failed = [cause for cause in await self._each(len(keys), ask) if cause]
        there = [key for key, size in zip(keys, sizes, strict=True) if size is not None]
        if failed or not await self._remove(there):
            raise StorageFailed(self.last_error)
        return [size is not None for size in sizes]

    async def clear(self) -> int:
        """Remove all pages of the namespace."""
        removed = 0
        async for keys in self.stored():
            if not await self._remove(keys):
                raise StorageFailed(self.last_error)
            removed += len(keys)
        return removed

    async def probe(self) -> None:
        """Write an object and read it back."""
        name, value = f"{self._prefix}/probe/{uuid.uuid4().hex}", uuid.uuid4().bytes
        await self._link.put(name, value)
        found = await self._link.get(name, bytes_max=len(value))
        if found is None or bytes(found) != value:
            raise StorageFailed("the server does not give back what was written just now")
        await self._link.delete([name])

    async def set_label(self, label: bytes) -> None:
        """Store the label of the namespace unless it has one."""
        try:
            if await self._link.size(f"{self._prefix}/label") is None:
                await self._link.put(f"{self._prefix}/label", label)
        except ServerFailed as error:
            raise StorageFailed(f"the label cannot be stored: {error}") from error

    async def stored(self) -> AsyncIterator[Sequence[bytes]]:
        """Yield the keys of the namespace as the server lists them."""
        parts = self._link.list(f"{self._prefix}/p/")
        while (part := await self._on_thread(lambda: next(parts, None))) is not None:
            yield [key for found in part if (key := key_at_end(found["path"]))]

    async def verify(self, keys: Sequence[bytes]) -> list[str]:
        """Read pages into memory of its own."""

        async def read_one(at: int) -> str:
            page = np.empty(self._envelope.page_bytes, np.uint8).data
            return await self._read(keys[at], lambda: page)

        causes = await self._each(len(keys), read_one)
        if NO_SERVICE.intersection(causes):
            raise StorageFailed(self.last_error)
        return causes

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        """Ask for the size of pages that each namespace was opened with; each costs a request."""
        found = [False] * len(namespaces)

        async def ask(at: int) -> None:
            name = f"{self._options.prefix}/{namespaces[at].hex()}/meta"
            found[at] = await self._link.size(name) is not None

        for first in range(0, len(namespaces), self._options.connections):
            await all_settled(ask(at) for at in range(first, min(first + self._options.connections, len(namespaces))))
        return found

    async def holdings(self) -> list[Holding]:
        """Look up the page sizes of all namespaces, and count their pages."""
        await self._connect()
        found = []

        def count(prefix: str) -> tuple[int, tuple[float, float] | None]:
            pages, times = 0, []
            for part in self._link.list(f"{prefix}/p/"):
                pages += len(part)
                if part:
                    # The bounds of a part, not its pages: a store may have millions.
                    written = [found["last_modified"].timestamp() for found in part]
                    times += [min(written), max(written)]
            return pages, (min(times), max(times)) if times else None

        for below in await self._on_thread(lambda: self._link.below(self._options.prefix)):
            prefix = below.rstrip("/")
            if (namespace := as_namespace(prefix.rpartition("/")[2])) is not None:
                size = await self._link.get(f"{prefix}/meta", bytes_max=SIZE_DIGITS_MAX)
                label = await self._link.get(f"{prefix}/label", bytes_max=LABEL_BYTES_MAX)
                pages, written_s = await asyncio.get_running_loop().run_in_executor(self._threads, count, prefix)
                page_bytes, words = page_bytes_of(bytes(size or b"")), bytes(label or b"")
                found.append(Holding(namespace, page_bytes, pages, label=words, written_s=written_s))
        return found

    async def close(self) -> None:
        """End the listing and the threads."""
        self._closed = True
        if self._listing is not None:
            await asyncio.wait({self._listing})
        self._threads.shutdown(wait=False)

    async def _connect(self) -> None:
        def connect() -> S3Link:
            # Imported here, on a thread: it takes a while, and users of other engines need not have it.
            from tidekv.backends.storage.s3.link import S3Link

            return S3Link(self._options)

        self._link = await self._on_thread(connect)

    async def _greet(self) -> None:
        """Check that the namespace has pages of our size."""
        name, page_bytes = f"{self._prefix}/meta", str(self._envelope.page_bytes).encode()
        found = await self._link.get(name, bytes_max=SIZE_DIGITS_MAX)
        if found is None:
            await self._link.put(name, page_bytes)
        elif bytes(found) != page_bytes:
            raise InvalidConfig(
                f"this namespace has pages of {bytes(found)[:20].decode(errors='replace')} bytes there; "
                f"the pool has {page_bytes.decode()}"
            )

    async def _list_old(self) -> None:
        """List existing pages and their order of writing: until then nothing is evicted."""

        def listed() -> list[bytes]:
            found: list[ObjectMeta] = []
            for part in self._link.list(f"{self._prefix}/p/"):
                found.extend(part)
                if self._closed:
                    break
            found.sort(key=lambda one: one["last_modified"], reverse=True)
            return [key for one in found if (key := key_at_end(one["path"]))]

        try:
            self._key_lru.found_old(await self._on_thread(listed))
            self._key_lru.complete = True
        except ServerFailed as error:
            self.last_error = str(error)
            self._counts.failures["listing"] += 1

    async def _each(self, count: int, work: Callable[[int], Awaitable[str]]) -> list[str]:
        """Run `work` for each page, as many at once as there are connections; returns a cause for each.

        Once the server gives no answer, work that has not begun is given up.
        """
        causes = [""] * count
        no_service = ""

        async def one(at: int) -> None:
            nonlocal no_service
            async with self._requests:
                if no_service:
                    causes[at] = no_service
                    return
                try:
                    causes[at] = await work(at)
                except ServerFailed as error:
                    self.last_error, causes[at] = str(error), error.cause
                    no_service = error.cause

        if count:
            await all_settled(one(at) for at in range(count))
        return causes

    async def _read(self, key: bytes, buffer: Callable[[], memoryview]) -> str:
        value = await self._link.get(self._page(key), bytes_max=self._envelope.value_bytes)
        if value is None:
            return "missing"
        return await self._on_thread(lambda: self._envelope.unwrap(key, memoryview(value), buffer()))

    async def _delete(self, keys: Sequence[bytes]) -> None:
        await self._link.delete([self._page(key) for key in keys])

    def _page(self, key: bytes) -> str:
        return f"{self._prefix}/p/{key.hex()}"

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
