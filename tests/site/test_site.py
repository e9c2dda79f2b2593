"""The documentation site: it builds without warnings, asks no other host, and looks right in light and dark."""

from __future__ import annotations

import fcntl
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.page_looks import PHONE_WIDTH, check_looks
from tools.browser import find_browser, opened_browser, opened_page
from tools.diagrams import FOLDER, PALETTES, file_of, sources

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium")
# Headings of tables that are wider than the text, so that a part is out of sight until it is scrolled.
CUT_TABLES = """[...document.querySelectorAll(".md-typeset__scrollwrap")]
    .filter((table) => table.scrollWidth > table.clientWidth + 1).map((table) => table.innerText.slice(0, 60))"""
LOOKED_AT = (
    "",
    "how-it-works/",
    "configuration/",
    "observability/",
    "troubleshooting/",
    "api/",
    "measuring/",
    "comparison/",
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class.
        """See `BaseHTTPRequestHandler`."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once for all workers of the run."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, begun = base / "site", base / "site-begun"
    with (base / "site-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(begun)]
            environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
            assert done.returncode == 0, done.stdout + done.stderr
            begun.rename(folder)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened_browser() as browser:
        yield browser


def test_every_diagram_is_drawn_and_no_other() -> None:
    drawn = {file_of(source, palette) for source in sources() for palette in PALETTES}
    assert len(drawn) >= 4
    assert set(FOLDER.glob("*.svg")) == drawn, "see tools/diagrams.py"


@pytest.mark.slow
def test_diagrams_are_in_the_page_light_and_dark(site: Path) -> None:
    page = (site / "how-it-works" / "index.html").read_text()
    assert page.count('<div class="diagram only-light"><svg') == page.count('<div class="diagram only-dark"><svg') == 2
    assert "sequenceDiagram" not in page
    # Two diagrams of one page must not have the same ids: a marker would be taken from the hidden one.
    ids = re.findall(r'<(?:svg|marker|symbol)[^>]* id="(diagram[^"]+)"', page)
    assert len(ids) > 6
    assert len(set(ids)) == len(ids)


def test_every_page_is_in_the_navigation_by_kind() -> None:
    lines = (ROOT / "mkdocs.yml").read_text()
    nav = yaml.safe_load(lines[lines.index("\nnav:") :])["nav"]
    assert [name for part in nav for name in part] == ["Home", "Tutorial", "How-to", "Reference", "Explanation"]
    listed = {name for part in nav[1:] for pages in part.values() for page in pages for name in page.values()}
    assert listed | {"index.md"} == {page.name for page in (ROOT / "docs").glob("*.md")}
    index = (ROOT / "docs" / "index.md").read_text()
    assert not [name for name in listed if f"]({name})" not in index]


def test_troubleshooting_covers_the_symptoms_that_are_asked_about() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    symptoms = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert len(symptoms) >= 10
    for word in ("slow", "fail", "cache", "Storage", "draining", "garbled", "Memory", "start", "vLLM"):
        assert [symptom for symptom in symptoms if word in symptom], word


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not loaded, page
        assert "class=mermaid" not in page.read_text() and 'class="mermaid"' not in page.read_text()


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, PHONE_WIDTH])
def test_pages_look_right(address: str, browser: Browser, width: int, is_dark: bool) -> None:
    with opened_page(f"{address}/", browser=browser, is_dark=is_dark) as page:
        elsewhere: list[str] = []
        page.on(
            "request",
            lambda request: None if request.url.startswith((address, "data:")) else elsewhere.append(request.url),
        )
        page.set_viewport_size({"width": width, "height": 900})
        for name in LOOKED_AT:
            page.goto(f"{address}/{name}")
            check_content(page, is_dark=is_dark)
            if width > PHONE_WIDTH:
                assert page.evaluate(CUT_TABLES) == [], name
        assert not elsewhere


def check_content(page: Page, *, is_dark: bool) -> None:
    scheme = page.evaluate("document.body.dataset.mdColorScheme")
    assert scheme == ("slate" if is_dark else "default")
    check_looks(page)
    for picture in page.query_selector_all("article img"):
        assert picture.evaluate("(image) => image.complete && image.naturalWidth > 0"), picture.get_attribute("src")
    shown = [diagram for diagram in page.query_selector_all(".diagram") if diagram.is_visible()]
    assert len(shown) * 2 == len(page.query_selector_all(".diagram"))
    for diagram in shown:
        assert f"only-{'dark' if is_dark else 'light'}" in (diagram.get_attribute("class") or "")
    # Names of options are never broken into two lines.
    broken = "[...document.querySelectorAll('td:first-child code')].filter((code) => code.getClientRects().length > 1)"
    assert page.evaluate(f"{broken}.map((code) => code.textContent)") == []
