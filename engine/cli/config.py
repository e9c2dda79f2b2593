"""`tidekv config show|check|schema`: effective values of a worker, errors in them, and the options available."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

config_app = typer.Typer(help="Inspect the configuration of a worker before it starts.", no_args_is_help=True)

ConfigFile = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="TOML, YAML or JSON; else the variable TIDEKV_CONFIG.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.OPTION=VALUE", help="Set any option; may be repeated.")
]


def register(app: typer.Typer) -> None:
    """Add `config` to the command line."""
    app.add_typer(config_app, name="config")


@config_app.command()
def show(
    config: ConfigFile = None,
    settings: Settings = None,
    given: Annotated[bool, typer.Option("--given", help="Only what differs from the defaults' source.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: option, value, from.")] = False,
) -> None:
    """Print the value and the origin of every option. Passwords are hidden. Exit code 2 for errors."""
    import msgspec
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from tidekv.engine.config import load
    from tidekv.engine.config.options import all_options

    loaded = load(config, settings=settings or ())
    rows = [
        (path, msgspec.to_builtins(option.shown(loaded.value(path))), loaded.origins[path])
        for path, option in all_options().items()
        if loaded.is_given(path) or not given
    ]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({path: {"value": v, "from": o} for path, v, o in rows})).decode())
        return
    table = Table("option", "value", "from")
    for path, value, origin in rows:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        table.add_row(path, escape(text), escape(origin))
    Console().print(table)


@config_app.command()
def check(config: ConfigFile = None, settings: Settings = None) -> None:
    """Print every error with its place, and start nothing. Exit code 0 if there are none, 2 otherwise."""
    from tidekv.engine.config import gather
    from tidekv.engine.config.check import errors_here

    loaded, errors = gather(config, settings=settings or ())
    errors = [*errors, *errors_here(loaded)]
    for error in errors:
        print(f"tidekv: {error}", file=sys.stderr)
    if errors:
        raise typer.Exit(2)
    count = sum(loaded.is_given(path) for path in loaded.origins)
    print(f"ok: {count} options are given, the others have their defaults")


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of the file, made from the types."""
    import json

    from tidekv.engine.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
