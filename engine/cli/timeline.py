"""`tidekv timeline JOURNAL`: requests as bars in the terminal, as an HTML page, or as a Perfetto trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidekv.engine.cli.torn import TornOk, refuse_without_events, tell_torn
from tidekv.states.errors import InvalidRequest, cause_of

NAME_COLUMNS = 60


def register(app: typer.Typer) -> None:
    """Add `timeline` to the command line."""
    app.command()(timeline)


def timeline(
    journal: Annotated[str, typer.Argument(help="The first file of a journal.")],
    request: Annotated[str | None, typer.Option(help="Only the requests of this id.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write trace-event JSON for ui.perfetto.dev.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum requests in the terminal, the newest ones; 0: all.", min=0)] = 40,
    torn_ok: TornOk = False,
) -> None:
    """Show the waits of requests, and the work that ran for them meanwhile.

    Exit code 2 if the file is not a journal, is damaged, or lacks its tail; the part before that is shown anyway.
    """
    from rich.console import Console

    from tidekv.engine.journal import Replayer
    from tidekv.engine.trace.bars import all_bars, one_request
    from tidekv.engine.trace.page import html_page
    from tidekv.engine.trace.request_traces import read_request_traces
    from tidekv.engine.trace.trace_events import trace_events

    replayer = Replayer(journal)
    told = read_request_traces(replayer)
    refuse_without_events(replayer)
    request_traces = told.all if request is None else told.named(request)
    if request is not None and not request_traces:
        raise InvalidRequest(f"there is no request {request!r} in {journal}; it has {len(told.all)} requests")
    if html is not None:
        page = html_page(request_traces, now_s=told.last_at_s, title=f"tidekv: {Path(journal).name}", pools=told.pools)
        _write(html, page.encode())
    if perfetto is not None:
        _write(perfetto, trace_events(request_traces, now_s=told.last_at_s))
    if html is None and perfetto is None:
        console = Console()
        width = max(20, console.width - NAME_COLUMNS)
        if request is None:
            shown = request_traces[-limit:] if limit else request_traces
            console.print(all_bars(shown, now_s=told.last_at_s, width=width))
            if len(shown) < len(request_traces):
                console.print(f"the last {len(shown)} of {len(request_traces)} requests; --limit 0 shows all")
        else:
            for request_trace in request_traces:
                console.print(one_request(request_trace, now_s=told.last_at_s, width=width))
    tell_torn(replayer, torn_ok=torn_ok)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidRequest(f"{str(path)!r} cannot be written: {cause_of(error)}") from error
    print(f"{path}: {len(content)} bytes")
