"""Who has which page of a pool: each is in exactly one of four conditions, and each change of condition is checked.

    free ──take──▶ owned ──to_cache──▶ cached
      ▲  ◀─give_back─┤  ◀──own_cached──┤ │
      │            drain           drain_cached
      │              ▼                ▼  │
      ├───settle── draining ◀─────────┘  │
      └──────────────from_cache──────────┘

A *draining* page is one that a writer elsewhere may still touch: only that writer's own word (`settle`) frees it.
This file holds no page's bytes and never waits.

The condition of each page of a pool: one byte a page, and changes of many pages at once, all or none.

`accounts` decides which changes are allowed and words the refusals.
"""

from __future__ import annotations

import enum

import numpy as np

from tidekv.states.errors import BrokenInvariant, CapacityError, InvalidConfig
from tidekv.states.types import NO_PAGES, PageIds, page_ids

# Made once: a name would be looked up, and made a type of numbers, at every call.
_UNSIGNED, _INDEX = np.dtype(np.uint32), np.dtype(np.intp)

# Up to so many pages a loop over bytes is faster than numpy's fixed cost of some microseconds a call.
_LOOP_PAGES_MAX = 24


class PageStates:
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


class PageState(enum.IntEnum):
    """What a page is at this moment."""

    FREE = 0
    OWNED = 1
    CACHED = 2
    DRAINING = 3


# Plain ints: an enum member costs a lookup and a slower comparison on every page.
_FREE, _OWNED, _CACHED, _DRAINING = (int(condition) for condition in PageState)


class PagePool:
    """The account of one pool of `page_count` pages, all of them free at first.

    Every method that takes pages raises BrokenInvariant, and changes nothing, where a page is not in the condition that
    the change starts from, is out of range, or is named twice in one call. Counters cost O(1), changes O(pages named).
    """

    __slots__ = ("_conditions", "_counts", "_free", "name", "total")

    def __init__(self, name: str, page_count: int) -> None:
        if page_count < 0:
            raise InvalidConfig(f"pool {name!r} cannot have {page_count} pages")
        self.name = name
        self.total = page_count
        self._conditions = PageStates(page_count)
        self._counts = [page_count, 0, 0, 0]
        # A stack with its top at the end, so that a fresh pool hands out 0, 1, 2, …
        self._free: PageIds = page_ids(range(page_count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return self._counts[_FREE]

    @property
    def owned(self) -> int:
        """Pages of requests and operations."""
        return self._counts[_OWNED]

    @property
    def cached(self) -> int:
        """Pages of the prefix index."""
        return self._counts[_CACHED]

    @property
    def draining(self) -> int:
        """Pages that a writer elsewhere may still touch."""
        return self._counts[_DRAINING]

    @property
    def counts(self) -> list[int]:
        """Pages by condition, in the order of PageState. Read it at once, and do not change it."""
        return self._counts

    @property
    def free_pages(self) -> PageIds:
        """The free pages; the last one is taken first. Read it at once, and do not change it."""
        return self._free

    def condition(self, page: int) -> PageState:
        """Tell the condition of one page."""
        if not 0 <= page < self.total:
            raise BrokenInvariant(f"pool {self.name!r}: page {page} is out of range, it has {self.total} pages")
        return PageState(self._conditions.of(page))

    def take(self, count: int) -> PageIds:
        """Make `count` free pages owned and return them; the caller owns them.

        The pages given back last are taken first, a batch in its own order: a page that was freed too early is soon
        written by someone else, which tests see, and runs stay runs. Raises CapacityError, changing nothing, where
        fewer are free.
        """
        free = self._free
        if count > len(free):
            raise CapacityError(
                f"pool {self.name!r}: {count} pages wanted, {self.free} free ({self.owned} owned, {self.cached} cached,"
                f" {self.draining} draining, {self.total} in all)"
            )
        if count <= 0:
            if count:
                raise BrokenInvariant(f"pool {self.name!r}: {count} pages cannot be taken")
            return NO_PAGES[:]
        pages = free[-count:]
        pages.reverse()
        del free[-count:]
        self._conditions.put(pages, _OWNED)
        self._counts[_FREE] -= count
        self._counts[_OWNED] += count
        return pages

    def give_back(self, pages: PageIds) -> None:
        """Make owned pages free."""
        self._move(pages, _OWNED, _FREE)

    def to_cache(self, pages: PageIds) -> None:
        """Hand owned pages to the index."""
        self._move(pages, _OWNED, _CACHED)

    def from_cache(self, pages: PageIds) -> None:
        """Make cached pages free: the index forgot them."""
        self._move(pages, _CACHED, _FREE)

    def own_cached(self, pages: PageIds) -> None:
        """Take cached pages out of the index: the caller owns them."""
        self._move(pages, _CACHED, _OWNED)

    def drain(self, pages: PageIds) -> None:
        """Put owned pages into the quarantine: a writer may still touch them."""
        self._move(pages, _OWNED, _DRAINING)

    def drain_cached(self, pages: PageIds) -> None:
        """Put cached pages into the quarantine: a writer may still touch them."""
        self._move(pages, _CACHED, _DRAINING)

    def settle(self, pages: PageIds) -> None:
        """Free pages of the quarantine: nobody can write to them any more."""
        self._move(pages, _DRAINING, _FREE)

    def holds(self, pages: PageIds, condition: PageState) -> bool:
        """Tell whether every one of these pages is in that condition, and none is named twice."""
        return self._first_fault(pages, condition) is None

    def check(self) -> None:
        """Recount everything from scratch; raises BrokenInvariant where a counter or the free list is wrong."""
        conditions = self._conditions.to_bytes()
        counted = [conditions.count(condition) for condition in (_FREE, _OWNED, _CACHED, _DRAINING)]
        if counted != self._counts:
            raise BrokenInvariant(f"pool {self.name!r}: counted {counted} pages by condition, kept {self._counts}")
        if sorted(self._free) != [page for page, condition in enumerate(conditions) if condition == _FREE]:
            raise BrokenInvariant(f"pool {self.name!r}: its free list is not its free pages, each once")

    def _move(self, pages: PageIds, source: int, target: int) -> None:
        if not self._conditions.change(pages, source, target):
            raise self._refusal(pages, source, target)
        count = len(pages)
        self._counts[source] -= count
        self._counts[target] += count
        if target == _FREE:
            freed = pages[:]
            freed.reverse()
            self._free += freed

    def _first_fault(self, pages: PageIds, source: int) -> str | None:
        seen: set[int] = set()
        conditions = self._conditions.to_bytes()
        for page in pages:
            if not 0 <= page < self.total:
                return f"page {page} is out of range, the pool has {self.total} pages"
            if page in seen:
                return f"page {page} is named twice in one call"
            if conditions[page] != source:
                return f"page {page} is {PageState(conditions[page]).name.lower()}"
            seen.add(page)
        return None

    def _refusal(self, pages: PageIds, source: int, target: int) -> BrokenInvariant:
        change = f"{PageState(source).name.lower()} to {PageState(target).name.lower()}"
        return BrokenInvariant(f"pool {self.name!r}: {self._first_fault(pages, source)}; it cannot go from {change}")
