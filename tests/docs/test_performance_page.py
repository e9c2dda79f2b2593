"""The tables of kept figures are generated from the targets and the last figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import performance_page
from benchmarks.first_rounds import PROMPTS, ROUNDS, Cell, figures_of
from benchmarks.groups import targets_of
from benchmarks.performance_page import PAGES, maintainers_figures, with_figures
from benchmarks.target_table import TARGETS
from demo.artefact import write_artefact

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_figures_are_generated_from_targets_and_figures(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text == with_figures(page, text), "run: python -m benchmarks.performance_page"


def test_no_measured_target_is_left_out_of_both_pages() -> None:
    both = "".join((ROOT / page).read_text() for page in PAGES)
    assert not [target.name for target in TARGETS if target.name not in both]


def test_rows_have_the_figures_of_one_run_and_targets_without_one_are_only_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [target for target in targets_of("parts") if target.at_least is not None][:2]
    monkeypatch.setattr(performance_page, "RESULTS", tmp_path)
    monkeypatch.setattr(performance_page, "FIRST_ROUNDS", tmp_path / "none.json")
    about = {"command": "bench parts", "date": "2026-11-26", "commit": "abc1234", "machine": "x86_64", "load": 0.5}
    rows = [
        {"target": first.name, "measured": 2 * (first.at_least or 0), "words": ""},
        {"target": second.name, "measured": None, "words": "there was no peer"},
    ]
    run = tmp_path / "parts.json"
    run.write_text(json.dumps({"about": about, "targets": rows}))
    lines = maintainers_figures().splitlines()
    assert lines[:3] == ["### Parts", "", "`bench parts` (2026-11-26, commit abc1234, x86_64, load 0.5):"]
    told = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    assert told[first.name].endswith("| pass |")
    assert second.name not in told and second.name in lines[-1].split(", ") and first.name not in lines[-1].split(", ")
    run.unlink()
    assert {first.name, second.name} <= set(maintainers_figures().splitlines()[-1].split(", "))
    assert "| pass |" not in maintainers_figures()


def test_first_rounds_are_shown_if_a_run_of_them_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance_page, "FIRST_ROUNDS", tmp_path / "first_rounds.json")
    assert "First rounds" not in maintainers_figures()
    cell = Cell(speed=16.0, tokens=4096, at_once=1)
    for arm, ready_s in (("default", 0.02), ("always", 0.01), ("never", 0.08)):
        for number in range(ROUNDS):
            cell.fetched[arm, number] += [0 if arm == "never" else 4096 if arm == "always" else 1024] * PROMPTS
            for one in range(PROMPTS):
                cell.ready_s[arm, number, one].append(ready_s)
    write_artefact(tmp_path / "first_rounds.json", figures_of([cell]), "python3 dev.py bench first-rounds")
    row = "| 16 | 4,096 | 1 | 20.0 | 10.0 | 80.0 | 25% | 2.00 |"
    assert row in maintainers_figures().splitlines()
