"""README states no figure that a program has not written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidekv.engine.cli.main import app
from tools import readme_figures

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_table_of_the_readme_is_generated() -> None:
    page = README.read_text()
    assert page == readme_figures.with_figures(page), "run: python -m tools.readme_figures README.md"


def test_a_row_is_shown_if_a_program_has_written_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_figures, "RESULTS", tmp_path)
    assert "simulated" not in readme_figures.figures_table()
    command = ["simulate", "--seed", "1", "--seeds", "1", "--requests", "20", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["tidekv", *command, "--json", "somewhere.json"])
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "simulate.json")])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "simulate.json").read_text())
    assert set(report["about"]) == {"command", "commit", "date", "machine", "load"}
    assert all(report["about"][name] for name in ("command", "date", "machine"))
    assert report["about"]["command"] == "tidekv simulate --seed 1 --seeds 1 --requests 20 --jobs 1"
    table = readme_figures.figures_table()
    assert f"| 20 simulated requests, {report['figures']['faults']:,} faults of " in table
    assert f"({report['about']['date']}, commit " in table
