"""Pages on a server that keeps no order of use, in the order in which this process used them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tidekv.backends.storage.base import KEY_BYTES
from tidekv.backends.storage.remote import BAD_PAGE, ServerFailed
from tidekv.backends.storage.stats import StorageCounters

EVICT_PART: Final = 64
"""When room is needed, this part of all pages goes at once."""


class KeyLRU:
    """Page keys, least recently used first. Used on the event loop only.

    Nothing is taken before `complete` is set: until the existing pages are listed, the order is unknown.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.complete = False

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def found_old(self, keys: Iterable[bytes]) -> None:
        """Enter pages that existed before, newest first; each goes before everything known already."""
        for key in keys:
            if key not in self._keys:
                self._keys[key] = None
                self._keys.move_to_end(key, last=False)

    def used(self, keys: Sequence[bytes]) -> None:
        """Enter keys, or move them to the most recently used end: the first of them is the most recent one."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)

    def gone(self, keys: Iterable[bytes]) -> None:
        """Remove keys."""
        for key in keys:
            self._keys.pop(key, None)

    def take_oldest(self, pages_max: int, *, spare: int) -> list[bytes]:
        """If there are more than `pages_max` keys, remove and return enough that `spare` more would fit.

        The least recently used come first.
        """
        count = len(self._keys) - pages_max
        if count <= 0 or not self.complete:
            return []
        return [self._keys.popitem(last=False)[0] for _ in range(count + spare)]


class LruPages(ABC):
    """Part of a `PageService` for a server that keeps no order of use: what is evicted, and when."""

    def __init__(self, *, delete_max: int) -> None:
        """`delete_max`: maximum pages of one request to remove pages."""
        self._key_lru = KeyLRU()
        self._delete_max = delete_max
        self._pages_max = 0
        self._counts = StorageCounters()
        self.last_error = ""

    @property
    def pages(self) -> int:
        """Number of pages that this process knows."""
        return len(self._key_lru)

    async def used(self, keys: Sequence[bytes]) -> None:
        """Move pages to the end of the order that is evicted last, and remove those beyond the capacity."""
        self._key_lru.used(keys)
        oldest = self._key_lru.take_oldest(self._pages_max, spare=self._pages_max // EVICT_PART)
        if await self._remove(oldest):
            self._counts.evictions += len(oldest)
        else:
            self._key_lru.found_old(reversed(oldest))

    @abstractmethod
    async def _delete(self, keys: Sequence[bytes]) -> None:
        """Remove pages by one request. Raises ServerFailed."""

    async def _note_reads(self, keys: Sequence[bytes], causes: Sequence[str]) -> None:
        """Forget the pages that were missing, and remove those that cannot be read."""
        self._key_lru.gone(key for key, cause in zip(keys, causes, strict=True) if cause == "missing")
        await self._remove([key for key, cause in zip(keys, causes, strict=True) if cause in BAD_PAGE])

    async def _remove(self, keys: Sequence[bytes]) -> bool:
        """Remove pages; True if the server did so."""
        try:
            for first in range(0, len(keys), self._delete_max):
                part = keys[first : first + self._delete_max]
                await self._delete(part)
                self._key_lru.gone(part)
        except ServerFailed as error:
            self.last_error = str(error)
            self._counts.failures["delete"] += 1
            return False
        return True


def key_at_end(name: str) -> bytes:
    """Return the page key at the end of an object's name, empty bytes if there is none."""
    try:
        key = bytes.fromhex(name.rpartition("/")[2])
    except ValueError:
        return b""
    return key if len(key) == KEY_BYTES else b""
