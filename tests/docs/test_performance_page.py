"""The table in docs/performance.md is generated from the targets and the last figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import performance_page
from benchmarks.performance_page import figures_table, with_figures
from benchmarks.target_table import TARGETS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def test_table_of_figures_is_generated_from_targets_and_figures() -> None:
    page = PAGE.read_text()
    assert page == with_figures(page), "run: python -m benchmarks.performance_page docs/performance.md"


def test_rows_have_the_figures_of_one_run_and_targets_without_one_are_only_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [target for target in TARGETS if not target.is_model and target.at_least is not None][:2]
    run = tmp_path / "targets.json"
    monkeypatch.setattr(performance_page, "FIGURES", run)
    about = {"command": "bench all", "date": "2026-11-26", "commit": "abc1234", "machine": "x86_64"}
    rows = [
        {"target": first.name, "measured": 2 * (first.at_least or 0), "words": ""},
        {"target": second.name, "measured": None, "words": "there was no peer"},
    ]
    run.write_text(json.dumps({"about": about, "targets": rows}))
    lines = figures_table().splitlines()
    assert lines[0] == "`bench all` (2026-11-26, commit abc1234, x86_64):"
    told = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    assert told[first.name].endswith("| pass |")
    assert second.name not in told and second.name in lines[-1].split(", ") and first.name not in lines[-1].split(", ")
    run.unlink()
    assert {first.name, second.name} <= set(figures_table().splitlines()[-1].split(", "))
    assert "pass" not in figures_table() and "### Model" not in figures_table()
