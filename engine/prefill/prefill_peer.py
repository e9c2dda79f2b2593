"""The prefill side of the hand-over: `PrefillPeer`, which an embedder of a prefill worker uses.

It owns the life of the transport, the default poller and the tasks of `on_room`. It decides nothing about pages:
`tidekv.states.handover.sender` decides which page is written where and when.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import msgspec
import torch

from tidekv.backends.checksums import ChecksumThread
from tidekv.backends.component_pools import ComponentPools, check_components, with_components
from tidekv.backends.device.pool import DevicePool
from tidekv.engine.log import engine_log, own_context, run_in
from tidekv.engine.metrics import Histogram, MetricsServer, PrefillCollector
from tidekv.engine.poller import PollerThread
from tidekv.engine.prefill.prefill_config import PrefillConfig, PromptStoreSettings
from tidekv.engine.prefill.prefix_reader import PrefixReader
from tidekv.engine.prefill.prompt_store import PromptStore
from tidekv.engine.prompts import PromptDigest
from tidekv.engine.staging import make_staging
from tidekv.engine.watchdog import Watchdog
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, PrefillCause, TidekvError
from tidekv.states.types import Identity, PoolMemory
from tidekv.states.validation import Text, checked, short
from tidekv.transports.base import TransferPoller, Transport
from tidekv.transports.blocking import settled
from tidekv.transports.local_rank import LocalRank
from tidekv.transports.prefill.prefill_room import Room, RoomOutcome, RoomSettings
from tidekv.transports.prefill.room_writer import RoomCallbacks
from tidekv.transports.prefill.sender import Sender
from tidekv.transports.tasks import OwnedTasks

if TYPE_CHECKING:
    from tidekv.backends.host.pool import HostPool
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.decode.decode_engine import DecodeEngine
    from tidekv.engine.decode.lent_pages import Pages

LOG = engine_log("tidekv.engine")

__all__ = ["PrefillConfig", "PrefillPeer", "PromptStoreSettings", "Room", "RoomOutcome", "RoomSettings"]


class Layout(Protocol):
    """The part of a layout that a peer needs."""

    def identity(self, model: str) -> Identity:
        """Return what must be equal at both ends."""
        ...


class PrefillPool(Protocol):
    """The part of a device pool that a peer needs."""

    @property
    def memory(self) -> PoolMemory:
        """Address and size of the pages in memory."""
        ...

    @property
    def layout(self) -> Layout:
        """Layout of the pages."""
        ...


class PrefillPeer:
    """Serves the KV of prompts to decode workers, for as long as the `async with` block lasts.

        transport = NixlTransport(name="prefill-0", secret=secret)
        config = PrefillConfig(listen="10.0.0.5:7000")
        async with PrefillPeer(config, device=pool, transport=transport) as peer:
            room = await peer.room("r1", prompt_digest(tokens))
            await room.send(pages, start_token=0)
            await room.finish(first_token=token, aux={})
            await room.received()

    With `on_room`, `on_room(room)` runs as a task of the peer for each room once its promise has arrived. An exception
    in it fails that room, and decode receives the cause; so does a return before `room.finish`. Without tokens in the
    promise, `room.confirm` must name the prompt before its first page. The caller keeps ownership of the pool. Leaving
    the block fails the open rooms and waits for the writes in flight.

    With `components` (sliding windows and state snapshots of the model), a room also takes the pages of each that the
    prompt's end needs. `room.component_pages` lists them; `await room.send_component_pages(name, pages)` hands over
    those of one. What decode lacks of them must be handed over before `finish`, which otherwise raises. Decode workers
    must have the same components.

    With `storage`, the full pages of each finished prompt are written through to it, under the keys that decode workers
    of the same model and layout use: what prefill computed, all of them hit. That needs the prompt's tokens: they come
    with the promise (`DecodeRequest(send_prompt=True)`), or by `room.finish(tokens=…)`; a prompt without is not stored,
    and counted. `room.received()` returns no sooner than the pages were copied to host memory: `host`, all of whose
    pages are the peer's then, or a small pool of its own. It keeps what was stored last, so that a prompt which extends
    another is copied from there on. Windows and records that were sent, or given by `room.keep_component_pages`, are
    stored with the full pages that they belong to. The peer closes storage.

    Decode workers with `EngineConfig.page_checksums` get the checksum of every page that is sent to them. That needs
    pools in host memory: a peer on a GPU refuses such workers.
    """

    _clock: Callable[[], float] = staticmethod(time.monotonic)
    """Replaced by tests."""

    def __init__(
        self,
        config: PrefillConfig | None = None,
        *,
        device: PrefillPool,
        transport: Transport,
        on_room: Callable[[Room], Awaitable[None]] | None = None,
        components: Sequence[ComponentPools] = (),
        storage: Storage | None = None,
        host: HostPool | None = None,
    ) -> None:
        """Check the arguments and open nothing. Of `components` only the device pools are used. Raises InvalidConfig
        for parts that do not fit each other.
        """
        config = PrefillConfig() if config is None else config
        checked(config, PrefillConfig, "config", InvalidConfig)
        if config.place.contexts > 1 and storage is not None:
            raise InvalidConfig(
                f"a prefill peer of {config.place.contexts} contexts holds a part of each prompt, and cannot write"
                " prompts to storage: let the decode workers store them, or use contexts=1"
            )
        if on_room is not None and not callable(on_room):
            raise InvalidConfig(f"on_room must be a coroutine function or none, not {short(on_room)}")
        if components:
            if not isinstance(device, DevicePool):
                raise InvalidConfig(f"components go with a DevicePool, not with {type(device).__name__}")
            components = [dataclasses.replace(pools, host=None) for pools in components]
            # Prefill gives pages to none of the pools: their owner does, and it may give one page to several by turns.
            check_components(components, device=device, host=host, is_lent=True)
        # Remote peers and NIXL know only addresses: these references keep the memory alive.
        self._device = device
        self._components = tuple(components)
        self._transport = transport
        self.config = config
        self._on_room = on_room
        self._metrics: MetricsServer | None = None
        self._write_s = Histogram()
        self._watchdog = Watchdog(limit_s=config.loop_stall_report_s)
        self._poller: TransferPoller | None = None
        """A poller to share, instead of one of its own; for tests."""
        self._tasks = OwnedTasks(f"prefill peer {transport.instance}", instance=transport.instance)
        self._stack = AsyncExitStack()
        self._was_entered = False
        self._reader: PrefixReader | None = None
        self._store: PromptStore | None = None
        if storage is not None:
            self._store = PromptStore(
                storage, config, device=device, host=host, components=components, instance=transport.instance
            )
        # Decode workers may require checksums of pages; those in GPU memory would have to be copied to be hashed.
        memories = (device.memory, *(pools.device.memory for pools in components))
        self._checksum_thread = ChecksumThread() if all(memory.kind == "DRAM" for memory in memories) else None
        self._staging = make_staging(config.rooms.staging_bytes, memories)
        identity = with_components(device.layout.identity(config.model), components)
        self._sender = Sender(
            transport,
            LocalRank(
                identity=msgspec.structs.replace(identity, bigram_keys=config.bigram_keys),
                memory=device.memory,
                component_memory={pools.name: pools.device.memory for pools in components},
                place=config.place,
                vocabulary=config.vocabulary,
                hashing=self._checksum_thread,
                staging=None if self._staging is None else self._staging.staging,
            ),
            clock=self._clock,
            callbacks=RoomCallbacks(
                on_room=self._start_room,
                on_finish=self._store_room,
                on_written=self._write_s.observe,
                on_busy=self._watchdog.set_busy,
            ),
            lease_s=config.lease_s,
            rooms_max=config.rooms_max,
            settings=config.rooms,
        )

    def read_with(self, reader: DecodeEngine) -> None:
        """Give an engine by which `read_prefix` reads what a decode worker has of a prompt, so that only the rest is
        computed. Call it before the peer is entered.

        `reader` has the peer's device pool and model, `EngineConfig(device="lent")` with `cache_peers.enabled`, and a
        host pool and a transport of its own. The peer enters it, and leaves it when all rooms have ended. Raises
        InvalidConfig for another engine, EngineClosed if the peer was entered.
        """
        if self._was_entered:
            raise EngineClosed("read_with is called before the peer is entered")
        self._reader = PrefixReader(reader, self.config, self._device)

    async def __aenter__(self) -> Self:
        """Start the transport, open storage and listen.

        Raises InvalidConfig or StorageFailed, with everything closed again, and EngineClosed if the peer was entered
        before.
        """
        if self._was_entered:
            raise EngineClosed("this prefill peer was entered before: a peer lives once, make another one")
        self._was_entered = True
        # What is started here lives longer than a request that may have entered the peer.
        await run_in(own_context(self._transport.instance), self._start())
        return self

    async def _start(self) -> None:
        async with AsyncExitStack() as stack:
            self._watchdog.start()
            stack.push_async_callback(self._close_watchdog)
            poller = self._poller
            if poller is None:
                poller = PollerThread()
                poller.start()
                stack.push_async_callback(poller.close)
            if self.config.metrics_listen is not None:
                collector = PrefillCollector(
                    self.statistics,
                    ended=self._sender.ended,
                    aborts=self._sender.aborts,
                    write_s=self._write_s,
                    loop_lag=self._watchdog.lag,
                )
                self._metrics = MetricsServer(self.config.metrics_listen, collector, option="metrics_listen")
                stack.push_async_callback(asyncio.to_thread, self._metrics.close)
            if self._checksum_thread is not None:
                stack.push_async_callback(self._checksum_thread.close)
            if self._staging is not None:
                stack.push_async_callback(self._staging.copier.close)
            # Registered before the start: closing a transport whose start failed releases what it had opened by then.
            stack.push_async_callback(self._transport.close)
            await self._transport.start(poller=poller, listen=self.config.listen)
            if self._store is not None:
                await self._store.start()
                stack.push_async_callback(self._store.close)
            if self._reader is not None:
                await stack.enter_async_context(self._reader.engine)
            stack.push_async_callback(self._end_rooms)
            await self._sender.start(self.config.listen)
            if self._store is not None:
                # Registered last, so that it runs first: prompts being stored still need their rooms' pages.
                stack.push_async_callback(self._store.settle)
            self._stack = stack.pop_all()
        LOG.info("prefill is listening", address=self.address, metrics=self.metrics_address)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the tasks of `on_room`, end all rooms, wait for the writes in flight, close."""
        own_context(self._transport.instance).run(LOG.info, "prefill closes", address=self.address)
        await self._stack.aclose()

    @property
    def address(self) -> str:
        """The address that decode workers connect to, "host:port"."""
        return self._sender.address

    @property
    def device(self) -> torch.device:
        """The device that has the pages."""
        memory = self._device.memory
        return torch.device("cuda", memory.device) if memory.kind == "VRAM" else torch.device("cpu")

    @property
    def metrics_address(self) -> str | None:
        """host:port of the Prometheus endpoint; None without `metrics_listen`, and before the peer is entered."""
        return None if self._metrics is None else self._metrics.address

    async def room(self, request_id: str, prompt: PromptDigest) -> Room:
        """Return the room of a request whose prompt was computed here (`tidekv.prompt_digest`). Waits for decode's
        promise, so it may be called before or after that arrives.

        Ids are names that others choose, and may be used by several decode workers, and again: only a room that was
        promised for this very prompt is returned. A room under this id with another prompt waits for the call that
        computes it; if none does while this call waits, it fails with the cause "other prompt".

        Each room is returned once, and the newest first; the next call waits for another, because the same request may
        be sent again before decode's confirmation of the first attempt arrives. Raises TransferFailed if decode
        declines the request (`DecodeEngine.decline`), EngineClosed if the peer closes, and CapacityError if too many
        rooms are already waited for.
        """
        checked(request_id, Text, "request_id")
        return await self._sender.room(request_id, checked(prompt, PromptDigest, "prompt"))

    async def read_prefix(
        self,
        room: Room,
        pages: Pages,
        have_tokens: int = 0,
        *,
        tokens: bytes | None = None,
        namespace: str | None = None,
    ) -> int:
        """Read what the decode worker of a room has of the prompt into pages of prefill. Returns how many leading
        tokens are in place: compute the rest, and send all pages as always.

        `pages`: pages of the pool for those of the prompt from its first one on, in order; what they do not cover is
        not read. The first `have_tokens` tokens are in them already; those pages are not touched. The others are
        written until this returns: full pages up to what decode holds, but not the page of the last token, whose
        computation gives the first token of the answer. Pages behind the returned tokens have undefined contents.
        `tokens` is the prompt as packed little-endian u32, if the promise brought none, and `namespace` that of decode
        if the promise does not name it (`cache=False`, `prompt_digest`); without it nothing is read.

        Returns `have_tokens` if decode shares no host memory, or is refused by `dials` of the reader's transport. A
        decode worker that is gone, refuses or sends damaged pages costs an answer, and one that is silent
        `cache_peers.wait_s` of the reader: what has arrived by then is used. No failure of decode raises. Raises
        InvalidRequest for wrong arguments, and EngineClosed: then the pages may be written to until the peer is left.
        """
        if self._reader is None:
            raise InvalidRequest("read_prefix needs PrefillPeer.read_with(…), an engine that reads into these pages")
        return await self._reader.read(room, pages, have_tokens, tokens=tokens, namespace=namespace)

    async def flush_reader(self) -> None:
        """Empty the host memory of the engine that reads prefixes; does nothing without one."""
        if self._reader is not None:
            await self._reader.engine.flush(("l2",))

    def statistics(self) -> dict[str, int | float]:
        """Return what was sent and withdrawn, rooms by state, store_… with storage, prefix_… with a reader,
        `loop_stalls`, and counts of unexpected events.
        """
        store = {} if self._store is None else self._store.statistics()
        prefixes = {} if self._reader is None else self._reader.counts
        return {**self._sender.statistics(), "loop_stalls": self._watchdog.stalls, **store, **prefixes}

    async def wait_stored(self) -> None:
        """Wait until each prompt finished so far is stored or given up. Returns at once without storage.

        Unbounded, since a put may take `put_timeout_s` and storage may hang: set a deadline with `asyncio.timeout`.
        """
        if self._store is not None:
            await self._store.wait_stored()

    async def _close_watchdog(self) -> None:
        self._watchdog.set_busy(False)
        await asyncio.to_thread(self._watchdog.close)

    async def _end_rooms(self) -> None:
        """End the tasks of `on_room`, the rooms and their writes.

        A write to a decode worker that hangs ends only with the transport. So once the deadline has passed the
        transport is closed first.
        """
        ending = asyncio.get_running_loop().create_task(self._close_rooms(), name="end of a prefill peer's rooms")
        try:
            await asyncio.wait([ending], timeout=self.config.close_deadline_s)
        finally:
            if not ending.done():
                await self._transport.close()
            # Writes have ended with the transport; a task of `on_room` may still ignore its cancellation.
            try:
                await settled(ending, timeout_s=self.config.close_deadline_s)
            except TimeoutError:
                ending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                raise TidekvError(
                    f"rooms did not end within {self.config.close_deadline_s:g} s of the end of the transport: on_room"
                    " ignores its cancellation, or copies its pages"
                ) from None

    async def _close_rooms(self) -> None:
        try:
            await self._tasks.close()
        finally:
            await self._sender.close()

    def _store_room(self, room: Room) -> None:
        if self._store is not None:
            self._store.keep(room)

    def _start_room(self, room: Room) -> None:
        if self._on_room is not None:
            self._tasks.spawn(self._run_room(self._on_room, room), name=f"room of {room.request_id}")

    async def _run_room(self, on_room: Callable[[Room], Awaitable[None]], room: Room) -> None:
        try:
            await on_room(room)
            if not room.is_finished and room.cause is None:
                LOG.warning("on_room has returned without room.finish: the room fails", request_id=room.request_id)
                room.fail(PrefillCause.UNFINISHED.words("on_room returned without room.finish"))
        except Exception as error:
            # The failure concerns one request: only its room fails. Decode gets the message, the log the traceback.
            LOG.error("on_room raised, the room fails", request_id=room.request_id, exc_info=error)
            room.fail(PrefillCause.RAISED.words(f"{type(error).__name__}: {error}"))
