"""Shared frame of the engines on servers: calls, chunks, deadlines and counters around a `PageService`.

The service knows one kind of server; everything else in the contract of base.py is implemented here, once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from tidekv.backends.base import Poller
from tidekv.backends.storage.base import (
    PAGE_BYTES_MAX,
    BufferOf,
    Holding,
    StorageStatistics,
    Verdict,
    check_keys,
    check_namespace,
    check_pairs,
    check_pool,
)
from tidekv.backends.storage.calls import Call, Calls, all_settled
from tidekv.backends.storage.page_header import PageHeader
from tidekv.backends.storage.stats import StorageCounters
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, StorageFailed
from tidekv.states.types import PageIds, PoolMemory, page_ids

EXISTS_KEYS_MAX: Final = 512
VERIFY_PAGES_MAX: Final = 64

NO_SERVICE: Final = frozenset({"unreachable", "timeout", "refused"})
"""Causes that concern the server and not a page: after one of them nothing more of a call is started."""
BAD_PAGE: Final = frozenset({"truncated", "corrupt", "foreign"})
"""Causes of a page that is there and cannot be read: it is removed."""

T = TypeVar("T")
ChunkWork = Callable[[Sequence[bytes], PageIds], Awaitable[list[str]]]


class ServerFailed(StorageFailed):
    """A server failed a request; `cause` is the name of its counter."""

    def __init__(self, cause: str, words: str) -> None:
        super().__init__(f"{cause}: {words}")
        self.cause = cause


class PageService(Protocol):
    """One kind of server, as RemoteStorage uses it. Each request is small enough for one round.

    `get` and `put` return a cause for each page, empty for success, and raise nothing for a failure of the server; they
    return only when nothing touches the pages any more, and are never cancelled. The others raise StorageFailed if the
    server does not answer.
    """

    @property
    def pages(self) -> int:
        """Number of pages of the namespace, as far as is known."""

    @property
    def last_error(self) -> str:
        """The last failure, in words."""

    async def open(
        self, envelope: PageHeader, pool: PoolMemory, buffer_of: BufferOf, *, pages_max: int, counts: StorageCounters
    ) -> None:
        """Connect. InvalidConfig if the namespace has pages of another size there. Evictions are counted in
        `counts`.
        """

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are there."""

    async def get(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Read pages and verify them."""

    async def put(self, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Store pages."""

    async def used(self, keys: Sequence[bytes]) -> None:
        """Note that pages that are there are in use: the first is evicted last. Then remove the least recently used
        ones, so that there are at most `pages_max`. Raises nothing: a failure is counted.
        """

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove keys."""

    async def clear(self) -> int:
        """Remove all pages of the namespace."""

    async def probe(self) -> None:
        """Write and read a page."""

    async def set_label(self, label: bytes) -> None:
        """Store the label of the namespace unless it has one; a server that may drop any value keeps none."""

    def stored(self) -> AsyncIterator[Sequence[bytes]]:
        """Yield the keys of the namespace as the server lists them, in parts."""

    async def verify(self, keys: Sequence[bytes]) -> list[str]:
        """Read pages into memory of its own; a cause for each that is not whole."""

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        """Return which namespaces were ever opened on the server; none if it does not record them."""

    async def holdings(self) -> list[Holding]:
        """Return the namespaces on the server; needs no `open`."""

    async def close(self) -> None:
        """Disconnect; nothing is in flight."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a RemoteStorage: `lanes` concurrent chunks of about `chunk_bytes`; pages within `capacity_bytes`."""

    capacity_bytes: int
    chunk_bytes: int
    lanes: int


class RemoteStorage:
    """A storage engine on a server."""

    def __init__(self, uri: str, make_service: Callable[[], PageService], limits: Limits) -> None:
        """Connect to nothing yet: `register` connects."""
        self.uri = uri
        self._make_service = make_service
        self._service = make_service()
        self._limits = limits
        self._calls = Calls(uri)
        self._counts = StorageCounters()
        self._lanes = asyncio.Semaphore(limits.lanes)
        # Pending `exists` calls; each is awaited by its caller, or left behind at its deadline.
        self._asked: set[asyncio.Task[None]] = set()
        self._registered = False
        self._closing = asyncio.Lock()
        self._disconnected = False
        self._envelope: PageHeader | None = None
        self._page_count = 0

    async def register(self, pool: PoolMemory, buffer_of: BufferOf, *, namespace: bytes, poller: Poller) -> None:
        """Connect, for pages of this pool; see Storage."""
        if self._calls.closed:
            raise EngineClosed(f"{self.uri} is closed")
        if self._registered:
            raise InvalidRequest(f"{self.uri} has a pool already; open another engine for another pool")
        check_namespace(namespace)
        check_pool(pool)
        envelope = PageHeader(namespace=namespace, page_bytes=pool.page_bytes)
        pages_max = self._limits.capacity_bytes // envelope.value_bytes
        if not pages_max:
            raise InvalidConfig(
                f"{self.uri}: capacity {self._limits.capacity_bytes} holds no page of {pool.page_bytes} bytes"
            )

        async def body(_: Call) -> None:
            try:
                await self._service.open(envelope, pool, buffer_of, pages_max=pages_max, counts=self._counts)
                self._envelope, self._page_count = envelope, pool.page_count
            finally:
                self._registered = self._envelope is not None

        self._registered = True
        await self._run(body)

    async def set_label(self, label: bytes) -> None:
        """Store the label of the namespace on the server; see Labels."""
        self._ready()

        async def body(_: Call) -> None:
            await self._service.set_label(label)

        await self._run(body)

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Ask the server; a key without an answer in time counts as missing. See Storage."""
        return await self._ask(keys, timeout_s, is_use=False)

    async def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Ask the server, and note there which pages are in use; see Touches."""
        return await self._ask(keys, timeout_s, is_use=True)

    async def _ask(self, keys: Sequence[bytes], timeout_s: float, *, is_use: bool) -> list[bool]:
        self._ready()
        check_keys(keys)
        found = [False] * len(keys)

        async def body(call: Call) -> None:
            for first in range(0, len(keys), EXISTS_KEYS_MAX):
                if call.may_start():
                    part = slice(first, first + EXISTS_KEYS_MAX)
                    found[part] = await self._service.exists(keys[part])
            used = [key for key, is_there in zip(keys, found, strict=True) if is_there and is_use]
            if used and call.may_start():
                await self._service.used(used)

        # No page is touched, so no caller has to wait for a slow server beyond the deadline.
        asked = asyncio.get_running_loop().create_task(self._run(body, timeout_s))
        self._asked.add(asked)
        asked.add_done_callback(self._answered)
        await asyncio.wait({asked}, timeout=timeout_s)
        if asked.done() and (error := asked.exception()) is not None:
            raise error
        return list(found)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Read pages and verify them; see Storage."""
        envelope = self._ready()
        check_pairs(keys, pages, page_count=self._page_count, distinct_pages=True)

        async def body(call: Call) -> list[bool]:
            causes = await self._in_chunks(call, self._service.get, keys, pages)
            await self._note_used(keys, causes)
            return self._checked(causes, self._counts.got(causes, envelope.page_bytes))

        return await self._run(body, timeout_s)

    async def put_from(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Store pages; see Storage."""
        envelope = self._ready()
        check_pairs(keys, pages, page_count=self._page_count, distinct_pages=False)

        # Of a key that is given twice the last page counts; concurrent chunks could leave either.
        last = dict(zip(keys, pages, strict=True))
        # Of a prefix that does not fit, the head is stored.
        fitting = list(last)[: self._limits.capacity_bytes // envelope.value_bytes]

        async def body(call: Call) -> list[bool]:
            pages_put = page_ids(last[key] for key in fitting)
            stored = await self._in_chunks(call, self._service.put, fitting, pages_put)
            # For the whole call at once, in the order of the prefix: chunks end in any order.
            await self._note_used(fitting, stored)
            by_key = dict.fromkeys(last, "full") | dict(zip(fitting, stored, strict=True))
            causes = [by_key[key] for key in keys]
            return self._checked(causes, self._counts.put(causes, envelope.page_bytes))

        return await self._run(body, timeout_s)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove keys; see Storage."""
        self._ready()
        check_keys(keys)

        async def body(_: Call) -> list[bool]:
            return await self._service.delete(keys)

        return await self._run(body)

    async def clear(self) -> int:
        """Remove every page of this namespace; see Storage."""
        self._ready()

        async def body(_: Call) -> int:
            return await self._service.clear()

        return await self._run(body)

    async def probe(self) -> None:
        """Write and read a page; see Storage."""
        self._ready()

        async def body(_: Call) -> None:
            await self._service.probe()

        await self._run(body)

    async def verify(self) -> AsyncIterator[Verdict]:
        """Read and check every page; see Storage."""
        async for keys in self.listed():
            for first in range(0, len(keys), VERIFY_PAGES_MAX):
                part = keys[first : first + VERIFY_PAGES_MAX]

                async def body(_: Call, part: Sequence[bytes] = part) -> list[str]:
                    return await self._service.verify(part)

                for key, cause in zip(part, await self._run(body), strict=True):
                    # Gone since it was listed: not damage.
                    if cause != "missing":
                        yield Verdict(key=key, ok=not cause, cause=cause)

    async def listed(self) -> AsyncIterator[Sequence[bytes]]:
        """Yield the keys of this namespace as the server lists them; see Census."""
        self._ready()
        stored = self._service.stored()

        async def following(_: Call) -> Sequence[bytes] | None:
            return await anext(stored, None)

        while (keys := await self._run(following)) is not None:
            yield keys

    def sibling(self) -> RemoteStorage:
        """Make another engine of the same server, with its own connections and capacity; see Siblings."""
        return RemoteStorage(self.uri, self._make_service, self._limits)

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        """Ask the server; see Neighbors."""
        self._ready()

        async def body(_: Call) -> list[bool]:
            return await self._service.have_namespaces(namespaces)

        return await self._calls.run(body)

    async def holdings(self) -> list[Holding]:
        """Return the namespaces on the server; see Census."""

        async def body(_: Call) -> list[Holding]:
            return await self._service.holdings()

        return await self._run(body)

    async def close(self) -> None:
        """Wait for the calls that run, and disconnect; see Storage."""
        await self._calls.drain()
        async with self._closing:
            self._envelope = None
            if not self._disconnected:
                await self._service.close()
                self._disconnected = True

    def statistics(self) -> StorageStatistics:
        """Return the counters; what the engine holds is as of its last call to the server."""
        pages = 0 if self._envelope is None else self._service.pages
        return self._counts.statistics(
            uri=self.uri,
            pages=pages,
            used_bytes=0 if self._envelope is None else pages * self._envelope.value_bytes,
            capacity_bytes=self._limits.capacity_bytes,
            calls_in_flight=len(self._calls),
        )

    async def _run(self, body: Callable[[Call], Coroutine[object, object, T]], timeout_s: float = math.inf) -> T:
        """Run a call to its end. A failure of the server names the storage: its own words may name another address."""
        try:
            return await self._calls.run(body, timeout_s)
        except ServerFailed as error:
            raise StorageFailed(f"{self.uri}: {error}") from error

    async def _in_chunks(self, call: Call, work: ChunkWork, keys: Sequence[bytes], pages: PageIds) -> list[str]:
        """Run a call chunk by chunk, as many at once as there are lanes; what is not started in time is late."""
        causes = ["late"] * len(keys)
        chunk_pages = max(1, self._limits.chunk_bytes // self._ready().page_bytes)
        firsts = iter(range(0, len(keys), chunk_pages))
        no_service = ""

        async def lane() -> None:
            nonlocal no_service
            for first in firsts:
                part = slice(first, first + chunk_pages)
                if no_service:
                    causes[part] = [no_service] * len(keys[part])
                elif await call.start(self._lanes):
                    try:
                        causes[part] = await work(keys[part], pages[part])
                    finally:
                        self._lanes.release()
                    no_service = no_service or next((cause for cause in causes[part] if cause in NO_SERVICE), "")

        await all_settled(lane() for _ in range(max(1, min(-(-len(keys) // chunk_pages), self._limits.lanes))))
        return causes

    async def _note_used(self, keys: Sequence[bytes], causes: Sequence[str]) -> None:
        if used := [key for key, cause in zip(keys, causes, strict=True) if not cause]:
            await self._service.used(used)

    def _checked(self, causes: Sequence[str], valid: list[bool]) -> list[bool]:
        if causes and all(cause in NO_SERVICE for cause in causes):
            raise StorageFailed(f"{self.uri}: {self._service.last_error}")
        return valid

    def _answered(self, asked: asyncio.Task[None]) -> None:
        self._asked.discard(asked)
        if not asked.cancelled():
            # Retrieved, so that asyncio does not report an error that no caller awaits any more.
            asked.exception()

    def _ready(self) -> PageHeader:
        if self._envelope is None:
            if self._calls.closed:
                raise EngineClosed(f"{self.uri} is closed")
            raise InvalidRequest(f"{self.uri} has no pool yet; register one first")
        return self._envelope


SIZE_DIGITS_MAX: Final = len(str(PAGE_BYTES_MAX))
"""Maximum bytes of a record of the size of pages."""


def page_bytes_of(record: bytes) -> int | None:
    """Parse the record of the size of pages; None if it is none."""
    size = int(record) if len(record) <= SIZE_DIGITS_MAX and record.isdigit() else 0
    return size if 1 <= size <= PAGE_BYTES_MAX else None


def as_namespace(text: str) -> bytes | None:
    """Parse a namespace from a name on a server; None if the name is not one."""
    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        return None
    return namespace if len(namespace) == 32 else None
