"""The check of an index at its opening: every row is one that an engine writes, so that no value is trusted later.

What is in the database becomes paths, offsets and sizes of memory. A program that can write to the directory, or a disk
that returns other bytes, must not make a file elsewhere disappear, nor take all memory, nor end in an error of another
kind than damage. Which pages are whole is not checked here: each page is, when it is read.
"""

from __future__ import annotations

import functools
import sqlite3
from typing import Final

from tidekv.backends.storage.base import KEY_BYTES, PAGE_BYTES_MAX
from tidekv.backends.storage.file.records import Geometry
from tidekv.backends.storage.file.segments import INDEX_BITS, SEGMENT_MAX, SLOTS_PER_SEGMENT_MAX

_TICK_MAX: Final = 1 << 61
_WRITER_MAX: Final = 1 << 61
_NUMBERS: Final = {
    "tick_max": _TICK_MAX,
    "writer_max": _WRITER_MAX,
    "segment_max": SEGMENT_MAX,
    "slots_max": SLOTS_PER_SEGMENT_MAX,
    "page_bytes_max": PAGE_BYTES_MAX,
    "key_bytes": KEY_BYTES,
    "index_bits": INDEX_BITS,
}

_CLOCK: Final = "(SELECT value FROM clock)"
# By table: the rows, and the condition that each of them meets. A comparison with NULL is not true.
_CONDITIONS: Final = {
    "clock": ("clock", "typeof(value)='integer' AND value BETWEEN 0 AND :tick_max"),
    "namespaces": (
        "namespaces",
        "id BETWEEN 1 AND :writer_max AND typeof(digest)='blob' AND length(digest)=:key_bytes "
        "AND typeof(page_bytes)='integer' AND page_bytes BETWEEN 1 AND :page_bytes_max "
        "AND typeof(slots)='integer' AND slots BETWEEN 1 AND :slots_max",
    ),
    "segments": (
        "segments s LEFT JOIN namespaces n ON n.id=s.namespace",
        "s.id BETWEEN 1 AND :segment_max AND n.id IS NOT NULL AND s.slots=n.slots AND typeof(s.bytes)='integer' "
        f"AND s.retired IN (0, 1) AND typeof(s.seq)='integer' AND s.seq BETWEEN 0 AND {_CLOCK}",
    ),
    "slots": (
        "slots s LEFT JOIN segments g ON g.id=s.slot >> :index_bits",
        "s.slot > 0 AND g.retired=0 AND g.namespace=s.namespace AND (s.slot & :slots_max - 1) < g.slots "
        "AND typeof(s.owner)='integer' AND s.owner BETWEEN 0 AND :writer_max "
        f"AND typeof(s.seq)='integer' AND s.seq BETWEEN 0 AND {_CLOCK} "
        f"AND typeof(s.used)='integer' AND s.used BETWEEN 0 AND {_CLOCK} "
        "AND CASE s.state WHEN 0 THEN s.owner=0 AND s.key IS NULL WHEN 1 THEN s.owner>0 AND s.key IS NULL "
        "WHEN 2 THEN s.owner=0 AND typeof(s.key)='blob' AND length(s.key)=:key_bytes END",
    ),
    # In bytes: a length in characters and a comparison end at the first NUL.
    "writers": (
        "writers",
        "id BETWEEN 1 AND :writer_max AND typeof(name)='text' AND length(CAST(name AS BLOB))=32 "
        "AND name NOT GLOB '*[^0-9a-f]*'",
    ),
    # The next numbers of segments and writers: a segment of the highest number could not be added.
    "sqlite_sequence": (
        "sqlite_sequence",
        "typeof(seq)='integer' AND CASE name WHEN 'segments' THEN seq BETWEEN 0 AND :segment_max - 1000000 "
        "WHEN 'writers' THEN seq BETWEEN 0 AND :writer_max END",
    ),
}


def check_rows(db: sqlite3.Connection, tables: str) -> None:
    """Raise sqlite3.DatabaseError unless the index has exactly these tables, and only rows that an engine writes.

    `tables` are the statements that create an index. Reads all rows in one transaction; blocks.
    """
    db.execute("BEGIN")
    try:
        if _schema_of(db) != _expected(tables):
            raise sqlite3.DatabaseError("its tables are not those of an index")
        if db.execute("SELECT id FROM clock").fetchall() != [(0,)]:
            raise sqlite3.DatabaseError("it has no clock, or several")
        for table, (rows, condition) in _CONDITIONS.items():
            wrong = db.execute(f"SELECT 1 FROM {rows} WHERE ({condition}) IS NOT TRUE LIMIT 1", _NUMBERS).fetchone()
            if wrong:
                raise sqlite3.DatabaseError(f"a row of its table {table} is not one that an engine writes")
        sizes = db.execute(
            "SELECT DISTINCT n.digest, n.page_bytes, n.slots, s.bytes FROM segments s "
            "JOIN namespaces n ON n.id=s.namespace"
        )
        for digest, page_bytes, slots, segment_bytes in sizes:
            if Geometry(namespace=digest, page_bytes=page_bytes, slots=slots).segment_bytes != segment_bytes:
                raise sqlite3.DatabaseError("a segment has another size than its pages together")
    finally:
        db.execute("ROLLBACK")


def _schema_of(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    return db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name").fetchall()


@functools.cache
def _expected(tables: str) -> list[tuple[object, ...]]:
    db = sqlite3.connect(":memory:")
    try:
        db.executescript(tables)
        return _schema_of(db)
    finally:
        db.close()
