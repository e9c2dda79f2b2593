"""Measurements of a checkout: `python3 dev.py bench NAME`, or `python -m benchmarks NAME`. A wheel has none of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidekv.states.errors import TidekvError

WIDTH_UNSEEN = 160
"""Columns of a table that goes to a file."""

app = typer.Typer(name="bench", help="Measure something and print a table.", no_args_is_help=True, add_completion=False)
Plot = Annotated[Path | None, typer.Option(help="Draw it to this .png or .svg file, too (extra plot).")]


@app.command(name="all")
def all_targets(
    names: Annotated[list[str] | None, typer.Argument(help="Targets, groups or measurements; all, if none.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="One of them; may be repeated.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all verdicts to this file.")] = None,
    peers: Annotated[Path | None, typer.Option(help="Where peers are kept; they come from the registry.")] = None,
    traces: Annotated[Path | None, typer.Option(help="The folder of recordings; ../shared/traces if there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw cost against work to this .png or .svg file.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Show the targets, and measure nothing.")] = False,
) -> None:
    """Measure every target beside peers and limits: each passes, is short, or is missing.

    Takes 22 to 25 minutes on two cores. The exit code does not depend on the figures.
    """
    from benchmarks.plots import check_plot

    check_plot(plot)
    chosen = [*(only or ()), *(names or ())]
    given = {"json": json, "peers": peers, "traces": traces, "plot": plot}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    command = [sys.executable, "-m", "benchmarks.all_targets", *options, *(["--list"] if show else [])]
    # In the place of this process: ending it ends the measurements.
    os.execv(command[0], [*command, *(["--only", *chosen] if chosen else [])])


@app.command()
def multiturn(plot: Plot = None) -> None:
    """Serve the multi-turn acceptance: hit rates by round, with decode output kept and not kept."""
    from benchmarks.multiturn import PROMPTS, print_multiturn, run_both_ways
    from benchmarks.plots import check_plot, plot_rounds, save_plot

    check_plot(plot)
    rounds = run_both_ways()
    print_multiturn(rounds)
    if plot is not None:
        save_plot(plot_rounds({name: [hits.sources for hits in way] for name, way in rounds.items()}, PROMPTS), plot)


@app.command()
def paper(
    seed: Annotated[int, typer.Option(help="The run is the same for the same seed.")] = 1,
    sweep: Annotated[bool, typer.Option(help="Sweep every constant, to where the gain ends: two minutes more.")] = True,
) -> None:
    """Repeat the published tables of decode-side caching: the core decides, only time is modeled."""
    from rich.console import Console

    from benchmarks.published.printing import print_paper
    from benchmarks.published.tables import run_paper

    console = Console()
    print_paper(run_paper(seed=seed, swept=sweep), console if console.is_terminal else Console(width=WIDTH_UNSEEN))


@app.command()
def sources(
    seed: Annotated[int, typer.Option(help="The run is the same for the same seed.")] = 1,
) -> None:
    """Race restore, transfer and the core's plan, from a slow link to a slow disk, in modeled time."""
    from benchmarks.published.printing import print_sources
    from benchmarks.published.sources import race

    print_sources(race(seed=seed))


@app.command()
def policies(
    ratios: Annotated[list[float] | None, typer.Option(help="Link speed over storage speed; 1:16 to 16:1.")] = None,
    policy: Annotated[str, typer.Option(help="A fetch policy in place of the default one.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Restore with the default storage policy and without cache, in turn, on throttled real processes.

    Takes half an hour.
    """
    options = ["--json", str(json or os.devnull), *(["--policy", policy] if policy else [])]
    options += ["--ratios", *map(str, ratios)] if ratios else []
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.policies", *options])


@app.command("first-rounds")
def first_rounds(
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Ask for the same prompts in four rounds with the default policy, with storage always, and without it.

    On throttled real processes. Takes four minutes.
    """
    command = [sys.executable, "-m", "benchmarks.first_rounds", "--json", str(json or os.devnull)]
    os.execv(sys.executable, command)


@app.command()
def tiers(
    storage: Annotated[str, typer.Option(help="Storage URI; empty: files in a temporary directory.")] = "",
    plot: Plot = None,
) -> None:
    """Measure how fast pages go between device, host, storage, and another process over NIXL."""
    from benchmarks.plots import check_plot

    check_plot(plot)
    options = [f"--storage={storage}", *([f"--plot={plot}"] if plot is not None else [])]
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.tier_speeds", *options])


if __name__ == "__main__":
    try:
        app()
    except TidekvError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
