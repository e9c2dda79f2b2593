"""`tidekv replay JOURNAL`: step a fresh core through a journal, and print the first difference with both sides."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tidekv.engine.cli.torn import RunOfLog, TornOk, refuse_without_events, tell_torn

if TYPE_CHECKING:
    from tidekv.engine.journal import Replayer

DIVERGED = 1


def register(app: typer.Typer) -> None:
    """Add `replay` to the command line."""
    app.command()(replay)


def replay(
    journal: Annotated[str, typer.Argument(help="The first file of a journal, or a log that has one.")],
    until: Annotated[int | None, typer.Option(help="Stop after this event, and show the state there.", min=0)] = None,
    shrink: Annotated[
        str | None, typer.Option(help="Write a short journal of the first error or difference to this file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Accept a journal of other event types.")] = False,
    torn_ok: TornOk = False,
    run: RunOfLog = "",
) -> None:
    """Step a fresh core through a journal and compare every state, plan, lock, page and command.

    Rules that raised in the run raise again. Exit code 0: identical. 1: the core decides differently; the first such
    event is shown with what differs. 2: the journal is damaged, its tail is missing, or it is of another version.
    """
    from tidekv.engine.journal import Replayer
    from tidekv.engine.journal.shrink import shrink as shrink_journal
    from tidekv.states.errors import InvalidRequest, ReplayDiverged

    if shrink is not None:
        shrunk = shrink_journal(journal, shrink)
        print(f"{shrunk.events_before} events became {shrunk.events_after} in {shrink}: {shrunk.what}")
        return
    replayer = Replayer(journal, force=force, run=run)
    try:
        with replayer.up_to_damage():
            replayer.run(until=until)
        replayed = replayer.replayed
    except ReplayDiverged as diverged:
        print(f"tidekv: {diverged}", file=sys.stderr)
        raise typer.Exit(DIVERGED) from None
    refuse_without_events(replayer)
    if until is not None and replayed.events <= until:
        raise InvalidRequest(f"--until must be below {replayed.events}, the number of events in {journal}, not {until}")
    raises = f", {replayed.raises} raises of rules" if replayed.raises else ""
    if replayed.torn is not None:
        print(f"identical as far as the journal goes: {replayed.events} events{raises}")
        tell_torn(replayer, torn_ok=torn_ok)
    elif replayed.complete:
        print(f"identical: {replayed.events} events{raises}, final index, pools and counters")
    else:
        print(f"identical: {replayed.events} events{raises}, stopped there")
        _show(replayer)


def _show(replayer: Replayer) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tidekv.states.validation import printable

    core = replayer.core
    console = Console()
    counts = Table(title="pools and counters", show_header=False)
    for name, value in core.statistics().items():
        if value:
            counts.add_row(name, str(value))
    requests = Table("request", "state", "generation", "L1 pages", "promised", "pages", "loads", title="live requests")
    for request in core.state.requests.values():
        runs = [(load.first, load.first + load.page_count, load.stage.value) for load in request.loads]
        loads = ", ".join(f"[{first}, {end}) {stage}" for first, end, stage in runs)
        numbers = (request.generation, request.held.matched, request.held.promised, request.page_count)
        requests.add_row(Text(printable(request.request_id)), request.state.value, *map(str, numbers), loads.lower())
    index = Table("namespace", "pages", "device", "host", "stored", "locks", "pins", title="index")
    for node in core.state.index.nodes():
        index.add_row(
            Text(printable(node.namespace)),
            f"[{node.depth_pages - node.page_count}, {node.depth_pages})",
            _ids(node.device),
            _ids(node.host),
            "yes" if core.state.index.tree.is_stored(node) else "",
            str(node.anchored),
            str(node.host_anchored),
        )
    for table in (counts, requests, index):
        console.print(table)


def _ids(pages: object) -> str:
    if pages is None:
        return ""
    ids = list(pages)  # type: ignore[call-overload]  # PageIds, which rich cannot show.
    return ", ".join(map(str, ids)) if len(ids) <= 4 else f"{ids[0]} … {ids[-1]} ({len(ids)})"
