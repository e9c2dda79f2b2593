"""`tidekv simulate`: the core against a simulated world, with seeded faults."""

from __future__ import annotations

import os
import secrets
from typing import Annotated

import typer

from tidekv.states.errors import InvalidConfig

RANKS_MAX = 8
"""More ranks than one machine has accelerators show nothing new."""


def register(app: typer.Typer) -> None:
    """Add `simulate` to the command line."""
    app.command()(simulate)


def simulate(
    seed: Annotated[int, typer.Option(help="The first seed; -1: a fresh one, which is printed.")] = 1,
    seeds: Annotated[int, typer.Option(help="How many seeds, counted up from the first.")] = 1,
    requests: Annotated[int, typer.Option(help="Requests of each seed.")] = 1000,
    faults: Annotated[str, typer.Option(help="all, none, or names of faults, separated by commas.")] = "all",
    jobs: Annotated[int, typer.Option(help="Processes; 0: one a core.")] = 0,
    ranks: Annotated[int, typer.Option(help="Ranks of one instance that must decide alike; 0: a single core.")] = 0,
) -> None:
    """Serve requests in virtual time with seeded faults at every boundary, and check every invariant on the way.

    Exit code 1 if something was seen that must never happen; the seed that shows it again is printed. With --ranks,
    every rank has tiers and faults of its own, and may lag or die; faults are "all" or "none" then.
    """
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from tidekv.engine.simulation.campaign import run_campaign
    from tidekv.engine.simulation.faults import FAULTS

    if seeds < 1 or requests < 1 or jobs < 0 or not 0 <= ranks <= RANKS_MAX:
        raise InvalidConfig(f"seeds and requests must be at least 1, jobs at least 0, ranks 0 to {RANKS_MAX}")
    if ranks and faults not in ("all", "none"):
        raise InvalidConfig("with ranks, faults are all or none")
    chosen = faults if faults in ("all", "none") else [name.strip() for name in faults.split(",")]
    unknown = [] if isinstance(chosen, str) else [name for name in chosen if name not in FAULTS]
    if unknown:
        raise InvalidConfig(f"no faults named {', '.join(unknown)}; there are: all, none, {', '.join(FAULTS)}")
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
    for failure in campaign.failures:
        console.print(failure, soft_wrap=True, markup=False)
    if campaign.failures:
        console.print(f"VIOLATIONS in {len(campaign.failures)} of {campaign.seeds} seeds")
        raise typer.Exit(1)
    console.print("no violation")
