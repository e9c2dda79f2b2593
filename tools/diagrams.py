"""Diagrams of the documentation, drawn once, so that the site needs neither a network nor a script to show them.

A Mermaid block in docs/ is drawn light and dark, to docs/diagrams, under the digest of its text; `fence` puts both into
the page, and the colors of the page choose one. After a change of a diagram:

    npm pack mermaid@11 && tar xzf mermaid-11*.tgz
    python -m tools.diagrams package/dist/mermaid.min.js
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tidekv.states.errors import InvalidConfig
from tools.browser import opened_page

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "diagrams"
PALETTES = {
    "light": {
        "background": "#ffffff", "textColor": "#17202a", "lineColor": "#5b6b7b", "primaryColor": "#e3effa",
        "primaryBorderColor": "#7fa6cc", "primaryTextColor": "#17202a", "secondaryColor": "#def3ea",
        "tertiaryColor": "#f3f6f9", "noteBkgColor": "#fdf1dc", "labelTextColor": "#17202a",
    },
    "dark": {
        "background": "#1e2129", "textColor": "#e6edf3", "lineColor": "#93a4b5", "primaryColor": "#1d3954",
        "primaryBorderColor": "#5b8fc0", "primaryTextColor": "#e6edf3", "secondaryColor": "#17392d",
        "tertiaryColor": "#242a33", "noteBkgColor": "#453514", "labelTextColor": "#e6edf3",
    },
}  # fmt: skip
FONT = "system-ui, 'Segoe UI', Roboto, sans-serif"
DRAW = """
async ([name, source, palette, font]) => {
  mermaid.initialize({
    startOnLoad: false, securityLevel: "strict", theme: "base", htmlLabels: false, flowchart: { htmlLabels: false },
    themeVariables: { ...palette, fontFamily: font, fontSize: "15px" }, fontFamily: font, deterministicIds: true,
  });
  return (await mermaid.render(name, source)).svg;
}
"""


def file_of(source: str, palette: str) -> Path:
    """Return where a diagram is, by the digest of its text without surrounding space."""
    return FOLDER / f"{hashlib.sha256(source.strip().encode()).hexdigest()[:12]}-{palette}.svg"


def sources() -> list[str]:
    """Return the text of every diagram in docs/."""
    return [
        block
        for page in sorted(DOCS.glob("*.md"))
        for block in re.findall(r"^```mermaid\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


def fence(source: str, language: str, css_class: str, options: dict[str, Any], md: object, **more: object) -> str:
    """Return the HTML of a Mermaid block, for pymdownx.superfences. Raises InvalidConfig if it was not drawn."""
    from pymdownx.superfences import SuperFencesException  # type: ignore[import-untyped]  # It has no types.

    drawn = []
    for palette in PALETTES:
        file = file_of(source, palette)
        if not file.is_file():
            # Another exception would show the block as text.
            raise SuperFencesException from InvalidConfig(f"a diagram is not drawn; see {__file__}:\n{source}")
        drawn.append(f'<div class="diagram only-{palette}">{file.read_text()}</div>')
    return "".join(drawn)


def draw(mermaid: Path) -> list[Path]:
    """Draw all diagrams with this build of Mermaid, delete all others, and return the files."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.svg"):
        old.unlink()
    written = []
    with tempfile.TemporaryDirectory() as folder:
        blank = Path(folder, "blank.html")
        blank.write_text("<!doctype html><meta charset=utf-8><body>")
        with opened_page(blank.as_uri()) as page:
            page.add_script_tag(path=mermaid)
            for source in sources():
                for palette, colors in PALETTES.items():
                    file = file_of(source, palette)
                    # Its name is the prefix of every id in it, so that two of them can be in one page.
                    svg = page.evaluate(DRAW, [f"diagram-{file.stem}", source, colors, FONT])
                    file.write_text(svg + "\n")
                    written.append(file)
    return written


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1])):
        print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size} bytes")
