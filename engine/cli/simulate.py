"""`tidekv simulate`: the core against a simulated world, if the command runs in a checkout."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import typer

from tidekv.states.errors import InvalidConfig

CHECKOUT = Path(__file__).resolve().parents[2]


def register(app: typer.Typer) -> None:
    """Add `simulate` to the command line. Its options and its work are in `tools/simulate.py` of a checkout."""
    program = CHECKOUT / "tools" / "simulate.py"
    if not program.is_file():
        app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(simulate)
        return
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    # By its path: the working directory may have a package of this name, too.
    found = spec_from_file_location("tidekv_simulate", program)
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    app.command()(module.simulate)


def simulate() -> None:
    """Serve requests in virtual time with seeded faults, and check every invariant. Works in a checkout."""
    raise InvalidConfig("the simulation is not installed with tidekv: run this command in a checkout")
