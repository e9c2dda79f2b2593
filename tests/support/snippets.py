"""Snippets of the README, of docs/ and of the examples, as the tests run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]


def snippets() -> list[tuple[str, str]]:
    """Page and text of every snippet."""
    return [
        (page.relative_to(ROOT).as_posix(), text)
        for page in PAGES
        for text in re.findall(r"^ *```\w*\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


def snippet(page: str, beginning: str) -> str:
    """Return the one snippet of a page with this beginning."""
    (found,) = [text for name, text in snippets() if name == page and text.lstrip().startswith(beginning)]
    return found
