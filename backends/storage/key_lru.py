"""Page keys on a server that keeps no order of use, in the order in which this process used them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


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
