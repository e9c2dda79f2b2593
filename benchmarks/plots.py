"""Plots of measurements by matplotlib (extra `plot`), which is imported on first use.

Every function returns a new figure and leaves matplotlib's global state unchanged.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tidekv.states.errors import InvalidConfig, cause_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
DPI = 120
MEASURED, ALLOWED = "#3b6fd4", "#8a8f98"
"""Colors of what was measured, and of what it is compared with."""
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 12, "fontweight": "bold", "pad": 10}  # Of Axes.set_title.
PaletteName: TypeAlias = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Palette:
    """Colors of everything but the data, whose colors can be seen on both papers."""

    paper: str
    ink: str
    dim: str
    line: str


PALETTES: dict[PaletteName, Palette] = {
    "light": Palette(paper="#ffffff", ink="#17202a", dim="#4d5a68", line="#dde3ea"),
    "dark": Palette(paper="#1e2129", ink="#e6edf3", dim="#a7b4c2", line="#363e49"),
}


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


def save_plot(figure: Figure, path: Path, *, palette: PaletteName = "light") -> None:
    """Write a figure as PNG or SVG, by the file's suffix. Raises InvalidConfig if it cannot be written."""
    _paint(figure, PALETTES[palette])
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise InvalidConfig(f"{str(path)!r} cannot be written: {cause_of(error)}") from error


def plot_bandwidth(speeds: Mapping[str, float], *, page_bytes: int, batch_bytes: int) -> Figure:
    """Plot bandwidth by tier: one bar per path of pages, in GB/s."""
    figure = _figure(1)
    (axes,) = _axes(figure, 1)
    names = list(speeds)
    bars = axes.barh(names, list(speeds.values()), height=0.6, color=MEASURED)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("bandwidth (GB/s)")
    batch, page = f"{batch_bytes / 1e6:.0f} MB", f"{page_bytes / 1e6:.2f} MB"
    axes.set_title(f"{batch} in pages of {page}, median of several rounds", **TITLE)
    return figure


def plot_scaling(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Plot cost against work: one line per part through (units of work, seconds), with n log n for comparison."""
    figure = _figure(len(curves))
    for axes, (name, points) in zip(_axes(figure, len(curves)), curves.items(), strict=True):
        counts, seconds = (np.array(column) for column in zip(*points, strict=True))
        allowed = counts * np.log(counts)
        axes.loglog(counts, seconds[0] * allowed / allowed[0], "--", color=ALLOWED, label="n log n")
        axes.loglog(counts, seconds, marker="o", linewidth=2, color=MEASURED, label="measured")
        axes.set_title(name, **TITLE)
        axes.set_xlabel("work (n)")
        # The points that were measured, in plain numbers: powers of ten are hard to read off.
        axes.set_xticks(counts, [f"{at:,.0f}" for at in counts])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda at, _: f"{at:g} s" if at >= 1 else f"{at * 1000:g} ms")
        axes.grid()
        axes.legend(fontsize="small", loc="upper left", frameon=False)
    figure.axes[0].set_ylabel("CPU time")
    return figure


def _figure(columns: int) -> Figure:
    # Not pyplot, which keeps every figure of the process and chooses a window system.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    padding = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    return Figure(figsize=(3.0 + 4.0 * columns, 4.2), layout=padding)


def _axes(figure: Figure, columns: int) -> list[Axes]:
    found: list[Axes] = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in found:
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", length=0, labelsize=9)
    return found


def _paint(figure: Figure, palette: Palette) -> None:
    """Give everything but the data its colors."""
    figure.set_facecolor(palette.paper)
    legends = list(figure.legends)
    for axes in figure.axes:
        axes.set_facecolor(palette.paper)
        axes.spines[:].set_color(palette.line)
        axes.tick_params(which="both", labelcolor=palette.dim, grid_color=palette.line, grid_linewidth=0.8)
        axes.xaxis.label.set_color(palette.dim)
        axes.yaxis.label.set_color(palette.dim)
        axes.set_title(axes.get_title(loc="left"), **TITLE, color=palette.ink)
        for words in axes.texts:
            words.set_color(palette.ink)
        if (legend := axes.get_legend()) is not None:
            legends.append(legend)
    for words in (words for legend in legends for words in legend.get_texts()):
        words.set_color(palette.ink)
