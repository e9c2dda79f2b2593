"""Pending calls of the embedder, from their start to the core's answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tidekv.engine.decode.component_pages import ready_component_pages, shared_component_pages
from tidekv.engine.decode.layers import LayerProgress
from tidekv.engine.decode.lent_pages import LentPages
from tidekv.engine.decode.values import (
    DecodeRequest,
    OfferedPages,
    ReadyRequest,
    Recompute,
    RecomputeJob,
    RestoredPages,
)
from tidekv.engine.log import run_in
from tidekv.states import commands
from tidekv.states.commands import Command
from tidekv.states.errors import (
    PREFILL_CAUSES,
    BrokenInvariant,
    EngineClosed,
    InvalidRequest,
    RequestFailed,
)
from tidekv.states.handover.prompt_digest import digest_of
from tidekv.states.validation import checked_first_token, refusal
from tidekv.transports.tasks import own_cancels_only

if TYPE_CHECKING:
    from tidekv.backends.keys.prompt_keys import Prompt
    from tidekv.engine.decode.lent_pages import PagesByGroup
    from tidekv.states.core import Core

T = TypeVar("T")
FlushAnswer = dict[str, dict[str, int]]


class LiveCall:
    """A live request from its caller's view: waiting, then READY, until it is given back."""

    def __init__(self, request: DecodeRequest, prompt: Prompt, *, request_number: int, deadline_at_s: float) -> None:
        self.request = request
        self.context = copy_context()
        """Of the caller: its trace id, its span."""
        self.prompt = prompt
        """The tokens that the request's pages are computed from: at first its prompt, later with its output."""
        self.request_number = request_number
        self.deadline_at_s = deadline_at_s
        """Time, on the driver's clock, by which the request must be ready."""
        self.core_number = request_number
        """The number by which the core names its tokens; with ranks, the leader's."""
        self.outcome: asyncio.Future[ReadyRequest | RestoredPages] = asyncio.get_running_loop().create_future()
        self.first_tokens: dict[int, tuple[int, dict[str, object]]] = {}
        """First token and aux by generation: they arrive before the core takes the event."""
        self.ready: ReadyRequest | None = None
        self.prefill_words = ""
        """Message of this rank's prefill when it failed. Ranks agree on the cause only."""
        self.reserves_given = 0
        """Number of answers to its growth so far."""
        self.is_aborted = False
        """An abort was posted. Even if the core decides READY before it takes that, the pages are not the caller's."""

    def prompt_digest(self) -> bytes:
        """Return the digest of the tokens as prefill must have computed them."""
        given = self.request.prompt_digest
        # A resumed request has its output behind the prompt that the caller's digest is of.
        if given is not None and given.prompt_tokens * 4 == len(self.prompt.packed):
            return given.digest
        return digest_of(self.prompt.packed, self.prompt.seed).digest


class PendingCalls:
    """All calls in flight, and the tokens that operations still need."""

    def __init__(self, *, page_size: int, layer_count: int, vocabulary: int = 0) -> None:
        self.last_resort: Recompute | None = None
        """Computes pages that no prefill can send, if the caller gave it; set before the start."""
        self.on_use_end: Callable[[int], None] = _ignore
        """Called with the number of an early READY whose pages its caller does not use any more."""
        self.on_grown: Callable[[ReadyRequest, int], None] = _ignore_growth
        """Called with the pages that a request has taken from its reserve before it was READY."""
        self._layer_count = layer_count
        self._vocabulary = vocabulary
        self._left_early: dict[str, LayerProgress] = {}
        """Requests that have failed while their callers may still use their pages."""
        self.drop_cause = "aborted"
        """Cause for READY requests that the core drops: a caller's abort, unless a rank is lost."""
        self.on_begin: Callable[[str], None] | None = None
        """Called with the id of each request, in the context of the call that submits it."""
        self._page_size = page_size
        self._live: dict[str, LiveCall] = {}
        self._tokens_left: dict[int, Prompt] = {}
        self._ends: dict[str, asyncio.Future[int]] = {}
        self._flushes: dict[int, asyncio.Future[FlushAnswer]] = {}
        self._hints: dict[int, asyncio.Future[commands.ReportHinted]] = {}
        self._stores: dict[int, asyncio.Future[commands.ReportStored]] = {}
        self._waiters: dict[str, list[tuple[Callable[[], bool], asyncio.Future[None]]]] = {}
        """Waits with a condition, by the request that it is about; "" are those about all."""
        self._changed: dict[str, None] = {}
        """Requests with waits that have changed since the last drain."""
        self.lent = LentPages()
        """The caller's device pages that calls are lent, or read."""
        self._ended = ""
        self._tellers: dict[type[Command], Callable[..., None]] = {
            commands.ReportReady: self._tell_ready,
            commands.ReportEarly: self._tell_early,
            commands.ReportLayers: self._tell_layers,
            commands.ReportLayersLost: self._tell_layers_lost,
            commands.ReportRestored: self._tell_restored,
            commands.ReportOffered: self._tell_offered,
            commands.ReportFailed: self._tell_failed,
            commands.GiveReserve: self._give_reserve,
            commands.ReportDropped: self._tell_dropped,
            commands.ReportFinished: self._tell_finished,
            commands.ReportRetracted: self._tell_retracted,
            commands.ReportFlushed: self._tell_flushed,
            commands.ReportHinted: self._tell_hinted,
            commands.ReportStored: self._tell_stored,
            commands.ForgetTokens: self._forget_tokens,
        }

    def begin(
        self, request: DecodeRequest, prompt: Prompt, *, request_number: int, deadline_at_s: float
    ) -> asyncio.Future[ReadyRequest | RestoredPages]:
        """Make a request live. Raises InvalidRequest for an id that is live already, and what `on_begin` raises; then
        nothing is live.
        """
        if request.request_id in self._live:
            raise InvalidRequest(f"request {request.request_id!r} is live already; ids are unique until they end")
        if request.request_id in self._left_early:
            raise InvalidRequest(
                f"request {request.request_id!r} has failed, and its caller has not stopped using its pages: call its"
                " wait_layer again, or abort it"
            )
        live = LiveCall(request, prompt, request_number=request_number, deadline_at_s=deadline_at_s)
        if self.on_begin is not None:
            self.on_begin(request.request_id)
        self._live[request.request_id] = live
        return live.outcome

    def withdraw(self, request_id: str, *, request_number: int) -> None:
        """Forget a request that was not posted to the core. Does nothing if another request has the id."""
        if self.number_of(request_id) == request_number:
            del self._live[request_id]
            self.lent.release(request_id)
            self._note_change(request_id)

    def mark_aborted(self, request_id: str) -> None:
        """Note that an abort of this live request is posted: its `restore` raises from now on."""
        self._live[request_id].is_aborted = True
        self._note_change(request_id)
        self.end_use(request_id)

    def is_restoring(self, request_id: str) -> bool:
        """Whether the request waits, and no abort of it was posted."""
        live = self._live.get(request_id)
        return live is not None and not live.is_aborted and not live.outcome.done()

    def change(self, request_id: str, deadline_at_s: float | None) -> bool:
        """Give a request that waits another deadline, if there is one. Returns whether it waits."""
        is_restoring = self.is_restoring(request_id)
        if is_restoring and deadline_at_s is not None:
            self._live[request_id].deadline_at_s = deadline_at_s
        return is_restoring

    def end_use(self, request_id: str) -> None:
        """End the caller's use of a request's pages after an early READY; the request may have failed meanwhile.

        A request without such a use is left as it is.
        """
        live = self._live.get(request_id)
        ready = None if live is None else live.ready
        layers = self._left_early.get(request_id) if ready is None else ready.layers
        if layers is not None:
            layers.end_use()

    def end_uses(self) -> None:
        """End the uses of all requests that have failed after an early READY, since the engine ends."""
        for layers in list(self._left_early.values()):
            layers.end_use()

    def holds(self, ready: ReadyRequest) -> bool:
        """Whether this READY request was neither given back nor aborted."""
        live = self._live.get(ready.request_id)
        return live is not None and live.ready is ready and not live.is_aborted

    def context_of(self, request_id: str) -> Context:
        """The context of the caller of a request, an empty one if that has gone."""
        live = self._live.get(request_id)
        return Context() if live is None else live.context

    def is_live(self, request_id: str) -> bool:
        """Whether the request waits, or is READY and not given back."""
        return request_id in self._live

    def number_of(self, request_id: str) -> int | None:
        """The number of the live request with that id. Ids are used again, numbers are not."""
        live = self._live.get(request_id)
        return None if live is None else live.request_number

    def adopt(self, request_id: str, core_number: int) -> None:
        """Note the number by which the core names this request's tokens."""
        self._live[request_id].core_number = core_number

    def is_given_back(self, request_id: str) -> bool:
        """Whether finish or retract was called for the request and has no answer yet."""
        return request_id in self._ends

    def arriving(self, core: Core) -> int:
        """Number of requests that the core has not taken yet, and of those being retracted."""
        return len(self._live) - len(core.state.requests)

    def live_ids(self) -> list[str]:
        """Ids of all live requests."""
        return list(self._live)

    def ready(self, ready: ReadyRequest) -> LiveCall:
        """The call behind a READY request. Raises InvalidRequest if it was given back, or is another's, and
        EngineClosed.
        """
        self._check_not_ended()
        if not isinstance(ready, ReadyRequest):
            raise refusal(ready, ReadyRequest, "ready")
        live = self._live.get(ready.request_id)
        if live is None or live.ready is not ready:
            raise InvalidRequest(f"request {ready.request_id!r} was given back already: it has no pages any more")
        if ready.request_id in self._ends:
            raise InvalidRequest(f"request {ready.request_id!r} is being given back")
        return live

    def expect(self, ready: ReadyRequest) -> asyncio.Future[int]:
        """Return a future for the answer to finish or retract; `unexpect` takes it back. Raises as `ready`, and
        InvalidRequest while layers are still arriving.
        """
        live = self.ready(ready)
        if ready.layers_in_place is not None:
            raise InvalidRequest(
                f"request {ready.request_id!r} has {ready.layers_in_place} of {self._layer_count} layers in place: wait"
                " for the last one before it is given back, or abort it"
            )
        self._tokens_left[live.core_number] = live.prompt
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ends[ready.request_id] = done
        return done

    def unexpect(self, ready: ReadyRequest) -> None:
        """Undo `expect`, if the event was not posted."""
        self._ends.pop(ready.request_id, None)
        self._tokens_left.pop(self._live[ready.request_id].core_number, None)

    def unexpect_flush(self, call: int) -> None:
        """Undo `expect_flush`, if the event was not posted."""
        self._flushes.pop(call, None)

    def fail_flushes(self, error: Exception) -> None:
        """Fail all flushes, hints and runs that store everything: a rank is lost, which had to agree to them."""
        waiting: list[asyncio.Future[Any]] = [*self._flushes.values(), *self._hints.values(), *self._stores.values()]
        for done in waiting:
            if not done.done():
                done.set_exception(error)
        self._flushes.clear()
        self._hints.clear()
        self._stores.clear()

    def expect_offer(self, offer: int, pages: PagesByGroup) -> asyncio.Future[OfferedPages]:
        """Return a future for the answer to an offer, which reads these pages; `unexpect_offer` takes it back."""
        self._check_not_ended()
        return self.lent.offer(offer, pages)

    def unexpect_offer(self, offer: int) -> None:
        """Undo `expect_offer`, if the event was not posted."""
        self.lent.end_offer(offer)

    def expect_flush(self, call: int) -> asyncio.Future[FlushAnswer]:
        """Return a future for the answer to a flush."""
        done: asyncio.Future[FlushAnswer] = asyncio.get_running_loop().create_future()
        self._flushes[call] = done
        return done

    def expect_hint(self, call: int) -> asyncio.Future[commands.ReportHinted]:
        """Return a future for the report of a hint."""
        self._check_not_ended()
        done: asyncio.Future[commands.ReportHinted] = asyncio.get_running_loop().create_future()
        self._hints[call] = done
        return done

    def unexpect_hint(self, call: int) -> None:
        """Undo `expect_hint`, if the event was not posted."""
        self._hints.pop(call, None)

    def expect_stored(self, call: int) -> asyncio.Future[commands.ReportStored]:
        """Return a future for the report of a run that stores everything; `unexpect_stored` takes it back."""
        self._check_not_ended()
        done: asyncio.Future[commands.ReportStored] = asyncio.get_running_loop().create_future()
        self._stores[call] = done
        return done

    @property
    def is_storing(self) -> bool:
        """Whether a run that stores everything has no report yet."""
        return bool(self._stores)

    def unexpect_stored(self, call: int) -> None:
        """Undo `expect_stored`, if the event was not posted."""
        self._stores.pop(call, None)

    async def wait_until(self, holds: Callable[[], bool], *, request_id: str = "") -> None:
        """Wait until a condition holds after a drain. Unbounded: the caller sets the deadline, or knows that the core's
        next step ends the wait. With `request_id` it is tested only if that request has changed. Raises EngineClosed if
        the engine ends first.
        """
        self._check_not_ended()
        if not holds():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            others = [each for each in self._waiters.get(request_id, ()) if not each[1].done()]
            self._waiters[request_id] = [*others, (holds, waiter)]
            await waiter

    def after_drain(self) -> None:
        """End the waits with a condition that is now true. Call it after the core has taken events."""
        if not self._waiters:
            return
        changed, self._changed = self._changed, {}
        for request_id in ("", *changed):
            waiting = [each for each in self._waiters.pop(request_id, ()) if not each[1].done()]
            true = [waiter for holds, waiter in waiting if holds()]
            for waiter in true:
                waiter.set_result(None)
            if len(true) < len(waiting):
                self._waiters[request_id] = [each for each in waiting if not each[1].done()]

    def _note_change(self, request_id: str) -> None:
        if request_id in self._waiters:
            self._changed[request_id] = None

    def note_aux(self, request_id: str, generation: int, first_token: int, aux: object) -> None:
        """Keep the first token and aux data that prefill sent with the end of a room."""
        live = self._live.get(request_id)
        if live is not None:
            live.first_tokens[generation] = (first_token, aux if isinstance(aux, dict) else {})

    def end_all(self, words: str) -> None:
        """Fail all calls with EngineClosed, now and from now on, since the engine ends."""
        self._ended = words
        futures: list[asyncio.Future[Any]]  # Any: of every kind of call.
        futures = [live.outcome for live in self._live.values()]
        futures += [
            *self._ends.values(),
            *self._flushes.values(),
            *self._hints.values(),
            *self._stores.values(),
            *(waiter for waiting in self._waiters.values() for _, waiter in waiting),
        ]
        futures += self.lent.end_all()
        for future in futures:
            if not future.done():
                future.set_exception(EngineClosed(words))
                # Retrieved, so that asyncio does not report the error of a call that was cancelled.
                future.exception()
        for live in self._live.values():
            if live.ready is not None and live.ready.layers is not None:
                live.ready.layers.fail(EngineClosed(words))
        self._live.clear()
        self._left_early.clear()
        self._ends.clear()
        self._flushes.clear()
        self._hints.clear()
        self._stores.clear()
        self._waiters.clear()
        self._tokens_left.clear()

    def _check_not_ended(self) -> None:
        if self._ended:
            raise EngineClosed(self._ended)

    # --- For the executor ---

    def live(self, request_id: str) -> LiveCall:
        """Return the call of a live request."""
        return self._live[request_id]

    def tokens_left(self, request_number: int) -> Prompt:
        """Return the tokens that a finished request left."""
        return self._tokens_left[request_number]

    def tell(self, command: Command) -> None:
        """Resolve the call that a command answers."""
        self._tellers[type(command)](command)

    def recompute(
        self, command: commands.Recompute, end: Callable[[commands.Recompute, Exception | None], None]
    ) -> Coroutine[object, object, None]:
        """Have the caller compute pages that no prefill can send; `end` is called with the outcome."""
        # Looked up now: when the work begins, the request may be gone, and its id used again.
        return self._recompute(self._live[command.request_id], command, end)

    async def _recompute(
        self,
        live: LiveCall,
        command: commands.Recompute,
        end: Callable[[commands.Recompute, Exception | None], None],
    ) -> None:
        assert self.last_resort is not None, "the core was given can_recompute"
        if self._live.get(command.request_id) is not live:
            end(command, RequestFailed(command.request_id, "ended before its recompute began"))
            return
        job = RecomputeJob(
            request=live.request,
            pages=np.array(command.pages, dtype=np.int32),
            start_token=command.first * self._page_size,
            packed_tokens=live.prompt.packed,
            component_pages=ready_component_pages(command.component_pages),
            resume_from=shared_component_pages(command.resume_from),
            snapshots={
                name: {boundary * self._page_size: page for boundary, page in pages.items()}
                for name, pages in (command.snapshots or {}).items()
            },
        )
        try:
            # In the context of the caller, whose request the work is: its trace id, its span.
            recompute = run_in(live.context.copy(), _awaited(self.last_resort, job))
            first_token, aux = await own_cancels_only(recompute, "recompute")
            token = checked_first_token(first_token, self._vocabulary)
            live.first_tokens[command.generation] = (token, dict(aux))
        except Exception as error:
            end(command, error)
            return
        end(command, None)

    # --- Answers ---

    def _tell_ready(self, command: commands.ReportReady) -> None:
        live = self._live[command.request_id]
        if live.ready is None:
            live.ready = self._ready_request(live, command)
            self._complete(live, live.ready, command, is_renewed=False)
        else:
            assert live.ready.layers is not None, "a request without early READY is reported once"
            ends_use = live.ready._generation == command.generation
            live.ready.layers.complete(partial(self._complete, live, live.ready, command), ends_use=ends_use)
        if not live.outcome.done():
            live.outcome.set_result(live.ready)

    def _complete(
        self, live: LiveCall, ready: ReadyRequest, command: commands.ReportReady, *, is_renewed: bool
    ) -> None:
        """Complete what the caller knows of a READY request. With `is_renewed` it gets the pages of the report; else it
        has them, and pages that it has taken from the reserve are reported to the core.
        """
        if is_renewed:
            self._renew(live, ready, command)
        live.first_tokens.clear()
        # A copy for the caller: the journal still has to encode the command.
        ready.sources = dict(command.sources)
        ready.component_pages = ready_component_pages(command.component_pages)
        ready.fallbacks = command.fallbacks

    def _ready_request(self, live: LiveCall, command: commands.ReportReady | commands.ReportEarly) -> ReadyRequest:
        first_token, aux = live.first_tokens[command.generation]
        return ReadyRequest(
            request_id=command.request_id,
            pages=np.array(command.pages, dtype=np.int32),
            prompt_tokens=len(live.prompt.packed) // 4,
            first_token=first_token,
            aux=aux,
            sources={},
            length=len(live.prompt.packed) // 4,
            packed_tokens=live.prompt.packed,
            _generation=command.generation,
            _reserve=deque(command.reserve),
            component_pages=ready_component_pages(command.component_pages),
            layer_count=self._layer_count,
        )

    def _renew(self, live: LiveCall, ready: ReadyRequest, command: commands.ReportReady | commands.ReportEarly) -> None:
        """Give the caller the pages of a later report, if its own are not the same."""
        fresh = self._ready_request(live, command)
        ready.pages, ready._reserve, ready.length = fresh.pages, fresh._reserve, fresh.length
        ready.first_token, ready.aux, ready._generation = fresh.first_token, fresh.aux, fresh._generation
        ready.component_pages = fresh.component_pages

    def _tell_early(self, command: commands.ReportEarly) -> None:
        live = self._live[command.request_id]
        ready = live.ready
        if ready is None:
            live.ready = ready = self._ready_request(live, command)
            ready.layers = LayerProgress(
                command.request_id,
                layer_count=self._layer_count,
                on_end=partial(self._end_use, live),
                on_grown=partial(self.on_grown, ready),
            )
        else:
            self._renew(live, ready, command)
        assert ready.layers is not None, "a READY request is not reported early"
        ready.layers.begin(command.op, command.layers)
        if live.is_aborted or live.outcome.cancelled():
            ready.layers.end_use()
        elif not live.outcome.done():
            live.outcome.set_result(ready)

    def _end_use(self, live: LiveCall, op: int) -> None:
        request_id = live.request.request_id
        if live.ready is not None and self._left_early.get(request_id) is live.ready.layers:
            self._left_early.pop(request_id, None)
        self.on_use_end(op)

    def _tell_layers(self, command: commands.ReportLayers) -> None:
        self._layers_of(command.request_id).advance(command.layers)

    def _tell_layers_lost(self, command: commands.ReportLayersLost) -> None:
        self._layers_of(command.request_id).lose(command.cause)

    def _layers_of(self, request_id: str) -> LayerProgress:
        ready = self._live[request_id].ready
        assert ready is not None and ready.layers is not None, "layers are reported after an early READY"
        return ready.layers

    def _tell_restored(self, command: commands.ReportRestored) -> None:
        live = self._live.pop(command.request_id)
        self._note_change(command.request_id)
        self.lent.release(command.request_id)
        # Without a cause the room was complete, so its first token has arrived, if a prefill was named.
        has_token = live.request.prefills and not command.cause
        first_token, aux = live.first_tokens[command.generation] if has_token else (None, {})
        detail = command.detail
        if live.prefill_words and command.cause in PREFILL_CAUSES:
            detail += f"; on this rank: {live.prefill_words}"
        restored = RestoredPages(
            request_id=command.request_id,
            restored_tokens=command.restored_tokens,
            prompt_tokens=len(live.prompt.packed) // 4,
            sources=dict(command.sources),
            first_token=first_token,
            aux=aux,
            cause=command.cause,
            detail=detail,
            fallbacks=command.fallbacks,
        )
        if not live.outcome.done():
            live.outcome.set_result(restored)

    def _tell_offered(self, command: commands.ReportOffered) -> None:
        done = self.lent.end_offer(command.offer)
        if done is not None and not done.done():
            counts = (command.written, command.present, command.declined)
            done.set_result(OfferedPages(*counts, command.components_declined, command.passed))

    def note_prefill(self, request_id: str, words: str) -> None:
        """Keep the message of this rank's prefill about a request, for the error that its caller may get."""
        if (live := self._live.get(request_id)) is not None:
            live.prefill_words = words

    def _tell_failed(self, command: commands.ReportFailed) -> None:
        detail = command.detail
        words = self._live[command.request_id].prefill_words
        if words and command.cause in PREFILL_CAUSES:
            detail += f"; on this rank: {words}"
        self._fail(RequestFailed(command.request_id, command.cause, detail))

    def _tell_dropped(self, command: commands.ReportDropped) -> None:
        self._fail(RequestFailed(command.request_id, self.drop_cause))

    def _fail(self, error: RequestFailed) -> None:
        """End a request: fail its `restore`, and its `finish` or `retract` if one was just called."""
        live = self._live.pop(error.request_id)
        self._note_change(error.request_id)
        self.lent.release(error.request_id)
        if live.ready is not None and live.ready.layers is not None:
            live.ready.layers.fail(error)
            if live.ready.layers.is_used:
                self._left_early[error.request_id] = live.ready.layers
        self._tokens_left.pop(live.core_number, None)
        for future in (live.outcome, self._ends.pop(error.request_id, None)):
            if future is not None and not future.done():
                future.set_exception(error)

    def _give_reserve(self, command: commands.GiveReserve) -> None:
        live = self._live[command.request_id]
        assert live.ready is not None, "only a READY request grows"
        live.ready._reserve.extend(command.pages)
        live.reserves_given += 1
        self._note_change(command.request_id)

    def _tell_finished(self, command: commands.ReportFinished) -> None:
        self._end(command.request_id, command.inserted, command.fallbacks)

    def _tell_retracted(self, command: commands.ReportRetracted) -> None:
        self._end(command.request_id, command.held_pages, command.fallbacks)

    def _end(self, request_id: str, answer: int, fallbacks: tuple[commands.Fallback, ...]) -> None:
        live = self._live.pop(request_id)
        self._note_change(request_id)
        if live.ready is not None:
            live.ready.fallbacks = fallbacks
        done = self._ends.pop(request_id, None)
        if done is None:
            raise BrokenInvariant(f"request {request_id!r} was given back, but neither finish nor retract was called")
        if not done.done():
            done.set_result(answer)

    def _tell_flushed(self, command: commands.ReportFlushed) -> None:
        # Only the leader's caller flushes and waits; other ranks have no call.
        done = self._flushes.pop(command.call, None)
        if done is not None and not done.done():
            done.set_result({"dropped": command.dropped, "spared": command.spared})

    def _tell_hinted(self, command: commands.ReportHinted) -> None:
        # As with a flush, other ranks have no call.
        done = self._hints.pop(command.call, None)
        if done is not None and not done.done():
            done.set_result(command)

    def _tell_stored(self, command: commands.ReportStored) -> None:
        # As with a flush, other ranks have no call.
        done = self._stores.pop(command.call, None)
        if done is not None and not done.done():
            done.set_result(command)

    def _forget_tokens(self, command: commands.ForgetTokens) -> None:
        self._tokens_left.pop(command.request_number, None)


async def _awaited(recompute: Recompute, job: RecomputeJob) -> tuple[int, Mapping[str, object]]:
    return await recompute(job)


def _ignore(op: int) -> None:
    """Do nothing: no request was reported early yet."""


def _ignore_growth(ready: ReadyRequest, page_count: int) -> None:
    """Do nothing: no request was reported early yet."""
