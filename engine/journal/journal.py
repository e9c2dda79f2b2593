"""The journal of a running engine: a recorder, and a thread that writes what it has recorded.

Writing never blocks the loop. Steps are encoded on the loop, a slice of some at a time: a thread would hold the
interpreter for just as long, would find nothing of them in its cache, and each hand-over of the interpreter costs as
much as some steps. The thread does what takes long: hashing a prompt of many new pages, and the disk. It wakes a moment
after something was noted, makes a line of what there is, and writes all lines at once; kill -9 loses that moment at
most. If the disk is too slow, events are dropped, never the service: a `gap` line says how many. At its end the journal
logs what it lacks.

    step ──▶ waiting ──▶ slice or thread ──▶ lines ──▶ disk
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tidekv.engine.journal.recorder import STEPS_PER_LINE_MAX, WITH_KEYS, Recorder
from tidekv.engine.journal.segments import SegmentFiles, place_of_run
from tidekv.states.inspect.step_record import StepNotes

if TYPE_CHECKING:
    from pathlib import Path

    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event

LOG = logging.getLogger("tidekv.journal")

SLICE_STEPS = 64
"""So many steps are encoded at once: some tenths of a millisecond's work."""
SLICE_STEPS_MAX = 128
"""So many, where more have come while the thread encoded."""
SLICE_PAGES_MAX = 512
"""So many pages are hashed for a slice; a prompt with more that are new is left to the thread."""
STEPS_WAITING_MAX = 1 << 17
"""Steps that may wait to be encoded."""
BYTES_WAITING_MAX = 64 << 20
"""Bytes that may wait for the disk, and bytes of page keys that may wait to be encoded. What comes then is dropped."""
COALESCE_S = 0.1
"""What is noted waits so long for more, unless there is much."""
HURRY_BYTES = 1 << 20
BREATH_S = 0.001
"""Between two long pieces of work the thread leaves the interpreter to the loop for so long."""
CLOSE_S = 10.0
"""How long closing waits for the disk."""
LINES_PER_WRITE_MAX = 64


class SealedLine(NamedTuple):
    """A line on its way to the disk."""

    pieces: list[bytes]
    steps: int
    size_bytes: int
    begins_segment: bool


class Journal:
    """Records one core, and writes its journal to `path` (a file, or a directory that gets a file for each run).

    With `segment_bytes` the journal goes on in a new file whenever one has that size; with `segments_max` only so many
    of the newest are kept, and what was deleted cannot be replayed any more. 0 means no limit.
    """

    def __init__(
        self,
        path: str,
        core: Core,
        *,
        with_tokens: bool = False,
        config: Mapping[str, object] | None = None,
        layout: Mapping[str, object] | None = None,
        instance: str = "",
        segment_bytes: int = 0,
        segments_max: int = 0,
    ) -> None:
        """Raises InvalidConfig where the file cannot be written."""
        self._recorder = Recorder(
            core,
            with_tokens=with_tokens,
            config=config,
            layout=layout,
            instance=instance,
            started_unix_s=time.time(),
            breathe=lambda: time.sleep(BREATH_S),
        )
        self.path: Path = place_of_run(path, instance=instance, run=self._recorder.run)
        self._note = self._recorder.note
        self._waiting: deque[StepNotes | int] = deque()
        """Steps that are not encoded yet, and counts of steps that were dropped."""
        self._lines: deque[SealedLine] = deque()
        """What is to be written."""
        self._encoding = threading.Lock()
        """Whoever has it may take from `_waiting` and add to `_lines`."""
        self._is_for_thread = False
        """Whether the next step has more pages than can be hashed on the loop."""
        self._is_hindered = False
        """Whether steps are not simply taken: there is too much, or the journal has ended early."""
        self._missing = 0
        """Steps that were noted and dropped, since the last count of such."""
        self._unnoted = 0
        """Steps after its early end."""
        self._gaps_waiting = 0
        """Counts in `_waiting`; raised before such a count is there."""
        # Each of these only grows, and is changed by one thread alone, or by who has the lock.
        self._events_written = 0
        self._keys_noted_bytes = self._keys_encoded_bytes = 0
        self._encoded_bytes = self._taken_bytes = 0
        self._is_awake = False
        run_line = self._recorder.run_line()
        self._segment_bytes_max = segment_bytes
        self._segment, self._segment_bytes = 0, len(run_line)
        """The segment that the next line belongs to, and what it has so far."""
        self._files = SegmentFiles(self.path, segments_max=segments_max, run_line=run_line)
        self._failure: Exception | None = None
        self._has_ended = False
        self._is_given_up = False
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="tidekv-journal", daemon=True)
        self._thread.start()

    # --- On the loop ---

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """Take the step that the core has just made. Never blocks."""
        if self._failure is not None:
            self._unnoted += 1
            return
        noted = self._note(event, given, error)
        if self._is_hindered and not self._has_caught_up():
            self._missing += 1
            return
        if type(event) in WITH_KEYS:
            self._keys_noted_bytes += len(event.keys)  # type: ignore[attr-defined]  # All kinds of that set have them.
        self._waiting.append(noted)
        if len(self._waiting) >= SLICE_STEPS:
            self._encode_slice()
        self._wake_thread()

    def _wake_thread(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()

    def _encode_slice(self) -> None:
        """Make a line of what waits, unless that is work for the thread, or the thread is doing it."""
        if not self._is_for_thread and self._encoding.acquire(blocking=False):
            try:
                self._encode_line(SLICE_STEPS_MAX, SLICE_PAGES_MAX)
            except Exception as error:
                self._end_early(error)
            finally:
                self._encoding.release()
        if self._is_for_thread or self._encoded_bytes - self._taken_bytes > HURRY_BYTES:
            self._hurry.set()
        self._is_hindered = self._waits_more_than(1)

    def _waits_more_than(self, share: float) -> bool:
        """Whether more waits than that share of what may."""
        keys_bytes = self._keys_noted_bytes - self._keys_encoded_bytes
        encoded_bytes = self._encoded_bytes - self._taken_bytes
        most = max(keys_bytes / BYTES_WAITING_MAX, encoded_bytes / BYTES_WAITING_MAX)
        return max(most, len(self._waiting) / STEPS_WAITING_MAX) > share

    def _has_caught_up(self) -> bool:
        """Whether steps may wait again, after there was too much: the count of those that were dropped goes first."""
        if self._waits_more_than(0.5):
            return False
        self._gaps_waiting += 1
        self._waiting.append(self._missing)
        self._is_hindered, self._missing = False, 0
        return True

    @property
    def events_dropped(self) -> int:
        """Events that are not in the journal: it could not be written, or not fast enough. Right once it is closed;
        before that, those that are still to be written are counted as well.
        """
        return self._events_noted - self._events_written

    @property
    def _events_noted(self) -> int:
        return self._recorder.step_recorder.events + self._unnoted

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is waiting and the end record, and close the file, within `timeout_s`. The core is not stepped any
        more. What is missing in the journal then is told to the log.
        """
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
                "journal %s is incomplete: %d of %d events are not in it%s: %s",
                self.path,
                self.events_dropped,
                self._events_noted,
                "" if self._has_ended else ", nor is its end record",
                cause,
            )

    # --- Under the lock ---

    def _encode_line(self, steps_max: int, pages_max: int) -> int:
        """Make a line of at most so many steps, with at most so many pages to be hashed; returns how many entries that
        took.
        """
        steps = self._take_steps(steps_max)
        if steps:
            encoded = self._recorder.encode(steps, pages_max=pages_max)
            if encoded.steps < len(steps):
                self._waiting.extendleft(reversed(steps[encoded.steps :]))
                self._is_for_thread = not encoded.steps
            if encoded.steps:
                self._keys_encoded_bytes += encoded.keys_bytes
                self._go_on_in_a_new_segment_if_full()
                self._add_line(self._recorder.steps_pieces(encoded), encoded.steps)
            return encoded.steps
        if self._waiting:
            dropped = self._waiting.popleft()
            assert isinstance(dropped, int), "steps in front of a count would have been taken"
            self._gaps_waiting -= 1
            self._go_on_in_a_new_segment_if_full()
            self._add_line([self._recorder.gap_line(dropped)])
            return 1
        return 0

    def _go_on_in_a_new_segment_if_full(self) -> None:
        # Before a line is made: the checksums run through.
        if self._segment_bytes_max and self._segment_bytes >= self._segment_bytes_max:
            self._segment, self._segment_bytes = self._segment + 1, 0
            self._add_line([self._recorder.segment_line(self._segment)], begins_segment=True)

    def _add_line(self, pieces: list[bytes], steps: int = 0, *, begins_segment: bool = False) -> None:
        size_bytes = sum(map(len, pieces))
        self._segment_bytes += size_bytes
        self._encoded_bytes += size_bytes
        self._lines.append(SealedLine(pieces, steps, size_bytes, begins_segment))

    def _take_steps(self, steps_max: int) -> list[StepNotes]:
        """So many steps, at most: those in front of the first count of steps that were dropped."""
        waiting = self._waiting
        # In this order: a count that comes from now on stands behind all of these.
        most = min(len(waiting), steps_max)
        if not self._gaps_waiting:
            return [waiting.popleft() for _ in range(most)]  # type: ignore[misc]  # There is no count among them.
        steps: list[StepNotes] = []
        while len(steps) < most and isinstance(waiting[0], StepNotes):
            steps.append(waiting.popleft())  # type: ignore[arg-type]  # The one that was just looked at.
        return steps

    # --- On the journal's thread ---

    def _write_all(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._hurry.wait(COALESCE_S)
            self._wake.clear()
            self._hurry.clear()
            # Before looking: what is noted from now on sets the event again.
            self._is_awake = False
            self._guard(self._write_waiting)
        self._guard(self._write_waiting)
        self._guard(self._write_end)
        try:
            self._files.close()
        except OSError as error:
            # Some disks say only now that they have not taken what they took.
            self._failure, self._has_ended = self._failure or error, False

    def _guard(self, write: Callable[[], None]) -> None:
        if self._failure is None and not self._is_given_up:
            try:
                write()
            except Exception as error:
                self._end_early(error)

    def _end_early(self, error: Exception) -> None:
        """A disk that is full or gone ends the journal, never the service; and so does a mistake of ours."""
        self._failure = error
        self._waiting.clear()
        self._lines.clear()
        words = None if isinstance(error, OSError) else error
        LOG.warning("journal %s ends here, the engine goes on: %s", self.path, error, exc_info=words)

    def _write_waiting(self) -> None:
        # Not more than there is now: what comes meanwhile makes longer lines later.
        left = len(self._waiting)
        while left > 0 and not self._is_given_up:
            with self._encoding:
                self._is_for_thread = False
                taken = self._encode_line(STEPS_PER_LINE_MAX, sys.maxsize)
            left = left - taken if taken else 0
            if left > 0 and not self._closing.is_set():
                time.sleep(BREATH_S)
        while self._lines and not self._is_given_up:
            self._write_lines()

    def _write_lines(self) -> None:
        """Write the next lines of one segment at once."""
        lines = self._lines
        if lines[0].begins_segment:
            self._files.begin_next()
        taken = [lines.popleft()]
        while lines and len(taken) < LINES_PER_WRITE_MAX and not lines[0].begins_segment:
            taken.append(lines.popleft())
        self._files.write([piece for line in taken for piece in line.pieces])
        self._events_written += sum([line.steps for line in taken])
        self._taken_bytes += sum([line.size_bytes for line in taken])

    def _write_end(self) -> None:
        if self._missing:
            self._files.write([self._recorder.gap_line(self._missing)])
        self._files.write([self._recorder.end_line()])
        self._has_ended = True
