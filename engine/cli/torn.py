"""A journal that is damaged or lacks its tail: commands show the part in front, say where it ends, and exit with 2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from tidekv.engine.journal import Replayer

TORN = 2

TornOk: TypeAlias = Annotated[
    bool, typer.Option("--torn-ok", help="A missing tail, as kill -9 leaves it, is no reason for exit code 2.")
]

RunOfLog: TypeAlias = Annotated[
    str, typer.Option("--run", help="In a log: the run, or the beginning of its name; by default the newest.")
]


def refuse_without_events(replayer: Replayer) -> None:
    """Check a journal at its end, before anything is printed. Raises JournalDamaged if it was cut before the first
    event: then there is nothing to show, whether a missing tail is allowed or not.
    """
    if replayer.torn is not None and not replayer.events:
        raise replayer.torn


def tell_torn(replayer: Replayer, *, torn_ok: bool) -> None:
    """Print on standard error where the tail is missing, if it is, and exit with TORN unless that is allowed."""
    if replayer.torn is not None:
        print(f"tidekv: {replayer.torn}", file=sys.stderr)
        if not torn_ok or replayer.is_damaged:
            raise typer.Exit(TORN)
