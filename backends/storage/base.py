"""The contract of a storage engine: pages by key, in batches, with an answer for each key.

An engine holds bytes and no policy: it does not retry, rate-limit or degrade. It must never report a page as read
unless the host page holds the very bytes that were put under that key and namespace.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Protocol, runtime_checkable

from tidekv.backends.base import Poller
from tidekv.states.errors import InvalidConfig, InvalidRequest
from tidekv.states.types import PageIds, PoolMemory
from tidekv.states.validation import short

KEY_BYTES: Final = 32
PAGE_BYTES_MAX: Final = 1 << 32
"""Maximum bytes of a page that a store may name."""

BufferOf = Callable[[int], memoryview]
"""Maps a host page id to the page's bytes, writable and in place."""


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """Content of an engine, and its counters since it was opened. Counts are pages, except those in bytes.

    `misses` and `failures` count by cause: why a requested page was not read, why a given page was not stored.
    `converted` of the hits were not there as this rank stores them, and were read from pages of another number of
    ranks; these are among the misses, too.
    """

    uri: str
    pages: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    puts: int
    evictions: int
    read_bytes: int
    written_bytes: int
    calls_in_flight: int
    misses: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    converted: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One page as `verify` found it; `cause` is empty if it is whole."""

    key: bytes
    ok: bool
    cause: str


class Storage(Protocol):
    """One storage engine, for one host pool and one namespace.

    All calls are made on one event loop. Bad arguments raise InvalidRequest and change nothing; a call after `close`
    raises EngineClosed; StorageFailed means that the engine as a whole cannot work, and has the reason.

    **Pages are the call's until it returns.** `get_into` and `put_from` return, or raise, only when nothing writes to
    or reads from any of their pages any more. `timeout_s` bounds what is still started, not what already runs: NIXL
    cannot cancel. Cancelling the awaiting task has the same effect: nothing more is started, and CancelledError is
    raised once everything that runs has settled. A caller that cannot wait that long continues without the answer, and
    keeps the pages. The one exception is a poller that is closed first: its EngineClosed is raised from the call, and
    does not mean that the pages are free.
    """

    @property
    def uri(self) -> str:
        """The place of the engine's pages, without secrets: safe for a log."""

    async def register(self, pool: PoolMemory, buffer_of: BufferOf, *, namespace: bytes, poller: Poller) -> None:
        """Prepare the engine for pages of this host pool; once only.

        `namespace` is a 32-byte digest of everything that makes page bytes interchangeable. The pool's memory stays
        valid until `close` has returned. Raises InvalidConfig for a pool that it cannot serve, StorageFailed if the
        place cannot be used.
        """

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Return which keys are probably there. A hint: any page may be removed at any time."""

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Read each key's page into the host page beside it. True: the verified bytes are there. False: a miss, and the
        host page holds garbage.
        """

    async def put_from(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """Store each host page under the key beside it, replacing what was there. True: it can be read.

        Of keys used in one call, the last is evicted first: they are a prefix, which is worthless without its head. The
        same holds for `get_into`.
        """

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove keys; True for each that was there."""

    async def clear(self) -> int:
        """Remove every page of this namespace; returns how many there were."""

    async def probe(self) -> None:
        """Raise StorageFailed unless a page could be written and read now. Reopens what can be reopened."""

    def verify(self) -> AsyncIterator[Verdict]:
        """Read every page of this namespace and yield a verdict for each. Damaged pages stay where they are."""

    async def close(self) -> None:
        """Refuse further calls, wait for those that run, and release everything. Closing again does nothing."""

    def statistics(self) -> StorageStatistics:
        """Return what the engine holds, and its counters."""


@runtime_checkable
class Touches(Protocol):
    """An engine with an order of use that can be renewed without a read."""

    async def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Return which keys are probably there, as `exists` does, and note that those are in use: the first of them is
        evicted last.
        """


async def touch(
    storage: Storage, keys: Sequence[bytes], *, timeout_s: float, prefix_keys: Sequence[bytes] = ()
) -> list[bool]:
    """Touch the pages of a prefix, or only look them up if the engine keeps no order of use. See Touches."""
    # Not `isinstance`, which looks at each name of the protocol in some 20 µs: this runs several times a request.
    look_up = getattr(storage, "touch", storage.exists)
    found: list[bool] = await look_up(keys, timeout_s=timeout_s, **prefix_of(storage, prefix_keys))
    return found


@runtime_checkable
class TakesPrefixKeys(Protocol):
    """An engine that places pages by the prompt that they are a part of.

    If `takes_prefix_keys` is true, `exists`, `touch`, `get_into` and `put_from` are called with one more keyword
    argument, `prefix_keys`: the keys of all pages of the prompt before the first key of the call. Only `tidekv store`,
    which sees pages and no prompts, leaves it out.
    """

    takes_prefix_keys: bool


# Any: the values of a call's keyword arguments.
def prefix_of(storage: Storage, prefix_keys: Sequence[bytes]) -> dict[str, Any]:
    """Return the keyword argument that names the pages before the first one of a call, if the engine takes it."""
    return {"prefix_keys": prefix_keys} if getattr(storage, "takes_prefix_keys", False) else {}


@runtime_checkable
class Siblings(Protocol):
    """An engine that can be opened once more for the same place, for pages of another size.

    An engine holds pages of one pool, all of one size. The pages of a sliding window and state snapshots have their own
    sizes, so each component has its own engine and its own namespace beside the engine of the full pages. Nothing is
    padded, and no engine has to know of components. All engines of a `file:` directory share its `capacity`; every
    other engine has its own.
    """

    def sibling(self) -> Storage:
        """Make another engine of the same place and options; its owner registers a pool with it, and closes it."""


@runtime_checkable
class Neighbors(Siblings, Protocol):
    """An engine that knows which namespaces its place has, so that pages of other numbers of ranks are found there."""

    async def have_namespaces(self, namespaces: Sequence[bytes]) -> list[bool]:
        """Return which of these namespaces were ever opened at the place; needs a pool of its own, and costs no more
        than a few look-ups. Raises StorageFailed.
        """


@dataclass(frozen=True, slots=True)
class Holding:
    """One namespace at a place. `page_bytes` is None if the place does not store it, `label` empty without one.

    `written_s` are the times of the oldest and the newest write, in seconds since 1970; None if they are not known.
    """

    namespace: bytes
    page_bytes: int | None
    pages: int
    label: bytes = field(default=b"", compare=False)
    written_s: tuple[float, float] | None = field(default=None, compare=False)


@runtime_checkable
class Census(Protocol):
    """An engine that can list its content, for tools. Raises StorageFailed if the place does not answer."""

    async def holdings(self) -> list[Holding]:
        """Return every namespace at the engine's place; needs no pool."""

    def listed(self) -> AsyncIterator[Sequence[bytes]]:
        """Return the page keys of the engine's namespace, in parts; needs a pool. Pages may be removed meanwhile."""


@runtime_checkable
class Labels(Protocol):
    """An engine that keeps a label beside its namespace, for tools: see `tidekv.backends.storage.label`."""

    async def set_label(self, label: bytes) -> None:
        """Store the label of the engine's namespace unless it has one; needs a pool. Raises StorageFailed."""


def check_namespace(namespace: bytes) -> None:
    """Refuse a namespace that is not a 32-byte digest (InvalidConfig)."""
    if not isinstance(namespace, bytes) or len(namespace) != KEY_BYTES:
        raise InvalidConfig(f"storage namespace must be {KEY_BYTES} bytes, not {namespace!r}")


def check_pool(pool: PoolMemory) -> None:
    """Refuse a pool whose pages are not each one piece of host memory (InvalidConfig)."""
    if pool.kind != "DRAM" or len(pool.segments) != 1:
        raise InvalidConfig(
            "storage needs a page-first pool in host memory; "
            f"this one has {len(pool.segments)} pieces a page in {pool.kind}"
        )


def check_keys(keys: Sequence[bytes]) -> None:
    """Refuse a key that is not a 32-byte digest (InvalidRequest): no other bytes ever reach a path or a record."""
    # All keys at once first: this runs for every page on the event loop.
    if list(map(type, keys)).count(bytes) == len(keys) == list(map(len, keys)).count(KEY_BYTES):
        return
    for position, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise InvalidRequest(f"storage key number {position} must be {KEY_BYTES} bytes, not {short(key)}")


def check_pairs(keys: Sequence[bytes], pages: PageIds, *, page_count: int, distinct_pages: bool) -> None:
    """Refuse keys and pages that do not pair up, or a page that is not in the pool (InvalidRequest).

    With `distinct_pages`, refuse a page that is named twice: two reads into one page would leave the bytes of either.
    """
    check_keys(keys)
    if len(keys) != len(pages):
        raise InvalidRequest(f"storage was given {len(keys)} keys and {len(pages)} pages; they go in pairs")
    distinct = set(pages)
    if distinct and not (min(distinct) >= 0 and max(distinct) < page_count):
        position, page = next((at, page) for at, page in enumerate(pages) if not 0 <= page < page_count)
        raise InvalidRequest(f"host pool has pages 0 to {page_count - 1}; page {page} (number {position}) is not one")
    if distinct_pages and len(distinct) != len(pages):
        raise InvalidRequest("storage was asked to read two keys into one page")


def leading(flags: Sequence[bool]) -> int:
    """Return the number of True flags before the first False one. Keys form a chain: pages after a gap are useless."""
    return [*flags, False].index(False)


def first_distinct(keys: Sequence[bytes], count: int) -> int:
    """Return the number of leading keys of which at most `count` are different."""
    if len(keys) <= count:
        return len(keys)
    seen: set[bytes] = set()
    for at, key in enumerate(keys):
        seen.add(key)
        if len(seen) > count:
            return at
    return len(keys)


def ranges_of(flags: Sequence[bool], first: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges [begin, end) of positions with a set flag; the first flag is that of position `first`."""
    ranges = []
    at = first
    for is_here, run in groupby(flags):
        end = at + sum(1 for _ in run)
        if is_here:
            ranges.append((at, end))
        at = end
    return tuple(ranges)
