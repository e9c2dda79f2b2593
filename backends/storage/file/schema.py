"""The database of a directory's index: its tables, opening and locking it, listing it, and rebuilding a lost one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tidekv.backends.storage.base import PAGE_BYTES_MAX, Holding
from tidekv.backends.storage.file.ownership import check_file, check_root, open_file, read_start
from tidekv.backends.storage.file.records import BLOCK_BYTES, HEADER_BYTES, Geometry, keys_in, unpack_segment
from tidekv.backends.storage.file.row_checks import check_rows
from tidekv.backends.storage.file.segments import (
    SLOTS_PER_SEGMENT_MAX,
    namespace_directories,
    namespace_directory,
    segment_files,
    slot_of,
    write_all,
)
from tidekv.backends.storage.label import LABEL_BYTES_MAX
from tidekv.states.errors import InvalidConfig, StorageFailed, cause_of

SCHEMA_VERSION: Final = 1
LABEL_NAME: Final = "label.json"
_LOCK_PAUSE_S: Final = 0.005

_TABLES: Final = """
CREATE TABLE clock(id INTEGER PRIMARY KEY CHECK(id = 0), value INTEGER NOT NULL);
INSERT INTO clock VALUES(0, 0);
CREATE TABLE namespaces(
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, page_bytes INTEGER NOT NULL, slots INTEGER NOT NULL);
CREATE TABLE segments(
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL, slots INTEGER NOT NULL, bytes INTEGER NOT NULL,
    retired INTEGER NOT NULL, seq INTEGER NOT NULL);
CREATE TABLE slots(
    slot INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, state INTEGER NOT NULL, owner INTEGER NOT NULL,
    seq INTEGER NOT NULL, used INTEGER NOT NULL, key BLOB);
CREATE INDEX slots_by_change ON slots(namespace, seq);
CREATE TABLE writers(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE);
"""


class _Connection(sqlite3.Connection):
    """A connection whose every failure is a sqlite3.Error.

    SQLite's messages quote the file, for example names of tables. If these bytes are no text, the module raises a
    UnicodeDecodeError in the error's place.
    """

    def execute(self, *args: Any) -> sqlite3.Cursor:  # As those of the method.
        with _no_text_is_damage():
            return super().execute(*args)

    def executescript(self, *args: Any) -> sqlite3.Cursor:
        with _no_text_is_damage():
            return super().executescript(*args)


@contextlib.contextmanager
def _no_text_is_damage() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError("an error about it quotes bytes that are no text") from error


def connect(path: Path, *, busy_timeout_s: float) -> sqlite3.Connection:
    """Open an index for one thread. A commit does not wait for the disk: pages are verified when they are read."""
    # Transactions are explicit, hence no isolation level of the module's own.
    db = sqlite3.connect(
        path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False, factory=_Connection
    )
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
    except BaseException:
        # The traceback keeps the connection, and with it the file, for as long as the caller keeps the error.
        db.close()
        raise
    return db


@contextlib.contextmanager
def opening(root: Path, *, timeout_s: float) -> Iterator[None]:
    """Keep every other process from opening, creating or repairing the directory.

    Raises StorageFailed if another process does that for longer than the timeout. Blocks; the kernel drops the lock
    with the process.
    """
    file = open_file(root / "open.lock", os.O_RDWR | os.O_CREAT)
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise StorageFailed(f"{root}: another process has been opening it for {timeout_s} s") from None
                time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(file)


def prepare(path: Path, *, busy_timeout_s: float) -> bool:
    """Create the tables if they are missing; True if they were. Raises sqlite3.DatabaseError if the file is damaged,
    StorageFailed if it is of another version, OSError if it is a link or another user's.
    """
    if not os.path.lexists(path):
        os.close(open_file(path, os.O_RDWR | os.O_CREAT))
    check_file(path)
    with contextlib.closing(connect(path, busy_timeout_s=busy_timeout_s)) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise StorageFailed(
                f"{path} is of version {version}, this is version {SCHEMA_VERSION}; use another directory"
            )
        check_rows(db, _TABLES)
        return bool(version == 0)


def set_aside(path: Path) -> None:
    """Move a damaged index out of the way; no process may have it open."""
    path.replace(path.with_suffix(".bad"))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def join_namespace(path: Path, wanted: Geometry, *, busy_timeout_s: float) -> tuple[int, Geometry]:
    """Return the number and the geometry of a namespace. The first process fixes how many slots its segments have."""
    with contextlib.closing(connect(path, busy_timeout_s=busy_timeout_s)) as db:
        db.execute(
            "INSERT INTO namespaces(digest, page_bytes, slots) VALUES(?, ?, ?) ON CONFLICT DO NOTHING",
            (wanted.namespace, wanted.page_bytes, wanted.slots),
        )
        number, page_bytes, slots = db.execute(
            "SELECT id, page_bytes, slots FROM namespaces WHERE digest=?", (wanted.namespace,)
        ).fetchone()
    if page_bytes != wanted.page_bytes:
        raise InvalidConfig(
            f"{path.parent} holds this namespace with pages of {page_bytes} bytes; the pool has {wanted.page_bytes}"
        )
    return int(number), Geometry(namespace=wanted.namespace, page_bytes=page_bytes, slots=slots)


def file_holdings(root: Path) -> list[Holding]:
    """Return the namespaces of a directory of the `file:` engine. Blocks, and changes nothing."""
    path = root / "index.sqlite"
    with contextlib.suppress(OSError):
        check_root(root)
    if not path.is_file():
        raise StorageFailed(
            f"{root} is not a storage directory: it has no index.sqlite; an engine that serves from it creates one"
        )
    try:
        with _reading(path) as db:
            check_rows(db, _TABLES)
            rows = db.execute(
                "SELECT n.digest, n.page_bytes, (SELECT COUNT(*) FROM slots s WHERE s.namespace=n.id AND s.state=2) "
                "FROM namespaces n ORDER BY n.digest"
            ).fetchall()
    except (OSError, sqlite3.Error) as error:
        raise StorageFailed(f"{path} cannot be read: {cause_of(error)}") from error
    return [_holding(root, *row) for row in rows]


def file_namespaces(root: Path) -> set[bytes]:
    """Return the digests of the namespaces of a directory. Blocks, and changes nothing. Raises StorageFailed."""
    path = root / "index.sqlite"
    try:
        with _reading(path) as db:
            return {digest for (digest,) in db.execute("SELECT digest FROM namespaces") if isinstance(digest, bytes)}
    except (OSError, sqlite3.Error) as error:
        raise StorageFailed(f"{path} cannot be read: {cause_of(error)}") from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an index to read it only."""
    check_file(path)
    with contextlib.closing(
        sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, factory=_Connection)
    ) as db:
        yield db


def _holding(root: Path, digest: bytes, page_bytes: int, pages: int) -> Holding:
    directory = namespace_directory(root, digest)
    label, times = b"", []
    # An engine at work may remove a segment between its listing and its stat.
    with contextlib.suppress(OSError):
        # One byte more than a label has shows that it is none.
        label = read_start(directory / LABEL_NAME, LABEL_BYTES_MAX + 1)
    for _, file in segment_files(directory):
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    written_s = (min(times), max(times)) if times and pages else None
    return Holding(namespace=digest, page_bytes=page_bytes, pages=pages, label=label, written_s=written_s)


def write_label(directory: Path, label: bytes) -> None:
    """Store the label of a namespace in its directory, unless there is one. Raises StorageFailed. Blocks."""
    target = directory / LABEL_NAME
    if os.path.lexists(target):
        return
    # Renamed into place, so that no reader sees a part of it. Engines that do this at once write the same.
    part = target.with_suffix(f".{os.getpid()}-{threading.get_native_id()}")
    try:
        file = open_file(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(file, memoryview(label), 0)
        finally:
            os.close(file)
        part.replace(target)
    except OSError as error:
        raise StorageFailed(f"{target} cannot be written: {cause_of(error)}") from error


def rebuild(path: Path, *, busy_timeout_s: float) -> int:
    """Fill a new index with the pages of the segment files beside it; returns how many.

    Each slot's header names its key and is erased before the index forgets the page (see FileIndex), so a key in a
    header was there when the index was lost. Only the order of use is lost. Whether a page is whole is not checked
    here: reading it does that. A file without a valid record is left out, and swept up like any other that the index
    does not know. Raises sqlite3.Error and OSError. No other process may open the directory meanwhile.
    """
    pages = 0
    taken: set[tuple[int, bytes]] = set()
    with contextlib.closing(connect(path, busy_timeout_s=busy_timeout_s)) as db:
        db.execute("BEGIN IMMEDIATE")
        # The newest first: if a writer was killed while it replaced a page, its key is in two places, and the newer one
        # stays.
        found = [file for directory in namespace_directories(path.parent) for file in segment_files(directory)]
        for segment, file in sorted(found, reverse=True):
            read = _read(file) if segment else None
            if read is None:
                continue
            geometry, keys = read
            db.execute(
                "INSERT INTO namespaces(digest, page_bytes, slots) VALUES(?, ?, ?) ON CONFLICT DO NOTHING",
                (geometry.namespace, geometry.page_bytes, geometry.slots),
            )
            number, *cut = db.execute(
                "SELECT id, page_bytes, slots FROM namespaces WHERE digest=?", (geometry.namespace,)
            ).fetchone()
            if cut != [geometry.page_bytes, geometry.slots]:
                continue
            known = db.execute(
                "INSERT INTO segments(id, namespace, slots, bytes, retired, seq) VALUES(?, ?, ?, ?, 0, 1) "
                "ON CONFLICT DO NOTHING",
                (segment, number, geometry.slots, geometry.segment_bytes),
            )
            if not known.rowcount:
                continue
            rows = [(slot_of(segment, index), number, key) for index, key in keys.items() if (number, key) not in taken]
            taken.update((number, key) for _, _, key in rows)
            db.executemany(
                "INSERT INTO slots(slot, namespace, state, owner, seq, used, key) VALUES(?, ?, 2, 0, 1, 1, ?)", rows
            )
            pages += len(rows)
        db.execute("UPDATE clock SET value=1")
        db.execute("COMMIT")
    return pages


def _read(path: Path) -> tuple[Geometry, dict[int, bytes]] | None:
    """Return a segment's geometry and the key of each slot that has one; None if the file is not usable."""
    try:
        file = open_file(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        geometry = unpack_segment(os.pread(file, BLOCK_BYTES, 0))
        if geometry is None or geometry.slots > SLOTS_PER_SEGMENT_MAX or geometry.page_bytes > PAGE_BYTES_MAX:
            return None
        if namespace_directory(path.parent.parent, geometry.namespace) != path.parent:
            return None
        return geometry, keys_in(os.pread(file, geometry.slots * HEADER_BYTES, geometry.header_offset(0)), geometry)
    except OSError:
        return None
    finally:
        os.close(file)
