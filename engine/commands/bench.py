"""`tidekv bench NAME`: the measurements of this project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(help="Measure something and print a table.", no_args_is_help=True)
Plot = Annotated[Path | None, typer.Option(help="Draw it to this .png or .svg file, too (extra plot).")]


def register(app: typer.Typer) -> None:
    """Add `bench` to the command line."""
    app.add_typer(bench_app, name="bench")


@bench_app.command()
def multiturn(plot: Plot = None) -> None:
    """Serve the multi-turn acceptance: hit rates by round, with decode output kept and not kept."""
    from tidekv.engine.seeing.plots import check_plot, plot_rounds, save_plot
    from tidekv.engine.workload.multiturn import PROMPTS, print_multiturn, run_both_ways

    check_plot(plot)
    rounds = run_both_ways()
    print_multiturn(rounds)
    if plot is not None:
        save_plot(plot_rounds({name: [hits.sources for hits in way] for name, way in rounds.items()}, PROMPTS), plot)


@bench_app.command()
def tiers(
    storage: Annotated[str, typer.Option(help="Storage URI; empty: files in a temporary directory.")] = "",
    plot: Plot = None,
) -> None:
    """Measure how fast pages go between device, host, storage, and another process over NIXL."""
    from tidekv.engine.seeing.plots import check_plot, plot_bandwidth, save_plot
    from tidekv.engine.workload.tier_speeds import LAYOUT, PAGES, print_tiers, run_tiers

    check_plot(plot)
    speeds = run_tiers(storage=storage)
    print_tiers(speeds)
    if plot is not None:
        figure = plot_bandwidth(speeds, page_bytes=LAYOUT.page_bytes, batch_bytes=PAGES * LAYOUT.page_bytes)
        save_plot(figure, plot)
