"""Sizes of pools: bytes, pages, a share of free memory, or a multiple of another pool."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from tidekv.backends.storage.options import parse_size
from tidekv.engine.config.memory import Memory
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import short

ALLOWED: Final = (
    '"auto", bytes such as 1073741824, "64GB" or "512MiB", pages such as "4096 pages", a share such as "80 %" '
    '(of what is free) or "50 % of total", or, for l2, a multiple of l1 such as "2x"'
)
_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%(?:\s*of\s+(?:what\s+is\s+)?(free|total))?")
_RATIO: Final = re.compile(r"(\d+(?:\.\d+)?)\s*x")
_PAGES: Final = re.compile(r"(\d+)\s*pages?")


class MemorySize(msgspec.Struct, frozen=True):
    """A parsed size that is not yet converted to pages: percent, a factor, bytes or pages, by its kind."""

    kind: Literal["auto", "bytes", "pages", "free", "total", "ratio"]
    amount: float = 0

    def pages(self, *, page_bytes: int, memory: Memory, l1_pages: int = 0, what: str) -> int:
        """Return the number of pages of `page_bytes`. Raises InvalidConfig if it is 0, or more than is free.

        "auto" is 0 pages: the caller chooses.
        """
        if self.kind == "auto":
            return 0
        if self.kind == "ratio" and not l1_pages:
            raise InvalidConfig(f"{what} is a multiple of cache.l1, which is left to the command: give cache.l1 a size")
        if self.kind == "ratio":
            count = int(self.amount * l1_pages)
        elif self.kind == "pages":
            count = int(self.amount)
        else:
            share_of = {"free": memory.free_bytes / 100, "total": memory.total_bytes / 100}.get(self.kind, 1)
            count = int(self.amount * share_of) // page_bytes
        if self.kind != "pages" and self.amount and not count:
            raise InvalidConfig(f"{what} is less than one page of {page_bytes} bytes")
        if count * page_bytes > memory.free_bytes:
            raise InvalidConfig(
                f"{what} is {count} pages, {count * page_bytes} bytes; {memory.bound_by} has {memory.free_bytes} free"
            )
        return count


def parse_memory(value: object, *, what: str) -> MemorySize:
    """Parse a size. Raises InvalidConfig, which names the allowed forms."""
    text = value.strip().lower() if isinstance(value, str) else ""
    if text == "auto":
        return MemorySize("auto")
    if match := _SHARE.fullmatch(text):
        if not 0 < float(match[1]) <= 100:
            raise InvalidConfig(f"{what} must be more than 0 % and at most 100 %, not {short(value)}")
        return MemorySize("total" if match[2] == "total" else "free", float(match[1]))
    if match := _RATIO.fullmatch(text):
        return MemorySize("ratio", float(match[1]))
    if match := _PAGES.fullmatch(text):
        return MemorySize("pages", int(match[1]))
    size_bytes = parse_size(value)
    if size_bytes is None or size_bytes < 0:
        raise InvalidConfig(f"{what} must be {ALLOWED}, not {short(value)}")
    return MemorySize("bytes", size_bytes)
