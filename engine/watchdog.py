"""Detection of callbacks that stall the event loop while the engine has work, with the place of the stall.

While work is in flight a timer on the loop updates a time stamp, and a thread checks its age. If it is too old, the
thread logs where the loop's thread is: one line at warning level, the whole stack at debug level. While the engine is
idle neither of them runs.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Final

from tidekv.engine.log import engine_log, own_context
from tidekv.engine.metrics.fold import Histogram

LOG = engine_log("tidekv.engine")
CLOSE_S = 5.0
"""Maximum seconds that closing waits for the thread, which ends at once unless a report hangs."""

OF_ONE_CALLBACK: Final = ("_run", "_run_once")
"""Functions of asyncio whose frames end with a callback; uvloop has none."""
NOWHERE: Final = "no Python code of a callback: the process was not scheduled, or C code ran"
COLLECTED: Final = "a full collection of Python's garbage collector"
BEATS_PER_LIMIT = 5
"""Time stamps per limit. A stall is detected with an error of at most one interval between them."""
_STANDARD_LIBRARY: Final = sysconfig.get_path("stdlib")
_INSTALLED: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


@dataclass(frozen=True, slots=True)
class LoopStall:
    """A stall of the loop: minimum duration at its detection, and the place and the stack at that time."""

    seconds: float
    where: str
    """`file:line function` of the innermost frame of a callback outside of the standard library; "" if there is none:
    the process was not scheduled, or only C code ran. COLLECTED is in front if one ended meanwhile, in any thread.
    """
    stack: str


class Watchdog:
    """Reports callbacks of one loop that take longer than `limit_s`. Start it on the loop that it observes."""

    def __init__(
        self,
        *,
        limit_s: float,
        report: Callable[[LoopStall], None] | None = None,
        on_end: Callable[[float, float, str], None] | None = None,
    ) -> None:
        """`report` is called on the watching thread when a stall is detected; `on_end` on the loop when it is over,
        with the time, the stall's seconds, and the place.
        """
        self.stalls = 0
        self.lag = Histogram()
        """Seconds by which the loop was late for each time stamp."""
        self._limit_s = limit_s
        self._report = report
        self._on_end = on_end
        self._seen: tuple[float, str] = (0.0, "")
        """Time stamp and place of the last stall that the thread has seen."""
        self._below: FrameType | None = None
        """The frame that runs the loop; frames further out are those of the program that runs it."""
        self._beat_at_s = 0.0
        self._collections = full_collections()
        self._busy = threading.Event()
        self._closed = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Observe the running loop from now on, while `set_busy(True)` is in effect."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._loop.call_soon(self._look_below)
        self._thread = threading.Thread(
            target=own_context().run, args=(self._watch,), name="tidekv-watchdog", daemon=True
        )
        self._thread.start()

    def set_busy(self, busy: bool) -> None:
        """Set whether work is in flight. Call it on the loop. Repeating the current value costs nothing."""
        if busy == self._busy.is_set() or self._closed.is_set():
            return
        if busy:
            self._set_beat(time.monotonic())
            self._busy.set()
        else:
            # The work may have ended right behind the stall, before the timer could run.
            self._end_stall(time.monotonic())
            self._busy.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def close(self) -> None:
        """Stop watching and join the thread, for at most CLOSE_S: a report that hangs must not delay the end."""
        self.set_busy(False)
        self._below = None
        self._closed.set()
        self._busy.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                LOG.error("the watchdog's thread did not end: a report hangs, or logging", after_s=CLOSE_S)

    def look(self) -> None:
        """Report a stall that has just ended, instead of with the next time stamp. Call it on the loop."""
        now_s = time.monotonic()
        if self._busy.is_set() and not self._closed.is_set() and now_s - self._beat_at_s > self._limit_s:
            if self._timer is not None:
                self._timer.cancel()
            self._beat()

    def _look_below(self) -> None:
        # Of a plain callback: behind its own frame are those of the loop only. Those that run one callback end with it.
        frame: FrameType | None = sys._getframe().f_back
        while frame is not None and frame.f_code.co_name in OF_ONE_CALLBACK:
            frame = frame.f_back
        if not self._closed.is_set():
            self._below = frame

    def _beat(self) -> None:
        now_s = time.monotonic()
        self._end_stall(now_s)
        self.lag.observe(max(now_s - self._beat_at_s - self._limit_s / BEATS_PER_LIMIT, 0.0))
        self._set_beat(now_s)

    def _end_stall(self, now_s: float) -> None:
        late_s = now_s - self._beat_at_s
        if self._on_end is not None and late_s > self._limit_s:
            beat_at_s, where = self._seen
            # The thread may have had no chance to look: a collection keeps the interpreter's lock.
            self._on_end(now_s, late_s, where if beat_at_s == self._beat_at_s else self._with_collection(""))

    def _set_beat(self, now_s: float) -> None:
        self._beat_at_s, self._collections = now_s, full_collections()
        self._timer = self._loop.call_later(self._limit_s / BEATS_PER_LIMIT, self._beat)

    def _with_collection(self, where: str) -> str:
        # A collection begins at whatever allocates next: that place alone would blame code that takes no time.
        if full_collections() == self._collections:
            return where
        return f"{COLLECTED}, in {where}" if where else COLLECTED

    def _watch(self) -> None:
        # Plain attributes without a lock: a stale read delays a report by one interval, and nothing else.
        reported_beat_s = 0.0
        while self._busy.wait() and not self._closed.wait(self._limit_s / BEATS_PER_LIMIT):
            beat_at_s, now_s = self._beat_at_s, time.monotonic()
            if now_s - beat_at_s > self._limit_s and beat_at_s != reported_beat_s and self._busy.is_set():
                # One report per stall, with the stack at its detection, which shows the callback that causes it.
                reported_beat_s = beat_at_s
                self._note(now_s - beat_at_s, beat_at_s)

    def _note(self, seconds: float, beat_at_s: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        where = self._with_collection("" if frame is None else _place(frame, self._below))
        stall = LoopStall(seconds=seconds, where=where, stack=stack)
        self._seen = (beat_at_s, stall.where)
        self.stalls += 1
        LOG.warning("the event loop stalls", stalled_ms=round(seconds * 1e3), where=stall.where or NOWHERE)
        LOG.debug("stack of the stalled event loop", stack=stack)
        if self._report is not None:
            self._report(stall)


def full_collections() -> int:
    """Return how many full collections of Python's garbage collector have ended in this process."""
    return int(gc.get_stats()[2]["collections"])


def _place(innermost: FrameType, below: FrameType | None) -> str:
    """Return `file:line function` of the innermost frame outside of the standard library; "" if the loop runs no such
    frame. `below` is the frame that runs the loop.
    """
    # A lock or a queue of the standard library says nothing; the frame that calls it does.
    frame: FrameType | None = innermost
    while frame is not None and frame is not below and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame is below:
        # What is further out is `asyncio.run` and its caller, which do not stall anything.
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"


def _is_standard(file: str) -> bool:
    # Frozen modules, such as the import system, have no file: `<frozen importlib._bootstrap>`.
    return file.startswith("<frozen ") or (file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED))
