"""`tidekv bench NAME`: the measurements of this project."""

from __future__ import annotations

import typer

bench_app = typer.Typer(help="Measure something and print a table.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add `bench` to the command line."""
    app.add_typer(bench_app, name="bench")


@bench_app.command()
def multiturn() -> None:
    """Serve the multi-turn acceptance: hit rates by round, with decode output kept and not kept."""
    from tidekv.engine.workload.multiturn import print_multiturn

    print_multiturn()
