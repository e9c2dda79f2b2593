"""Commands whose programs are in a checkout beside the package. In an installed wheel, each says so in a line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import typer

from tidekv.states.errors import InvalidConfig

CHECKOUT = Path(__file__).resolve().parents[2]
DEMO = {
    "run": "Serve a workload with a prefill and a decode worker in two processes, and verify it.",
    "prefill": "Run a prefill worker with the small model until Ctrl-C or SIGTERM.",
    "decode": "Serve generated conversations with the small model against a prefill worker.",
}
SIMULATION = {"simulate": "Serve requests in virtual time with seeded faults, and check every invariant."}


def register(app: typer.Typer) -> None:
    """Add the commands of `demo/` and of the simulation, or ones that say that they need a checkout."""
    if (CHECKOUT / "demo" / "run.py").is_file():
        _find_first()
        sides = import_module("demo.sides")
        for command in (import_module("demo.run").run, sides.prefill, sides.decode):
            app.command()(command)
    else:
        _refuse(app, DEMO)
    if (CHECKOUT / "tools" / "simulate.py").is_file():
        _find_first()
        app.command()(import_module("tools.simulate").simulate)
    else:
        _refuse(app, SIMULATION)


def _find_first() -> None:
    """Import from the checkout first: the working directory of `python -m tidekv` may have packages of these names."""
    if sys.path[0] != str(CHECKOUT):
        sys.path.insert(0, str(CHECKOUT))


def _refuse(app: typer.Typer, commands: Mapping[str, str]) -> None:
    """Add commands that raise InvalidConfig, whatever their options are."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name, text in commands.items():
        app.command(name, help=f"{text} Works in a checkout.", context_settings=anything)(_refusal(name))


def _refusal(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise InvalidConfig(f"`tidekv {name}` is not part of the installed package: run it in a checkout")

    return refuse
