"""Counts of interpreted instructions: what a call costs, without a clock.

A count is the same on every machine and at every load. Work inside of C functions counts as one instruction, so a loop
hidden there (`list.remove`, `sorted`) is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions_of(call: Callable[[], object]) -> int:
    """Return the number of instructions that `call` and what it calls execute."""
    count = 0

    def note(frame: FrameType, kind: str, argument: object) -> Any:
        nonlocal count
        if kind == "opcode":
            count += 1
        else:
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return note

    before = sys.gettrace()
    # Python 3.12 traces opcodes only if a frame of the interpreter had asked for it before `settrace`.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(note)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def calls_of(call: Callable[[], object]) -> int:
    """Return the number of calls of Python functions that `call` makes, its own included.

    Newer versions of Python make fewer for the same source: comprehensions are no calls since 3.12.
    """
    count = 0

    def note(frame: FrameType, kind: str, argument: object) -> None:
        nonlocal count
        count += kind == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def growth_of(cost_at: Callable[[int], int], *, small: int, large: int) -> float:
    """Return how many times as much a unit costs at size `large` as at size `small`."""
    return cost_at(large) / cost_at(small)
