"""Detection of callbacks that stall the event loop while the engine has work, with the place of the stall.

While work is in flight a timer on the loop updates a time stamp, and a thread checks its age. If it is too old, the
thread logs where the loop's thread is: one line at warning level, the whole stack at debug level. While the engine is
idle neither of them runs.
"""

from __future__ import annotations

import asyncio
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

BEATS_PER_LIMIT = 5
"""Time stamps per limit. A stall is detected with an error of at most one interval between them."""
_STANDARD_LIBRARY: Final = sysconfig.get_path("stdlib")
_INSTALLED: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


@dataclass(frozen=True, slots=True)
class LoopStall:
    """A stall of the loop: minimum duration at its detection, and the place and the stack at that time."""

    seconds: float
    where: str
    """`file:line function` of the innermost frame outside of the standard library."""
    stack: str


class Watchdog:
    """Reports callbacks of one loop that take longer than `limit_s`. Start it on the loop that it observes."""

    def __init__(self, *, limit_s: float, report: Callable[[LoopStall], None] | None = None) -> None:
        self.stalls = 0
        self.lag = Histogram()
        """Seconds by which the loop was late for each time stamp."""
        self._limit_s = limit_s
        self._report = report
        self._beat_at_s = 0.0
        self._busy = threading.Event()
        self._closed = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Observe the running loop from now on, while `set_busy(True)` is in effect."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
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
            self._busy.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def close(self) -> None:
        """Stop watching and join the thread, for at most CLOSE_S: a report that hangs must not delay the end."""
        self.set_busy(False)
        self._closed.set()
        self._busy.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                LOG.error("the watchdog's thread did not end: a report hangs, or logging", after_s=CLOSE_S)

    def _beat(self) -> None:
        now_s = time.monotonic()
        self.lag.observe(max(now_s - self._beat_at_s - self._limit_s / BEATS_PER_LIMIT, 0.0))
        self._set_beat(now_s)

    def _set_beat(self, now_s: float) -> None:
        self._beat_at_s = now_s
        self._timer = self._loop.call_later(self._limit_s / BEATS_PER_LIMIT, self._beat)

    def _watch(self) -> None:
        # Plain attributes without a lock: a stale read delays a report by one interval, and nothing else.
        reported_beat_s = 0.0
        while self._busy.wait() and not self._closed.wait(self._limit_s / BEATS_PER_LIMIT):
            beat_at_s, now_s = self._beat_at_s, time.monotonic()
            if now_s - beat_at_s > self._limit_s and beat_at_s != reported_beat_s and self._busy.is_set():
                # One report per stall, with the stack at its detection, which shows the callback that causes it.
                reported_beat_s = beat_at_s
                self._note(now_s - beat_at_s)

    def _note(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        stall = LoopStall(seconds=seconds, where="unknown" if frame is None else _place(frame), stack=stack)
        self.stalls += 1
        LOG.warning("the event loop stalls", stalled_ms=round(seconds * 1e3), where=stall.where)
        LOG.debug("stack of the stalled event loop", stack=stack)
        if self._report is not None:
            self._report(stall)


def _place(innermost: FrameType) -> str:
    """Return `file:line function` of the innermost frame outside of the standard library, else of the innermost."""
    # A lock or a queue of the standard library says nothing; the frame that calls it does.
    frame: FrameType | None = innermost
    while frame is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"


def _is_standard(file: str) -> bool:
    # Frozen modules, such as the import system, have no file: `<frozen importlib._bootstrap>`.
    return file.startswith("<frozen ") or (file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED))
