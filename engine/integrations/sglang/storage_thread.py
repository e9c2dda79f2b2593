"""Blocking interface to a storage engine: a loop on its own thread, and staging pages for the bytes.

Reads and writes use separate staging pages, so a read never waits for a write. Methods may be called on any thread;
calls of the same direction run one after the other. A call that fails is logged and counts as a miss. After repeated
failures storage is not called until a probe succeeds: each call would hold up SGLang until its timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

import torch

from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.base import Storage, leading, prefix_of, touch
from tidekv.backends.storage.prefix_put import put_prefix
from tidekv.engine.log import engine_log
from tidekv.engine.shared_storage import StorageGuard, open_pages
from tidekv.engine.stored_layouts import RankLayout
from tidekv.engine.thread.loop_thread import CLOSE_S, LoopThread
from tidekv.states.storage.circuit_breaker import FETCH, QUERY, STORE
from tidekv.states.types import page_ids

LOG = engine_log("tidekv.sglang")

BATCH_BYTES: Final = 64 << 20
BATCH_PAGES_MAX: Final = 128
LOOK_UP_S = 1.0
"""Maximum seconds for which a look-up blocks its caller. SGLang's decode server looks up in the thread that schedules
all of its requests.
"""


class StorageThread:
    """Owns the storage, its poller, its loop and the staging pages until `close`."""

    def __init__(
        self,
        storage: Storage,
        *,
        layout: KVLayout,
        model: str,
        rank: int = 0,
        ranks: int = 1,
        timeout_s: float = 30.0,
    ) -> None:
        """Start the thread and register the pool. Raises what the engine raises, with everything stopped again.

        Pages are shared with every user of the same model, layout and rank, such as a decode engine with
        `EngineConfig(model=…)`.
        """
        self.layout = layout
        self._storage = storage
        self._timeout_s = timeout_s
        self._batch = max(1, min(BATCH_BYTES // layout.page_bytes, BATCH_PAGES_MAX))
        self._pool = HostPool.allocate(layout, 2 * self._batch, pin=False)
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._guard = StorageGuard([storage], LOG)
        self._late: Future[list[bool] | None] | None = None
        """A look-up that its caller has stopped waiting for."""
        self._loop = LoopThread("tidekv-shared-storage")
        place = RankLayout(layout.identity(model), rank, ranks)
        try:
            self._loop.call(open_pages(storage, self._pool, place, poller=self._loop.poller, log=LOG))
        except BaseException:
            self.close()
            raise

    def leading(self, keys: Sequence[bytes], *, prefix_keys: Sequence[bytes] = ()) -> int:
        """Return the number of keys, from the first on, that storage probably has. The pages are in use from now on,
        and so are those before them, whose keys are `prefix_keys`.

        Storage that does not answer within LOOK_UP_S has none of them, and is not asked again before it has answered.
        """
        late = self._late
        if late is not None and not late.done():
            self._loop.check()
            return 0
        asked = self._loop.start(self._touch([*prefix_keys, *keys]))
        wait([asked], timeout=LOOK_UP_S)
        if not asked.done():
            self._late = asked
            LOG.warning("storage does not answer a look-up, which counts as a miss", waited_s=LOOK_UP_S)
            return 0
        return leading((asked.result() or [])[len(prefix_keys) :])

    def get(
        self,
        keys: Sequence[bytes],
        take: Callable[[int, torch.Tensor], None],
        *,
        prefix_keys: Sequence[bytes] = (),
    ) -> list[bool]:
        """Read pages; calls `take(number, tensor)` for each verified one.

        The tensor [page_bytes] belongs to the store and is valid only during the call.
        """
        valid: list[bool] = []
        self._loop.check()
        with self._reading:
            for first in range(0, len(keys), self._batch):
                batch = keys[first : first + self._batch]
                pages = page_ids(range(len(batch)))
                above = prefix_of(self._storage, [*prefix_keys, *keys[:first]])
                what, get_into = "storage read failed, which counts as a miss", self._storage.get_into
                found = self._loop.call(
                    self._guard.call(FETCH, what, get_into, batch, pages, timeout_s=self._timeout_s, **above)
                )
                if found is None:
                    break
                for page, is_there in enumerate(found):
                    if is_there:
                        take(first + page, self._pool.buffer[page])
                valid += found
        return valid + [False] * (len(keys) - len(valid))

    def put(
        self,
        keys: Sequence[bytes],
        give: Callable[[int, torch.Tensor], None],
        *,
        prefix_keys: Sequence[bytes] = (),
    ) -> list[bool]:
        """Write the pages that storage lacks; `give(number, tensor)` fills the tensor [page_bytes] of each.

        The pages before them, whose keys are `prefix_keys`, are in use as well: they are evicted later.
        """
        stored: list[bool] = []
        self._loop.check()
        with self._writing:
            for first in range(0, len(keys), self._batch):
                batch = keys[first : first + self._batch]
                for page in range(len(batch)):
                    give(first + page, self._pool.buffer[self._batch + page])
                pages = page_ids(range(self._batch, self._batch + len(batch)))
                given: dict[str, Any] = {"timeout_s": self._timeout_s, "prefix_keys": [*prefix_keys, *keys[:first]]}
                put = self._loop.call(
                    self._guard.call(STORE, "storage write failed", put_prefix, self._storage, batch, pages, **given)
                )
                if put is None:
                    break
                stored += put.there
            if stored and (prefix_keys or len(keys) > self._batch):
                # The last batch is the newest in storage now, and would be evicted after the head.
                self._loop.call(self._touch([*prefix_keys, *keys]))
        return stored + [False] * (len(keys) - len(stored))

    def clear(self) -> int:
        """Delete every page of this namespace; returns their number."""
        return self._loop.call(self._storage.clear())

    def close(self) -> None:
        """Wait for running calls, for at most CLOSE_S, and close everything. Idempotent. Nothing in a forked child.

        Raises TidekvError if storage hangs: it is left behind with the calls that use it.
        """
        if self._loop.is_forked:
            return
        held = [lock for lock in (self._reading, self._writing) if lock.acquire(timeout=CLOSE_S)]
        try:
            self._loop.close(self._close())
        finally:
            for lock in held:
                lock.release()

    async def _touch(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Note that pages are in use; returns which are there, None after a failure."""
        what = "storage look-up failed, which counts as a miss"
        return await self._guard.call(QUERY, what, touch, self._storage, keys, timeout_s=self._timeout_s)

    async def _close(self) -> None:
        await self._guard.close()
        await self._storage.close()
