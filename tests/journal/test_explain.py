"""`explain` names the injected cause of everything that can go another way than planned: no kind is without a row."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import tidekv.states
from simulation.faults import FAULTS
from tests.support import explained_components, explained_requests, explained_tiers  # noqa: F401 - rows of the table
from tests.support.explained import CASES, Play
from tidekv import Replayer
from tidekv.engine.trace import causes
from tidekv.engine.trace.explain import explain
from tidekv.engine.trace.request_traces import read_request_traces
from tidekv.states import events
from tidekv.states.errors import PrefillCause
from tidekv.states.loads import loads
from tidekv.states.records.causes import DECLINED, LOAD_CAUSES, PEER_DECLINED
from tidekv.states.records.stages import State
from tidekv.states.request import guards_and_actions
from tidekv.states.request.table import TRANSITIONS


def words_for(path: Path, request_id: str = "r1") -> str:
    request_traces = read_request_traces(Replayer(path))
    return "\n".join(
        explain(request_trace, now_s=request_traces.last_at_s) for request_trace in request_traces.named(request_id)
    )


@pytest.mark.parametrize("name", CASES)
def test_words_name_the_injected_cause(play: Play, name: str) -> None:
    inject, expected, counters = CASES[name]
    inject(play)
    words = words_for(play.tape.end())
    for word in expected:
        assert word in words, f"{word!r} is not said in:\n{words}"
    counted = play.core.statistics()
    assert all(counted.get(name) for name in counters), counted
    assert "; ." not in words and "None" not in words


@pytest.mark.parametrize("name", CASES)
def test_only_requests_that_did_not_fail_get_advice_on_speed(play: Play, name: str) -> None:
    CASES[name][0](play)
    request_traces = read_request_traces(Replayer(play.tape.end()))
    for request_trace in request_traces.all:
        words = explain(request_trace, now_s=request_traces.last_at_s)
        assert request_trace.ended != "FAILED" or "What would have helped" not in words


NO_CAUSE = {
    # What comes for no request, or twice, changes nothing for any request.
    "frames_foreign", "chunks_foreign", "chunks_repeated", "calls_late",
    # Storage is asked again: nothing went wrong any more.
    "l3_breaker_closed",
    # What is written back or dropped belongs to no request being served, and what was fetched ahead is no trouble.
    "l1_pages_dropped", "l2_pages_dropped", "pages_fetched_ahead", "component_pages_fetched_ahead",
    "component_pages_stored", "l3_puts_declined", "pages_stored_again",
    # Nor is what several requests are sent once.
    "shared_transfer_pages", "shared_component_pages",
    # What other workers read, or take from a worker that drains, is of none of these requests.
    "pages_shared", "pages_handed", "pages_taken",
    # Offers, hints and what an earlier process left belong to no request.
    "offered_pages_declined", "pages_passed", "pages_passed_lost", "hints_rejected", "pages_prefetched",
    "l2_pages_found",
}  # fmt: skip


def test_every_counter_of_trouble_has_a_row() -> None:
    folder = Path(next(iter(tidekv.states.__path__)))
    pattern = re.compile(r'count\(\s*"(\w+)"(?: if \w+\(\w+\) else "(\w+)")?')
    found = [names for file in folder.rglob("*.py") for names in pattern.findall(file.read_text())]
    counters = {name for names in found for name in names if name}
    assert len(counters) > 20
    counted = {name for _, _, counters in CASES.values() for name in counters}
    assert counters - {"device", "host"} == counted | NO_CAUSE


def test_every_cause_is_said_in_some_row() -> None:
    said = "\n".join(word for _, expected, _ in CASES.values() for word in expected)
    for meaning in (*DECLINED.values(), *LOAD_CAUSES.values(), *PEER_DECLINED.values()):
        assert meaning in said, meaning
    for kind, words in causes.LATE.items():
        assert words in said, kind
    for kind in causes.NAMES:
        assert f"{causes.NAMES[kind]} failed" in said, kind
        assert f"starting {causes.NAMES[kind]} raised" in said, kind
    for what in ("storage", "host", "cache", "growth", "nothing"):
        assert any(word in causes.AFTER_RAISES[what] for word in said.splitlines()), what
    failures = re.findall(r'_fail\(request, "([^"]+)"', inspect.getsource(guards_and_actions))
    assert len(failures) == 3
    failures += [PrefillCause.REFUSED, PrefillCause.FAILED, PrefillCause.LOST]
    for cause in failures:
        assert f"It failed: {cause}" in said, cause
    for cause in re.findall(r'_reclaim\(load, "([^"]+)"', inspect.getsource(loads)):
        assert cause in said or cause in ("no request needs it", "its request has left")


def test_every_way_back_and_every_way_to_fail_is_taken_by_a_row(play_of_rows: Any) -> None:
    taken = play_of_rows(CASES)
    rows = {
        (row.event.__name__, source, row.dest)
        for row in TRANSITIONS
        for source in row.source
        if row.dest in (State.PREALLOC, State.FAILED)
        # No event finds a request in MATCH: the step that brings it there makes the plan, which may raise.
        and (source is not State.MATCH or row.event is events.TransitionRaised)
    }
    assert len(rows) > 20
    assert rows <= taken, sorted(f"{event} in {source.value}" for event, source, _ in rows - taken)


FAULT_ROWS = {
    "query_fails": "query_fails",
    "query_raises": "query_raises",
    "query_is_slow": "query_takes_longer_than_it_is_worth",
    "query_is_late": "query_is_late",
    "query_is_stuck": "query_is_late",
    "query_promises_too_much": "fetch_is_short",
    "fetch_fails": "fetch_fails",
    "fetch_raises": "fetch_raises",
    "fetch_is_short": "fetch_is_short",
    "fetch_is_corrupt": "fetch_is_short",
    "fetch_is_late": "fetch_is_late",
    "fetch_is_stuck": "fetch_is_late",
    "page_is_lost": "fetch_is_short",
    "store_fails": "put_fails",
    "store_raises": "put_raises",
    "store_is_partial": "put_is_partial",
    "store_is_late": "put_is_late",
    "store_is_stuck": "put_is_late",
    "probe_fails": "breaker_is_open",
    "policy_changes": "policy_changes",
    "storage_is_detached": "storage_is_detached",
    "copy_in_fails": "copy_fails",
    "copy_in_raises": "copy_raises",
    "copy_in_is_late": "copy_is_late",
    "copy_in_is_stuck": "copy_is_late",
    "copy_out_fails": "backup_fails",
    "copy_out_raises": "backup_raises",
    "copy_out_is_late": "backup_is_late",
    "component_copy_fails": "component_copy_fails",
    "component_copy_raises": "component_copy_raises",
    "component_copy_is_late": "component_copy_is_late",
    "component_copy_is_stuck": "component_copy_is_late",
    "component_tier_is_lost": "component_fetch_fails",
    "connect_fails": "promise_cannot_be_sent",
    "room_is_refused": "prefill refuses in TRANSFER, and there is another",
    "extend_is_refused": "extend_is_refused",
    "room_fails": "prefill fails in TRANSFER, and there is another",
    "room_fails_settled": "prefill fails in TRANSFER, and there is another",
    "peer_crashes": "prefill is_dead in TRANSFER, and there is another",
    "peer_is_silent": "prefill_is_at_its_quota",
    "peer_is_partitioned": "prefill is_lost in TRANSFER, and there is another",
    "abort": "the caller aborts in TRANSFER",
    "abort_at_once": "the caller aborts in PREALLOC",
    "abort_when_ready": "caller_aborts_when_ready",
    "deadline": "the deadline passes in TRANSFER",
    "retract": "request_is_retracted_and_resumed",
    "recompute_fails": "recompute_fails",
    "recompute_raises": "recompute_raises",
    "host_page_is_flipped": "host_page_is_damaged",
    "sent_page_is_flipped": "sent_page_is_damaged",
    "rule_raises": "a rule raises once",
    "neighbour_fails": "peer_fails",
    "neighbour_lies": "peer_fails",
    "neighbour_raises": "peer_raises",
    "neighbour_is_late": "peer_is_late",
    "neighbour_is_stuck": "peer_is_late",
}
FAULTS_WITHOUT_CAUSE = {
    # Nothing goes another way than planned: it only takes longer, and the times show it.
    "promise_is_slow", "write_is_slow", "aux_is_slow", "drain_is_slow", "recompute_is_slow", "clock_is_late",
    "component_write_is_slow",
    # A miss is a miss, whatever made it.
    "query_promises_too_little", "storage_forgets", "flush", "no_cache", "output_is_dropped", "retracted_is_dropped",
    "pages_are_not_offered", "component_is_not_left", "all_is_stored",
    # It is not believed, and nothing follows from it.
    "query_is_nonsense", "fetch_reports_nonsense", "outcome_repeats", "frame_repeats", "frame_is_foreign",
    "frame_is_of_old_generation", "frame_of_wrong_rank", "frame_of_wrong_span", "chunk_skips_pages",
    "abort_of_nothing", "id_returns", "same_id_elsewhere", "neighbour_reports_nonsense",
    # No request of this worker waits for them.
    "share_fails", "share_raises", "share_is_stuck", "neighbour_misses_a_rank", "neighbour_asks_otherwise",
    "neighbour_refuses", "neighbour_is_full", "neighbour_takes_nonsense", "neighbour_takes_nothing",
    "neighbour_raises_at_offer",
    # The other ranks say so, or a refusal that no core takes.
    "rank_lags", "rank_dies", "rank_misses_a_call", "rank_leaves_otherwise", "rank_holds_more",
}  # fmt: skip


def test_every_fault_of_the_simulation_has_a_row_or_no_cause() -> None:
    assert set(FAULT_ROWS) | FAULTS_WITHOUT_CAUSE == set(FAULTS)
    assert set(FAULT_ROWS.values()) <= set(CASES)


def test_plan_and_sources_are_told_with_their_numbers(play: Play) -> None:
    copy = play.plan_with_host("r1", tokens=b"aabbccddeef")
    play.take(events.CopyEnded, op=copy.op)
    play.bring_everything("r1")
    words = words_for(play.tape.end())
    assert "matched 0 pages in L1, 4 in L2, 0 in L3; promised 8 tokens, asked prefill for 2 pages" in words
    assert "Tokens by source: 8 from host memory (L2), 3 from prefill." in words


def test_hints_about_a_prompt_are_told_with_their_outcome_also_those_before_it(play: Play) -> None:
    def hint(call: int, keys: bytes) -> None:
        play.take(
            events.HintReceived, call=call, action="pin", namespace="", keys=keys, tier="host", ttl_s=9.0, pages_max=8
        )

    hint(1, b"aabb")
    copy = play.plan_with_host("r1", tokens=b"aabbccddeef")
    hint(2, b"aabbcc")
    hint(3, b"zz")
    play.take(events.CopyEnded, op=copy.op)
    play.bring_everything("r1")
    words = words_for(play.tape.end())
    assert re.search(r"Before it arrived, \d+\.0 ms earlier, a hint to pin the first 2 pages was missing, for 0", words)
    assert re.search(r"Meanwhile, at \d+\.0 ms, a hint to pin the first 3 pages was accepted, for 3 pages", words)
    assert "first 1 pages" not in words
