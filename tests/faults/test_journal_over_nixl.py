"""Journals of runs over NIXL, a killed prefill worker and the main job among them, replay to where the run ended."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from demo import main_job
from demo.blocks import TraceOptions
from tests.support.fault_process import Done, Halt, Halted
from tests.support.inside import core_of
from tests.support.waits import LIMIT_S
from tidekv import PrefillCause, Replayer
from tidekv.engine.journal.digest import final_state
from tidekv.engine.trace.explain import explain
from tidekv.engine.trace.request_traces import RequestTraces

pytestmark = pytest.mark.nixl

PAGES = 24


async def test_run_with_a_killed_prefill_worker_replays_and_is_explained(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.journal"
    first, second = await asyncio.gather(spawn_prefill(name="first"), spawn_prefill(name="second"))
    addresses = [first.ready.address, second.ready.address]
    async with asyncio.timeout(LIMIT_S), decode_over_nixl(addresses, journal_path=str(path)) as decode:
        await first.ask(Halt(after_checks=PAGES // 2), Done)
        waiting = {n: decode.start(f"r{n}", prompt(n, PAGES, tail=n)) for n in range(3)}
        await first.line.hear(Halted)
        first.signal(signal.SIGKILL)
        assert await first.wait_ended() == -signal.SIGKILL
        for number, restore in waiting.items():
            await decode.engine.finish(await restore, [number])
        await decode.assert_nothing_held()
    replayer = Replayer(path)
    request_traces = RequestTraces(replayer.core)
    replayer.run(request_traces)
    assert replayer.torn is None
    assert final_state(replayer.core) == final_state(core_of(decode.engine))
    for number in range(3):
        words = explain(request_traces.named(f"r{number}")[0], now_s=request_traces.last_at_s)
        assert any(cause.value in words for cause in PrefillCause), words
        assert "READY" in words


@pytest.mark.usefixtures("warm_children")
async def test_recording_replayed_by_the_main_job_replays_from_its_journal(tmp_path: Path) -> None:
    recording, path = tmp_path / "recording.jsonl", tmp_path / "run.journal"
    # The format of Mooncake: each id is a block of 512 tokens; requests share their first blocks.
    requests = [
        {"timestamp": 0, "input_length": 1030 + 40 * n, "output_length": 20, "hash_ids": [n % 3, 10 + n % 2, 100 + n]}
        for n in range(12)
    ]
    recording.write_text("".join(json.dumps(request) + "\n" for request in requests))
    tiers = main_job.TierOptions(compare=False, journal=str(path), l1_pages=200, l2_pages=400)
    result = await main_job.run_trace(recording, TraceOptions(length_scale=0.25), tiers)
    assert result.failures == []
    replayed = Replayer(path).run()
    assert replayed.complete
    assert replayed.events > 8 * len(requests)
