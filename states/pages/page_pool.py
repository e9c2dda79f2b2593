"""The page pool: each page of a pool is in exactly one of four states, and each change of state is checked.

    free ──take──▶ owned ──to_cache──▶ cached
      ▲  ◀─give_back─┤  ◀──own_cached──┤ │
      │            drain           drain_cached
      │              ▼                ▼  │
      ├───settle── draining ◀─────────┘  │
      └──────────────from_cache──────────┘

A *draining* page is one that a writer outside of the core may still write to. Only the confirmation of that writer, or
its proven death, frees it (`settle`).

`LentPool` has the same states for pages that the embedder lends: it names them, and it gets them back all at once.

`PageStates` stores one byte per page and changes many pages at once, all or none. `PagePool` defines the allowed
changes and reports the refused ones. Neither touches the bytes of a page.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from tidekv.states.errors import BrokenInvariant, CapacityError, InvalidConfig
from tidekv.states.types import NO_PAGES, PageIds, page_ids, without

if TYPE_CHECKING:
    from collections.abc import Callable

# Created once: numpy would look up the type by name on every call.
_UNSIGNED, _INDEX = np.dtype(np.uint32), np.dtype(np.intp)

# Up to this number of pages, a loop over bytes is faster than numpy, which costs some microseconds per call.
_LOOP_PAGES_MAX = 24


class PageStates:
    """The states of the pages of one pool, as numbers from 0 to 255, initially 0.

    Small changes use a loop, large ones numpy, whichever is faster.
    """

    __slots__ = ("_bytes", "_place_bytes", "_places", "_seen_at", "_vector")

    def __init__(self, page_count: int) -> None:
        # Two views of the same bytes: a bytearray for loops, a vector for numpy.
        self._bytes = bytearray(page_count)
        self._vector = np.frombuffer(self._bytes, dtype=np.uint8)
        # To find a page that is named twice: scratch space, and the numbers 0, 1, 2, …
        self._seen_at = np.zeros(page_count, dtype=np.int32)
        self._places = np.arange(page_count, dtype=np.int32)
        self._place_bytes = self._places.tobytes()

    def of(self, page: int) -> int:
        """Return the state of a page of the pool."""
        return self._bytes[page]

    def change(self, pages: PageIds, source: int, target: int) -> bool:
        """Move pages from state `source` to `target`, a different one.

        Returns False, with nothing changed, if a page is not in `source`, is out of range, or is named twice.
        """
        if len(pages) <= _LOOP_PAGES_MAX:
            return self._change_by_loop(pages, source, target)
        ids = _as_index(pages)
        if not self._are(ids, source):
            return False
        self._vector[ids] = target
        return True

    def are(self, pages: PageIds, state: int) -> bool:
        """Whether all pages are in this state, none out of range and none named twice."""
        return not pages or self._are(_as_index(pages), state)

    def put(self, pages: PageIds, target: int) -> None:
        """Set pages that are known to be in range to state `target`."""
        if len(pages) <= _LOOP_PAGES_MAX:
            conditions = self._bytes
            for page in pages:
                conditions[page] = target
        else:
            self._vector[_as_index(pages)] = target

    def to_bytes(self) -> bytes:
        """Return the states of all pages, one byte per page."""
        return bytes(self._bytes)

    def _change_by_loop(self, pages: PageIds, source: int, target: int) -> bool:
        conditions = self._bytes
        total = len(conditions)
        for changed, page in enumerate(pages):
            # Finds a page named twice as well: at its second mention it is no longer in `source`.
            if page < 0 or page >= total or conditions[page] != source:
                for done in pages[:changed]:
                    conditions[done] = source
                return False
            conditions[page] = target
        return True

    def _are(self, ids: np.ndarray[tuple[int], np.dtype[np.intp]], state: int) -> bool:
        try:
            conditions = self._vector[ids].tobytes()
        except IndexError:
            return False
        # `bytes.count` is several times faster than a numpy comparison and its reduction.
        return conditions.count(state) == len(ids) and not self._repeats(ids)

    def _repeats(self, ids: np.ndarray[tuple[int], np.dtype[np.intp]]) -> bool:
        if len(ids) > len(self._bytes):
            return True
        # Write each page's position to its slot. Of two positions of one page only the last one remains, so reading
        # the slots back returns 0, 1, 2, … exactly if no page is repeated.
        self._seen_at[ids] = self._places[: len(ids)]
        return not self._place_bytes.startswith(self._seen_at[ids].tobytes())


def _as_index(pages: PageIds) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Convert page ids to the type that numpy indexes fastest.

    By way of unsigned numbers, so that negative ids are out of range instead of counting from the end.
    """
    return np.frombuffer(pages, _UNSIGNED).astype(_INDEX)


class PageState(enum.IntEnum):
    """The state of a page, which says what may write to it. The four counts of a pool add up to its size."""

    FREE = 0
    """Without an owner: the next request may take it."""
    OWNED = 1
    """One request's, or one load's, which may write to it."""
    CACHED = 2
    """The prefix index's: read by any number of requests, written by none."""
    DRAINING = 3
    """Left by its owner while a writer in another process may still write to it."""


# Plain ints: an enum member costs a lookup and a slower comparison per page.
_FREE, _OWNED, _CACHED, _DRAINING = (int(condition) for condition in PageState)


class PagePool:
    """One pool of `page_count` pages, all of them free initially.

    Every method that takes pages raises BrokenInvariant and changes nothing if a page is not in the state that the
    change starts from, is out of range, or is named twice. Counters cost O(1), changes O(pages named).
    """

    __slots__ = ("_conditions", "_counts", "_free", "name", "total")

    def __init__(self, name: str, page_count: int) -> None:
        if page_count < 0:
            raise InvalidConfig(f"pool {name!r} cannot have {page_count} pages")
        self.name = name
        self.total = page_count
        self._conditions = PageStates(page_count)
        self._counts = [page_count, 0, 0, 0]
        # A stack with its top at the end: a new pool hands out 0, 1, 2, …
        self._free: PageIds = page_ids(range(page_count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of pages that can be taken."""
        return self._counts[_FREE]

    @property
    def owned(self) -> int:
        """Number of pages that belong to requests and operations."""
        return self._counts[_OWNED]

    @property
    def cached(self) -> int:
        """Number of pages that belong to the prefix index."""
        return self._counts[_CACHED]

    @property
    def draining(self) -> int:
        """Number of pages that a writer outside of the core may still write to."""
        return self._counts[_DRAINING]

    @property
    def counts(self) -> list[int]:
        """Number of pages by state, in the order of PageState. A live list: read it at once, do not change it."""
        return self._counts

    @property
    def free_pages(self) -> PageIds:
        """The free pages; the last one is taken first. A live array: read it at once, do not change it."""
        return self._free

    def condition(self, page: int) -> PageState:
        """Return the state of one page."""
        if not 0 <= page < self.total:
            raise BrokenInvariant(f"pool {self.name!r}: page {page} is out of range, it has {self.total} pages")
        return PageState(self._conditions.of(page))

    def take(self, count: int) -> PageIds:
        """Take `count` free pages, which the caller owns from now on.

        Raises CapacityError, with nothing changed, if fewer are free. Pages given back last are taken first, a batch in
        its own order. Batches stay contiguous that way, and a page freed too early is soon written by another owner,
        which tests detect.
        """
        free = self._free
        if count > len(free):
            raise CapacityError(
                f"pool {self.name!r}: {count} pages requested, {self.free} free ({self.owned} owned,"
                f" {self.cached} cached, {self.draining} draining, {self.total} in total)"
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

    def take_named(self, pages: PageIds) -> None:
        """Take these free pages, which the caller owns from now on. O(pool)."""
        self._move(pages, _FREE, _OWNED)
        self._free = without(self._free, pages)

    def give_back(self, pages: PageIds) -> None:
        """Free owned pages."""
        self._move(pages, _OWNED, _FREE)

    def to_cache(self, pages: PageIds) -> None:
        """Move owned pages to the prefix index."""
        self._move(pages, _OWNED, _CACHED)

    def from_cache(self, pages: PageIds) -> None:
        """Free cached pages that the prefix index has dropped."""
        self._move(pages, _CACHED, _FREE)

    def own_cached(self, pages: PageIds) -> None:
        """Move cached pages from the prefix index to the caller."""
        self._move(pages, _CACHED, _OWNED)

    def drain(self, pages: PageIds) -> None:
        """Move owned pages to the quarantine: a writer may still write to them."""
        self._move(pages, _OWNED, _DRAINING)

    def drain_cached(self, pages: PageIds) -> None:
        """Move cached pages to the quarantine: a writer may still write to them."""
        self._move(pages, _CACHED, _DRAINING)

    def settle(self, pages: PageIds) -> None:
        """Free pages of the quarantine that have no writer any more."""
        self._move(pages, _DRAINING, _FREE)

    def holds(self, pages: PageIds, condition: PageState) -> bool:
        """Whether all of these pages are in state `condition`, and none is named twice."""
        return self._conditions.are(pages, condition)

    def check(self) -> None:
        """Recount everything from scratch; raise BrokenInvariant if a counter or the free list is wrong."""
        conditions = self._conditions.to_bytes()
        counted = [conditions.count(condition) for condition in (_FREE, _OWNED, _CACHED, _DRAINING)]
        if counted != self._counts:
            raise BrokenInvariant(f"pool {self.name!r}: recounted {counted} pages by state, counters {self._counts}")
        self._check_free(conditions)

    def _check_free(self, conditions: bytes) -> None:
        if sorted(self._free) != [page for page, condition in enumerate(conditions) if condition == _FREE]:
            raise BrokenInvariant(f"pool {self.name!r}: the free list does not hold each free page once")

    def _move(self, pages: PageIds, source: int, target: int) -> None:
        if not pages:
            return
        if not self._conditions.change(pages, source, target):
            raise self._refusal(pages, source, target)
        count = len(pages)
        self._counts[source] -= count
        self._counts[target] += count
        if target == _FREE:
            self._list_free(pages)

    def _list_free(self, pages: PageIds) -> None:
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


class LentPool(PagePool):
    """A pool of pages that belong to the embedder, which lends them to one request at a time.

        free: the embedder's ──lend──▶ owned: lent ──drain──▶ draining
                             ◀return_lent┤  ◀───────settle──────┘

    A part of the core that gives pages back, or settles them, leaves them lent: the embedder gets all pages of a
    request at once, when none of them has a writer any more. No page is ever cached, and none is taken without a name.
    """

    __slots__ = ("on_settle",)

    def __init__(self, name: str, page_count: int) -> None:
        super().__init__(name, page_count)
        self._free = page_ids()
        self.on_settle: Callable[[PageIds], None] = lambda pages: None
        """Called with pages that were settled. Raises nothing."""

    def lend(self, pages: PageIds) -> None:
        """Take over pages of the embedder."""
        self._move(pages, _FREE, _OWNED)

    def return_lent(self, pages: PageIds) -> None:
        """Return lent pages without a writer to the embedder."""
        self._move(pages, _OWNED, _FREE)

    def has_writers(self, pages: PageIds) -> bool:
        """Whether one of these lent pages is draining."""
        return bool(self._counts[_DRAINING]) and not self.holds(pages, PageState.OWNED)

    def give_back(self, pages: PageIds) -> None:
        """Check that the pages are lent. They stay so."""
        if not self.holds(pages, PageState.OWNED):
            raise self._refusal(pages, _OWNED, _FREE)

    def settle(self, pages: PageIds) -> None:
        """Note that pages of the quarantine have no writer any more. They stay lent."""
        self._move(pages, _DRAINING, _OWNED)
        self.on_settle(pages)

    def _list_free(self, pages: PageIds) -> None:
        """List nothing: pages are lent by their names."""

    def _check_free(self, conditions: bytes) -> None:
        if self._free:
            raise BrokenInvariant(f"pool {self.name!r}: a pool of lent pages lists {len(self._free)} pages to take")
