"""Table of targets and last measured figures in docs/performance.md: `python -m tools.performance_page PAGE`.

The figures are in benchmarks/last_figures.json, in the format of `python3 dev.py bench all --json FILE`. A row without
a figure states the reason.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.target_table import TARGETS, Target

FIGURES = Path(__file__).resolve().parent.parent / "benchmarks" / "last_figures.json"
BEGIN = "<!-- Generated: python -m tools.performance_page docs/performance.md -->"
END = "<!-- End of the figures. -->"


def figures_table() -> str:
    """Return the table as Markdown. Raises KeyError for a target that the file of figures does not have."""
    report = json.loads(FIGURES.read_text())
    figures = {row["target"]: row for row in report["targets"]}
    about = report["about"]
    lines = [
        f"Run of {about['date']} on {about['machine']}.",
        "",
        "| target | what is measured | bound | figure | verdict |",
        "|---|---|---:|---:|---|",
    ]
    for target in TARGETS:
        if not target.is_model:
            figure = figures[target.name]
            value, verdict = _judged(target, figure["measured"], figure["words"])
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
            value, _ = _judged(target, figures[target.name]["measured"], figures[target.name]["words"])
            lines.append(f"| {target.name} | {target.asks} | {target.published} | {value} {target.unit} |")
    return "\n".join(lines)


def _judged(target: Target, measured: float | None, words: str) -> tuple[str, str]:
    if measured is None:
        return "", words or "not measured"
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
