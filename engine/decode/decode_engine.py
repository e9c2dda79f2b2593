"""Decode engine, to be embedded in the asyncio service of a decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, Unpack

from tidekv.backends.keys.chain import TOKEN_BYTES, pack_tokens
from tidekv.backends.keys.namespaces import namespace_of_seed
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.decode.arrivals import Arrivals
from tidekv.engine.decode.component_pages import component_pages_left
from tidekv.engine.decode.growth import Growth, kept_tokens, pack_output
from tidekv.engine.decode.hints import HintCalls, HintOutcome, take_of_request
from tidekv.engine.decode.lent_calls import LentCalls
from tidekv.engine.decode.look_up import look_up
from tidekv.engine.decode.runtime import Runtime
from tidekv.engine.decode.status_server import StatusServer
from tidekv.engine.decode.storage_swap import CLEAR_S, check_storage
from tidekv.engine.decode.stored_namespace import delete_stored
from tidekv.engine.decode.values import (
    DecodeRequest,
    DrainOutcome,
    EngineStatistics,
    OfferedPages,
    PoolBalance,
    Priority,
    PromptLookUp,
    ReadyRequest,
    Recompute,
    RestoredPages,
    RetractedRequest,
)
from tidekv.states import events
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, RequestFailed
from tidekv.states.storage_policy import PolicyChanges, StoragePolicy, changed_policy, policy_of
from tidekv.states.validation import PlainText, Seconds, SecondsOrZero, Text, checked

if TYPE_CHECKING:
    from tidekv.backends.component_pools import ComponentPools
    from tidekv.backends.device.pool import DevicePool
    from tidekv.backends.host.pool import HostPool
    from tidekv.backends.keys.chain import Tokens
    from tidekv.backends.storage.base import Storage
    from tidekv.engine.config.engine_config import DeviceMode
    from tidekv.engine.decode.component_pages import LeftComponents
    from tidekv.engine.decode.lent_pages import LentComponents, Pages
    from tidekv.engine.kv_events.watcher import ServerEvents
    from tidekv.engine.ranks.group import RankGroup
    from tidekv.states.core import Core
    from tidekv.states.handover.rank_place import RankPlace
    from tidekv.transports.base import Transport

Tier = Literal["l1", "l2", "l3"]


class DecodeEngine:
    """Restores prompts onto a device from the device cache, host memory, storage, and prefill.

    An async context manager: entering starts it, leaving closes it and aborts live requests. All methods are called on
    the loop that entered it (InvalidRequest elsewhere), within the block (EngineClosed outside). It owns transport and
    storage, and closes both; the caller owns the pools. If an invariant breaks, all calls fail with EngineClosed and
    leaving the block raises the error. An engine is entered once.
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
        ranks: RankGroup | None = None,
    ) -> None:
        """Start nothing. Raises InvalidConfig for parts that do not fit each other.

        `components`: sliding windows and recurrent states of the model, which are transferred with the KV of every
        page; a prefix then ends at a position from which all of them can continue.
        `ranks`: one of several engines that make the same decisions.
        """
        self.config: EngineConfig = checked(config, EngineConfig, "config", InvalidConfig)
        self._runtime = Runtime(
            config,
            device=device,
            host=host,
            components=components,
            storage=storage,
            transport=transport,
            ranks=ranks,
        )
        self._runtime.make_status = lambda runtime: StatusServer(runtime, self.hint, self._store)
        self.layout = device.layout
        self.device = device
        self.components = tuple(components)
        self._calls = self._runtime.calls

    def publish_to(self, server_events: ServerEvents) -> None:
        """Give KV events to a server that publishes events itself. Call it before the engine is entered.

        Raises InvalidConfig if `config.kv_events` names an endpoint.
        """
        self._runtime.publish_to(server_events)

    def recompute_with(self, recompute: Recompute) -> None:
        """Give the last resort: if no prefill of a request's list can send the missing pages, `recompute` computes them
        on this machine, on the engine's loop, and the request becomes READY. With `config.recompute_threshold` it also
        computes short rests, instead of prefill. Call it before the engine is entered.

        Raises InvalidConfig for an engine in lent device pages, EngineClosed if it was entered.
        """
        self._runtime.recompute_with(recompute)

    def place_in_storage(self, place: RankPlace) -> None:
        """Read and write the pages in storage that a rank at this place has, without the other ranks: each restores and
        stores alone. Call it before the engine is entered. Raises InvalidConfig with `ranks`, which have a place.
        """
        self._runtime.place_in_storage(place)

    async def __aenter__(self) -> Self:
        """Start all parts. If one raises, stop all and raise its error; EngineClosed if entered before."""
        await self._runtime.start()
        self._driver = self._runtime.front
        self._growth = Growth(self._calls, self._driver, page_size=self.layout.page_size)
        self._calls.on_grown = self._growth.note
        self._arrivals = Arrivals(self._runtime)
        self._lending = LentCalls(self._runtime, self._arrivals)
        self._hints = HintCalls(self._runtime, self._arrivals)
        self._stores = self._runtime.store_calls
        return self

    @property
    def _core(self) -> Core:
        return self._runtime.core

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort live requests, wait at most `close_deadline_s` for work in flight, and stop everything."""
        await self._runtime.close()

    # --- Restore ---

    async def restore(self, request: DecodeRequest) -> ReadyRequest:
        """Restore the prompt's KV onto the device. The caller owns the pages until finish, retract or abort.

        With `request.early` it returns when the first layer is in place (`ReadyRequest.wait_layer`).
        Raises InvalidRequest (nothing was changed), CapacityError (the queue is full), RequestFailed, EngineClosed.
        Cancelling the awaiting task aborts the request.
        """
        self._check_mode("restore", "owned")
        return await self._submit(request, self._arrivals.packed(request))

    async def _submit(self, request: DecodeRequest, packed: bytes) -> ReadyRequest:
        if not request.prefills:
            raise InvalidRequest(
                f"request {request.request_id!r}: prefill names no address; only restore_into goes without one"
            )
        if request.next_token is not None:
            raise InvalidRequest(
                f"request {request.request_id!r}: next_token is for restore_into; in pages of the engine the token "
                "behind a prompt is the one that prefill samples"
            )
        self._arrivals.check_reachable(request, packed)
        if request.session:
            self._hints.sessions.note(
                request.session, self._arrivals.namespace(request.namespace, request.lora_name), packed
            )
        hinted = await take_of_request(self._hints, request.kv_hints)
        self._arrivals.check_room(request, packed)
        request_number, outcome = self._arrivals.post(request, packed, hinted)
        try:
            ready = await outcome
        except asyncio.CancelledError:
            # The request may have failed just now, and its id may belong to another request already.
            if outcome.done() and not outcome.cancelled():
                outcome.exception()
            self._arrivals.cancel(request.request_id, request_number)
            raise
        assert isinstance(ready, ReadyRequest), "requests in lent pages have another call"
        if not self._calls.holds(ready):
            # Aborted, or given back, between the core's decision and this line: an abort that is still queued ends it,
            # and its pages may belong to another request already.
            cause = "aborted" if self._runtime.is_open else "engine closed"
            raise RequestFailed(request.request_id, cause, "just when it had become READY")
        return ready

    def _check_mode(self, call: str, mode: DeviceMode) -> None:
        """Raise EngineClosed if the engine takes no calls, InvalidRequest if this call is of the other mode."""
        self._runtime.check_open()
        if self.config.device != mode:
            fitting = {"owned": "restore, grow, finish, retract and resume", "lent": "restore_into and offer"}
            raise InvalidRequest(
                f"{call} needs config.device to be {mode!r}; with {self.config.device!r} the calls are "
                f"{fitting[self.config.device]}"
            )

    # --- In device pages of a host engine ---

    async def restore_into(
        self,
        request: DecodeRequest,
        pages: Pages,
        have_tokens: int = 0,
        *,
        component_pages: LentComponents | None = None,
    ) -> RestoredPages:
        """Restore the prompt's KV into device pages that the caller lends (`config.device` "lent").

        `pages`: one page of the device pool for each page of the prompt, in order. The first `have_tokens` tokens,
        rounded down to whole pages, are in them already: these pages are not touched, and may be named in several
        calls. The others are lent. The engine may write to them until the outcome arrives: the return of this call, or
        its error. Then nothing writes to them any more, and they are the caller's again.
        `component_pages`: by component, pages of its device pool for the last positions of the prompt, one for each
        that its end needs: those with the last `window_tokens` tokens of a window, one record of a state. Pages at
        positions before `have_tokens` are in place, as those of the full KV are.

        The outcome may be partial: if the deadline passes, or no prefill can send the rest, `restored_tokens` tokens
        are in place and the contents of later pages are undefined. With components, `restored_tokens` counts up to an
        end at which the caller can continue with them: usually `have_tokens`, where it has their pages itself. The
        outcome arrives as soon as nothing writes to the pages, which may take longer than the deadline: until the
        writer has confirmed its end, or is proven dead.

        Raises InvalidRequest (nothing was changed): a page is lent to another request already, or read by an offer.
        Raises RequestFailed if the request was aborted, and for errors of the engine. Cancelling the awaiting task
        aborts the request, and also waits until nothing writes to the pages. Raises EngineClosed at the engine's end:
        then the pages may be written to until the engine's block has been left.
        """
        self._check_mode("restore_into", "lent")
        packed = self._arrivals.packed(request)
        # Before the check, behind which no other call may lend the same pages.
        hinted = await take_of_request(self._hints, request.kv_hints)
        lent, held_pages = self._lending.check(request, packed, pages, have_tokens, component_pages)
        request_number, outcome = self._arrivals.post(request, packed, hinted, lent_pages=lent, held_pages=held_pages)
        return await self._lending.settled(request.request_id, request_number, outcome)

    def offer(
        self,
        tokens: Tokens,
        pages: Pages,
        *,
        start_token: int = 0,
        namespace: str = "",
        lora_name: str = "",
        component_pages: LentComponents | None = None,
        key_seed: bytes | None = None,
        hold_s: float = 1.0,
    ) -> asyncio.Future[OfferedPages]:
        """Write KV that the caller computed in device pages of its own to host memory and storage (`config.device`
        "lent").

        `tokens` is a prompt and its output from the first token on, as far as its KV is written. `pages` hold it from
        `start_token` on, a multiple of the page size. Only full pages are kept. Pages in host memory already are not
        copied; the others are, and stay there if all before them are in host memory or under way there by an earlier
        offer. Pages for which it has no room, or not those before them, pass through it to storage, batch by batch. For
        that they wait at most `hold_s` seconds for room and for storage; what then was not copied is declined.
        `component_pages`: by component, its pages at the end of the last full page: all that cover the window there,
        the record of the state as it was there. A component that is left out is sent by prefill at that end. The last
        pages of a window alone pass to storage.
        `key_seed`: as in `DecodeRequest`, in place of a namespace.

        The offer is taken at once. The future ends when nothing reads the pages any more; do not write to them before.
        Cancelling it does not stop that. Raises InvalidRequest, having changed nothing, if a page is lent to a request.
        EngineClosed, raised or in the future: the pages may be read until the engine's block has been left.
        """
        self._check_mode("offer", "lent")
        packed = pack_tokens(tokens, vocabulary=self.config.vocabulary or None)
        joined = self._arrivals.namespace(namespace, lora_name) if key_seed is None else namespace_of_seed(key_seed)
        within_s: float = checked(hold_s, SecondsOrZero, "hold_s")
        return self._lending.offer(packed, pages, start_token, joined, component_pages, hold_s=within_s)

    def decline(self, request: DecodeRequest) -> None:
        """Let prefill release at once what it holds for a request that is not restored here: for its id and this very
        prompt. If it cannot be reached, that is logged, and its own limit applies. Raises InvalidRequest for an invalid
        address or token.
        """
        self._arrivals.decline(request)

    async def abort(self, request_id: str) -> bool:
        """End a request, waiting or READY. True: it has ended, and its id is free; its `restore` raises
        RequestFailed("aborted"), even if the core decided READY before it took the abort. False: it is not live, or
        finish or retract was called for it before.

        Waits until the core has taken the abort: for a turn of the loop, with ranks for a vote, which ends within the
        ranks' `vote_timeout_s`. Does not wait for transfers that still write, unless they write to lent pages, which
        go back with the end of the request. Raises EngineClosed if the engine ends.
        """
        self._runtime.check_open()
        checked(request_id, Text, "request_id")
        request_number = self._calls.number_of(request_id)
        if request_number is None or self._calls.is_given_back(request_id):
            self._calls.end_use(request_id)  # It may have failed after an early READY.
            return False
        self._driver.post(events.AbortRequested(at_s=self._driver.clock(), request_id=request_id))
        self._calls.mark_aborted(request_id)
        await self._calls.wait_until(lambda: self._calls.number_of(request_id) != request_number, request_id=request_id)
        return True

    def change_request(self, request_id: str, *, priority: int | None = None, deadline_s: float | None = None) -> bool:
        """Give a request that is not READY another priority, or another deadline: `deadline_s` seconds from this call.

        Its place in the queue follows at once, and it keeps its age. Transfers under way keep the time that they were
        given; the request waits for them at most until the new deadline. False, having changed nothing: it is READY,
        was aborted, or is not live. With ranks, call it on rank 0: it takes effect after the vote, if all ranks have
        the request by then. Raises InvalidRequest for a value that `DecodeRequest` does not take, or for none.
        """
        self._runtime.check_open()
        checked(request_id, Text, "request_id")
        checked(priority, Priority | None, "priority")
        checked(deadline_s, Seconds | None, "deadline_s")
        if priority is None and deadline_s is None:
            raise InvalidRequest(f"request {request_id!r}: give a priority or a deadline_s to change")
        now_s = self._driver.clock()
        deadline_at_s = None if deadline_s is None else now_s + deadline_s
        if not self._calls.change(request_id, deadline_at_s):
            return False
        self._driver.take_now(
            events.RequestChanged(at_s=now_s, request_id=request_id, priority=priority, deadline_at_s=deadline_at_s)
        )
        return self._calls.is_restoring(request_id)

    # --- After READY ---

    def grow(self, ready: ReadyRequest, tokens: int = 1) -> list[int]:
        """Make room for `tokens` more tokens; returns the pages that this adds to `ready.pages`, usually none.

        Raises OutOfPages, having changed nothing: retract or finish a request, and call again. Raises InvalidRequest if
        the request was given back, or lost to an engine error: then its pages are no longer the caller's.
        """
        self._check_mode("grow", "owned")
        return self._growth.grow(ready, tokens)

    def grow_many(self, batch: Iterable[ReadyRequest], tokens: int = 1) -> list[ReadyRequest]:
        """`grow` each request of a batch; returns those for which no page was left. All others have grown.

        Raises InvalidRequest before anything is changed if a request of the batch is not the caller's.
        """
        self._check_mode("grow_many", "owned")
        return self._growth.grow_many(batch, tokens)

    async def wait_grown(self, ready: ReadyRequest, tokens: int = 1) -> list[int]:
        """Like `grow`, but if the reserve is too small, wait for the ranks to agree on more, which the callers of all
        ranks must request. Raises OutOfPages if the pool has no more, or another rank's caller does not in time.
        """
        self._check_mode("wait_grown", "owned")
        if self._runtime.ranks is None:
            return self._growth.grow(ready, tokens)
        return await self._growth.wait_grown(ready, tokens, hold_s=self._runtime.ranks.hold_s)

    def note_growth(self, ready: ReadyRequest, page_count: int) -> None:
        """Note that `grow_from_reserve` took pages, on any thread: the reserve is refilled soon. Call it before the
        request is given back. Does nothing for a request that is already lost.
        """
        self._runtime.check_open()
        self._growth.note(ready, page_count)

    async def finish(
        self,
        ready: ReadyRequest,
        output_tokens: Tokens = (),
        *,
        keep: bool = True,
        component_pages: LeftComponents | None = None,
    ) -> int:
        """Keep prompt and output in the cache, back them up, and release the request's pages.

        The last output token has no KV yet and is left out. `keep=False` keeps the output out of the cache; of the
        prompt stays what entered the cache when it became READY. `component_pages`: the pages to keep of components, by
        name, as `(first, pages)`: own or shared pages at their positions, which must be written. A prefix can be
        restored up to a position at which all components were left. Returns the number of pages that were new to the
        cache. Raises InvalidRequest for output beyond the request's room and for pages of other requests,
        RequestFailed if it was aborted just before. Cancelling the awaiting task changes nothing: the request is
        given back.
        """
        self._check_mode("finish", "owned")
        return await self._give_back(events.FinishRequested, ready, output_tokens, component_pages, keep=keep)

    async def retract(
        self, ready: ReadyRequest, output_tokens: Tokens = (), *, component_pages: LeftComponents | None = None
    ) -> RetractedRequest:
        """Release the device pages; KV that reaches host memory is held there until `resume` or `drop`.

        `component_pages` and errors are those of `finish`. If the awaiting task is cancelled, nothing stays held.
        """
        self._check_mode("retract", "owned")
        live = self._calls.ready(ready)
        done = self._give_back(events.RetractRequested, ready, output_tokens, component_pages)
        try:
            held_pages = await asyncio.shield(done)
        except BaseException:
            done.add_done_callback(partial(self._drop_unclaimed, ready.request_id))
            raise
        request, generated = live.request, (len(live.prompt.packed) - len(ready.packed_tokens)) // TOKEN_BYTES
        if request.max_new_tokens:
            # What is left of the budget. A request that has used it up grows by the token that `resume` computes.
            request = replace(request, max_new_tokens=max(1, request.max_new_tokens - generated))
        return RetractedRequest(
            request=request,
            packed_tokens=live.prompt.packed,
            held_tokens=held_pages * self.layout.page_size,
        )

    async def resume(self, retracted: RetractedRequest) -> ReadyRequest:
        """Restore prompt and output so far in a new room; its first token is the next one of the output.

        Raises as `restore`. Host memory held for it is released when the request is READY or has failed; it stays
        held if the call was refused (InvalidRequest, CapacityError).
        """
        self._check_mode("resume", "owned")
        checked(retracted, RetractedRequest, "retracted")
        return await self._submit(retracted.request, retracted.packed_tokens)

    def drop(self, retracted: RetractedRequest) -> None:
        """Release the host memory of a retracted request that will not be resumed."""
        self._runtime.check_open()
        checked(retracted, RetractedRequest, "retracted")
        self._driver.post(events.RetractedDropped(at_s=self._driver.clock(), request_id=retracted.request.request_id))

    def _drop_unclaimed(self, request_id: str, done: asyncio.Future[int]) -> None:
        """Release the host memory of the request, since the call of retract ended without its answer."""
        if not done.cancelled() and done.exception() is None:
            self._driver.post(events.RetractedDropped(at_s=self._driver.clock(), request_id=request_id))

    def _give_back(
        self,
        kind: type[events.FinishRequested | events.RetractRequested],
        ready: ReadyRequest,
        output_tokens: Tokens,
        component_pages: LeftComponents | None,
        *,
        keep: bool = True,
    ) -> asyncio.Future[int]:
        """Post the tokens that have KV and the component pages left; extend the call's prompt by the tokens."""
        self._runtime.check_open()
        live = self._calls.ready(ready)
        page_keys = self._runtime.prompt_keys.page_keys
        output = pack_output(output_tokens, vocabulary=self.config.vocabulary or None)
        tokens = kept_tokens(ready, output, page_size=self.layout.page_size)
        if not checked(keep, bool, "keep"):
            output, tokens = b"", len(ready.packed_tokens) // TOKEN_BYTES
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
        self, tiers: tuple[str, ...] = ("l1", "l2"), *, namespace: str | None = None, timeout_s: float = CLEAR_S
    ) -> dict[str, dict[str, int]]:
        """Drop all unused pages of these tiers; returns {"dropped": …, "spared": …}, pages by tier.

        "l3" clears storage, after the puts in flight: pages that are still on the device or the host are stored again
        at their next use. It spares the pages of puts that do not end in time. Raises InvalidRequest for another tier,
        and for "l3" without storage; StorageFailed if clearing takes longer than `timeout_s` seconds: it continues in
        the background.

        With `namespace`, only the pages of that one ("" is the one without a name), in the engine's own. Storage does
        not know whose a page is: "l3" deletes those of prompts that are still on the device or the host, and of ranks
        only this one's; StorageFailed if that takes too long, and it ends there. Others are never found again once
        the namespace is not used any more, and are evicted as unused.
        """
        self._runtime.check_open()
        chosen: tuple[Tier, ...] = checked(tiers, tuple[Tier, ...], "tiers")
        if "l3" in chosen and self._runtime.storage is None:
            raise InvalidRequest("tiers must be l1 or l2, not l3: no storage is attached")
        call = self._arrivals.next_number()
        joined = None if namespace is None else self._arrivals.namespace(namespace)
        local = tuple(tier for tier in chosen if tier != "l3" or joined is not None)
        # Before the pages leave the index, which has their keys.
        edges = () if joined is None or "l3" not in chosen else self._core.state.index.edges_of(joined)
        event = events.FlushRequested(at_s=self._driver.clock(), call=call, tiers=local, namespace=joined)
        done = self._calls.expect_flush(call)
        try:
            self._driver.post(event)
        except BaseException:
            self._calls.unexpect_flush(call)
            raise
        answer = await done
        if "l3" in chosen and self._runtime.storage is not None:
            if joined is None:
                dropped, spared = await self._runtime.storage_in_use.clear(timeout_s=timeout_s)
            else:
                dropped = await delete_stored(self._runtime, edges, joined, timeout_s=timeout_s)
                spared = self._runtime.executor.pages_being_stored
            answer["dropped"]["l3"], answer["spared"]["l3"] = dropped, spared
        return answer

    async def hint(self, envelope: object) -> list[HintOutcome]:
        """Act on an envelope of KV hints (`docs/hints.md`); returns an outcome for each action, in order.

        `envelope` is a mapping, or a struct that msgspec converts. Hints never change an answer: they bring pages to
        host memory, hold them there for a time, drop copies that a lower tier has too, or count a prefix as used. With
        ranks, call it on the first one. Raises InvalidRequest for what is no envelope, EngineClosed.
        """
        self._runtime.check_open()
        return await self._hints.take(envelope)

    async def attach_storage(
        self, storage: str | Storage, options: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Use this storage from now on instead of the present one; requests continue meanwhile.

        The new one is opened first, then the calls of the old one are awaited, and the old one is closed: all within
        `timeout_s` seconds (None: `close_deadline_s`). If the new one is not open by then, StorageFailed is raised. If
        the old one hangs, it is replaced anyway: its calls keep their host pages until they end, and it is closed then,
        or at the engine's end. If this raises (InvalidConfig, StorageFailed) or is cancelled before the exchange, the
        old one stays in use, and the new one is closed. An error in closing the old one is raised with the new one in
        use. The engine closes storage at its end.
        """
        self._runtime.check_open()
        if isinstance(storage, str):
            storage = open_storage(storage, options)
        elif options is not None:
            raise InvalidRequest("options need the URI of a storage, not an engine that exists already")
        elif storage is None:
            raise InvalidRequest("storage must be a URI or a storage engine, not None; detach_storage() removes it")
        check_storage(storage)
        await self._runtime.storage_in_use.swap(storage, timeout_s=self._exchange_s(timeout_s))

    async def detach_storage(self, *, timeout_s: float | None = None) -> None:
        """Use no storage from now on: wait for its calls in flight, then close it. A storage that hangs is abandoned
        after `timeout_s` seconds (None: `close_deadline_s`), as by `attach_storage`.
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
        """The present storage policy."""
        return policy_of(self._core.state.settings)

    def change_policy(self, **changes: Unpack[PolicyChanges]) -> StoragePolicy:
        """Change the storage policy from now on: `change_policy(prefetch="best_effort", breaker_failures=4)`.

        Names and values are those of `StoragePolicy`, which is returned; other options (`admission`, `sharing`, the
        shares of namespaces) are fixed for the life of an engine. Operations under way are not affected. Raises
        InvalidConfig, having changed nothing, for an unknown name or value.
        """
        self._runtime.check_open()
        policy = changed_policy(self.policy, changes)
        self._driver.take_now(events.PolicyChanged(at_s=self._driver.clock(), policy=policy))
        return policy

    def probe_prefix(self, tokens: Tokens, *, namespace: str = "", lora_name: str = "") -> dict[str, int]:
        """Return the tokens of this prompt in place in device and host memory, {"l1": …, "l2": …}. Changes nothing.

        "l2" counts what host memory has behind the tokens of "l1": the copies there of these are not counted, so the
        sum is the prefix that needs no storage and no prefill. For routers, at once; `look_up` also asks storage. Any
        page may be evicted at any time, so the answer promises nothing. Raises InvalidRequest.
        """
        packed = pack_tokens(tokens, vocabulary=self.config.vocabulary or None)
        joined = self._arrivals.namespace(namespace, lora_name)
        keys = self._runtime.prompt_keys.page_keys.of(packed)
        device, host = self._core.state.index.probe_prefix(joined, keys, with_pending=False)
        return {"l1": device * self.layout.page_size, "l2": host * self.layout.page_size}

    async def look_up(
        self, tokens: Tokens, *, namespace: str = "", lora_name: str = "", timeout_s: float = 0.05
    ) -> PromptLookUp:
        """Return what each tier has of this prompt, storage included, and an estimate of the time to READY.

        Storage is asked at most for `timeout_s` seconds; one that fails or does not answer counts as empty, with the
        cause. Takes no page, and promises nothing. Full pages only, without components. With ranks, storage is that of
        this rank. Raises InvalidRequest, EngineClosed.
        """
        self._runtime.check_open()
        packed = pack_tokens(tokens, vocabulary=self.config.vocabulary or None)
        within_s: float = checked(timeout_s, Seconds, "timeout_s")
        joined = self._arrivals.namespace(namespace, lora_name)
        return await look_up(self._runtime, packed, joined, timeout_s=within_s)

    async def drain(
        self, timeout_s: float | None = None, *, store_s: float = 0.0, to: str | None = None, hand_s: float = 30.0
    ) -> DrainOutcome:
        """Take no new requests, and wait until live requests are given back, or until the timeout.

        Resuming is still possible. Without `timeout_s` it waits as long as callers keep READY requests, or until the
        engine ends (EngineClosed).

        With `store_s`, storage gets what it lacks of all cached pages, whatever `storage.write` is, so that a successor
        finds them there: meanwhile, and after the last live request once more. Hottest prompts first, for at most
        `store_s` seconds in all, which no storage prolongs. Pages that only the device has go by way of host memory;
        `write_tokens_min`, `write_hits_min` and `store_wait_s` still hold. With ranks, give it on the first one
        (InvalidRequest elsewhere), for all.

        With `to`, the `peer_address` of another worker, that one takes the place of storage: it reads full pages from
        host memory here into its own, within `hand_s` seconds, and gives them free memory and that of prompts that it
        uses less. It must name this worker in `cache_peers.allow`. Until this engine closes, others still read from it.
        With ranks, give it on the first one, for a worker of as many: each of its ranks reads from the rank at its
        place, the others at the ports behind the first one's `listen`. Raises InvalidRequest without
        `cache_peers.listen`, and together with `store_s`: call it once for each.
        """
        self._runtime.check_open()
        checked(timeout_s, SecondsOrZero | None, "timeout_s")
        within_s: float = checked(store_s, SecondsOrZero, "store_s")
        checked(hand_s, SecondsOrZero, "hand_s")
        successor: str = checked(to, PlainText | None, "to") or ""
        if to is not None:
            if within_s:
                raise InvalidRequest("drain with store_s and to: give one, and call it again with the other")
            self._stores.check_successor(successor)
            within_s = hand_s
        first = self._stores.begin(within_s, to=successor) if within_s else None
        has_live = bool(self._calls.live_ids())
        self._runtime.is_draining = True
        try:
            live = await self._live_after(timeout_s)
            reports = [] if first is None else [await first]
            if reports and has_live and within_s > reports[0].seconds:
                # What the live requests have left since.
                reports.append(await self._stores.begin(within_s - reports[0].seconds, to=successor, goes_on=True))
        except BaseException:
            self._stores.stop()
            raise
        return self._stores.outcome(live, reports, to=successor)

    async def _live_after(self, timeout_s: float | None) -> list[str]:
        """Wait until no request is live, or until the timeout; return the ids of those that are."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._calls.wait_until(lambda: not self._calls.live_ids())
        except TimeoutError:
            return self._calls.live_ids()
        return []

    async def _store(self, within_s: float, to: str | None) -> DrainOutcome:
        """Store what storage lacks, or hand the cache over, as `drain` does, and go on taking requests."""
        self._runtime.check_open()
        if to is not None:
            self._stores.check_successor(to)
        done = self._stores.begin(within_s, to=to or "")
        try:
            report = await done
        except BaseException:
            self._stores.stop()
            raise
        return self._stores.outcome(self._calls.live_ids(), [report], to=to or "")

    async def wait_formed(self) -> None:
        """Wait until all ranks of the instance are connected; returns at once without ranks.

        Unbounded, since a lost rank may never come back: set a deadline with `asyncio.timeout`.
        """
        self._runtime.check_open()
        if self._runtime.ranks is not None:
            await self._runtime.ranks.wait_formed()

    async def wait_settled(self) -> None:
        """Wait until only READY requests are left: no restore, backup, put, or page in quarantine.

        Restores end by their deadlines; further requests and storage that hangs may prolong the wait without bound: set
        a deadline with `asyncio.timeout`. Raises EngineClosed if the engine ends.
        """
        self._runtime.check_open()
        await self._runtime.wait_settled()

    @property
    def metrics_address(self) -> str | None:
        """host:port of the Prometheus endpoint; None if `metrics.listen` is not set."""
        return None if self._runtime.metrics is None else self._runtime.metrics.address

    @property
    def peer_address(self) -> str | None:
        """host:port at which other decode workers read host memory; None if `cache_peers.listen` is not set."""
        return None if self._runtime.peers is None else self._runtime.peers.address

    @property
    def status_address(self) -> str | None:
        """host:port of the status server; None if `status.listen` is not set, and on ranks behind the first one."""
        return None if self._runtime.status is None else self._runtime.status.address

    def holds(self, ready: ReadyRequest) -> bool:
        """Return whether the request still owns its pages: not given back, aborted, or lost. Any thread may call it."""
        return self._calls.holds(ready)

    def states(self) -> dict[str, str]:
        """Return the state of each live request by id: "PREALLOC" to "READY"."""
        return {request_id: request.state.value for request_id, request in self._core.state.requests.items()}

    @property
    def is_running(self) -> bool:
        """Whether the engine takes calls: entered, and neither left nor broken. Any thread may read it."""
        return self._runtime.is_open

    def check(self) -> None:
        """Recount every page, lock and owner from scratch, for tests: milliseconds for each thousand pages.

        Raises BrokenInvariant for the first contradiction, which is a bug of tidekv, and EngineClosed before the start.
        """
        self._started().core.check()

    def balance(self) -> dict[str, PoolBalance]:
        """Return the pages of each pool by page state: "device", "host", and "NAME_device", "NAME_host" of components.

        For tests of an embedding: once every request was given back, and `wait_settled` has returned, no page is owned,
        draining or protected. Raises EngineClosed before the start.
        """
        core = self._started().core
        counts = core.statistics()
        names = [f"{each.name}_{pool}" for each in core.settings.components for pool in ("device", "host")]
        return {
            pool: PoolBalance(**{state: counts[f"{pool}_{state}"] for state in PoolBalance.__dataclass_fields__})
            for pool in ("device", "host", *names)
        }

    def _started(self) -> Runtime:
        if self._runtime.loop is None:
            raise EngineClosed("the engine was not started: enter it with `async with`")
        return self._runtime

    def statistics(self) -> EngineStatistics:
        """Return current values and totals since the start, by part; works after the end, too."""
        return self._started().statistics()
