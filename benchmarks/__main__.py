"""`tidekv bench NAME`: the measurements of this project."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidekv.states.errors import InvalidConfig

# Beside this folder in a checkout; a wheel has no benchmarks.
BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"

WIDTH_UNSEEN = 160
"""Columns of a table that goes to a file."""


def benchmark_program(name: str) -> Path:
    """The path of a program in benchmarks/. Raises InvalidConfig if there is no checkout around this package."""
    program = BENCHMARKS / name
    if not program.is_file():
        raise InvalidConfig(
            f"the benchmarks are not part of the installed package: run this from a checkout ({program} is missing)"
        )
    return program


bench_app = typer.Typer(help="Measure something and print a table.", no_args_is_help=True)
Plot = Annotated[Path | None, typer.Option(help="Draw it to this .png or .svg file, too (extra plot).")]


def register(app: typer.Typer) -> None:
    """Add `bench` to the command line."""
    app.add_typer(bench_app, name="bench")


@bench_app.command(name="all")
def all_targets(
    names: Annotated[list[str] | None, typer.Argument(help="Targets, groups or measurements; all, if none.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="One of them; may be repeated.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all verdicts to this file.")] = None,
    peers: Annotated[Path | None, typer.Option(help="Where peers are kept; they come from the registry.")] = None,
    traces: Annotated[Path | None, typer.Option(help="The folder of recordings; ../shared/traces if there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw cost against work to this .png or .svg file.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Show the targets, and measure nothing.")] = False,
) -> None:
    """Measure what tidekv is to reach, beside peers and limits: each target passes, is short, or is missing.

    Takes 22 to 25 minutes on two cores. The exit code says nothing of the figures.
    """
    from tidekv.engine.trace.plots import check_plot

    program = benchmark_program("all_targets.py")
    check_plot(plot)
    chosen = [*(only or ()), *(names or ())]
    given = {"json": json, "peers": peers, "traces": traces, "plot": plot}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    command = [sys.executable, str(program), *options, *(["--list"] if show else [])]
    # In the place of this process: ending it ends the measurements.
    os.execv(command[0], [*command, *(["--only", *chosen] if chosen else [])])


@bench_app.command()
def multiturn(plot: Plot = None) -> None:
    """Serve the multi-turn acceptance: hit rates by round, with decode output kept and not kept."""
    from benchmarks.multiturn import PROMPTS, print_multiturn, run_both_ways
    from tidekv.engine.trace.plots import check_plot, plot_rounds, save_plot

    check_plot(plot)
    rounds = run_both_ways()
    print_multiturn(rounds)
    if plot is not None:
        save_plot(plot_rounds({name: [hits.sources for hits in way] for name, way in rounds.items()}, PROMPTS), plot)


@bench_app.command()
def paper(
    seed: Annotated[int, typer.Option(help="The run is the same for the same seed.")] = 1,
    sweep: Annotated[bool, typer.Option(help="Sweep every constant, to where the gain ends: two minutes more.")] = True,
) -> None:
    """Repeat the published tables of decode-side caching on a modeled clock: the core decides, only time is made up."""
    from rich.console import Console

    from benchmarks.published.printing import print_paper
    from benchmarks.published.tables import run_paper

    console = Console()
    print_paper(run_paper(seed=seed, swept=sweep), console if console.is_terminal else Console(width=WIDTH_UNSEEN))


@bench_app.command()
def sources(
    seed: Annotated[int, typer.Option(help="The run is the same for the same seed.")] = 1,
) -> None:
    """Race restore, transfer and what the core plans, from a slow link to a slow disk, on a modeled clock."""
    from benchmarks.published.printing import print_sources
    from benchmarks.published.sources import race

    print_sources(race(seed=seed))


@bench_app.command()
def tiers(
    storage: Annotated[str, typer.Option(help="Storage URI; empty: files in a temporary directory.")] = "",
    plot: Plot = None,
) -> None:
    """Measure how fast pages go between device, host, storage, and another process over NIXL."""
    from tidekv.engine.trace.plots import check_plot

    program = benchmark_program("tier_speeds.py")
    check_plot(plot)
    options = [f"--storage={storage}", *([f"--plot={plot}"] if plot is not None else [])]
    os.execv(sys.executable, [sys.executable, str(program), *options])
