"""No page states a figure that a program has not written."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from demo.artefact import about
from tidekv.engine.cli.main import app
from tools import figures_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
UNIT = r"(?:(?:ms|µs|us|ns|%|times|[KMG]i?B/s|Gb/s)(?![\w/])|\u00d7)"
FIGURE = re.compile(rf"(?<![\w.,-])\d[\d,.]*(?:\s*(?:/|to|and)\s*\d[\d,.]*)*\s*{UNIT}|(?<![\w.,-])\d+\.\d+ s(?![\w/])")
"""A number with a unit of time, speed or ratio. A size, a count or whole seconds are mostly a constant of the code."""
NUMBER = re.compile(r"[~≈]?\d[\d,.]*(?: / \d[\d,.]*)*[\u00d7%]?")
CODE = "a constant or a limit of the code"
ASKED = "a bound that is asked for"
ALLOWED: dict[str, dict[str, str]] = {
    "docs/journal.md": {"at most the last 0.1 s are missing": CODE},
    "docs/observability.md": {"buckets from 0.5 ms to 30 s": CODE},
    "docs/operating.md": {"| below 2 ms |": ASKED},
    "docs/storage.md": {
        "would take more than 50 ms,": CODE,
        "times their deviation, at least 2 ms. It is at most": CODE,
        "50% of the time that storage can save; 50 ms while": CODE,
    },
}
"""Parts of lines that are no measured figures, by page, and what they are."""


def stated_figures(text: str) -> list[str]:
    """Return the lines that state figures, outside of generated parts, programs and inline code."""
    text = re.sub(r"<!-- Generated.*?<!-- End[^>]*-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = []
    for line in text.splitlines():
        words = re.sub(r"`[^`]*`", "", line)
        cells = [cell.strip() for cell in words.split("|")[1:-1]] if line.startswith("|") else []
        if FIGURE.search(words) or sum(bool(NUMBER.fullmatch(cell)) for cell in cells) > 1:
            found.append(line)
    return found


def test_pages_state_figures_in_generated_parts_only() -> None:
    told = {}
    for page in PAGES:
        allowed = ALLOWED.get(page, {})
        lines = [
            line for line in stated_figures((ROOT / page).read_text()) if not any(part in line for part in allowed)
        ]
        if lines:
            told[page] = lines
    assert told == {}, "generate them from a file (python -m tools.figures_page), or leave them out"


def test_what_is_allowed_stands_in_its_page() -> None:
    for page, allowed in ALLOWED.items():
        lines = stated_figures((ROOT / page).read_text())
        assert [part for part in allowed if not any(part in line for line in lines)] == [], page


@pytest.mark.parametrize(
    "line",
    [
        "The median is 5.0 times shorter.",
        "It takes 36 ms.",
        "| put | 259 | 411 | 3.1 |",
        "| 4 → 2 | 2.06 GB/s |",
        "p50 is 80 to 107 µs there",
        "0.48\u00d7 and more",
        "| idle | 2.56 % |",
    ],
)
def test_a_figure_is_seen(line: str) -> None:
    assert stated_figures(line) == [line]
    assert stated_figures(f"<!-- Generated: by a tool -->\n{line}\n<!-- End of the figures. -->") == []
    assert stated_figures(f"```\n{line}\n```") == []


@pytest.mark.parametrize(
    "line", ["pages of 64 KiB", "needs 3 GB of disk", "| `rooms` | 64 |", "version 1.5.1", "`put_s=30 s`"]
)
def test_a_size_or_a_count_is_no_figure(line: str) -> None:
    assert stated_figures(line) == []


@pytest.mark.parametrize("page", figures_page.PAGES)
def test_the_figures_of_a_page_are_generated(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text == figures_page.with_figures(page, text), f"run: python -m tools.figures_page {page}"


def test_each_kept_figure_has_command_commit_date_and_machine() -> None:
    for path in figures_page.RESULTS.glob("*.json"):
        report = json.loads(path.read_text())
        told = report["about"] if "about" in report else report["copies"]["about"]
        assert told["date"] and told["commit"], path.name
        assert {"command", "machine"} <= set(told) or {"card", "driver"} <= set(told), path.name


def test_a_row_is_shown_if_a_program_has_written_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_page, "RESULTS", tmp_path)
    assert "simulated" not in figures_page.readme_table()
    command = ["simulate", "--seed", "1", "--seeds", "1", "--requests", "20", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["tidekv", *command, "--answers", "somewhere", "--json=somewhere.json"])
    assert "somewhere" not in str(about())
    monkeypatch.setattr(sys, "argv", ["tidekv", *command, "--json", "somewhere.json"])
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "simulate.json")])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "simulate.json").read_text())
    assert set(report["about"]) == {"command", "commit", "date", "machine", "load"}
    assert all(report["about"][name] for name in ("command", "date", "machine"))
    assert report["about"]["command"] == "tidekv simulate --seed 1 --seeds 1 --requests 20 --jobs 1"
    table = figures_page.readme_table()
    assert f"| 20 simulated requests, {report['figures']['faults']:,} faults of " in table
    assert f"({report['about']['date']}, commit " in table


def test_faults_of_several_runs_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: str, fault: str, variant: str, **changes: object) -> None:
        one: dict[str, object] = {
            "fault": fault,
            "what": f"{fault} strikes",
            "variant": variant,
            "answers": 24,
            "wrong": [],
            "lost": {},
        }
        one |= {"http_errors": {}, "held": {"decode-0": 0.0}, "first_token_s": {"0": [0.1, 0.2], "1": [0.3]}}
        figures = [{**one, **changes}]
        told = {"command": f"faults {file}", "date": "2026-01-01", "commit": "abc", "machine": "m"}
        (tmp_path / file).write_text(json.dumps({"about": told, "figures": figures}))

    monkeypatch.setattr(figures_page, "RESULTS", tmp_path)
    write("sglang_faults_tidekv.json", "kill", "tidekv")
    write("sglang_faults_file.json", "kill", "l2", http_errors={"500 x": 2, "500 y": 1}, held={"decode-0": 0.5})
    write("sglang_faults_storage.json", "damage", "file", wrong=[[0, 1]], lost={"0.2": "500"})
    assert figures_page.sglang_table().splitlines()[-4:] == [
        "| fault | tidekv | HiCache, L2 | HiCache, L2 and file |",
        "|---|---|---|---|",
        "| `kill`: kill strikes | 24 right, first tokens within 0.3 s | 24 right, **3 HTTP errors**, **pages held**, "
        "first tokens within 0.3 s | - |",
        "| `damage`: damage strikes | - | - | 23 right, **1 wrong**, **1 lost**, first tokens within 0.3 s |",
    ]


def test_what_a_prefill_that_reads_computed_is_said_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = {"sglang:uncached_prompt_tokens_histogram_sum": 20.0, "sglang:prompt_tokens_total": 1300.0}
    one = {"answers": 8, "wrong": [], "lost": {"0.1": "500"}, "http_errors": {"500": 1}, "retries": 2}
    one["prefill_metrics"] = {**prefill, "tidekv_tokens_total{peer}": 40.0}
    told = {"command": "sglang", "date": "2026-01-01", "commit": "abc", "machine": "m", "load": 1.0}
    (tmp_path / "sglang_reads.json").write_text(json.dumps({"about": told, "figures": [one]}))
    monkeypatch.setattr(figures_page, "RESULTS", tmp_path)
    assert (
        "- `sglang` (2026-01-01, commit abc, m, load 1.0): of 1,300 prompt tokens it computed 20, and read 40. "
        "8 answers, 0 wrong, 1 lost, 1 HTTP errors, 2 requests sent again." in figures_page.sglang_table()
    )


def test_runs_with_windows_and_states_are_columns_of_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures_of(**changes: object) -> dict[str, object]:
        one: dict[str, object] = {"variant": "tidekv", "metrics": {"vllm:tidekv_restore_tokens_l3_total": 1200.0}}
        one |= {"answers": 72, "wrong": [], "lost": {}, "aborted": 0, "held": {"decode-0": 0.0, "prefill-0": 0.0}}
        return one | changes

    def write(file: str, *figures: dict[str, object]) -> None:
        told = {"command": f"vllm {file}", "date": "2026-01-01", "commit": "abc", "machine": "m", "load": 1.0}
        (tmp_path / file).write_text(json.dumps({"about": told, "figures": figures}))

    monkeypatch.setattr(figures_page, "RESULTS", tmp_path)
    assert figures_page.vllm_table() == "No run was kept."
    write("vllm_windows.json", figures_of())
    struck = figures_of(wrong=[[0, 1]], lost={"0.2": "500"}, aborted=3, held={"decode-0": 0.5})
    write("vllm_states_faults.json", struck)
    lines = figures_page.vllm_table().splitlines()
    assert "- states, faults: `vllm vllm_states_faults.json` (2026-01-01, commit abc, m, load 1.0)" in lines
    assert "| | windows | states, faults |" in lines
    assert "| prompt tokens from decode's storage | 1,200 | 1,200 |" in lines
    assert lines[-4:] == [
        "| requests that a client aborted | 0 | 3 |",
        "| answers | 72 | 72 |",
        "| wrong or lost | 0 | 2 |",
        "| servers that hold blocks at the end | 0 | 1 |",
    ]
    accepted = {"vllm:spec_decode_num_accepted_tokens_total": 1194.0}
    write("vllm_draft.json", figures_of(variant="single", metrics=accepted), figures_of(metrics=accepted))
    lines = figures_page.vllm_table().splitlines()
    assert "| | windows | states, faults | EAGLE draft |" in lines
    assert "| tokens of the draft that were accepted | - | - | 1,194 |" in lines
    assert "| the same, by one server | - | - | 1,194 |" in lines
