"""The main job as its users start it: two processes over NIXL, exact tokens, verified pages, clear errors."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from demo import main_job
from demo.blocks import TraceOptions
from demo.conversations import SOURCES, Lengths, WorkloadOptions
from demo.model import ModelShape
from demo.prefill_process import PrefillOrder, PrefillProcess
from demo.report import report
from tidekv.backends.layout import KVLayout
from tidekv.engine.cli.main import app
from tidekv.engine.cli.usage import run_app
from tidekv.states.errors import InvalidConfig, InvalidRequest, TransferFailed

SHAPE = ModelShape(num_layers=2, hidden_size=64, mlp_size=128, num_heads=2, num_kv_heads=1)
CHATS = WorkloadOptions(conversations=6, rounds=3, system=Lengths(60), user=Lengths(24, 0.5, 4), output=Lengths(8))


def text_of(result: main_job.JobResult, *, is_model: bool) -> str:
    out = io.StringIO()
    Console(width=160, file=out).print(report(result, is_model=is_model))
    return out.getvalue()


@pytest.mark.usefixtures("warm_children")
@pytest.mark.nixl
@pytest.mark.slow
async def test_conversations_in_two_processes_give_the_tokens_of_one() -> None:
    seen: dict[str, int] = {}

    def progress(name: str, count: int) -> None:
        seen[name] = seen.get(name, 0) + count

    tiers = main_job.TierOptions(page_size=8, in_flight_max=2)
    result = await main_job.run_conversations(CHATS, tiers, shape=SHAPE, progress=progress)
    assert result.failures == []
    assert seen == {main_job.CACHED: 18, main_job.UNCACHED: 18, main_job.COMPARED: 18}
    cached, uncached = result.phases
    assert main_job.sources_used(cached) == list(SOURCES)
    assert main_job.sources_used(uncached) == ["transfer"]
    # Bytes on the wire are the pages of the deltas, counted at the sender.
    assert cached.bytes_sent == cached.delta_pages * result.layout.page_bytes
    assert uncached.bytes_sent == uncached.prompt_pages * result.layout.page_bytes
    assert cached.bytes_sent < uncached.bytes_sent / 2
    assert result.compared == 2 * 18 * 8
    assert result.smallest_margin > 1e-9
    text = text_of(result, is_model=True)
    assert "All 288 generated tokens equal those of one process's generate() (float64" in text
    assert "Nothing is held at the end" in text


@pytest.mark.usefixtures("warm_children")
@pytest.mark.nixl
@pytest.mark.parametrize("computed_ahead", [False, True])
async def test_a_recording_in_two_processes_has_the_right_bytes_in_every_page(
    tmp_path: Path, computed_ahead: bool
) -> None:
    source, lines = random.Random(3), []
    for number in range(20):
        ids = [*range(source.randrange(6)), *(1000 * number + block for block in range(1, 4))]
        lines.append({"timestamp": 0, "input_length": 512 * len(ids) - 9, "output_length": 90, "hash_ids": ids})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiers = main_job.TierOptions(
        l1_pages=150,
        l2_pages=130,
        in_flight_max=3,
        journal=str(tmp_path / "journal"),
        computed_ahead=computed_ahead,
    )
    result = await main_job.run_trace(path, TraceOptions(length_scale=1 / 8), tiers)
    assert result.failures == []
    cached, uncached = result.phases
    assert cached.requests == uncached.requests == 20
    assert result.compared == cached.prompt_pages + uncached.prompt_pages
    assert 0 < cached.prompt_tokens - cached.tokens["transfer"] <= result.reusable_tokens
    assert cached.bytes_sent < uncached.bytes_sent
    assert (tmp_path / "journal").stat().st_size > 0
    assert f"All {result.compared:,} restored pages have the bytes" in text_of(result, is_model=False)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.nixl
def test_a_bad_line_in_the_middle_ends_the_job_and_its_child(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, "hash_ids": [1, 2, 3]}) + "\n")
    answer = CliRunner().invoke(app, ["run", "--trace", str(path), "--no-compare"])
    assert isinstance(answer.exception, InvalidRequest)
    assert "trace.jsonl, line 2: hash_ids has 3 ids, but 600 tokens" in str(answer.exception)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.nixl
async def test_a_prefill_worker_that_cannot_start_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=8)
    order = PrefillOrder(name="p", fingerprint="", layout=layout, num_pages=0, chunk_tokens=8, vocabulary=512)
    with pytest.raises(TransferFailed, match="the prefill worker exited with code 1; see its output above"):
        async with PrefillProcess(order):
            raise AssertionError("it must not come up")
    assert "InvalidConfig" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "batch"], "--kind must be chat or agents, not 'batch'"),
        (["--damage", "l4"], "--damage must be l1, l2, l3 or transfer, not 'l4'"),
        (["--l1-pages", "-1"], "--l1-pages must be a whole number, 0 or more, not '-1'"),
        (["--page-size", "0"], "--page-size must be a whole number, 1 or more, not '0'"),
        (["--rounds", "0"], "--rounds must be a whole number, 1 or more, not '0'"),
        (["--storage", "fil:/tmp"], "there is no storage engine 'fil'"),
        (["--trace", "nowhere.jsonl"], "trace nowhere.jsonl cannot be read: No such file or directory"),
        (["--trace", "nowhere.jsonl", "--length-scale", "fast"], "--length-scale must be a number or a fraction"),
        (["--trace", "nowhere.jsonl", "--length-scale", "2"], "length_scale must be above 0 and at most 1"),
    ],
)
def test_wrong_options_are_refused_before_the_first_progress_bar(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tidekv: ") and err.endswith("; see 'tidekv run --help'\n")
    assert message in err


def test_wrong_options_are_refused_before_torch_is_imported() -> None:
    script = """
import sys
from tidekv.engine.cli.main import app
from tidekv.engine.cli.usage import run_app
for arguments in (["--storage", "fil:/tmp"], ["--damage", "l4"], ["--trace", "nowhere.jsonl"]):
    print(run_app(app, ["run", *arguments]), {"torch", "transformers", "nixl", "matplotlib"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["2 set()"] * 3, done.stderr


def test_a_report_names_what_failed() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=8)
    result = main_job.JobResult(layout, 4, 4, 1, failures=["run: not given back at the end: {'rooms': 1}"])
    text = text_of(result, is_model=True)
    assert "FAILED: 1 findings" in text
    assert "{'rooms': 1}" in text
    assert "equal those" not in text
    with pytest.raises(InvalidConfig, match="l2_pages must be at least 0"):
        main_job.TierOptions(l2_pages=-1)
