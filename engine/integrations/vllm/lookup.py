"""Look-up of prompts in storage beside vLLM's scheduler. Results are futures, and a failure counts as a miss.

A look-up also tells storage that the pages are in use, since it does not see those that vLLM has in its own cache.

With tensor parallelism a page is present if each rank's slice of it is: every rank's namespace is looked up, and the
shortest prefix is the result.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from functools import partial

from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.base import Storage, leading, touch
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.integrations.vllm.settings import Shared
from tidekv.engine.log import engine_log
from tidekv.engine.shared_storage import StorageGuard, open_pages
from tidekv.engine.stored_layouts import RankLayout
from tidekv.engine.thread.loop_thread import LoopThread
from tidekv.states.storage.circuit_breaker import QUERY
from tidekv.transports.tasks import own_cancels_only

LOG = engine_log("tidekv.vllm")


def lookup_of(shared: Shared) -> PrefixLookup:
    """Open the storage of a connector. Raises what its engine raises."""
    settings = shared.settings
    return PrefixLookup(
        partial(open_storage, settings.uri, settings.options),
        layout=shared.layout,
        model=shared.model,
        ranks=shared.ranks,
        timeout_s=settings.lookup_timeout_s,
    )


class PrefixLookup:
    """Owns one storage engine for each rank's namespace, on its own loop, until `close`."""

    def __init__(
        self, open_one: Callable[[], Storage], *, layout: KVLayout, model: str, ranks: int, timeout_s: float
    ) -> None:
        """Open all engines. Raises what they raise, with everything stopped again."""
        self._timeout_s = timeout_s
        # Engines need a pool to register, although nothing is read into it.
        self._pool = HostPool.allocate(layout, 1, pin=False)
        self._storages: list[Storage] = []
        self._guard = StorageGuard(self._storages, LOG)
        self._asking: set[asyncio.Task[object]] = set()
        self._loop = LoopThread("tidekv-vllm-lookup")
        try:
            for rank in range(ranks):
                storage = open_one()
                self._storages.append(storage)
                place = RankLayout(layout.identity(model), rank, ranks)
                self._loop.call(open_pages(storage, self._pool, place, poller=self._loop.poller, log=LOG))
        except BaseException:
            self.close()
            raise

    def ask(self, keys: Sequence[bytes]) -> concurrent.futures.Future[int]:
        """Return a future: the number of keys, from the first on, that every rank probably has; 0 if storage fails."""
        return self._loop.start(self._count(keys))

    def close(self) -> None:
        """Complete running look-ups, and close the engines. Idempotent."""
        self._loop.close(self._close())

    async def _count(self, keys: Sequence[bytes]) -> int:
        if not keys:
            return 0
        task = asyncio.current_task()
        assert task is not None, "it runs in a task"
        self._asking.add(task)
        try:
            flags = await self._guard.call(QUERY, "storage look-up failed, which counts as a miss", self._touch, keys)
        finally:
            self._asking.discard(task)
        return 0 if flags is None else min(map(leading, flags))

    async def _touch(self, keys: Sequence[bytes]) -> list[list[bool]]:
        """Ask all engines at once. Raises the first error, when none is asked any more."""
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(own_cancels_only(touch(one, keys, timeout_s=self._timeout_s), "storage"))
                    for one in self._storages
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asked]

    async def _close(self) -> None:
        await self._guard.close()
        for storage in self._storages:
            await storage.close()
        while self._asking:
            await asyncio.wait(self._asking)
