"""Movement of a worker's pages between vLLM's blocks, bounded host memory (L2) and storage (L3).

    load   L2, or storage ──▶ host pages ──▶ blocks        ends with the list of blocks that could not be filled
    save   blocks ──▶ host pages ──▶ storage               dropped while half of the host pages are in use by saves

vLLM's thread starts jobs and never waits for storage; they run on a loop of their own. Host pages keep their content
until they are needed for other pages. No failure fails a request: vLLM recomputes what is not loaded.

Bounded cache of host pages by key (L2) that evicts the least recently used page.

    free ──take──▶ lent ──keep under a key──▶ lent, found by its key
      ▲              │                          │ last receipt back
      └──give_back───┘                          ▼
      ▲                                       idle, found by its key ──find──▶ lent again
      └──────────taken when no page is free─────┘

It only accounts for pages and holds no bytes. Methods may be called on any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from tidekv.backends.copies.block_order import BlockCopies, PagedBlocks, Wait
from tidekv.backends.copies.streams import Mark
from tidekv.backends.host.pool import HostPool
from tidekv.backends.storage.base import prefix_of
from tidekv.backends.storage.prefix_put import put_prefix
from tidekv.engine.integrations.vllm.jobs import LoadEnded, LoadJob, SaveJob
from tidekv.engine.log import engine_log
from tidekv.engine.shared_storage import StorageGuard, open_pages
from tidekv.engine.stored_layouts import RankLayout
from tidekv.engine.thread.loop_thread import LoopThread
from tidekv.states.errors import BrokenInvariant, InvalidConfig
from tidekv.states.types import page_ids
from tidekv.transports.blocking import settled
from tidekv.transports.tasks import OwnedTasks

if TYPE_CHECKING:
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.integrations.vllm.settings import Shared


class HostCache:
    """The pool of `page_count` host pages. Each page from `take` and `find` must be given back once."""

    def __init__(self, page_count: int) -> None:
        if page_count < 1:
            raise InvalidConfig(f"a host cache needs at least one page, not {page_count}")
        self.page_count = page_count
        self._lock = threading.Lock()
        self._free = list(range(page_count - 1, -1, -1))
        self._receipts = [0] * page_count
        self._key_of: list[bytes | None] = [None] * page_count
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def take(self, count: int) -> list[int]:
        """Take up to `count` pages for new bytes: free ones first, then idle ones, whose keys are forgotten."""
        with self._lock:
            taken: list[int] = []
            while len(taken) < count and (self._free or self._idle):
                page = self._free.pop() if self._free else self._idle.popitem(last=False)[0]
                self._forget(page)
                self._receipts[page] = 1
                taken.append(page)
            return taken

    def find(self, key: bytes) -> int | None:
        """Return the page with the bytes of `key`, or None. It is not overwritten until it is given back."""
        with self._lock:
            page = self._page_of.get(key)
            if page is not None:
                self._receipts[page] += 1
                self._idle.pop(page, None)
            return page

    def keep(self, key: bytes, page: int) -> None:
        """Record that a lent page has the bytes of `key`. No effect if another page has that key already."""
        with self._lock:
            if not self._receipts[page] or self._key_of[page] is not None:
                raise BrokenInvariant(f"host page {page} is not lent for new bytes")
            if key not in self._page_of:
                self._page_of[key] = page
                self._key_of[page] = key

    def give_back(self, pages: Iterable[int]) -> None:
        """Return one receipt of each page."""
        with self._lock:
            for page in pages:
                if not self._receipts[page]:
                    raise BrokenInvariant(f"host page {page} was given back twice")
                self._receipts[page] -= 1
                if self._receipts[page]:
                    continue
                if self._key_of[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None

    def available(self) -> int:
        """Number of pages that `take` could return now."""
        with self._lock:
            return len(self._free) + len(self._idle)

    def cached(self) -> int:
        """Number of pages that have a key."""
        with self._lock:
            return len(self._page_of)

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        if key is not None:
            del self._page_of[key]
            self._key_of[page] = None


LOG = engine_log("tidekv.vllm")
BATCH_BYTES: Final = 64 << 20
BATCH_PAGES_MAX: Final = 128
NOT_STORED: Final = "pages could not be stored"
T = TypeVar("T")


class WorkerPages:
    """Owns the host pages, the storage engine and the loop of one worker until `close`."""

    def __init__(self, storage: Storage, *, blocks: PagedBlocks, shared: Shared) -> None:
        """Open the storage. Raises OutOfMemory, and what the engine raises, with everything stopped again."""
        layout, settings = shared.layout, shared.settings
        # Saves use at most half of the pages, so loads find free ones even if storage accepts writes slowly.
        count = max(2, settings.host_bytes // layout.page_bytes)
        self.host_pages = count
        self._host = HostPool.allocate(layout, count, pin=blocks.device.type == "cuda")
        self._cache = HostCache(count)
        self._saving_max = count // 2
        self._batch = max(1, min(BATCH_BYTES // layout.page_bytes, BATCH_PAGES_MAX, count - self._saving_max))
        self._per_page = shared.blocks_per_page
        self._settings = settings
        self._storage = storage
        self._copies = BlockCopies(blocks, self._host)
        self._lock = threading.Lock()
        self._saving = 0
        self._loading = 0
        """Loads that were started and not returned by `take_ended` yet; for vLLM's thread only."""
        self._counts: Counter[str] = Counter()
        self._ended: list[LoadEnded] = []
        self._tasks = OwnedTasks("vLLM pages")
        self._guard = StorageGuard([storage], LOG)
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()
        self._writer = ThreadPoolExecutor(1, "tidekv-vllm-copy")
        self._loop = LoopThread("tidekv-vllm-pages")
        place = RankLayout(layout.identity(shared.model), shared.rank, shared.ranks)
        try:
            self._loop.call(open_pages(storage, self._host, place, poller=self._loop.poller, log=LOG))
        except BaseException:
            self.close()
            raise

    # --- For vLLM's thread ---

    def load(self, job: LoadJob) -> None:
        """Start a load. Its result is returned by `take_ended` exactly once."""
        self._loop.check()
        after = self._copies.mark()
        self._loading += 1
        self._loop.post(lambda: self._spawn(self._load(job, after), name=f"load {job.request_id}"))

    def save(self, job: SaveJob) -> None:
        """Read the blocks into host pages, and start storing them. vLLM may reuse the blocks after the return."""
        self._loop.check()
        for first in range(0, len(job.keys), self._batch):
            keys = job.keys[first : first + self._batch]
            above = (*job.prefix_keys, *job.keys[:first])
            self._save_batch(keys, job.blocks[first * self._per_page : (first + len(keys)) * self._per_page], above)

    def take_ended(self) -> list[LoadEnded]:
        """Return the loads that ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        self._loading -= len(ended)
        return ended

    def is_loading(self) -> bool:
        """Whether a load was started that `take_ended` has not returned."""
        return self._loading > 0

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, by the names of `COUNTS`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Finish running jobs, within the timeout for saves, and close everything. Idempotent. Nothing in a forked
        child.
        """
        if self._loop.is_forked:
            return
        self._loop.close(self._close(), within_s=self._settings.save_timeout_s)
        self._writer.shutdown()

    # --- Loads ---

    async def _load(self, job: LoadJob, after: Mark) -> None:
        until_s = asyncio.get_running_loop().time() + self._settings.load_timeout_s
        here = 0
        # Pages from `here` on that were not loaded, by cause; those that remain are behind them.
        causes: Counter[str] = Counter()
        try:
            async with asyncio.timeout_at(until_s):
                while here < len(job.keys) and not causes:
                    keys = job.keys[here : here + self._batch]
                    here += await self._load_batch(job, here, keys, after, causes)
        except TimeoutError:
            causes["load_pages_late"] = len(job.keys) - here
        except asyncio.CancelledError:
            causes["load_pages_failed"] = len(job.keys) - here
            raise
        except Exception as error:
            causes["load_pages_failed"] = len(job.keys[here : here + self._batch])
            self._guard.failed("pages could not be loaded and are recomputed", error)
        finally:
            # Also if the task was cancelled: vLLM waits until the load is reported as ended.
            failed = job.blocks[max(0, here * self._per_page - job.skip) :]
            behind = len(job.keys) - here - causes.total()
            with self._lock:
                self._counts.update(causes, **({"load_pages_behind": behind} if behind else {}))
                self._ended.append(LoadEnded(job.request_id, failed))

    async def _load_batch(
        self, job: LoadJob, first: int, keys: Sequence[bytes], after: Mark, causes: Counter[str]
    ) -> int:
        """Load pages into their blocks; returns how many, from the first on, and adds those not found to `causes`.

        After a timeout no block is written.
        """
        pages = [self._cache.find(key) for key in keys]
        lent = [page for page in pages if page is not None]
        missing = [at for at, page in enumerate(pages) if page is None]
        try:
            found: list[bool] | None = []
            if missing:
                taken = await self._take(len(missing))
                lent += taken
                for at, page in zip(missing, taken, strict=True):
                    pages[at] = page
                above = (*job.prefix_keys, *job.keys[: first + missing[0]])
                reading = self._spawn(self._read([keys[at] for at in missing], taken, above), name="read")
                try:
                    found = await asyncio.shield(reading)
                except asyncio.CancelledError:
                    # A read cannot be stopped, so the pages stay lent until it ends.
                    reading.add_done_callback(partial(self._give_back_later, lent))
                    lent = []
                    raise
            not_found = (
                missing if found is None else [at for at, there in zip(missing, found, strict=True) if not there]
            )
            # Only a prefix is usable: vLLM recomputes everything from the first failed block on.
            valid = not_found[0] if not_found else len(keys)
            if valid:
                await self._write([page for page in pages[:valid] if page is not None], job, first, after)
            if not_found:
                causes["load_pages_failed" if found is None else "load_pages_missing"] = len(not_found)
            from_storage = sum(1 for at in missing if at < valid)
            self._count("load_pages_storage", from_storage)
            self._count("load_pages_host", valid - from_storage)
            return valid
        finally:
            self._give_back(lent)

    async def _read(
        self, keys: Sequence[bytes], pages: Sequence[int], prefix_keys: Sequence[bytes]
    ) -> list[bool] | None:
        """Read pages from storage, and return which were found; None if storage failed."""
        found = await self._guard.call(
            "pages could not be read from storage and are recomputed",
            self._storage.get_into,
            keys,
            page_ids(pages),
            timeout_s=self._settings.load_timeout_s,
            **prefix_of(self._storage, prefix_keys),
        )
        if found is not None:
            for key, page, is_there in zip(keys, pages, found, strict=True):
                if is_there:
                    self._cache.keep(key, page)
        return found

    async def _write(self, pages: Sequence[int], job: LoadJob, first: int, after: Mark) -> None:
        """Copy pages to their blocks, even if cancelled: no block may be written after its load is reported ended."""
        skip = max(0, job.skip - first * self._per_page)
        start = max(0, first * self._per_page - job.skip)
        blocks = job.blocks[start : (first + len(pages)) * self._per_page - job.skip]

        def write() -> int:
            self._copies.write(pages, blocks, skip=skip, after=after)
            return len(pages)

        await settled(asyncio.get_running_loop().run_in_executor(self._writer, write))

    # --- Saves ---

    def _save_batch(self, keys: Sequence[bytes], blocks: Sequence[int], prefix_keys: Sequence[bytes]) -> None:
        if self._guard.is_open:
            self._count("save_pages_dropped", len(keys))
            return
        with self._lock:
            room = self._saving_max - self._saving
        # Pages found by their key are not read from the blocks again, but may still be missing in storage.
        held = [self._cache.find(key) for key in keys]
        new = [at for at, page in enumerate(held) if page is None]
        taken = self._cache.take(min(len(new), room))
        for at, page in zip(new, taken, strict=False):
            held[at] = page
        # Pages behind one that is not saved could not be found by their prefix.
        end = next((at for at, page in enumerate(held) if page is None), len(held))
        behind = [page for page in held[end:] if page is not None]
        wait = self._read_blocks([at for at in new if held[at] is not None], taken, blocks)
        pairs = [(key, page) for key, page in zip(keys, held[:end], strict=False) if page is not None]
        with self._lock:
            self._saving += len(pairs)
            self._counts["save_pages_dropped"] += len(keys) - len(pairs)
        if pairs:
            self._loop.post(lambda: self._spawn(self._save(pairs, set(taken), wait, prefix_keys), name="save"))
        if behind:
            self._loop.post(lambda: self._give_back(behind))

    def _read_blocks(self, at: Sequence[int], pages: Sequence[int], blocks: Sequence[int]) -> Wait:
        """Start copying the pages at these positions of a batch to host pages."""
        wanted = [block for number in at for block in blocks[number * self._per_page : (number + 1) * self._per_page]]
        return self._copies.read(wanted, pages) if wanted else int

    async def _save(
        self, pairs: Sequence[tuple[bytes, int]], new: set[int], wait: Wait, prefix_keys: Sequence[bytes]
    ) -> None:
        stored = present = 0
        try:
            await settled(asyncio.get_running_loop().run_in_executor(None, wait))
            for key, page in pairs:
                if page in new:
                    self._cache.keep(key, page)
            keys, pages = [key for key, _ in pairs], page_ids([page for _, page in pairs])
            done = await self._guard.call(
                NOT_STORED,
                put_prefix,
                self._storage,
                keys,
                pages,
                timeout_s=self._settings.save_timeout_s,
                prefix_keys=prefix_keys,
            )
            if done is not None:
                stored, present = done.put, sum(done.there) - done.put
        except Exception as error:
            self._guard.failed(NOT_STORED, error)
        finally:
            self._count("save_pages_stored", stored)
            self._count("save_pages_present", present)
            self._count("save_pages_failed", len(pairs) - stored - present)
            with self._lock:
                self._saving -= len(pairs)
            self._give_back([page for _, page in pairs])

    # --- Host pages ---

    async def _take(self, count: int) -> list[int]:
        """Take host pages, all or none. Callers are served in order, so that a large batch cannot starve."""
        async with self._turn:
            while True:
                taken = self._cache.take(count)
                if len(taken) == count:
                    return taken
                self._cache.give_back(taken)
                self._changed.clear()
                await self._changed.wait()

    def _spawn(self, work: Coroutine[object, object, T], *, name: str) -> asyncio.Task[T]:
        task = self._tasks.spawn(work, name=name)
        # Added after the callback by which OwnedTasks removes the task, so a waiter sees the new number of tasks.
        task.add_done_callback(lambda _: self._changed.set())
        return task

    def _give_back(self, pages: Sequence[int]) -> None:
        self._cache.give_back(pages)
        self._changed.set()

    def _give_back_later(self, pages: Sequence[int], _: asyncio.Task[list[bool] | None]) -> None:
        self._give_back(pages)

    def _count(self, name: str, count: int) -> None:
        if count:
            with self._lock:
                self._counts[name] += count

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(self._settings.save_timeout_s):
                while len(self._tasks):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            LOG.warning("storage is too slow: pages still being written are given up")
        await self._guard.close()
        await self._tasks.close()
        await self._storage.close()
        await asyncio.get_running_loop().shutdown_default_executor()
