"""Write-through of finished prompts from a prefill worker to storage, under the keys that decode workers use.

A finished room lends its pages until they are copied to host memory, for at most `hold_s`, so slow storage does not
hold prefill's pages. From host memory they are put, except those that storage has already. A cache tier never fails a
request: what cannot be stored is dropped and counted. Copies and puts overlap:

    room.finish ──▶ look up what is stored ──▶ copy a batch to host pages ──▶ … ──▶ given back
                                                   └──▶ put the batch ──▶ host pages free again ──▶ … ──▶ touch all

The look-up also tells storage that the pages are in use: it would evict them otherwise, since it sees no hit of prefill
or decode. After the puts the whole prompt is touched once more, so that its end is evicted before its beginning.

Pages of components follow the full pages: those that the room sent or kept (`Room.keep_component_pages`), as far as
they belong to full pages of the prompt. Each component has a storage engine and host pages of its own.

After repeated failures no prompt is stored until a probe of storage has succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from tidekv.backends.component_pools import with_components
from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.page_keys import PageKeys
from tidekv.backends.keys.prompt_keys import PromptKeys
from tidekv.backends.page_layout import same_pages
from tidekv.backends.storage.base import prefix_of, touch
from tidekv.engine.log import engine_log
from tidekv.engine.shared_storage import BreakerLimits, StorageGuard, open_pages, sibling_for
from tidekv.engine.stored_layouts import layout_at
from tidekv.states.errors import InvalidConfig, StorageFailed, TidekvError
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.types import page_ids
from tidekv.transports.blocking import settled
from tidekv.transports.tasks import OwnedTasks, own_cancels_only

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from tidekv.backends.base import Poller
    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.prefill.prefill_config import PrefillConfig
    from tidekv.engine.stored_layouts import RankLayout
    from tidekv.states.types import PageIds
    from tidekv.transports.prefill.prefill_room import Room

LOG = engine_log("tidekv.engine")
CLOSE_S = 30.0
"""Maximum seconds that closing waits for cancelled puts, for storage, and for the copier."""
BOUNCE_PAGES = 256
"""Maximum host pages of a peer that was given no host pool, and of each component."""

FAILED = "writing a prompt through to storage failed"

COUNTS = (
    "store_closed_early",
    "store_component_pages_failed",
    "store_component_pages_late",
    "store_component_pages_present",
    "store_component_pages_written",
    "store_pages_failed",
    "store_pages_late",
    "store_pages_present",
    "store_pages_written",
    "store_pages_skipped",
    "store_rooms_declined",
    "store_rooms_skipped",
    "store_rooms_without_tokens",
)
"""Names of the counts, so that statistics have all of them from the start."""


class StoredPages:
    """One kind of pages, full ones or those of a component: device pool, host pages on their way, and storage."""

    def __init__(self, storage: Storage | None, device: DevicePool, host: HostPool, *, what: str) -> None:
        """`what` begins the names of its counts. A component's storage is made when the peer starts."""
        self.storage = storage
        self.device = device
        self.host = host
        self.what = what
        self.bounce = PagePool(f"bounce {what}", host.num_pages)
        self.copier: PageCopier | None = None

    async def start(self, layout: RankLayout, component: str, poller: Poller) -> None:
        """Open storage and the copier."""
        assert self.storage is not None
        self.copier = PageCopier(self.device, self.host)
        self.copier.start()
        await open_pages(self.storage, self.host, layout, component, poller=poller, log=LOG)


class PromptStore:
    """Writes finished prompts through to one storage engine, by way of its own host pages."""

    def __init__(
        self,
        storage: Storage,
        config: PrefillConfig,
        *,
        device: object,
        host: HostPool | None,
        components: Sequence[ComponentPools] = (),
    ) -> None:
        """Check the arguments and open nothing. Raises InvalidConfig.

        The store owns every page of `host`.
        """
        if not isinstance(device, DevicePool):
            raise InvalidConfig(f"storage needs a DevicePool, whose pages it can copy, not {type(device).__name__}")
        if host is not None and not same_pages(host.layout, device.layout):
            raise InvalidConfig(f"host pool has layout {host.layout}, device pool has {device.layout}")
        self.settings = config.store
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._storage = storage
        host = host or HostPool.allocate(device.layout, min(device.num_pages, BOUNCE_PAGES))
        self._full = StoredPages(storage, device, host, what="store_pages")
        self._components = {
            pools.name: StoredPages(
                None,
                pools.device,
                HostPool.allocate(pools.device.layout, min(pools.device.num_pages, BOUNCE_PAGES)),
                what="store_component_pages",
            )
            for pools in components
        }
        self._prompt_keys = PromptKeys(PageKeys(device.layout.page_size, bigrams=config.bigram_keys))
        identity = with_components(device.layout.identity(config.model), components)
        self._layout = layout_at(config.place, identity)
        self._changed = asyncio.Event()
        self._tasks = OwnedTasks("prompt store")
        self._guard = StorageGuard(
            [storage],
            LOG,
            BreakerLimits(
                failures_max=config.store.breaker_failures,
                backoff_s=config.store.breaker_backoff_s,
                backoff_max_s=config.store.breaker_backoff_max_s,
            ),
        )
        self._rooms = 0
        self._closing = False

    async def start(self, poller: Poller) -> None:
        """Open storage and the copiers. Raises InvalidConfig, StorageFailed; `close` then releases what was opened."""
        await self._full.start(self._layout, "", poller)
        for name, kind in self._components.items():
            kind.storage = sibling_for(self._storage, name)
            await kind.start(self._layout, name, poller)

    async def wait_stored(self) -> None:
        """Wait until each prompt finished so far is stored or given up. Unbounded: the caller sets the deadline."""
        while self._rooms or any(kind.bounce.free < kind.bounce.total for kind in self._kinds):
            await self._next_change()

    async def settle(self) -> None:
        """Accept no more prompts, wait up to `close_wait_s` for those under way, and give every page back."""
        self._closing = True
        try:
            async with asyncio.timeout(self.settings.close_wait_s):
                await self.wait_stored()
        except TimeoutError:
            self.counts["store_closed_early"] += 1
        try:
            await self._ended(self._cancel(), "puts that were cancelled")
        except StorageFailed as error:
            # `close` raises if they never end; until then the rooms of the peer can end.
            LOG.warning(str(error))

    async def _cancel(self) -> None:
        await asyncio.gather(self._guard.close(), self._tasks.close())

    async def close(self) -> None:
        """Close storage, which the store owns, and the copiers. Raises StorageFailed for what takes longer than
        CLOSE_S: its calls are left behind.
        """
        async with AsyncExitStack() as stack:
            for kind in self._kinds:
                if kind.copier is not None:
                    stack.push_async_callback(self._ended, kind.copier.close(), "the copier")
                if kind.storage is not None:
                    stack.push_async_callback(self._ended, kind.storage.close(), "storage")

    @property
    def _kinds(self) -> tuple[StoredPages, ...]:
        return (self._full, *self._components.values())

    async def _ended(self, closing: Coroutine[object, object, None], what: str) -> None:
        task = asyncio.get_running_loop().create_task(closing, name=f"prompt store: closing {what}")
        try:
            await settled(task, timeout_s=CLOSE_S)
        except TimeoutError:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise StorageFailed(f"{what} of {self._storage.uri} did not end within {CLOSE_S:g} s") from None

    def statistics(self) -> dict[str, int]:
        """Return counts of pages and prompts; all names begin with store_."""
        return {
            "store_rooms": self._rooms,
            "store_bounce_free": self._full.bounce.free,
            "store_breaker_open": int(self._guard.is_open),
            "store_breaker_opened": self._guard.opened,
            **self.counts,
        }

    def keep(self, room: Room) -> None:
        """Start storing a finished prompt in the background. Raises nothing."""
        count = min(len(room.pages), self._prompt_keys.page_keys.count(room.prompt_tokens))
        if self._closing or not count or room._key_seed is None:
            return
        if room.tokens is None:
            self.counts["store_rooms_without_tokens"] += 1
        elif self._guard.is_open:
            self.counts["store_rooms_skipped"] += 1
        elif self._rooms >= self.settings.rooms_max:
            self.counts["store_rooms_declined"] += 1
        else:
            self._rooms += 1
            room._borrow()
            component_pages = {
                name: {at: page for at, page in sorted(pages.items()) if at < count}
                for name, pages in room._kept_component_pages.items()
            }
            task = self._tasks.spawn(
                self._keep(room, room.pages[:count], component_pages), name=f"store {room.request_id}"
            )
            # In a done callback and not in the task: a task cancelled before its first step never runs its `finally`.
            task.add_done_callback(partial(self._give_room_back, room))

    async def _keep(self, room: Room, pages: PageIds, component_pages: dict[str, dict[int, int]]) -> None:
        """Store full pages, then pages of components by their positions."""
        assert room.tokens is not None
        assert room._key_seed is not None
        until_s = asyncio.get_running_loop().time() + self.settings.hold_s
        keys = await self._prompt_keys.prompt(room.tokens, room._key_seed).digests(0, len(pages))
        if not await self._store(self._full, keys, dict(enumerate(pages)), until_s):
            return
        for name, ours in component_pages.items():
            if ours and not await self._store(self._components[name], keys, ours, until_s):
                return

    async def _store(self, kind: StoredPages, keys: list[bytes], pages: dict[int, int], until_s: float) -> bool:
        """Copy pages to host memory and start their puts, except those that storage has. False if that failed.

        `keys` are those of the prompt's full pages, `pages` the pages by their positions in the prompt, in order.
        """
        asking = self._tasks.spawn(self._find_missing(kind, keys, [*pages]), name=f"ask for {len(pages)} pages")
        loop = asyncio.get_running_loop()
        await asyncio.wait([asking], timeout=max(until_s - loop.time(), 0.0))
        if not asking.done():
            self.counts[f"{kind.what}_late"] += len(pages)
            return False
        missing = asking.result()
        puts: list[asyncio.Task[None]] = []
        while missing and not self._guard.is_open:
            batch = missing[: min(self.settings.batch_pages, kind.bounce.total)]
            host_pages = await self._take(kind, len(batch), until_s)
            if host_pages is None:
                self.counts[f"{kind.what}_late"] += len(missing)
                return False
            device_pages = page_ids(pages[at] for at in batch)
            put = await self._copy_and_put(kind, keys, batch, device_pages, host_pages)
            if put is None:
                return False
            puts.append(put)
            missing = missing[len(batch) :]
        if missing:
            self.counts["store_pages_skipped"] += len(missing)
            return False
        if puts:
            self._tasks.spawn(self._order(kind, keys, [*pages], puts), name="touch what was put")
        return True

    async def _touch(self, kind: StoredPages, keys: list[bytes], positions: list[int]) -> list[bool]:
        """Touch pages at these positions of a prompt with `keys`."""
        assert kind.storage is not None
        ours, above = [keys[at] for at in positions], keys[: positions[0]]
        return await touch(kind.storage, ours, timeout_s=self.settings.hold_s, prefix_keys=above)

    async def _find_missing(self, kind: StoredPages, keys: list[bytes], positions: list[int]) -> list[int]:
        """Return the positions of the pages that are not stored. If the look-up fails, none: nothing is tried then."""
        flags = await self._guard.call(FAILED, self._touch, kind, keys, positions)
        if flags is None:
            self.counts[f"{kind.what}_failed"] += len(positions)
            return []
        self.counts[f"{kind.what}_present"] += sum(flags)
        return [at for at, is_there in zip(positions, flags, strict=True) if not is_there]

    async def _order(
        self, kind: StoredPages, keys: list[bytes], positions: list[int], puts: list[asyncio.Task[None]]
    ) -> None:
        """Touch a prompt after its puts. Their failures are counted already, and another look-up tells no more."""
        await asyncio.wait(puts)
        with contextlib.suppress(TidekvError):
            await own_cancels_only(self._touch(kind, keys, positions), "storage")

    async def _take(self, kind: StoredPages, count: int, until_s: float) -> PageIds | None:
        """Take host pages for one batch. None if not enough become free in time."""
        try:
            async with asyncio.timeout_at(until_s):
                while kind.bounce.free < count:
                    await self._next_change()
        except TimeoutError:
            return None
        return kind.bounce.take(count)

    async def _copy_and_put(
        self, kind: StoredPages, keys: list[bytes], positions: list[int], pages: PageIds, host_pages: PageIds
    ) -> asyncio.Task[None] | None:
        """Copy a batch to host pages and start its put. The host pages are free again after the put or any failure."""
        assert kind.copier is not None
        try:
            await settled(kind.copier.to_host(pages, host_pages))
        except Exception as error:
            self._guard.log_failure(FAILED, error)
            self.counts[f"{kind.what}_failed"] += len(pages)
            self._free(kind, host_pages)
            return None
        except BaseException:
            self._free(kind, host_pages)
            raise
        put = self._tasks.spawn(self._put(kind, keys, positions, host_pages), name="put")
        put.add_done_callback(partial(self._free, kind, host_pages))
        return put

    async def _put(self, kind: StoredPages, keys: list[bytes], positions: list[int], host_pages: PageIds) -> None:
        assert kind.storage is not None
        stored = await self._guard.call(
            FAILED,
            kind.storage.put_from,
            [keys[at] for at in positions],
            host_pages,
            timeout_s=self.settings.put_timeout_s,
            **prefix_of(kind.storage, keys[: positions[0]]),
        )
        put = 0 if stored is None else sum(stored)
        self.counts[f"{kind.what}_written"] += put
        self.counts[f"{kind.what}_failed"] += len(positions) - put

    def _give_room_back(self, room: Room, _: asyncio.Task[None]) -> None:
        self._rooms -= 1
        room._give_back()
        self._changed.set()

    def _free(self, kind: StoredPages, host_pages: PageIds, _: asyncio.Task[None] | None = None) -> None:
        kind.bounce.give_back(host_pages)
        self._changed.set()

    async def _next_change(self) -> None:
        """Wait until a room or host pages were given back. Unbounded: each caller has a deadline."""
        self._changed.clear()
        await self._changed.wait()
