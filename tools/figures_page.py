"""Figures that a page states, from the files that the programs have written: `python -m tools.figures_page README.md`.

A figure is shown if its file is in benchmarks/results/. `PAGES` has the table of each page, `ROWS` the command that
writes each file of the README's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- End of the figures. -->"
MIB = 1 << 20
BYTES_FROM_PREFILL = {
    "tidekv": "vllm:tidekv_restore_bytes_transfer_total",
    "nixl-quiet": "vllm:nixl_bytes_transferred_sum",
}
"""Counter of decode that has them, by variant."""


class Row(NamedTuple):
    """A figure: its file, the command that writes that, and the sentence about it."""

    file: str
    command: str
    words: Callable[[Any], str]  # Any: what JSON holds.


def _run(found: Mapping[str, Any]) -> str:
    return (
        f"median time to the first token {found['times_shorter']:.1f} times shorter at the speed of a large model's KV "
        "on the link of a deployment (stated constants, throttled to scale)"
    )


def _simulate(found: Mapping[str, Any]) -> str:
    violations = found["violations"]
    end = "no violation" if not violations else f"violations in {violations} seeds"
    return f"{found['requests']:,} simulated requests, {found['faults']:,} faults of {found['kinds']} kinds, {end}"


def _vllm(found: list[Mapping[str, Any]]) -> str:
    by_name = {one["variant"]: one for one in found}
    ours, theirs = by_name["tidekv"], by_name["nixl-quiet"]
    right = all(not one["wrong"] and not one["lost"] for one in (ours, theirs))
    sent, sent_by_theirs = _from_prefill(ours), _from_prefill(theirs)
    return (
        f"real vLLM servers, {ours['answers']} answers of multi-turn conversations: prefill sends {sent:.1f} MiB "
        f"with `TidekvConnector`, {sent_by_theirs:.1f} MiB ({sent_by_theirs / sent:.1f} times as much) with "
        f"`NixlConnector`; {'all answers of both equal' if right else 'not all answers equal'} those of one server"
    )


ROWS = (
    Row("run.json", "python3 dev.py run --json benchmarks/results/run.json", _run),
    Row(
        "vllm.json",
        "python3 dev.py vllm --connector nixl-quiet --connector tidekv --conversations 6 --turns 5 --tokens 600:1800 "
        "--json benchmarks/results/vllm.json",
        _vllm,
    ),
    Row(
        "simulate.json",
        "python3 dev.py tidekv simulate --seed 200000 --seeds 1000 --json benchmarks/results/simulate.json",
        _simulate,
    ),
)


def readme_table() -> str:
    """Return the README's table: what was measured, by which command, when, and on which machine."""
    lines = ["| measured | command |", "|---|---|"]
    for row in ROWS:
        report = _read(row.file)
        if report is not None:
            about = report["about"]
            where = f"{about['date']}, commit {about['commit']}, {about['machine']}"
            lines.append(f"| {row.words(report['figures'])} | `{about['command']}` ({where}) |")
    return "\n".join(lines)


def gpu_table() -> str:
    """Return what the steps with figures found on a GPU."""
    report = _read("gpu_h100.json")
    if report is None:
        return "No run on a GPU was kept."
    about = report["copies"]["about"]
    lines = [
        f"`python -m benchmarks.gpu` on {about['card']}, driver {about['driver']}, torch {about['torch']}, Triton "
        f"{about['triton']}, Python {about['python']}, {about['date']}, commit {about['commit']}.",
        "",
        "| step | what | measured | asked |",
        "|---|---|---:|---|",
    ]
    for step in ("copies", "load"):
        rows = [row for row in report[step]["rows"] if row[2]]
        lines += [f"| `{step}` | {what} | {measured} | {asked} |" for what, measured, asked in rows]
    lines += [
        "",
        "Rows for which nothing is asked, such as both forms at each size, are in `benchmarks/results/gpu_h100.json`.",
    ]
    return "\n".join(lines)


def handover_table() -> str:
    """Return what moved between real vLLM servers, by connector. Times are left out: they are the machine's."""
    report = _read("vllm.json")
    if report is None:
        return "No run was kept."
    about = report["about"]
    where = f"{about['date']}, commit {about['commit']}, {about['machine']}"
    found = report["figures"]
    rows = {
        "MiB from prefill": [f"{_from_prefill(one):.1f}" for one in found],
        "answers": [f"{one['answers']:,}" for one in found],
        "wrong answers": [f"{len(one['wrong']):,}" for one in found],
        "lost requests": [f"{len(one['lost']):,}" for one in found],
    }
    for title, name in (
        ("from vLLM's own cache in decode", "vllm:prompt_tokens_by_source_total{local_cache_hit}"),
        ("from decode's host memory", "vllm:tidekv_restore_tokens_l2_total"),
        ("from decode's storage", "vllm:tidekv_restore_tokens_l3_total"),
    ):
        rows[f"prompt tokens {title}"] = [f"{one['metrics'].get(name, 0):,.0f}" for one in found]
    lines = [
        f"`{about['command']}` ({where}):",
        "",
        f"| | {' | '.join('tidekv' if one['variant'] == 'tidekv' else '`NixlConnector`' for one in found)} |",
        f"|---|{'---:|' * len(found)}",
        *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()),
    ]
    return "\n".join(lines)


def sglang_table() -> str:
    """Return what real SGLang servers did: each cache of decode beside the others, and what clients got amid faults."""
    report, faults = _read("sglang.json"), _read("sglang_faults.json")
    lines = ["No run was kept."] if report is None else _sglang_caches(report)
    if faults is not None:
        about, (one,) = faults["about"], faults["figures"]
        errors = sum(one["http_errors"].values())
        held = "nothing is held" if not any(one["held"].values()) else "pages are held"
        lines += [
            "",
            f"`{about['command']}` ({about['date']}, commit {about['commit']}, {about['machine']}): {one['answers']:,} "
            f"answers, {len(one['wrong'])} wrong, {len(one['lost'])} lost, {errors} HTTP errors, {one['aborted']} "
            f"requests aborted; {held} at the end.",
        ]
    return "\n".join(lines)


def _sglang_caches(report: Mapping[str, Any]) -> list[str]:
    about, found = report["about"], report["figures"]
    titles = {"none": "no cache", "l2": "HiCache, L2", "file": "HiCache, L2 and file", "tidekv": "tidekv"}
    rows = {
        "MiB from prefill": [f"{one['bytes_from_prefill'] / MIB:.1f}" for one in found],
        "ms to the first token from the second turn on, p50": [
            f"{1e3 * median(s for turn, each in one['first_token_s'].items() if int(turn) >= 1 for s in each):,.0f}"
            for one in found
        ],
        "ms of CPU of decode's scheduler for a request": [
            f"{1e3 * one['cpu_s']['decode scheduler'] / one['answers']:,.0f}" for one in found
        ],
        "answers": [f"{one['answers']:,}" for one in found],
        "wrong or lost answers, HTTP errors": [
            f"{len(one['wrong']) + len(one['lost']) + sum(one['http_errors'].values())}" for one in found
        ],
    }
    return [
        f"`{about['command']}` ({about['date']}, commit {about['commit']}, {about['machine']}, load {about['load']}). "
        "Decode's device memory holds a third of all conversations:",
        "",
        f"| | {' | '.join(titles[one['variant']] for one in found)} |",
        f"|---|{'---:|' * len(found)}",
        *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()),
    ]


def fleet_table() -> str:
    """Return what a fleet behind a published router did while parts of it were killed, by policy."""
    tables = [_fleet_runs(report) for report in map(_read, ("fleet.json", "fleet_dynamo.json")) if report is not None]
    picture = ["![Hit rate, share of the busiest worker and time to the first token, by policy](fleet.svg)"]
    if not tables:
        return "No run was kept."
    return "\n\n".join([*tables, *(picture if (ROOT / "examples" / "fleet" / "fleet.svg").is_file() else [])])


def _fleet_runs(report: Mapping[str, Any]) -> str:
    # Here: it needs the packages of the example.
    from examples.fleet.report import Run, rows_of

    about, runs = report["about"], msgspec.convert(report["figures"], list[Run])
    (router,) = {run.router for run in runs}
    ratio = runs[-1].own_hit_rate / runs[0].own_hit_rate if len(runs) > 1 else 1.0
    lines = [
        f"{'Dynamo' if router == 'dynamo' else 'vllm-router'}, {runs[0].users} users, {runs[0].seconds:.0f} s for each "
        f"policy: `{about['command']}` ({about['date']}, commit {about['commit']}, {about['machine']}, load "
        f"{about['load']}). The last policy has {ratio:.2f} times the hit rate of the first.",
        "",
        f"| | {' | '.join(f'`{run.policy}`' for run in runs)} |",
        f"|---|{'---:|' * len(runs)}",
        *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows_of(runs).items()),
    ]
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "README.md": readme_table,
    "docs/gpu.md": gpu_table,
    "docs/sglang.md": sglang_table,
    "docs/vllm-handover.md": handover_table,
    "examples/fleet/README.md": fleet_table,
}
"""The table of each page, by its path in the checkout."""


def begin(page: str) -> str:
    """Return the line that begins the table of a page."""
    return f"<!-- Generated: python -m tools.figures_page {page} -->"


def with_figures(page: str, text: str) -> str:
    """Return the text of a page with its table generated from the current files."""
    before, _, rest = text.partition(begin(page))
    _, _, after = rest.partition(END)
    return f"{before}{begin(page)}\n\n{PAGES[page]()}\n\n{END}{after}"


def _from_prefill(one: Mapping[str, Any]) -> float:
    """Return the MiB that decode got from prefill."""
    return float(one["metrics"][BYTES_FROM_PREFILL[one["variant"]]]) / MIB


def _read(file: str) -> Any:  # Any: what JSON holds.
    path = RESULTS / file
    return json.loads(path.read_text()) if path.is_file() else None


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        path = ROOT / name
        path.write_text(with_figures(name, path.read_text()))
