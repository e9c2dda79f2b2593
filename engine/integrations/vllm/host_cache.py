"""Bounded cache of host pages by key (L2) that evicts the least recently used page.

    free ──take──▶ lent ──keep under a key──▶ lent, found by its key
      ▲              │                          │ last receipt back
      └──give_back───┘                          ▼
      ▲                                       idle, found by its key ──find──▶ lent again
      └──────────taken when no page is free─────┘

It only accounts for pages and holds no bytes. Methods may be called on any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from tidekv.states.errors import BrokenInvariant, InvalidConfig


class HostCache:
    """The account of `page_count` host pages. Each page from `take` and `find` must be given back once."""

    def __init__(self, page_count: int) -> None:
        if page_count < 1:
            raise InvalidConfig(f"a host cache needs at least one page, not {page_count}")
        self.page_count = page_count
        self._lock = threading.Lock()
        self._free = list(range(page_count - 1, -1, -1))
        self._receipts = [0] * page_count
        self._key_of: list[bytes | None] = [None] * page_count
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def take(self, count: int) -> list[int]:
        """Take up to `count` pages for new bytes: free ones first, then idle ones, whose keys are forgotten."""
        with self._lock:
            taken: list[int] = []
            while len(taken) < count and (self._free or self._idle):
                page = self._free.pop() if self._free else self._idle.popitem(last=False)[0]
                self._forget(page)
                self._receipts[page] = 1
                taken.append(page)
            return taken

    def find(self, key: bytes) -> int | None:
        """Return the page with the bytes of `key`, or None. It is not overwritten until it is given back."""
        with self._lock:
            page = self._page_of.get(key)
            if page is not None:
                self._receipts[page] += 1
                self._idle.pop(page, None)
            return page

    def keep(self, key: bytes, page: int) -> None:
        """Record that a lent page has the bytes of `key`. No effect if another page has that key already."""
        with self._lock:
            if not self._receipts[page] or self._key_of[page] is not None:
                raise BrokenInvariant(f"host page {page} is not lent for new bytes")
            if key not in self._page_of:
                self._page_of[key] = page
                self._key_of[page] = key

    def give_back(self, pages: Iterable[int]) -> None:
        """Return one receipt of each page."""
        with self._lock:
            for page in pages:
                if not self._receipts[page]:
                    raise BrokenInvariant(f"host page {page} was given back twice")
                self._receipts[page] -= 1
                if self._receipts[page]:
                    continue
                if self._key_of[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None

    def available(self) -> int:
        """Number of pages that `take` could return now."""
        with self._lock:
            return len(self._free) + len(self._idle)

    def cached(self) -> int:
        """Number of pages that have a key."""
        with self._lock:
            return len(self._page_of)

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        if key is not None:
            del self._page_of[key]
            self._key_of[page] = None
