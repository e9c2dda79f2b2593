"""The command line: `tidekv COMMAND`. Each command lives in its own module of `tidekv.engine.commands`."""

from __future__ import annotations

import sys

import typer

from tidekv.engine.commands import COMMANDS
from tidekv.states.errors import TidekvError

app = typer.Typer(
    name="tidekv",
    help="Tiered decode-side KV cache for prefill/decode disaggregated LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for register in COMMANDS:
    register(app)


def main() -> None:
    """Run the command line. What the user got wrong is one line on stderr and exit code 2; a bug has its traceback."""
    try:
        app()
    except TidekvError as error:
        print(f"tidekv: {error}", file=sys.stderr)
        sys.exit(2)
