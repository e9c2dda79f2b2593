"""What every HTML page must hold, whatever it shows: nothing is wider than the window, and text can be read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

PHONE_WIDTH = 390
WRONG = Path(__file__).with_suffix(".js").read_text()


def check_looks(page: Page) -> None:
    """Fail if something is wider than the window, or if text has too little contrast."""
    wrong = page.evaluate(WRONG)
    assert not wrong, "\n".join([page.url, *wrong])
