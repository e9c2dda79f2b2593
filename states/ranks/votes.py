"""The vote vector of one rank: integers in slots, which all ranks reduce together under MIN.

Every fact is encoded so that MIN gives the right result:

    progress            the smallest of all ranks: as far as every rank has come
    readiness (AND)     1 if it holds, 0 if not
    a failure (OR)      a number below every other value, which names the lowest rank that failed
    equality            the number in one slot and its negative in another: the ranks agree if the two minima are
                        negatives of each other

A vector is a header and slots. What a slot stands for follows from the commands of the core and from the leader's
frames, which are the same on all ranks, so no message has to name it. The number of slots is a power of two and follows
from the same. The vector only keeps numbers; the vote items that own the slots give them their meaning.
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
"""Maximum number of ranks: a rank's number takes one byte of a slot value."""
NO_RANK = 1 << 30
"""In a slot that names a rank: no rank."""


class VoteItem(Protocol):
    """Something that the ranks agree on, with slots of its own."""

    number: int
    """Sequence number of the item; the items decided by one vote are handled in this order."""

    def decide(self, vote_vector: VoteVector, at_s: float) -> list[Event]:
        """The events that follow from the reduced values of the item's slots."""
        ...

    def close(self, vote_vector: VoteVector) -> None:
        """Give the slots back."""
        ...


class VoteVector:
    """Slots of one rank: its own values, and the values that the last vote agreed on."""

    def __init__(self) -> None:
        self.has_news = False
        """Whether a value has changed since the last vote."""
        self._values = array("q", bytes(8 * SLOTS_MIN))
        self._agreed = array("q", bytes(8 * SLOTS_MIN))
        self._owners: list[VoteItem | None] = [None] * SLOTS_MIN
        self._free: list[int] = list(range(SLOTS_MIN))

    def __len__(self) -> int:
        return len(self._values)

    @property
    def taken(self) -> int:
        """Number of slots in use."""
        return len(self._values) - len(self._free)

    def open(self, item: VoteItem, value: int = 0) -> int:
        """Assign a slot to an item: the lowest free one, so that all ranks choose the same."""
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
        """Change this rank's value. A different value is news for the other ranks."""
        if self._values[slot] != value:
            self._values[slot] = value
            self.has_news = True

    def value(self, slot: int) -> int:
        """This rank's value."""
        return self._values[slot]

    def agreed(self, slot: int) -> int:
        """The minimum over all ranks at the last vote."""
        return self._agreed[slot]

    def reset(self, slot: int, value: int) -> None:
        """Start a new vote of the item in the same slot: `value` is this rank's first value."""
        self._values[slot] = value
        self._agreed[slot] = 0
        self.has_news |= value != 0

    def cast(self, count: int) -> SlotValues:
        """This rank's values for a vote of `count` slots, which is the leader's number of slots."""
        self.has_news = False
        if len(self._values) == count:
            return self._values[:]
        return array("q", (list(self._values) + [0] * count)[:count])

    def take(self, reduced: Sequence[int]) -> list[VoteItem]:
        """Store the reduced values. Returns the items of which a value has changed, oldest first."""
        changed: dict[VoteItem, None] = {}
        # Most values are unchanged: numpy finds the others in microseconds, a Python loop needs half a millisecond.
        values = np.asarray(reduced, dtype=np.int64)
        for slot in np.flatnonzero(values != np.frombuffer(self._agreed, dtype=np.int64)).tolist():
            self._agreed[slot] = int(values[slot])
            owner = self._owners[slot]
            assert owner is not None, "ranks that compared equal have the same vote items"
            changed[owner] = None
        return sorted(changed, key=lambda item: item.number)

    def _grow(self) -> None:
        count = len(self._values)
        self._values.extend([0] * count)
        self._agreed.extend([0] * count)
        self._owners += [None] * count
        self._free = list(range(count, 2 * count))


def equality_slots(numbers: Sequence[int]) -> list[int]:
    """Two slots per number, whose minima show whether the number is equal on all ranks."""
    return [value for number in numbers for value in (number, -number)]


def unequal(names: Sequence[str], reduced: Sequence[int]) -> list[str]:
    """The names of the numbers that differ between ranks."""
    return [name for at, name in enumerate(names) if reduced[2 * at] != -reduced[2 * at + 1]]
