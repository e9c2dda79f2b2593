"""Records of a lasting host pool, kept equal to the pages that the prefix index has in host memory.

The index says when pages join it, with their bytes complete, and before they leave it. A thread makes the checksums of
new pages and writes their records; the record of a page that leaves is cleared within the step, before any command of
that step could write to the page. A flush clears all records first, those of pages that it spares included, and until
the operations from before it have ended new pages get none: what is flushed must not come back with the next process.

At the start the records of the last process become one event, `HostPagesFound`. Its pages are verified at their first
use, by the checksums in their records.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tidekv.backends.checksums import FoundChecksums, HostChecksums, PageHasher
from tidekv.backends.host.page_records import NO_PAGE
from tidekv.engine.log import engine_log
from tidekv.states import events
from tidekv.states.errors import InvalidConfig
from tidekv.states.pages.page_pool import PageState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.host.page_records import PageRecord
    from tidekv.backends.host.pool import HostPool
    from tidekv.backends.host.pool_file import PoolFile
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.prefix.node import Node, TierName
    from tidekv.states.types import Identity

LOG = engine_log("tidekv.engine")
QUEUED_POOLS_MAX: Final = 2
"""Maximum pages whose records wait to be written, in pools. Further ones have none, and are not found again."""
FORMAT: Final = 1
"""Part of the identity of a file: increase it when the meaning of keys or checksums changes."""


class NewPages(NamedTuple):
    """Pages that have joined the index, and whose records are not written yet."""

    before: int
    """The host page before the first one; NO_PAGE at the beginning of a prompt."""
    namespace: str
    keys: bytes
    pages: tuple[int, ...]
    versions: list[int]


class HostRecords:
    """The records of one engine's host pool. Made before the engine's core takes an event, closed after its copies."""

    def __init__(self, core: Core, pool: HostPool, checksums: HostChecksums | FoundChecksums) -> None:
        assert pool.file is not None, "the pool is lasting"
        self._core = core
        self._file: PoolFile = pool.file
        self._records = pool.file.records
        self._hasher = PageHasher(pool.memory)
        self._checksums = checksums
        self._key_bytes = core.settings.key_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidekv-host-records")
        self._found: list[PageRecord] = []
        self._new: list[NewPages] = []
        self._pages_max = QUEUED_POOLS_MAX * pool.num_pages
        self._unflushed: set[int] = set()
        """Operations from before the last flush, which may bring pages from before it."""
        self._queued = self._written = 0
        """Pages whose records were left to the thread, and those that it is done with."""

    def find(self, identity: Identity) -> tuple[events.FoundRun, ...]:
        """Return what an earlier process left, least recently written first. Blocks."""
        digest = hashlib.sha256(msgspec.msgpack.encode((FORMAT, identity))).digest()
        words = f"model {identity.model!r}, {identity.page_size} tokens a page"
        emptied = self._file.begin(digest, words)
        self._found = self._records.find()
        if emptied:
            LOG.warning("a lasting host pool starts empty", path=str(self._file.path), cause=emptied)
        return runs_of(self._found)

    def follow(self) -> None:
        """Write and clear records as the index changes. The core has taken what `find` has returned."""
        core = self._core
        for record in self._found:
            if core.state.host.condition(record.page) is PageState.CACHED:
                self._checksums.found([record.page], record.checksum)
            else:
                self._records.clear([record.page])
        if self._found:
            LOG.info("a lasting host pool was found", path=str(self._file.path), pages=core.state.host.cached)
        self._found = []
        core.state.index.host_tier.on_attach = self._pages_join
        core.state.index.on_evict.append(self._pages_leave)

    def stepped(self, event: events.Event, given: Sequence[Command], error: str = "") -> None:
        """See `Watcher`."""
        operations = self._core.state.operations
        if isinstance(event, events.FlushRequested) and "l2" in event.tiers:
            self._clear_flushed(event.namespace)
            self._unflushed = set(operations)
        elif self._unflushed:
            self._unflushed.intersection_update(operations)
        if self._new:
            new, self._new = self._new, []
            count = sum(len(run.pages) for run in new)
            if self._queued - self._written + count <= self._pages_max:
                self._queued += count
                self._thread.submit(self._write, new, count)

    async def close(self) -> None:
        """Wait until the records of all pages are written. Unbounded: the caller sets the deadline."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _pages_join(self, node: Node) -> None:
        assert node.host is not None and node.parent is not None
        if self._unflushed:
            return
        above = node.parent.host
        before = above[-1] if above else NO_PAGE
        pages = tuple(node.host)
        self._new.append(NewPages(before, node.namespace, node.edge, pages, self._records.versions(pages)))

    def _pages_leave(self, node: Node, tier: TierName) -> None:
        if tier == "host" and node.host is not None:
            self._records.clear(node.host)
            if isinstance(self._checksums, FoundChecksums):
                self._checksums.note(node.host)

    def _clear_flushed(self, namespace: str | None) -> None:
        if namespace is None:
            self._records.clear_all()
            return
        for node in self._core.state.index.nodes():
            if node.namespace == namespace and node.host is not None:
                self._records.clear(node.host)

    # --- On the thread ---

    def _write(self, new: list[NewPages], count: int) -> None:
        try:
            for run in new:
                self._write_run(run)
        except Exception:
            # These pages are not found again; serving goes on.
            LOG.exception("records of a lasting host pool were not written", path=str(self._file.path))
        finally:
            self._written += count

    def _write_run(self, run: NewPages) -> None:
        before = run.before
        for at, (page, version) in enumerate(zip(run.pages, run.versions, strict=True)):
            key = run.keys[at * self._key_bytes : (at + 1) * self._key_bytes]
            checksum = self._checksum(page)
            if not self._records.write(
                page, version, before=before, namespace=run.namespace, key=key, checksum=checksum
            ):
                return
            before = page

    def _checksum(self, page: int) -> bytes:
        # Damage since the noted checksum must not become part of the record.
        if isinstance(self._checksums, HostChecksums):
            return self._checksums.noted([page])
        return self._hasher.checksums([page])


def runs_of(records: Sequence[PageRecord]) -> tuple[events.FoundRun, ...]:
    """Join records, each behind that of the page before it, to runs that end where prompts part."""
    followers = Counter(record.before for record in records)
    runs: list[tuple[PageRecord, list[bytes], list[int]]] = []
    by_last: dict[int, tuple[list[bytes], list[int]]] = {}
    for record in records:
        open_run = by_last.pop(record.before, None) if followers[record.before] == 1 else None
        if record.before == NO_PAGE or open_run is None:
            open_run = [], []
            runs.append((record, *open_run))
        keys, pages = open_run
        keys.append(record.key)
        pages.append(record.page)
        by_last[record.page] = open_run
    return tuple(
        events.FoundRun(first.before, b"".join(keys), tuple(pages), first.namespace) for first, keys, pages in runs
    )


def check_lasting(host: HostPool | None, components: Sequence[ComponentPools], *, is_rank: bool) -> None:
    """Raise InvalidConfig for a lasting pool where pages could not be found again."""
    pools = [host, *(pools.host for pools in components)]
    if not any(pool is not None and pool.file is not None for pool in pools):
        return
    if is_rank:
        raise InvalidConfig("a host pool with a path cannot be that of one of several ranks: leave out the path")
    if components:
        raise InvalidConfig("a host pool with a path cannot be that of a model with components: leave out the path")
