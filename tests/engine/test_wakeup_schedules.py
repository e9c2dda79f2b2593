"""Every order in which two threads can take their steps: what is put before a signal is never left behind a sleeper.

The code that runs is the real one: the wake-up, and how the polling thread takes what is new. Its lock and its queue
are stand-ins that stop before each of their calls, each of which is one step under the interpreter's lock, until it is
that worker's turn. All orders are gone through, depth first: each run repeats a prefix and continues with a runnable
worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import pytest
from greenlet import getcurrent, greenlet

from tidekv.engine.poller import PollerThread, Wakeup, _Flight

if TYPE_CHECKING:
    import threading

RUNS_MAX = 20_000
TIMEOUTS_MAX = 2
"""A sleeper could time out for ever; behind so many it waits as one that has no timeout."""

RINGER, SLEEPER = 0, 1


class Schedule:
    """Two workers of which one runs at a time, in a given order; records which could have run instead.

    They are greenlets: a switch is a call, so the machine's own scheduler and locks have no part in it.
    """

    def __init__(self, order: list[int]) -> None:
        self.order = order
        self.choices: list[list[int]] = []
        self.is_stuck = False
        self._who = RINGER
        self._scheduler = getcurrent()
        self._can_run: list[Callable[[], bool]] = [lambda: True, lambda: True]

    def step(self, can_run: Callable[[], bool] = lambda: True) -> None:
        """Called by a worker before each step: returns at its turn, which comes only while it can run."""
        self._can_run[self._who] = can_run
        self._scheduler.switch()

    def run(self, *works: Callable[[], None]) -> None:
        """Run both to their end, or until neither can go on."""
        workers = [greenlet(work) for work in works]
        while live := [who for who in (RINGER, SLEEPER) if not workers[who].dead]:
            able = [who for who in live if self._can_run[who]()]
            if not able:
                self.is_stuck = True
                for who in live:
                    workers[who].throw()
                return
            at = len(self.choices)
            self.choices.append(able)
            if at == len(self.order):
                self.order.append(able[0])
            self._who = self.order[at]
            workers[self._who].switch()


class StepLock:
    """A lock that is taken from the beginning, as the wake-up's."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._timeouts = TIMEOUTS_MAX
        self.is_locked = True

    def locked(self) -> bool:
        self._schedule.step()
        return self.is_locked

    def release(self) -> None:
        self._schedule.step()
        if not self.is_locked:
            raise RuntimeError("release unlocked lock")
        self.is_locked = False

    def acquire(self, *, timeout: float) -> bool:
        """Its turn comes when the lock is free; with a timeout also before, when the time is over."""
        may_end = timeout >= 0 and self._timeouts > 0
        self._schedule.step(lambda: may_end or not self.is_locked)
        was_free, self.is_locked = not self.is_locked, True
        self._timeouts -= not was_free
        return was_free


class StepQueue(deque[Any]):
    """A queue on which every call is a step."""

    schedule: Schedule

    def append(self, item: Any) -> None:
        self.schedule.step()
        super().append(item)

    def popleft(self) -> Any:
        self.schedule.step()
        return super().popleft()

    def __bool__(self) -> bool:
        self.schedule.step()
        return len(self) > 0


class Nothing:
    """An operation that is over as soon as it is posted."""

    rounds = 0

    def post(self) -> bool:
        return True


def one_run(
    order: list[int], *, items: int, pause_s: float, ring: Callable[[Wakeup, Callable[[], None]], None]
) -> Schedule:
    """The loop's side submits so many, the polling side takes them, in this order and however it goes on."""
    schedule = Schedule(order)
    poller = PollerThread()
    queue = poller._new = StepQueue()
    queue.schedule = schedule
    poller._wakeup._silence = cast("threading.Lock", StepLock(schedule))

    def submit() -> None:
        for _ in range(items):
            flight = _Flight(cast("Any", Nothing()), cast("Any", None), 0)
            ring(poller._wakeup, lambda flight=flight: queue.append(flight))  # type: ignore[misc]  # A default to bind it.

    def take() -> None:
        while poller._posted < items:
            poller._take(pause_s)

    schedule.run(submit, take)
    return schedule


def put_and_ring(wakeup: Wakeup, put: Callable[[], None]) -> None:
    """As `PollerThread.submit` does."""
    put()
    wakeup.signal()


def ring_and_put(wakeup: Wakeup, put: Callable[[], None]) -> None:
    """What would lose one."""
    wakeup.signal()
    put()


def all_runs(
    *, items: int, pause_s: float, ring: Callable[[Wakeup, Callable[[], None]], None] = put_and_ring
) -> tuple[int, int]:
    """Go through every order; how many there are, and in how many neither could go on."""
    order: list[int] = []
    runs = stuck = 0
    while True:
        schedule = one_run(order, items=items, pause_s=pause_s, ring=ring)
        runs += 1
        stuck += schedule.is_stuck
        assert runs < RUNS_MAX, "there are more orders than were meant to be gone through"
        # The last place where the other worker could have run and has not done so yet.
        order, choices = schedule.order, schedule.choices
        while order and (len(choices[len(order) - 1]) < 2 or order[-1] == SLEEPER):
            order.pop()
        if not order:
            return runs, stuck
        order[-1] = SLEEPER


def test_a_sleeper_without_a_timeout_finds_all_in_every_order() -> None:
    runs, stuck = all_runs(items=1, pause_s=math.inf)
    assert runs > 50
    assert stuck == 0


@pytest.mark.slow
def test_a_sleeper_without_a_timeout_finds_all_of_two_in_every_order() -> None:
    runs, stuck = all_runs(items=2, pause_s=math.inf)
    assert runs > 3000
    assert stuck == 0


def test_a_signal_before_what_it_is_for_would_be_found_out() -> None:
    _, stuck = all_runs(items=1, pause_s=math.inf, ring=ring_and_put)
    assert stuck > 0


def test_a_sleeper_whose_time_may_run_out_at_any_step_finds_all_in_every_order() -> None:
    runs, stuck = all_runs(items=1, pause_s=1.0)
    assert runs > 50
    assert stuck == 0
