"""The recency of pages in the index of a directory: what is evicted first, and how many rows that costs."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from unittest.mock import Mock

import pytest

from tidekv.backends.storage.file.directory import Directory
from tidekv.backends.storage.file.index import PERIODS, FileIndex
from tidekv.backends.storage.file.options import FileOptions

PAGES = 1024


@pytest.fixture
def index(tmp_path: Path) -> FileIndex:
    """The index of a directory of PAGES pages, which are all stored."""
    root = tmp_path / "store"
    options = FileOptions(root=root, capacity=PAGES * 4224, segment=PAGES * 4224 // 8)
    directory = Directory(options, namespace=bytes(32), page_bytes=4096)
    put(directory.index, range(len(directory.index.reserve(PAGES))))
    return directory.index


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(index: FileIndex, numbers: range) -> int:
    """Store pages; return how many rows that has changed."""
    before = index._db.total_changes
    slots = list(index.mirror._owner_by_slot) or index.reserve(len(numbers))
    assert all(index.publish([(key(number), slot) for number, slot in zip(numbers, slots, strict=True)], []))
    return index._db.total_changes - before


def test_the_use_of_a_page_is_written_once_until_a_part_of_the_storage_is_new(index: FileIndex) -> None:
    held = len(index.mirror.slot_by_key)
    changed = []
    for number in range(20):
        index.touch(index.mirror.slot_by_key[key(page)] for page in range(held // 2))
        changed.append(put(index, range(held + number, held + number + 1)))
    assert changed[0] >= held // 2
    assert max(changed[1:]) < held // 4


def test_a_use_that_is_written_is_not_kept_again_in_its_period(index: FileIndex) -> None:
    held = len(index.mirror.slot_by_key)
    hot = [index.mirror.slot_by_key[key(page)] for page in range(held // 2)]
    index.touch(hot)
    index.note_touched()
    index.touch([*hot, index.mirror.slot_by_key[key(held - 1)]])
    assert list(index.touched) == [index.mirror.slot_by_key[key(held - 1)]]
    put(index, range(held, held + held // PERIODS))
    index.touched.clear()
    index.touch(hot)
    # The next change begins a period.
    assert list(index.touched) == hot


def test_a_use_whose_change_failed_is_kept_again(index: FileIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = [index.mirror.slot_by_key[key(page)] for page in range(8)]
    index.touch(hot)
    with monkeypatch.context() as patch:
        patch.setattr(index, "_total_bytes", Mock(side_effect=sqlite3.OperationalError("disk I/O error")))
        with pytest.raises(sqlite3.OperationalError):
            index.note_touched()
    index.touch(hot)
    assert list(index.touched) == hot
    index.note_touched()
    index.touch(hot)
    assert not index.touched


def test_pages_that_are_used_stay(index: FileIndex) -> None:
    held = len(index.mirror.slot_by_key)
    hot = range(0, held, 4)
    for number in range(held, 3 * held, 8):
        index.touch(index.mirror.slot_by_key[key(page)] for page in hot)
        put(index, range(number, number + 8))
        assert all(key(page) in index.mirror.slot_by_key for page in hot)
    assert key(1) not in index.mirror.slot_by_key
