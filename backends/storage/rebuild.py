"""A lost index, made anew from what the segment files tell of themselves.

Each slot's header names its key, and is erased before the index forgets the page (see FileIndex), so what a header
names was there when the index was lost. Only who was used when is not known. Whether a page is whole is not asked here:
reading it does that.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tidekv.backends.storage.records import BLOCK_BYTES, HEADER_BYTES, Geometry, keys_in, unpack_segment
from tidekv.backends.storage.schema import connect
from tidekv.backends.storage.segments import SLOTS_PER_SEGMENT_MAX, namespace_directory, slot_of


def rebuild(path: Path, *, busy_timeout_s: float) -> int:
    """Fill a new index with the pages of the segment files beside it; returns how many. sqlite3.Error and OSError come
    out. Nobody else may be opening the directory meanwhile.

    A file that tells nothing believable is left out, and swept up like any other that the index does not know.
    """
    pages = 0
    taken: set[tuple[int, bytes]] = set()
    with contextlib.closing(connect(path, busy_timeout_s=busy_timeout_s)) as db:
        db.execute("BEGIN IMMEDIATE")
        # The newest first: of a key that is in two places, for a writer was killed just then, that one stays.
        for file in sorted(path.parent.glob("*/*.seg"), key=lambda file: file.name, reverse=True):
            segment = int(file.stem) if file.stem.isdigit() else 0
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
    """Return a segment's geometry and the key of each of its slots that has one; None if it tells nothing."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        geometry = unpack_segment(os.pread(file, BLOCK_BYTES, 0))
        if geometry is None or geometry.slots > SLOTS_PER_SEGMENT_MAX:
            return None
        if namespace_directory(path.parent.parent, geometry.namespace) != path.parent:
            return None
        return geometry, keys_in(os.pread(file, geometry.slots * HEADER_BYTES, geometry.header_offset(0)), geometry)
    except OSError:
        return None
    finally:
        os.close(file)
