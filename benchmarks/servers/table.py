"""Tables of a comparison: seconds to the first token by turn, and what each variant moved, spent and lost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.table import Table

from benchmarks.servers.cluster import Figures
from benchmarks.servers.conversations import Load

MIB = float(1 << 20)


def first_token_table(load: Load, figures: Sequence[Figures]) -> Table:
    """Milliseconds to the first token, p50 / p99, by turn and variant."""
    table = Table(title="Milliseconds to the first token, p50 / p99")
    table.add_column("turn", justify="right")
    table.add_column("prompt", justify="right")
    for one in figures:
        table.add_column(one.variant.title, justify="right")
    for turn in range(load.turns):
        cells = [_quantiles(one.outcome.first_s.get(turn, [])) for one in figures]
        table.add_row(str(turn), str(load.prompt_tokens(turn)), *cells)
    return table


def totals_table(
    figures: Sequence[Figures],
    *,
    titles: Mapping[str, str],
    prefill_titles: Mapping[str, str] = MappingProxyType({}),
    ours: str | None = None,
) -> Table:
    """Tokens by source, bytes, CPU seconds, and wrong or lost answers of each variant.

    `titles`, `prefill_titles`: rows of metrics of decode and of prefill. `ours`: how names of further counters of
    decode begin, if they have rows.
    """
    table = Table(title="Whole run")
    table.add_column("")
    for one in figures:
        table.add_column(one.variant.title, justify="right")
    for metric, title in titles.items():
        table.add_row(title, *(f"{one.metrics[metric]:,.0f}" if metric in one.metrics else "-" for one in figures))
    for metric, title in prefill_titles.items():
        found = [one.prefill_metrics.get(metric) for one in figures]
        table.add_row(title, *("-" if tokens is None else f"{tokens:,.0f}" for tokens in found))
    if ours is not None:
        counters = {name for one in figures for name, value in one.metrics.items() if value}
        for name in sorted(name for name in counters if name.startswith(ours) and name.endswith("_total")):
            title = name.removeprefix(ours).removesuffix("_total")
            table.add_row(title, *(f"{one.metrics.get(name, 0):,.0f}" for one in figures))
    table.add_row("MiB from prefill", *(_from_prefill(one) for one in figures))
    for part in sorted({part for one in figures for part in one.cpu_s}):
        table.add_row(f"CPU seconds: {part}", *(_seconds(one.cpu_s.get(part)) for one in figures))
    table.add_row("seconds", *(f"{one.outcome.seconds:.1f}" for one in figures))
    table.add_row("answers", *(str(len(one.outcome.answers)) for one in figures))
    table.add_row("wrong answers", *(str(len(one.outcome.wrong)) for one in figures))
    table.add_row("lost requests", *(str(len(one.outcome.lost)) for one in figures))
    table.add_row("HTTP errors", *(str(sum(one.outcome.http_errors.values())) for one in figures))
    table.add_row("requests sent again", *(str(one.outcome.retries) for one in figures))
    table.add_row("requests aborted", *(str(one.outcome.aborted) for one in figures))
    table.add_row("blocks held at the end", *(_held(one) for one in figures))
    return table


def progress_line(one: Figures) -> str:
    """Figures so far in one line: a long run that is ended has said how far it came."""
    outcome = one.outcome
    turn = max(outcome.first_s, default=0)
    return (
        f"{one.variant.name}: {len(outcome.answers)} answers ({len(outcome.wrong)} wrong, {len(outcome.lost)} lost) in "
        f"{outcome.seconds:.0f} s, turn {turn}: {_quantiles(outcome.first_s.get(turn, []))} ms to the first token, "
        f"{_from_prefill(one)} MiB from prefill"
    )


def _from_prefill(one: Figures) -> str:
    return "-" if one.bytes_from_prefill is None else f"{one.bytes_from_prefill / MIB:,.1f}"


def _seconds(spent: float | None) -> str:
    return "-" if spent is None else f"{spent:.1f}"


def _held(one: Figures) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in one.held.items() if share) or "none"


def _quantiles(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    last = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return f"{1e3 * statistics.median(ordered):,.0f} / {1e3 * last:,.0f}"
