"""Screenshot of a timeline for the docs: `python -m tools.timeline_picture JOURNAL PICTURE.png [REQUEST]`.

The request is opened by a click. Without REQUEST, the one with the most tiers, fallbacks and operations is chosen.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tidekv.engine.journal import Replayer
from tidekv.engine.trace.page import html_page
from tidekv.engine.trace.request_trace import RequestTrace
from tidekv.engine.trace.request_traces import read_request_traces
from tidekv.states.errors import InvalidRequest
from tools.browser import opened_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIDTH, HEIGHT = 1280, 620
SPANS = 4.0
"""Length of the time axis, in durations of the restore that is shown."""
ABOVE = 220
"""Pixels of other requests above the chosen one."""


def take_picture(journal: Path, picture: Path, *, request_id: str | None = None, browser: Browser | None = None) -> str:
    """Write the picture and return the id of the request that is open in it. `browser`: as in `opened_page`.

    Raises InvalidRequest if the journal does not contain the request, and the errors of reading a journal.
    """
    traces = read_request_traces(Replayer(journal))
    wanted = traces.all if request_id is None else traces.named(request_id)
    if not wanted:
        raise InvalidRequest(f"there is no request {request_id or ''!r} in {str(journal)!r}")
    chosen = max(wanted, key=_worth)
    html = html_page(traces.all, now_s=traces.last_at_s, title=f"tidekv: {journal.name}", pools=traces.pools)
    with tempfile.TemporaryDirectory() as folder:
        page_path = Path(folder, "timeline.html")
        page_path.write_text(html)
        with opened_page(page_path.as_uri(), browser=browser, width=WIDTH, height=HEIGHT) as page:
            row = traces.all.index(chosen)
            start_s = chosen.arrived_at_s - min(request_trace.arrived_at_s for request_trace in traces.all)
            span_s = ((chosen.ended_at_s or traces.last_at_s) - chosen.arrived_at_s) * SPANS
            page.evaluate(
                f"from = Math.max(0, {start_s - span_s / 4}); to = from + {max(span_s, 1e-6)};"
                f"top_ = Math.max(0, rows[{row}].y - {ABOVE}); layOut()"
            )
            at_y = page.evaluate(f"chart.getBoundingClientRect().top + rows[{row}].y - top_ + 8")
            page.mouse.click(60, at_y)
            page.mouse.move(WIDTH // 4, 10)  # Off the chart, so that no tip covers it.
            picture.write_bytes(page.screenshot())
    return chosen.request_id


def _worth(request_trace: RequestTrace) -> tuple[int, int, int]:
    """Sort key of a request by what its picture shows: tiers that served it, fallbacks, operations."""
    return (
        sum(tokens > 0 for tokens in request_trace.sources.values()),
        len(request_trace.fallbacks),
        len(request_trace.works),
    )


if __name__ == "__main__":
    chosen_id = take_picture(
        Path(sys.argv[1]), Path(sys.argv[2]), request_id=sys.argv[3] if len(sys.argv) > 3 else None
    )
    print(f"{sys.argv[2]}: request {chosen_id}, {Path(sys.argv[2]).stat().st_size} bytes")
