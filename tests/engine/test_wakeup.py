"""The wake-up: whatever is put before its signal is found by the waiting thread, in any order of the two."""

from __future__ import annotations

import threading
from collections import deque

from tidekv.engine.poller import Wakeup


def test_a_signal_before_the_wait_is_kept_once() -> None:
    wakeup = Wakeup()
    wakeup.signal()
    wakeup.signal()
    wakeup.wait()
    wakeup.wait(0)
    wakeup.signal()
    wakeup.wait()


def test_nothing_that_was_put_before_a_signal_is_missed() -> None:
    wakeup, put = Wakeup(), deque[int]()
    taken: list[int] = []

    def take() -> None:
        while len(taken) < 20_000:
            if not put:
                wakeup.wait()
            while put:
                taken.append(put.popleft())

    thread = threading.Thread(target=take)
    thread.start()
    for number in range(20_000):
        put.append(number)
        wakeup.signal()
    thread.join()
    assert taken == list(range(20_000))
