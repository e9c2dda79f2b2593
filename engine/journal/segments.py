"""Files of a journal: the first has the journal's name, further ones that name and a number.

A journal holds one run. Files of an earlier run with the same name are renamed to `NAME.previous`, and replace those
renamed before. A directory gets one file for each run.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from tidekv.states.errors import InvalidConfig, cause_of

PREVIOUS = ".previous"
FILE_MODE = 0o600
"""File mode: only the owner reads a journal, which may hold prompts."""
PIECES_MAX = 1000
"""Maximum buffers of one write: the systems' limit is 1,024."""


def segment_path(first: Path, number: int) -> Path:
    """Return the file of segment `number`; 0 is the first."""
    return first if number == 0 else first.with_name(f"{first.name}.{number}")


def segment_numbers(first: Path) -> list[int]:
    """Return the numbers of the existing segments, in order, without the first."""
    pattern = re.compile(re.escape(first.name) + r"\.([1-9][0-9]*)")
    found = (pattern.fullmatch(entry.name) for entry in first.parent.glob(f"{_escaped(first.name)}.*"))
    return sorted(int(match[1]) for match in found if match)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def place_of_run(path: str, *, instance: str, run: str) -> Path:
    """Return the first file of a new run, after renaming the files of an earlier one. Raises InvalidConfig."""
    place = Path(path)
    try:
        if place.is_dir():
            started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            return place / f"{re.sub('[^A-Za-z0-9._-]', '_', instance) or 'tidekv'}-{started}-{run[:8]}.journal"
        # A symbolic link is moved aside like a file, also one that leads nowhere: what it names is never written.
        if place.exists() and not place.is_file():
            raise InvalidConfig(f"journal {path!r} is no regular file: name a file or a directory")
        if os.path.lexists(place) or segment_numbers(place):
            _move_aside(place)
    except OSError as error:
        raise InvalidConfig(f"journal {path!r} cannot be written: {cause_of(error)}") from error
    return place


def _move_aside(first: Path) -> None:
    aside = first.with_name(first.name + PREVIOUS)
    for number in (0, *segment_numbers(aside)):
        segment_path(aside, number).unlink(missing_ok=True)
    for number in (0, *segment_numbers(first)):
        if os.path.lexists(segment_path(first, number)):
            segment_path(first, number).rename(segment_path(aside, number))


def _open_own(path: Path) -> FileIO:
    # A file that appears here meanwhile is another program's, and a link leads to one: neither is written to.
    # Unbuffered: lines are long enough, and a thread that hangs in a write must not hold a lock of the file.
    return FileIO(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE))


class SegmentFiles:
    """Writer of segments: appends lines to the newest, begins a new one on request, and deletes the oldest.

    Raises the OSError of the disk; the caller handles it.
    """

    def __init__(self, first: Path, *, segments_max: int, run_line: bytes) -> None:
        """Raises InvalidConfig if the first file cannot be written."""
        self.number = 0
        self._first = first
        self._segments_max = segments_max
        try:
            self._file = _open_own(first)
            self.write([run_line])
        except OSError as error:
            raise InvalidConfig(f"journal {str(first)!r} cannot be written: {cause_of(error)}") from error

    def begin_next(self) -> None:
        """Continue in a new file, with the next line as its first."""
        # Opened first: if that fails, the old file is still open and can be closed.
        fresh = _open_own(segment_path(self._first, self.number + 1))
        self._file.close()
        self._file, self.number = fresh, self.number + 1
        if self._segments_max:
            segment_path(self._first, self.number - self._segments_max).unlink(missing_ok=True)

    def write(self, pieces: Sequence[bytes]) -> None:
        """Append lines, and pass them to the system: the end of this process does not lose them."""
        for at in range(0, len(pieces), PIECES_MAX):
            some = pieces[at : at + PIECES_MAX]
            written = os.writev(self._file.fileno(), some)
            if written < sum(map(len, some)):
                self._write_rest(memoryview(b"".join(some))[written:])

    def _write_rest(self, rest: memoryview) -> None:
        while rest:
            written = self._file.write(rest)
            assert written is not None, "a blocking file writes bytes or raises"
            rest = rest[written:]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
