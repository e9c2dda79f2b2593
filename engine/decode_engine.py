"""The decode engine: what a decode worker embeds in its asyncio service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from tidekv.backends.copies import PageCopier
from tidekv.backends.keys import pack_tokens, storage_namespace
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.calls import Calls
from tidekv.engine.driver import Driver
from tidekv.engine.effects import Effects, TokenRecord
from tidekv.engine.journal import Journal
from tidekv.engine.poller import PollerThread
from tidekv.engine.values import DecodeRequest, ReadyRequest, RetractedRequest
from tidekv.states import events
from tidekv.states.core import Core
from tidekv.states.errors import CapacityError, EngineClosed, InvalidConfig, InvalidRequest, OutOfPages
from tidekv.states.request import State
from tidekv.transports.receiver import Receiver

if TYPE_CHECKING:
    from tidekv.backends.device import DevicePool
    from tidekv.backends.host import HostPool
    from tidekv.backends.keys import Tokens
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.config import EngineConfig
    from tidekv.transports.base import Transport

LOG = logging.getLogger("tidekv.engine")
# transitions logs every trigger at DEBUG, which costs ten times the trigger when somebody turns DEBUG on for all.
logging.getLogger("transitions").setLevel(logging.WARNING)

TOKEN_BYTES = 4
GENERATIONS_MAX = 1 << 16
"""Rooms that one request can open. Ids may be used again, generations of an id never."""


class DecodeEngine:
    """Restores prompts onto a device from its own cache, host memory, storage, and prefill.

    An async context manager: entering starts it, leaving closes it and aborts what is still live. All methods are
    called on the loop that entered it. It takes over transport and storage, and closes both; the pools stay the
    caller's. Effects run in one TaskGroup: a broken invariant cancels the block that the engine is used in.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: DevicePool,
        host: HostPool | None = None,
        storage: Storage | None = None,
        transport: Transport,
    ) -> None:
        if storage is not None and host is None:
            raise InvalidConfig("storage needs a host pool: its pages land there before they go to the device")
        if host is not None and host.layout != device.layout:
            raise InvalidConfig(f"host pool has layout {host.layout}, device pool has {device.layout}")
        self.config = config
        self.layout = device.layout
        self._device = device
        self._host = host
        self._first_storage = storage
        self._transport = transport
        self._identity = device.layout.identity(config.model)
        self._core = Core(
            config.core_settings(
                page_size=device.layout.page_size,
                device_pages=device.num_pages,
                host_pages=0 if host is None else host.num_pages,
            )
        )
        self._poller = PollerThread()
        self._calls = Calls()
        self._group: asyncio.TaskGroup | None = None
        self._closing = False
        self._broken: BaseException | None = None
        self._serial = 0
        self._storage_lock = asyncio.Lock()

    # --- Life ---

    async def __aenter__(self) -> Self:
        """Start: poller, transport, pools, storage. Raises what they raise, with everything stopped again."""
        try:
            await self._start()
        except BaseException:
            self._closing = True
            await self._stop_parts()
            if self._group is not None:
                await self._group.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is live, wait for what is in flight (bounded by `close_deadline_s`), and stop everything."""
        assert self._group is not None
        try:
            await self._close()
        finally:
            await self._group.__aexit__(kind, error, trace)
        if self._broken is not None and error is None:
            raise self._broken

    async def _start(self) -> None:
        self._poller.start()
        await self._transport.start(poller=self._poller)
        memory = self._device.memory
        await self._transport.register(memory)
        header = {
            "config": msgspec.to_builtins(self.config),
            "core": msgspec.to_builtins(self._core.settings),
            "instance": self._transport.instance,
        }
        self._journal = None
        if self.config.journal is not None:
            self._journal = Journal(
                self.config.journal,
                header=header,
                key_bytes=self._core.settings.key_bytes,
                with_tokens=self.config.journal_tokens,
            )
        self._driver = Driver(
            self._core,
            lambda command: self._effects.perform(command),
            journal=self._journal,
            on_broken=self._break,
            after_drain=self._calls.after_drain,
        )
        self._receiver = Receiver(
            self._transport,
            memory=memory,
            identity=self._identity,
            deliver=self._driver.post,
            deliver_aux=self._calls.note_aux,
            clock=self._driver.clock,
            lease_s=self.config.lease_s,
            heartbeat_s=self.config.heartbeat_s,
            missed_s=self.config.peer_silence_s,
        )
        await self._receiver.start()
        self._copier = None
        if self._host is not None:
            self._copier = PageCopier(self._device, self._host, self._poller)
            self._copier.start()
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._effects = Effects(
            caller=self._calls,
            post=self._driver.post,
            clock=self._driver.clock,
            spawn=self._spawn,
            copier=self._copier,
            receiver=self._receiver,
            page_size=self.layout.page_size,
            store_timeout_s=self.config.store_timeout_s,
            fetch_timeout_s=self._core.settings.prefetch_deadline_s(self._device.num_pages),
            query_timeout_s=self.config.query_deadline_s,
        )
        if self._first_storage is not None:
            await self._attach(self._first_storage)

    def _spawn(self, call: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await call

        assert self._group is not None
        self._group.create_task(run(), name=f"tidekv {name}")

    def _break(self, error: BaseException) -> None:
        """The core is not to be trusted any more: everybody who waits hears of it, and the engine's block ends."""
        LOG.critical("the engine stops: its core broke", exc_info=error)
        self._broken = error
        self._closing = True
        self._calls.fail_all(EngineClosed(f"the engine broke: {type(error).__name__}: {error}"))
        if self._group is not None:
            self._spawn(_raise(error), "broken core")

    async def _close(self) -> None:
        self._closing = True
        if self._broken is None:
            for request_id in self._calls.live_ids():
                self._driver.post(
                    events.AbortRequested(at_s=self._driver.clock(), request_id=request_id, cause="engine closed")
                )
            try:
                async with asyncio.timeout(self.config.close_deadline_s):
                    await self._calls.wait_until(lambda: self._core.is_idle)
                    await self._effects.storage_is_quiet()
            except TimeoutError:
                LOG.warning(
                    "closed after %s s with work in flight: %s", self.config.close_deadline_s, self._core.statistics()
                )
            self._driver.stop()
            self._calls.fail_all(EngineClosed("the engine was closed"))
        await self._stop_parts()

    async def _stop_parts(self) -> None:
        """Stop what was started, in the opposite order, whatever of it fails."""
        closers = [
            getattr(getattr(self, name, None), "close", None)
            for name in ("_receiver", "_copier", "_storage", "_transport", "_poller")
        ]
        failures: list[Exception] = []
        for close in closers:
            if close is None:
                continue
            try:
                await close()
            except Exception as error:
                failures.append(error)
        journal = getattr(self, "_journal", None)
        if journal is not None:
            await asyncio.to_thread(journal.close)
        if failures:
            raise ExceptionGroup("closing the engine", failures)

    @property
    def _storage(self) -> Storage | None:
        effects = getattr(self, "_effects", None)
        return self._first_storage if effects is None else effects.storage

    # --- Restore ---

    async def restore(self, request: DecodeRequest) -> ReadyRequest:
        """Bring the prompt's KV onto the device. The pages are the caller's until finish, retract or abort.

        Raises InvalidRequest (nothing was changed), CapacityError (the queue is full), RequestFailed, EngineClosed.
        Cancelling the awaiting task aborts the request.
        """
        self._check_open()
        limit = self.config.vocabulary or None
        return await self._submit(request, pack_tokens(request.tokens, vocabulary=limit))

    async def _submit(self, request: DecodeRequest, packed: bytes) -> ReadyRequest:
        settings = self._core.settings
        tokens = len(packed) // TOKEN_BYTES
        needed = settings.pages_of(tokens) + settings.growth_reserve_pages
        if needed > settings.device_pages:
            raise InvalidRequest(
                f"request {request.request_id!r}: its prompt of {tokens} tokens needs {needed} device pages with its "
                f"reserve; the pool has {settings.device_pages}"
            )
        if len(self._core.queue) >= settings.queue_max:
            raise CapacityError(f"{settings.queue_max} requests wait for admission already; try again later")
        self._serial += 1
        record = TokenRecord(
            packed,
            page_size=settings.page_size,
            namespace=self._namespace(request),
            addresses=request.prefills,
            sends_prompt=request.prompt == "send",
        )
        outcome = self._calls.begin(request, record, serial=self._serial)
        now_s = self._driver.clock()
        within_s = self.config.default_deadline_s if request.deadline_s is None else request.deadline_s
        self._driver.post(
            events.RequestArrived(
                at_s=now_s,
                request_id=request.request_id,
                serial=self._serial,
                keys=packed[: tokens // settings.page_size * settings.key_bytes],
                prompt_tokens=tokens,
                namespace=record.namespace,
                prefill_count=len(request.prefills),
                deadline_at_s=now_s + within_s,
                priority=request.priority,
                cache=request.cache,
                generation=self._serial * GENERATIONS_MAX,
            )
        )
        try:
            return await outcome
        except asyncio.CancelledError:
            if not self._closing:
                self._driver.post(
                    events.AbortRequested(
                        at_s=self._driver.clock(), request_id=request.request_id, cause="cancelled by the caller"
                    )
                )
            raise

    def _namespace(self, request: DecodeRequest) -> str:
        # Both parts with their lengths: no pair of names can be taken for another pair.
        parts = [part for part in (self.config.namespace, request.namespace) if part]
        return parts[0] if len(parts) == 1 else "/".join(f"{len(part)}:{part}" for part in parts)

    async def abort(self, request_id: str) -> bool:
        """End a request, waiting or READY: its `restore` raises RequestFailed("aborted"). False: it is not live."""
        self._check_open()
        if not self._calls.is_live(request_id):
            return False
        self._driver.post(events.AbortRequested(at_s=self._driver.clock(), request_id=request_id))
        await self._calls.wait_until(lambda: self._core.request(request_id) is None)
        return True

    # --- After READY ---

    def grow(self, ready: ReadyRequest, tokens: int = 1) -> list[int]:
        """Make room for `tokens` more tokens; returns the pages that this adds to `ready.pages`, mostly none.

        Raises OutOfPages, having changed nothing: retract or finish a request, and call again.
        """
        live = self._calls.ready(ready)
        if tokens < 0:
            raise InvalidRequest(f"request {ready.request_id!r} cannot grow by {tokens} tokens")
        settings = self._core.settings
        needed = settings.pages_of(ready.length + tokens) - len(ready.pages)
        if needed <= 0:
            ready.length += tokens
            return []
        if needed > len(live.reserve):
            self._grow_now(ready.request_id, 0, wanted=needed - len(live.reserve))
        if needed > len(live.reserve):
            raise OutOfPages(
                f"request {ready.request_id!r} needs {needed} more device pages; {len(live.reserve)} can be had"
            )
        taken, live.reserve = live.reserve[:needed], live.reserve[needed:]
        self._driver.post(events.GrowthTaken(at_s=self._driver.clock(), request_id=ready.request_id, page_count=needed))
        ready.pages = np.concatenate((ready.pages, np.array(taken, dtype=np.int32)))
        ready.length += tokens
        return taken.tolist()

    def _grow_now(self, request_id: str, page_count: int, *, wanted: int) -> None:
        self._driver.take_now(
            events.GrowthTaken(at_s=self._driver.clock(), request_id=request_id, page_count=page_count, wanted=wanted)
        )

    async def finish(self, ready: ReadyRequest, output_tokens: Tokens = ()) -> int:
        """Keep prompt and output in the cache, back them up, give everything back.

        The last output token has no KV yet and is left out. Returns how many pages were new to the cache. Raises
        InvalidRequest for output that the request has no room for.
        """
        keys, tokens = self._kept(ready, output_tokens)
        done: asyncio.Future[int] = self._calls.expect(ready, "finish")
        self._driver.post(
            events.FinishRequested(at_s=self._driver.clock(), request_id=ready.request_id, keys=keys, tokens=tokens)
        )
        return await done

    async def retract(self, ready: ReadyRequest, output_tokens: Tokens = ()) -> RetractedRequest:
        """Give the device pages back; what of the KV reaches host memory is held there until `resume` or `drop`."""
        keys, tokens = self._kept(ready, output_tokens)
        live = self._calls.ready(ready)
        done: asyncio.Future[int] = self._calls.expect(ready, "retract")
        self._driver.post(
            events.RetractRequested(at_s=self._driver.clock(), request_id=ready.request_id, keys=keys, tokens=tokens)
        )
        held_pages = await done
        return RetractedRequest(
            request=live.request,
            packed_tokens=live.record.packed,
            held_tokens=held_pages * self.layout.page_size,
        )

    async def resume(self, retracted: RetractedRequest) -> ReadyRequest:
        """Restore prompt and output so far in a new room; the first token it brings is the next one of the output.

        Raises as `restore`; what was held in host memory is let go of either way.
        """
        self._check_open()
        return await self._submit(retracted.request, retracted.packed_tokens)

    def drop(self, retracted: RetractedRequest) -> None:
        """Let go of what a retracted request that will not be resumed holds in host memory."""
        self._driver.post(events.RetractedDropped(at_s=self._driver.clock(), request_id=retracted.request.request_id))

    def _kept(self, ready: ReadyRequest, output_tokens: Tokens) -> tuple[bytes, int]:
        """Keys and count of the tokens that have KV; the record learns the tokens."""
        live = self._calls.ready(ready)
        output = pack_tokens(output_tokens, vocabulary=self.config.vocabulary or None) if len(output_tokens) else b""
        settings = self._core.settings
        packed = ready.packed_tokens + output
        tokens = len(packed) // TOKEN_BYTES - (1 if output else 0)
        if settings.pages_of(tokens) > len(ready.pages):
            raise InvalidRequest(
                f"request {ready.request_id!r}: {tokens} tokens have KV, but its {len(ready.pages)} pages hold "
                f"{len(ready.pages) * settings.page_size}; grow before writing"
            )
        live.record.grown(packed)
        return packed[: tokens // settings.page_size * settings.key_bytes], tokens

    # --- The whole ---

    async def flush(self, tiers: tuple[str, ...] = ("l1", "l2")) -> dict[str, dict[str, int]]:
        """Forget everything in these tiers that is not in use: {"dropped": …, "spared": …}, pages by tier.

        "l3" clears storage; it spares nothing.
        """
        self._check_open()
        wrong = set(tiers) - {"l1", "l2", "l3"}
        if wrong:
            raise InvalidRequest(f"flush knows the tiers l1, l2 and l3, not {', '.join(sorted(wrong))}")
        self._serial += 1
        done = self._calls.expect_flush(self._serial)
        local = tuple(tier for tier in tiers if tier != "l3")
        self._driver.post(events.FlushRequested(at_s=self._driver.clock(), call=self._serial, tiers=local))
        answer = await done
        if "l3" in tiers and self._effects.storage is not None:
            answer["dropped"]["l3"] = await self._effects.storage.clear()
            answer["spared"]["l3"] = 0
        return answer

    async def attach_storage(self, storage: str | Storage, options: Mapping[str, object] | None = None) -> None:
        """Use this storage from now on; the one there was is drained and closed first.

        Raises InvalidConfig or StorageFailed, with no storage attached where there was none.
        """
        self._check_open()
        if self._host is None:
            raise InvalidConfig("storage needs a host pool: its pages land there before they go to the device")
        opened = open_storage(storage, options) if isinstance(storage, str) else storage
        async with self._storage_lock:
            await self._detach()
            await self._attach(opened)

    async def detach_storage(self) -> None:
        """Use no storage from now on: its calls in flight are waited for, then it is closed."""
        self._check_open()
        async with self._storage_lock:
            await self._detach()

    async def _attach(self, storage: Storage) -> None:
        assert self._host is not None
        await storage.register(
            self._host.memory,
            self._host.page,
            namespace=storage_namespace(self._identity),
            poller=self._poller,
        )
        self._effects.storage = storage
        self._driver.post(events.StorageChanged(at_s=self._driver.clock(), available=True))

    async def _detach(self) -> None:
        storage = self._effects.storage
        if storage is None:
            return
        self._driver.take_now(events.StorageChanged(at_s=self._driver.clock(), available=False))
        await self._effects.storage_is_quiet()
        self._effects.storage = None
        await storage.close()

    async def wait_settled(self) -> None:
        """Wait until nothing is in flight but READY requests: no restore, backup, put, or page in the quarantine."""
        core = self._core

        def is_settled() -> bool:
            restoring = any(request.state is not State.READY for request in core.books.requests.values())
            return not (restoring or core.books.operations or core.backups or core.loads or core.rooms.draining_rooms)

        await self._calls.wait_until(is_settled)

    def statistics(self) -> dict[str, object]:
        """Counts of now and since the start, by part."""
        storage = self._storage
        return {
            "core": self._core.statistics(),
            "receiver": self._receiver.statistics(),
            "transport": self._transport.statistics(),
            "poller": msgspec.to_builtins(self._poller.statistics()),
            "copies": None if self._copier is None else msgspec.to_builtins(self._copier.statistics()),
            "storage": None if storage is None else msgspec.to_builtins(storage.statistics()),
            "events": self._driver.events_taken,
            "events_illegal": self._driver.illegal_events,
            "effects_raised": self._effects.raised,
        }

    def _check_open(self) -> None:
        if self._closing or self._group is None:
            raise EngineClosed("the engine is not running: enter it with `async with`, and call nothing after its end")


async def _raise(error: BaseException) -> None:
    raise error
