"""What a check of the doctor says."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "bad"]


class Finding(msgspec.Struct, frozen=True):
    """One answer. "warn": it works, but worse than it could; "bad": something of tidekv will not work.

    `advice` is empty where all is well, and otherwise one thing to do, in plain words.
    """

    check: str
    level: Level
    found: str
    advice: str = ""


def in_bytes(count: int) -> str:
    """Write a number of bytes as people read it."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
