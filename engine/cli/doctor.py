"""`tidekv doctor`: check this machine, and print what to change."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `doctor` to the command line."""
    app.command()(doctor)


def doctor(
    storage: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="Measure storage there: 256 MiB are written and removed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of check, level, found, advice.")] = False,
    deadline_s: Annotated[float, typer.Option(min=1.0, help="Maximum seconds for all checks.")] = 30.0,
) -> None:
    """Check this machine: NIXL, UCX, GPU, limits, memory, CPUs, storage speed, clock. Changes nothing.

    Exit code 1 if a part of tidekv does not work here (bad); slow or unsafe settings are warnings.
    """
    import msgspec
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from tidekv.engine.doctor.examine import examine
    from tidekv.states.errors import InvalidConfig

    if storage is not None and "://" in storage:
        # Not quoted: an address may have a password in it.
        raise InvalidConfig(
            f"--storage takes a directory, not an address of {storage.partition('://')[0]!r}: see `tidekv store`"
        )
    findings = examine(storage=storage, deadline_s=deadline_s)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        colors = {"ok": "green", "warn": "yellow", "bad": "red"}
        table = Table("check", "", "found", "advice")
        for finding in findings:
            color = colors[finding.level]
            table.add_row(finding.check, f"[{color}]{finding.level}[/]", escape(finding.found), escape(finding.advice))
        Console().print(table)
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)
