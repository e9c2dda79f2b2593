"""Composition root of a decode engine: its parts, started in order and stopped in the opposite order.

Runtime         makes the parts, connects them, starts and stops them
EffectGroup     one TaskGroup, in a task of its own, for all effects of an engine
close_in_order  closes parts, each with a bound, so that one that hangs does not keep the others open
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from tidekv.backends.checksums import ChecksumThread, FoundChecksums, HostChecksums, StorageChecks, check_hashable
from tidekv.backends.component_pools import ComponentPools, check_components, with_components
from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.copies.lanes import CopyLanes
from tidekv.backends.copies.pieces import layer_count
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.prompt_keys import PromptKeys
from tidekv.backends.page_layout import same_pages
from tidekv.engine.decode.driver import Driver
from tidekv.engine.decode.executor import EffectLoop, Executor, StorageCalls
from tidekv.engine.decode.host_records import HostRecords, PoolRecords, check_lasting
from tidekv.engine.decode.load import LoadReader
from tidekv.engine.decode.peer_cache import PeerCache, check_peers, shared_memory
from tidekv.engine.decode.pending_calls import PendingCalls
from tidekv.engine.decode.rank_driver import RankDriver
from tidekv.engine.decode.storage_swap import StorageInUse, check_storage
from tidekv.engine.decode.store_calls import StoreCalls
from tidekv.engine.decode.stored_sweep import StoredPagesSweep
from tidekv.engine.journal import Journal, RunInfo
from tidekv.engine.kv_events.content import KVContent
from tidekv.engine.kv_events.load_publisher import LoadPublisher
from tidekv.engine.kv_events.names import Wording
from tidekv.engine.kv_events.publisher import KVEventPublisher, is_on_network
from tidekv.engine.kv_events.watcher import KVEventWatcher, ServerEvents, groups_of
from tidekv.engine.log import CoreLog, engine_log, own_context, run_in
from tidekv.engine.metrics import MetricsCollector, MetricsFold, MetricsServer
from tidekv.engine.poller import PollerThread
from tidekv.engine.ranks.group import RankGroup, place_of, settings_digest
from tidekv.engine.staging import make_staging
from tidekv.engine.watchdog import Watchdog
from tidekv.engine.watching import Watcher
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, TidekvError
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.records.stages import State
from tidekv.states.types import FULL
from tidekv.states.validation import checked, short
from tidekv.transports.blocking import settled
from tidekv.transports.decode.prefill_link import LinkTimes
from tidekv.transports.decode.receiver import Receiver
from tidekv.transports.local_rank import LocalRank

if TYPE_CHECKING:
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.config.engine_config import EngineConfig
    from tidekv.engine.decode.values import EngineStatistics, Recompute
    from tidekv.transports.base import Transport

LOG = engine_log("tidekv.engine")
# transitions logs every trigger at DEBUG, which costs ten times the trigger if DEBUG is on for all loggers.
logging.getLogger("transitions").setLevel(logging.WARNING)

CLOSE_PART_S = 60.0
"""Seconds after which a part that does not close is left behind."""
SETTLE_SHARE = 0.6
"""Share of `close_deadline_s` for requests, storage calls and ranks to end; the rest is for closing the parts."""
STOP_MIN_S = 2.0
"""Minimum seconds for closing the parts."""


class Server(Protocol):
    """A server on a thread of its own."""

    address: str

    def close(self) -> None:
        """Stop serving, and wait for the thread."""


class Runtime:
    """The parts of one engine. Made outside a loop, started and closed on the loop that uses it."""

    driver: Driver
    front: Driver | RankDriver  # Takes the events of callers, effects and receiver.
    executor: Executor
    receiver: Receiver

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: DevicePool,
        host: HostPool | None,
        components: Sequence[ComponentPools] = (),
        storage: Storage | None,
        transport: Transport,
        ranks: RankGroup | None = None,
    ) -> None:
        """Start nothing. Raises InvalidConfig for parts that do not fit each other."""
        checked(device, DevicePool, "device", InvalidConfig)
        if host is not None:
            checked(host, HostPool, "host", InvalidConfig)
        if ranks is not None:
            checked(ranks, RankGroup, "ranks", InvalidConfig)
        check_storage(storage)
        if storage is not None and host is None:
            raise InvalidConfig("storage needs a host pool: its pages are read into it before they go to the device")
        if host is not None and not same_pages(host.layout, device.layout):
            raise InvalidConfig(f"host pool has layout {host.layout}, device pool has {device.layout}")
        check_components(components, device=device, host=host, is_lent=config.device == "lent")
        check_lasting(host, components, is_rank=ranks is not None)
        check_peers(config.cache_peers, host)
        if config.page_checksums:
            check_hashable(device.memory, "device pool")
        self.config = config
        self.clock: Callable[[], float] | None = None
        """The time of the core, if a test makes it; set before the start."""
        self.prompt_keys = PromptKeys(config.page_keys(device.layout.page_size))
        self.core = Core(
            config.core_settings(
                page_size=device.layout.page_size,
                device_pages=device.num_pages,
                host_pages=0 if host is None else host.num_pages,
                components=tuple(
                    config.snapshots.bounded(pools.component, pools.device.layout.page_bytes) for pools in components
                ),
            )
        )
        self.log = CoreLog(self.core, instance=transport.instance)
        self.calls = PendingCalls(
            page_size=device.layout.page_size,
            layer_count=layer_count(device),
            vocabulary=config.vocabulary,
        )
        self.log.context_of = self.calls.context_of
        self.poller = PollerThread()
        # File I/O copies within the call that posts it, which would delay transfers that share its poller.
        self.storage_poller = PollerThread(name="tidekv-storage-poller")
        self.watchdog = Watchdog(limit_s=config.loop_stall_report_s, on_end=self._note_stall)
        self.transport = transport
        self.host = host
        self.components = {pools.name: pools for pools in components}
        self.copier: PageCopier | None = None
        self.component_copiers: dict[str, PageCopier] = {}
        self.checksum_thread = ChecksumThread()
        self.host_checksums: dict[str, HostChecksums | FoundChecksums] = {}
        """By component, and those of the full pages. Empty unless the option `page_checksums` is set, or the pool
        lasts.
        """
        self.host_records: HostRecords | None = None
        self.on_stall: list[Callable[[float, float, str], None]] = []
        """Called with each stall of the event loop that has ended: time, seconds, place."""
        self._lanes: CopyLanes | None = None
        self.ranks: RankDriver | None = None
        self.rank_group = ranks
        self._fold: MetricsFold | None = None
        self.journal: Journal | None = None
        self.metrics: MetricsServer | None = None
        self.store_calls = StoreCalls(self)
        self.status: Server | None = None
        self.make_status: Callable[[Runtime], Server] | None = None
        """Makes the status server, if one is configured."""
        self.load: LoadPublisher | None = None
        self.kv_events: KVEventPublisher | None = None
        self.kv_event_watcher: KVEventWatcher | None = None
        self._server_events: ServerEvents | None = None
        self.is_open = False
        self.is_draining = False
        self.broken: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._device = device
        self.peers: PeerCache | None = None  # The host pool as peers see it, if it is shared.
        self._staging = make_staging(
            config.peer.staging_bytes, (device.memory, *(pools.device.memory for pools in components))
        )
        identity = with_components(device.layout.identity(config.model), components)
        self.identity = msgspec.structs.replace(identity, bigram_keys=config.bigram_keys)
        self.group: EffectGroup | None = None
        self.storage_in_use = StorageInUse(self, storage)

    def publish_to(self, server_events: ServerEvents) -> None:
        """See `DecodeEngine.publish_to`."""
        checked(server_events, ServerEvents, "server_events", InvalidConfig)
        if self.config.kv_events.endpoint is not None:
            raise InvalidConfig(
                "kv_events.endpoint would publish beside the server's own events, and routers would count two workers: "
                "leave one of them out"
            )
        self._server_events = server_events

    def place_in_storage(self, place: RankPlace) -> None:
        """See `DecodeEngine.place_in_storage`."""
        checked(place, RankPlace, "place", InvalidConfig)
        if self.rank_group is not None:
            raise InvalidConfig("ranks have their own places in storage: leave out place_in_storage")
        self.storage_in_use.place = place

    def recompute_with(self, recompute: Recompute) -> None:
        """See `DecodeEngine.recompute_with`."""
        if not callable(recompute):
            raise InvalidConfig(f"recompute must be a coroutine function, not {short(recompute)}")
        if self.config.device == "lent":
            raise InvalidConfig(
                "config.device is 'lent': there is nothing to recompute with, since the caller computes what"
                " restore_into left out"
            )
        if self.loop is not None:
            raise EngineClosed("recompute_with is called before the engine is entered")
        self.calls.last_resort = recompute

    async def start(self) -> None:
        """Start all parts. If one raises, stop all and raise its error. Raises EngineClosed the second time."""
        if self.loop is not None:
            raise EngineClosed("this engine was entered before: an engine lives once, make another one")
        if self.config.recompute_threshold and self.calls.last_resort is None:
            raise InvalidConfig("config.recompute_threshold needs recompute_with, which computes the rest of a prompt")
        self.loop = asyncio.get_running_loop()
        try:
            # What is started here lives longer than the request that may have entered the engine.
            await run_in(own_context(self.transport.instance), self._start())
        except BaseException as error:
            try:
                await settled(
                    self.loop.create_task(
                        self._stop(), name="tidekv stop", context=own_context(self.transport.instance)
                    )
                )
            except Exception as failure:
                error.add_note(f"and stopping what had been started raised {failure!r}")
            raise
        self.is_open = True
        own_context(self.transport.instance).run(
            LOG.info,
            "the engine is running",
            device_pages=self._device.num_pages,
            host_pages=0 if self.host is None else self.host.num_pages,
            storage=None if self.storage is None else self.storage.uri,
            metrics=None if self.metrics is None else self.metrics.address,
            journal=None if self.journal is None else self.journal.place,
        )

    async def _start(self) -> None:
        config = self.config
        self.watchdog.start()
        self.storage_in_use.own_first()
        self.poller.start()
        self.storage_poller.start()
        await self.transport.start(poller=self.poller, listen=config.cache_peers.listen or "")
        memory = self._device.memory
        component_memory = {name: pools.device.memory for name, pools in self.components.items()}
        ring = [] if self._staging is None else [self._staging.staging.ring.memory]
        shared = shared_memory(config.cache_peers, self.host, self.identity)
        await self.transport.register(memory, *component_memory.values(), *ring, *shared)
        if self.rank_group is not None:
            self.ranks = RankDriver(
                self.rank_group,
                settings=settings_digest(self.core.settings, self.identity, stages=self.rank_group.stages),
                calls=self.calls,
                renew=self._restart_core,
                on_broken=self._break,
            )
        if config.metrics.listen is not None:
            fold = self._fold = MetricsFold(self.core)
            votes = None if self.ranks is None else self.ranks.vote_s
            collector = MetricsCollector(
                fold, page_bytes=memory.page_bytes, statistics=self.statistics, loop_lag=self.watchdog.lag, vote_s=votes
            )
            self.metrics = MetricsServer(config.metrics.listen, collector)
        if config.kv_events.endpoint is not None and (self.rank_group is None or self.rank_group.rank == 0):
            self.kv_events = KVEventPublisher(config.kv_events)
        self._make_checksums()
        await self._drive_core()
        await self._take_found_pages()
        self.front = self.ranks or self.driver
        self.calls.on_use_end = self._end_use
        times = LinkTimes(
            lease_s=config.peer.lease_s,
            heartbeat_s=config.peer.heartbeat_s,
            missed_s=config.peer.silence_s,
            late_s=config.peer.late_s,
        )
        rank = LocalRank(
            identity=self.identity,
            memory=memory,
            component_memory=component_memory,
            place=place_of(self.rank_group),
            vocabulary=config.vocabulary,
            hashing=self.checksum_thread if config.page_checksums else None,
            staging=None if self._staging is None else self._staging.staging,
        )
        self.receiver = Receiver(
            self.transport,
            rank,
            deliver=self._deliver,
            deliver_aux=self.calls.note_aux,
            clock=self.driver.clock,
            times=times,
            group=lambda: "" if self.ranks is None else self.ranks.group_name,
        )
        self._start_copiers()
        self.group = EffectGroup(self._break)
        await self.group.start()
        full = {} if self.copier is None else {FULL: self.copier}
        checks = StorageChecks(self.checksum_thread, self.host_checksums)
        self.executor = Executor(
            calls=self.calls,
            loop=EffectLoop(self.front.post, self.driver.clock, self.group.spawn),
            copiers={**full, **self.component_copiers},
            storage_calls=StorageCalls(
                checks=checks,
                keys_stored=lambda op: self.core.keys_stored(op),
                store_timeout_s=config.storage.store_timeout_s,
                query_timeout_s=config.storage.query_deadline_s,
            ),
            receiver=self.receiver,
            log=self.log,
            prompt_keys=self.prompt_keys,
        )
        if shared:
            self.peers = self.executor.peers = PeerCache(self, rank, shared[0], times, checks)
            await self.peers.start()
        await self.receiver.start(shares_at="" if self.peers is None else self.peers.announced)
        await self.storage_in_use.register_first()
        if self.kv_event_watcher is not None:
            self.executor.on_missing = self._note_missing
            sweep = StoredPagesSweep(lambda: self.storage_in_use.current, lambda: self.kv_event_watcher)
            self.group.spawn(sweep.run(), "sweep of stored pages", is_endless=True)
        self._start_status()
        if self.ranks is not None:
            await self.ranks.start()

    def _start_status(self) -> None:
        """Start what tells routers the state and the load of this engine; with ranks, the first of them does."""
        assert self.group is not None, "its loops run there"
        if self.rank_group is not None and self.rank_group.rank:
            return
        if self.config.status.listen is not None:
            assert self.make_status is not None, "the engine sets it"
            self.status = self.make_status(self)
        events = self.config.kv_events
        if events.load is not None:
            if not events.allow_network and is_on_network(events.load):
                raise InvalidConfig(
                    f"load messages would be served at {events.load!r} to every program that reaches it: use 127.0.0.1 "
                    "or ipc://, or set kv_events.allow_network"
                )
            reader, rank = LoadReader(), events.data_parallel_rank
            self.load = LoadPublisher(events.load, lambda: reader.read(self.core).as_message(rank))
            self.group.spawn(self.load.run(), "load messages", is_endless=True)

    def _start_copiers(self) -> None:
        """Start one copier for each pair of pools, on two shared lanes; none without host pages and components."""
        if self.host is None and not self.components:
            return
        lanes = self._lanes = CopyLanes(self._device.device)
        lanes.start()
        if self.host is not None:
            self.copier = self._copier(FULL, self._device, self.host, lanes)
            self.copier.start()
        for name, pools in self.components.items():
            self.component_copiers[name] = self._copier(name, pools.device, pools.host, lanes)
            self.component_copiers[name].start()

    def _copier(self, name: str, device: DevicePool, host: HostPool | None, lanes: CopyLanes) -> PageCopier:
        return PageCopier(device, host, lanes=lanes, checksums=self.host_checksums.get(name))

    def _make_checksums(self) -> None:
        """Make the checksums of the host pools, and the records of a lasting one."""
        pools = {FULL: (self.host, self._device)}
        pools |= {name: (both.host, both.device) for name, both in self.components.items()}
        for name, (host, device) in pools.items():
            if host is not None and self.config.page_checksums:
                self.host_checksums[name] = HostChecksums(host.memory, device.memory)
            elif host is not None and host.file is not None:
                self.host_checksums[name] = FoundChecksums(host.memory)
        lasting = {
            name: PoolRecords(host, self.host_checksums[name])
            for name, (host, _) in pools.items()
            if host is not None and host.file is not None
        }
        self.host_records = HostRecords(self.core, lasting) if lasting else None

    async def _take_found_pages(self) -> None:
        """Let the core take what an earlier process left in a lasting host pool, before anything else."""
        if self.host_records is None:
            return
        # In a thread, to its end: the file of a large pool has many records.
        find = asyncio.to_thread(self.host_records.find, self.identity, self.driver.clock())
        found = await settled(asyncio.ensure_future(find))
        if found is not None:
            self.driver.take_now(found)
        self.host_records.follow()

    async def _drive_core(self) -> None:
        """Make the journal and the driver of the core, with its watchers."""
        self.journal = await self._open_journal()
        watchers: list[Watcher | None] = [self.host_records, self.journal, self._fold, self.ranks, self.log]
        if self.kv_events is not None:
            options, settings, bigrams = self.config.kv_events, self.core.settings, self.config.bigram_keys
            content = KVContent(
                page_size=settings.page_size,
                key_bytes=settings.key_bytes,
                groups=groups_of(settings) if options.components else (),
                tokens=options.tokens,
                bigrams=bigrams,
                wording=Wording(options.routers, bigrams=bigrams),
                stored_pages_max=options.stored_pages,
            )
            self.kv_event_watcher = KVEventWatcher(self.core, self.kv_events, content, components=options.components)
            watchers.append(self.kv_event_watcher)
        elif self._server_events is not None:
            self.kv_event_watcher = KVEventWatcher(self.core, *self._server_events)
            watchers.append(self.kv_event_watcher)
        self.driver = Driver(
            self.core,
            lambda command: self.executor.perform(command),
            watchers=[watcher for watcher in watchers if watcher is not None],
            on_broken=self._break,
            after_drain=self._after_drain,
            is_agreed=self.ranks is not None,
        )
        if self.clock is not None:
            self.driver.clock = self.clock
        if self.ranks is not None:
            self.ranks.attach(self.core, self.driver, has_storage=self.storage is not None)

    async def _open_journal(self) -> Journal | None:
        """Open the journal of a core that has taken no event; None if journals are disabled. Raises InvalidConfig."""
        options = self.config.journal
        path = options.path
        if path is None and not options.log:
            return None

        def open_it() -> Journal:
            return Journal(
                path,
                self.core,
                with_tokens=options.tokens,
                info=RunInfo(
                    config=msgspec.to_builtins(self.config),
                    layout={**msgspec.to_builtins(self.identity), "page_bytes": self._device.memory.page_bytes},
                    instance=self.transport.instance,
                ),
                segment_bytes=options.segment_bytes,
                segments_max=options.segments_max,
            )

        # In a thread, to its end: it opens files, and must not be lost to a cancellation once it runs.
        return await settled(asyncio.ensure_future(asyncio.to_thread(open_it)))

    async def _restart_core(self) -> None:
        """Begin with an empty core and a new journal, after a rank was lost and everything in flight has ended."""
        self.driver.stop()
        if self.journal is not None:
            await settled(asyncio.ensure_future(asyncio.to_thread(self.journal.close)))
        self.core = Core(self.core.settings)
        self.log.follow(self.core)
        if self._fold is not None:
            self._fold.follow(self.core)
        await self._drive_core()

    def _note_missing(self, digests: Sequence[bytes]) -> None:
        """Take that storage was asked for these pages and does not have them."""
        if self.kv_event_watcher is not None:
            self.kv_event_watcher.storage_lacks(digests)

    def _deliver(self, event: events.Event) -> None:
        """Take a message of a peer."""
        self.log.note_event(event)
        self.front.post(event)

    def _note_stall(self, at_s: float, seconds: float, where: str) -> None:
        for note in self.on_stall:
            note(at_s, seconds, where)
        if self.journal is not None:
            self.journal.note_stall(at_s, seconds, where)

    def _end_use(self, op: int) -> None:
        self.front.post(events.EarlyUseEnded(at_s=self.driver.clock(), op=op))

    def _after_drain(self) -> None:
        # First: a stall belongs to the turn whose events it has delayed.
        self.watchdog.look()
        if self.journal is not None:
            self.journal.end_turn()
        self.log.end_turn()
        if self.ranks is not None:
            self.ranks.after_drain()
        self.watchdog.set_busy(not self.core.is_idle)
        self.calls.after_drain()

    def _break(self, error: BaseException) -> None:
        """Stop taking events, since the core cannot be trusted. Every waiting call and `close` raise the error."""
        if self.broken is not None:
            return
        LOG.critical("the engine stops: it broke", exc_info=error)
        self.broken = error
        self.is_open = False
        self.calls.end_all(f"the engine broke: {type(error).__name__}: {error}")
        # Last: with ranks it calls into the channel, which may be what broke.
        self.front.stop()

    async def close(self) -> None:
        """Abort live requests, wait at most `close_deadline_s` for work in flight, and stop everything.

        Storage that hangs is abandoned at that deadline, too. Raises the error that broke the engine, if any. A
        cancelled caller still waits for the end.
        """
        context = own_context(self.transport.instance)
        await settled(asyncio.get_running_loop().create_task(self._close(), name="tidekv close", context=context))

    async def _close(self) -> None:
        LOG.info("the engine closes", requests=len(self.calls.live_ids()))
        await self._settle()
        try:
            await self._stop()
        except Exception as failure:
            if self.broken is None:
                raise
            self.broken.add_note(f"and stopping the engine raised {failure!r}")
        if self.broken is not None:
            raise self.broken

    async def _settle(self) -> None:
        self.is_open = False
        if self.broken is not None:
            return
        for request_id in self.calls.live_ids():
            self.front.post(
                events.AbortRequested(at_s=self.driver.clock(), request_id=request_id, cause="engine closed")
            )
            self.calls.mark_aborted(request_id)
        self.calls.end_uses()
        await self.store_calls.at_close(self.config, has_storage=self.storage is not None)
        try:
            async with asyncio.timeout(SETTLE_SHARE * self.config.close_deadline_s):
                if self.peers is not None:
                    await self.peers.stop_sharing()
                await self.calls.wait_until(lambda: self.core.is_idle)
                await self.executor.storage_is_quiet()
                if self.ranks is not None:
                    await self.ranks.leave(self.config.close_deadline_s)
        except EngineClosed:
            return  # The engine broke meanwhile.
        except TimeoutError:
            LOG.warning(
                "closed with work in flight",
                after_s=SETTLE_SHARE * self.config.close_deadline_s,
                core=self.core.statistics(),
            )
        self.driver.stop()
        self.calls.end_all("the engine was closed")

    async def _stop(self) -> None:
        stop_s = max((1 - SETTLE_SHARE) * self.config.close_deadline_s, STOP_MIN_S)
        # Storage begins to close first, since that ends the calls that effects wait for.
        storages = [*self.storage_in_use.retired, *self.storage_in_use.component_pages.values()]
        storages += [] if self.storage_in_use.current is None else [self.storage_in_use.current]
        closing_storages = [begin_close(storage) for storage in storages]
        if self.group is not None and not await self.group.close(timeout_s=stop_s / 4):
            LOG.error("cancelled commands did not end in time", after_s=stop_s / 4)
        late_s = stop_s / 4
        failures = await close_in_order(
            [self.ranks, self.peers, getattr(self, "receiver", None)], part_s=CLOSE_PART_S, late_s=late_s
        )
        # Closing other parts does not end a copy that hangs.
        copiers = [self.copier, *self.component_copiers.values(), self._lanes]
        failures += await close_in_order(copiers, part_s=late_s, late_s=late_s)
        failures += await close_in_order(
            [
                *closing_storages,
                self.transport,
                self.poller,
                self.storage_poller,
                self.host_records,
                self.checksum_thread,
                None if self._staging is None else self._staging.copier,
            ],
            part_s=CLOSE_PART_S,
            late_s=late_s,
        )
        self.storage_in_use.abandon_leaving()
        self.watchdog.set_busy(False)
        await asyncio.to_thread(self.watchdog.close)
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.close)
        if self.status is not None:
            await asyncio.to_thread(self.status.close)
        if self.load is not None:
            self.load.close()
        if self.kv_events is not None:
            await asyncio.to_thread(self.kv_events.close)
        if self.journal is not None:
            await asyncio.to_thread(self.journal.close)
        if failures:
            raise ExceptionGroup("closing the engine", failures)

    @property
    def storage(self) -> Storage | None:
        """The storage in use, as the caller gave it; the engine closes it."""
        return self.storage_in_use.given

    def check_open(self) -> None:
        """Raise EngineClosed if the engine takes no calls, InvalidRequest on another loop than its own."""
        if not self.is_open:
            if (error := self.broken) is not None:
                raise EngineClosed(f"the engine broke: {type(error).__name__}: {error}; make a new one") from error
            raise EngineClosed("the engine is not running: enter it with `async with`, and call nothing after its end")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self.loop:
            raise InvalidRequest(
                "the engine is called on the loop that entered it only; from another thread use "
                "asyncio.run_coroutine_threadsafe"
            )

    async def wait_settled(self) -> None:
        """Wait until nothing is in flight but READY requests."""

        def is_settled() -> bool:
            core = self.core
            restoring = any(request.state is not State.READY for request in core.state.requests.values())
            in_flight = core.operations_in_flight or core.backups or core.loads or core.rooms.draining_rooms
            lent = core.lending.returning or core.offers
            return self.front.is_caught_up and not (restoring or in_flight or lent)

        await self.calls.wait_until(is_settled)

    def statistics(self) -> EngineStatistics:
        """See `DecodeEngine.statistics`."""
        storage = self.storage_in_use.current
        return {
            "core": self.core.statistics(),
            "prefill_pages": dict(self.core.state.quota.held),
            "receiver": self.receiver.statistics(),
            "peers": None if self.peers is None else self.peers.statistics(),
            "transport": self.transport.statistics(),
            "poller": msgspec.to_builtins(self.poller.statistics()),
            "storage_poller": msgspec.to_builtins(self.storage_poller.statistics()),
            "copies": None if self.copier is None else msgspec.to_builtins(self.copier.statistics()),
            "component_copies": {
                name: msgspec.to_builtins(copier.statistics()) for name, copier in self.component_copiers.items()
            },
            "snapshots": self._count_snapshots(),
            "storage": None if storage is None else msgspec.to_builtins(storage.statistics()),
            "events": self.driver.events_taken,
            "events_illegal": self.driver.illegal_events,
            "effects_raised": self.executor.raised,
            "loop_stalls": self.watchdog.stalls,
            "draining": self.is_draining,
            "ranks": None if self.ranks is None else self.ranks.statistics(),
        }

    def _count_snapshots(self) -> dict[str, dict[str, int]]:
        """By state, what its snapshots cost and bring."""
        rules, index = self.core.component_pages, self.core.state.components
        if rules is None or index is None:
            return {}
        found = {}
        for name, counts in rules.snapshots.statistics().items():
            record_bytes = self.components[name].device.layout.page_bytes
            found[name] = {
                "record_bytes": record_bytes,
                "device_bytes": index.device[name].pool.cached * record_bytes,
                "host_bytes": index.host[name].pool.cached * record_bytes,
                **counts,
            }
        return found


class Closable(Protocol):
    """A part that can be closed."""

    def close(self) -> Coroutine[object, object, object]:
        """Close the part."""
        ...


def begin_close(part: Closable) -> asyncio.Task[object]:
    """Begin to close a part before its turn; `close_in_order` takes the task in its place."""
    closing: asyncio.Task[object] = asyncio.ensure_future(part.close())
    closing.set_name(f"closing {getattr(part, 'uri', type(part).__name__)}")
    return closing


async def close_in_order(
    parts: Sequence[Closable | asyncio.Task[object] | None], *, part_s: float, late_s: float
) -> list[Exception]:
    """Close these parts in order, without those that are None; return what closing them raised.

    A part is waited for `part_s` seconds; one that began to close before its turn, `late_s`. Parts that have not ended
    then get `late_s` more after all others are closed, and are cancelled and left behind.
    """
    failures: list[Exception] = []
    late: list[asyncio.Task[object]] = []
    for part in parts:
        if part is None:
            continue
        begun = isinstance(part, asyncio.Task)
        closing = part if isinstance(part, asyncio.Task) else begin_close(part)
        if not await _has_ended(closing, late_s if begun else part_s, failures):
            late.append(closing)
    for closing in late:
        # If pollers were among the parts, they are closed by now, which ends what hung in them.
        if not await _has_ended(closing, late_s, failures):
            closing.cancel()
            failures.append(TidekvError(f"{closing.get_name()} did not end in time"))
    return failures


async def _has_ended(closing: asyncio.Task[object], timeout_s: float, failures: list[Exception]) -> bool:
    await asyncio.wait([closing], timeout=timeout_s)
    if not closing.done():
        return False
    error = TidekvError(f"{closing.get_name()} cancelled itself") if closing.cancelled() else closing.exception()
    if isinstance(error, Exception):
        failures.append(error)
    elif error is not None:
        raise error
    return True


class EffectGroup:
    """Task group of effects. An effect that raises is a defect: it is passed to `on_failure`, and all others end.

    A supervisor task enters the TaskGroup: entered by the embedder's task, it would cancel that task, and wrap its
    exceptions.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._group: asyncio.TaskGroup | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._endless: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the supervisor; when this returns, effects can be spawned."""
        ready = asyncio.Event()
        self._context = own_context()
        self._supervisor = asyncio.create_task(self._run(ready), name="tidekv effects", context=self._context)
        await ready.wait()

    def spawn(self, effect: Awaitable[None], name: str, *, is_endless: bool = False) -> None:
        """Run an effect. An endless one runs until `close`, which does not wait for its end."""

        async def run() -> None:
            try:
                await effect
            except Exception as error:
                # The group raises it only after all other effects have ended, which may be never.
                self._on_failure(error)
                raise

        assert self._group is not None, "effects are spawned after start and before close"
        task = self._group.create_task(run(), name=f"tidekv {name}", context=self._context.copy())
        if is_endless:
            self._endless.append(task)

    async def close(self, *, timeout_s: float) -> bool:
        """Wait for running effects; after `timeout_s` cancel them and wait as long again. False if some still run.

        An effect with memory that may still be written to settles before it ends, even if it is cancelled.
        """
        if self._supervisor is None:
            return True
        self._ended.set()
        for task in self._endless:
            task.cancel()
        for patience_is_over in (False, True):
            if patience_is_over:
                self._supervisor.cancel()
            await asyncio.wait([self._supervisor], timeout=timeout_s)
            if self._supervisor.done():
                return True
        return False

    async def _run(self, ready: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                ready.set()
                await self._ended.wait()
        except BaseExceptionGroup as failures:
            self._on_failure(failures.exceptions[0])
