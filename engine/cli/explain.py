"""`tidekv explain JOURNAL --request R`: explain the latency of a request."""

from __future__ import annotations

from typing import Annotated

import typer

from tidekv.engine.cli.torn import RunOfLog, TornOk, refuse_without_events, tell_torn
from tidekv.states.errors import InvalidRequest
from tidekv.states.validation import printable_lines


def register(app: typer.Typer) -> None:
    """Add `explain` to the command line."""
    app.command()(explain)


def explain(
    journal: Annotated[str, typer.Argument(help="The first file of a journal, or a log that has one.")],
    request: Annotated[str | None, typer.Option(help="The request's id; without it, the slowest requests.")] = None,
    slowest: Annotated[int, typer.Option(help="How many, without --request.", min=0)] = 3,
    torn_ok: TornOk = False,
    run: RunOfLog = "",
) -> None:
    """Explain a request: pages matched, promised, delivered, wasted and cut, the causes, and what would make it faster.

    Exit code 2 if the file is not a journal, is damaged, or lacks its tail; the part before that is explained anyway.
    """
    from tidekv.engine.journal import Replayer
    from tidekv.engine.trace.explain import explain as words_for
    from tidekv.engine.trace.explain import failures_by_cause
    from tidekv.engine.trace.request_traces import read_request_traces

    replayer = Replayer(journal, run=run)
    request_traces = read_request_traces(replayer)
    refuse_without_events(replayer)
    if request is not None:
        chosen = request_traces.named(request)
        if not chosen:
            raise InvalidRequest(
                f"there is no request {request!r} in {journal}; it has {len(request_traces.all)} requests"
            )
    else:
        ended = [request_trace for request_trace in request_traces.all if request_trace.ended_at_s is not None]
        ended.sort(key=lambda request_trace: request_trace.arrived_at_s - (request_trace.ended_at_s or 0.0))
        chosen = ended[:slowest]
        if failures := failures_by_cause(request_traces.all):
            print(f"{printable_lines(failures)}\n")
    unix_s = replayer.header.started_unix_s - replayer.header.started_at_s
    words = [words_for(request_trace, now_s=request_traces.last_at_s, unix_s=unix_s) for request_trace in chosen]
    print(printable_lines("\n\n".join(words)))
    tell_torn(replayer, torn_ok=torn_ok)
