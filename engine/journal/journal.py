"""The journal of a running engine: a recorder, and a thread that writes what it has noted.

Writing never blocks the loop. The thread wakes a few milliseconds after something was noted and writes all that has
come since, so that a busy engine pays for one wake-up and one line of many events; kill -9 loses those milliseconds at
most. Behind a disk that is too slow events are dropped, never the service: a `gap` line says how many.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from tidekv.engine.journal.recorder import STEPS_PER_LINE_MAX, Recorder
from tidekv.engine.journal.segments import SegmentFiles, place_of_run

if TYPE_CHECKING:
    from pathlib import Path

    from tidekv.states.commands import Command
    from tidekv.states.core import Core
    from tidekv.states.events import Event
    from tidekv.states.witness import Noted

STEPS_WAITING_MAX = 1 << 17
"""Steps that may wait for the writer; those that come then are dropped."""
COALESCE_S = 0.01


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
        )
        self.path: Path = place_of_run(path, instance=instance, run=self._recorder.run)
        self.events_dropped = 0
        self._note = self._recorder.note
        self._waiting: deque[Noted | int] = deque()
        """Steps, and counts of steps that were dropped."""
        self._missing = 0
        self._is_awake = False
        self._files = SegmentFiles(
            self.path,
            segment_bytes=segment_bytes,
            segments_max=segments_max,
            run_line=self._recorder.run_line(),
            begin=lambda number: self._recorder.segment_line(number),
        )
        self._failure: OSError | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="tidekv-journal", daemon=True)
        self._thread.start()

    # --- On the loop ---

    def stepped(self, event: Event, given: list[Command], error: str = "") -> None:
        """Take the step that the core has just made. Never blocks."""
        waiting = self._waiting
        noted = self._note(event, given, error)
        if len(waiting) >= STEPS_WAITING_MAX or self._missing:
            self._drop_or_go_on(len(waiting))
        if not self._missing:
            waiting.append(noted)
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()

    def _drop_or_go_on(self, waiting: int) -> None:
        """The writer is far behind: drop what comes until it has caught up by half, and leave a count in its place."""
        if waiting > STEPS_WAITING_MAX // 2:
            self._missing += 1
            return
        self._waiting.append(self._missing)
        self._missing = 0

    def close(self) -> None:
        """Write what is waiting and the end record, and close the file. The core is not stepped any more."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        if self._failure is not None:
            # The disk has refused already; what is left to be written of the buffer is lost either way.
            with contextlib.suppress(OSError):
                self._files.close()
            structlog.get_logger("tidekv.journal").warning("the journal is incomplete", cause=str(self._failure))

    # --- On the writer's thread ---

    def _write_all(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(COALESCE_S)
            self._wake.clear()
            # Before looking: what is noted from now on sets the event again.
            self._is_awake = False
            self._guard(self._write_waiting)
        self._guard(self._write_waiting)
        self._guard(self._write_end)

    def _guard(self, write: Callable[[], None]) -> None:
        """A disk that is full or gone ends the journal, never the service."""
        if self._failure is None:
            try:
                write()
            except OSError as error:
                self._failure = error
        if self._failure is not None:
            self.events_dropped += len(self._waiting)
            self._waiting.clear()

    def _write_waiting(self) -> None:
        files, recorder, waiting = self._files, self._recorder, self._waiting
        while waiting:
            files.rotate_if_full()
            steps: list[Noted] = []
            missing = 0
            while waiting and not missing and len(steps) < STEPS_PER_LINE_MAX:
                entry = waiting.popleft()
                if isinstance(entry, int):
                    missing = entry
                else:
                    steps.append(entry)
            if steps:
                files.write(recorder.steps_line(steps))
            if missing:
                self._write_gap(missing)
        files.flush()

    def _write_gap(self, missing: int) -> None:
        self.events_dropped += missing
        self._files.write(self._recorder.gap_line(missing))

    def _write_end(self) -> None:
        if self._missing:
            self._write_gap(self._missing)
        self._files.write(self._recorder.end_line())
        self._files.close()
