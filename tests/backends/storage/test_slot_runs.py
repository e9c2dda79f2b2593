"""Runs of neighboring slots: what is moved by one call and changed by one statement."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.storage.file.segments import SLOTS_PER_SEGMENT_MAX, segment_of, slot_of, slot_runs

# Few places, so that neighbors are common, and the last one of a segment that is as long as can be.
SLOTS = st.lists(
    st.builds(slot_of, st.integers(1, 3), st.sampled_from([0, 1, 2, 3, SLOTS_PER_SEGMENT_MAX - 1])), max_size=12
)


@given(SLOTS)
def test_runs_are_the_longest_stretches_of_neighbors_in_one_segment(slots: list[int]) -> None:
    runs = slot_runs(slots)
    assert [slot for run in runs for slot in slots[run.first : run.first + run.count]] == slots
    assert [run.first for run in runs] == [sum(run.count for run in runs[:at]) for at in range(len(runs))]
    for run in runs:
        found = slots[run.first : run.first + run.count]
        assert found == list(range(found[0], found[0] + run.count))
        assert len({segment_of(slot) for slot in found}) == 1
    for run in runs[1:]:
        left, right = slots[run.first - 1], slots[run.first]
        assert right != left + 1 or segment_of(left) != segment_of(right)
