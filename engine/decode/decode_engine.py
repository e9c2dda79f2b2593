"""The decode engine: what a decode worker embeds in its asyncio service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from tidekv.backends.keys.chain import TOKEN_BYTES, namespace_seed, pack_tokens
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.decode.component_pages import component_pages_left
from tidekv.engine.decode.growth import Growth, kept_tokens, pack_output
from tidekv.engine.decode.runtime import Runtime
from tidekv.engine.decode.storage_swap import CLEAR_S, check_storage
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest, Recompute, RetractedRequest, join_namespaces
from tidekv.states import events
from tidekv.states.errors import CapacityError, EngineClosed, InvalidConfig, InvalidRequest, RequestFailed
from tidekv.states.storage.policy import StoragePolicy, changed_policy, policy_of
from tidekv.states.validation import PlainText, Seconds, SecondsOrZero, Text, checked

if TYPE_CHECKING:
    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.device.pool import DevicePool
    from tidekv.backends.host.pool import HostPool
    from tidekv.backends.keys.chain import Tokens
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.decode.component_pages import LeftComponents
    from tidekv.engine.ranks.group import RankGroup
    from tidekv.states.core import Core
    from tidekv.transports.base import Transport

Tier = Literal["l1", "l2", "l3"]
GENERATIONS_MAX = 1 << 16
"""Rooms that one request can open. Ids may be used again, generations of an id never."""


class DecodeEngine:
    """Restores prompts onto a device from its own cache, host memory, storage, and prefill.

    An async context manager: entering starts it, leaving closes it and aborts what is still live. All methods are
    called on the loop that entered it (InvalidRequest elsewhere), within the block (EngineClosed outside). It takes
    over transport and storage, and closes both; the pools stay the caller's. If an invariant breaks, all calls fail
    with EngineClosed and leaving the block raises what broke. An engine is entered once.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: DevicePool,
        host: HostPool | None = None,
        components: Sequence[ComponentPools] = (),
        storage: Storage | None = None,
        transport: Transport,
        recompute: Recompute | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """Nothing is started. Raises InvalidConfig for parts that do not fit each other.

        `components`: sliding windows and recurrent states of the model, which travel beside the KV of every page; a
        prefix is then as long as all of them can go on from.
        `recompute` is the last resort: where no prefill of a request's list can send what is missing, it computes that
        on this machine, and the request is READY all the same. `ranks`: it is one of several engines that
        decide as one.
        """
        self.config: EngineConfig = checked(config, EngineConfig, "config", InvalidConfig)
        self._runtime = Runtime(
            config,
            device=device,
            host=host,
            components=components,
            storage=storage,
            transport=transport,
            recompute=recompute,
            ranks=ranks,
        )
        self.layout = device.layout
        self._calls = self._runtime.calls
        self._serial = 0

    async def __aenter__(self) -> Self:
        """Start all parts. Raises what they raise, with everything stopped again; EngineClosed if entered before."""
        await self._runtime.start()
        self._driver = self._runtime.front
        self._growth = Growth(self._calls, self._driver, page_size=self.layout.page_size)
        return self

    @property
    def _core(self) -> Core:
        return self._runtime.core

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is live, wait for what is in flight (bounded by `close_deadline_s`), and stop everything."""
        await self._runtime.close()

    # --- Restore ---

    async def restore(self, request: DecodeRequest) -> ReadyRequest:
        """Bring the prompt's KV onto the device. The pages are the caller's until finish, retract or abort.

        Raises InvalidRequest (nothing was changed), CapacityError (the queue is full), RequestFailed, EngineClosed.
        Cancelling the awaiting task aborts the request.
        """
        self._runtime.check_open()
        checked(request, DecodeRequest, "request")
        if self._runtime.is_draining:
            raise EngineClosed("the engine drains: it takes no new requests")
        limit = self.config.vocabulary or None
        return await self._submit(request, pack_tokens(request.tokens, vocabulary=limit))

    async def _submit(self, request: DecodeRequest, packed: bytes) -> ReadyRequest:
        self._driver.check()
        for address in request.prefills:
            for rank in address.split(","):
                self._runtime.transport.check_address(rank)
        settings = self._core.settings
        tokens = len(packed) // TOKEN_BYTES
        needed = settings.pages_of(tokens) + settings.growth_reserve_pages
        if needed > settings.device_pages:
            raise InvalidRequest(
                f"request {request.request_id!r}: its prompt of {tokens} tokens needs {needed} device pages with its "
                f"reserve; the pool has {settings.device_pages}"
            )
        # Requests that arrived in this turn of the loop are in no queue yet.
        if len(self._core.queue) + self._calls.arriving(self._core) >= settings.queue_max:
            raise CapacityError(f"{settings.queue_max} requests wait for admission already; try again later")
        serial = self._serial = self._serial + 1
        namespace = join_namespaces(self.config.namespace, request.namespace)
        prompt = self._runtime.prompt_keys.prompt(packed, namespace_seed(namespace))
        within_s = self.config.default_deadline_s if request.deadline_s is None else request.deadline_s
        now_s = self._driver.clock()
        arrival = events.RequestArrived(
            at_s=now_s,
            request_id=request.request_id,
            serial=serial,
            keys=self._runtime.prompt_keys.page_keys.of(packed),
            prompt_tokens=tokens,
            namespace=namespace,
            prefill_count=len(request.prefills),
            deadline_at_s=now_s + within_s,
            priority=request.priority,
            cache=request.cache,
            generation=serial * GENERATIONS_MAX,
            can_recompute=self._calls.last_resort is not None,
        )
        # From here on the id is live and the event is posted: both or neither, whatever raises in between.
        try:
            outcome = self._calls.begin(request, prompt, serial=serial, deadline_at_s=arrival.deadline_at_s)
            self._driver.post(arrival)
        except BaseException:
            self._calls.withdraw(request.request_id, serial=serial)
            raise
        try:
            ready = await outcome
        except asyncio.CancelledError:
            # It may have failed just now, and its id may be another request's already.
            if outcome.done() and not outcome.cancelled():
                outcome.exception()
            if self._calls.serial_of(request.request_id) == serial:
                self._driver.post(
                    events.AbortRequested(
                        at_s=self._driver.clock(), request_id=request.request_id, cause="cancelled by the caller"
                    )
                )
            raise
        if not self._calls.holds(ready):
            # Aborted, or given back, between the core's decision and this line: an abort that is still queued ends it,
            # and its pages may be another request's already.
            cause = "aborted" if self._runtime.is_open else "engine closed"
            raise RequestFailed(request.request_id, cause, "just when it had become READY")
        return ready

    async def abort(self, request_id: str) -> bool:
        """End a request, waiting or READY. True: it is over now, and its id is free; its `restore` raises
        RequestFailed("aborted"), also if the core decided READY before it took the abort. False: it is not live, or was
        given to finish or retract before.

        Waits until the core has taken the abort: for a turn of the loop, with ranks for a vote, which ends within the
        ranks' `vote_timeout_s`. Transfers that still write are not waited for. The engine's end raises EngineClosed.
        """
        self._runtime.check_open()
        checked(request_id, Text, "request_id")
        serial = self._calls.serial_of(request_id)
        if serial is None or self._calls.is_given_back(request_id):
            return False
        self._driver.post(events.AbortRequested(at_s=self._driver.clock(), request_id=request_id))
        self._calls.mark_aborted(request_id)
        await self._calls.wait_until(lambda: self._calls.serial_of(request_id) != serial)
        return True

    # --- After READY ---

    def grow(self, ready: ReadyRequest, tokens: int = 1) -> list[int]:
        """Make room for `tokens` more tokens; returns the pages that this adds to `ready.pages`, mostly none.

        Raises OutOfPages, having changed nothing: retract or finish a request, and call again. Raises InvalidRequest if
        the request was given back, or lost to an engine error: then its pages are no longer the caller's.
        """
        self._runtime.check_open()
        return self._growth.grow(ready, tokens)

    async def wait_grown(self, ready: ReadyRequest, tokens: int = 1) -> list[int]:
        """Like `grow`, but if the reserve is too small, wait for the ranks to agree on more, which the callers of all
        ranks must request. Raises OutOfPages if the pool has no more, or another rank's caller does not in time.
        """
        self._runtime.check_open()
        if self._runtime.ranks is None:
            return self._growth.grow(ready, tokens)
        return await self._growth.wait_grown(ready, tokens, hold_s=self._runtime.ranks.hold_s)

    def note_growth(self, ready: ReadyRequest, page_count: int) -> None:
        """Note that `grow_from_reserve` took pages, on any thread: the reserve is refilled soon. Call it before the
        request is given back. Does nothing for a request that is lost already.
        """
        self._runtime.check_open()
        self._growth.note(ready, page_count)

    async def finish(
        self, ready: ReadyRequest, output_tokens: Tokens = (), *, component_pages: LeftComponents | None = None
    ) -> int:
        """Keep prompt and output in the cache, back them up, give everything back.

        The last output token has no KV yet and is left out. `component_pages`: what is to be kept of components, by
        name, as
        `(first, pages)`: own or shared pages at their positions, whose bytes are there. A prefix can be restored as far
        as all components were left there. Returns how many pages were new to the cache. Raises InvalidRequest for
        output that the request has no room for and for pages that are not its, RequestFailed where it was aborted just
        before. Cancelling the awaiting task changes nothing: it is given back.
        """
        return await self._give_back(events.FinishRequested, ready, output_tokens, component_pages)

    async def retract(
        self, ready: ReadyRequest, output_tokens: Tokens = (), *, component_pages: LeftComponents | None = None
    ) -> RetractedRequest:
        """Give the device pages back; what of the KV reaches host memory is held there until `resume` or `drop`.

        `component_pages` and errors are those of `finish`. Where the awaiting task is cancelled, nothing stays held.
        """
        self._runtime.check_open()
        live = self._calls.ready(ready)
        done = self._give_back(events.RetractRequested, ready, output_tokens, component_pages)
        try:
            held_pages = await asyncio.shield(done)
        except BaseException:
            done.add_done_callback(partial(self._drop_unclaimed, ready.request_id))
            raise
        return RetractedRequest(
            request=live.request,
            packed_tokens=live.prompt.packed,
            held_tokens=held_pages * self.layout.page_size,
        )

    async def resume(self, retracted: RetractedRequest) -> ReadyRequest:
        """Restore prompt and output so far in a new room; the first token it brings is the next one of the output.

        Raises as `restore`. What was held in host memory is released when the request is READY or has failed; it stays
        held if the call was refused (InvalidRequest, CapacityError).
        """
        self._runtime.check_open()
        checked(retracted, RetractedRequest, "retracted")
        return await self._submit(retracted.request, retracted.packed_tokens)

    def drop(self, retracted: RetractedRequest) -> None:
        """Release what a retracted request that will not be resumed holds in host memory."""
        self._runtime.check_open()
        checked(retracted, RetractedRequest, "retracted")
        self._driver.post(events.RetractedDropped(at_s=self._driver.clock(), request_id=retracted.request.request_id))

    def _drop_unclaimed(self, request_id: str, done: asyncio.Future[int]) -> None:
        """Release what the request holds: the call of retract ended without its answer."""
        if not done.cancelled() and done.exception() is None:
            self._driver.post(events.RetractedDropped(at_s=self._driver.clock(), request_id=request_id))

    def _give_back(
        self,
        kind: type[events.FinishRequested | events.RetractRequested],
        ready: ReadyRequest,
        output_tokens: Tokens,
        component_pages: LeftComponents | None,
    ) -> asyncio.Future[int]:
        """Post the tokens that have KV and what is left of components; extend the call's prompt by the tokens."""
        self._runtime.check_open()
        live = self._calls.ready(ready)
        page_keys = self._runtime.prompt_keys.page_keys
        output = pack_output(output_tokens, vocabulary=self.config.vocabulary or None)
        tokens = kept_tokens(ready, output, page_size=self.layout.page_size)
        packed = ready.packed_tokens + output
        full_pages = page_keys.count(len(packed) // TOKEN_BYTES, tokens)
        left = component_pages_left(ready.request_id, ready.component_pages, component_pages, full_pages=full_pages)
        keys, at_s = page_keys.of(packed, tokens), self._driver.clock()
        event = kind(at_s=at_s, request_id=ready.request_id, keys=keys, tokens=tokens, component_pages=left)
        done = self._calls.expect(ready)
        try:
            live.prompt.extend(packed)
            self._driver.post(event)
        except BaseException:
            self._calls.unexpect(ready)
            raise
        return done

    # --- The whole ---

    async def flush(
        self, tiers: tuple[str, ...] = ("l1", "l2"), *, timeout_s: float = CLEAR_S
    ) -> dict[str, dict[str, int]]:
        """Forget everything in these tiers that is not in use: {"dropped": …, "spared": …}, pages by tier.

        "l3" clears storage; it spares nothing. Raises InvalidRequest for another tier, and for "l3" without storage;
        StorageFailed if clearing takes longer than `timeout_s` seconds: it goes on.
        """
        self._runtime.check_open()
        chosen: tuple[Tier, ...] = checked(tiers, tuple[Tier, ...], "tiers")
        if "l3" in chosen and self._runtime.storage is None:
            raise InvalidRequest("tiers must be l1 or l2, not l3: no storage is attached")
        self._serial += 1
        call = self._serial
        local = tuple(tier for tier in chosen if tier != "l3")
        event = events.FlushRequested(at_s=self._driver.clock(), call=call, tiers=local)
        done = self._calls.expect_flush(call)
        try:
            self._driver.post(event)
        except BaseException:
            self._calls.unexpect_flush(call)
            raise
        answer = await done
        if "l3" in chosen and self._runtime.storage is not None:
            answer["dropped"]["l3"] = await self._runtime.storage_in_use.clear(timeout_s=timeout_s)
            answer["spared"]["l3"] = 0
        return answer

    async def attach_storage(
        self, storage: str | Storage, options: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Use this storage from now on, in place of the one there was; requests run on meanwhile.

        The new one is opened first, then the calls of the old one are awaited, and the old one is closed: all within
        `timeout_s` seconds (None: `close_deadline_s`). If the new one is not open by then, StorageFailed is raised. If
        the old one hangs, it is replaced all the same: its calls keep their host pages until they end, and it is closed
        then, or at the engine's end. If this raises (InvalidConfig, StorageFailed) or is cancelled before the exchange,
        the old one is in use as before, and the new one closed. What closing the old one raises is raised, with the new
        one in use. The engine closes storage at its end.
        """
        self._runtime.check_open()
        if isinstance(storage, str):
            storage = open_storage(storage, options)
        elif options is not None:
            raise InvalidRequest("options go with the URI of a storage, not with an engine that is made already")
        elif storage is None:
            raise InvalidRequest("storage must be a URI or a storage engine, not None; detach_storage() removes it")
        check_storage(storage)
        await self._runtime.storage_in_use.swap(storage, timeout_s=self._exchange_s(timeout_s))

    async def detach_storage(self, *, timeout_s: float | None = None) -> None:
        """Use no storage from now on: its calls in flight are awaited, then it is closed. A storage that hangs is left
        behind after `timeout_s` seconds (None: `close_deadline_s`), as by `attach_storage`.
        """
        self._runtime.check_open()
        await self._runtime.storage_in_use.swap(None, timeout_s=self._exchange_s(timeout_s))

    def _exchange_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self.config.close_deadline_s
        within_s: float = checked(timeout_s, Seconds, "timeout_s")
        return within_s

    @property
    def policy(self) -> StoragePolicy:
        """How storage is used now."""
        return policy_of(self._core.state.settings)

    def change_policy(self, **changes: object) -> StoragePolicy:
        """Use storage in another way from now on: `change_policy(prefetch="best_effort", breaker_failures=4)`.

        Names and values are those of `StoragePolicy`, which is returned; what is not named stays, and so does how what
        is under way goes on. Raises InvalidConfig, having changed nothing, for a name or value that there is not.
        """
        self._runtime.check_open()
        policy = changed_policy(self.policy, changes)
        self._driver.take_now(events.PolicyChanged(at_s=self._driver.clock(), policy=policy))
        return policy

    def probe_prefix(self, tokens: Tokens, *, namespace: str = "") -> dict[str, int]:
        """Tokens of this prompt that are in device and host memory now, {"l1": …, "l2": …}. Changes nothing. Pages that
        are still being received or copied do not count.

        For routers. Any page may be evicted at any time, so the answer promises nothing. Raises InvalidRequest.
        """
        packed = pack_tokens(tokens, vocabulary=self.config.vocabulary or None)
        checked(namespace, PlainText, "namespace")
        joined = join_namespaces(self.config.namespace, namespace)
        state = self._core.state
        keys = self._runtime.prompt_keys.page_keys.of(packed)
        device, host = (state.components or state.index).probe_prefix(joined, keys, with_pending=False)
        return {"l1": device * self.layout.page_size, "l2": host * self.layout.page_size}

    async def drain(self, timeout_s: float | None = None) -> list[str]:
        """Take no new requests, and wait until those that are live were given back, or the time is up.

        Resuming is still possible. Returns the ids of the requests that are live still. Without `timeout_s` it waits as
        long as callers keep READY requests, or until the engine ends (EngineClosed): that is the caller's choice.
        """
        self._runtime.check_open()
        checked(timeout_s, SecondsOrZero | None, "timeout_s")
        self._runtime.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._calls.wait_until(lambda: not self._calls.live_ids())
        except TimeoutError:
            return self._calls.live_ids()
        return []

    async def wait_formed(self) -> None:
        """Wait until all ranks of the instance are there (again); without ranks they always are.

        Unbounded, since a lost rank may never come back: set a deadline with `asyncio.timeout`.
        """
        self._runtime.check_open()
        if self._runtime.ranks is not None:
            await self._runtime.ranks.wait_formed()

    async def wait_settled(self) -> None:
        """Wait until nothing is in flight but READY requests: no restore, backup, put, or page in the quarantine.

        Restores end by their deadlines; further requests and storage that hangs may prolong the wait without bound: set
        a deadline with `asyncio.timeout`. The engine's end raises EngineClosed.
        """
        self._runtime.check_open()
        await self._runtime.wait_settled()

    @property
    def metrics_address(self) -> str | None:
        """host:port where Prometheus may scrape; None if `metrics.listen` is not set."""
        return None if self._runtime.metrics is None else self._runtime.metrics.address

    def holds(self, ready: ReadyRequest) -> bool:
        """Whether its pages are still its: not given back, aborted, or lost. May be asked on any thread."""
        return self._calls.holds(ready)

    def states(self) -> dict[str, str]:
        """Where each live request waits, by its id: "PREALLOC" to "READY"."""
        return {request_id: request.state.value for request_id, request in self._core.state.requests.items()}

    @property
    def is_running(self) -> bool:
        """Whether it takes calls: entered, and neither left nor broken. May be read on any thread."""
        return self._runtime.is_open

    def statistics(self) -> dict[str, object]:
        """Counts of now and since the start, by part; also after the end."""
        if self._runtime.loop is None:
            raise EngineClosed("the engine was not started: enter it with `async with`")
        return self._runtime.statistics()
