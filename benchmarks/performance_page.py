"""Table of targets and last measured figures in docs/performance.md: `python -m benchmarks.performance_page PAGE`.

The figures are in benchmarks/results/targets.json, as one run of `python3 dev.py bench all --json` wrote it, whole or
of some targets. A target that was not measured there is only named, with its bound: it has no figure. Beside it,
first_rounds.json has what `python3 dev.py bench first-rounds --json` wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.target_table import TARGETS

RESULTS = Path(__file__).resolve().parent / "results"
FIGURES = RESULTS / "targets.json"
FIRST_ROUNDS = RESULTS / "first_rounds.json"
BEGIN = "<!-- Generated: python -m benchmarks.performance_page docs/performance.md -->"
END = "<!-- End of the figures. -->"


def figures_table() -> str:
    """Return the table as Markdown."""
    report = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {"targets": []}
    figures = {row["target"]: float(row["measured"]) for row in report["targets"] if row["measured"] is not None}
    lines: list[str] = []
    if (about := report.get("about")) is not None:
        where = f"{about['date']}, commit {about['commit']}, {about['machine']}"
        lines += [f"`{about['command']}` ({where}):", ""]
    judged = [target for target in TARGETS if not target.is_model and target.name in figures]
    if judged:
        lines += ["| target | what is measured | bound | figure | verdict |", "|---|---|---:|---:|---|"]
    for target in judged:
        measured = figures[target.name]
        verdict = "pass" if target.passes(measured) else "short"
        lines.append(f"| {target.name} | {target.asks} | {target.asked} | {_value(measured)} | {verdict} |")
    lines += first_rounds()
    lines += [
        "",
        "### Targets without a kept figure",
        "",
        "`python3 dev.py bench all --list` says what each measures, and its bound:",
        "",
    ]
    lines.append(", ".join(target.name for target in TARGETS if target.name not in figures and not target.is_model))
    return "\n".join(lines).strip()


def first_rounds() -> Iterator[str]:
    """Yield the table of the default storage policy's first rounds; nothing if no run was kept."""
    if not FIRST_ROUNDS.is_file():
        return
    report = json.loads(FIRST_ROUNDS.read_text())
    about = report["about"]
    yield from (
        "",
        "### First rounds of the default storage policy",
        "",
        f"`{about['command']}` ({about['date']}, commit {about['commit']}, {about['machine']}, load {about['load']}): "
        "mean time to ready of the fourth round of the same prompts, and the part of them that the default fetched "
        "from storage. The last column is the worst round after the first over the better of always and never, where "
        "the default fetched other pages than that one; at most 1.2 is asked for. "
        "[Method](measuring.md#default-policy-on-real-processes).",
        "",
        "| storage over link | tokens | at once | default, ms | always, ms | never, ms | fetched | over the better |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    )
    for cell in report["figures"]["cells"]:
        times = (f"{cell['ready_ms'][arm][-1]:.1f}" for arm in ("default", "always", "never"))
        fetched = f"{cell['fetched'][-1]:.0%}"
        what = f"{cell['speed']:g} | {cell['tokens']:,} | {cell['at_once']}"
        yield f"| {what} | {' | '.join(times)} | {fetched} | {cell['over_better']:.2f} |"


def _value(measured: float) -> str:
    return f"{measured:.3g}" if abs(measured) < 1000 else f"{measured:,.0f}"


def with_figures(page: str) -> str:
    """Return the page with its table generated from the current figures."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{figures_table()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_figures(path.read_text()))
