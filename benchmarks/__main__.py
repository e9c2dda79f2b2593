"""Measurements of a checkout: `python3 dev.py bench NAME`, or `python -m benchmarks NAME`. A wheel has none of them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tidekv.states.errors import TidekvError
from tools.figures_page import RESULTS

WIDTH_UNSEEN = 160
"""Columns of a table that goes to a file."""

app = typer.Typer(
    name="bench",
    help="Measure, in three groups or one by one, and print a table.",
    no_args_is_help=True,
    add_completion=False,
)
Plot = Annotated[Path | None, typer.Option(help="Draw it to this .png or .svg file, too (extra plot).")]


Names = Annotated[list[str] | None, typer.Argument(help="Targets or measurements; what fits in five minutes, if none.")]
Only = Annotated[list[str] | None, typer.Option(help="One of them; may be repeated.")]
Json = Annotated[Path | None, typer.Option(help="Write all verdicts to this file.")]
Keep = Annotated[bool, typer.Option("--keep", help="Write them to benchmarks/results/, for the documentation.")]
Traces = Annotated[Path | None, typer.Option(help="The folder of recordings; ../shared/traces if there.")]
Listed = Annotated[bool, typer.Option("--list", help="Show the targets, and measure nothing.")]


@app.command()
def user(
    names: Names = None,
    only: Only = None,
    json: Json = None,
    keep: Keep = False,
    traces: Traces = None,
    show: Listed = False,
) -> None:
    """Measure what a user feels: times to ready, on real processes and on a modeled clock. Five minutes at most."""
    _group("user", [*(only or ()), *(names or ())], keep=keep, show=show, json=json, traces=traces)


@app.command()
def parts(
    names: Names = None,
    only: Only = None,
    json: Json = None,
    keep: Keep = False,
    traces: Traces = None,
    peers: Annotated[Path | None, typer.Option(help="Where peers are kept; they come from the registry.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw cost against work to this .png or .svg file.")] = None,
    show: Listed = False,
) -> None:
    """Measure parts of the library beside peers' parts and limits. Five minutes at most."""
    from benchmarks.plots import check_plot

    check_plot(plot)
    chosen = [*(only or ()), *(names or ())]
    _group("parts", chosen, keep=keep, show=show, json=json, traces=traces, peers=peers, plot=plot)


def _group(group: str, chosen: list[str], *, keep: bool, show: bool, **given: Path | None) -> None:
    if keep:
        given["json"] = RESULTS / f"{group}.json"
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    command = [sys.executable, "-m", "benchmarks.groups", group, *options, *(["--list"] if show else [])]
    # In the place of this process: ending it ends the measurements.
    os.execv(command[0], [*command, *(["--only", *chosen] if chosen else [])])


@app.command()
def peers(
    sglang: Annotated[Path | None, typer.Option(help="Environment with SGLang; .venv-sglang, if there.")] = None,
    vllm: Annotated[Path | None, typer.Option(help="Environment with vLLM; .venv-vllm, if there.")] = None,
    keep: Keep = False,
    show: Annotated[bool, typer.Option("--kept", help="Print the kept figures, and measure nothing.")] = False,
) -> None:
    """Serve the same conversations with pairs of whole SGLang and vLLM servers, with and without tidekv, and compare.

    Five minutes at most for each of the two. The exit code is 1 if an answer is wrong or lost.
    """
    from benchmarks.pairs import compare_peers, print_peers

    if show:
        print_peers()
        return
    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        into = RESULTS if keep else Path(folder)
        raise typer.Exit(compare_peers({"sglang": sglang, "vllm": vllm}, into))


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


@app.command("cache-peers")
def cache_peers(
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Restore the same prompts from another decode worker and from prefill, by turns. Takes one minute."""
    command = [sys.executable, "-m", "benchmarks.cache_peers", "--json", str(json or os.devnull)]
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
