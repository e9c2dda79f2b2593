"""Table of targets and last measured figures in docs/performance.md: `python -m benchmarks.performance_page PAGE`.

The figures are in benchmarks/results/, as `python3 dev.py bench user`, `parts` and `peers` wrote them with `--keep`,
whole or of some targets. A target that was not measured there is only named: it has no figure. Beside them,
first_rounds.json has what `python3 dev.py bench first-rounds --json` wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.measurements import GROUPS
from benchmarks.target_table import TARGETS
from tools import figures_page
from tools.figures_page import RESULTS

FIRST_ROUNDS = RESULTS / "first_rounds.json"
TITLES = {"user": "What a user feels", "parts": "Parts"}
BEGIN = "<!-- Generated: python -m benchmarks.performance_page docs/performance.md -->"
END = "<!-- End of the figures. -->"


def figures_table() -> str:
    """Return the table as Markdown."""
    lines: list[str] = []
    told: set[str] = set()
    for group in GROUPS:
        file = RESULTS / f"{group}.json"
        report = json.loads(file.read_text()) if file.is_file() else {"targets": []}
        figures = {row["target"]: float(row["measured"]) for row in report["targets"] if row["measured"] is not None}
        told |= set(figures)
        judged = [target for target in TARGETS if target.name in figures]
        if not judged:
            continue
        about = report["about"]
        lines += [f"### {TITLES[group]}", "", f"`{about['command']}` ({_where(about)}):", ""]
        lines += ["| target | what is measured | bound | figure | verdict |", "|---|---|---:|---:|---|"]
        for target in judged:
            measured = figures[target.name]
            verdict = "model" if target.is_model else "pass" if target.passes(measured) else "short"
            lines.append(f"| {target.name} | {target.asks} | {target.asked} | {_value(measured)} | {verdict} |")
        lines.append("")
    lines += ["### Peers in whole", "", figures_page.peers_table(), *first_rounds()]
    lines += ["", "### Targets without a kept figure", "", "`--list` says what each measures, and its bound:", ""]
    lines.append(", ".join(target.name for target in TARGETS if target.name not in told))
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
        f"`{about['command']}` ({_where(about)}): "
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


def _where(about: Mapping[str, object]) -> str:
    return f"{about['date']}, commit {about['commit']}, {about['machine']}, load {about['load']}"


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
