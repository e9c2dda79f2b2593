"""Figures that a page states, from the files that the programs have written: `python -m tools.figures_page README.md`.

A figure is shown if its files are in benchmarks/results/. `PAGES` has the table of each page, `ROWS` the command that
writes the files of each figure of the README's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
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

SGLANG_TITLES = {
    "none": "no cache",
    "radix": "radix (L1)",
    "l2": "HiCache, L2",
    "file": "HiCache, L2 and file",
    "store": "HiCache, L2 and tidekv",
    "tidekv-l2": "tidekv, L2",
    "tidekv-l3": "tidekv, L2 and file",
    "tidekv-lasting": "tidekv, L2 in a file",
    "tidekv": "tidekv",
}
"""By the word for `--cache` of `dev.py sglang`."""
PAIRS = {"sglang": "SGLang", "vllm": "vLLM"}
PAIR_TITLES = {**SGLANG_TITLES, "nixl-quiet": "NixlConnector"}
"""By the words of `dev.py sglang` and `dev.py vllm`."""
SGLANG_RUNS = ("sglang_long.json", "sglang_as_is.json")
SGLANG_FAULTS = (
    "sglang_faults_tidekv.json",
    "sglang_faults_l2.json",
    "sglang_faults_file.json",
    "sglang_faults_storage.json",
    "sglang_faults_kill.json",
)
SGLANG_READS = ("sglang_reads.json", "sglang_reads_kills.json")
SGLANG_LONG = ("sglang_faults.json", "sglang_faults_hicache.json")
"""Files of runs: conversations, each fault for itself, and all faults in one run."""
VLLM_GROUPS = {
    f"vllm_{kind}{suffix}.json": f"{title}{words}"
    for kind, title in (
        ("full", "full KV"),
        ("windows", "windows"),
        ("states", "states"),
        ("draft", "EAGLE draft"),
        ("draft_model", "draft model"),
    )
    for suffix, words in (("", ""), ("_restart", ", restarts"), ("_faults", ", faults"))
}
"""Files of runs of a class of models each, and the titles of their columns."""


class Row(NamedTuple):
    """A figure: its files, the command that writes them, and the sentence about their reports."""

    files: tuple[str, ...]
    command: str
    words: Callable[..., str]


def _run(report: Mapping[str, Any]) -> str:
    found = report["figures"]
    return (
        f"median time to the first token {found['times_shorter']:.1f} times shorter at the speed of a large model's KV "
        "on the link of a deployment (stated constants, throttled to scale)"
    )


def _simulate(report: Mapping[str, Any]) -> str:
    found = report["figures"]
    violations = found["violations"]
    end = "no violation" if not violations else f"violations in {violations} seeds"
    return f"{found['requests']:,} simulated requests, {found['faults']:,} faults of {found['kinds']} kinds, {end}"


def _pairs(*reports: Mapping[str, Any]) -> str:
    parts = []
    for peer, report in zip(PAIRS.values(), reports, strict=True):
        words = []
        # Ours first: it is what the others are compared with.
        for one in sorted(report["figures"], key=lambda one: not one["variant"].startswith("tidekv")):
            times = f" and {_later_turns_ms(one):,.0f} ms" if _has_times(report) else ""
            words.append(f"{_from_prefill(one):.1f} MiB{times} with {PAIR_TITLES[one['variant']]}")
        parts.append(f"{peer}: {'; '.join(words)}")
    failed = any(_failures(one) for report in reports for one in report["figures"])
    right = "Not all" if failed else "All"
    return (
        "real pairs of servers, multi-turn conversations: bytes that prefill sends, and median time to the first token "
        f"from the second turn on. {'. '.join(parts)}; vLLM's processes spin while they wait, which takes both cores "
        f"of this machine. {right} answers equal those of one server"
    )


def _has_times(report: Mapping[str, Any]) -> bool:
    """Whether its pairs served by turns, so that other load has met all of them: only then times can be compared."""
    return "--alternate" in report["about"]["command"]


def _later_turns_ms(one: Mapping[str, Any]) -> float:
    """Return the median time to the first token from the second turn on."""
    return 1e3 * median(float(s) for turn, each in one["first_token_s"].items() if int(turn) >= 1 for s in each)


ROWS = (
    Row(("run.json",), "python3 dev.py run --json benchmarks/results/run.json", _run),
    Row(("sglang.json", "vllm.json"), "python3 dev.py bench peers --sglang DIR --vllm DIR --keep", _pairs),
    Row(
        ("simulate.json",),
        "python3 dev.py tidekv simulate --seed 200000 --seeds 1000 --json benchmarks/results/simulate.json",
        _simulate,
    ),
)


def readme_table() -> str:
    """Return the README's table: what was measured, by which command, when, and on which machine."""
    lines = ["| measured | command |", "|---|---|"]
    for row in ROWS:
        reports = [_read(file) for file in row.files]
        if all(reports):
            abouts = [report["about"] for report in reports]
            command = abouts[0]["command"] if len(abouts) == 1 else row.command.removesuffix(" --keep")
            where = dict.fromkeys(f"{about['date']}, commit {about['commit']}, {about['machine']}" for about in abouts)
            lines.append(f"| {row.words(*reports)} | `{command}` ({'; '.join(where)}) |")
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
    for step in ("copies", "load", "nixl", "turns_4k", "turns_32k"):
        # Copies by size of their stretches only give the threshold, which has a row of its own.
        rows = [row for row in report[step]["rows"] if row[2] and not row[0].startswith("stretches")]
        if step == "copies":
            rest = [row for row in rows if " to " not in row[0]]
            rows = [*_slowest(rows, "to device"), *_slowest(rows, "to host"), *rest]
        lines += [f"| `{step}` | {what} | {measured} | {asked} |" for what, measured, asked in rows]
    lines += [
        "",
        "The other sizes, and rows for which nothing is asked, are in `benchmarks/results/gpu_h100.json`.",
    ]
    return "\n".join(lines)


def _slowest(rows: Sequence[Sequence[str]], direction: str) -> list[list[str]]:
    """Return the copies in that direction with the smallest share of the bus, which all others exceed."""
    copies = [row for row in rows if direction in row[0]]
    share = {row[0]: int(row[1].split(", ")[1].removesuffix(" %")) for row in copies}
    return [[f"slowest of: {what}", *rest] for what, *rest in sorted(copies, key=lambda row: share[row[0]])[:1]]


def vllm_table() -> str:
    """Return which side computes a rest sooner, where a router placed prompts, and the tiers that served windows and
    states.

    Times are shown as shares of one another: they are the machine's.
    """
    parts = [part for make in (_rest, _placement, _groups) if (part := make()) is not None]
    return "\n\n".join(parts) or "No run was kept."


def _rest() -> str | None:
    report = _read("vllm_rest.json")
    if report is None:
        return None
    turns, meets = report["figures"]["turns"], report["figures"]["meets"]
    by_case = {(one["streams"], one["rest"], one["way"]): one for one in turns}
    columns = [(one["streams"], one["way"]) for one in meets]

    def share(count: int, rest: int, way: str, name: str) -> str:
        alone, other = (median(by_case[count, rest, each][name]) for each in ("decode alone", way))
        return f"{alone / other:.2f}" if other else "-"

    pauses = [(count, way) for count, way in columns if count]
    titles = [f"{way}, {_beside(count)}" for count, way in columns]
    titles += [f"longest pause of streams: {way}, {_beside(count)}" for count, way in pauses]
    rows = [
        [
            f"{rest:,}",
            *(share(count, rest, way, "first_s") for count, way in columns),
            *(share(count, rest, way, "pause_s") for count, way in pauses),
        ]
        for rest in sorted({one["rest"] for one in turns})
    ]
    return "\n".join(
        [
            f"{_command(report)}, medians of {len(turns[0]['first_s'])} turns each. Time to the first token of a "
            "second turn with decode alone, as a share of that with prefill first, or with both at once:",
            "",
            f"| tokens of the rest | {' | '.join(titles)} |",
            f"|---:|{'---:|' * len(titles)}",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def _beside(streams: int) -> str:
    return f"{streams} other clients" if streams else "no other client"


def _placement() -> str | None:
    report = _read("vllm_placement.json")
    if report is None:
        return None
    found = report["figures"]
    return (
        f"{_command(report)}: the router placed {found['right']} of {found['prompts']} prompts at the server that had "
        f"their prefix, {found['host_tokens']:,} tokens in host memory, {found['storage_tokens']:,} in storage, "
        f"{found['own_tokens']:,} in vLLM's own caches."
    )


def _groups() -> str | None:
    reports = {file: report for file in VLLM_GROUPS if (report := _read(file)) is not None}
    if not reports:
        return None
    columns = [(VLLM_GROUPS[file], _of("tidekv", report)) for file, report in reports.items()]
    sources = {
        "vLLM's own cache in decode": "vllm:prompt_tokens_by_source_total{local_cache_hit}",
        "decode's host memory": "vllm:tidekv_restore_tokens_l2_total",
        "decode's storage": "vllm:tidekv_restore_tokens_l3_total",
        "prefill": "vllm:tidekv_restore_tokens_transfer_total",
        "decode, which computed them": "vllm:prompt_tokens_by_source_total{local_compute}",
    }
    rows = {
        f"prompt tokens from {title}": [f"{one['metrics'].get(name, 0):,.0f}" for _, one in columns]
        for title, name in sources.items()
    }
    rows["restores that failed"] = [
        f"{one['metrics'].get('vllm:tidekv_restores_failed_total', 0):,.0f}" for _, one in columns
    ]
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    if any(accepted in one["metrics"] for _, one in columns):
        alone = [_of("single", report) for report in reports.values()]
        rows["tokens of the draft that were accepted"] = [_count(one, accepted) for _, one in columns]
        rows["the same, by one server"] = [_count(one, accepted) for one in alone]
    rows["requests that a client aborted"] = [f"{one['aborted']:,}" for _, one in columns]
    rows["answers"] = [f"{one['answers']:,}" for _, one in columns]
    rows["wrong or lost"] = [f"{len(one['wrong']) + len(one['lost']):,}" for _, one in columns]
    rows["servers that hold blocks at the end"] = [f"{sum(map(bool, one['held'].values())):,}" for _, one in columns]
    return "\n".join(
        [
            "Models with full KV (a Llama), windows (a Gemma 3), states (a Falcon H1) and a draft, each token compared "
            "with one server's. Decode's own cache has room for a third of all conversations, or for all with "
            "`--decode-share 1`; with states it is off. A request that a kill has ended was sent again:",
            "",
            *(f"- {VLLM_GROUPS[file]}: {_command(report)}" for file, report in reports.items()),
            "",
            f"| | {' | '.join(title for title, _ in columns)} |",
            f"|---|{'---:|' * len(columns)}",
            *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()),
        ]
    )


def _of(variant: str, report: Mapping[str, Any]) -> Any:  # Any: what JSON holds.
    """Return the figures of a variant; None if it was not served."""
    return next((one for one in report["figures"] if one["variant"] == variant), None)


def _count(one: Mapping[str, Any] | None, metric: str) -> str:
    """Return a metric as a cell."""
    return f"{one['metrics'][metric]:,.0f}" if one is not None and metric in one["metrics"] else "-"


def _command(report: Mapping[str, Any]) -> str:
    about = report["about"]
    return f"`{about['command']}` ({about['date']}, commit {about['commit']}, {about['machine']}, load {about['load']})"


def sglang_table() -> str:
    """Return what real SGLang servers did: each cache of decode beside the others, and what clients got amid faults."""
    lines = [line for file in SGLANG_RUNS if (report := _read(file)) is not None for line in _sglang_caches(report)]
    lines = lines or ["No run was kept."]
    reads = [_sglang_reads(report) for file in SGLANG_READS if (report := _read(file)) is not None]
    if reads:
        lines += ["A prefill that reads from decode, every token compared with one server's:", "", *reads, ""]
    reports = [report for file in SGLANG_FAULTS if (report := _read(file)) is not None]
    if reports:
        lines += _sglang_faults(reports)
    for file in SGLANG_LONG:
        if (report := _read(file)) is not None:
            lines += ["", _sglang_long(report)]
    return "\n".join(lines)


def _sglang_caches(report: Mapping[str, Any]) -> list[str]:
    about, found = report["about"], report["figures"]
    rows = {
        "MiB from prefill": [f"{one['bytes_from_prefill'] / MIB:.1f}" for one in found],
        "ms to the first token from the second turn on, p50": [f"{_later_turns_ms(one):,.0f}" for one in found],
        "ms of CPU of decode's scheduler for a request": [_cpu_ms(one, "decode scheduler") for one in found],
        "answers": [f"{one['answers']:,}" for one in found],
        "wrong or lost answers, HTTP errors": [str(_failures(one)) for one in found],
    }
    return [
        f"`{about['command']}` ({about['date']}, commit {about['commit']}, {about['machine']}, load {about['load']}). "
        "Decode's device memory holds a third of all conversations:",
        "",
        f"| | {' | '.join(_sglang_title(one['variant']) for one in found)} |",
        f"|---|{'---:|' * len(found)}",
        *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()),
        "",
    ]


def _sglang_reads(report: Mapping[str, Any]) -> str:
    (one,) = report["figures"]
    prefill = one["prefill_metrics"]
    computed, prompts, read = (
        f"{prefill[name]:,.0f}"
        for name in (
            "sglang:uncached_prompt_tokens_histogram_sum",
            "sglang:prompt_tokens_total",
            "tidekv_tokens_total{peer}",
        )
    )
    return (
        f"- {_command(report)}: of {prompts} prompt tokens it computed {computed}, and read {read}. {one['answers']:,} "
        f"answers, {len(one['wrong'])} wrong, {len(one['lost'])} lost, {sum(one['http_errors'].values())} HTTP errors, "
        f"{one['retries']} requests sent again."
    )


def _sglang_title(variant: str) -> str:
    """Return the words for a variant; "as it is" for servers whose schedulers spin while they wait."""
    name = variant.removesuffix("-as-is")
    return f"{SGLANG_TITLES.get(name, name)}{', as it is' if name != variant else ''}"


def peers_table_rows(reports: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of the table of whole pairs, from the reports of `dev.py sglang` and `dev.py vllm`."""
    pairs = [(peer, one) for peer, report in reports.items() for one in report["figures"]]
    found = [one for _, one in pairs]
    timed = [one if _has_times(reports[peer]) else {"first_token_s": {}, "cpu_s": {}} for peer, one in pairs]
    turns = sorted({turn for one in timed for turn in one["first_token_s"]}, key=int)
    parts = sorted({part for one in timed for part in one["cpu_s"]})
    rows = [
        ["MiB from prefill", *(f"{_from_prefill(one):.1f}" for one in found)],
        *(
            [f"ms to the first token, turn {turn}, p50", *(_median_ms(one["first_token_s"].get(turn)) for one in timed)]
            for turn in turns
        ),
        *([f"ms of CPU a request: {part}", *(_cpu_ms(one, part) for one in timed)] for part in parts),
        ["answers", *(f"{one['answers']:,}" for one in found)],
        ["wrong or lost answers, HTTP errors", *(str(_failures(one)) for one in found)],
    ]
    return [f"{PAIRS[peer]}: {PAIR_TITLES.get(one['variant'], one['variant'])}" for peer, one in pairs], rows


def peers_table() -> str:
    """Return the table of whole pairs, and what its figures hold."""
    reports = {peer: report for peer in PAIRS if (report := _read(f"{peer}.json")) is not None}
    if not reports:
        return "No run was kept."
    titles, rows = peers_table_rows(reports)
    commands = (
        f"{PAIRS[peer]}: `{about['command']}` ({about['date']}, commit {about['commit']}, {about['machine']}, load "
        f"{about['load']})"
        for peer, about in ((peer, report["about"]) for peer, report in reports.items())
    )
    lines = [
        f"{'. '.join(commands)}. Pairs of an engine run at once and serve by turns; a run in which they did not has no "
        "times. The CPU of a scheduler is without forward passes and sampling, which have a row of their own. vLLM's "
        "engine and worker poll one another while a request runs, so their CPU grows with the time of a run.",
        "",
        f"| | {' | '.join(titles)} |",
        f"|---|{'---:|' * len(titles)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    return "\n".join(lines)


def _median_ms(seconds: Sequence[float] | None) -> str:
    return f"{1e3 * median(seconds):,.0f}" if seconds else "-"


def _cpu_ms(one: Mapping[str, Any], part: str) -> str:
    return f"{1e3 * one['cpu_s'][part] / one['answers']:,.0f}" if part in one["cpu_s"] else "-"


def _failures(one: Mapping[str, Any]) -> int:
    return len(one["wrong"]) + len(one["lost"]) + sum(map(int, one.get("http_errors", {}).values()))


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


def _sglang_faults(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what clients got by fault, with a column for each variant."""
    cells = {(one["fault"], one["variant"]): _clients_got(one) for report in reports for one in report["figures"]}
    variants = list(dict.fromkeys(variant for _, variant in cells))
    # The word for `--fault`, and what strikes.
    faults = {one["fault"]: one["what"] for report in reports for one in report["figures"]}
    commands = ", ".join(
        f"`{about['command']}` ({about['date']}, commit {about['commit']})"
        for about in (report["about"] for report in reports)
    )
    return [
        "What clients got amid faults; a request that failed was sent again until it was served. Pages held: in a "
        f"server, after the last answer. {commands}, {reports[0]['about']['machine']}:",
        "",
        f"| fault | {' | '.join(SGLANG_TITLES.get(variant, variant) for variant in variants)} |",
        f"|---|{'---|' * len(variants)}",
        *(
            f"| `{fault}`: {what} | {' | '.join(cells.get((fault, variant), '-') for variant in variants)} |"
            for fault, what in faults.items()
        ),
    ]


def _clients_got(one: Mapping[str, Any]) -> str:
    wrong, lost = len(one["wrong"]), len(one["lost"])
    errors = sum(one["http_errors"].values())
    # Of requests that were served without a repetition.
    longest_s = max(s for turn in one["first_token_s"].values() for s in turn)
    counts = {
        f"{one['answers'] - wrong} right": True,
        f"**{wrong} wrong**": wrong,
        f"**{lost} lost**": lost,
        f"**{errors} HTTP errors**": errors,
        "**pages held**": any(one["held"].values()),
        f"first tokens within {longest_s:.1f} s": True,
    }
    return ", ".join(words for words, is_said in counts.items() if is_said)


def _sglang_long(report: Mapping[str, Any]) -> str:
    about, (one,) = report["about"], report["figures"]
    errors = sum(one["http_errors"].values())
    held = "nothing is held" if not any(one["held"].values()) else "pages are held"
    return (
        f"`{about['command']}` ({about['date']}, commit {about['commit']}, {about['machine']}): {one['answers']:,} "
        f"answers, {len(one['wrong'])} wrong, {len(one['lost'])} lost, {errors} HTTP errors, {one['aborted']} "
        f"requests aborted; {held} at the end."
    )


def cache_peers_table() -> str:
    """Return bytes and time of the same prompts from another decode worker and from prefill."""
    report = _read("cache_peers.json")
    if report is None:
        return "No run was kept."
    cells = {(one["tokens"], one["source"]): one for one in report["figures"]["cells"]}
    count = len(report["figures"]["cells"][0]["ready_s"])
    rows = [
        [
            f"{tokens:,}",
            *(f"{cells[tokens, source]['bytes'] / MIB:.1f}" for source in ("peer", "transfer")),
            *(f"{1e3 * median(cells[tokens, source]['ready_s']):.1f}" for source in ("peer", "transfer")),
        ]
        for tokens in sorted({tokens for tokens, _ in cells})
    ]
    return "\n".join(
        [
            f"{_command(report)}: {count} restores of each prompt from each source, by turns. Prefill had computed the "
            "prompts before, and only sends; what a peer sends goes by way of host memory:",
            "",
            "| tokens | MiB from the peer | MiB from prefill | ms to READY from the peer, p50 | from prefill, p50 |",
            "|---:|---:|---:|---:|---:|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def runs() -> str:
    """Return the kept runs of real servers, of a GPU and of workers that read from one another."""
    parts = {
        "SGLang": sglang_table,
        "vLLM": vllm_table,
        "A GPU": gpu_table,
        "A prefix from another worker": cache_peers_table,
    }
    return "\n\n".join(f"## {title}\n\n{make().strip()}" for title, make in parts.items())


PAGES: dict[str, Callable[[], str]] = {
    "README.md": readme_table,
    "benchmarks/results/RUNS.md": runs,
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
    sent = one.get("bytes_from_prefill")
    return float(one["metrics"][BYTES_FROM_PREFILL[one["variant"]]] if sent is None else sent) / MIB


def _read(file: str) -> Any:  # Any: what JSON holds.
    path = RESULTS / file
    return json.loads(path.read_text()) if path.is_file() else None


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        path = ROOT / name
        path.write_text(with_figures(name, path.read_text()))
