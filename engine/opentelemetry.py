"""OpenTelemetry spans: one per request, with a child for each state it waited in.

Spans are made from the same steps as journal and metrics, after them, with the texts of `tidekv explain`. A span is
made when its request is READY or has failed, with the times of the events, so no open span can be lost. The embedder's
provider exports it; nothing here is global.
"""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from typing import TYPE_CHECKING

from tidekv.engine.log import engine_log
from tidekv.engine.trace.causes import in_one_line
from tidekv.engine.trace.request_trace import Stall
from tidekv.engine.trace.request_traces import RequestTraces
from tidekv.states.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import Attributes

    from tidekv.engine.decode.decode_engine import DecodeEngine
    from tidekv.engine.trace.request_trace import RequestTrace
    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event

LOG = engine_log("tidekv.engine")
NAME = "tidekv.restore"
LOST_NAME = "tidekv.lost"
"""The span of a request that failed after it had been READY."""
NS = 1e9
STALLS_MAX = 64
"""Maximum stalls kept for requests under way."""


def trace_requests(engine: DecodeEngine, provider: TracerProvider) -> RequestSpans:
    """Make spans of every request of a started engine from now on, with tracers of this provider.

    Call it within the engine's block, before its first request (InvalidRequest). A request's span is a child of the
    span within which `restore` or `resume` was called. Give the provider a BatchSpanProcessor: one that exports at once
    would do so on the event loop. Raises InvalidConfig without the extra `otel`.
    """
    try:
        found = importlib.util.find_spec("opentelemetry.trace") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise InvalidConfig("spans need OpenTelemetry, which is an extra: pip install 'tidekv[otel]'")
    engine.statistics()  # Raises EngineClosed if the engine was not started.
    parts = engine._runtime
    if parts.core.state.requests:
        raise InvalidRequest("spans are made of whole requests: call trace_requests before the engine's first one")
    # The wall's clock first: a pause between the two makes spans a little early, but never end in the future.
    unix_ns = time.time_ns() - int(parts.driver.clock() * NS)
    spans = RequestSpans(lambda: parts.core, provider, unix_ns=unix_ns, look=parts.watchdog.look)
    parts.on_stall.append(spans.note_stall)
    parts.calls.on_begin = spans.begun
    parts.driver.watch(spans)
    return spans


class RequestSpans:
    """Watcher of one core's steps that makes spans. Never raises: the first error is logged, all are counted."""

    def __init__(
        self,
        core_of: Callable[[], Core],
        provider: TracerProvider,
        *,
        unix_ns: int,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`core_of` returns the engine's current core. `unix_ns` is the Unix time at the zero of the events' clock.
        `look` has stalls that have just ended reported to `note_stall`.
        """
        self.spans_made = 0
        """Requests that have a span."""
        self.failures = 0
        """Steps at which making spans raised."""
        self._core_of = core_of
        self._core = core_of()
        self._tracer = provider.get_tracer("tidekv")
        self._request_traces = RequestTraces(self._core, keep=False)
        self._unix_ns = unix_ns
        self._parents: dict[str, Context] = {}
        self._look = look
        self._stalls: deque[Stall] = deque(maxlen=STALLS_MAX)

    def begun(self, request_id: str) -> None:
        """Record the caller's context for a request that it submits."""
        from opentelemetry.context import get_current

        context = get_current()
        if context:
            self._parents[request_id] = context

    def note_stall(self, at_s: float, seconds: float, where: str) -> None:
        """Keep a stall of the event loop for the requests that it has delayed."""
        self._stalls.append(Stall(at_s - seconds, at_s, where))

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """See `tidekv.engine.watching.Watcher`."""
        try:
            self._follow(self._core_of())
            self._request_traces.stepped(event, given, error)
            if self._request_traces.ended:
                self._look()
            for request_trace in self._request_traces.ended:
                request_trace.note_stalls(self._stalls)
                self._emit(request_trace)
        except Exception:
            # The embedder's processor may raise anything; requests must not be affected.
            if not self.failures:
                LOG.exception("spans could not be made; further failures are only counted")
            self.failures += 1

    def _follow(self, core: Core) -> None:
        """Start over with a new core, which has no requests."""
        if core is not self._core:
            self._core = core
            self._request_traces = RequestTraces(core, keep=False)

    def _emit(self, request_trace: RequestTrace) -> None:
        from opentelemetry.trace import Status, StatusCode

        parent = None if request_trace.was_ready else self._parents.pop(request_trace.request_id, None)
        ended_at_s = self._request_traces.last_at_s
        name, begun_at_s = (NAME, request_trace.arrived_at_s)
        if request_trace.was_ready:
            name, begun_at_s = LOST_NAME, request_trace.ended_at_s or ended_at_s
        span = self._tracer.start_span(
            name, context=parent, start_time=self._ns(begun_at_s), attributes=_attributes(request_trace)
        )
        self.spans_made += 1
        if span.is_recording():
            if not request_trace.was_ready:
                self._tell(span, request_trace, ended_at_s)
            if request_trace.ended == "FAILED":
                detail = in_one_line(
                    f"{request_trace.cause}: {request_trace.detail}" if request_trace.detail else request_trace.cause
                )
                span.set_status(Status(StatusCode.ERROR, detail))
        span.end(self._ns(ended_at_s))

    def _tell(self, span: Span, request_trace: RequestTrace, ended_at_s: float) -> None:
        """Add children for the states, and events for plans and fallbacks."""
        from opentelemetry.trace import set_span_in_context

        within = set_span_in_context(span)
        ends = [at_s for at_s, _ in request_trace.states[1:]] + [ended_at_s]
        for (at_s, state), end_s in zip(request_trace.states, ends, strict=True):
            if state not in ("READY", "FAILED"):
                child = self._tracer.start_span(f"tidekv.{state.lower()}", context=within, start_time=self._ns(at_s))
                child.end(self._ns(end_s))
        for plan in request_trace.plans:
            numbers: Attributes = {
                "tidekv.generation": plan.generation,
                "tidekv.prefill": plan.prefill,
                "tidekv.pages.l1": plan.l1_pages,
                "tidekv.pages.l2": plan.l2_pages,
                "tidekv.pages.l3": plan.l3_pages,
                "tidekv.pages.shared": plan.shared_pages + sum(plan.sent_pages.values()),
                "tidekv.pages.delta": plan.delta_pages,
            }
            span.add_event("plan", numbers, self._ns(plan.at_s))
        for work in request_trace.works:
            if work.kind == "span" and work.span:
                pages: Attributes = {"tidekv.first": work.first, "tidekv.pages": work.count, "tidekv.cause": work.cause}
                span.add_event("extend", pages, self._ns(work.begun_at_s))
        for stall in request_trace.stalls:
            place: Attributes = {"tidekv.where": stall.where, "tidekv.seconds": stall.ended_at_s - stall.began_at_s}
            span.add_event("loop blocked", place, self._ns(stall.began_at_s))
        for note in request_trace.fallbacks:
            words: Attributes = {"tidekv.cause": note.cause, "tidekv.consequence": note.consequence}
            span.add_event("fallback", words, self._ns(note.at_s))

    def _ns(self, at_s: float) -> int:
        return self._unix_ns + int(at_s * NS)


def _attributes(request_trace: RequestTrace) -> dict[str, str | int]:
    """Return a span's attributes: the request, its sizes, its sources, and wasted pages."""
    spans = [work for work in request_trace.works if work.kind == "span"]
    attributes: dict[str, str | int] = {
        "tidekv.request_id": request_trace.request_id,
        "tidekv.prompt_tokens": request_trace.prompt_tokens,
        "tidekv.prompt_pages": request_trace.page_count,
        "tidekv.outcome": "partial" if request_trace.is_partial else request_trace.ended.lower(),
        "tidekv.rooms": len(request_trace.plans),
        "tidekv.tokens.promised": request_trace.plans[-1].promised_tokens if request_trace.plans else 0,
        "tidekv.pages.extended": sum(work.count for work in spans if work.span),
        "tidekv.pages.delivered": sum(work.delivered for work in spans),
        "tidekv.pages.wasted": sum(work.wasted for work in request_trace.works),
        **{f"tidekv.tokens.{source}": tokens for source, tokens in request_trace.sources.items()},
    }
    if request_trace.ended == "FAILED":
        attributes["tidekv.cause"] = request_trace.cause
    return attributes
