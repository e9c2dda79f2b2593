"""What a fleet did: figures of a run, the table of several, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
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


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one decode worker did. `in_worker_p50_s`: seconds from a request's arrival there to its first token."""

    requests: int
    own_hit_rate: float
    in_worker_p50_s: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run: times are seconds since its start, tokens are those of prompts."""

    router: str
    policy: str
    seconds: float
    users: int
    requests: int
    lost_with_decode: int
    failed: int
    wrong: int
    tokens: dict[str, int]
    transfer_bytes: int
    first_token_p50_s: float
    first_token_p99_s: float
    outside_worker_p50_s: float
    """The part of the time to the first token before the request's arrival at the worker, and on the way back."""
    shares: dict[str, Share]
    """By decode worker."""
    cpu_s: dict[str, float]
    """Seconds of CPU while it served, by process."""
    hits: list[tuple[float, float]]
    """Share of prompt tokens that the worker's own memory had, by window."""
    busiest: list[tuple[float, float]]
    """Share of the requests that the decode worker with the most of them had, by window."""
    medians: list[tuple[float, float]]
    """Median time to the first token, by window."""
    happenings: list[tuple[float, str]]
    errors: list[str]

    @property
    def answered(self) -> int:
        """Number of requests with a whole answer."""
        return self.requests - self.lost_with_decode - self.failed

    @property
    def own_hit_rate(self) -> float:
        """Share of prompt tokens that the worker had in device or host memory."""
        return (self.tokens["l1"] + self.tokens["l2"]) / max(1, sum(self.tokens.values()))

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that needed no prefill."""
        return 1 - self.tokens["transfer"] / max(1, sum(self.tokens.values()))


class Setting(msgspec.Struct, frozen=True):
    """What a run was."""

    router: str
    policy: str
    seconds: float
    users: int


def run_of(
    setting: Setting,
    turns: Sequence[Turn],
    happenings: Sequence[Happening],
    *,
    wrong: int,
    token_bytes: int,
    cpu_s: Mapping[str, float],
) -> Run:
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
    by_worker: dict[str, list[Turn]] = {}
    for turn in answered:
        windows.setdefault(int((turn.asked_at_s - start_s) / WINDOW_S), []).append(turn)
        by_worker.setdefault(turn.worker, []).append(turn)

    def over_time(figure: Callable[[Sequence[Turn]], float]) -> list[tuple[float, float]]:
        return [((at + 0.5) * WINDOW_S, figure(windows[at])) for at in sorted(windows)]

    return Run(
        router=setting.router,
        policy=setting.policy,
        seconds=setting.seconds,
        users=setting.users,
        requests=len(turns),
        lost_with_decode=len(lost),
        failed=len(failed) - len(lost),
        wrong=wrong,
        tokens=tokens,
        transfer_bytes=tokens["transfer"] * token_bytes,
        first_token_p50_s=_first_token_p50_s(answered),
        first_token_p99_s=float(np.quantile([turn.first_token_s for turn in answered] or [0.0], 0.99)),
        outside_worker_p50_s=_middle([turn.first_token_s - turn.in_worker_s for turn in answered]),
        shares={
            name: Share(
                requests=len(of_worker),
                own_hit_rate=_own_share(of_worker),
                in_worker_p50_s=_middle([turn.in_worker_s for turn in of_worker]),
            )
            for name, of_worker in sorted(by_worker.items())
        },
        cpu_s=dict(cpu_s),
        hits=over_time(_own_share),
        busiest=over_time(_busiest_share),
        medians=over_time(_first_token_p50_s),
        happenings=[(one.at_s - start_s, one.what) for one in happenings],
        errors=sorted({turn.error for turn in failed if turn not in lost})[:5],
    )


def rows_of(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the lines of a table with a column for each run."""
    workers = sorted({name for run in runs for name in run.shares})
    columns = [_column(run, workers) for run in runs]
    return {title: [column[title] for column in columns] for title in columns[0]}


def _column(run: Run, workers: Sequence[str]) -> dict[str, str]:
    from_store = run.tokens["l3"] / max(1, sum(run.tokens.values()))
    cells = {
        "requests": f"{run.requests:,}",
        "lost with a killed decode worker": f"{run.lost_with_decode}",
        "failed otherwise": f"{run.failed}",
        "answers with a wrong token": f"{run.wrong}",
        "prompt tokens from the worker's memory": f"{run.own_hit_rate:.1%}",
        "prompt tokens from the shared store": f"{from_store:.1%}",
        "MB from prefill": f"{run.transfer_bytes / 1e6:,.1f}",
        "prompt tokens from prefill for a request": f"{run.tokens['transfer'] / max(1, run.answered):,.0f}",
        "time to first token, p50": _ms(run.first_token_p50_s),
        "time to first token, p99": _ms(run.first_token_p99_s),
        "of it outside of the worker, p50": _ms(run.outside_worker_p50_s),
    }
    for name in workers:
        share = run.shares.get(name)
        cells[f"requests of {name}, p50 there"] = (
            "0" if share is None else f"{share.requests:,}, {_ms(share.in_worker_p50_s)}"
        )
    cells["requests at the busiest worker of ten seconds"] = f"{_middle([share for _, share in run.busiest]):.0%}"
    for kind in ("decode", "prefill", "router"):
        used_s = sum(each_s for name, each_s in run.cpu_s.items() if name.startswith(kind))
        cells[f"CPU of {kind} for a request"] = _ms(used_s / max(1, run.answered))
    return cells


def _ms(value_s: float) -> str:
    return f"{value_s * 1000:,.0f} ms"


def print_table(console: Console, runs: Sequence[Run]) -> None:
    """Print the runs side by side."""
    table = Table(title="the same users and the same kills, by policy of the router")
    table.add_column("")
    for run in runs:
        table.add_column(run.policy, justify="right")
    for name, cells in rows_of(runs).items():
        table.add_row(name, *cells)
    console.print(table)
    for run in runs:
        for error in run.errors:
            console.print(f"{run.policy}: {error}", markup=False)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write a picture over time: hit rate, share of the busiest worker, time to first token, and what was done."""
    # A second of imports that runs without a picture do without.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    rows = (
        ("hits", "% of prompt tokens\nin the worker's memory", 100.0),
        ("busiest", "% of requests at\nthe busiest worker", 100.0),
        ("medians", "ms to first token, p50", 1000.0),
    )
    every = figure.subplots(len(rows), sharex=True)
    for axes, (field, label, scale) in zip(every, rows, strict=True):
        for run in runs:
            points: list[tuple[float, float]] = getattr(run, field)
            axes.plot([at_s for at_s, _ in points], [scale * value for _, value in points], label=run.policy)
        for at_s, _ in runs[-1].happenings:
            axes.axvline(at_s, color="0.8", zorder=0)
        axes.set(ylabel=label, ylim=(0, 100 if scale == 100.0 else None))
    for at_s, what in runs[-1].happenings:
        every[0].text(at_s, 101, what, rotation=40, fontsize=7, ha="left", va="bottom")
    every[-1].set(xlabel="seconds")
    every[0].legend(loc="lower right")
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


def _own_share(turns: Sequence[Turn]) -> float:
    had = sum(turn.sources.get("l1", 0) + turn.sources.get("l2", 0) for turn in turns)
    return had / max(1, sum(len(turn.prompt) for turn in turns))


def _busiest_share(turns: Sequence[Turn]) -> float:
    return Counter(turn.worker for turn in turns).most_common(1)[0][1] / len(turns)


def _first_token_p50_s(turns: Sequence[Turn]) -> float:
    return _middle([turn.first_token_s for turn in turns])


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
