"""Text report of the main job: a table with both runs side by side, and the result of the comparison."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from demo.conversations import SOURCES
from demo.main_job import JobResult
from demo.phase import Phase

NAMES = {"l1": "L1, device", "l2": "L2, host", "l3": "L3, storage", "transfer": "prefill, by transfer"}


def report(result: JobResult, *, is_model: bool, shows_saving: bool = False) -> RenderableType:
    """Render a result; `is_model`: tokens were compared; otherwise pages were verified. `shows_saving` adds by how many
    times the median time to ready is shorter in the first phase than in the last one.
    """
    table = Table(title=f"L1 {result.l1_pages} pages, L2 {result.l2_pages} pages of {result.layout.page_size} tokens")
    table.add_column("")
    for phase in result.phases:
        table.add_column(phase.name, justify="right")

    def row(name: str, cell: Callable[[Phase], str]) -> None:
        table.add_row(name, *(cell(phase) for phase in result.phases))

    page_bytes = result.layout.page_bytes
    row("requests", lambda phase: f"{phase.requests}")
    row("prompt tokens", lambda phase: f"{phase.prompt_tokens:,}")
    for source in SOURCES:
        row(f"  from {NAMES[source]}", partial(_part, source))
    row("sent", lambda phase: _megabytes(phase.bytes_sent))
    row("saved", lambda phase: _megabytes(phase.prompt_pages * page_bytes - phase.bytes_sent))
    row("time to ready, p50", lambda phase: f"{phase.ready_ms(50):.1f} ms")
    row("time to ready, p99", lambda phase: f"{phase.ready_ms(99):.1f} ms")
    row("retracted for lack of pages", lambda phase: f"{phase.retractions}")
    row("whole run", lambda phase: f"{phase.wall_s:.1f} s")
    lines = _verdict(result, is_model=is_model)
    if shows_saving and not result.failures:
        saving = result.phases[-1].ready_ms(50) / result.phases[0].ready_ms(50)
        lines.insert(0, Text(f"The median time to the first token is {saving:.1f} times shorter with the cache."))
    return Group(table, *lines)


def _verdict(result: JobResult, *, is_model: bool) -> list[Text]:
    lines = []
    if result.reusable_tokens:
        share = (result.phases[0].prompt_tokens - result.phases[0].tokens["transfer"]) / result.reusable_tokens
        lines.append(
            Text(
                f"An unlimited cache would have served {result.reusable_tokens:,} tokens; this one served {share:.1%}."
            )
        )
    if result.failures:
        lines.append(Text(f"FAILED: {len(result.failures)} findings", style="bold red"))
        lines += [Text(f"  {failure}") for failure in result.failures[:20]]
        return lines
    if is_model:
        what = (
            f"All {result.compared:,} generated tokens equal those of one process's generate() "
            f"({result.layout.dtype}, smallest margin of a choice {result.smallest_margin:.1e})."
        )
    else:
        what = f"All {result.compared:,} restored pages have the bytes that they must have."
    return [*lines, Text(what, style="green"), Text("Nothing is held at the end: every pool is free + cached.")]


def _part(source: str, phase: Phase) -> str:
    share = phase.tokens[source] / phase.prompt_tokens if phase.prompt_tokens else 0.0
    return f"{phase.tokens[source]:,} ({share:.1%})"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
