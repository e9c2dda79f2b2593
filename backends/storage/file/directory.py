"""A directory of pages as one engine has it open: lock, index and segments, opened and closed together.

root/                     0700
  index.sqlite            which key is in which slot (with -wal and -shm beside it)
  tick                    the newest change of the index
  open.lock, writers/     locks of living writers
  <namespace>/…seg        the pages
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

from tidekv.backends.storage.file.index import INDEX_FILE, FileIndex
from tidekv.backends.storage.file.options import FileOptions
from tidekv.backends.storage.file.records import BLOCK_BYTES, HEADER_BYTES, Geometry
from tidekv.backends.storage.file.schema import connect, join_namespace, opening, prepare, rebuild, set_aside
from tidekv.backends.storage.file.segments import DIRECTORY_MODE, SLOTS_PER_SEGMENT_MAX, Segments, namespace_directory
from tidekv.backends.storage.file.writer_locks import WriterLock
from tidekv.states.errors import InvalidConfig, StorageFailed, cause_of

# Minimum number of segments of a directory, so that retiring one does not empty it.
_SEGMENTS_MIN: Final = 8
# Approximate maximum number of segments, since each is an open file.
_SEGMENTS_MAX: Final = 256


class Directory:
    """An open directory. Everything blocks; `index` belongs to one thread."""

    def __init__(self, options: FileOptions, *, namespace: bytes, page_bytes: int) -> None:
        """Open or create the directory. InvalidConfig if no page fits; StorageFailed if it cannot be used."""
        self.options = options
        root = options.root
        wanted = _geometry(options, namespace=namespace, page_bytes=page_bytes)
        try:
            root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            with opening(root, timeout_s=options.busy_timeout_s):
                self._writer = WriterLock(root)
                try:
                    self.index, self.segments = self._open(wanted)
                except BaseException:
                    self._writer.close()
                    raise
        except (OSError, sqlite3.Error) as error:
            raise StorageFailed(f"storage directory {root} cannot be used: {cause_of(error)}") from error
        self._identity = _identity(root / INDEX_FILE)

    def is_lost(self) -> bool:
        """True if the path no longer holds the directory that was opened."""
        return _identity(self.options.root / INDEX_FILE) != self._identity

    def try_out(self) -> None:
        """Change the index, write a file as long as a page and read it; raises what fails."""
        self.index.note_touched()
        path = self.segments.directory / f"{self._writer.name}.probe"
        content = os.urandom(BLOCK_BYTES) * -(-self.segments.geometry.page_bytes // BLOCK_BYTES)
        try:
            path.write_bytes(content)
            if path.read_bytes() != content:
                raise OSError(f"{path} does not hold what was written")
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close everything. Nothing may be reading or writing."""
        self.index.close()
        self.segments.close()
        self._writer.close()

    def _open(self, wanted: Geometry) -> tuple[FileIndex, Segments]:
        path = self.options.root / INDEX_FILE
        try:
            return self._open_index(path, wanted)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            if not self._writer.alone():
                raise StorageFailed(
                    f"{path} is damaged ({error}); stop every process that uses it, then start again"
                ) from error
            set_aside(path)
            return self._open_index(path, wanted)

    def _open_index(self, path: Path, wanted: Geometry) -> tuple[FileIndex, Segments]:
        options = self.options
        if prepare(path, busy_timeout_s=options.busy_timeout_s):
            rebuild(path, busy_timeout_s=options.busy_timeout_s)
        number, geometry = join_namespace(path, wanted, busy_timeout_s=options.busy_timeout_s)
        if geometry.segment_bytes > options.capacity:
            raise InvalidConfig(
                f"capacity {options.capacity} of {options.root} holds no segment of {geometry.segment_bytes} bytes"
            )
        directory = namespace_directory(options.root, geometry.namespace)
        directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        self._sweep(path)
        segments = Segments(directory, geometry)
        index = FileIndex(
            options.root,
            namespace_id=number,
            geometry=geometry,
            capacity_bytes=options.capacity,
            low_water=options.low_water,
            writer=self._writer,
            busy_timeout_s=options.busy_timeout_s,
            erase=segments.erase_headers,
        )
        return index, segments

    def _sweep(self, path: Path) -> None:
        """Remove segment and probe files that the index does not know: they would not count against the capacity."""
        # Listed before the index is read: a segment is in the index before its file is made.
        found = [file for file in self.options.root.glob("*/*.seg") if file.stem.isdigit()]
        alone = self._writer.alone()
        db = connect(path, busy_timeout_s=self.options.busy_timeout_s)
        try:
            if alone:
                # Kept until now for processes that had not read of it yet.
                db.execute("DELETE FROM segments WHERE retired=1")
            known = {
                (namespace_directory(self.options.root, digest), segment)
                for digest, segment in db.execute(
                    "SELECT n.digest, s.id FROM segments s JOIN namespaces n ON n.id=s.namespace WHERE s.retired=0"
                )
            }
            writers = {name for (name,) in db.execute("SELECT name FROM writers")}
        finally:
            db.close()
        self._writer.forget_strangers(writers)
        for file in found:
            if (file.parent, int(file.stem)) not in known:
                file.unlink(missing_ok=True)
        if alone:
            for file in self.options.root.glob("*/*.probe"):
                file.unlink(missing_ok=True)


def _geometry(options: FileOptions, *, namespace: bytes, page_bytes: int) -> Geometry:
    """Choose segments of about the wanted size, small enough that several fit."""
    target_bytes = min(max(options.segment, options.capacity // _SEGMENTS_MAX), options.capacity // _SEGMENTS_MIN)
    slots = (target_bytes - 2 * BLOCK_BYTES) // (page_bytes + HEADER_BYTES)
    geometry = Geometry(namespace=namespace, page_bytes=page_bytes, slots=min(max(slots, 1), SLOTS_PER_SEGMENT_MAX))
    if geometry.segment_bytes > options.capacity:
        raise InvalidConfig(
            f"capacity {options.capacity} holds no page of {page_bytes} bytes; {geometry.segment_bytes} is the least"
        )
    return geometry


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
