"""Figures of the README, from the files that the programs have written: `python -m tools.readme_figures README.md`.

A row is shown if its file is in benchmarks/results/. `ROWS` has the command that writes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
BEGIN = "<!-- Generated: python -m tools.readme_figures README.md -->"
END = "<!-- End of the figures. -->"


class Row(NamedTuple):
    """A figure: its file, the command that writes that, and the sentence about it."""

    file: str
    command: str
    words: Callable[[Mapping[str, Any]], str]  # Any: what JSON holds.


def _run(found: Mapping[str, Any]) -> str:
    return (
        f"median time to the first token {found['times_shorter']:.1f} times shorter at the speed of a large model's KV "
        "on the link of a deployment (stated constants, throttled to scale)"
    )


def _simulate(found: Mapping[str, Any]) -> str:
    violations = found["violations"]
    end = "no violation" if not violations else f"violations in {violations} seeds"
    return f"{found['requests']:,} simulated requests, {found['faults']:,} faults of {found['kinds']} kinds, {end}"


ROWS = (
    Row("run.json", "python3 dev.py run --json benchmarks/results/run.json", _run),
    Row(
        "simulate.json",
        "python3 dev.py tidekv simulate --seed 200000 --seeds 1000 --json benchmarks/results/simulate.json",
        _simulate,
    ),
)


def figures_table() -> str:
    """Return the table as Markdown: what was measured, by which command, when, and on which machine."""
    lines = ["| measured | command |", "|---|---|"]
    for row in ROWS:
        if (path := RESULTS / row.file).is_file():
            report = json.loads(path.read_text())
            about = report["about"]
            where = f"{about['date']}, commit {about['commit']}, {about['machine']}"
            lines.append(f"| {row.words(report['figures'])} | `{about['command']}` ({where}) |")
    return "\n".join(lines)


def with_figures(page: str) -> str:
    """Return the page with its table generated from the current files."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{figures_table()}\n\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_figures(page.read_text()))
