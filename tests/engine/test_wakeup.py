"""The bell: whatever is put before it rings is found by who waits for it, in any order of the two."""

from __future__ import annotations

import threading
from collections import deque

from tidekv.engine.poller import Bell


def test_a_ring_before_the_wait_is_kept_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    bell.wait()
    bell.wait(0)
    bell.ring()
    bell.wait()


def test_nothing_that_was_put_before_a_ring_is_missed() -> None:
    bell, put = Bell(), deque[int]()
    taken: list[int] = []

    def take() -> None:
        while len(taken) < 20_000:
            if not put:
                bell.wait()
            while put:
                taken.append(put.popleft())

    thread = threading.Thread(target=take)
    thread.start()
    for number in range(20_000):
        put.append(number)
        bell.ring()
    thread.join()
    assert taken == list(range(20_000))
