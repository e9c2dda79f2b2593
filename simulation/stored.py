"""Content of a simulated storage engine, by tag, with its faults; for the pages of all groups alike."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from simulation.faults import Faults


class StoredTags:
    """Records that are never wrong, but may be lost."""

    def __init__(self, faults: Faults, random: Random) -> None:
        self._faults = faults
        self._random = random
        self._present: dict[int, None] = {}

    def __contains__(self, tag: int) -> bool:
        return tag in self._present

    def leading(self, wanted: Sequence[int]) -> int:
        """Return the number of records before the first missing one."""
        return next((at for at, tag in enumerate(wanted) if tag not in self._present), len(wanted))

    def lose_one(self, wanted: Sequence[int]) -> None:
        """Lose one of the records if that fault strikes."""
        if self._faults.hits("page_is_lost"):
            self._present.pop(self._random.choice(wanted), None)

    def read(self, wanted: Sequence[int]) -> tuple[int, str]:
        """Return the number of records that a read delivers, and its error."""
        valid, error = self.leading(wanted), ""
        if self._faults.hits("fetch_fails"):
            valid, error = self._random.choice((0, valid)), "injected"
        for name in ("fetch_is_short", "fetch_is_corrupt"):
            if valid and self._faults.hits(name):
                valid = self._random.randrange(valid)
        return valid, error

    def put(self, found: Sequence[int]) -> tuple[int, str]:
        """Store a run of records; returns how many were kept, and the error. May evict others."""
        stored, error = len(found), ""
        if self._faults.hits("store_fails"):
            stored, error = 0, "injected"
        elif stored and self._faults.hits("store_is_partial"):
            stored = self._random.randrange(stored)
        self._present.update(dict.fromkeys(found[:stored]))
        while self._present and self._faults.hits("storage_forgets"):
            for tag in self._random.sample(list(self._present), k=1 + len(self._present) // 4):
                del self._present[tag]
        return stored, error
