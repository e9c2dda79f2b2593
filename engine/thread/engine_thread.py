"""Decode engine on a thread of its own, for schedulers that are plain loops and must not wait.

    scheduler's thread                                   engine's thread (uvloop)
    submit, resume, finish, retract, abort ── orders ──▶ DecodeEngine
    restore_into, offer, decline
    poll, eventfd, or on_done              ◀─ outcomes ─ one for every ticket
    grow                                   takes pages from the request's reserve, and posts an order that notes it

One wake-up of the loop serves all orders posted meanwhile, in their order. Only `call` and the methods built on it, and
`grow` if the reserve is used up, wait for the engine's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import nullcontext, suppress
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar, overload

from tidekv.backends.copies.streams import own_stream
from tidekv.backends.keys.chain import TOKEN_BYTES, pack_tokens
from tidekv.engine.decode.component_pages import component_pages_left
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.growth import grow_from_reserve, kept_tokens, pack_output
from tidekv.engine.decode.lent_pages import checked_pages, copied_components
from tidekv.engine.decode.values import DecodeRequest, RetractedRequest
from tidekv.engine.log import engine_log
from tidekv.engine.thread.loop import EngineLoop
from tidekv.engine.thread.server_streams import ServerStreams, StreamGate, server_streams
from tidekv.engine.thread.tickets import (
    Failed,
    Finished,
    Live,
    LookedUp,
    Mailbox,
    Offered,
    OnDone,
    Outcome,
    Restored,
    RestoredInto,
    Retracted,
    Ticket,
    Tickets,
)
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, OutOfPages, TidekvError
from tidekv.states.validation import Count, SecondsOrZero, Text, checked

if TYPE_CHECKING:
    from tidekv.backends.keys.chain import Tokens
    from tidekv.engine.decode.component_pages import LeftComponents
    from tidekv.engine.decode.lent_pages import LentComponents, Pages
    from tidekv.engine.decode.values import DrainOutcome, ReadyRequest
    from tidekv.states.types import PageIds

__all__ = [
    "EngineThread",
    "Failed",
    "Finished",
    "LookedUp",
    "Offered",
    "Outcome",
    "Restored",
    "RestoredInto",
    "Retracted",
]

LOG = engine_log("tidekv.engine")
T = TypeVar("T")


class EngineThread:
    """Restores prompts for a synchronous scheduler. A context manager: entering starts it, leaving closes it.

    Each of `submit`, `resume`, `finish` and `retract` returns a ticket, and each ticket gets one outcome: `Restored`,
    `Retracted`, `Finished` or `Failed`. With lent device pages the calls are `restore_into` and `offer`, the outcomes
    `RestoredInto`, `Offered` and `Failed`. `poll` returns it; if the call was given `on_done`, that function receives
    it instead, **on the engine's thread**, which it must not block. What `on_done` raises is logged and counted. It may
    call every method except `call` and those built on it.

    Methods may be called on any thread. A READY request has one owner at a time, the computation on its pages, and only
    that owner calls `grow`, `finish`, `retract` and `abort` for it. Once the engine is closed or broken, or its thread
    has died, every call raises EngineClosed (`poll` as soon as no outcome is left), and no call blocks. A forked child
    does not have the thread: every call raises EngineClosed there, and `close` does nothing. The object cannot be
    pickled, so it cannot be passed to a spawned process.
    """

    def __init__(self, engine: DecodeEngine, *, name: str = "tidekv-engine") -> None:
        """Start nothing. The thread enters and leaves the engine, which was not entered before.

        What the engine was given to call, such as `recompute`, runs on its loop. With `ranks`, starting waits for the
        other ranks, which start in processes or threads of their own.
        """
        self._engine = checked(engine, DecodeEngine, "engine", InvalidConfig)
        config, page_size = engine.config, engine.layout.page_size
        self._page_size = page_size
        self._pool_pages = engine.device.num_pages
        self._component_pages = {pools.name: pools.device.num_pages for pools in engine.components}
        self._page_keys = config.page_keys(page_size)
        self._vocabulary = config.vocabulary or None
        self._tickets = Tickets()
        self._mailbox = Mailbox()
        is_lent = config.device == "lent"
        # Copies of lent pages begin behind the host engine's work, and must not wait for what it enqueues meanwhile.
        within = partial(own_stream, engine.device.device) if is_lent else nullcontext
        self._loop = EngineLoop(self._engine, name=name, on_end=self._end, within=within)
        self._server = server_streams(engine.device.device) if is_lent else None
        self._gate: StreamGate | None = None
        """With lent pages in GPU memory, once started: calls that touch them, and what must not overtake these."""
        self._name = name
        self._is_draining = False
        self._callbacks_raised = 0

    def follow(self, server: ServerStreams) -> None:
        """Begin `restore_into` and `offer` behind these streams; without it, with lent pages in GPU memory, behind the
        current stream of the thread that calls them. Call it before `start`.
        """
        self._server = server

    def start(self) -> None:
        """Start thread and engine. Raises what `DecodeEngine` raises as it starts, with everything stopped again."""
        try:
            self._loop.start()
        except BaseException:
            if not self._loop.is_up:
                self._mailbox.close()
            raise
        if self._server is not None:
            self._gate = StreamGate(self._server, name=self._name)

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> list[str]:
        """Abort live requests, stop, and join the thread; returns the ids of the requests aborted. Idempotent.

        `drain` first waits, at most `timeout_s`, until live requests are given back by another thread or by `on_done`.
        A single-threaded scheduler instead calls `drain(0)`, continues until it has nothing left, and then closes.
        Raises, once, what broke the engine or its thread, and TidekvError if the thread hangs. Outcomes not yet taken
        can still be polled; the eventfd is closed.
        """
        if self._loop.is_forked:
            return []
        if self._loop.is_here:
            raise InvalidRequest("close was called on the engine's own thread, which it waits for: call it elsewhere")
        left: list[str] = []
        try:
            if self._loop.is_up:
                left = self.drain(timeout_s if drain else 0).live
        except EngineClosed:
            pass  # The engine ended meanwhile; its error is raised below.
        self._loop.stop()
        if self._gate is not None:
            self._gate.close()
        self._mailbox.close()
        error, self._loop.error = self._loop.error, None
        if isinstance(error, Exception):
            raise error
        if error is not None:
            # A SystemExit that was raised on the engine's thread must not end this one.
            raise EngineClosed(f"the engine's thread was ended by {error!r}") from error
        return left

    def __enter__(self) -> Self:
        """Start; see `start`."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close without draining; see `close`."""
        self.close()

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: a thread cannot be passed to another process."""
        raise TypeError("an EngineThread cannot be passed to another process: create one there")

    # --- Requests ---

    def submit(self, request: DecodeRequest, *, on_done: OnDone | None = None) -> int:
        """Restore a prompt in the background; returns its ticket.

        Raises InvalidRequest (bad tokens, an id that is live) or EngineClosed (also while draining), with nothing
        changed. Other errors of `DecodeEngine.restore`, such as CapacityError, arrive as the outcome.
        """
        if self._is_draining:
            raise EngineClosed("the engine drains: it takes no new requests")
        checked(request, DecodeRequest, "request")
        packed = replace(request, tokens=pack_tokens(request.tokens, vocabulary=self._vocabulary))
        return self._restore(request.request_id, lambda: self._engine.restore(packed), on_done)

    def resume(self, retracted: RetractedRequest, *, on_done: OnDone | None = None) -> int:
        """Restore a retracted request with prompt and output so far; returns its ticket. Raises as `submit`."""
        checked(retracted, RetractedRequest, "retracted")
        return self._restore(retracted.request.request_id, lambda: self._engine.resume(retracted), on_done)

    def drop(self, retracted: RetractedRequest) -> None:
        """Release the host memory of a retracted request that will not be resumed. Never waits."""
        checked(retracted, RetractedRequest, "retracted")
        self._loop.post(partial(self._engine.drop, retracted))

    def finish(
        self,
        ready: ReadyRequest,
        output_tokens: Tokens = (),
        *,
        keep: bool = True,
        component_pages: LeftComponents | None = None,
        on_done: OnDone | None = None,
    ) -> int:
        """Keep prompt and output in the cache and give everything back; returns its ticket. Never waits.

        The caller loses the pages with this call. `keep` and `component_pages`: see `DecodeEngine.finish`. Raises
        InvalidRequest, with nothing changed, for a request that was given back or aborted, for output beyond its room,
        and for component pages that do not belong to it.
        """
        checked(keep, bool, "keep")
        output, left = self._checked(ready, output_tokens, component_pages)
        ticket = self._tickets.leave(ready, "finish", on_done)

        async def work() -> Outcome:
            return Finished(
                ticket.number,
                ready.request_id,
                await self._engine.finish(ready, output, keep=keep, component_pages=left),
            )

        return self._begin(ticket, work)

    def retract(
        self,
        ready: ReadyRequest,
        output_tokens: Tokens = (),
        *,
        component_pages: LeftComponents | None = None,
        on_done: OnDone | None = None,
    ) -> int:
        """Give the device pages back, keep the KV in host memory for `resume`; returns its ticket. Else as `finish`."""
        output, left = self._checked(ready, output_tokens, component_pages)
        ticket = self._tickets.leave(ready, "retract", on_done)

        async def work() -> Outcome:
            return Retracted(
                ticket.number, ready.request_id, await self._engine.retract(ready, output, component_pages=left)
            )

        return self._begin(ticket, work)

    def restore_into(
        self,
        request: DecodeRequest,
        pages: Pages,
        have_tokens: int = 0,
        *,
        component_pages: LentComponents | None = None,
        on_done: OnDone | None = None,
    ) -> int:
        """Restore a prompt into lent device pages; returns its ticket. Never waits.

        The pages are the caller's again with the outcome, which is `RestoredInto`, or `Failed` after an abort and for
        errors of `DecodeEngine.restore_into`. Raises InvalidRequest (bad tokens or pages, an id that is live) or
        EngineClosed (also while draining), with nothing changed.
        """
        if self._is_draining:
            raise EngineClosed("the engine drains: it takes no new requests")
        checked(request, DecodeRequest, "request")
        packed = replace(request, tokens=pack_tokens(request.tokens, vocabulary=self._vocabulary))
        # Copied and checked now: the caller may change its list before the engine's thread reads it.
        where = f"request {request.request_id!r}"
        lent = checked_pages(pages, pool_pages=self._pool_pages, where=where)
        components = self._copied(component_pages, where)
        self._loop.check()
        ticket = self._tickets.arrive(request.request_id, on_done)

        async def work() -> Outcome:
            restored = await self._engine.restore_into(packed, lent, have_tokens, component_pages=components)
            return RestoredInto(ticket.number, request.request_id, restored)

        return self._begin_behind_streams(ticket, work)

    def offer(
        self,
        tokens: Tokens,
        pages: Pages,
        *,
        start_token: int = 0,
        namespace: str = "",
        component_pages: LentComponents | None = None,
        key_seed: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> int:
        """Write computed KV through to host memory and storage; returns its ticket. Never waits.

        Do not write to the pages before the outcome: `Offered`, or `Failed` for errors of `DecodeEngine.offer`. Raises
        InvalidRequest (bad tokens or pages) or EngineClosed, with nothing changed.
        """
        packed = pack_tokens(tokens, vocabulary=self._vocabulary)
        offered = checked_pages(pages, pool_pages=self._pool_pages, where="offer")
        components = self._copied(component_pages, "offer")
        self._loop.check()
        ticket = self._tickets.issue("offer", on_done)

        async def work() -> Outcome:
            done = self._engine.offer(
                packed,
                offered,
                start_token=start_token,
                namespace=namespace,
                component_pages=components,
                key_seed=key_seed,
            )
            return Offered(ticket.number, await done)

        return self._begin_behind_streams(ticket, work)

    def look_up(
        self, tokens: Tokens, *, namespace: str = "", timeout_s: float = 0.05, on_done: OnDone | None = None
    ) -> int:
        """See `DecodeEngine.look_up`; returns its ticket, whose outcome is `LookedUp`, or `Failed`. Never waits.

        Raises InvalidRequest (bad tokens) or EngineClosed.
        """
        packed = pack_tokens(tokens, vocabulary=self._vocabulary)
        self._loop.check()
        ticket = self._tickets.issue("look_up", on_done)

        async def work() -> Outcome:
            found = await self._engine.look_up(packed, namespace=namespace, timeout_s=timeout_s)
            return LookedUp(ticket.number, found)

        return self._begin(ticket, work)

    def _copied(self, component_pages: LentComponents | None, where: str) -> dict[str, PageIds]:
        """Return pages of components by name. Raises InvalidRequest; the engine checks their number."""
        return copied_components(component_pages, self._component_pages, where=where)

    def decline(self, request: DecodeRequest) -> None:
        """Let prefill release what it holds for a request that is not restored here. Never waits.

        A failure is logged, also an invalid address. Raises EngineClosed.
        """
        checked(request, DecodeRequest, "request")
        self._loop.post(lambda: self._decline(request))

    def hint(self, envelope: object) -> None:
        """See `DecodeEngine.hint`. Never waits: outcomes are counted, and what is no envelope is logged.

        Raises EngineClosed.
        """
        self._loop.post(lambda: self._loop.spawn(self._hint(envelope), "hint"))

    def abort(self, request_id: str) -> bool:
        """End a request; False if it is not live or is being given back. Never waits.

        If its outcome was not taken yet, that is `Failed` with the cause "aborted". The caller loses the pages of a
        READY request with this call; the end of such a request has no outcome, and its id becomes free soon after.
        """
        self._loop.check()
        checked(request_id, Text, "request_id")
        live = self._tickets.abort(request_id)
        if live is not None:
            if self._gate is None:
                self._post_abort(live)
            else:
                # The engine does not know a restore that still waits for the device.
                self._gate.behind_calls(lambda _: self._post_abort(live, from_gate=True))
        return live is not None

    def change_request(self, request_id: str, *, priority: int | None = None, deadline_s: float | None = None) -> bool:
        """See `DecodeEngine.change_request`; waits for it. False also for a request that has not reached the engine's
        thread yet.
        """
        return self.call(lambda engine: engine.change_request(request_id, priority=priority, deadline_s=deadline_s))

    # --- Outcomes ---

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Take the available outcomes, oldest first; waits at most `timeout_s` for the first one.

        Raises EngineClosed if there is none and none will come.
        """
        mailbox = self._mailbox
        if timeout_s:
            checked(timeout_s, SecondsOrZero, "timeout_s")
        if not mailbox.waiting:
            if not self._loop.is_up and (self._loop.is_forked or not len(self._tickets)):
                self._loop.check()
            if timeout_s <= 0:
                return []
            mailbox.wait(timeout_s)
        return [self._tickets.as_of_now(outcome) for outcome in mailbox.take()]

    def fileno(self) -> int:
        """The eventfd, for a selector: readable while `poll` would return an outcome or raise."""
        return self._mailbox.fd

    # --- Growth ---

    def grow(self, ready: ReadyRequest, tokens: int = 1) -> list[int]:
        """Make room for `tokens` more tokens; returns the pages that this adds to `ready.pages`, usually none.

        Waits for the engine's thread only if the request's reserve is used up. Raises, with nothing changed, OutOfPages
        (retract or finish a request), and InvalidRequest if the request was given back, aborted or lost.
        """
        self._loop.check()
        self._check_held(ready)
        taken = grow_from_reserve(ready, tokens, page_size=self._page_size)
        if taken is None:
            return self._loop.ask(lambda: self._engine.grow(ready, tokens))
        if taken:
            self._loop.post(partial(self._engine.note_growth, ready, len(taken)))
        return taken

    def grow_many(self, batch: Iterable[ReadyRequest], tokens: int = 1) -> list[ReadyRequest]:
        """`grow` each request of a batch; returns those for which no page was left. All others have grown.

        Posts one order and waits at most once for the whole batch. Raises InvalidRequest before anything is changed.
        """
        batch = list(batch)
        self._loop.check()
        checked(tokens, Count, "tokens")
        for ready in batch:
            self._check_held(ready)
        short, taken = [], []
        for ready in batch:
            pages = grow_from_reserve(ready, tokens, page_size=self._page_size)
            if pages is None:
                short.append(ready)
            elif pages:
                taken.append((ready, len(pages)))
        if taken:
            self._loop.post(lambda: self._note_growths(taken))
        return self._loop.ask(lambda: [ready for ready in short if not self._has_grown(ready, tokens)]) if short else []

    # --- The whole ---

    @overload
    def call(self, work: Callable[[DecodeEngine], Awaitable[T]]) -> T: ...

    @overload
    def call(self, work: Callable[[DecodeEngine], T]) -> T: ...

    def call(self, work: Callable[[DecodeEngine], Awaitable[T] | T]) -> T:
        """Run `work(engine)` on the engine's loop and wait for its result or error, for what has no method here.

        `thread.call(lambda engine: engine.attach_storage("file:/fast"))`. What `work` returns is awaited if it can be,
        and is the result otherwise, as of `lambda engine: engine.probe_prefix(tokens)`. Raises InvalidRequest on the
        engine's own thread, which would wait for itself.
        """
        return self._loop.ask_async(lambda: work(self._engine))

    def flush(
        self, tiers: tuple[str, ...] = ("l1", "l2"), *, namespace: str | None = None
    ) -> dict[str, dict[str, int]]:
        """See `DecodeEngine.flush`; waits for it, and for all earlier calls to reach the engine."""
        self._pass_gate()
        return self.call(lambda engine: engine.flush(tiers, namespace=namespace))

    def drain(
        self, timeout_s: float | None = None, *, store_s: float = 0.0, to: str | None = None, hand_s: float = 30.0
    ) -> DrainOutcome:
        """Accept no new requests from now on, and wait until live requests are given back or the time is up, and
        storage has got what it lacked, as far as that takes at most `store_s`, or the worker at `to`, within `hand_s`.
        See `DecodeEngine.drain`.
        """
        checked(timeout_s, SecondsOrZero | None, "timeout_s")
        checked(store_s, SecondsOrZero, "store_s")
        # Refused before it has an effect: without a running thread, and on the engine's own, which cannot wait.
        self._pass_gate()
        was_draining, self._is_draining = self._is_draining, True
        try:
            outcome: DrainOutcome = self.call(
                lambda engine: engine.drain(timeout_s, store_s=store_s, to=to, hand_s=hand_s)
            )
        except InvalidRequest:
            self._is_draining = was_draining
            raise
        return outcome

    def wait_settled(self) -> None:
        """See `DecodeEngine.wait_settled`; waits for it, and for all earlier calls to reach the engine."""
        self._pass_gate()
        self.call(lambda engine: engine.wait_settled())

    def statistics(self) -> dict[str, object]:
        """Those of the engine, and "thread": tickets without outcome, outcomes not taken, callbacks that raised."""
        thread = {
            "tickets": len(self._tickets),
            "outcomes_waiting": len(self._mailbox.waiting),
            "callbacks_raised": self._callbacks_raised,
        }
        return {**self._loop.ask(self._engine.statistics), "thread": thread}

    # --- On the way to the engine's thread ---

    def _restore(self, request_id: str, call: Callable[[], Awaitable[ReadyRequest]], on_done: OnDone | None) -> int:
        self._loop.check()
        ticket = self._tickets.arrive(request_id, on_done)

        async def work() -> Outcome:
            return self._tickets.became_ready(ticket, await call())

        return self._begin(ticket, work)

    def _checked(
        self, ready: ReadyRequest, output_tokens: Tokens, component_pages: LeftComponents | None
    ) -> tuple[bytes, LeftComponents]:
        """Return copies of both. Checks on the caller's thread, so errors are raised in the call and change nothing."""
        self._loop.check()
        self._tickets.check(ready)
        packed = pack_output(output_tokens, vocabulary=self._vocabulary)
        kept = kept_tokens(ready, packed, page_size=self._page_size)
        full_pages = self._page_keys.count((len(ready.packed_tokens) + len(packed)) // TOKEN_BYTES, kept)
        left = component_pages_left(ready.request_id, ready.component_pages, component_pages, full_pages=full_pages)
        return packed, {part.component: (part.first, part.pages) for part in left}

    def _pass_gate(self) -> None:
        """Wait until the engine has all earlier calls, those too that wait for the device."""
        self._loop.check()
        self._loop.check_elsewhere()
        if self._gate is not None:
            self._gate.wait_passed()

    def _begin_behind_streams(self, ticket: Ticket, work: Callable[[], Coroutine[object, object, Outcome]]) -> int:
        """As `_begin`, once the device has done what the host engine has enqueued by now."""
        if self._gate is None:
            return self._begin(ticket, work)
        context = copy_context()

        def go(error: Exception | None) -> None:
            async def fail() -> Outcome:
                assert error is not None
                raise error

            # At the end of the engine each ticket gets its outcome.
            with suppress(EngineClosed):
                self._post_work(ticket, work if error is None else fail, context)

        self._gate.behind_streams(go)
        return ticket.number

    def _post_work(
        self, ticket: Ticket, work: Callable[[], Coroutine[object, object, Outcome]], context: Context
    ) -> None:
        self._loop.post(lambda: self._loop.spawn(self._perform(ticket, work), ticket.call, context=context))

    def _post_abort(self, live: Live, *, from_gate: bool = False) -> None:
        # As above.
        with suppress(EngineClosed) if from_gate else nullcontext():
            self._loop.post(lambda: self._loop.spawn(self._abort(live), "abort"))

    def _begin(self, ticket: Ticket, work: Callable[[], Coroutine[object, object, Outcome]]) -> int:
        # The request's records and spans, and its recompute, belong to the caller's context.
        context = copy_context()
        try:
            self._post_work(ticket, work, context)
        except BaseException as error:
            # If the engine's end has reached the ticket already, its outcome reports that.
            if self._tickets.withdraw(ticket) or not isinstance(error, EngineClosed):
                raise
        return ticket.number

    def _check_held(self, ready: ReadyRequest) -> None:
        self._tickets.check(ready)
        if not self._engine.holds(ready):
            self._loop.check()
            raise InvalidRequest(f"request {ready.request_id!r} was lost: its pages are not yours any more")

    # --- On the engine's thread ---

    async def _perform(self, ticket: Ticket, work: Callable[[], Coroutine[object, object, Outcome]]) -> None:
        try:
            outcome = await work()
        except Exception as error:
            outcome = ticket.failed(error)
        if not isinstance(outcome, Restored):
            self._tickets.forget(ticket.live)
        self._tell(ticket, outcome)

    def _tell(self, ticket: Ticket, outcome: Outcome) -> None:
        if ticket.on_done is None:
            self._mailbox.put(outcome)
            self._tickets.close(ticket)
            return
        self._tickets.close(ticket)
        try:
            ticket.on_done(self._tickets.as_of_now(outcome))
        except Exception:
            self._callbacks_raised += 1
            LOG.exception("on_done raised", request_id=ticket.live.request_id)

    async def _abort(self, live: Live) -> None:
        if not self._tickets.is_live(live):
            return  # The request ended before this ran, and its id may belong to another request by now.
        was_ready = live.ready is not None
        await self._engine.abort(live.request_id)
        if was_ready:
            self._tickets.forget(live)

    async def _hint(self, envelope: object) -> None:
        try:
            await self._engine.hint(envelope)
        except InvalidRequest as error:
            LOG.warning("KV hints are not followed", cause=str(error))
        except EngineClosed:
            raise
        except Exception:
            # They are advice: a defect in following them must not end the engine.
            LOG.exception("KV hints are not followed, because of an error here")

    def _decline(self, request: DecodeRequest) -> None:
        try:
            self._engine.decline(request)
        except TidekvError as error:
            LOG.warning(
                "a room could not be declined",
                request_id=request.request_id,
                prefill=",".join(request.prefills),
                cause=str(error),
            )

    def _note_growths(self, taken: list[tuple[ReadyRequest, int]]) -> None:
        for ready, page_count in taken:
            self._engine.note_growth(ready, page_count)

    def _has_grown(self, ready: ReadyRequest, tokens: int) -> bool:
        try:
            self._engine.grow(ready, tokens)
        except OutOfPages:
            return False
        return True

    def _end(self) -> None:
        """Give every open ticket its outcome. Runs when the thread accepts no more orders."""
        for ticket in self._tickets.end("engine closed"):
            self._tell(ticket, ticket.failed(EngineClosed("the engine's thread has ended")))
        self._mailbox.end()
