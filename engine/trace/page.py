"""Request traces as one self-contained HTML page with lanes, zoom and search; it needs no network or library."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

import msgspec

from tidekv.engine.trace.bars import COLORS
from tidekv.engine.trace.explain import explain

if TYPE_CHECKING:
    from tidekv.engine.trace.pool_use import PoolHistory
    from tidekv.engine.trace.request_trace import RequestTrace

DATA_MARK = '"TIDEKV-DATA"'
WEB_COLORS = {"grey50": "#8a8f98", "yellow": "#d9a514", "magenta": "#b14fc5", "blue": "#3b6fd4", "cyan": "#1797a6"} | {
    "green": "#2f9e57",
    "red": "#d13c3c",
}


ACTIVITIES = {
    "query": "query of storage",
    "fetch": "fetch from storage",
    "peer fetch": "read from another decode worker",
    "component fetch": "fetch of windows and states",
    "copy": "copy to the device",
    "component copy": "copy of windows and states",
    "span": "transfer from prefill",
    "recompute": "recomputed by the caller",
    "backup": "copy to the host",
    "store": "put in storage",
    "loop blocked": "event loop of decode blocked",
}


def html_page(request_traces: list[RequestTrace], *, now_s: float, title: str, pools: PoolHistory | None = None) -> str:
    """Return the complete page. With `pools` it has a lane of pool use."""
    start_s = min((request_trace.arrived_at_s for request_trace in request_traces), default=0.0)
    ends = [request_trace.ended_at_s or request_trace.arrived_at_s for request_trace in request_traces]
    data = {
        "title": title,
        # Late operations may end long after the last request.
        "view": 1.02 * max([end_s - start_s for end_s in ends], default=0.0) or 1e-6,
        "end": max(now_s - start_s, 1e-6),
        "colors": {name: WEB_COLORS[color] for name, color in COLORS.items()},
        "activities": ACTIVITIES,
        "pools": _pools(pools, start_s),
        "requests": [_request(request_trace, start_s, now_s) for request_trace in request_traces],
    }
    page = resources.files("tidekv.engine.trace").joinpath("timeline.html").read_text(encoding="utf-8")
    # A request's id may be "</script>": data must not end the script element that contains it.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return page.replace(DATA_MARK, encoded)


def _pools(pools: PoolHistory | None, start_s: float) -> list[dict[str, object]]:
    """Return each pool that has pages, with its samples as [time, owned, cached, draining]."""
    if pools is None:
        return []
    named = {
        name: [(sample.at_s - start_s, *getattr(sample, name)) for sample in pools.samples] for name in pools.pages
    }
    return [{"name": name, "pages": pages, "use": named[name]} for name, pages in pools.pages.items() if pages]


def _request(request_trace: RequestTrace, start_s: float, now_s: float) -> dict[str, object]:
    until_s = (
        request_trace.given_back_at_s
        or (request_trace.ended_at_s if request_trace.ended == "FAILED" else now_s)
        or now_s
    )
    states = [
        (at_s - start_s, next_s - start_s, state)
        for (at_s, state), (next_s, _) in zip(
            request_trace.states, [*request_trace.states[1:], (until_s, "")], strict=True
        )
    ]
    works = [
        (
            work.begun_at_s - start_s,
            (now_s if work.ended_at_s is None else work.ended_at_s) - start_s,
            work.kind,
            f"[{work.first}, {work.first + work.count})",
            work.error,
        )
        for work in request_trace.works
    ]
    works += [
        (stall.began_at_s - start_s, stall.ended_at_s - start_s, "loop blocked", "", stall.where)
        for stall in request_trace.stalls
    ]
    return {
        "id": request_trace.request_id,
        "end": request_trace.ended or "under way",
        "took": (request_trace.ended_at_s or now_s) - request_trace.arrived_at_s,
        "states": states,
        "works": works,
        "fallbacks": [(note.at_s - start_s, note.cause, note.consequence) for note in request_trace.fallbacks],
        "words": explain(request_trace, now_s=now_s),
    }
