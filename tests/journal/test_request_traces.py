"""Traces of simulated runs with every fault: each deviation from a plan has a cause."""

from __future__ import annotations

from tidekv import Replayer
from tidekv.engine.trace.causes import EXTENDED
from tidekv.engine.trace.explain import explain
from tidekv.engine.trace.request_trace import RequestTrace
from tidekv.engine.trace.request_traces import read_request_traces

SEEDS = (1, 2, 5)


def test_whatever_fails_in_a_run_has_a_cause(simulate) -> None:
    extends = fallbacks = 0
    for seed in SEEDS:
        told = read_request_traces(Replayer(simulate(seed, 80).path))
        assert len(told.all) >= 80
        for request_trace in told.all:
            check_causes(request_trace, explain(request_trace, now_s=told.last_at_s))
            extends += sum(work.span > 0 for work in request_trace.works)
            fallbacks += len(request_trace.fallbacks)
    assert extends > 10
    assert fallbacks > 100


def check_causes(request_trace: RequestTrace, words: str) -> None:
    taken_back = [work for work in request_trace.works if work.kind == "span" and work.span]
    assert all(work.cause and work.cause != EXTENDED["other"] for work in taken_back), words
    states = [state for _, state in request_trace.states]
    went_back = least = states.count("PREALLOC") - 1
    if states[-3:] == ["TRANSFER", "PREALLOC", "FAILED"] or states[-3:] == ["LOCAL_RESTORE", "PREALLOC", "FAILED"]:
        # Its plan may have raised once more: then it did not wait.
        least -= request_trace.cause.startswith("internal error")
    told = len([note for note in request_trace.fallbacks if "back to the queue" in note.consequence])
    assert least <= told <= went_back, words
    assert all(note.cause and note.consequence for note in request_trace.fallbacks), words
    assert all(f"{note.cause}; {note.consequence}" in words for note in request_trace.fallbacks)
    if request_trace.ended == "FAILED":
        assert request_trace.cause and f": {request_trace.cause}" in words, words
    if taken_back and request_trace.ended == "READY":
        assert request_trace.fallbacks, words
