"""The timeline as a page in a real browser, as trace events, and in the terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from PIL import Image
from rich.console import Console

from tests.support.page_looks import PHONE_WIDTH, check_looks
from tests.support.thorough import thorough_beyond
from tidekv import Replayer
from tidekv.engine.trace.bars import all_bars, one_request
from tidekv.engine.trace.explain import explain
from tidekv.engine.trace.page import ACTIVITIES, html_page
from tidekv.engine.trace.pool_use import PoolHistory, PoolUse
from tidekv.engine.trace.request_traces import RequestTraces, read_request_traces
from tidekv.states import events
from tidekv.states.errors import InvalidRequest
from tools.browser import find_browser, opened_browser, opened_page
from tools.timeline_picture import HEIGHT, WIDTH, take_picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium")

# How many pixels of the chart have each color.
PIXELS = """
(() => {
  const pixels = pen.getImageData(0, 0, chart.width, chart.height).data, seen = {};
  for (let n = 0; n < pixels.length; n += 4) {
    const color = "#" + [0, 1, 2].map((k) => pixels[n + k].toString(16).padStart(2, "0")).join("");
    seen[color] = (seen[color] || 0) + 1;
  }
  return seen;
})()
"""
ROW = "({x: chart.getBoundingClientRect().left, y: chart.getBoundingClientRect().top + rows[%d].y - top_ + 8})"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened_browser() as browser:
        yield browser


@pytest.fixture
def request_traces(simulate) -> RequestTraces:
    return read_request_traces(Replayer(simulate(3, 30).path))


@pytest.fixture
def written(request_traces: RequestTraces, tmp_path: Path) -> Path:
    path = tmp_path / "t.html"
    path.write_text(
        html_page(request_traces.all, now_s=request_traces.last_at_s, title="a run", pools=request_traces.pools)
    )
    return path


@needs_browser
def test_a_mouse_sees_opens_zooms_moves_and_closes(
    request_traces: RequestTraces, written: Path, browser: Browser
) -> None:
    with opened_page(written.as_uri(), browser=browser) as page:
        seen = page.evaluate(PIXELS)
        # Teal for transfer, and no band before a request is chosen.
        assert seen.get("#1797a6", 0) > 20
        assert seen.get("#eaf1ff", 0) == 0
        # A tip names what is under the mouse.
        row = page.evaluate(ROW % 1)
        page.mouse.move(row["x"] + 40, row["y"])
        (shown, words) = page.evaluate("[tip.style.display, tip.textContent]")
        assert shown == "block"
        assert words.startswith(f"{request_traces.all[1].request_id}: ")
        # A mark of a fallback would cover the start of the state below it.
        calm = next(number for number, trace in enumerate(request_traces.all) if not trace.fallbacks)
        at_x = page.evaluate(f"chart.getBoundingClientRect().left + x(rows[{calm}].request.states[0][0])")
        page.mouse.move(at_x, page.evaluate(ROW % calm)["y"])
        assert page.evaluate("tip.textContent").startswith(f"{request_traces.all[calm].request_id}: ")
        # A click opens the explanation of a request, a second one closes it.
        page.mouse.click(row["x"] + 40, row["y"])
        words = page.evaluate("panel.innerText")
        assert words.startswith(request_traces.all[1].request_id)
        told = explain(request_traces.all[1], now_s=request_traces.last_at_s)
        assert page.evaluate("[...panel.querySelectorAll('p')].map((line) => line.textContent).join('\\n')") == told
        assert page.evaluate(PIXELS).get("#eaf1ff", 0) > 200
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        assert picture.size == (1200, 700)
        assert len(picture.getcolors(1 << 20) or ()) > 30
        page.mouse.click(row["x"] + 40, row["y"])
        assert page.evaluate("panel.className") == ""
        # The wheel zooms in on what is under the mouse; dragging moves; Fit shows all again.
        whole = page.evaluate("to - from")
        under = page.evaluate("time(600 - chart.getBoundingClientRect().left)")
        page.mouse.move(600, row["y"])
        page.mouse.wheel(0, -400)
        page.wait_for_function("(whole) => to - from < 0.9 * whole", arg=whole)
        assert page.evaluate("time(600 - chart.getBoundingClientRect().left)") == pytest.approx(under)
        start = page.evaluate("from")
        page.mouse.down()
        page.mouse.move(500, row["y"])
        page.mouse.up()
        assert page.evaluate("from") > start
        assert page.evaluate("panel.className") == "", "a drag is no click"
        box = page.evaluate("(({x, y}) => ({x, y}))(document.getElementById('fit').getBoundingClientRect())")
        page.mouse.click(box["x"] + 5, box["y"] + 5)
        assert page.evaluate("to - from") == pytest.approx(whole)


@needs_browser
def test_page_explains_its_colors_sorts_by_duration_and_shows_the_pools(
    request_traces: RequestTraces, written: Path, browser: Browser
) -> None:
    with opened_page(written.as_uri(), browser=browser) as page:
        legend = page.inner_text("#legend")
        for kind in {work.kind for request_trace in request_traces.all for work in request_trace.works}:
            assert ACTIVITIES[kind] in legend
        page.select_option("#order", "slowest")
        took = page.evaluate("rows.map((row) => row.request.took)")
        assert took == sorted(took, reverse=True)
        assert len(took) == len(request_traces.all)
        # The lanes of both pools: their color is in the chart, and the tip has the numbers of that moment.
        owned = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--owned').trim()")
        assert page.evaluate(PIXELS).get(owned, 0) > 20
        assert request_traces.pools is not None
        (_, *middle) = sorted(request_traces.pools.samples, key=lambda sample: sum(sample.device))
        busiest = middle[-1]
        at_s = busiest.at_s - min(request_trace.arrived_at_s for request_trace in request_traces.all)
        page.evaluate(f"from = {at_s} - 1e-5; to = {at_s} + 1e-5; draw()")
        left, top = page.evaluate("(({left, top}) => [left, top])(chart.getBoundingClientRect())")
        page.mouse.move(left + page.evaluate(f"x({at_s})") + 1, top + page.evaluate("AXIS + POOL / 2"))
        words = page.evaluate("tip.textContent")
        (in_use, cached, draining) = busiest.device
        assert f": {in_use} owned, {cached} cached, {draining} draining, " in words
        assert words.startswith("device from ")


@needs_browser
@pytest.mark.parametrize(
    ("is_dark", "width"),
    thorough_beyond([(False, 1200), (True, PHONE_WIDTH)], product([False, True], [1200, PHONE_WIDTH])),
)
def test_page_can_be_read_light_and_dark_and_on_a_phone(
    written: Path, browser: Browser, is_dark: bool, width: int
) -> None:
    with opened_page(written.as_uri(), browser=browser, width=width, is_dark=is_dark) as page:
        check_looks(page)
        # The canvas has no background of its own; the band behind the axis is the darkest or lightest of both modes.
        shade = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--shade').trim()")
        assert page.evaluate(PIXELS).get(shade, 0) > 1000
        assert (int(shade[1:3], 16) < 64) == is_dark
        page.evaluate("open(data.requests[1])")
        check_looks(page)
        box = page.evaluate("(({left, right, bottom}) => [left, right, bottom])(panel.getBoundingClientRect())")
        assert box[1] <= width and box[2] <= 700
        assert (box[0] == 0) == (width == PHONE_WIDTH)


def test_samples_of_pools_are_bounded_and_keep_peaks_and_pauses() -> None:
    use = SimpleNamespace(device=SimpleNamespace(counts=[8, 0, 0, 0]), host=SimpleNamespace(counts=[4, 0, 0, 0]))
    core = SimpleNamespace(state=use)
    history = PoolHistory(core, samples_max=64)
    for number in range(5000):
        use.device.counts = [8, 0, 0, 0] if number % 2 else [7, 1, 0, 0]
        if number == 2500:
            use.device.counts = [0, 8, 0, 0]
        history.note(core, number * 0.001)
        assert len(history.samples) <= 66
    use.host.counts = [3, 0, 1, 0]
    history.note(core, 6.0)
    assert history.pages == {"device": 8, "host": 4}
    assert max(sample.device[0] for sample in history.samples) == 8
    times = [sample.at_s for sample in history.samples]
    assert times == sorted(set(times))
    assert history.samples[-2].device == (0, 0, 0), "the last use before a pause"
    assert history.samples[-1] == PoolUse(6.0, (0, 0, 0), (0, 1, 0))


@needs_browser
def test_search_and_filter_choose_requests(request_traces: RequestTraces, written: Path, browser: Browser) -> None:
    with opened_page(written.as_uri(), browser=browser) as page:
        page.mouse.click(*page.evaluate("(({x, y}) => [x + 20, y + 10])(search.getBoundingClientRect())"))
        page.keyboard.insert_text("r2")
        named = [request_trace for request_trace in request_traces.all if "r2" in request_trace.request_id]
        count = "document.getElementById('count').textContent"
        assert page.evaluate(count) == f"{len(named)} of {len(request_traces.all)} requests"
        assert page.evaluate("rows.map((row) => row.request.id)") == [
            request_trace.request_id for request_trace in named
        ]
        page.evaluate("search.value = ''")
        page.mouse.click(*page.evaluate("(({x, y}) => [x + 5, y + 5])(onlyFallbacks.getBoundingClientRect())"))
        with_fallbacks = [request_trace.request_id for request_trace in request_traces.all if request_trace.fallbacks]
        assert page.evaluate("rows.map((row) => row.request.id)") == with_fallbacks
        assert 0 < len(with_fallbacks) < len(request_traces.all)


@needs_browser
def test_address_with_the_id_of_a_request_opens_it(
    request_traces: RequestTraces, written: Path, browser: Browser
) -> None:
    with opened_page(f"{written.as_uri()}#{request_traces.all[2].request_id}", browser=browser) as page:
        assert page.evaluate("panel.innerText").startswith(request_traces.all[2].request_id)


@needs_browser
def test_picture_for_the_docs_shows_an_open_request(simulate, tmp_path: Path, browser: Browser) -> None:
    picture = tmp_path / "timeline.png"
    shown = take_picture(simulate(3, 30).path, picture, browser=browser)
    assert shown.startswith("r")
    image = Image.open(picture).convert("RGB")
    assert image.size == (WIDTH, HEIGHT)
    colors = {color: count for count, color in image.getcolors(1 << 20) or ()}
    assert colors.get((0xEA, 0xF1, 0xFF), 0) > 200
    with pytest.raises(InvalidRequest, match="there is no request 'nobody'"):
        take_picture(tmp_path / "3.journal", picture, request_id="nobody")


def test_pictures_in_the_docs_are_small() -> None:
    pictures = list((Path(__file__).resolve().parents[2] / "docs" / "images").iterdir())
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < 200_000, picture
        if picture.suffix == ".svg":
            assert ElementTree.parse(picture).getroot().tag.endswith("}svg")
        else:
            Image.open(picture).verify()


def test_page_needs_nothing_from_elsewhere_and_no_name_can_break_out_of_it(request_traces: RequestTraces) -> None:
    request_traces.all[0].request_id = "</script><img src=x onerror=alert(1)>"
    page = html_page(request_traces.all, now_s=request_traces.last_at_s, title="a run")
    assert not re.search(r"https?://|<link|<img|@import|src=\"", page)
    assert page.count("</script>") == 1


def test_page_of_no_requests_is_a_page() -> None:
    assert "<canvas" in html_page([], now_s=0.0, title="nothing")


def test_terminal_shows_every_request_and_the_lanes_of_one(request_traces: RequestTraces) -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the console.
    console.print(all_bars(request_traces.all, now_s=request_traces.last_at_s, width=60))
    busiest = max(request_traces.all, key=lambda request_trace: len(request_trace.works))
    console.print(one_request(busiest, now_s=request_traces.last_at_s, width=60))
    console.file.close()
    text = console.export_text()
    for request_trace in request_traces.all:
        assert request_trace.request_id in text
    for work in busiest.works:
        assert f"{work.kind} [{work.first}, {work.first + work.count})" in text


def test_stories_agree_with_what_the_core_told(simulate) -> None:
    tape = simulate(4, 60)
    told = read_request_traces(Replayer(tape.path))
    arrived = [event for event, _ in tape.steps if isinstance(event, events.RequestArrived)]
    assert [request_trace.request_id for request_trace in told.all] == [event.request_id for event in arrived]
    words = "".join(given for _, given in tape.steps)
    assert sum(request_trace.ended == "READY" for request_trace in told.all) == words.count("ReportReady(")
    assert sum(request_trace.ended == "FAILED" for request_trace in told.all) == words.count("ReportFailed(")
    for request_trace in told.all:
        if request_trace.ended == "READY":
            assert sum(request_trace.sources.values()) == request_trace.prompt_tokens
            assert request_trace.states[-1][1] == "READY"
            assert request_trace.ended_at_s is not None
            assert sum(request_trace.time_in(0.0).values()) == pytest.approx(
                request_trace.ended_at_s - request_trace.arrived_at_s
            )
