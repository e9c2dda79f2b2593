"""Threads for pages divide the processors among them, and stay within what the process was given."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.storage.file.engine import processors_of, worker_threads

ALLOWED = st.lists(st.integers(0, 255), unique=True, min_size=1, max_size=16)


@given(st.integers(1, 8), ALLOWED)
def test_threads_share_no_processor_where_there_are_enough(count: int, allowed: list[int]) -> None:
    parts = [processors_of(number, count, allowed) for number in range(count)]
    assert all(parts)
    assert set().union(*parts) == set(allowed)
    if len(allowed) >= count:
        assert sum(map(len, parts)) == len(allowed)
    else:
        assert all(part == set(allowed) for part in parts)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads to processors")
def test_each_thread_gets_its_part_and_the_caller_keeps_all() -> None:
    before = os.sched_getaffinity(0)
    # Each waits for the others, so that each runs in a thread of its own.
    together = threading.Barrier(2, timeout=30)

    def processors() -> set[int]:
        together.wait()
        return os.sched_getaffinity(0)

    with worker_threads(2, "test") as threads:
        parts = [future.result() for future in [threads.submit(processors) for _ in range(2)]]
    if len(before) > 1:
        assert parts[0].isdisjoint(parts[1])
    assert parts[0] | parts[1] == before
    assert os.sched_getaffinity(0) == before
