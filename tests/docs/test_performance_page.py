"""The table in docs/performance.md is generated from the targets and the last figures."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.target_table import TARGETS
from tools.performance_page import FIGURES, with_figures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def test_table_of_figures_is_generated_from_targets_and_figures() -> None:
    page = PAGE.read_text()
    assert page == with_figures(page), "run: python -m tools.performance_page docs/performance.md"


def test_every_figure_is_of_one_target_and_every_target_has_one() -> None:
    rows = json.loads(FIGURES.read_text())["targets"]
    assert [row["target"] for row in rows] == [target.name for target in TARGETS]
    assert all(row["measured"] is not None or row["words"] for row in rows), "a missing figure needs a reason"
