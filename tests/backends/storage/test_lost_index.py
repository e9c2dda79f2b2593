"""The index of a directory lost, damaged or foreign: contents are recovered from the segments, none of them wrong."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tidekv.backends.storage.file import records, segments
from tidekv.backends.storage.file.schema import connect
from tidekv.states.errors import StorageFailed
from tidekv.states.types import page_ids

# The rig of conftest.py, which test modules cannot import.
Rig = Any


@pytest.mark.parametrize("damage", ["removed", "removed with its log", "no database", "damaged inside"])
async def test_a_lost_index_is_made_again_from_the_segments(files: Rig, damage: str) -> None:
    engine = await files.open(chunk=4096)
    assert all(await files.put(engine, range(12)))
    await files.put(engine, [2], [b"new"])
    await engine.delete(files.keys([5]))
    other = await files.open(namespace=b"o" * 32)
    await files.put(other, [1, 2, 3])
    await other.close()
    await engine.close()
    index = files.root / "index.sqlite"
    if damage == "no database":
        index.write_bytes(b"not a database at all" * 1000)
    elif damage == "damaged inside":
        files.overwrite(index, 4096, os.urandom(index.stat().st_size - 4096))
    else:
        index.unlink()
    if damage == "removed":
        index.with_name("index.sqlite-wal").write_bytes(os.urandom(10_000))
    (segment,) = segments.namespace_directory(files.root, files.NAMESPACE).glob("*.seg")
    files.flip(segment, 4096 + 7 * records.HEADER_BYTES + 60)
    engine = await files.open()
    assert engine.statistics().pages == 10, "but for the one deleted and the one whose header is damaged"
    found = await engine.get_into(files.keys([2]), page_ids([9]), timeout_s=5)
    assert found == [True]
    assert files.pool.holds(9, b"new"), "what was replaced does not come back"
    numbers = [number for number in range(12) if number not in (2, 5, 7)]
    assert await files.get(engine, numbers) == [True] * 9
    assert await files.get(engine, [5, 7]) == [False] * 2
    other = await files.open(namespace=b"o" * 32)
    assert await files.get(other, [1, 2, 3, 4]) == [True] * 3 + [False]
    assert all(await files.put(engine, range(12)))
    assert all(await files.get(engine, range(12)))
    assert index.with_suffix(".bad").exists() == (not damage.startswith("removed"))


async def test_what_was_evicted_does_not_come_back_with_a_new_index(files: Rig) -> None:
    engine = await files.open(capacity=40 * 4096)
    for first in range(0, 80, 8):
        await files.put(engine, range(first, first + 8))
    there = await engine.exists(files.keys(range(80)), timeout_s=5)
    await engine.close()
    (files.root / "index.sqlite").unlink()
    engine = await files.open(capacity=40 * 4096)
    assert await engine.exists(files.keys(range(80)), timeout_s=5) == there
    assert engine.statistics().used_bytes <= 40 * 4096


async def test_an_index_older_than_its_segments_names_no_page_that_another_has_replaced(files: Rig) -> None:
    """Mooncake #3826: recovered records named ranges that a new allocator took for free, and read what came there."""
    capacity = 40 * 4096
    engine = await files.open(capacity=capacity)
    await files.put(engine, range(8))
    await engine.close()
    index = files.root / "index.sqlite"
    old = index.read_bytes()
    engine = await files.open(capacity=capacity)
    for first in range(100, 180, 8):
        await files.put(engine, range(first, first + 8))
    await engine.close()
    index.write_bytes(old)
    engine = await files.open(capacity=capacity)
    # The rig checks each page that is reported as present.
    assert sum(await files.get(engine, range(8))) < 8, "their places have other pages now"
    # What the old index takes for free is written again; both it and what was there before is right or gone.
    for first in range(200, 224, 8):
        assert all(await files.put(engine, range(first, first + 8)))
        assert all(await files.get(engine, range(first, first + 8)))
    for first in (0, *range(100, 180, 8)):
        await files.get(engine, range(first, first + 8))
    assert engine.statistics().used_bytes <= capacity


async def test_files_that_only_look_like_segments_make_no_index(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(4))
    await engine.close()
    segment = files.only_segment()
    elsewhere = files.root / ("ab" * 16)
    elsewhere.mkdir()
    (elsewhere / "0000000007.seg").write_bytes(segment.read_bytes())
    (segment.parent / "0000000008.seg").write_bytes(b"")
    (segment.parent / "0000000009.seg").write_bytes(os.urandom(9000))
    (segment.parent / "0000000010.seg").symlink_to(segment)
    (segment.parent / "holiday.seg").write_bytes(b"mine")
    (files.root / "index.sqlite").unlink()
    engine = await files.open()
    assert engine.statistics().pages == 4
    assert all(await files.get(engine, range(4)))
    assert (segment.parent / "holiday.seg").exists()


async def test_a_damaged_index_that_somebody_uses_is_refused(files: Rig) -> None:
    await files.open()
    (files.root / "index.sqlite").write_bytes(b"not a database at all" * 1000)
    with pytest.raises(StorageFailed, match="damaged"):
        await files.open()


def test_a_file_that_cannot_be_opened_as_an_index_is_closed_although_the_error_is_kept(tmp_path: Path) -> None:
    index = tmp_path / "index.sqlite"
    index.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(sqlite3.DatabaseError) as kept:
        connect(index, busy_timeout_s=1.0)
    open_files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert str(index) not in open_files, kept


async def test_an_index_of_another_version_is_refused(files: Rig) -> None:
    engine = await files.open()
    await engine.close()
    db = sqlite3.connect(files.root / "index.sqlite")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(StorageFailed, match="version 99"):
        await files.open()
