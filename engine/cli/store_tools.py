"""Operations of `tidekv store`: open an engine with a small pool, and list, check, clean or copy its pages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl

import numpy as np
import numpy.typing as npt

from tidekv.backends.storage import Storage, open_storage
from tidekv.backends.storage.base import BufferOf, Census, Holding
from tidekv.backends.storage.uri import split_uri
from tidekv.engine.poller import PollerThread
from tidekv.states.errors import InvalidConfig
from tidekv.states.types import PoolMemory, Segment, page_ids

BATCH_BYTES: Final = 64 << 20
BATCH_PAGES_MAX: Final = 512
TIMEOUT_S: Final = 60.0
# Larger than any store: inspecting a store must never evict pages from it.
CAPACITY_UNBOUNDED: Final = 1 << 62

Advance = Callable[[int], None]
"""Called with the number of pages done since the last call."""


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a store and options to open it. `options` as for open_storage, as text."""

    uri: str
    options: str | None = None

    def open(self, *, to_write: bool = False) -> Storage:
        """Make the engine. One that is only inspected has no bound, unless the URI sets one."""
        storage = open_storage(self.uri, self.options)
        if split_uri(self.uri).scheme != "file" or self._has_capacity():
            return storage
        if to_write:
            raise InvalidConfig(f"{self.uri} may be cut to a capacity that was not meant; set one: ?capacity=200GB")
        joint = "&" if split_uri(self.uri).query else "?"
        return open_storage(f"{self.uri}{joint}capacity={CAPACITY_UNBOUNDED}", self.options)

    def _has_capacity(self) -> bool:
        return any(name == "capacity" for name, _ in parse_qsl(split_uri(self.uri).query)) or "capacity" in (
            self.options or ""
        )


@dataclass(frozen=True, slots=True)
class OpenStore:
    """An engine with a pool of `batch_pages` pages."""

    storage: Storage
    batch_pages: int
    buffer_of: BufferOf

    @property
    def pages(self) -> int:
        """Return the number of pages in the store."""
        return self.storage.statistics().pages

    async def listed(self) -> AsyncIterator[Sequence[bytes]]:
        """Return the keys of all pages; an engine without an index reads all pages for it."""
        if isinstance(self.storage, Census):
            async for keys in self.storage.listed():
                yield keys
        else:
            async for verdict in self.storage.verify():
                yield [verdict.key]


@dataclass(slots=True)
class Copied:
    """Result of a copy. `lost` pages could not be read or stored."""

    copied: int = 0
    there: int = 0
    lost: int = 0


@dataclass(slots=True)
class Checked:
    """Result of a check: the number of intact pages, and the cause for each damaged one."""

    whole: int = 0
    damaged: dict[bytes, str] = field(default_factory=dict)


async def holdings_of(place: Place) -> list[Holding]:
    """Return the namespaces of a store. Raises InvalidConfig if its engine cannot list them."""
    storage = place.open()
    try:
        if not isinstance(storage, Census):
            raise InvalidConfig(f"{storage.uri} cannot list its namespaces")
        return await storage.holdings()
    finally:
        await storage.close()


async def choose(place: Place, *, namespace: str | None, page_bytes: int | None) -> tuple[bytes, int]:
    """Find a namespace by a prefix of its name, and the size of its pages.

    Raises InvalidConfig, which lists the namespaces, unless exactly one matches.
    """
    whole = bytes.fromhex(namespace) if namespace and len(namespace) == 64 and _is_hex(namespace) else None
    if whole is not None and page_bytes is not None:
        return whole, page_bytes
    try:
        found = await holdings_of(place)
    except InvalidConfig as error:
        raise InvalidConfig(f"{error}; or give the whole --namespace and --page-bytes") from error
    meant = [one for one in found if one.namespace.hex().startswith((namespace or "").lower())]
    if len(meant) != 1:
        there = ", ".join(one.namespace.hex()[:16] + "…" for one in found) or "none"
        wanted = "" if namespace is None else f" that begin with {namespace!r}"
        raise InvalidConfig(
            f"{place.uri.partition('?')[0]} has {len(meant)} namespaces{wanted}; choose one by --namespace: {there}"
        )
    size = page_bytes or meant[0].page_bytes
    if size is None:
        raise InvalidConfig("this engine does not record the size of its pages; give --page-bytes")
    return meant[0].namespace, size


@contextlib.asynccontextmanager
async def opened(*storages: Storage, namespace: bytes, page_bytes: int) -> AsyncIterator[list[OpenStore]]:
    """Open engines over one pool, and close them at the end."""
    batch_pages = max(1, min(BATCH_BYTES // page_bytes, BATCH_PAGES_MAX))
    pool = _pool(batch_pages, page_bytes)
    segment = Segment(address=pool.ctypes.data, piece_bytes=page_bytes, stride_bytes=page_bytes, page_count=batch_pages)
    memory = PoolMemory(segments=(segment,), page_count=batch_pages)

    def buffer_of(page: int) -> memoryview:
        return memoryview(pool[page])

    poller = PollerThread(name="tidekv-store-poller")
    poller.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            for storage in storages:
                stack.push_async_callback(storage.close)
                await storage.register(memory, buffer_of, namespace=namespace, poller=poller)
            yield [OpenStore(storage, batch_pages, buffer_of) for storage in storages]
    finally:
        await poller.close()


async def check(store: OpenStore, advance: Advance) -> Checked:
    """Read every page, and return the damaged ones."""
    checked = Checked()
    async for verdict in store.storage.verify():
        if verdict.ok:
            checked.whole += 1
        else:
            checked.damaged[verdict.key] = verdict.cause
        advance(1)
    return checked


async def copy(source: OpenStore, target: OpenStore, advance: Advance) -> Copied:
    """Copy every intact page that the target does not have yet."""
    copied = Copied()
    batch: list[bytes] = []
    async for keys in source.listed():
        for key in keys:
            batch.append(key)
            if len(batch) == source.batch_pages:
                await _copy_batch(source, target, batch, copied)
                advance(len(batch))
                batch = []
    await _copy_batch(source, target, batch, copied)
    advance(len(batch))
    return copied


async def _copy_batch(source: OpenStore, target: OpenStore, keys: Sequence[bytes], copied: Copied) -> None:
    if not keys:
        return
    there = await target.storage.exists(keys, timeout_s=TIMEOUT_S)
    wanted = [key for key, has in zip(keys, there, strict=True) if not has]
    got = await source.storage.get_into(wanted, page_ids(range(len(wanted))), timeout_s=TIMEOUT_S)
    whole = [(key, page) for page, (key, is_valid) in enumerate(zip(wanted, got, strict=True)) if is_valid]
    stored = await target.storage.put_from(
        [key for key, _ in whole], page_ids(page for _, page in whole), timeout_s=TIMEOUT_S
    )
    copied.there += len(keys) - len(wanted)
    copied.copied += sum(stored)
    copied.lost += len(wanted) - sum(stored)


def _pool(pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate pages at a multiple of 4096, as direct file I/O requires."""
    raw = np.zeros(pages * page_bytes + 4096, np.uint8)
    first = -raw.ctypes.data % 4096
    return raw[first : first + pages * page_bytes].reshape(pages, page_bytes)


def _is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in text)
