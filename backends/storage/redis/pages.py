"""Pages on a Redis or Valkey server: their names, and the order of writes.

    {prefix}:{namespace}:meta                page bytes, so that pages of two sizes are never mixed
    {prefix}:{namespace}:index               sorted set: page key -> its place in the order of use
    {prefix}:{namespace}:p:{page key}        header and page
    {prefix}:{namespace}:t:{page key}:…      a page that is being written in parts; expires by itself

The order of use is that of the server: each use gets scores above the highest in the index. A clock of any machine has
no part in it. Of pages used together the first gets the highest score, so the end of a prefix is evicted before its
beginning.

A page enters the index before it is written and again after it, and leaves the index before it is removed. After a
crash in between, or with a concurrent removal, the index may name pages that are gone, which is a miss, and rarely
lacks one that is there; `verify` finds those, and enters them as the next to be evicted.
"""

from __future__ import annotations

import asyncio
import importlib.util
import queue
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar, cast

from tidekv.backends.storage.base import BufferOf, Holding
from tidekv.backends.storage.label import LABEL_BYTES_MAX
from tidekv.backends.storage.options import read_authority
from tidekv.backends.storage.page_header import PageHeader
from tidekv.backends.storage.redis.options import DEFAULT_PORT, RedisOptions, read_redis_options
from tidekv.backends.storage.remote import (
    BAD_PAGE,
    NO_SERVICE,
    SIZE_DIGITS_MAX,
    Limits,
    RemoteStorage,
    ServerFailed,
    as_namespace,
    page_bytes_of,
)
from tidekv.backends.storage.stats import StorageCounters
from tidekv.states.errors import InvalidConfig, StorageFailed
from tidekv.states.types import PageIds, PoolMemory

if TYPE_CHECKING:
    from tidekv.backends.storage.redis.link import RedisLink
    from tidekv.backends.storage.redis.options import RedisOptions

T = TypeVar("T")

HALF_WRITTEN_MS: Final = b"60000"


def open_redis(*, authority: str, path: str, options: Mapping[str, object]) -> RemoteStorage:
    """Make the engine of a `redis:` or `valkey:` URI."""
    return _open(authority, path, options, tls=False)


def open_redis_tls(*, authority: str, path: str, options: Mapping[str, object]) -> RemoteStorage:
    """Make the engine of a `rediss:` or `valkeys:` URI."""
    return _open(authority, path, options, tls=True)


def _open(authority: str, path: str, options: Mapping[str, object], *, tls: bool) -> RemoteStorage:
    if importlib.util.find_spec("glide_sync") is None:
        raise InvalidConfig("redis: storage needs valkey-glide-sync: pip install 'tidekv[redis]'")
    where = read_authority("redis", authority, default_port=DEFAULT_PORT)
    settings = read_redis_options(where, path, {"tls": tls, **options} if tls else options)
    if tls and not settings.tls:
        raise InvalidConfig("redis: a rediss:// or valkeys:// URI speaks TLS; leave tls=false out, or write redis://")
    scheme = "rediss" if settings.tls else "redis"
    uri = f"{scheme}://{where.text}/{settings.database}?prefix={settings.prefix}"
    limits = Limits(capacity_bytes=settings.capacity, chunk_bytes=settings.chunk, lanes=settings.connections)
    return RemoteStorage(uri, lambda: RedisPages(settings), limits)


class Worker:
    """A connection, and memory for one wrapped page: the resources of a job on a thread."""

    def __init__(self, link: RedisLink, value_bytes: int) -> None:
        self.link = link
        self.value = memoryview(bytearray(value_bytes))


class RedisPages:
    """The page service of the redis: engine; see PageService."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._threads = ThreadPoolExecutor(options.connections, thread_name_prefix="tidekv-redis-storage")
        self._workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._probing = asyncio.Lock()
        self._names = b""
        self._pages_max = 0
        self._counts = StorageCounters()
        self.pages = 0
        self.last_error = ""

    async def open(
        self, envelope: PageHeader, pool: PoolMemory, buffer_of: BufferOf, *, pages_max: int, counts: StorageCounters
    ) -> None:
        """Connect once; the other connections are made when they are needed."""
        self._envelope, self._buffer_of, self._pages_max, self._counts = envelope, buffer_of, pages_max, counts
        self._names = f"{self._options.prefix}:{envelope.namespace.hex()}:".encode()
        self._index = RedisIndex(self._names + b"index")

        def start() -> int:
            # Imported here, on a thread: it takes a while, and users of other engines need not have it.
            from tidekv.backends.storage.redis.link import RedisLink

            first = Worker(RedisLink(self._options), envelope.value_bytes)
            try:
                pages = self._greet(first.link)
            except BaseException:
                first.link.close()
                raise
            self._workers.put(first)
            for _ in range(self._options.connections - 1):
                self._workers.put(Worker(RedisLink(self._options), envelope.value_bytes))
            return pages

        self.pages = await asyncio.get_running_loop().run_in_executor(self._threads, start)

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Compare the lengths of the values; a wrong length is no page."""

        def ask(worker: Worker) -> list[bool]:
            lengths = worker.link.batch([(b"STRLEN", self._page(key)) for key in keys])
            return [length == self._envelope.value_bytes for length in lengths]

        return await self._on_worker(ask)

    async def get(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Read pages into the pool."""

        def read(worker: Worker) -> tuple[list[str], int | None]:
            causes = self._read(worker, keys, [self._buffer_of(page) for page in pages])
            return causes, self._note_reads(worker.link, keys, causes)

        causes, count = await self._on_worker(read)
        self._note_count(count)
        return causes

    async def put(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Write pages, and remove those beyond the capacity."""

        def write(worker: Worker) -> tuple[list[str], int | None, int]:
            causes = self._write(worker, keys, [self._buffer_of(page) for page in pages])
            # At each part of a call, so that the server never holds much more than the capacity.
            return causes, *self._order(worker.link, [])

        causes, count, evicted = await self._on_worker(write)
        self._counts.evictions += evicted
        self._note_count(count)
        return causes

    async def used(self, keys: Sequence[bytes]) -> None:
        """Move pages to the end of the index that is evicted last, and remove those beyond the capacity."""
        count, evicted = await self._on_worker(lambda worker: self._order(worker.link, keys))
        self._counts.evictions += evicted
        self._note_count(count)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove pages."""

        def remove(worker: Worker) -> tuple[list[bool], int]:
            gone = self._remove(worker.link, keys)
            return gone, self._index.count(worker.link)

        gone, self.pages = await self._on_worker(remove)
        return gone

    async def clear(self) -> int:
        """Remove all keys of the namespace, including those that the index does not know."""

        def remove_all(worker: Worker) -> int:
            self._index.clear(worker.link)
            removed = 0
            for pattern in (b"t:*", b"p:*"):
                removed = 0
                for keys in scan(worker.link, self._names + pattern):
                    removed += sum(answer == 1 for answer in worker.link.batch([(b"UNLINK", key) for key in keys]))
            return removed

        removed = await self._on_worker(remove_all)
        self.pages = 0
        return removed

    async def probe(self) -> None:
        """Write a value and read it back, on every connection: each notices by itself that a server is back."""

        def try_out(link: RedisLink) -> int:
            key, value = self._names + b"t:probe:" + uuid.uuid4().hex.encode(), uuid.uuid4().bytes
            link.call(b"SET", key, value, b"PX", HALF_WRITTEN_MS)
            if link.call(b"GET", key) != value:
                raise StorageFailed("the server does not give back what was written just now")
            link.call(b"UNLINK", key)
            return self._greet(link)

        def try_all() -> int:
            workers: list[Worker] = []
            try:
                while len(workers) < self._options.connections:
                    workers.append(self._workers.get())
                return [try_out(worker.link) for worker in workers][-1]
            finally:
                for worker in workers:
                    self._workers.put(worker)

        # One at a time: two probes would wait for each other's connections.
        async with self._probing:
            self.pages = await asyncio.get_running_loop().run_in_executor(self._threads, try_all)

    async def set_label(self, label: bytes) -> None:
        """Store the label of the namespace unless it has one."""
        await self._on_worker(lambda worker: worker.link.call(b"SET", self._names + b"label", label, b"NX"))

    async def stored(self) -> AsyncIterator[Sequence[bytes]]:
        """Yield the keys of the namespace; keys that are added meanwhile may be missed."""
        seen: set[bytes] = set()
        cursor: object | None = None
        while True:

            def ask(worker: Worker, cursor: object | None = cursor) -> tuple[object | None, list[bytes]]:
                return worker.link.scan(self._names + b"p:*", cursor)

            cursor, names = await self._on_worker(ask)
            found = {self._key(name) for name in names} - seen - {b""}
            seen |= found
            yield sorted(found)
            if cursor is None:
                return

    async def verify(self, keys: Sequence[bytes]) -> list[str]:
        """Read pages into memory of its own; whole ones enter the index if they were not there."""

        def read(worker: Worker) -> tuple[list[str], int]:
            page = memoryview(bytearray(self._envelope.page_bytes))
            causes = [self._read(worker, [key], [page])[0] for key in keys]
            if NO_SERVICE.intersection(causes):
                raise StorageFailed(self.last_error)
            intact = [key for key, cause in zip(keys, causes, strict=True) if not cause]
            self._index.enter_strays(worker.link, intact)
            return causes, self._index.count(worker.link)

        causes, self.pages = await self._on_worker(read)
        return causes

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        """Ask for the size of pages that each namespace was opened with."""

        def ask(worker: Worker) -> list[bool]:
            names = [f"{self._options.prefix}:{namespace.hex()}:meta".encode() for namespace in namespaces]
            return [
                isinstance(length, int) and length > 0
                for length in worker.link.batch([(b"STRLEN", name) for name in names])
            ]

        return await self._on_worker(ask) if namespaces else []

    async def holdings(self) -> list[Holding]:
        """Look up the page sizes of all namespaces, on a separate connection."""

        def look() -> list[Holding]:
            from tidekv.backends.storage.redis.link import RedisLink

            link = RedisLink(self._options)
            try:
                found, prefix = [], f"{self._options.prefix}:"
                for names in scan(link, f"{prefix}*:meta".encode()):
                    for name in names:
                        digest = name.decode(errors="replace").removeprefix(prefix).removesuffix(":meta")
                        if (namespace := as_namespace(digest)) is not None:
                            size = link.start_of(name, SIZE_DIGITS_MAX)
                            pages = RedisIndex(name.removesuffix(b"meta") + b"index").count(link)
                            label = link.start_of(name.removesuffix(b"meta") + b"label", LABEL_BYTES_MAX)
                            found.append(Holding(namespace, page_bytes_of(size), pages, label=label))
                return sorted(found, key=lambda one: one.namespace)
            finally:
                link.close()

        return await asyncio.get_running_loop().run_in_executor(self._threads, look)

    async def close(self) -> None:
        """Disconnect."""

        def disconnect() -> None:
            while not self._workers.empty():
                self._workers.get().link.close()

        await asyncio.get_running_loop().run_in_executor(self._threads, disconnect)
        self._threads.shutdown(wait=False)

    def _greet(self, link: RedisLink) -> int:
        """Check that the namespace has pages of our size, and return how many."""
        page_bytes = str(self._envelope.page_bytes).encode()
        link.call(b"SET", self._names + b"meta", page_bytes, b"NX")
        found = link.start_of(self._names + b"meta", SIZE_DIGITS_MAX)
        if found != page_bytes:
            raise InvalidConfig(
                f"this namespace has pages of {found.decode(errors='replace')} bytes there; "
                f"the pool has {page_bytes.decode()}"
            )
        return self._index.count(link)

    def _read(self, worker: Worker, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[str]:
        causes: list[str] = []
        for part in self._parts(len(keys)):
            try:
                causes += self._read_part(worker, keys[part], buffers[part])
            except ServerFailed as error:
                self.last_error = str(error)
                # The server did not answer: asking for the rest would cost a timeout each.
                return causes + [error.cause] * (len(keys) - len(causes))
        return causes

    def _read_part(self, worker: Worker, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[str]:
        if len(keys) > 1:
            # One byte more than a page has shows that a value is none; the rest of it is not read.
            last = str(self._envelope.value_bytes).encode()
            answers = worker.link.batch([(b"GETRANGE", self._page(key), b"0", last) for key in keys])
            return [
                self._unwrap(key, answer, buffer) for key, answer, buffer in zip(keys, answers, buffers, strict=True)
            ]
        try:
            length = worker.link.read(self._page(keys[0]), worker.value)
        except ServerFailed as error:
            if error.cause in NO_SERVICE:
                raise
            return [error.cause]
        return ["missing" if length is None else self._envelope.unwrap(keys[0], worker.value[:length], buffers[0])]

    def _unwrap(self, key: bytes, answer: object, buffer: memoryview) -> str:
        if isinstance(answer, bytes):
            return self._envelope.unwrap(key, memoryview(answer), buffer) if answer else "missing"
        return cast(ServerFailed, answer).cause

    def _note_reads(self, link: RedisLink, keys: Sequence[bytes], causes: Sequence[str]) -> int | None:
        """Remove what is gone from the index, and damaged pages; returns the number of pages left."""
        if NO_SERVICE.intersection(causes):
            return None
        gone = [key for key, cause in zip(keys, causes, strict=True) if cause == "missing"]
        bad = [key for key, cause in zip(keys, causes, strict=True) if cause in BAD_PAGE]
        try:
            self._index.leave(link, gone)
            self._remove(link, bad)
            return self._index.count(link)
        except ServerFailed as error:
            # The pages are read and intact; the next call will find out what has happened to the server.
            self.last_error = str(error)
            return None

    def _write(self, worker: Worker, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[str]:
        causes: list[str] = []
        try:
            self._index.enter(worker.link, keys)
            for part in self._parts(len(keys)):
                causes += self._write_part(worker, keys[part], buffers[part])
        except ServerFailed as error:
            self.last_error = str(error)
            causes += [error.cause] * (len(keys) - len(causes))
        return causes

    def _write_part(self, worker: Worker, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[str]:
        commands = []
        for key, buffer in zip(keys, buffers, strict=True):
            self._envelope.wrap(key, buffer, worker.value)
            if self._envelope.value_bytes > self._options.part:
                commands.append(self._upload(worker, key))
            else:
                commands.append((b"SET", self._page(key), bytes(worker.value)))
        answers = worker.link.batch(commands)
        for answer in answers:
            if isinstance(answer, ServerFailed):
                self.last_error = str(answer)
        return [answer.cause if isinstance(answer, ServerFailed) else "" for answer in answers]

    def _upload(self, worker: Worker, key: bytes) -> tuple[bytes, ...]:
        """Write a large page in parts under another name; returns the command that renames it into place.

        The client copies each value while it holds the interpreter, so values must be short.
        """
        half = self._names + b"t:{" + key.hex().encode() + b"}:" + uuid.uuid4().hex.encode()
        # From the end, so that the server allocates once.
        for first in reversed(range(0, len(worker.value), self._options.part)):
            part = bytes(worker.value[first : first + self._options.part])
            worker.link.call(b"SETRANGE", half, str(first).encode(), part)
            worker.link.call(b"PEXPIRE", half, HALF_WRITTEN_MS)
        page = self._page(key)
        worker.link.call(b"RENAME", half, page)
        return (b"PERSIST", page)

    def _order(self, link: RedisLink, used: Sequence[bytes]) -> tuple[int | None, int]:
        """Note what was used, and remove the pages beyond the capacity; returns how many there are, None if the server
        failed, and how many were removed.
        """
        try:
            self._index.enter(link, used)
            return self._make_room(link)
        except ServerFailed as error:
            # The pages are read or written; the next call will find out what has happened to the server.
            self.last_error = str(error)
            return None, 0

    def _make_room(self, link: RedisLink) -> tuple[int, int]:
        """Remove the pages beyond the capacity; returns how many there are, and how many were removed."""
        count, evicted = self._index.count(link), 0
        while count > self._pages_max:
            keys = self._index.take_oldest(link, min(count - self._pages_max, 1000))
            link.batch([(b"UNLINK", self._page(key)) for key in keys])
            evicted += len(keys)
            count = self._index.count(link)
        return count, evicted

    def _remove(self, link: RedisLink, keys: Sequence[bytes]) -> list[bool]:
        self._index.leave(link, keys)
        return [answer == 1 for answer in link.batch([(b"UNLINK", self._page(key)) for key in keys])]

    def _parts(self, count: int) -> Iterator[slice]:
        """Cut pages into groups that the client may copy in one call."""
        group = max(1, self._options.part // self._envelope.value_bytes)
        return (slice(first, first + group) for first in range(0, count, group))

    def _page(self, key: bytes) -> bytes:
        # In braces: a cluster then keeps the page on the node of its half-written form, so that one can be renamed to
        # the other.
        return self._names + b"p:{" + key.hex().encode() + b"}"

    def _key(self, name: bytes) -> bytes:
        try:
            return bytes.fromhex(name.removeprefix(self._names + b"p:{").removesuffix(b"}").decode())
        except ValueError:
            return b""

    def _note_count(self, count: int | None) -> None:
        if count is None:
            self._counts.failures["index"] += 1
        else:
            self.pages = count

    async def _on_worker(self, work: Callable[[Worker], T]) -> T:
        def run() -> T:
            worker = self._workers.get()
            try:
                return work(worker)
            finally:
                self._workers.put(worker)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)


class RedisIndex:
    """Page keys of a namespace in one sorted set for all processes, least recently used first.

    Every method blocks and may raise ServerFailed.
    """

    def __init__(self, name: bytes) -> None:
        self.name = name

    def enter(self, link: RedisLink, keys: Sequence[bytes]) -> None:
        """Mark keys as most recently used, the first of them last of all."""
        if keys:
            # Two processes may find the same highest score: their pages then mix, each batch in its own order.
            first = self._highest(link) + len(keys)
            scores = [b"%d" % (first - at) for at in range(len(keys))]
            link.call(b"ZADD", self.name, *_scored(scores, keys))

    def enter_strays(self, link: RedisLink, keys: Sequence[bytes]) -> None:
        """Enter keys that are not there as least recently used."""
        if keys:
            link.call(b"ZADD", self.name, b"NX", *_scored([b"0"] * len(keys), keys))

    def _highest(self, link: RedisLink) -> int:
        """Return the score of the key that was used last, 0 without any."""
        found = link.call(b"ZREVRANGE", self.name, b"0", b"0", b"WITHSCORES")
        while isinstance(found, list):
            # A pair, in a list with the later protocol of the server, after the key with the earlier one.
            found = found[-1] if found else 0
        return int(float(cast("bytes | float", found)))

    def leave(self, link: RedisLink, keys: Sequence[bytes]) -> None:
        """Remove keys."""
        if keys:
            link.call(b"ZREM", self.name, *keys)

    def take_oldest(self, link: RedisLink, count: int) -> list[bytes]:
        """Remove and return the least recently used keys."""
        return link.pop_least(self.name, count)

    def clear(self, link: RedisLink) -> None:
        """Remove all keys."""
        link.call(b"UNLINK", self.name)

    def count(self, link: RedisLink) -> int:
        """Return how many keys there are."""
        return cast(int, link.call(b"ZCARD", self.name))


def scan(link: RedisLink, pattern: bytes) -> Iterator[list[bytes]]:
    """Yield the names of all values that match a pattern, in parts."""
    cursor, names = link.scan(pattern, None)
    yield names
    while cursor is not None:
        cursor, names = link.scan(pattern, cursor)
        yield names


def _scored(scores: Sequence[bytes], keys: Sequence[bytes]) -> list[bytes]:
    return [word for pair in zip(scores, keys, strict=True) for word in pair]
