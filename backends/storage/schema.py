"""The tables of a directory's index, how it is opened, and what happens to one that cannot be read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tidekv.backends.storage.records import Geometry
from tidekv.backends.storage.segments import FILE_MODE
from tidekv.states.errors import InvalidConfig, StorageFailed

SCHEMA_VERSION: Final = 1
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


def connect(path: Path, *, busy_timeout_s: float) -> sqlite3.Connection:
    """Open an index for one thread. Whoever commits does not wait for the disk: pages prove themselves."""
    # Transactions are written out, hence no isolation level of the module's own.
    db = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    return db


@contextlib.contextmanager
def opening(root: Path, *, timeout_s: float) -> Iterator[None]:
    """Keep every other process from opening, creating or repairing the directory meanwhile.

    StorageFailed if another process does that for longer than the timeout. Blocks; the kernel drops the lock with the
    process.
    """
    file = os.open(root / "open.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
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
    """Make the tables if they are not there; True if they were not. sqlite3.DatabaseError if the file is damaged;
    StorageFailed if it is of another version.
    """
    if not path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    with contextlib.closing(connect(path, busy_timeout_s=busy_timeout_s)) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise StorageFailed(
                f"{path} is of version {version}, this is version {SCHEMA_VERSION}; use another directory"
            )
        db.execute("SELECT value FROM clock").fetchone()
        return bool(version == 0)


def set_aside(path: Path) -> None:
    """Move a damaged index out of the way; nobody may have it open."""
    path.replace(path.with_suffix(".bad"))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def join_namespace(path: Path, wanted: Geometry, *, busy_timeout_s: float) -> tuple[int, Geometry]:
    """Return the number and the geometry of a namespace. Who comes first fixes how many slots its segments have."""
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
