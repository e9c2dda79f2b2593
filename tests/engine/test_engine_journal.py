"""Journals of running engines: they replay to the state that the engine ended in, and hold no more than they may."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.inside import core_of
from tidekv import Replayer, open_storage
from tidekv.engine.journal.digest import final_state
from tidekv.engine.trace.bars import one_request
from tidekv.engine.trace.explain import explain
from tidekv.engine.trace.page import html_page
from tidekv.engine.trace.request_traces import read_request_traces

PROMPT = list(range(100, 122))


async def test_journal_of_an_engine_replays_to_the_state_that_it_ended_in(make_pair, tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    storage = open_storage("memory:?capacity=64MiB")
    async with make_pair(storage=storage, fetch_run_pages=2, journal_path=str(path), device_pages=16) as pair:
        for turn in range(12):
            prompt = [*PROMPT[: 8 + turn], turn, *range(300 + turn % 3, 310 + turn % 3)]
            ready = await pair.restore(f"r{turn}", prompt)
            await pair.finish(ready, prompt, [1, 2, 3, 4, 5, turn])
        ready = await pair.restore("again", PROMPT)
        retracted = await pair.engine.retract(ready, [7])
        resumed = await pair.engine.resume(retracted)
        await pair.finish(resumed, [*PROMPT, 7], [8])
        await pair.engine.flush(("l1", "l2"))
    replayer = Replayer(path)
    assert replayer.run().complete
    assert final_state(replayer.core) == final_state(core_of(pair.engine))
    assert replayer.header.page_keys == "digests"


async def test_what_a_caller_does_to_what_it_was_given_changes_no_journal(make_pair, tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    async with make_pair(journal_path=str(path)) as pair:
        ready = await pair.restore("r", PROMPT)
        ready.sources.clear()
        await pair.finish(ready, PROMPT, [1])
    assert Replayer(path).run().complete


@pytest.mark.parametrize("with_tokens", [False, True])
async def test_tokens_are_in_a_journal_only_where_they_were_asked_for(make_pair, tmp_path: Path, with_tokens) -> None:
    path = tmp_path / "run.journal"
    prompt = [7_000_001, 7_000_002, 7_000_003, 7_000_004, 5]
    async with make_pair(journal_path=str(path), journal_tokens=with_tokens) as pair:
        ready = await pair.restore("r", prompt)
        await pair.finish(ready, prompt, [1])
    packed = b"".join(token.to_bytes(4, "little") for token in prompt[:3])
    assert (base64.b64encode(packed)[:15] in path.read_bytes()) is with_tokens
    assert Replayer(path).run().complete


async def test_a_blocked_event_loop_is_a_fact_and_prefill_is_not_blamed_for_it(make_pair, tmp_path: Path) -> None:
    path = tmp_path / "run.journal"

    async def handler_beside_the_request() -> None:
        time.sleep(0.5)  # noqa: ASYNC251  # What blocks the loop.

    async with make_pair(journal_path=str(path), loop_stall_report_s=0.05) as pair:
        restoring = asyncio.create_task(pair.restore("r", PROMPT))
        blocking = asyncio.create_task(handler_beside_the_request())
        ready = await restoring
        await blocking
        await pair.finish(ready, PROMPT, [1])
    traces = read_request_traces(Replayer(path))
    (trace,) = traces.all
    assert sum(stall.ended_at_s - stall.began_at_s for stall in trace.stalls) >= 0.4
    words = explain(trace, now_s=traces.last_at_s)
    assert "Decode's event loop was blocked for " in words
    assert "while decode's own event loop was blocked" in words
    assert ", for prefill" not in words
    assert "What would have helped: an event loop of decode that is not blocked" in words
    assert "handler_beside_the_request" in words
    bars = io.StringIO()
    Console(file=bars, width=200).print(one_request(trace, now_s=traces.last_at_s, width=60))
    assert "loop blocked" in bars.getvalue()
    assert "event loop of decode blocked" in html_page(traces.all, now_s=traces.last_at_s, title="a run")
