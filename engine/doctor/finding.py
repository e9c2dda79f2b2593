"""The result of one check of the doctor."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "bad"]


class Finding(msgspec.Struct, frozen=True):
    """Result of a check. "warn": it works, but not as well as it could; "bad": some part of tidekv will not work.

    `advice` is one action in plain words, or empty if nothing needs to be done.
    """

    check: str
    level: Level
    found: str
    advice: str = ""


def in_bytes(count: int) -> str:
    """Format a number of bytes with a binary unit."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
