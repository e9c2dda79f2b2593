"""`tidekv simulate`: the core against a simulated world, with seeded faults."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from demo.artefact import write_artefact
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import unknown

RANKS_MAX = 8
"""Maximum ranks: as many as one machine has accelerators; more add no coverage."""
SMALLEST_MAX = 3
"""Maximum failing seeds that are shrunk; each takes some seconds."""


def simulate(
    seed: Annotated[int, typer.Option(help="The first seed; -1: a fresh one, which is printed.", min=-1)] = 1,
    seeds: Annotated[int, typer.Option(help="How many seeds, counted up from the first.", min=1)] = 1,
    requests: Annotated[int, typer.Option(help="Requests of each seed.", min=1)] = 1000,
    faults: Annotated[str, typer.Option(help="all, none, or names of faults, separated by commas.")] = "all",
    jobs: Annotated[int, typer.Option(help="Processes; 0: one a core.", min=0)] = 0,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Ranks of one instance that must decide alike. By default a quarter of the requests runs on 2 to 4"
            " ranks, the others on one.",
            min=1,
            max=RANKS_MAX,
        ),
    ] = None,
    without: Annotated[str, typer.Option(help="Names of faults that are drawn but never strike.")] = "",
    lent: Annotated[
        bool | None,
        typer.Option(
            "--lent/--owned", help="Whether host engines lend the device pages; by default in one of a seed's two runs."
        ),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Other decode workers in every seed, of as many ranks; by default in some.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures, with commit, date and machine.")] = None,
    journals: Annotated[Path, typer.Option(help="Where the journals of runs that fail are written.")] = Path(),
) -> None:
    """Serve requests in virtual time with seeded faults at every boundary, and check every invariant on the way.

    Exit code 1 if an invariant was violated. The first failing seeds are shrunk to the smallest
    run that still fails; its command is printed, and its journal written. Models have windows or states. With ranks,
    each has tiers and faults of its own, and may lag or die.
    """
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from simulation.campaign import run_campaign
    from simulation.faults import FAULTS
    from simulation.smallest import find_smallest

    if not journals.is_dir():
        raise InvalidConfig(f"there is no directory {str(journals)!r} to write journals to")
    chosen = faults if faults in ("all", "none") else _names(faults)
    left_out = _names(without)
    for name in (*left_out, *([] if isinstance(chosen, str) else chosen)):
        if name not in FAULTS:
            raise unknown(name, ["all", "none", *FAULTS], "fault", InvalidConfig)
    first = secrets.randbelow(2**31) if seed == -1 else seed
    console = Console()
    console.print(f"seeds {first} to {first + seeds - 1}, {requests} requests each, faults: {faults}")
    ticks = iter(track(range(seeds), description="seeds", console=console))
    next(ticks)
    campaign = run_campaign(
        first_seed=first,
        seeds=seeds,
        requests=requests,
        faults=chosen,
        jobs=jobs or os.cpu_count() or 1,
        ranks=ranks,
        without=left_out,
        lends=lent,
        neighbours=peers,
        progress=lambda: next(ticks, None),
    )
    table = Table(title="faults injected, and how requests ended")
    for column in ("fault", "count", "end", "count"):
        table.add_column(column, justify="right" if column == "count" else "left")
    ends = campaign.ends.most_common()
    for row, (fault, count) in enumerate(campaign.faults.most_common()):
        end = ends[row] if row < len(ends) else ("", "")
        table.add_row(fault, f"{count:,}", end[0], f"{end[1]:,}" if end[1] else "")
    console.print(table)
    console.print(
        f"{campaign.requests:,} requests over {campaign.seeds:,} seeds, {campaign.events:,} events, "
        f"{sum(campaign.faults.values()):,} faults of {sum(count > 0 for count in campaign.faults.values())} kinds; "
        f"{campaign.wall_s:.0f} s, {campaign.cpu_s:.0f} CPU s, {campaign.requests / campaign.cpu_s:,.0f} requests a "
        "CPU second",
        soft_wrap=True,
    )
    if json is not None:
        figures = {
            "requests": campaign.requests,
            "seeds": campaign.seeds,
            "events": campaign.events,
            "faults": sum(campaign.faults.values()),
            "kinds": sum(count > 0 for count in campaign.faults.values()),
            "violations": len(campaign.failures),
            "wall_s": round(campaign.wall_s, 1),
            "cpu_s": round(campaign.cpu_s, 1),
        }
        write_artefact(json, figures)
    if campaign.component_pages:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(campaign.component_pages.items()))
        console.print(f"operations on components: {counts}", soft_wrap=True)
    if campaign.early:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(campaign.early.items()))
        console.print(f"callers that began with the first layers: {counts}", soft_wrap=True)
    for failure in campaign.failures.values():
        console.print(failure, soft_wrap=True, markup=False)
    if campaign.failures:
        for seed in list(campaign.failures)[:SMALLEST_MAX]:
            smallest = find_smallest(
                seed,
                requests,
                chosen,
                journals / f"simulation-{seed}.journal",
                ranks=ranks,
                without=left_out,
                lends=lent,
                neighbours=peers,
            )
            console.print(
                f"seed {seed} fails like this with {smallest.requests} requests and {len(smallest.struck)} kinds of "
                f"faults ({', '.join(smallest.struck)}), too: {smallest.what.splitlines()[0]}\n"
                f"  journal of {smallest.events} events: {smallest.journal}\n  again: {smallest.command}",
                soft_wrap=True,
                markup=False,
            )
        console.print(f"VIOLATIONS in {len(campaign.failures)} of {campaign.seeds} seeds")
        raise typer.Exit(1)
    console.print("no violation")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
