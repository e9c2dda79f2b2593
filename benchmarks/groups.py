"""Report of the targets of a group with their measured figures: `python3 dev.py bench user`, or `bench parts`.

Runs the measurements that the chosen targets need, and prints for each target the bound, the figure and the verdict:
pass, short, missing (a peer, a recording or a machine is not available), not measured, or failed. Figures of a model
are listed apart, beside what was published, and have no verdict. Figures are reported, not asserted: the exit code is
0 in any case. A group takes at most five minutes: what has not begun by then is not measured. Targets chosen by name
are measured however long that takes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measurements import GROUPS, MEASUREMENTS, Options, Outcome, run
from benchmarks.peers import default_cache
from benchmarks.target_table import TARGETS, Target
from demo.artefact import about

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
GROUP_S = 290.0
"""Maximum seconds of a group."""
LEAST_S = 5.0
"""Seconds that a measurement needs at least."""
COLORS = {
    "model": "cyan",
    "pass": "green",
    "short": "red",
    "missing": "yellow",
    "failed": "magenta",
    "not measured": "yellow",
}


@dataclass(frozen=True)
class Verdict:
    """The verdict on one target."""

    target: Target
    verdict: str
    value: float | None
    words: str


def targets_of(group: str, names: Sequence[str] = ()) -> list[Target]:
    """Return the targets of a group selected by name, prefix of a name, or measurement; all by default.

    Raises SystemExit for a name of none.
    """
    targets = [target for target in TARGETS if MEASUREMENTS[target.measurement].group == group]
    for name in names:
        if not any(_is_named(target, name) for target in targets):
            kinds = ", ".join(dict.fromkeys(target.kind for target in targets))
            raise SystemExit(f"bench {group}: there is no target {name!r}; allowed: {kinds}; --list shows all")
    return [target for target in targets if not names or any(_is_named(target, name) for name in names)]


def _is_named(target: Target, name: str) -> bool:
    return target.name == name or target.name.startswith(f"{name}.") or target.measurement == name


def judge(target: Target, outcome: Outcome | None) -> Verdict:
    """Return the verdict on one target."""
    if outcome is None:
        return Verdict(target, "not measured", None, f"the group's {GROUP_S:g} s were over; name it to measure it")
    value = outcome.figures.get(target.figure)
    if value is None:
        verdict, why = outcome.why_not(target.figure)
        return Verdict(target, verdict, None, why)
    verdict = "model" if target.is_model else "pass" if target.passes(value) else "short"
    return Verdict(target, verdict, value, outcome.words.get(target.figure, ""))


def measure(targets: Sequence[Target], options: Options, console: Console, limit_s: float) -> dict[str, Outcome]:
    """Run what the targets need, one after the other, for `limit_s` in all; outcomes by measurement."""
    outcomes: dict[str, Outcome] = {}
    until_s = time.monotonic() + limit_s
    for name in dict.fromkeys(target.measurement for target in targets):
        began_s = time.monotonic()
        if until_s - began_s < LEAST_S:
            break
        outcomes[name] = run(MEASUREMENTS[name], options, until_s - began_s)
        console.print(f"{name}: {time.monotonic() - began_s:.0f} s", highlight=False)
        for note in outcomes[name].notes:
            console.print(f"  {note}", highlight=False)
    return outcomes


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the tables, and the number of each verdict. Rows of models are not counted."""
    targets = [found for found in verdicts if not found.target.is_model]
    models = [found for found in verdicts if found.target.is_model]
    if targets:
        console.print(_table(targets, "asked"))
    if models:
        console.print("Model consistency: figures of a model beside published ones, no verdicts", highlight=False)
        console.print(_table(models, "published"))
    counts = Counter(found.verdict for found in targets)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()), highlight=False)
    judged = [found for found in verdicts if found.verdict in ("pass", "short")]
    for name, of_kind in (
        ("all that were measured", judged),
        ("ratios, shares and counts", [found for found in judged if not found.target.is_time]),
        ("times, in which this machine's own speed is", [found for found in judged if found.target.is_time]),
    ):
        passed = sum(found.verdict == "pass" for found in of_kind)
        if of_kind:
            console.print(f"{name}: {passed} of {len(of_kind)} pass, {passed / len(of_kind):.0%}", highlight=False)


def _table(verdicts: Sequence[Verdict], beside: str) -> Table:
    table = Table("target", "what is asked", "measured", beside, "", "more")
    for found in verdicts:
        color = COLORS[found.verdict]
        value = "" if found.value is None else f"{found.value:.3g}"
        table.add_row(
            found.target.name, found.target.asks, value, found.target.asked, f"[{color}]{found.verdict}[/]", found.words
        )
    return table


def main() -> None:
    """Parse the options, measure, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="NAME", help="targets, measurements")
    parser.add_argument("--json", type=Path, help="write all verdicts there")
    parser.add_argument("--peers", type=Path, default=default_cache(), help="where peers are kept")
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder of recordings")
    parser.add_argument("--plot", type=Path, help="write a plot of cost against work to this .png or .svg file")
    parser.add_argument("--list", action="store_true", help="list the targets without measuring")
    chosen = parser.parse_args()
    # A measuring program runs in a session of its own and is ended with this one, so SIGTERM must unwind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    targets = targets_of(chosen.group, chosen.only)
    console = Console(width=None if Console().is_terminal else 200)
    if chosen.list:
        table = Table("target", "what is asked", "asked", "measured by")
        for target in targets:
            table.add_row(target.name, target.asks, target.asked, MEASUREMENTS[target.measurement].program)
        console.print(table)
        return
    options = Options(peers=chosen.peers, traces=chosen.traces, plot=chosen.plot)
    outcomes = measure(targets, options, console, float("inf") if chosen.only else GROUP_S)
    verdicts = [judge(target, outcomes.get(target.measurement)) for target in targets]
    show(verdicts, console)
    if chosen.json:
        rows = [
            {
                "target": found.target.name, "asks": found.target.asks, "asked": found.target.asked,
                "measured": found.value, "verdict": found.verdict, "words": found.words,
            }
            for found in verdicts
        ]  # fmt: skip
        notes = {name: outcome.notes for name, outcome in outcomes.items() if outcome.notes}
        chosen.json.write_text(
            json.dumps({"about": about("python3 dev.py bench"), "targets": rows, "notes": notes}, indent=1)
        )


if __name__ == "__main__":
    main()
