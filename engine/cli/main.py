"""The command line: `tidekv COMMAND`. Each command lives in its own module of `tidekv.engine.cli`."""

from __future__ import annotations

import logging
import sys
from importlib import metadata
from typing import Annotated

import typer

from tidekv.engine.cli import COMMANDS
from tidekv.engine.cli.usage import run_app

app = typer.Typer(
    name="tidekv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Output(logging.Handler):
    """Prints records on the stderr of the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        print(self.format(record), file=sys.stderr)


OUTPUT = Output()
OUTPUT.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))


def print_version(wanted: bool) -> None:
    """Print the version of the installed package and end, if that is wanted."""
    if wanted:
        print(f"tidekv {metadata.version('tidekv')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and end.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print each request and each peer on stderr, not only warnings.")
    ] = False,
) -> None:
    """Tiered decode-side KV cache for prefill/decode disaggregated LLM serving."""
    logger = logging.getLogger("tidekv")
    if OUTPUT not in logger.handlers:
        logger.addHandler(OUTPUT)
    if verbose:
        logger.setLevel(logging.INFO)


for register in COMMANDS:
    register(app)


def main() -> None:
    """Run the command line. A user error is one line on stderr and exit code 2; a bug prints its traceback."""
    sys.exit(run_app(app, sys.argv[1:]))
