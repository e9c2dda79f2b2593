"""`tidekv top ADDRESS`: live overview of a running engine."""

from __future__ import annotations

import time
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `top` to the command line."""
    app.command()(top)


def top(
    address: Annotated[str, typer.Argument(help="host:port of the engine's metrics (engine.metrics.listen).")],
    interval_s: Annotated[float, typer.Option(help="Seconds between two refreshes.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
) -> None:
    """Show the requests of a running engine by state, and its pools by use, until Ctrl-C or its end."""
    from rich.console import Console
    from rich.live import Live

    from tidekv.engine.trace.top import scrape, show

    console = Console()
    now, at_s = scrape(address), time.monotonic()
    if once:
        console.print(show(now, None, 0.0))
        return
    try:
        with Live(show(now, None, 0.0), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                before, before_s = now, at_s
                now, at_s = scrape(address), time.monotonic()
                live.update(show(now, before, at_s - before_s), refresh=True)
    except KeyboardInterrupt:
        return
