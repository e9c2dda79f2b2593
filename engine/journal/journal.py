"""Journal of a running engine: a recorder on the loop, and a thread that writes its lines to disk.

The loop encodes, since a thread would hold the interpreter as long, and longer without a pause. Turns with a very long
prompt are left to the thread, which also seals the lines and writes them. It wakes shortly after the first turn and
writes all that is queued; kill -9 loses at most that delay. If the disk is slow, turns are dropped and the service is
not delayed: a `gap` line counts them. The number of missing events is logged at the end.

    step ──▶ Recorder ──end_turn──▶ line ──▶ queue ──▶ thread: checksum, file
                              └──▶ turn with a long prompt ──▶ thread: digests, line
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tidekv.engine.journal.format import seal
from tidekv.engine.journal.log_lines import LogLines
from tidekv.engine.journal.recorder import UNNAMED_RUN, RecordedTurn, Recorder, RunInfo, Stepped
from tidekv.engine.journal.segments import SegmentFiles, place_of_run
from tidekv.engine.log import engine_log, own_context

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tidekv.states.core import Core

LOG = engine_log("tidekv.journal")

PAGES_ON_LOOP_MAX = 2048
"""Maximum pages of a prompt that the loop hashes, half a millisecond; the thread hashes longer prompts."""
BYTES_WAITING_MAX = 64 << 20
"""Maximum bytes queued for the thread. Further turns are dropped."""
COALESCE_S = 0.1
"""Seconds that the thread waits for more turns, unless HURRY_BYTES wait."""
HURRY_BYTES = 1 << 20
BREATH_S = 0.001
"""Seconds for which the thread leaves the interpreter to the loop between blocks of a long prompt."""
CLOSE_S = 10.0
"""Seconds that closing waits for the disk."""
LINES_PER_WRITE_MAX = 512


class Waiting(NamedTuple):
    """A line on its way to the disk."""

    line: bytes | RecordedTurn
    """The encoded line without its checksum, or a turn that the thread renders."""
    size_bytes: int
    events: int


class Journal:
    """Records one core, and writes its journal to `path` (a file, or a directory that gets a file for each run), or to
    the application's structlog if that is None.

    With `segment_bytes` the journal continues in a new file when one has that size; `segments_max` is the maximum
    number of newest files kept: the journal cannot be replayed once the first is deleted. 0 disables either.
    """

    def __init__(
        self,
        path: str | None,
        core: Core,
        *,
        with_tokens: bool = False,
        info: RunInfo = UNNAMED_RUN,
        segment_bytes: int = 0,
        segments_max: int = 0,
    ) -> None:
        """The journal notes its start in `info`. Raises InvalidConfig if the file cannot be written, or the application
        has no structlog.
        """
        self._recorder = Recorder(
            core,
            with_tokens=with_tokens,
            info=info._replace(started_unix_s=time.time(), started_at_s=time.monotonic()),
            breathe=lambda: time.sleep(BREATH_S),
        )
        self._longest_on_loop = PAGES_ON_LOOP_MAX * core.settings.key_bytes
        self.path: Path | None = None
        if path is not None:
            self.path = place_of_run(path, instance=info.instance, run=self._recorder.run)
        self.stepped: Stepped = self._recorder.stepped
        """Takes the core's last step. Never blocks."""
        self._queue: deque[Waiting] = deque()
        # Each counter only grows and has one writer: the loop, or the thread.
        self._queued_bytes = self._taken_bytes = 0
        self._left_to_thread = self._rendered = 0
        """Turns left to the thread to render, and turns it has rendered. While they differ it renders all turns."""
        self._events_written = 0
        self._missing_turns = self._missing_events = 0
        """Dropped since the last gap line that was queued."""
        first, self._sum = seal(self._recorder.run_line(), 0)
        self._segment_bytes_max = segment_bytes
        self._segment_bytes = len(first)
        self._files: SegmentFiles | LogLines
        if self.path is None:
            self._files = LogLines(self._recorder.run, first)
        else:
            self._files = SegmentFiles(self.path, segments_max=segments_max, run_line=first)
        self._failure: Exception | None = None
        self._has_ended = self._is_given_up = False
        self._is_awake = False
        self._wake, self._hurry, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=own_context().run, args=(self._write_all,), name="tidekv-journal", daemon=True
        )
        self._thread.start()

    # --- On the loop ---

    @property
    def place(self) -> str:
        """The file, or that it is the log."""
        return "the log" if self.path is None else str(self.path)

    def note_stall(self, at_s: float, seconds: float, where: str) -> None:
        """Add a stall of the event loop that has just ended to the turn that follows."""
        self._recorder.note_stall(at_s, seconds, where)

    def end_turn(self) -> None:
        """Queue the steps since the last call as one turn. Never blocks."""
        turn = self._recorder.end_turn()
        if turn is None or self._failure is not None:
            return
        if not self._has_room():
            self._missing_turns += 1
            self._missing_events += len(turn.line.took)
            return
        try:
            if self._missing_turns:
                self._queue_gap()
            sizes = turn.keys_bytes()
            events = len(turn.line.took)
            if self._left_to_thread == self._rendered and max(sizes, default=0) <= self._longest_on_loop:
                line = self._recorder.render(turn)
                self._put(Waiting(line, len(line), events))
            else:
                self._left_to_thread += 1
                self._put(Waiting(turn, sum(sizes) + events, events))
        except Exception as error:
            self._end_early(error)

    def _has_room(self) -> bool:
        waiting = self._queued_bytes - self._taken_bytes
        # After turns were dropped, wait until half of the room is free: one gap line instead of many.
        return waiting <= (BYTES_WAITING_MAX // 2 if self._missing_turns else BYTES_WAITING_MAX)

    def _queue_gap(self) -> None:
        line = self._recorder.gap_line(self._missing_turns, self._missing_events)
        self._missing_turns = self._missing_events = 0
        self._put(Waiting(line, len(line), 0))

    def _put(self, waiting: Waiting) -> None:
        self._queued_bytes += waiting.size_bytes
        self._queue.append(waiting)
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()
        if self._queued_bytes - self._taken_bytes > HURRY_BYTES:
            self._hurry.set()

    @property
    def events_dropped(self) -> int:
        """Number of events missing in the journal. Before `close` it includes queued events."""
        return self._recorder.events - self._events_written

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the queue and the end record, and close the file, within `timeout_s`. The core must not be stepped
        afterwards. Logs the number of missing events.
        """
        self.end_turn()
        self._closing.set()
        self._hurry.set()
        self._wake.set()
        self._thread.join(timeout_s)
        self._is_given_up = self._thread.is_alive()
        if self._is_given_up:
            cause = f"the disk has not taken them within {timeout_s:g} s"
        else:
            cause = "the disk was too slow" if self._failure is None else str(self._failure)
        if self.events_dropped or not self._has_ended:
            LOG.warning(
                "the journal is incomplete",
                journal=self.place,
                events=self._recorder.events,
                missing=self.events_dropped,
                has_end=self._has_ended,
                cause=cause,
            )

    def _end_early(self, error: Exception) -> None:
        """End the journal, but not the service, after an error of the disk or a defect."""
        self._failure = error
        self._queue.clear()
        trace = None if isinstance(error, OSError) else error
        LOG.warning("the journal ends here, the engine goes on", journal=self.place, cause=str(error), exc_info=trace)

    # --- On the journal's thread ---

    def _write_all(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._hurry.wait(COALESCE_S)
            self._wake.clear()
            self._hurry.clear()
            # Before the queue is read: lines queued from now on set the event again.
            self._is_awake = False
            self._guard(self._write_waiting)
        self._guard(self._write_waiting)
        self._guard(self._write_end)
        try:
            self._files.close()
        except OSError as error:
            # Some file systems report failed writes only at this point.
            self._failure, self._has_ended = self._failure or error, False

    def _guard(self, write: Callable[[], None]) -> None:
        if self._failure is None and not self._is_given_up:
            try:
                write()
            except Exception as error:
                self._end_early(error)

    def _write_waiting(self) -> None:
        queue = self._queue
        while queue and not self._is_given_up:
            lines: list[bytes] = []
            events = taken_bytes = 0
            while queue and len(lines) < LINES_PER_WRITE_MAX:
                waiting = queue.popleft()
                line = waiting.line
                if isinstance(line, RecordedTurn):
                    line = self._recorder.render(line)
                    self._rendered += 1
                if self._segment_bytes_max and self._segment_bytes >= self._segment_bytes_max:
                    self._files.write(lines)
                    lines = [self._begin_segment(self._events_written + events)]
                lines.append(self._sealed(line))
                events += waiting.events
                taken_bytes += waiting.size_bytes
            self._files.write(lines)
            self._events_written += events
            self._taken_bytes += taken_bytes

    def _begin_segment(self, first_event: int) -> bytes:
        self._files.begin_next()
        self._segment_bytes = 0
        return self._sealed(
            self._recorder.segment_line(self._files.number, first_event=first_event, previous=self._sum)
        )

    def _sealed(self, line: bytes) -> bytes:
        sealed, self._sum = seal(line, self._sum)
        self._segment_bytes += len(sealed)
        return sealed

    def _write_end(self) -> None:
        if self._missing_turns:
            self._files.write([self._sealed(self._recorder.gap_line(self._missing_turns, self._missing_events))])
        self._files.write([self._sealed(self._recorder.end_line())])
        self._has_ended = True
