"""What a fleet did: figures of a run, the table of several, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from examples.fleet.load import Turn

SOURCES = ("l1", "l2", "l3", "transfer")
WINDOW_S = 10.0
KILL_S = 3.0
"""Requests that a killed decode worker had are lost within so many seconds."""


class Happening(msgspec.Struct, frozen=True):
    """Something that was done to the fleet, at a time of the monotonic clock."""

    at_s: float
    what: str
    is_decode_killed: bool = False


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run: times are seconds since its start, tokens are those of prompts."""

    policy: str
    requests: int
    lost_with_decode: int
    failed: int
    wrong: int
    tokens: dict[str, int]
    transfer_bytes: int
    first_token_p50_s: float
    first_token_p99_s: float
    hits: list[tuple[float, float]]
    """Share of prompt tokens that the worker's own memory had, by window."""
    happenings: list[tuple[float, str]]
    errors: list[str]

    @property
    def own_hit_rate(self) -> float:
        """Share of prompt tokens that the worker had in device or host memory."""
        return (self.tokens["l1"] + self.tokens["l2"]) / max(1, sum(self.tokens.values()))

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that needed no prefill."""
        return 1 - self.tokens["transfer"] / max(1, sum(self.tokens.values()))


def run_of(policy: str, turns: Sequence[Turn], happenings: Sequence[Happening], *, wrong: int, token_bytes: int) -> Run:
    """Return the figures of a run."""
    start_s = min(turn.asked_at_s for turn in turns)
    answered = [turn for turn in turns if not turn.error]
    failed = [turn for turn in turns if turn.error]
    kills = [one.at_s for one in happenings if one.is_decode_killed]
    lost = [
        turn for turn in failed if any(turn.asked_at_s <= at_s <= turn.ended_at_s <= at_s + KILL_S for at_s in kills)
    ]
    tokens = {source: sum(turn.sources.get(source, 0) for turn in answered) for source in SOURCES}
    windows: dict[int, list[Turn]] = {}
    for turn in answered:
        windows.setdefault(int((turn.asked_at_s - start_s) / WINDOW_S), []).append(turn)
    firsts = [turn.first_token_s for turn in answered] or [0.0]
    return Run(
        policy=policy,
        requests=len(turns),
        lost_with_decode=len(lost),
        failed=len(failed) - len(lost),
        wrong=wrong,
        tokens=tokens,
        transfer_bytes=tokens["transfer"] * token_bytes,
        first_token_p50_s=median(firsts),
        first_token_p99_s=float(np.quantile(firsts, 0.99)),
        hits=[((at + 0.5) * WINDOW_S, _own_share(windows[at])) for at in sorted(windows)],
        happenings=[(one.at_s - start_s, one.what) for one in happenings],
        errors=sorted({turn.error for turn in failed if turn not in lost})[:5],
    )


def print_table(console: Console, runs: Sequence[Run]) -> None:
    """Print the runs side by side."""
    table = Table(title="the same users and the same kills, by policy of the router")
    table.add_column("")
    for run in runs:
        table.add_column(run.policy, justify="right")
    rows = {
        "requests": [f"{run.requests:,}" for run in runs],
        "lost with a killed decode worker": [f"{run.lost_with_decode}" for run in runs],
        "failed otherwise": [f"{run.failed}" for run in runs],
        "answers with a wrong token": [f"{run.wrong}" for run in runs],
        "prompt tokens from the worker's memory": [f"{run.own_hit_rate:.1%}" for run in runs],
        "prompt tokens from the shared store": [
            f"{run.tokens['l3'] / max(1, sum(run.tokens.values())):.1%}" for run in runs
        ],
        "MB from prefill": [f"{run.transfer_bytes / 1e6:,.1f}" for run in runs],
        "time to first token, p50": [f"{run.first_token_p50_s * 1000:,.0f} ms" for run in runs],
        "time to first token, p99": [f"{run.first_token_p99_s * 1000:,.0f} ms" for run in runs],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    for run in runs:
        for error in run.errors:
            console.print(f"{run.policy}: {error}", markup=False)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write a picture of the hit rate over time, with what was done to the fleet."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot([at_s for at_s, _ in run.hits], [100 * share for _, share in run.hits], label=run.policy)
    for at_s, what in runs[-1].happenings:
        axes.axvline(at_s, color="0.8", zorder=0)
        axes.text(at_s, 101, what, rotation=40, fontsize=7, ha="left", va="bottom")
    axes.set(ylim=(0, 100), xlabel="seconds", ylabel="% of prompt tokens in the worker's memory")
    axes.legend(loc="lower right")
    figure.savefig(path)


def _own_share(turns: Sequence[Turn]) -> float:
    had = sum(turn.sources.get("l1", 0) + turn.sources.get("l2", 0) for turn in turns)
    return had / max(1, sum(len(turn.prompt) for turn in turns))
