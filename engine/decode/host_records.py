"""Records of lasting host pools, kept equal to the pages that the prefix index has in host memory.

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
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tidekv.backends.checksums import FoundChecksums, HostChecksums, PageHasher
from tidekv.backends.host.page_records import NO_PAGE
from tidekv.engine.log import engine_log
from tidekv.states import events
from tidekv.states.errors import InvalidConfig
from tidekv.states.pages.page_pool import PageState
from tidekv.states.types import FULL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.host.page_records import PageRecord
    from tidekv.backends.host.pool import HostPool
    from tidekv.backends.host.pool_file import PoolFile
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.pages.page_pool import PagePool
    from tidekv.states.prefix.node import Node, TierName
    from tidekv.states.types import Identity

LOG = engine_log("tidekv.engine")
QUEUED_POOLS_MAX: Final = 2
"""Maximum pages whose records wait to be written, in pools. Further ones have none, and are not found again."""
FORMAT: Final = 1
"""Part of the identity of a file: increase it when the meaning of keys or checksums changes."""


class NewPages(NamedTuple):
    """Pages that have joined the index, and whose records are not written yet."""

    component: str
    before: int
    """The host page before the first one; NO_PAGE at the beginning of a prompt. Of a component: the full host page at
    its position.
    """
    namespace: str
    keys: bytes
    """Empty for a component."""
    pages: tuple[int, ...]
    versions: list[int]


class PoolRecords:
    """The records of one pool, and the checksums of its pages."""

    def __init__(self, pool: HostPool, checksums: HostChecksums | FoundChecksums) -> None:
        assert pool.file is not None, "the pool is lasting"
        self.file: PoolFile = pool.file
        self.records = pool.file.records
        self.checksums = checksums
        self.found: list[PageRecord] = []
        """What an earlier process left, until the core has taken it."""
        self._hasher = PageHasher(pool.memory)

    def find(self, identity: Identity, component: str) -> None:
        """Open the file for these pages, and read the records. Blocks."""
        digest = hashlib.sha256(msgspec.msgpack.encode((FORMAT, identity, component))).digest()
        of = "" if component == FULL else f" of {component!r}"
        emptied = self.file.begin(digest, f"model {identity.model!r}, {identity.page_size} tokens a page{of}")
        self.found = self.records.find()
        if emptied:
            LOG.warning("a lasting host pool starts empty", path=str(self.file.path), cause=emptied)

    def take_found(self, pool: PagePool) -> None:
        """Keep the checksums of the found pages that the core has taken; clear the records of the others."""
        for record in self.found:
            if pool.condition(record.page) is PageState.CACHED:
                self.checksums.found([record.page], record.checksum)
            else:
                self.records.clear([record.page])
        if self.found:
            LOG.info("a lasting host pool was found", path=str(self.file.path), pages=pool.cached)
        self.found = []

    def leave(self, pages: Iterable[int]) -> None:
        """Clear the records of pages that may be written to from now on."""
        pages = list(pages)
        self.records.clear(pages)
        if isinstance(self.checksums, FoundChecksums):
            self.checksums.note(pages)

    def checksum(self, page: int) -> bytes:
        """Return the checksum for a page's record."""
        # Damage since the noted checksum must not become part of the record.
        if isinstance(self.checksums, HostChecksums):
            return self.checksums.noted([page])
        return self._hasher.checksums([page])


class HostRecords:
    """The records of one engine's host pools. Made before the engine's core takes an event, closed after its copies."""

    def __init__(self, core: Core, pools: Mapping[str, PoolRecords]) -> None:
        """`pools`: the lasting ones, by component; that of the full pages is among them."""
        self._core = core
        self._pools = pools
        self._key_bytes = core.settings.key_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidekv-host-records")
        self._new: list[NewPages] = []
        self._pages_max = QUEUED_POOLS_MAX * core.settings.host_pages
        self._unflushed: set[int] = set()
        """Operations from before the last flush, which may bring pages from before it."""
        self._queued = self._written = 0
        """Pages whose records were left to the thread, and those that it is done with."""

    def find(self, identity: Identity, at_s: float) -> events.HostPagesFound | None:
        """Return what an earlier process left, least recently written first; None without any. Blocks."""
        full = self._pools[FULL]
        full.find(identity, FULL)
        beside: list[events.FoundComponent] = []
        for name, pool in self._pools.items():
            if name != FULL:
                pool.records.follow(full.records)
                pool.find(identity, name)
                beside += [events.FoundComponent(name, record.before, record.page) for record in pool.found]
        if not full.found:
            return None
        return events.HostPagesFound(at_s=at_s, runs=runs_of(full.found), component_pages=tuple(beside))

    def follow(self) -> None:
        """Write and clear records as the index changes. The core has taken what `find` has returned."""
        state = self._core.state
        self._pools[FULL].take_found(state.host)
        state.index.host_tier.on_attach = self._pages_join
        state.index.on_evict.append(self._pages_leave)
        for name, pool in self._pools.items():
            if name != FULL:
                assert state.components is not None
                tier = state.components.host[name]
                pool.take_found(tier.pool)
                tier.on_enter, tier.on_drop = partial(self._component_joins, name), pool.leave

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
        above = node.parent.host
        self._join(FULL, above[-1] if above else NO_PAGE, node.namespace, node.edge, tuple(node.host))

    def _component_joins(self, name: str, node: Node, position: int, page: int) -> None:
        assert node.host is not None, "component pages go with full ones"
        beside = node.host[position - (node.depth_pages - node.page_count)]
        self._join(name, beside, "", b"", (page,))

    def _join(self, name: str, before: int, namespace: str, keys: bytes, pages: tuple[int, ...]) -> None:
        if not self._unflushed:
            versions = self._pools[name].records.versions(pages)
            self._new.append(NewPages(name, before, namespace, keys, pages, versions))

    def _pages_leave(self, node: Node, tier: TierName) -> None:
        if tier == "host" and node.host is not None:
            self._pools[FULL].leave(node.host)

    def _clear_flushed(self, namespace: str | None) -> None:
        if namespace is None:
            for pool in self._pools.values():
                pool.records.clear_all()
            return
        for node in self._core.state.index.nodes():
            if node.namespace == namespace and node.host is not None:
                # Without these, pages of components are not found either.
                self._pools[FULL].records.clear(node.host)

    # --- On the thread ---

    def _write(self, new: list[NewPages], count: int) -> None:
        try:
            for run in new:
                self._write_run(run)
        except Exception:
            # These pages are not found again; serving goes on.
            LOG.exception("records of a lasting host pool were not written", path=str(self._pools[FULL].file.path))
        finally:
            self._written += count

    def _write_run(self, run: NewPages) -> None:
        pool, before, width = self._pools[run.component], run.before, self._key_bytes
        for at, (page, version) in enumerate(zip(run.pages, run.versions, strict=True)):
            key, checksum = run.keys[at * width : (at + 1) * width], pool.checksum(page)
            if not pool.records.write(
                page, version, before=before, namespace=run.namespace, key=key, checksum=checksum
            ):
                return
            before = page


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
    lasts = [pools.name for pools in components if pools.host is not None and pools.host.file is not None]
    full_lasts = host is not None and host.file is not None
    if is_rank and (full_lasts or lasts):
        raise InvalidConfig("a host pool with a path cannot be that of one of several ranks: leave out the path")
    if lasts and not full_lasts:
        raise InvalidConfig(f"the host pool of {lasts[0]!r} has a path, that of the full pages has none: give it one")
