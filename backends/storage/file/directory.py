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

from tidekv.backends.storage.file.index import INDEX_FILE, FileIndex, SpaceLimits, cut_file
from tidekv.backends.storage.file.options import FileOptions
from tidekv.backends.storage.file.ownership import is_own_directory, make_directory, make_root, open_file
from tidekv.backends.storage.file.records import BLOCK_BYTES, HEADER_BYTES, Geometry
from tidekv.backends.storage.file.schema import connect, join_namespace, opening, prepare, rebuild, set_aside
from tidekv.backends.storage.file.segments import (
    NO_SPACE,
    SLOTS_PER_SEGMENT_MAX,
    Segments,
    failure_cause,
    namespace_directories,
    namespace_directory,
    segment_files,
    write_all,
)
from tidekv.backends.storage.file.writer_locks import WRITER_NAME, WriterLock
from tidekv.states.errors import InvalidConfig, StorageFailed, cause_of

_DAMAGE: Final = frozenset(
    [
        *(sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT),
        *(sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_TOOBIG),
    ]
)
_PROBE_SUFFIX: Final = ".probe"
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
            make_root(root)
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
        """Change the index, write a file as long as a page and read it; raises what fails.

        A disk that is full is good enough if there are pages that others can replace.
        """
        self.index.with_room(self.index.note_touched)
        path = self.segments.directory / (self._writer.name + _PROBE_SUFFIX)
        content = os.urandom(BLOCK_BYTES) * -(-self.segments.geometry.page_bytes // BLOCK_BYTES)
        file = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            write_all(file, memoryview(content), 0)
            if os.pread(file, len(content), 0) != content:
                raise OSError(f"{path} does not hold what was written")
        except OSError as error:
            if failure_cause(error) != NO_SPACE or not self.index.mirror.slot_by_key:
                raise
            self.index.note_disk_full()
        finally:
            os.close(file)
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
        except sqlite3.DatabaseError as error:
            # Every other code means that the file cannot be used now. Of a header that is damaged SQLite says no more
            # than that there is an error.
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF not in _DAMAGE:
                raise
            if not self._writer.alone():
                raise StorageFailed(
                    f"{path} is damaged ({error}); stop every process that uses it, then start again"
                ) from error
            set_aside(path)
            return self._open_index(path, wanted)

    def _open_index(self, path: Path, wanted: Geometry) -> tuple[FileIndex, Segments]:
        options = self.options
        self._leave_room()
        if prepare(path, busy_timeout_s=options.busy_timeout_s):
            rebuild(path, busy_timeout_s=options.busy_timeout_s)
        number, geometry = join_namespace(path, wanted, busy_timeout_s=options.busy_timeout_s)
        if geometry.segment_bytes > options.capacity:
            raise InvalidConfig(
                f"capacity {options.capacity} of {options.root} holds no segment of {geometry.segment_bytes} bytes"
            )
        directory = namespace_directory(options.root, geometry.namespace)
        make_directory(directory)
        self._sweep(path)
        segments = Segments(directory, geometry)
        index = FileIndex(
            options.root,
            namespace_id=number,
            geometry=geometry,
            limits=SpaceLimits(options.capacity, options.low_water),
            writer=self._writer,
            busy_timeout_s=options.busy_timeout_s,
            erase=segments.erase_headers,
        )
        return index, segments

    def _leave_room(self) -> None:
        """On a disk without a free byte, cut the segment that was written first: SQLite could not open the index, and
        nothing would be served. Its pages are misses.
        """
        if os.statvfs(self.options.root).f_bavail or not self._writer.alone():
            return
        files = [file for each in namespace_directories(self.options.root) for _, file in segment_files(each)]
        for file in sorted(files, key=lambda file: file.stat().st_mtime):
            if cut_file(file):
                return

    def _sweep(self, path: Path) -> None:
        """Remove segment and probe files that the index does not know: they would not count against the capacity.

        Only in directories of namespaces that the index names: everything else below the root is not ours.
        """
        # Listed before the index is read: a segment is in the index before its file is made.
        found = {directory: list(segment_files(directory)) for directory in namespace_directories(self.options.root)}
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
            named = {
                namespace_directory(self.options.root, digest)
                for (digest,) in db.execute("SELECT digest FROM namespaces")
            }
            writers = {name for (name,) in db.execute("SELECT name FROM writers")}
        finally:
            db.close()
        self._writer.forget_strangers(writers)
        for directory in named & found.keys():
            for segment, file in found[directory]:
                if (directory, segment) not in known:
                    file.unlink(missing_ok=True)
            if alone and is_own_directory(directory):
                for file in directory.glob("*" + _PROBE_SUFFIX):
                    if WRITER_NAME.fullmatch(file.stem):
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
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
