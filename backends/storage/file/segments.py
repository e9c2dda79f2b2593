"""The segment files of one namespace: opened when first needed, read and written at slots, never trusted.

All functions here but `read_cached` block; they run on worker threads. A file is known by its number in the index; a
change from outside (removed, truncated, replaced) shows as an OSError or a short read, which the caller counts as a
miss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from tidekv.backends.storage.file.ownership import is_own_directory, open_file
from tidekv.backends.storage.file.records import BLOCK_BYTES, HEADER_BYTES, Geometry, is_segment_of, pack_segment

# A slot is one int: the segment's number, and the index in the segment.
INDEX_BITS: Final = 20
SLOTS_PER_SEGMENT_MAX: Final = 1 << INDEX_BITS
SEGMENT_MAX: Final = 10**10 - 1
"""The highest number of a segment: ten digits in the name of its file."""
_NAMESPACE_NAME: Final = re.compile("[0-9a-f]{32}")
_SEGMENT_NAME: Final = re.compile(r"[0-9]{10}\.seg")
# Absent if the system has no reads that never wait; 0 disables them.
NO_WAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)


def slot_of(segment: int, index: int) -> int:
    """Return the slot of an index in a segment."""
    return segment << INDEX_BITS | index


def segment_of(slot: int) -> int:
    """Return the segment that a slot is in."""
    return slot >> INDEX_BITS


def index_of(slot: int) -> int:
    """Return a slot's index in its segment."""
    return slot & (SLOTS_PER_SEGMENT_MAX - 1)


def indices_of(slots: Sequence[int]) -> list[int]:
    """Return the indices of many slots in their segments."""
    return [slot & (SLOTS_PER_SEGMENT_MAX - 1) for slot in slots]


def namespace_directory(root: Path, namespace: bytes) -> Path:
    """Return the directory of a namespace's segments. The name is hexadecimal, whatever the namespace is."""
    return root / namespace.hex()[:32]


def segment_name(segment: int) -> str:
    """Return the name of a segment's file."""
    return f"{segment:010d}.seg"


def namespace_directories(root: Path) -> list[Path]:
    """Return the directories below a storage directory that have the name of a namespace's."""
    with os.scandir(root) as entries:
        return [Path(entry.path) for entry in entries if _NAMESPACE_NAME.fullmatch(entry.name)]


def segment_files(directory: Path) -> Iterator[tuple[int, Path]]:
    """Yield the number and the path of each file in a namespace's directory that has the name of a segment. None if the
    directory is missing, a link, or another user's.
    """
    if not is_own_directory(directory):
        return
    with os.scandir(directory) as entries:
        for entry in entries:
            if _SEGMENT_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                yield int(entry.name[:10]), Path(entry.path)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbors: entries [first, first + count) of a batch, whose slots are consecutive in one segment."""

    first: int
    count: int


def slot_runs(slots: Sequence[int]) -> list[Run]:
    """Cut a batch of slots into runs of neighbors, in batch order."""
    if not slots:
        return []
    # The common case first: numpy releases the interpreter at every step, and waits for it while threads read pages.
    if segment_of(slots[0]) == segment_of(slots[-1]) and list(slots) == list(range(slots[0], slots[0] + len(slots))):
        return [Run(0, len(slots))]
    # By numpy: a loop over many slots would keep the interpreter from the event loop.
    found = np.array(slots, np.int64)
    breaks = (found[1:] - found[:-1] != 1) | (found[1:] & (SLOTS_PER_SEGMENT_MAX - 1) == 0)
    firsts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(slots)]
    return [Run(first, end - first) for first, end in pairwise(firsts)]


NO_SPACE: Final = "no space"
"""The cause of a failed write for which the disk, or the user's quota of it, has no space."""


class ForeignFile(OSError):
    """A file with the name of a segment that belongs to another namespace or geometry."""


def miss_cause(error: OSError) -> str:
    """Return the cause of a miss for a failed read."""
    if isinstance(error, ForeignFile):
        return "foreign"
    return "missing" if isinstance(error, FileNotFoundError) else "unreadable"


def failure_cause(error: OSError) -> str:
    """Return the cause of a failure for a failed write."""
    return NO_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unwritable"


class Segments:
    """Open segment files by number. `file` may be called from any worker thread."""

    def __init__(self, directory: Path, geometry: Geometry) -> None:
        self.directory = directory
        self.geometry = geometry
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    def path(self, segment: int) -> Path:
        """Return the path of a segment's file."""
        return self.directory / segment_name(segment)

    def file(self, segment: int, *, create: bool) -> int:
        """Return the open file descriptor of a segment; it stays open until `close`.

        Raises OSError if the file is missing (with `create` it is made), ForeignFile if it is not a segment of this
        namespace and geometry.
        """
        with self._lock:
            found = self._files.get(segment)
            if found is None:
                found = self._files[segment] = self._open(segment, create=create)
            return found

    def read_headers(self, slots: Sequence[int]) -> bytes:
        """Read the headers of slots, concatenated; shorter if not all can be read."""
        parts: list[bytes] = []
        for run in slot_runs(slots):
            first = slots[run.first]
            try:
                file = self.file(segment_of(first), create=False)
                parts.append(os.pread(file, run.count * HEADER_BYTES, self.geometry.header_offset(index_of(first))))
            except OSError:
                continue
        return b"".join(parts)

    def write_headers(self, slots: Sequence[int], headers: bytes) -> None:
        """Write concatenated headers of slots; OSError if not all of them were written."""
        content = memoryview(headers)
        for run in slot_runs(slots):
            first = slots[run.first]
            write_all(
                self.file(segment_of(first), create=True),
                content[run.first * HEADER_BYTES : (run.first + run.count) * HEADER_BYTES],
                self.geometry.header_offset(index_of(first)),
            )

    def erase_headers(self, slots: Sequence[int]) -> None:
        """Clear the headers of slots, as far as the disk allows: only the rebuild of a lost index reads them."""
        for run in slot_runs(slots):
            first = slots[run.first]
            with contextlib.suppress(OSError):
                write_all(
                    self.file(segment_of(first), create=False),
                    memoryview(bytes(run.count * HEADER_BYTES)),
                    self.geometry.header_offset(index_of(first)),
                )

    def read_pages(self, first: int, pages: Sequence[memoryview]) -> bool:
        """Read neighboring slots of one segment, from slot `first` on, in one call. False if not all of it was read."""
        try:
            file = self.file(segment_of(first), create=False)
            wanted = len(pages) * self.geometry.page_bytes
            return os.preadv(file, pages, self.geometry.page_offset(index_of(first))) == wanted
        except OSError:
            return False

    def read_cached(self, first: int, pages: Sequence[memoryview]) -> bytes | None:
        """Read neighboring slots of one segment, from slot `first` on, if the kernel has them in memory; returns their
        headers, concatenated. None if they are not all there, which leaves garbage in the pages.

        The one method here that never waits, neither for the disk nor for a thread that opens a file. From any thread.
        """
        # Without the lock, which is held while files are opened: a look-up is atomic.
        file = self._files.get(segment_of(first))
        if file is None or not NO_WAIT:
            return None
        index, headers = index_of(first), bytearray(len(pages) * HEADER_BYTES)
        try:
            if os.preadv(file, [headers], self.geometry.header_offset(index), NO_WAIT) != len(headers):
                return None
            wanted = len(pages) * self.geometry.page_bytes
            if os.preadv(file, pages, self.geometry.page_offset(index), NO_WAIT) != wanted:
                return None
        except OSError:
            # Not in memory, or unknown to the file system: a blocking read decides.
            return None
        return bytes(headers)

    def write_pages(self, first: int, pages: Sequence[memoryview]) -> bool:
        """Write neighboring slots of one segment, from slot `first` on, in one call. False if not all of it was
        written.
        """
        try:
            file = self.file(segment_of(first), create=True)
            wanted = len(pages) * self.geometry.page_bytes
            return os.pwritev(file, pages, self.geometry.page_offset(index_of(first))) == wanted
        except OSError:
            return False

    def read_page(self, slot: int, part: memoryview, start: int = 0) -> str:
        """Read one page, or the part of it that begins at `start`; returns the cause of a miss, or an empty string."""
        offset, done = self.geometry.page_offset(index_of(slot)) + start, 0
        try:
            file = self.file(segment_of(slot), create=False)
            while done < len(part):
                count = os.preadv(file, [part[done:]], offset + done)
                if count == 0:
                    return "truncated"
                done += count
        except OSError as error:
            return miss_cause(error)
        return ""

    def write_page(self, slot: int, part: memoryview, start: int = 0) -> None:
        """Write one page, or the part of it that begins at `start`; OSError if not all of it was written."""
        write_all(self.file(segment_of(slot), create=True), part, self.geometry.page_offset(index_of(slot)) + start)

    def close_some(self, segments: Sequence[int]) -> None:
        """Close the files of some segments. Nothing may read or write them, or open them again."""
        with self._lock:
            for segment in segments:
                file = self._files.pop(segment, None)
                if file is not None:
                    os.close(file)

    def close(self) -> None:
        """Close every file. Nothing may read or write."""
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files.clear()

    def _open(self, segment: int, *, create: bool) -> int:
        path = self.path(segment)
        file = open_file(path, os.O_RDWR | (os.O_CREAT if create else 0))
        try:
            record = os.pread(file, BLOCK_BYTES, 0)
            if not record and create:
                # Two processes may do this at once; they write the same bytes.
                record = pack_segment(self.geometry)
                write_all(file, memoryview(record), 0)
                if os.fstat(file).st_size < self.geometry.segment_bytes:
                    os.ftruncate(file, self.geometry.segment_bytes)
            if is_segment_of(record, self.geometry):
                return file
            if create:
                # A foreign file, or a damaged one of ours: renamed, so that the name can be used again.
                path.rename(path.with_suffix(".bad"))
            raise ForeignFile(f"{path} is not a segment of this namespace and geometry")
        except BaseException:
            os.close(file)
            raise


def write_all(file: int, content: memoryview, offset: int) -> None:
    """Write all of `content`, in as many calls as it takes; OSError if that fails."""
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], offset + done)
