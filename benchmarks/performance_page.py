"""Tables of targets and last measured figures: `python -m benchmarks.performance_page`.

docs/performance.md has what a user feels, benchmarks/results/README.md what maintainers compare. The figures are in
benchmarks/results/, as `python3 dev.py bench user`, `parts` and `peers` wrote them with `--keep`, whole or of some
targets. A target that was not measured there is only named: it has no figure. Beside them, first_rounds.json has what
`python3 dev.py bench first-rounds --json` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.measurements import GROUPS
from benchmarks.target_table import TARGETS
from tools import figures_page
from tools.figures_page import RESULTS

FIRST_ROUNDS = RESULTS / "first_rounds.json"
TITLES = {"user": "What a user feels", "parts": "Parts"}
BEGIN = "<!-- Generated: python -m benchmarks.performance_page -->"
END = "<!-- End of the figures. -->"


def user_figures() -> str:
    """Return the tables of what a user feels, and of whole pairs of servers, as Markdown."""
    return "\n".join([*_group("user"), "### Peers in whole", "", figures_page.peers_table()])


def maintainers_figures() -> str:
    """Return the tables of parts and of first rounds, and the names of targets without a figure, as Markdown."""
    lines = [*_group("parts"), *_group("user", models=True), *first_rounds()]
    named = {name for group in GROUPS for name in _figures(group)}
    lines += ["### Targets without a kept figure", "", "`--list` says what each measures, and its bound:", ""]
    lines.append(", ".join(target.name for target in TARGETS if target.name not in named))
    return "\n".join(lines)


def _report(group: str) -> Any:  # Any: what JSON holds.
    file = RESULTS / f"{group}.json"
    return json.loads(file.read_text()) if file.is_file() else {"targets": []}


def _figures(group: str) -> dict[str, float]:
    return {row["target"]: float(row["measured"]) for row in _report(group)["targets"] if row["measured"] is not None}


def _group(group: str, *, models: bool = False) -> Iterator[str]:
    figures = _figures(group)
    judged = [target for target in TARGETS if target.name in figures and target.is_model is models]
    if not judged:
        return
    about = _report(group)["about"]
    title = f"{TITLES[group]}: published tables, modeled" if models else TITLES[group]
    yield from (f"### {title}", "", f"`{about['command']}` ({_where(about)}):", "")
    yield from ("| target | what is measured | bound | figure | verdict |", "|---|---|---:|---:|---|")
    for target in judged:
        measured = figures[target.name]
        verdict = "model" if target.is_model else "pass" if target.passes(measured) else "short"
        yield f"| {target.name} | {target.asks} | {target.asked} | {_value(measured)} | {verdict} |"
    yield ""


def first_rounds() -> Iterator[str]:
    """Yield the table of the default storage policy's first rounds; nothing if no run was kept."""
    if not FIRST_ROUNDS.is_file():
        return
    report = json.loads(FIRST_ROUNDS.read_text())
    about = report["about"]
    yield from (
        "### First rounds of the default storage policy",
        "",
        f"`{about['command']}` ({_where(about)}): "
        "mean time to ready of the fourth round of the same prompts, and the part of them that the default fetched "
        "from storage. The last column is the worst round after the first over the better of always and never, where "
        "the default fetched other pages than that one; at most 1.2 is asked for. "
        "[Method](../../docs/measuring.md#default-policy-on-real-processes).",
        "",
        "| storage over link | tokens | at once | default, ms | always, ms | never, ms | fetched | over the better |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    )
    for cell in report["figures"]["cells"]:
        times = (f"{cell['ready_ms'][arm][-1]:.1f}" for arm in ("default", "always", "never"))
        fetched = f"{cell['fetched'][-1]:.0%}"
        what = f"{cell['speed']:g} | {cell['tokens']:,} | {cell['at_once']}"
        yield f"| {what} | {' | '.join(times)} | {fetched} | {cell['over_better']:.2f} |"
    yield ""


def _where(about: Mapping[str, object]) -> str:
    return f"{about['date']}, commit {about['commit']}, {about['machine']}, load {about['load']}"


def _value(measured: float) -> str:
    return f"{measured:.3g}" if abs(measured) < 1000 else f"{measured:,.0f}"


PAGES: dict[str, Callable[[], str]] = {
    "docs/performance.md": user_figures,
    "benchmarks/results/README.md": maintainers_figures,
}
"""The tables of each page, by its path in the checkout."""


def with_figures(page: str, text: str) -> str:
    """Return the text of a page with its tables generated from the current figures."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{PAGES[page]()}\n\n{END}{after}"


if __name__ == "__main__":
    for name in PAGES:
        path = figures_page.ROOT / name
        path.write_text(with_figures(name, path.read_text()))
