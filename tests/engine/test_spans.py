"""One span per request, its states as children, in the caller's trace: derived from the core's steps."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from tests.support.inside import runtime_of
from tidekv import DecodeRequest, InvalidConfig, InvalidRequest, RequestFailed, open_storage, trace_requests
from tidekv.engine import opentelemetry
from tidekv.states.errors import CopyFailed

PROMPT = list(range(100, 142))  # Ten pages of four tokens and a tail of two.


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def named(exporter: InMemorySpanExporter, request_id: str) -> ReadableSpan:
    (found,) = [
        span
        for span in exporter.get_finished_spans()
        if span.name == "tidekv.restore" and span.attributes["tidekv.request_id"] == request_id
    ]
    return found


def children(exporter: InMemorySpanExporter, parent: ReadableSpan) -> list[ReadableSpan]:
    found = [
        span for span in exporter.get_finished_spans() if span.parent and span.parent.span_id == parent.context.span_id
    ]
    return sorted(found, key=lambda span: span.start_time)


async def test_span_has_the_states_and_numbers_of_its_request(make_pair, exporter, provider) -> None:
    began_ns = time.time_ns()
    async with make_pair(storage=open_storage("memory:?capacity=64MiB")) as pair:
        spans = trace_requests(pair.engine, provider)
        await pair.finish(await pair.restore("cold", PROMPT), PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        with provider.get_tracer("caller").start_as_current_span("serve") as caller:
            ready = await pair.restore("warm", PROMPT)
        await pair.finish(ready, PROMPT, [1])
    assert spans.spans_made == 2
    assert spans.failures == 0
    cold, warm = named(exporter, "cold"), named(exporter, "warm")
    assert cold.parent is None
    assert cold.attributes["tidekv.tokens.transfer"] == len(PROMPT)
    assert cold.attributes["tidekv.pages.delivered"] == 11
    assert cold.status.status_code is StatusCode.UNSET
    # In the trace of its caller, from storage, with what was promised.
    assert warm.parent is not None
    assert warm.parent.span_id == caller.get_span_context().span_id
    assert warm.context.trace_id == caller.get_span_context().trace_id
    assert warm.attributes["tidekv.tokens.l3"] == 40
    assert warm.attributes["tidekv.tokens.promised"] == 40
    assert warm.attributes["tidekv.tokens.transfer"] == 2
    assert warm.attributes["tidekv.pages.wasted"] == 0
    assert warm.attributes["tidekv.outcome"] == "ready"
    assert not any("namespace" in name for name in warm.attributes), "a namespace holds a tenant's salt"
    states = children(exporter, warm)
    names = [span.name.removeprefix("tidekv.") for span in states]
    assert names[:2] == ["prealloc", "match"]
    assert "prefetch" in names[2:]
    # They follow one another without a gap, from arrival to READY, on the clock of the wall.
    assert states[0].start_time == warm.start_time
    assert states[-1].end_time == warm.end_time
    assert all(one.end_time == next_.start_time for one, next_ in pairwise(states))
    assert began_ns <= cold.start_time <= warm.start_time < warm.end_time <= time.time_ns()
    (plan,) = [event for event in warm.events if event.name == "plan"]
    assert plan.attributes["tidekv.pages.l3"] == 10


async def test_spans_do_not_end_in_the_future_if_the_machine_paused_while_they_were_set_up(
    make_pair, exporter, provider, monkeypatch
) -> None:
    make = opentelemetry.RequestTraces

    def made_slowly(*args: object, **options: object) -> object:
        time.sleep(1.0)  # A pause, much longer than a request and the end of its engine.
        return make(*args, **options)

    monkeypatch.setattr(opentelemetry, "RequestTraces", made_slowly)
    async with make_pair(loop_stall_report_s=60.0) as pair:
        trace_requests(pair.engine, provider)
        await pair.finish(await pair.restore("cold", PROMPT), PROMPT, [1])
        await pair.engine.wait_settled()
        assert named(exporter, "cold").end_time <= time.time_ns()


async def test_fallbacks_are_events_with_their_cause(make_pair, exporter, provider, monkeypatch) -> None:
    async with make_pair() as pair:
        trace_requests(pair.engine, provider)
        await pair.finish(await pair.restore("warm", PROMPT), PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush(("l1",))

        def fail(host_pages: object, device_pages: object) -> asyncio.Future[None]:
            copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            copied.set_exception(CopyFailed("the copy engine is gone"))
            return copied

        monkeypatch.setattr(runtime_of(pair.engine).copier, "to_device", fail)
        await pair.engine.finish(await pair.restore("r1", PROMPT))
    span = named(exporter, "r1")
    (fallback,) = [event for event in span.events if event.name == "fallback"]
    assert fallback.attributes["tidekv.cause"].endswith("CopyFailed: the copy engine is gone")
    assert "extend" in fallback.attributes["tidekv.consequence"]
    (extend,) = [event for event in span.events if event.name == "extend"]
    assert extend.attributes["tidekv.cause"] == "the copy from host to device failed"
    assert span.attributes["tidekv.pages.extended"] == 10
    assert span.status.status_code is StatusCode.UNSET


async def test_failure_is_an_error_with_its_cause(make_pair, exporter, provider) -> None:
    async with make_pair() as pair:
        trace_requests(pair.engine, provider)
        with pytest.raises(RequestFailed) as failed:
            await pair.engine.restore(DecodeRequest(request_id="r1", tokens=PROMPT, prefill="nobody"))
        # An id that comes again has a span of its own.
        await pair.engine.finish(await pair.restore("r2", PROMPT))
    span = named(exporter, "r1")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["tidekv.cause"] == failed.value.cause == "connection refused"
    assert span.status.description is not None
    assert span.status.description.startswith("connection refused: ")
    assert named(exporter, "r2").status.status_code is StatusCode.UNSET


class Raising(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise ZeroDivisionError("a bug of the exporter")


async def test_exporter_that_raises_hurts_no_request(make_pair) -> None:
    provider = TracerProvider()
    provider.add_span_processor(Raising())
    async with make_pair() as pair:
        spans = trace_requests(pair.engine, provider)
        for number in range(3):
            await pair.engine.finish(await pair.restore(f"r{number}", PROMPT))
    assert spans.failures == 3


async def test_what_is_not_sampled_is_not_made(make_pair, exporter) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with make_pair() as pair:
        spans = trace_requests(pair.engine, provider)
        await pair.engine.finish(await pair.restore("r1", PROMPT))
    assert spans.failures == 0
    assert exporter.get_finished_spans() == ()


async def test_nothing_is_kept_of_requests_that_are_over(make_pair, provider) -> None:
    async with make_pair(storage=open_storage("memory:?capacity=64MiB")) as pair:
        spans = trace_requests(pair.engine, provider)
        with provider.get_tracer("caller").start_as_current_span("serve"):
            for number in range(20):
                ready = await pair.restore(f"r{number}", [number, *PROMPT])
                if number % 3:
                    await pair.engine.finish(ready)
                elif number % 2:
                    await pair.engine.abort(f"r{number}")
                else:
                    pair.engine.drop(await pair.engine.retract(ready))
        await pair.engine.wait_settled()
    request_traces = spans._request_traces
    assert not any(
        (
            request_traces.all,
            request_traces._live,
            request_traces._by_number,
            request_traces._open,
            request_traces._spans,
            request_traces._kept,
        )
    )
    assert not any((request_traces._given_away, spans._parents))


async def test_without_tracing_nobody_watches(make_pair) -> None:
    async with make_pair() as pair:
        assert runtime_of(pair.engine).calls.on_begin is None
        assert runtime_of(pair.engine).driver._watchers == (runtime_of(pair.engine).log,)


async def test_tracing_begins_before_the_first_request(make_pair, provider) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", PROMPT)
        with pytest.raises(InvalidRequest, match="before the engine's first one"):
            trace_requests(pair.engine, provider)
        await pair.engine.finish(ready)


async def test_without_opentelemetry_the_extra_is_named(make_pair, provider, monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "opentelemetry" in name else found(name))
    async with make_pair() as pair:
        with pytest.raises(InvalidConfig, match=r"pip install 'tidekv\[otel\]'"):
            trace_requests(pair.engine, provider)
