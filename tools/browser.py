"""Installed Chromium, driven by Playwright, for tests of the HTML pages and for the picture in the docs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from tidekv.states.errors import InvalidConfig

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """Start a browser, and close it at the end. Raises InvalidConfig if none is installed."""
    executable = find_browser()
    if executable is None:
        raise InvalidConfig("no Chromium is installed: apt-get install chromium")
    # Imported here: a test module that only asks whether a browser is installed must not need Playwright.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Playwright's own Chromium is never downloaded. The sandbox needs user namespaces, which containers lack.
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened_page(
    url: str,
    *,
    browser: Browser | None = None,
    width: int = 1200,
    height: int = 700,
    is_dark: bool = False,
    timeout_s: float = 60.0,
) -> Iterator[Page]:
    """Open a page in `browser`, or in one of its own, and close it at the end. `is_dark`: the user prefers dark colors.

    Raises InvalidConfig if no browser is installed, and Playwright's errors if it does not respond within `timeout_s`.
    """
    with opened_browser() if browser is None else nullcontext(browser) as used:
        scheme: Literal["dark", "light"] = "dark" if is_dark else "light"
        # Each has a context of its own: no cache, storage or cookie of another.
        page = used.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        try:
            page.set_default_timeout(timeout_s * 1000)
            page.goto(url)
            # The page draws in an animation frame.
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            yield page
        finally:
            page.close()
