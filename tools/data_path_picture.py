"""Pictures of the data path for the README, for light and dark, wide and narrow windows.

`python -m tools.data_path_picture docs/images` writes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

PALETTES = {
    "light": {
        "paper": "#ffffff", "ink": "#1f2933", "quiet": "#52606d", "line": "#9aa5b1", "box": "#f5f7fa",
        "l1": "#d7f0e2", "l2": "#dcebfa", "l3": "#eee5f8", "transfer": "#fde8d4", "edge": "#cbd2d9",
    },
    "dark": {
        "paper": "#0d1117", "ink": "#e6edf3", "quiet": "#9da7b3", "line": "#6e7681", "box": "#161b22",
        "l1": "#12372a", "l2": "#14304d", "l3": "#33254d", "transfer": "#4a2f16", "edge": "#30363d",
    },
}  # fmt: skip
STATES = ("PREALLOC", "MATCH", "PREFETCH", "LOCAL_RESTORE", "TRANSFER", "READY")
TIERS = (
    ("l1", "L1", "device memory: radix tree with lock counts", "pages are shared in place"),
    ("l2", "L2", "host memory", "copied to the device"),
    ("l3", "L3", "storage: files, Redis, S3, Mooncake", "read ahead into host memory"),
)
FONT = "font-family=\"-apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif\""


def text(x: float, y: float, words: str, fill: str, *, size: int = 14, weight: int = 400, anchor: str = "start") -> str:
    """Return a line of text."""
    return (
        f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{words}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, edge: str) -> str:
    """Return a box with round corners."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{edge}"/>'


def picture(palette: dict[str, str], *, is_narrow: bool = False) -> str:
    """Return the picture as SVG: 920 by 330 pixels, or 552 by 510 for phones, with one worker above the other."""
    quiet, line = palette["quiet"], palette["line"]
    width, height = (552, 510) if is_narrow else (920, 330)
    if is_narrow:
        places = ("translate(-368 0)", "translate(156 264)")
        arrow, rest = "M276 356V318", (292, 342)
        how = [(392, 424, "over NVIDIA NIXL,"), (392, 440, "while decode restores")]
    else:
        places = ("translate(0 0)", "translate(0 0)")
        arrow, rest = "M224 206C300 206 310 130 396 130", (244, 120)
        how = [(236, 240, "over NVIDIA NIXL,"), (236, 256, "while decode restores")]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title" {FONT}>',
        '<title id="title">A decode worker restores a prompt\'s KV from device memory, host memory and storage, and '
        "receives only the rest from the prefill worker</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{line}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="{palette["paper"]}"/>',
        f'<g transform="{places[0]}">',
        *decode_worker(palette),
        f'</g><g transform="{places[1]}">',
        *prefill_worker(palette),
        f'</g><path d="{arrow}" fill="none" stroke="{line}" stroke-width="2" marker-end="url(#tip)"/>',
        text(rest[0], rest[1], "only the rest", palette["ink"], weight=600),
        *(text(x, y, words, quiet, size=12) for x, y, words in how),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def prefill_worker(palette: dict[str, str]) -> list[str]:
    """Return the box of the prefill worker, at its place in the wide picture."""
    ink, quiet, edge = palette["ink"], palette["quiet"], palette["edge"]
    return [
        box(16, 92, 208, 146, palette["box"], edge),
        text(120, 126, "prefill worker", ink, size=16, weight=600, anchor="middle"),
        text(120, 152, "computes the prompt", quiet, anchor="middle"),
        text(120, 172, "embeds PrefillPeer", quiet, anchor="middle"),
        box(32, 190, 176, 32, palette["transfer"], edge),
        text(120, 211, "pages that decode lacks", ink, size=13, anchor="middle"),
    ]


def decode_worker(palette: dict[str, str]) -> list[str]:
    """Return the box of the decode worker, at its place in the wide picture."""
    ink, quiet, line, edge = palette["ink"], palette["quiet"], palette["line"], palette["edge"]
    parts = [
        box(384, 16, 520, 298, palette["box"], edge),
        text(404, 46, "decode worker", ink, size=16, weight=600),
        text(884, 46, "embeds DecodeEngine in its asyncio service", quiet, anchor="end"),
    ]
    x = 404.0
    for state in STATES:
        width = 12 + 7.3 * len(state)
        parts.append(box(x, 62, width, 26, palette["paper"], edge))
        parts.append(text(x + width / 2, 79, state, ink, size=11, weight=600, anchor="middle"))
        x += width
        if state != STATES[-1]:
            parts.append(f'<path d="M{x + 1} 75h9" stroke="{line}" stroke-width="1.5" marker-end="url(#tip)"/>')
            x += 12
    for number, (tier, name, where, how) in enumerate(TIERS):
        y = 106 + 62 * number
        parts += [
            box(404, y, 480, 48, palette[tier], edge),
            text(422, y + 30, name, ink, size=16, weight=700),
            text(462, y + 21, where, ink),
            text(462, y + 39, how, quiet, size=12),
        ]
        if number:
            parts.append(f'<path d="M846 {y}v-12" stroke="{line}" stroke-width="1.5" marker-end="url(#tip)"/>')
    promise = "the longest prefix that the tiers hold is restored here; equal prompts share it"
    parts.append(text(644, 303, promise, quiet, size=12, anchor="middle"))
    return parts


def pictures() -> dict[str, str]:
    """Return all pictures by the name of their file."""
    return {
        f"data-path{'-narrow' if is_narrow else ''}-{name}.svg": picture(palette, is_narrow=is_narrow)
        for name, palette in PALETTES.items()
        for is_narrow in (False, True)
    }


def main() -> None:
    """Write the pictures to a directory."""
    (directory,) = sys.argv[1:]
    for name, svg in pictures().items():
        (Path(directory) / name).write_text(svg)


if __name__ == "__main__":
    main()
