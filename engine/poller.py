"""Poller thread: drives NIXL transfers and file I/O, neither of which can call back.

The thread blocks while nothing is in flight. Otherwise it polls in rounds: without a pause for the first 200 µs after
an operation began or ended, and while an operation that advances only when polled has rounds left; then with pauses
that grow from 50 µs to 1 ms in proportion to the time waited, so the added delay stays a small part of the wait. A new
operation ends a pause at once.

    operations   each is posted, checked in every round, released at its end and its outcome delivered
    streams      are polled instead of their operations and deliver outcomes themselves, several at once; while a stream
                 is the only work, its next turn follows at once, since a post on shared memory evicts the CPU caches

An operation in flight cannot be cancelled: it stays here until it has ended, even if its future was cancelled, and only
then is it released. The thread never touches the loop, except to deliver outcomes.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from tidekv.backends.base import Pollable
from tidekv.backends.completions import Completions, Outcome, as_error
from tidekv.states.errors import EngineClosed
from tidekv.transports.base import Ended, StreamTurn, TransferStream


class Wakeup:
    """Wake-up of one thread by another one, by a lock, which is cheaper than a queue.

    The producer appends an item and signals; the consumer, if it finds nothing, waits and looks again. A signal while
    the consumer is awake is kept, so no item appended before it is missed. Wake-ups may be spurious.
    """

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def signal(self) -> None:
        """Wake the consumer, or make its next wait return at once."""
        # Only this thread releases the lock. If it is free, an earlier signal has not been consumed yet and suffices.
        if self._silence.locked():
            self._silence.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until the next signal, at most for the timeout. Return at once if one came since the last wait."""
        self._silence.acquire(timeout=-1 if timeout_s is None else timeout_s)


SPIN_S: Final = 200e-6
PAUSE_MIN_S: Final = 50e-6
PAUSE_MAX_S: Final = 1e-3
# A pause is this part of the time waited so far, within the two bounds.
PAUSE_SHARE: Final = 1 / 8
# A thread that spins keeps the interpreter lock most of the time; this sleep is the shortest that releases it.
YIELD_S: Final = 1e-6
# Posting and checking may block for as long as a copy takes: after this time other work gets its turn.
TURN_S: Final = 1e-3
# Outcomes are collected for at most this long before they are delivered, in one wake-up of the loop.
TELL_S: Final = 200e-6
# Seconds beyond its deadline that `close` waits for a thread that is blocked in a call.
STUCK_S: Final = 0.5
PR_SET_TIMERSLACK: Final = 29


@dataclass(frozen=True, slots=True)
class PollerStatistics:
    """Counters of a poller. `in_flight` counts operations submitted and not ended; `cpu_s` is the thread's CPU time."""

    in_flight: int
    posted: int
    completed: int
    failed: int
    poll_rounds: int
    cpu_s: float


@dataclass(slots=True, eq=False)
class _Flight:
    """One operation from `submit` to its release."""

    pollable: Pollable
    future: asyncio.Future[None]
    rounds: int
    over: bool = False
    error: Exception | None = field(default=None)

    @property
    def futures(self) -> tuple[asyncio.Future[None]]:
        """The futures that wait for it."""
        return (self.future,)


@dataclass(frozen=True, slots=True)
class _Stop:
    deadline_at_s: float


class PollerThread:
    """Drives `Pollable`s to their end and resolves a future of the loop for each.

    Call `start` and `close` on the loop that it serves. It starts no other thread and holds no lock while it calls out.
    """

    def __init__(self, *, name: str = "tidekv-poller") -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Not a queue: a timed get of SimpleQueue may miss its deadline between two clock reads and then waits for ever;
        # one of Queue takes half as long again for a round trip to the thread.
        self._new: deque[_Flight | StreamDrive | _Stop] = deque()
        self._wakeup = Wakeup()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outcomes: Completions | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._closing = False
        self._submitted = 0
        # Written only by the thread; any thread may read them.
        self._posted = self._completed = self._failed = self._poll_rounds = 0
        self._cpu_s = 0.0
        self._pending: list[_Flight] = []
        self._drives: list[StreamDrive] = []

    def start(self) -> None:
        """Bind to the running loop and start the thread. Call it once."""
        assert self._loop is None, "a poller is started once"
        self._loop = asyncio.get_running_loop()
        self._outcomes = Completions(self._loop)
        self._stopped = self._loop.create_future()
        self._stopped.add_done_callback(self._on_stopped)
        self._thread.start()

    def submit(self, pollable: Pollable) -> asyncio.Future[None]:
        """Start an operation and drive it to its end; see `tidekv.backends.base.Poller`. EngineClosed after `close`."""
        flight = _Flight(pollable, self._begin(), pollable.rounds)
        self._new.append(flight)
        self._wakeup.signal()
        return flight.future

    def drive(self, stream: TransferStream) -> StreamDrive:
        """Register a stream; see `tidekv.transports.base.Poller`."""
        return StreamDrive(self, stream)

    async def close(self, *, timeout_s: float = 5.0) -> int:
        """Wait at most `timeout_s` until every submitted operation has ended; returns how many have not.

        Those are still in flight and may still write to memory: they are not released, and their futures raise
        EngineClosed, which does not mean that they have stopped. A thread that is blocked in a call beyond the deadline
        is left running.
        """
        if self._stopped is None:
            self._closing = True
            return 0
        if not self._closing:
            self._closing = True
            self._new.append(_Stop(time.monotonic() + timeout_s))
            self._wakeup.signal()
        await asyncio.wait([self._stopped], timeout=timeout_s + STUCK_S)
        if self._stopped.done():
            self._thread.join()
        else:
            self._abandon()
        return self._submitted - self._completed - self._failed

    def statistics(self) -> PollerStatistics:
        """Return counters, and the thread's CPU time as of its last pause."""
        return PollerStatistics(
            in_flight=self._submitted - self._completed - self._failed,
            posted=self._posted,
            completed=self._completed,
            failed=self._failed,
            poll_rounds=self._poll_rounds,
            cpu_s=self._cpu_s,
        )

    def _begin(self) -> asyncio.Future[None]:
        """Return a new future that this poller resolves."""
        if self._loop is None or self._closing:
            raise EngineClosed("the poller is not running: start it first, and submit nothing after close")
        assert asyncio.get_running_loop() is self._loop, "submit on the loop that start() was called on"
        self._submitted += 1
        return self._loop.create_future()

    def _on_stopped(self, _: asyncio.Future[None]) -> None:
        # Also if the thread died of a defect, which Python has reported by now: no future may stay unresolved.
        self._closing = True
        self._abandon()

    def _abandon(self) -> None:
        """Fail every future that is not resolved."""
        left = self._submitted - self._completed - self._failed
        # Every open future is in one of the three: a round removes operations from `_pending` only after it ended.
        for item in (*self._pending, *self._drives, *self._new):
            for future in () if isinstance(item, _Stop) else list(item.futures):
                if not future.done():
                    future.set_exception(EngineClosed(f"the poller ended with {left} operations in flight"))

    def _run(self) -> None:
        # By default the kernel may extend each sleep by 50 µs, which would double the shortest one.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        assert self._outcomes is not None
        assert self._stopped is not None
        try:
            self._drive(self._outcomes)
        finally:
            self._cpu_s = time.thread_time()
            self._outcomes.deliver([(self._stopped, None)])

    def _drive(self, outcomes: Completions) -> None:
        """Run rounds of take, poll and deliver until stopped and empty, or past the deadline."""
        active_at_s = yielded_at_s = 0.0
        submitted = 0
        pause_s = math.inf
        deadline_at_s: float | None = None
        while True:
            fresh, stop = self._take(pause_s)
            if stop is not None:
                deadline_at_s = stop.deadline_at_s
            ended = self._ask_all(outcomes)
            now_s = time.monotonic()
            if fresh or ended:
                active_at_s = now_s
            if deadline_at_s is not None and (not (self._pending or self._drives) or now_s > deadline_at_s):
                return
            pause_s = self._next_pause_s(now_s - active_at_s)
            if submitted != self._submitted:
                # The loop held the interpreter lock while a call of this round blocked. Yielding now, just after an
                # outcome was delivered, would wait until the loop has run everything that follows from it.
                submitted = self._submitted
                yielded_at_s = now_s
            if pause_s == 0 and now_s - yielded_at_s > SPIN_S:
                pause_s = YIELD_S
            if pause_s > 0:
                yielded_at_s = now_s
                self._cpu_s = time.thread_time()

    def _next_pause_s(self, quiet_s: float) -> float:
        if not self._pending and not self._drives:
            return math.inf
        if quiet_s < SPIN_S or any(flight.rounds > 0 for flight in self._pending):
            return 0.0
        return min(max(quiet_s * PAUSE_SHARE, PAUSE_MIN_S), PAUSE_MAX_S)

    def _take(self, pause_s: float) -> tuple[bool, _Stop | None]:
        """Wait up to `pause_s` for a new item, then post new operations for one turn. True first if there were any."""
        if pause_s == math.inf:
            # A signal may be for an item that was already taken: that starts no round.
            while not self._new:
                self._wakeup.wait()
        elif pause_s > 0 and not self._new:
            self._wakeup.wait(pause_s)
        fresh = False
        until_s = math.inf
        while self._new:
            item = self._new.popleft()
            if isinstance(item, _Stop):
                return fresh, item
            fresh = True
            if isinstance(item, StreamDrive):
                if item not in self._drives:
                    self._drives.append(item)
                continue
            if until_s == math.inf:
                until_s = time.monotonic() + TURN_S
            self._pending.append(item)
            self._posted += 1
            self._call(item, post=True)
            if time.monotonic() > until_s:
                break
        return fresh, None

    def _ask_all(self, outcomes: Completions) -> bool:
        """Check each operation once, release those that ended and deliver their outcomes to the loop."""
        self._poll_rounds += 1
        ended: list[Outcome] = []
        any_ended = False
        rest: list[_Flight] = []
        tell_at_s = time.monotonic() + TELL_S
        for flight in self._pending:
            # Deliver before a check that may block (it has work left, or took long already): the loop then runs
            # beside it.
            if ended and (flight.pollable.rounds > 0 or time.monotonic() > tell_at_s):
                outcomes.deliver(ended)
                ended = []
                tell_at_s = time.monotonic() + TELL_S
            if not flight.over:
                self._call(flight, post=False)
                flight.rounds -= 1
            if not flight.over:
                rest.append(flight)
                continue
            self._release(flight)
            any_ended = True
            ended.append((flight.future, flight.error))
        self._pending = rest
        if ended:
            outcomes.deliver(ended)
        return self._advance_streams() or any_ended if self._drives else any_ended

    def _advance_streams(self) -> bool:
        """Give each stream its turn, and drop those that have nothing left. True if any has moved."""
        any_moved = False
        rest: list[StreamDrive] = []
        for drive in self._drives:
            turn = drive.advance()
            any_moved = any_moved or turn is not StreamTurn.WAITING
            # If this stream is the only work, take its next turn at once: whatever code of a round did not run since
            # the last copy would have to be fetched from memory again.
            while turn is StreamTurn.MOVED and not (self._new or self._pending or self._drives[1:] or self._closing):
                self._poll_rounds += 1
                turn = drive.advance()
            if turn is StreamTurn.EMPTY:
                drive.is_driven = False
                # A wake between the turn and this line saw `is_driven` set and did not notify the thread: look again.
                if drive.is_empty:
                    continue
                drive.is_driven = True
            rest.append(drive)
        self._drives = rest
        return any_moved

    def _call(self, flight: _Flight, *, post: bool) -> None:
        try:
            flight.over = flight.pollable.post() if post else flight.pollable.check()
        except BaseException as error:  # Whatever it is, it is the outcome of this operation and must not end others.
            flight.over = True
            flight.error = as_error(error)

    def _release(self, flight: _Flight) -> None:
        try:
            flight.pollable.release()
        except BaseException as error:  # As above.
            if flight.error is None:
                flight.error = as_error(error)
            else:
                flight.error.add_note(f"its release failed too: {error!r}")
        if flight.error is None:
            self._completed += 1
        else:
            self._failed += 1

    def _tell(self, ended: Ended) -> None:
        """Deliver outcomes that a stream reports. Runs on the thread."""
        assert self._outcomes is not None, "streams advance on the thread of a poller that was started"
        failed = sum(error is not None for _, error in ended)
        self._posted += len(ended)
        self._failed += failed
        self._completed += len(ended) - failed
        self._outcomes.deliver(ended)


class StreamDrive:
    """A stream on a poller's thread, polled in each round from `wake` until it has nothing left."""

    def __init__(self, poller: PollerThread, stream: TransferStream) -> None:
        self.is_driven = False
        self.futures: set[asyncio.Future[None]] = set()
        self._poller = poller
        self._stream = stream

    def begin(self) -> asyncio.Future[None]:
        """See `tidekv.transports.base.Drive`."""
        future = self._poller._begin()
        self.futures.add(future)
        return future

    def wake(self) -> None:
        """See `tidekv.transports.base.Drive`."""
        # The thread clears the flag before its last look, so an item added while the flag is set will be seen.
        if not self.is_driven:
            self.is_driven = True
            self._poller._new.append(self)
        self._poller._wakeup.signal()

    @property
    def is_empty(self) -> bool:
        """True if the stream has nothing to do."""
        return self._stream.is_empty

    def advance(self) -> StreamTurn:
        """Give the stream its turn. Runs on the poller's thread."""
        return self._stream.advance(self._tell)

    def _tell(self, ended: Ended) -> None:
        for future, _ in ended:
            self.futures.discard(future)
        self._poller._tell(ended)
