"""The condition of each page of a pool: one byte a page, and changes of many pages at once, all or none.

`accounts` decides which changes are allowed and words the refusals.
"""

from __future__ import annotations

import numpy as np

from tidekv.states.types import PageIds

# Made once: a name would be looked up, and made a type of numbers, at every call.
_UNSIGNED, _INDEX = np.dtype(np.uint32), np.dtype(np.intp)

# Up to so many pages a loop over bytes is faster than numpy's fixed cost of some microseconds a call.
_LOOP_PAGES_MAX = 24


class PageConditions:
    """The conditions of the pages of one pool, numbers from 0 to 255; 0 at first.

    A loop changes few pages, numpy many: each is the faster one there.
    """

    __slots__ = ("_bytes", "_place_bytes", "_places", "_seen_at", "_vector")

    def __init__(self, page_count: int) -> None:
        # The same bytes twice: as a bytearray for loops, as a vector for numpy.
        self._bytes = bytearray(page_count)
        self._vector = np.frombuffer(self._bytes, dtype=np.uint8)
        # For finding a page that is named twice: scratch space, and the numbers 0, 1, 2, …
        self._seen_at = np.zeros(page_count, dtype=np.int32)
        self._places = np.arange(page_count, dtype=np.int32)
        self._place_bytes = self._places.tobytes()

    def of(self, page: int) -> int:
        """Return the condition of a page of the pool."""
        return self._bytes[page]

    def change(self, pages: PageIds, source: int, target: int) -> bool:
        """Move pages from `source` to `target`, a different condition.

        Returns False, with nothing changed, if a page is not in `source`, is out of range, or is named twice.
        """
        if len(pages) <= _LOOP_PAGES_MAX:
            return self._change_by_loop(pages, source, target)
        ids = _as_index(pages)
        try:
            conditions = self._vector[ids].tobytes()
        except IndexError:
            return False
        # Counting bytes costs a fraction of what a comparison and its reduction do.
        if conditions.count(source) != len(pages) or self._repeats(ids):
            return False
        self._vector[ids] = target
        return True

    def put(self, pages: PageIds, target: int) -> None:
        """Set pages that are known to be in range to `target`."""
        if len(pages) <= _LOOP_PAGES_MAX:
            conditions = self._bytes
            for page in pages:
                conditions[page] = target
        else:
            self._vector[_as_index(pages)] = target

    def to_bytes(self) -> bytes:
        """Return the conditions of all pages, one byte a page."""
        return bytes(self._bytes)

    def _change_by_loop(self, pages: PageIds, source: int, target: int) -> bool:
        conditions = self._bytes
        total = len(conditions)
        for changed, page in enumerate(pages):
            # A page named twice is found here too: its second time it is no longer in the source's condition.
            if page < 0 or page >= total or conditions[page] != source:
                for done in pages[:changed]:
                    conditions[done] = source
                return False
            conditions[page] = target
        return True

    def _repeats(self, ids: np.ndarray[tuple[int], np.dtype[np.intp]]) -> bool:
        if len(ids) > len(self._bytes):
            return True
        # Of two places of one page, only one can be the place that was written last.
        self._seen_at[ids] = self._places[: len(ids)]
        return not self._place_bytes.startswith(self._seen_at[ids].tobytes())


def _as_index(pages: PageIds) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Page ids as numpy indexes fastest. As unsigned numbers, negative ones are out of range and not counted from the
    end.
    """
    return np.frombuffer(pages, _UNSIGNED).astype(_INDEX)
