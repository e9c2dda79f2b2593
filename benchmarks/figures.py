"""Output of a measuring program: a JSON file of named figures, comments on each, and what is missing and why.

    {"figures": {"sglang.match.array": 4.1}, "words": {"sglang.match.array": "25 µs against 103 µs"},
     "missing": {"sglang.": "it did not come from the registry"}, "notes": ["4000 requests, …"]}

Keys of `missing` are prefixes of names. The file is written again with every figure, so that earlier figures are kept
if the program fails later.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.peers import PeerMissing


def option_parser(what: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option that every measuring program has: the output file."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    return parser


class Figures:
    """Collects figures and writes them. PeerMissing ends the block and is recorded as missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, float] = {}
        self._words: dict[str, str] = {}
        self._missing: dict[str, str] = {}
        self._notes: list[str] = []

    def add(self, name: str, value: float, words: str = "") -> None:
        """Add a figure."""
        self._figures[name] = value
        if words:
            self._words[name] = words
        self._write()

    def missing(self, beginning: str, why: str) -> None:
        """Record that figures with this prefix cannot be measured here."""
        self._missing[beginning] = why

    def note(self, words: str) -> None:
        """Add a remark to the report."""
        self._notes.append(words)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, PeerMissing):
            self._missing[""] = str(error)
        self._write()
        return isinstance(error, PeerMissing)

    def _write(self) -> None:
        found = {"figures": self._figures, "words": self._words, "missing": self._missing, "notes": self._notes}
        self._path.write_text(json.dumps(found, indent=1, ensure_ascii=False))


def over_n_log_n(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Return the growth of the cost between two points (n, seconds), divided by the growth of n log n."""
    (few, few_s), (many, many_s) = first, last
    return (many_s / few_s) / (many * math.log(many) / (few * math.log(few)))
