"""The parts of a running decode engine: started in order, stopped in the opposite order, whatever fails."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from tidekv.backends.copies import PageCopier
from tidekv.backends.keys import storage_namespace
from tidekv.engine.calls import Calls
from tidekv.engine.driver import Driver, Watcher
from tidekv.engine.effect_group import EffectGroup
from tidekv.engine.effects import Effects
from tidekv.engine.journal import Journal
from tidekv.engine.metrics import MetricsCollector, MetricsFold, MetricsServer
from tidekv.engine.poller import PollerThread
from tidekv.engine.watchdog import Watchdog
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.errors import EngineClosed, InvalidConfig
from tidekv.states.request import State
from tidekv.transports.receiver import Receiver

if TYPE_CHECKING:
    from tidekv.backends.device import DevicePool
    from tidekv.backends.host import HostPool
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.config import EngineConfig
    from tidekv.engine.values import Recompute
    from tidekv.transports.base import Transport

LOG = logging.getLogger("tidekv.engine")
# transitions logs every trigger at DEBUG, which costs ten times the trigger when somebody turns DEBUG on for all.
logging.getLogger("transitions").setLevel(logging.WARNING)


class Parts:
    """Everything that one engine consists of. Made outside a loop, started and closed on the loop that uses it."""

    driver: Driver
    effects: Effects
    receiver: Receiver

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: DevicePool,
        host: HostPool | None,
        storage: Storage | None,
        transport: Transport,
        recompute: Recompute | None,
    ) -> None:
        """Nothing is started. Raises InvalidConfig for parts that do not fit each other."""
        if storage is not None and host is None:
            raise InvalidConfig("storage needs a host pool: its pages land there before they go to the device")
        if host is not None and host.layout != device.layout:
            raise InvalidConfig(f"host pool has layout {host.layout}, device pool has {device.layout}")
        self.config = config
        self.core = Core(
            config.core_settings(
                page_size=device.layout.page_size,
                device_pages=device.num_pages,
                host_pages=0 if host is None else host.num_pages,
            )
        )
        self.calls = Calls(page_size=device.layout.page_size, last_resort=recompute)
        self.poller = PollerThread()
        # File I/O copies within the call that posts it: it must not hold up the transfers of the other poller.
        self.storage_poller = PollerThread(name="tidekv-storage-poller")
        self.watchdog = Watchdog(limit_s=config.hold_up_limit_s)
        self.transport = transport
        self.host = host
        self.copier: PageCopier | None = None
        self.storage: Storage | None = None
        self.journal: Journal | None = None
        self.metrics: MetricsServer | None = None
        self.is_open = False
        self.is_draining = False
        self.broken: BaseException | None = None
        self._device = device
        self._first_storage = storage
        self._identity = device.layout.identity(config.model)
        self.group: EffectGroup | None = None
        self._storage_swap = asyncio.Lock()

    async def start(self) -> None:
        """Start poller, transport, pools, storage. Raises what they raise, with everything stopped again."""
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        self.is_open = True

    async def _start(self) -> None:
        config = self.config
        self.watchdog.start()
        self.storage = self._first_storage
        self.poller.start()
        self.storage_poller.start()
        await self.transport.start(poller=self.poller)
        memory = self._device.memory
        await self.transport.register(memory)
        watchers: list[Watcher] = []
        if config.journal is not None:
            self.journal = Journal(
                config.journal,
                self.core,
                with_tokens=config.journal_tokens,
                config=msgspec.to_builtins(config),
                layout={**msgspec.to_builtins(self._identity), "page_bytes": memory.page_bytes},
                instance=self.transport.instance,
                segment_bytes=config.journal_segment_bytes,
                segments_max=config.journal_segments_max,
            )
            watchers.append(self.journal)
        if config.metrics_listen is not None:
            fold = MetricsFold(self.core)
            collector = MetricsCollector(fold, page_bytes=memory.page_bytes, statistics=self.statistics)
            self.metrics = MetricsServer(config.metrics_listen, collector)
            watchers.append(fold)
        self.driver = Driver(
            self.core,
            lambda command: self.effects.perform(command),
            watchers=watchers,
            on_broken=self._break,
            after_drain=self._after_drain,
        )
        self.receiver = Receiver(
            self.transport,
            memory=memory,
            identity=self._identity,
            deliver=self.driver.post,
            deliver_aux=self.calls.note_aux,
            clock=self.driver.clock,
            lease_s=config.lease_s,
            heartbeat_s=config.heartbeat_s,
            missed_s=config.peer_silence_s,
        )
        await self.receiver.start()
        if self.host is not None:
            self.copier = PageCopier(self._device, self.host, self.poller)
            self.copier.start()
        self.group = EffectGroup(self._break)
        await self.group.start()
        self.effects = Effects(
            caller=self.calls,
            post=self.driver.post,
            clock=self.driver.clock,
            spawn=self.group.spawn,
            copier=self.copier,
            receiver=self.receiver,
            page_size=self.core.settings.page_size,
            store_timeout_s=config.store_timeout_s,
            fetch_timeout_s=self.core.settings.prefetch_deadline_s(self._device.num_pages),
            query_timeout_s=config.query_deadline_s,
        )
        if self._first_storage is not None:
            await self._attach(self._first_storage)

    def _after_drain(self) -> None:
        self.watchdog.set_busy(not self.core.is_idle)
        self.calls.after_drain()

    def _break(self, error: BaseException) -> None:
        """The core is not to be trusted any more: everybody who waits hears of it, and `close` raises it."""
        if self.broken is not None:
            return
        LOG.critical("the engine stops: it broke", exc_info=error)
        self.driver.stop()
        self.broken = error
        self.is_open = False
        self.calls.fail_all(EngineClosed(f"the engine broke: {type(error).__name__}: {error}"))

    async def close(self) -> None:
        """Abort what is live, wait for what is in flight (bounded by `close_deadline_s`), and stop everything.

        Raises what broke the engine, if something did.
        """
        await self._settle()
        await self._stop()
        if self.broken is not None:
            raise self.broken

    async def _settle(self) -> None:
        self.is_open = False
        if self.broken is not None:
            return
        for request_id in self.calls.live_ids():
            self.driver.post(
                events.AbortRequested(at_s=self.driver.clock(), request_id=request_id, cause="engine closed")
            )
        try:
            async with asyncio.timeout(self.config.close_deadline_s):
                await self.calls.wait_until(lambda: self.core.is_idle)
                await self.effects.storage_is_quiet()
        except TimeoutError:
            LOG.warning(
                "closed after %s s with work in flight: %s", self.config.close_deadline_s, self.core.statistics()
            )
        self.driver.stop()
        self.calls.fail_all(EngineClosed("the engine was closed"))

    async def _stop(self) -> None:
        started = [
            getattr(self, "receiver", None),
            self.copier,
            self.storage,
            self.transport,
            self.poller,
            self.storage_poller,
        ]
        failures: list[Exception] = []
        if self.group is not None and not await self.group.close(timeout_s=self.config.close_deadline_s):
            LOG.error("effects did not end within %s s of being cancelled", self.config.close_deadline_s)
        for part in started:
            if part is None:
                continue
            try:
                await part.close()
            except Exception as error:
                failures.append(error)
        self.watchdog.set_busy(False)
        await asyncio.to_thread(self.watchdog.close)
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.close)
        if self.journal is not None:
            await asyncio.to_thread(self.journal.close)
        if failures:
            raise ExceptionGroup("closing the engine", failures)

    # --- Storage, while serving ---

    async def swap_storage(self, storage: Storage | None) -> None:
        """Use this storage, or none, from now on. The one there was is drained and closed first."""
        if storage is not None and self.host is None:
            raise InvalidConfig("storage needs a host pool: its pages land there before they go to the device")
        async with self._storage_swap:
            await self._detach()
            if storage is not None:
                await self._attach(storage)

    async def _attach(self, storage: Storage) -> None:
        assert self.host is not None
        await storage.register(
            self.host.memory, self.host.page, namespace=storage_namespace(self._identity), poller=self.storage_poller
        )
        self.storage = self.effects.storage = storage
        self.driver.post(events.StorageChanged(at_s=self.driver.clock(), available=True))

    async def _detach(self) -> None:
        storage = self.effects.storage
        if storage is None:
            return
        self.driver.take_now(events.StorageChanged(at_s=self.driver.clock(), available=False))
        await self.effects.storage_is_quiet()
        self.storage = self.effects.storage = None
        await storage.close()

    async def wait_settled(self) -> None:
        """Wait until nothing is in flight but READY requests."""
        core = self.core

        def is_settled() -> bool:
            restoring = any(request.state is not State.READY for request in core.books.requests.values())
            return not (restoring or core.books.operations or core.backups or core.loads or core.rooms.draining_rooms)

        await self.calls.wait_until(is_settled)

    def statistics(self) -> dict[str, object]:
        """Counts of now and since the start, by part."""
        return {
            "core": self.core.statistics(),
            "receiver": self.receiver.statistics(),
            "transport": self.transport.statistics(),
            "poller": msgspec.to_builtins(self.poller.statistics()),
            "storage_poller": msgspec.to_builtins(self.storage_poller.statistics()),
            "copies": None if self.copier is None else msgspec.to_builtins(self.copier.statistics()),
            "storage": None if self.storage is None else msgspec.to_builtins(self.storage.statistics()),
            "events": self.driver.events_taken,
            "events_illegal": self.driver.illegal_events,
            "effects_raised": self.effects.raised,
            "loop_held_up": self.watchdog.hold_up_count,
        }
