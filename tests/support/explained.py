"""The table of `test_explain`: rows that modules add, by what they inject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Play = Any  # A core played by hand by the fixture `play`; tests cannot import its class.
CASES: dict[str, tuple[Callable[[Play], None], tuple[str, ...], tuple[str, ...]]] = {}
"""By name: what is injected, words about request r1, and counters of the core that the injection moves."""


def says(*words: str, counts: str = "", name: str = "") -> Callable[[Callable[[Play], None]], Callable[[Play], None]]:
    """Add a row, under the function's name unless another one is given: no other row may have that name."""

    def add(play: Callable[[Play], None]) -> Callable[[Play], None]:
        key = name or play.__name__
        assert key not in CASES, f"two rows are named {key}"
        CASES[key] = (play, words, tuple(counts.split()))
        return play

    return add
