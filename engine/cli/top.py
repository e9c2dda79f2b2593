"""`tidekv top ADDRESS`: live overview of a running engine or prefill peer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from tidekv.engine.trace.top import Sample


def register(app: typer.Typer) -> None:
    """Add `top` to the command line."""
    app.command()(top)


def top(
    address: Annotated[str, typer.Argument(help="host:port of engine.metrics.listen or prefill.metrics_listen.")],
    interval_s: Annotated[float, typer.Option(help="Seconds between two refreshes.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
) -> None:
    """Show the requests of a running engine by state, and its pools by use, until Ctrl-C or its end.

    At the address of a prefill peer its rooms are shown. Into a pipe or a file one picture is printed each interval.
    """
    from rich.console import Console
    from rich.live import Live

    from tidekv.engine.trace.top import scrape, show

    console = Console()
    now, at_s = scrape(address), time.monotonic()
    if once:
        console.print(show(now, None, 0.0))
        return
    try:
        if not console.is_terminal:
            _print_pictures(console, address, now, interval_s)
        with Live(show(now, None, 0.0), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                before, before_s = now, at_s
                now, at_s = scrape(address), time.monotonic()
                live.update(show(now, before, at_s - before_s), refresh=True)
    except KeyboardInterrupt:
        return


def _print_pictures(console: Console, address: str, now: Sample, interval_s: float) -> None:
    """Print a picture each interval, until the server ends."""
    from tidekv.engine.trace.top import scrape, show

    at_s, picture = time.monotonic(), show(now, None, 0.0)
    while True:
        console.print(picture)
        console.file.flush()
        time.sleep(interval_s)
        before, before_s = now, at_s
        now, at_s = scrape(address), time.monotonic()
        picture = show(now, before, at_s - before_s)
