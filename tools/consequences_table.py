"""Table of the core's consequences for docs/how-it-works.md: `python -m tools.consequences_table`."""

from __future__ import annotations

from tidekv.states.core import CONSEQUENCES


def consequences_table() -> str:
    """Return CONSEQUENCES as a Markdown table."""
    rows = [
        f"| {number} | {consequence.when} | {' '.join((consequence.rule.__doc__ or '').split())} "
        f"| `{consequence.rule.__name__}` |"
        for number, consequence in enumerate(CONSEQUENCES, start=1)
    ]
    return "\n".join(["| | if | then | rule |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(consequences_table(), end="")
