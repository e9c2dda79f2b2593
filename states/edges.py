"""Comparing a prompt with the keys of a node: the one thing in a match that takes longer the longer the prompt is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tidekv.states.node import Keys


def _fastest() -> Callable[[bytes, Keys, int], bool]:
    """Find what compares by whole lines of the cache, where it was compiled; else what Python has."""
    try:
        from tidekv.states.native_edges import begins_with
    except ImportError:
        return bytes.startswith
    return begins_with


begins_with: Final = _fastest()
"""Tells whether an edge is what keys go on with from byte `at` on: `begins_with(keys, edge, at)`."""
