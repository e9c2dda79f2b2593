"""Metrics and journal never disagree, whatever fails: live, replayed, and counted once more in another way."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.recount import counters_of, recount, scraped
from tidekv import Replayer
from tidekv.engine.metrics import MetricsCollector, MetricsFold
from tidekv.engine.trace.request_traces import RequestTraces
from tidekv.states.records.causes import DECLINED, LOAD_CAUSES

PAGE_BYTES = 1024


def samples_of(fold: MetricsFold):  # type: ignore[no-untyped-def]  # As in recount.py.
    registry = CollectorRegistry()
    registry.register(MetricsCollector(fold, page_bytes=PAGE_BYTES))
    return scraped(generate_latest(registry).decode())[1]


@pytest.mark.parametrize("seed", range(1, 6))
def test_live_replayed_and_recounted_metrics_are_the_same(simulate, seed: int) -> None:
    tape = simulate(seed, 80)
    live = samples_of(tape.fold)
    replayer = Replayer(tape.path)
    again = MetricsFold(replayer.core)
    naive = recount(replayer, again, page_bytes=PAGE_BYTES)
    replayed = samples_of(again)
    assert replayed == live
    assert counters_of(replayed) == pytest.approx(naive)
    # Nothing is kept of requests that are over.
    assert not again._since or replayer.core.state.requests
    assert set(again._received) <= set(replayer.core.state.requests)


@pytest.mark.parametrize("seed", range(1, 3))
def test_cuts_by_cause_are_those_that_stories_tell(simulate, seed: int) -> None:
    replayer = Replayer(simulate(seed, 80).path)
    fold, request_traces = MetricsFold(replayer.core), RequestTraces(replayer.core)
    replayer.run(fold, request_traces)
    told = Counter(
        work.cause
        for request_trace in request_traces.all
        for work in request_trace.works
        if work.kind == "span" and work.span
    )
    assert sum(fold.cuts.values()) == sum(told.values()) == replayer.core.state.counters.get("extends", 0)
    assert set(fold.cuts) <= {*LOAD_CAUSES, "fetch_failed", "start_raised"}
    declined = sum(plan.declined_pages for request_trace in request_traces.all for plan in request_trace.plans)
    assert sum(fold.declined.values()) == declined
    assert set(fold.declined) <= set(DECLINED)
