"""Write-through of finished prompts from a prefill worker to storage, under the keys that decode workers use.

A finished room lends its pages to an engine in prefill's own device pages that restores nothing: each prompt is offered
to it (`DecodeEngine.offer`). So a write has the host memory, breaker, deadlines and checks of every backup, and a room
lends its pages until they are copied to host memory. A cache tier never fails a request: what cannot be stored is
dropped and counted.

    room.finish ──▶ offer ──▶ copied to host memory ──▶ room given back
                                   └──▶ put, unless storage has it

Pages of components go with the full pages: those that the room sent or kept (`Room.keep_component_pages`), as far as
they belong to full pages of the prompt. An offer has those of its end; what is kept before that is offered as the end
of a shorter prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from tidekv.backends.component_pools import ComponentPools
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.chain import TOKEN_BYTES
from tidekv.engine.config.engine_config import EngineConfig, PeerOptions, StorageOptions
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import OfferedPages
from tidekv.engine.log import engine_log
from tidekv.states.errors import EngineClosed, InvalidConfig, StorageFailed, TidekvError
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidekv.backends.storage.base import Storage
    from tidekv.engine.prefill.prefill_config import PrefillConfig
    from tidekv.transports.prefill.prefill_room import Room

LOG = engine_log("tidekv.engine")
HOST_PAGES = 256
"""Maximum host pages of a peer that was given no host pool, and of each component."""

COUNTS = (
    "store_closed_early",
    "store_component_pages_declined",
    "store_pages_declined",
    "store_pages_present",
    "store_rooms_declined",
    "store_rooms_skipped",
    "store_rooms_without_tokens",
)
"""Names of the counts, so that statistics have all of them from the start."""
OF_CORE = {
    "store_breaker_open": "l3_breaker_open",
    "store_breaker_opened": "l3_breaker_opened",
    "store_component_pages_written": "component_pages_stored",
    "store_pages_lost": "pages_passed_lost",
    "store_pages_written": "pages_stored",
}
"""Statistics that are those of the engine's core, by their names."""


def _host_pool(device: DevicePool) -> HostPool:
    return HostPool.allocate(device.layout, min(device.num_pages, HOST_PAGES))


class PromptStore:
    """Writes finished prompts through to storage, by way of an engine of its own."""

    def __init__(
        self,
        storage: Storage,
        config: PrefillConfig,
        *,
        device: object,
        host: HostPool | None,
        components: Sequence[ComponentPools] = (),
        instance: str = "prefill",
    ) -> None:
        """Check the arguments and open nothing. Raises InvalidConfig.

        The store owns every page of `host`, and storage from its start on. `instance` names the peer in logs.
        """
        if not isinstance(device, DevicePool):
            raise InvalidConfig(f"storage needs a DevicePool, whose pages it can copy, not {type(device).__name__}")
        settings = self.settings = config.store
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._uri = storage.uri
        self._engine = DecodeEngine(
            EngineConfig(
                model=config.model,
                device="lent",
                bigram_keys=config.bigram_keys,
                close_deadline_s=settings.close_wait_s,
                loop_stall_report_s=config.loop_stall_report_s,
                peer=PeerOptions(staging_bytes=0),
                storage=StorageOptions(
                    fetch_run_pages=settings.batch_pages,
                    store_timeout_s=settings.put_timeout_s,
                    # Nothing is read by way of its host memory.
                    store_host_share=1.0,
                    store_wait_s=0.0,
                    breaker_failures=settings.breaker_failures,
                    breaker_backoff_s=settings.breaker_backoff_s,
                    breaker_backoff_max_s=settings.breaker_backoff_max_s,
                ),
            ),
            device=device,
            host=host or _host_pool(device),
            components=[
                ComponentPools(
                    name=pools.name,
                    kind=pools.kind,
                    device=pools.device,
                    host=_host_pool(pools.device),
                    window_tokens=pools.window_tokens,
                    channels=pools.channels,
                )
                for pools in components
            ],
            storage=storage,
            transport=LoopbackTransport(f"{instance}-store", LoopbackNetwork()),
        )
        self._engine.place_in_storage(config.place)
        size = device.layout.page_size
        self._page_size = size
        self._page_keys = self._engine.config.page_keys(size)
        self._component_pages = {pools.name: pools.component.trailing_pages(size) for pools in components}
        """By component, the maximum number of pages at the end of an offer."""
        self._rooms = 0
        self._changed = asyncio.Event()
        self._left: list[Room] | None = None
        """While the engine closes, rooms whose offers it has left: its last copies may read their pages."""
        self._closing = False
        self._was_left = False

    async def start(self) -> None:
        """Open storage. Raises InvalidConfig, StorageFailed, with everything closed again."""
        await self._engine.__aenter__()

    async def wait_stored(self) -> None:
        """Wait until each prompt finished so far is stored or given up. Unbounded: the caller sets the deadline."""
        with contextlib.suppress(EngineClosed):
            await self._engine.wait_settled()
        while self._rooms > len(self._left or ()):
            self._changed.clear()
            await self._changed.wait()
            with contextlib.suppress(EngineClosed):
                await self._engine.wait_settled()

    async def settle(self) -> None:
        """Accept no more prompts, wait up to `close_wait_s` for those under way, and close. Raises as `close`."""
        self._closing = True
        try:
            async with asyncio.timeout(self.settings.close_wait_s):
                await self.wait_stored()
        except TimeoutError:
            self.counts["store_closed_early"] += 1
        await self.close()

    async def close(self) -> None:
        """Close storage, which the store owns, and the engine, and give every page back. Idempotent. Raises
        StorageFailed for what does not end in time: it is left behind.
        """
        if self._was_left:
            return
        self._closing = self._was_left = True
        self._left = []
        try:
            await self._engine.__aexit__(None, None, None)
        except ExceptionGroup as failures:
            words = "; ".join(str(failure) for failure in failures.exceptions)
            raise StorageFailed(f"writing prompts through to {self._uri} did not end: {words}") from failures
        finally:
            left, self._left = self._left, None
            for room in left:
                self._give_back(room)

    def statistics(self) -> dict[str, int]:
        """Return counts of pages and prompts; all names begin with store_."""
        core = self._engine._runtime.core.statistics()
        return {
            "store_rooms": self._rooms,
            "store_host_free": core["host_free"] + core["host_evictable"],
            **{name: core[of_core] for name, of_core in OF_CORE.items()},
            **self.counts,
        }

    def keep(self, room: Room) -> None:
        """Start storing a finished prompt in the background. Raises nothing."""
        count = min(len(room.pages), self._page_keys.count(room.prompt_tokens))
        if self._closing or not count or room._key_seed is None:
            return
        if room.tokens is None:
            self.counts["store_rooms_without_tokens"] += 1
        elif self._engine._runtime.core.storage.is_open:
            self.counts["store_rooms_skipped"] += 1
        elif self._rooms >= self.settings.rooms_max:
            self.counts["store_rooms_declined"] += 1
        else:
            self._rooms += 1
            room._borrow()
            offers = self._offer(room, count)
            outcomes = asyncio.gather(*(offer for offer, _ in offers), return_exceptions=True)
            outcomes.add_done_callback(partial(self._ended, room, [pages for _, pages in offers]))

    def _offer(self, room: Room, count: int) -> list[tuple[asyncio.Future[OfferedPages], dict[str, list[int]]]]:
        """Offer the first `count` pages of a room, and its component pages; return the offers with the latter."""
        assert room.tokens is not None
        offers: list[tuple[asyncio.Future[OfferedPages], dict[str, list[int]]]] = []
        try:
            for end, component_pages in self._ends(room, count).items():
                tokens = end * self._page_size + self._page_keys.bigrams
                first = min(count if offers else 0, end)
                offer = self._engine.offer(
                    room.tokens[: tokens * TOKEN_BYTES],
                    room.pages[first:end],
                    start_token=first * self._page_size,
                    component_pages=component_pages,
                    key_seed=room._key_seed,
                    hold_s=self.settings.hold_s,
                )
                offers.append((offer, component_pages))
        except TidekvError as error:
            self.counts["store_rooms_skipped"] += 1
            LOG.warning("a prompt is not stored", request_id=room.request_id, cause=str(error))
        return offers

    def _ends(self, room: Room, count: int) -> dict[int, dict[str, list[int]]]:
        """Return component pages by the page before which they end and by component: those of `count` come first."""
        ends: dict[int, dict[str, list[int]]] = {count: {}}
        for name, pages_max in self._component_pages.items():
            kept = room._kept_component_pages.get(name, {})
            end = run = 0
            for at in sorted((at for at in kept if at < count), reverse=True):
                if at != run - 1 or end - at > pages_max:
                    end = at + 1
                ends.setdefault(end, {}).setdefault(name, []).insert(0, kept[at])
                run = at
        return ends

    def _ended(
        self,
        room: Room,
        component_pages: Sequence[dict[str, list[int]]],
        outcomes: asyncio.Future[list[OfferedPages | BaseException]],
    ) -> None:
        for outcome, pages in zip(outcomes.result(), component_pages, strict=True):
            if isinstance(outcome, OfferedPages):
                self.counts["store_pages_present"] += outcome.present
                self.counts["store_pages_declined"] += outcome.declined
                declined = sum(len(pages[name]) for name in outcome.components_declined)
                self.counts["store_component_pages_declined"] += declined
        if self._left is not None:
            self._left.append(room)
            self._changed.set()
        else:
            self._give_back(room)

    def _give_back(self, room: Room) -> None:
        self._rooms -= 1
        room._give_back()
        self._changed.set()
