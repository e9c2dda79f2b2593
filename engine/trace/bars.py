"""Request traces in the terminal: one bar per request, or one request with a lane per kind of work."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidekv.engine.trace.request_trace import RequestTrace
from tidekv.states.validation import printable

COLORS = {
    "PREALLOC": "grey50",
    "MATCH": "yellow",
    "PREFETCH": "magenta",
    "LOCAL_RESTORE": "blue",
    "TRANSFER": "cyan",
    "READY": "green",
    "FAILED": "red",
    "query": "yellow",
    "fetch": "magenta",
    "copy": "blue",
    "component copy": "blue",
    "peer fetch": "magenta",
    "component fetch": "magenta",
    "span": "cyan",
    "backup": "blue",
    "store": "magenta",
    "recompute": "green",
    "loop blocked": "red",
}
BLOCK = "█"
LETTERS = {
    "PREALLOC": "q",
    "MATCH": "m",
    "PREFETCH": "s",
    "LOCAL_RESTORE": "c",
    "TRANSFER": "t",
    "READY": "r",
    "FAILED": "F",
}
"""By state, what is drawn without color; work is drawn as a block, since its row has its name."""


def all_bars(request_traces: list[RequestTrace], *, now_s: float, width: int, letters: bool = False) -> RenderableType:
    """Return a table of requests with their states on one time axis, drawn by `letters` where there is no color."""
    if not request_traces:
        return Text("no requests")
    start_s = min(request_trace.arrived_at_s for request_trace in request_traces)
    end_s = max([request_trace.ended_at_s or now_s for request_trace in request_traces])
    has_peers = any(request_trace.sources.get("peer") for request_trace in request_traces)
    names = ("l1", "l2", "l3", *(("peer",) if has_peers else ()), "transfer")
    header = f"L1/L2/L3/{'peer/' if has_peers else ''}prefill tokens"
    table = Table("request", "end", "ms", header, f"{(end_s - start_s) * 1000:.1f} ms", "!")
    for request_trace in request_traces:
        ended_at_s = request_trace.ended_at_s or now_s
        sources = "/".join(str(request_trace.sources.get(name, 0)) for name in names)
        table.add_row(
            # Text, since ids and causes from outside may have the brackets of rich's markup.
            Text(printable(request_trace.request_id)),
            request_trace.ended or "…",
            f"{(ended_at_s - request_trace.arrived_at_s) * 1000:.1f}",
            Text(sources if request_trace.sources else printable(request_trace.cause)),
            _states(request_trace, start_s, end_s, ended_at_s, width, letters=letters),
            str(len(request_trace.fallbacks) or ""),
        )
    return Group(table, legend(letters=letters))


def one_request(request_trace: RequestTrace, *, now_s: float, width: int, letters: bool = False) -> RenderableType:
    """Return the lanes of one request, from its arrival until it was READY or FAILED."""
    start_s = request_trace.arrived_at_s
    # Late operations may end at any time; the axis ends at the time at which the request was given back.
    end_s = request_trace.given_back_at_s or request_trace.ended_at_s or now_s
    table = Table("what", "from ms", "to ms", f"{(end_s - start_s) * 1000:.1f} ms", "")
    ended_at_s = request_trace.ended_at_s or now_s
    table.add_row(
        "states",
        "0.0",
        f"{(ended_at_s - start_s) * 1000:.1f}",
        _states(request_trace, start_s, end_s, end_s, width, letters=letters),
        "",
    )
    for work in request_trace.works:
        work_end_s = now_s if work.ended_at_s is None else work.ended_at_s
        bar = Text()
        _append(bar, work.kind, work.begun_at_s, work_end_s, start_s, end_s, width)
        table.add_row(
            f"{work.kind} [{work.first}, {work.first + work.count})",
            f"{(work.begun_at_s - start_s) * 1000:.1f}",
            f"{(work_end_s - start_s) * 1000:.1f}",
            bar,
            Text(printable(work.error)),
        )
    for stall in request_trace.stalls:
        bar = Text()
        _append(bar, "loop blocked", stall.began_at_s, stall.ended_at_s, start_s, end_s, width)
        table.add_row(
            "loop blocked",
            f"{(stall.began_at_s - start_s) * 1000:.1f}",
            f"{(stall.ended_at_s - start_s) * 1000:.1f}",
            bar,
            Text(printable(stall.where) or "by no code that was seen"),
        )
    return Group(table, legend(letters=letters))


def legend(*, letters: bool = False) -> Text:
    """Legend of the colors, or of the letters."""
    text = Text()
    for state in ("PREALLOC", "MATCH", "PREFETCH", "LOCAL_RESTORE", "TRANSFER", "READY", "FAILED"):
        text.append(f"{LETTERS[state] if letters else BLOCK} ", COLORS[state])
        text.append(f"{state}  ")
    return text


def _states(
    request_trace: RequestTrace, start_s: float, end_s: float, until_s: float, width: int, *, letters: bool
) -> Text:
    bar = Text()
    for (at_s, state), (next_s, _) in zip(
        request_trace.states, [*request_trace.states[1:], (until_s, "")], strict=True
    ):
        _append(bar, state, at_s, next_s, start_s, end_s, width, mark=LETTERS[state] if letters else BLOCK)
    return bar


def _append(
    bar: Text, name: str, from_s: float, to_s: float, start_s: float, end_s: float, width: int, *, mark: str = BLOCK
) -> None:
    """Draw [from_s, to_s) of an axis that is `width` columns wide, with at least one column."""
    span_s = max(end_s - start_s, 1e-9)
    first = min(int((from_s - start_s) / span_s * width), width - 1)
    last = max(first + 1, min(width, round((to_s - start_s) / span_s * width)))
    bar.append(" " * max(0, first - len(bar)))
    bar.append(mark * max(0, last - max(first, len(bar))), COLORS[name])
