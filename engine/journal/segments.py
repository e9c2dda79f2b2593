"""The files of a journal: the first has the journal's name, further ones that name and a number.

A journal holds one run. What an earlier run left under the same name is moved aside, to `NAME.previous`, and replaces
what was moved aside before. A name that is a directory gets a file of its own for each run.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from tidekv.states.errors import InvalidConfig

PREVIOUS = ".previous"
FILE_MODE = 0o600
"""Nobody else reads a journal: it may hold prompts."""


def segment_path(first: Path, number: int) -> Path:
    """The file of segment `number`; 0 is the first."""
    return first if number == 0 else first.with_name(f"{first.name}.{number}")


def segment_numbers(first: Path) -> list[int]:
    """Which segments of a journal are there, in order; the first is not counted."""
    pattern = re.compile(re.escape(first.name) + r"\.([1-9][0-9]*)")
    found = (pattern.fullmatch(entry.name) for entry in first.parent.glob(f"{_escaped(first.name)}.*"))
    return sorted(int(match[1]) for match in found if match)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def place_of_run(path: str, *, instance: str, run: str) -> Path:
    """The first file of a new run, out of whose way everything older was moved. Raises InvalidConfig."""
    place = Path(path)
    try:
        if place.is_dir():
            started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            return place / f"{re.sub('[^A-Za-z0-9._-]', '_', instance) or 'tidekv'}-{started}-{run[:8]}.journal"
        if place.exists() and not place.is_file():
            raise InvalidConfig(f"journal {path!r} is no regular file: name a file or a directory")
        if place.exists() or segment_numbers(place):
            _move_aside(place)
    except OSError as error:
        raise InvalidConfig(f"journal {path!r} cannot be written: {error}") from error
    return place


def _move_aside(first: Path) -> None:
    aside = first.with_name(first.name + PREVIOUS)
    for number in (0, *segment_numbers(aside)):
        segment_path(aside, number).unlink(missing_ok=True)
    for number in (0, *segment_numbers(first)):
        if segment_path(first, number).exists():
            segment_path(first, number).rename(segment_path(aside, number))


def _open_own(path: Path) -> FileIO:
    # Without a buffer: a line is long enough, and a thread that hangs in a write holds no lock that others wait for.
    return FileIO(path, "wb", opener=lambda name, flags: os.open(name, flags, FILE_MODE))


class SegmentFiles:
    """Appends lines to the newest segment, begins a new one in time, and forgets the oldest.

    `begin` makes the first line of a segment, given its number. Raises OSError where a disk does; the caller decides.
    """

    def __init__(
        self, first: Path, *, segment_bytes: int, segments_max: int, run_line: bytes, begin: Callable[[int], bytes]
    ) -> None:
        self.number = 0
        self._first = first
        self._segment_bytes = segment_bytes
        self._segments_max = segments_max
        self._begin = begin
        self._written = 0
        try:
            self._file = _open_own(first)
            self.write(run_line)
        except OSError as error:
            raise InvalidConfig(f"journal {str(first)!r} cannot be written: {error}") from error

    def rotate_if_full(self) -> None:
        """Go on in a new file where this one has its size. Called before a line is made: the chain runs through."""
        if not self._segment_bytes or self._written < self._segment_bytes:
            return
        # Opened first: where that fails, the old file goes on, and the chain is not broken by a line without a place.
        fresh = _open_own(segment_path(self._first, self.number + 1))
        self._file.close()
        self._file, self.number, self._written = fresh, self.number + 1, 0
        self.write(self._begin(self.number))
        if self._segments_max:
            segment_path(self._first, self.number - self._segments_max).unlink(missing_ok=True)

    def write(self, line: bytes) -> None:
        """Append a line, and hand it over to the system: the death of this process does not lose it any more."""
        rest = memoryview(line)
        while rest:
            written = self._file.write(rest)
            assert written is not None, "the file blocks: it takes something, or raises"
            self._written += written
            rest = rest[written:]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
