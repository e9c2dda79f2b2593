"""Journals of whole runs over NIXL end where the runs ended: `tidekv run`, and a recording with a killed prefill."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from demo import main_job
from demo.blocks import TraceOptions
from demo.compute import ComputeThread
from demo.phase import Pass, Phase
from demo.trace_run import TraceRun
from demo.traces import read_trace
from tests.support.fault_process import Done, Halt, Halted
from tests.support.inside import core_of
from tests.support.waits import LIMIT_S
from tidekv import DecodeEngine, Replayer, open_storage
from tidekv.engine.cli import main
from tidekv.engine.journal.digest import final_state
from tidekv.engine.journal.format import EndLine
from tidekv.engine.journal.reader import JournalReader
from tidekv.states import events

pytestmark = pytest.mark.nixl

REQUESTS = 45
SERVED_BEFORE = 15
"""So many requests are over when the prefill worker is killed."""


def write_recording(path: Path) -> Path:
    """Sessions that share blocks of 512 tokens, in the format of Mooncake."""
    words, lines = random.Random(11), []
    for number in range(REQUESTS):
        shared = range(words.randrange(1, 5))
        ids = [*shared, *(1000 * (number % 9) + block for block in range(1, 2 + number // 9))]
        lines.append({"timestamp": number, "input_length": 512 * len(ids) - 9, "output_length": 90, "hash_ids": ids})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check_replay(path: Path, engine: DecodeEngine) -> list[events.Event]:
    """The journal replays identically, and ends with index, pools and counters of the run; returns its events."""
    lived = final_state(core_of(engine))
    (dumped,) = [line.final for line in JournalReader(path).lines() if isinstance(line, EndLine)]
    assert dumped == lived
    replayer = Replayer(path)
    taken = [step.event for step in replayer.steps()]
    assert replayer.torn is None
    assert final_state(replayer.core) == lived
    assert Replayer(path).run().complete
    replayer.core.check()
    return taken


@pytest.mark.slow
async def test_recording_whose_prefill_worker_is_killed_in_its_middle(
    spawn_prefill: Any, decode_over_nixl: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.journal"
    recording = write_recording(tmp_path / "recording.jsonl")
    first, second = await asyncio.gather(spawn_prefill(name="first"), spawn_prefill(name="second"))
    addresses = [first.ready.address, second.ready.address]
    is_in_the_middle = asyncio.Event()
    served = 0

    def progress(_: str, count: int) -> None:
        nonlocal served
        served += count
        if served >= SERVED_BEFORE:
            is_in_the_middle.set()

    async def kill() -> None:
        await is_in_the_middle.wait()
        await first.ask(Halt(after_checks=2), Done)
        await first.line.hear(Halted)
        first.signal(signal.SIGKILL)
        assert await first.wait_ended() == -signal.SIGKILL

    storage = open_storage("memory:?capacity=64MiB")
    opened = decode_over_nixl(addresses, device_pages=120, host_pages=150, storage=storage, journal_path=str(path))
    async with asyncio.timeout(LIMIT_S), opened as decode:
        with ComputeThread("decode") as compute:
            run = TraceRun(
                Pass(
                    engine=decode.engine,
                    prefill=addresses,
                    phase=Phase("killed"),
                    in_flight_max=3,
                    progress=progress,
                ),
                decode.device,
                compute,
                vocabulary=2**31,
            )
            async with asyncio.TaskGroup() as group:
                killing = group.create_task(kill())
                await run.run(read_trace(recording, TraceOptions(length_scale=1 / 8)))
                assert killing.done(), "the prefill worker was killed while requests were served"
        assert run.verdicts.wrong == []
        assert served == REQUESTS
        await decode.assert_nothing_held()
    taken = check_replay(path, decode.engine)
    kinds = {type(event) for event in taken}
    assert kinds & {events.WriterLost, events.WriterDead}
    assert {events.PagesFetched, events.PagesStored, events.CopyEnded} <= kinds
    lost_at = next(n for n, event in enumerate(taken) if isinstance(event, events.WriterLost | events.WriterDead))
    finished = [isinstance(event, events.FinishRequested) for event in taken]
    assert sum(finished[:lost_at]) >= SERVED_BEFORE
    assert sum(finished) == REQUESTS


@pytest.mark.usefixtures("warm_children")
@pytest.mark.slow
def test_journal_of_tidekv_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "run.journal"
    engines: list[DecodeEngine] = []

    class Seen(DecodeEngine):
        def __init__(self, *args: Any, **parts: Any) -> None:
            super().__init__(*args, **parts)
            engines.append(self)

    monkeypatch.setattr(main_job, "DecodeEngine", Seen)
    options = ["--conversations", "5", "--rounds", "3", "--no-compare", "--journal", str(path)]
    monkeypatch.setattr("sys.argv", ["tidekv", "run", *options])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0, capsys.readouterr().out
    (engine,) = engines
    taken = check_replay(path, engine)
    assert sum(isinstance(event, events.RequestArrived) for event in taken) >= 15
    # On a busy machine prefill may be sooner than storage with everything.
    assert {events.CopyEnded, events.ChunkReceived} <= {type(event) for event in taken}
    monkeypatch.setattr("sys.argv", ["tidekv", "replay", str(path)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.endswith(f"identical: {len(taken)} events, final index, pools and counters\n")
