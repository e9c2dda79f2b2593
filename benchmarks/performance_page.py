"""Table of targets and last measured figures in docs/performance.md: `python -m benchmarks.performance_page PAGE`.

The figures are in benchmarks/results/targets.json, as one run of `python3 dev.py bench all --json` wrote it. A row that
the run did not measure says so; without the file no row has a figure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.target_table import TARGETS, Target

FIGURES = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "targets.json"
BEGIN = "<!-- Generated: python -m benchmarks.performance_page docs/performance.md -->"
END = "<!-- End of the figures. -->"


def figures_table() -> str:
    """Return the table as Markdown."""
    report = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {"targets": []}
    figures = {row["target"]: row for row in report["targets"]}
    about = report.get("about")
    lines = [
        "There is no run of the whole on this state of the code."
        if about is None
        else f"Run of {about['date']}, commit {about['commit']}, on {about['machine']}.",
        "",
        "| target | what is measured | bound | figure | verdict |",
        "|---|---|---:|---:|---|",
    ]
    for target in TARGETS:
        if not target.is_model:
            value, verdict = _judged(target, figures.get(target.name))
            lines.append(f"| {target.name} | {target.asks} | {target.asked} | {value} | {verdict} |")
    lines += [
        "",
        "### Model consistency",
        "",
        "Results of the core on a [modeled clock](measuring.md#published-tables-on-a-modeled-clock), beside what others"
        " have published. They are no verdicts: the constants of the model come from the same publications.",
        "",
        "| row | what is modeled | published | model |",
        "|---|---|---|---:|",
    ]
    for target in TARGETS:
        if target.is_model:
            value, _ = _judged(target, figures.get(target.name))
            lines.append(f"| {target.name} | {target.asks} | {target.published} | {value} {target.unit} |")
    return "\n".join(lines)


def _judged(target: Target, figure: Mapping[str, Any] | None) -> tuple[str, str]:  # Any: what JSON holds.
    if figure is None or figure["measured"] is None:
        return "", (figure or {}).get("words") or "not measured"
    measured = float(figure["measured"])
    value = f"{measured:.3g}" if abs(measured) < 1000 else f"{measured:,.0f}"
    return value, "" if target.is_model else "pass" if target.passes(measured) else "short"


def with_figures(page: str) -> str:
    """Return the page with its table generated from the current figures."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{figures_table()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_figures(path.read_text()))
