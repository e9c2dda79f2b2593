"""Which free slots a batch gets: neighbors, in order, and large batches from two files."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.inside import file_store_of
from tests.support.instructions import instructions_of
from tidekv.backends.storage.file.segments import segment_of, slot_of
from tidekv.backends.storage.file.slot_cache import SlotCache

# The rig of conftest.py, which test modules cannot import.
Rig = Any

SEGMENT_SLOTS = 8


def mirror_of(segments: int, taken: set[int]) -> SlotCache:
    """Return a mirror with so many segments in which some slots are reserved by another owner."""
    mirror = SlotCache()
    for segment in range(1, segments + 1):
        mirror.add_segment(segment, SEGMENT_SLOTS)
    mirror.reserve(taken, 7)
    return mirror


@given(
    st.integers(1, 4),
    st.sets(st.builds(slot_of, st.integers(1, 4), st.integers(0, SEGMENT_SLOTS - 1))),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=6),
    st.data(),
)
def test_every_free_slot_is_taken_once_and_no_other(
    segments: int, taken: set[int], asked: list[tuple[int, int]], data: st.DataObject
) -> None:
    taken = {slot for slot in taken if segment_of(slot) <= segments}
    mirror = mirror_of(segments, taken)
    free = {slot_of(segment, at) for segment in range(1, segments + 1) for at in range(SEGMENT_SLOTS)} - taken
    for count, run_min in asked:
        slots = mirror.take_free(count, run_min=run_min)
        assert slots == sorted(set(slots)), "in order, each once"
        assert set(slots) <= free
        assert len(slots) == min(count, len(free))
        mirror.reserve(slots, 1)
        free -= set(slots)
        if slots and data.draw(st.booleans()):
            # Given back, or taken by another process before their turn.
            back = data.draw(st.sets(st.sampled_from(slots)))
            mirror.free(back)
            free |= back
        if free and data.draw(st.booleans()):
            others = data.draw(st.sets(st.sampled_from(sorted(free))))
            mirror.reserve(others, 7)
            free -= others


def test_halves_of_a_large_batch_come_from_two_segments() -> None:
    mirror = mirror_of(3, set())
    first = mirror.take_free(8, run_min=4)
    assert first == [*range(slot_of(1, 0), slot_of(1, 4)), *range(slot_of(2, 0), slot_of(2, 4))]
    mirror.reserve(first, 1)
    # Where segments do not have half of it free, more than two serve.
    assert [segment_of(slot) for slot in mirror.take_free(16, run_min=4)] == [1] * 4 + [2] * 4 + [3] * 8


def test_a_small_batch_stays_in_one_segment() -> None:
    mirror = mirror_of(2, set())
    assert mirror.take_free(4, run_min=4) == list(range(slot_of(1, 0), slot_of(1, 4)))
    assert mirror.take_free(3, run_min=4) == list(range(slot_of(1, 4), slot_of(1, 7)))


async def test_slots_of_a_crashed_writer_are_used_again_before_anything_is_evicted(files: Rig) -> None:
    async def room_in(engine: Any) -> int:
        """Return how many pages are stored before the first is evicted."""
        for number in range(1000):
            assert await files.put(engine, [number]) == [True]
            if engine.statistics().evictions:
                return number
        raise AssertionError("nothing was evicted")

    options = {"capacity": 120 * 4096, "low_water": 1.0}
    alone = await files.open(**options)
    room = await room_in(alone)
    await alone.close()
    files.root = files.root.with_name("other")
    engine, crashed = await files.open(**options), await files.open(**options)
    directory = file_store_of(crashed)._place
    assert len(directory.index.reserve(6)) == 6
    # Its process is gone: the kernel has dropped the lock, and nothing was given back.
    os.close(directory._writer._file)
    directory._writer._file = os.open(os.devnull, os.O_RDONLY)
    assert await room_in(engine) == room


def test_rows_of_a_large_directory_are_loaded_in_few_steps_each() -> None:
    states = {index: (index % 3, 7 if index % 3 == 1 else 0) for index in range(1000)}
    rows = [(slot_of(1 + index % 2, index), *states[index], bytes([index % 256]) * 32) for index in range(1000)]
    rows.append((slot_of(9, 0), 2, 0, bytes(32)))
    loaded, applied = SlotCache(), SlotCache()
    for mirror in (loaded, applied):
        for segment in (1, 2):
            mirror.add_segment(segment, 1000)
    assert instructions_of(lambda: loaded.load(rows)) < 40 * len(rows)
    for row in rows:
        applied.apply(*row)
    assert vars(loaded) == vars(applied)
