"""The comparison with whole pairs of servers: one table of both engines, and what is said without one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import pairs
from tidekv import InvalidConfig
from tools.figures_page import RESULTS, peers_table_rows


def printed(folder: Path) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    pairs.print_peers(folder, console)
    return console.export_text()


def test_the_kept_runs_of_both_engines_make_one_table() -> None:
    told = printed(RESULTS)
    for title in (
        "SGLang: no cache",
        "SGLang: HiCache, L2",
        "SGLang: tidekv, L2",
        "vLLM: NixlConnector",
        "vLLM: tidekv",
    ):
        assert title in told
    for row in ("MiB from prefill", "turn 0, p50", "turn 3, p50", "CPU a request: decode scheduler", "wrong or lost"):
        assert row in told
    for peer in ("sglang", "vllm"):
        assert f"commit {json.loads((RESULTS / f'{peer}.json').read_text())['about']['commit']}" in told


def test_an_engine_without_a_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "sglang.json").write_text((RESULTS / "sglang.json").read_text())
    assert "SGLang: no cache" in printed(tmp_path)
    assert "vLLM" not in printed(tmp_path)


def test_without_an_environment_an_engine_is_not_measured_and_the_way_to_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pairs, "ROOT", tmp_path)
    assert pairs.compare_peers(dict.fromkeys(pairs.PEERS), tmp_path) == 0
    assert "vllm is not measured: give --vllm DIR" in capsys.readouterr().out
    with pytest.raises(InvalidConfig, match="there is no bin/python"):
        pairs.compare_peers({"vllm": tmp_path / "nowhere"}, tmp_path)


def stand_in(folder: Path, program: str) -> Path:
    """An environment whose Python runs this program instead of a pair; its arguments are those of the pair."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\n{program}")
    python.chmod(0o755)
    return folder


def test_each_engine_serves_the_same_conversations_and_a_failure_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = (
        "import json, sys\n"
        "open(sys.argv[-1] + '.arguments', 'w').write(json.dumps(sys.argv[1:-1]))\n"
        "report = {'about': dict.fromkeys(('date', 'commit', 'machine'), '-'), 'figures': []}\n"
        "json.dump(report, open(sys.argv[-1], 'w'))\n"
    )
    folders = {
        "sglang": stand_in(tmp_path / "a", write),
        "vllm": stand_in(tmp_path / "b", write + "sys.exit(1)\n"),
    }
    assert pairs.compare_peers(folders, tmp_path) == 1
    given = {peer: json.loads((tmp_path / f"{peer}.json.arguments").read_text()) for peer in folders}
    assert [words[1] for words in given.values()] == ["benchmarks.sglang_pair", "benchmarks.vllm_pair"]
    assert all(words[-len(pairs.CONVERSATIONS) - 1 : -1] == list(pairs.CONVERSATIONS) for words in given.values())
    told = capsys.readouterr().err
    assert "vllm: exit code 1" in told and "sglang:" not in told


def test_a_run_past_its_limit_is_asked_to_end_its_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "LIMIT_S", 0.1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: pytest.fail("it was killed, and its servers were not"))
    folder = stand_in(tmp_path / "late", "import time\ntime.sleep(3600)\n")
    assert pairs.serve("vllm", folder / "bin" / "python", tmp_path / "none.json") == "not done after 0.1 s"


def test_pairs_that_did_not_serve_by_turns_are_compared_by_bytes_only() -> None:
    report = json.loads((RESULTS / "sglang.json").read_text())
    with_times = peers_table_rows({"sglang": report})[1]
    report["about"]["command"] = report["about"]["command"].replace(" --alternate", "")
    without = peers_table_rows({"sglang": report})[1]
    assert any(cells[0].startswith("ms ") for cells in with_times)
    assert [cells[0] for cells in without] == ["MiB from prefill", "answers", "wrong or lost answers, HTTP errors"]
