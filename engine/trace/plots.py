"""Plots of measurements and runs by matplotlib (extra `plot`), which is imported on first use.

Every function returns a new figure and leaves matplotlib's global state unchanged.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tidekv.states.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
DPI = 120
SOURCE_NAMES = {
    "l1": "device (L1)",
    "l2": "host (L2)",
    "l3": "storage (L3)",
    "transfer": "prefill, by transfer",
    "recompute": "recomputed",
}
SOURCE_COLORS = {"l1": "#2f9e57", "l2": "#3b6fd4", "l3": "#b14fc5", "transfer": "#1797a6", "recompute": "#8a8f98"}
QUANTILES = (0.5, 0.99)


def check_plot(path: Path | None) -> None:
    """Check, before a measurement starts, that a plot can be written. Raises InvalidConfig."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise InvalidConfig(f"--plot writes {' or '.join(SUFFIXES)} files, not {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise InvalidConfig(f"--plot cannot write {str(path)!r}: there is no such folder")
    try:
        found = importlib.util.find_spec("matplotlib") is not None
    except ValueError:
        found = False
    if not found:
        raise InvalidConfig("--plot needs matplotlib, which is an extra: pip install 'tidekv[plot]'")


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the file's suffix. Raises InvalidConfig if it cannot be written."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise InvalidConfig(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def plot_rounds(rounds: Mapping[str, Sequence[Mapping[str, int]]], prompts: Sequence[int]) -> Figure:
    """Plot sources by round: for each mode, one stacked bar per round, in percent of its prompt tokens.

    `rounds`: by name of the mode, tokens by source of each round; `prompts`: the tokens of a prompt in each round.
    """
    figure = _figure(len(rounds))
    for axes, (name, sources) in zip(_axes(figure, len(rounds)), rounds.items(), strict=True):
        _stack(axes, [f"{prompt:,}" for prompt in prompts], sources)
        axes.set_title(name)
        axes.set_xlabel("prompt (tokens), by round")
    figure.axes[0].set_ylabel("prompt tokens by source (%)")
    _legend(figure)
    return figure


def plot_run(ready_s: Mapping[str, Sequence[float]], sources: Mapping[str, Mapping[str, int]]) -> Figure:
    """Plot, for each phase of a run, the distribution of the time to ready and the prompt tokens by source."""
    figure = _figure(2)
    times, bars = _axes(figure, 2)
    for name, seconds in ready_s.items():
        if not seconds:
            continue
        ordered = np.sort(np.asarray(seconds)) * 1000
        percent = np.arange(1, len(ordered) + 1) / len(ordered) * 100
        middle, late = (float(np.quantile(ordered, quantile)) for quantile in QUANTILES)
        times.step(ordered, percent, where="post", label=f"{name}: p50 {middle:.1f} ms, p99 {late:.1f} ms")
    times.set_xscale("log")
    times.set_title("time to ready")
    times.set_xlabel("time to ready (ms)")
    times.set_ylabel("requests that are ready (%)")
    times.set_ylim(0, 102)
    times.grid(alpha=0.3)
    if times.lines:
        times.legend(fontsize="small", loc="lower right")
    _stack(bars, list(sources), list(sources.values()))
    bars.set_title("sources")
    bars.set_ylabel("prompt tokens by source (%)")
    _legend(figure)
    return figure


def plot_bandwidth(speeds: Mapping[str, float], *, page_bytes: int, batch_bytes: int) -> Figure:
    """Plot bandwidth by tier: one bar per path of pages, in GB/s."""
    figure = _figure(1)
    (axes,) = _axes(figure, 1)
    names = list(speeds)
    bars = axes.barh(names, list(speeds.values()), color=SOURCE_COLORS["l2"])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("bandwidth (GB/s)")
    axes.set_title(f"{batch_bytes / 1e6:.0f} MB in pages of {page_bytes / 1e6:.2f} MB, median of several rounds")
    return figure


def plot_scaling(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Plot cost against work: one line per part through (units of work, seconds), with n log n for comparison."""
    figure = _figure(len(curves))
    for axes, (name, points) in zip(_axes(figure, len(curves)), curves.items(), strict=True):
        counts, seconds = (np.array(column) for column in zip(*points, strict=True))
        allowed = counts * np.log(counts)
        axes.loglog(counts, seconds, marker="o", color=SOURCE_COLORS["l2"], label="measured")
        axes.loglog(counts, seconds[0] * allowed / allowed[0], "--", color=SOURCE_COLORS["recompute"], label="n log n")
        axes.set_title(name)
        axes.set_xlabel("work (n)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper left")
    figure.axes[0].set_ylabel("CPU time (s)")
    return figure


def _figure(columns: int) -> Figure:
    # Not pyplot, which keeps every figure of the process and chooses a window system.
    from matplotlib.figure import Figure

    return Figure(figsize=(3.0 + 4.0 * columns, 4.2), layout="constrained")


def _axes(figure: Figure, columns: int) -> list[Axes]:
    return list(figure.subplots(1, columns, squeeze=False)[0])


def _stack(axes: Axes, labels: Sequence[str], bars: Sequence[Mapping[str, int]]) -> None:
    """Draw one bar per label, in percent of its sum, with the sources in their order."""
    totals = np.array([sum(bar.values()) or 1 for bar in bars])
    below = np.zeros(len(bars))
    for source, color in SOURCE_COLORS.items():
        shares = np.array([bar.get(source, 0) for bar in bars]) / totals * 100
        if shares.any():
            axes.bar(range(len(bars)), shares, bottom=below, color=color, label=SOURCE_NAMES[source])
        below = below + shares
    axes.set_xticks(range(len(bars)), labels)
    axes.set_ylim(0, 100)


def _legend(figure: Figure) -> None:
    """Draw one legend for all axes, below them."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        bars, names = axes.get_legend_handles_labels()
        handles.update({name: bar for name, bar in zip(names, bars, strict=True) if name in SOURCE_NAMES.values()})
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles) or 1)
