"""The vote of one rank: a vector of integers of a fixed shape, and what the ranks together make of it.

All ranks reduce their vectors together, under MIN. Every fact is put so that MIN is the right answer to it:

    progress            the smallest of all ranks: as far as everybody has come
    readiness (AND)     1 where it holds, 0 where not
    a failure (OR)      a number below every other, which names the lowest rank that failed
    what must be equal  the number and, beside it, its negative: all are equal where one minimum is the other's negative

A vector is a header and slots. What is in a slot follows from what the core has done and from the leader's frames, both
the same on all ranks, so that no message needs to name what a slot stands for. The number of slots is a power of
two and follows from the same. A ballot keeps numbers; what they mean is its questions'.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from tidekv.states.events import Event

    SlotValues: TypeAlias = "array[int]"

SLOTS_MIN = 256
"""Slots of the smallest vector."""
RANKS_MAX = 255
"""A rank's number fits in a byte of a word."""
NO_RANK = 1 << 30
"""In a word that names a rank: there is none."""


class VoteItem(Protocol):
    """Something that ranks agree on."""

    number: int
    """Counted from the first question on; the answers of one vote are taken in this order."""

    def decide(self, vote_vector: VoteVector, at_s: float) -> list[Event]:
        """The events that follow from what the ranks have said together."""
        ...

    def close(self, vote_vector: VoteVector) -> None:
        """Give the slots back."""
        ...


class VoteVector:
    """The slots of one rank: its own words, and what the last vote made of them."""

    def __init__(self) -> None:
        self.has_news = False
        """Whether a word was changed since the last vote."""
        self._values = array("q", bytes(8 * SLOTS_MIN))
        self._agreed = array("q", bytes(8 * SLOTS_MIN))
        self._owners: list[VoteItem | None] = [None] * SLOTS_MIN
        self._free: list[int] = list(range(SLOTS_MIN))

    def __len__(self) -> int:
        return len(self._values)

    @property
    def taken(self) -> int:
        """Slots in use."""
        return len(self._values) - len(self._free)

    def open(self, item: VoteItem, value: int = 0) -> int:
        """Give a question a slot: the lowest that is free, so that all ranks choose the same one."""
        if not self._free:
            self._grow()
        slot = heapq.heappop(self._free)
        self._owners[slot] = item
        self._values[slot] = value
        self._agreed[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        self._owners[slot] = None
        self._values[slot] = self._agreed[slot] = 0
        heapq.heappush(self._free, slot)

    def set(self, slot: int, value: int) -> None:
        """Change this rank's word; whether it changed is news for the others."""
        if self._values[slot] != value:
            self._values[slot] = value
            self.has_news = True

    def value(self, slot: int) -> int:
        """What this rank says."""
        return self._values[slot]

    def agreed(self, slot: int) -> int:
        """What the ranks said together, at the last vote."""
        return self._agreed[slot]

    def reset(self, slot: int, value: int) -> None:
        """The same slot asks something else from now on."""
        self._values[slot] = value
        self._agreed[slot] = 0
        self.has_news |= value != 0

    def cast(self, count: int) -> SlotValues:
        """This rank's words for a vote of so many slots, which is the leader's count."""
        self.has_news = False
        if len(self._values) == count:
            return self._values[:]
        return array("q", (list(self._values) + [0] * count)[:count])

    def take(self, reduced: Sequence[int]) -> list[VoteItem]:
        """Note what the ranks said together; returns the questions whose answer has changed, oldest first."""
        changed: dict[VoteItem, None] = {}
        # Most words are as they were: numpy finds the others in microseconds, a loop would take half a millisecond.
        values = np.asarray(reduced, dtype=np.int64)
        for slot in np.flatnonzero(values != np.frombuffer(self._agreed, dtype=np.int64)).tolist():
            self._agreed[slot] = int(values[slot])
            owner = self._owners[slot]
            assert owner is not None, "ranks that compared the same have the same questions"
            changed[owner] = None
        return sorted(changed, key=lambda item: item.number)

    def _grow(self) -> None:
        count = len(self._values)
        self._values.extend([0] * count)
        self._agreed.extend([0] * count)
        self._owners += [None] * count
        self._free = list(range(count, 2 * count))


def equality_slots(numbers: Sequence[int]) -> list[int]:
    """Two words for each number, by which ranks see whether theirs are equal."""
    return [value for number in numbers for value in (number, -number)]


def unequal(names: Sequence[str], reduced: Sequence[int]) -> list[str]:
    """The names of the numbers that differ between ranks."""
    return [name for at, name in enumerate(names) if reduced[2 * at] != -reduced[2 * at + 1]]
