"""In-memory copy of the shared index for one process and namespace, kept up to date by changes.

Existence is answered here, at the price of a dict look-up. A copy that is behind costs a miss, or a read that fails its
check; never a wrong page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

from tidekv.backends.storage.file.segments import INDEX_BITS, segment_of, slot_of


class SlotState(IntEnum):
    """State of a slot in the index. A slot without a row is free."""

    FREE = 0
    WRITING = 1
    PUBLISHED = 2


_WRITING, _PUBLISHED = int(SlotState.WRITING), int(SlotState.PUBLISHED)


class SlotCache:
    """Slots of one namespace. Written by the index's thread only; `slot_by_key` may be read from any thread."""

    def __init__(self) -> None:
        self.slot_by_key: dict[bytes, int] = {}
        self._key_by_slot: dict[int, bytes] = {}
        self._owner_by_slot: dict[int, int] = {}
        self._free: set[int] = set()
        # Slots to take next, by segment, lowest last; other processes may take some meanwhile. When all are used up,
        # the lists are rebuilt from the slots that are free by then, sorted, so that a batch gets neighbors.
        self._next: dict[int, list[int]] = {}
        self.slots_by_segment: dict[int, int] = {}
        # Segments that are gone for good; users of their files close them. Emptied by the event loop.
        self.dropped: deque[int] = deque()
        # Segments that are gone if the change that drops them is written.
        self._dropping: list[int] = []

    @property
    def slot_count(self) -> int:
        """All slots of all segments."""
        return sum(self.slots_by_segment.values())

    @property
    def free_count(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def owner(self, slot: int) -> int:
        """Return the writer that has a slot reserved; 0 for none."""
        return self._owner_by_slot.get(slot, 0)

    def forget_all(self) -> None:
        """Clear everything, before it is read again in full."""
        self.slot_by_key.clear()
        self._key_by_slot.clear()
        self._owner_by_slot.clear()
        self._free.clear()
        self._next.clear()
        self.slots_by_segment.clear()

    def settle(self, *, written: bool) -> None:
        """Record whether the changes since the last call were written to the index."""
        if written:
            self.dropped.extend(self._dropping)
        self._dropping.clear()

    def add_segment(self, segment: int, slots: int) -> None:
        """Add a segment whose slots are all free."""
        if segment in self.slots_by_segment:
            return
        self.slots_by_segment[segment] = slots
        first = slot_of(segment, 0)
        self._free.update(range(first, first + slots))

    def drop_segment(self, segment: int) -> int:
        """Remove a segment and everything in it; returns how many pages were published there."""
        slots = self.slots_by_segment.pop(segment, 0)
        dropped = 0
        if not slots:
            return dropped
        for index in range(slots):
            slot = slot_of(segment, index)
            dropped += slot in self._key_by_slot
            self._clear(slot)
            self._free.discard(slot)
        self._dropping.append(segment)
        return dropped

    def apply(self, slot: int, state: int, owner: int, key: bytes | None) -> None:
        """Apply the index's row of a slot."""
        if segment_of(slot) not in self.slots_by_segment:
            return
        self._clear(slot)
        if state == SlotState.FREE:
            self._free.add(slot)
            return
        self._free.discard(slot)
        if state == SlotState.WRITING:
            self._owner_by_slot[slot] = owner
        else:
            assert key is not None, "a published slot has a key"
            self._key_by_slot[slot] = key
            self.slot_by_key[key] = slot

    def load(self, rows: Sequence[tuple[int, int, int, bytes]]) -> None:
        """Apply rows of slots of which nothing was read before, as `apply` does, in a tenth of its steps."""
        known = [row for row in rows if row[0] >> INDEX_BITS in self.slots_by_segment]
        keys = {row[0]: row[3] for row in known if row[1] == _PUBLISHED}
        owners = {row[0]: row[2] for row in known if row[1] == _WRITING}
        self._free.difference_update(keys, owners)
        self._owner_by_slot.update(owners)
        self._key_by_slot.update(keys)
        self.slot_by_key.update(zip(keys.values(), keys, strict=True))

    def reserve(self, slots: Collection[int], owner: int) -> None:
        """Mark free slots as reserved by a writer."""
        self._free.difference_update(slots)
        self._owner_by_slot.update(dict.fromkeys(slots, owner))

    def free(self, slots: Collection[int]) -> None:
        """Mark slots as free, whatever was in them; slots of segments that are gone are ignored."""
        known = [slot for slot in slots if segment_of(slot) in self.slots_by_segment]
        for slot in known:
            self._clear(slot)
        self._free.update(known)

    def keyed(self, slots: Collection[int]) -> list[int]:
        """Return those slots in which a page is published, in order."""
        return sorted(self._key_by_slot.keys() & slots)

    def publish(self, key_by_slot: Mapping[int, bytes]) -> None:
        """Mark reserved slots as published, under keys that no other slot has."""
        for slot in key_by_slot:
            del self._owner_by_slot[slot]
        self._key_by_slot.update(key_by_slot)
        self.slot_by_key.update(zip(key_by_slot.values(), key_by_slot.keys(), strict=True))

    def take_free(self, count: int, *, run_min: int) -> list[int]:
        """Choose up to `count` free slots, in order. The caller sets them to another state at once.

        They are neighbors if possible. The first half and the second half of `2 * run_min` or more are in different
        segments if possible, since the file system lets one thread at a time write to a file.
        """
        share = max(-(-count // 2), run_min)
        chosen: list[int] = []
        while len(chosen) < count:
            if not self._next:
                for slot in sorted(self._free.difference(chosen), reverse=True):
                    self._next.setdefault(segment_of(slot), []).append(slot)
                if not self._next:
                    break
            for segment in sorted(self._next):
                slots = self._next[segment]
                wanted = min(share, count - len(chosen))
                chosen += [slot for slot in slots[-wanted:] if slot in self._free]
                del slots[-wanted:]
                if not slots:
                    del self._next[segment]
                if len(chosen) == count:
                    break
        return sorted(chosen)

    def _clear(self, slot: int) -> None:
        self._owner_by_slot.pop(slot, None)
        key = self._key_by_slot.pop(slot, None)
        if key is not None and self.slot_by_key.get(key) == slot:
            del self.slot_by_key[key]
