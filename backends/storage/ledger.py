"""What a server without an order of its own holds, as this process knows it: page keys, those longest unused first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class Ledger:
    """Page keys in the order of their use. Used on the event loop only.

    Nothing goes before `complete` is set: until the pages of former times are listed, the order is not known.
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
        """Enter what was there before, newest first; each goes before all that is known already."""
        for key in keys:
            if key not in self._keys:
                self._keys[key] = None
                self._keys.move_to_end(key, last=False)

    def used(self, keys: Iterable[bytes]) -> None:
        """Enter keys, or move them to the end of those that go."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)

    def gone(self, keys: Iterable[bytes]) -> None:
        """Forget keys."""
        for key in keys:
            self._keys.pop(key, None)

    def take_oldest(self, pages_max: int, *, spare: int) -> list[bytes]:
        """If there are more than `pages_max` keys, forget and return so many that `spare` more would fit.

        Those longest unused come first.
        """
        count = len(self._keys) - pages_max
        if count <= 0 or not self.complete:
            return []
        return [self._keys.popitem(last=False)[0] for _ in range(count + spare)]
