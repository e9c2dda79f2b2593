"""`tidekv timeline JOURNAL`: requests as bars in the terminal, or as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidekv.engine.cli.torn import RunOfLog, TornOk, refuse_without_events, tell_torn
from tidekv.states.errors import InvalidRequest, cause_of

if TYPE_CHECKING:
    from tidekv.engine.trace.request_trace import RequestTrace

NAME_COLUMNS = 60


def register(app: typer.Typer) -> None:
    """Add `timeline` to the command line."""
    app.command()(timeline)


def timeline(
    journal: Annotated[str, typer.Argument(help="The first file of a journal, or a log that has one.")],
    request: Annotated[str | None, typer.Option(help="Only the requests of this id.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum requests in the terminal, the newest ones; 0: all.", min=0)] = 40,
    slowest: Annotated[int | None, typer.Option(help="Only so many requests, the slowest first.", min=1)] = None,
    torn_ok: TornOk = False,
    run: RunOfLog = "",
) -> None:
    """Show the waits of requests, and the work that ran for them meanwhile. Failed requests are shown first.

    Exit code 2 if the file is not a journal, is damaged, or lacks its tail; the part before that is shown anyway.
    """
    from rich.console import Console

    from tidekv.engine.journal import Replayer
    from tidekv.engine.trace.bars import all_bars, one_request
    from tidekv.engine.trace.page import html_page
    from tidekv.engine.trace.request_traces import read_request_traces

    replayer = Replayer(journal, run=run)
    traces = read_request_traces(replayer)
    refuse_without_events(replayer)
    request_traces = traces.all if request is None else traces.named(request)
    if request is not None and not request_traces:
        raise InvalidRequest(f"there is no request {request!r} in {journal}; it has {len(traces.all)} requests")
    if html is not None:
        page = html_page(
            request_traces, now_s=traces.last_at_s, title=f"tidekv: {Path(journal).name}", pools=traces.pools
        )
        _write(html, page.encode())
    else:
        console = Console()
        width = max(20, console.width - NAME_COLUMNS)
        letters = console.color_system is None or console.no_color
        if request is None:
            shown, what = _chosen(request_traces, slowest=slowest, limit=limit, now_s=traces.last_at_s)
            console.print(all_bars(shown, now_s=traces.last_at_s, width=width, letters=letters))
            if len(shown) < len(request_traces):
                console.print(f"{what} of {len(request_traces)} requests; --limit 0 shows all")
        else:
            for request_trace in request_traces:
                console.print(one_request(request_trace, now_s=traces.last_at_s, width=width, letters=letters))
    tell_torn(replayer, torn_ok=torn_ok)


def _chosen(
    request_traces: list[RequestTrace], *, slowest: int | None, limit: int, now_s: float
) -> tuple[list[RequestTrace], str]:
    """Return the requests to show, failed ones first, and which they are."""
    if slowest is not None:
        took = sorted(request_traces, key=lambda trace: trace.arrived_at_s - (trace.ended_at_s or now_s))
        shown, what = took[:slowest], f"the {min(slowest, len(took))} slowest"
    else:
        failed = [trace for trace in request_traces if trace.ended == "FAILED"]
        others = [trace for trace in request_traces if trace.ended != "FAILED"]
        if limit:
            failed = failed[-limit:]
            others = others[max(len(others) - (limit - len(failed)), 0) :]
        shown, what = [*failed, *others], f"{len(failed)} failed ones and the last {len(others)} others"
    return sorted(shown, key=lambda trace: trace.ended != "FAILED"), what


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidRequest(f"{str(path)!r} cannot be written: {cause_of(error)}") from error
    print(f"{path}: {len(content)} bytes")
