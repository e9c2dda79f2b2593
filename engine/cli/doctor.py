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
    events: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="Check the KV events of a running engine, and nothing else.")
    ] = None,
    replay: Annotated[str | None, typer.Option(metavar="ENDPOINT", help="With --events: kv_events.replay.")] = None,
    status: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="With --events: status.listen.")] = None,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="With --status: status.token_file.")] = None,
    free_pools: Annotated[
        list[str] | None,
        typer.Option(
            "--free-pool", metavar="FILE", help="Remove a host pool that no worker has, and check nothing; repeatable."
        ),
    ] = None,
    deadline_s: Annotated[float, typer.Option(min=1.0, help="Maximum seconds for all checks.")] = 30.0,
) -> None:
    """Check this machine: NIXL, UCX, GPU, limits, memory, host pools, CPUs, storage speed, clock. Changes nothing.

    With --events it subscribes to an engine as a router does, and says whether an index built from the stream equals
    what the engine has, tier by tier.

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
    if events is None and (replay or status or token_file):
        raise InvalidConfig("--replay, --status and --token-file belong to --events")
    if free_pools:
        from pathlib import Path

        from tidekv.engine.doctor.pools import free_pool

        findings = [free_pool(Path(path)) for path in free_pools]
    elif events is not None:
        from tidekv.engine.decode.status_server import read_token
        from tidekv.engine.doctor.event_check import EventSource, check_events

        token = "" if token_file is None else read_token(token_file).decode("latin-1")
        findings = check_events(EventSource(events, replay, status, token))
    else:
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
