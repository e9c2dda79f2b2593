"""The files of a journal: the first has the journal's name, further ones that name and a number.

A journal holds one run. What an earlier run left under the same name is moved aside, to `NAME.previous`, and replaces
what was moved aside before. A name that is a directory gets a file of its own for each run.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from tidekv.states.errors import InvalidConfig

PREVIOUS = ".previous"
FILE_MODE = 0o600
"""Nobody else reads a journal: it may hold prompts."""
PIECES_MAX = 1000
"""Systems take no more than 1,024 at once."""


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
    """Appends lines to the newest segment, begins a new one when told, and forgets the oldest.

    Raises OSError where a disk does; the caller decides.
    """

    def __init__(self, first: Path, *, segments_max: int, run_line: bytes) -> None:
        """Raises InvalidConfig where the first file cannot be written."""
        self.number = 0
        self._first = first
        self._segments_max = segments_max
        try:
            self._file = _open_own(first)
            self.write([run_line])
        except OSError as error:
            raise InvalidConfig(f"journal {str(first)!r} cannot be written: {error}") from error

    def begin_next(self) -> None:
        """Go on in a new file, whose first line is what is written next."""
        # Opened first: where that fails, the old file is still there to be closed.
        fresh = _open_own(segment_path(self._first, self.number + 1))
        self._file.close()
        self._file, self.number = fresh, self.number + 1
        if self._segments_max:
            segment_path(self._first, self.number - self._segments_max).unlink(missing_ok=True)

    def write(self, pieces: Sequence[bytes]) -> None:
        """Append lines, and hand them over to the system: the death of this process does not lose them any more."""
        for at in range(0, len(pieces), PIECES_MAX):
            some = pieces[at : at + PIECES_MAX]
            written = os.writev(self._file.fileno(), some)
            if written < sum(map(len, some)):
                self._write_rest(memoryview(b"".join(some))[written:])

    def _write_rest(self, rest: memoryview) -> None:
        while rest:
            written = self._file.write(rest)
            assert written is not None, "the file blocks: it takes something, or raises"
            rest = rest[written:]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
