"""The timeline as a page in a real browser, as trace events, and in the terminal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from tidekv import Replayer
from tidekv.engine.seeing.bars import all_bars, one_request
from tidekv.engine.seeing.page import html_page
from tidekv.engine.seeing.stories import Stories, read_stories
from tidekv.engine.seeing.trace_events import trace_events
from tidekv.states import events

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")

# Synthetic pointer events take the same way as real ones; what is on the canvas is counted by color.
PROBE = """
<script>
{
  const box = chart.getBoundingClientRect();
  const at = { clientX: box.left + 40, clientY: box.top + AXIS + 6, bubbles: true, pointerId: 1 };
  chart.dispatchEvent(new PointerEvent("pointermove", at));
  const tipWords = tip.textContent;
  chart.dispatchEvent(new PointerEvent("pointerdown", at));
  chart.dispatchEvent(new PointerEvent("pointerup", at));
  const pixels = pen.getImageData(0, 0, chart.width, chart.height).data, seen = {};
  for (let n = 0; n < pixels.length; n += 4) {
    const color = "#" + [0, 1, 2].map((k) => pixels[n + k].toString(16).padStart(2, "0")).join("");
    seen[color] = (seen[color] || 0) + 1;
  }
  search.value = "r2";
  search.dispatchEvent(new Event("input"));
  const counted = document.getElementById("count").textContent;
  const wheel = new WheelEvent("wheel", { clientX: box.left + 400, clientY: box.top + 60, deltaY: -400 });
  const before = to - from;
  chart.dispatchEvent(wheel);
  const found = { seen, counted, tip: tipWords, panel: panel.innerText, open: panel.className };
  document.body.setAttribute("data-probe", JSON.stringify({ ...found, zoom: (to - from) / before }));
}
</script>
"""


@pytest.fixture
def stories(simulate) -> Stories:
    return read_stories(Replayer(simulate(3, 30).path))


def browse(page: Path, *options: str) -> str:
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1200,700",
            "--virtual-time-budget=3000",
            f"--user-data-dir={page.parent / 'profile'}",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@needs_browser
def test_page_renders_and_a_click_opens_a_request(stories: Stories, tmp_path: Path) -> None:
    page = tmp_path / "t.html"
    page.write_text(
        html_page(stories.all, now_s=stories.last_at_s, title="a run").replace("</body>", PROBE + "</body>")
    )
    dom = browse(page, "--dump-dom")
    match = re.search(r'data-probe="([^"]*)"', dom)
    assert match is not None, dom[-2000:]
    found = json.loads(match[1].replace("&quot;", '"').replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    # Gray for waiting, teal for transfer, and the band of the request that was chosen.
    assert found["seen"].get("#1797a6", 0) > 20
    assert found["seen"].get("#eaf1ff", 0) > 200
    assert found["tip"] == stories.all[0].request_id
    assert found["open"] == "open"
    assert found["panel"].startswith(stories.all[0].request_id)
    assert "Time by state" in found["panel"]
    named = sum("r2" in story.request_id for story in stories.all)
    assert found["counted"] == f"{named} of {len(stories.all)} requests"
    assert found["zoom"] < 0.9


@needs_browser
def test_screenshot_is_taken(stories: Stories, tmp_path: Path) -> None:
    page, shot = tmp_path / "t.html", tmp_path / "t.png"
    page.write_text(html_page(stories.all, now_s=stories.last_at_s, title="a run"))
    browse(page, f"--screenshot={shot}")
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert shot.stat().st_size > 20_000


def test_page_needs_nothing_from_elsewhere_and_no_name_can_break_out_of_it(stories: Stories) -> None:
    stories.all[0].request_id = "</script><img src=x onerror=alert(1)>"
    page = html_page(stories.all, now_s=stories.last_at_s, title="a run")
    assert not re.search(r"https?://|<link|<img|@import|src=\"", page)
    assert page.count("</script>") == 1


def test_page_of_no_requests_is_a_page() -> None:
    assert "<canvas" in html_page([], now_s=0.0, title="nothing")


def test_trace_events_are_balanced_and_cover_the_states(stories: Stories) -> None:
    trace = json.loads(trace_events(stories.all, now_s=stories.last_at_s))["traceEvents"]
    phases = Counter(event["ph"] for event in trace)
    assert phases["b"] == phases["e"] == sum(len(story.works) for story in stories.all)
    assert phases["X"] == sum(len(story.states) for story in stories.all)
    assert all(event.get("dur", 0) >= 0 and event.get("ts", 0) >= 0 for event in trace)


def test_terminal_shows_every_request_and_the_lanes_of_one(stories: Stories) -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the console.
    console.print(all_bars(stories.all, now_s=stories.last_at_s, width=60))
    busiest = max(stories.all, key=lambda story: len(story.works))
    console.print(one_request(busiest, now_s=stories.last_at_s, width=60))
    console.file.close()
    text = console.export_text()
    for story in stories.all:
        assert story.request_id in text
    for work in busiest.works:
        assert f"{work.kind} [{work.first}, {work.first + work.count})" in text


def test_stories_agree_with_what_the_core_told(simulate) -> None:
    tape = simulate(4, 60)
    told = read_stories(Replayer(tape.path))
    arrived = [event for event, _ in tape.steps if isinstance(event, events.RequestArrived)]
    assert [story.request_id for story in told.all] == [event.request_id for event in arrived]
    words = "".join(given for _, given in tape.steps)
    assert sum(story.ended == "READY" for story in told.all) == words.count("TellReady(")
    assert sum(story.ended == "FAILED" for story in told.all) == words.count("TellFailed(")
    for story in told.all:
        if story.ended == "READY":
            assert sum(story.sources.values()) == story.prompt_tokens
            assert story.states[-1][1] == "READY"
            assert story.ended_at_s is not None
            assert sum(story.time_in(0.0).values()) == pytest.approx(story.ended_at_s - story.arrived_at_s)
