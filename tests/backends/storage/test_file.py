"""The file engine against damage: whatever is cut, flipped, foreign, lost or full is a miss or a failed put."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidekv.backends.storage.file import index, records, segments
from tidekv.backends.storage.file.directory import Directory
from tidekv.states.errors import InvalidConfig, StorageFailed
from tidekv.states.types import page_ids

# The rig of conftest.py, which test modules cannot import.
Rig = Any


def geometry_of(rig: Rig, file: Path) -> records.Geometry:
    slots = int.from_bytes(file.read_bytes()[12:16], "little")
    return records.Geometry(namespace=rig.NAMESPACE, page_bytes=4096, slots=slots)


async def test_a_restarted_engine_finds_its_pages(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(20))
    await engine.close()
    again = await files.open()
    assert again.statistics().pages == 20
    assert await again.exists(files.keys([3, 99]), timeout_s=5) == [True, False]
    assert all(await files.get(again, range(20)))


async def test_a_large_directory_is_open_before_its_rows_are_read(files: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await files.open()
    await files.put(engine, range(20))
    await engine.close()
    monkeypatch.setattr(index, "READ_AT_OPENING_MAX", 0)
    monkeypatch.setattr(index, "ROWS_AT_ONCE", 3)
    may_read, refresh = threading.Event(), index.FileIndex.refresh

    def held(self: index.FileIndex) -> bool:
        assert may_read.wait(60)
        return refresh(self)

    monkeypatch.setattr(index.FileIndex, "refresh", held)
    again = await files.open()
    assert again.statistics().pages == 0
    assert await again.exists(files.keys([3]), timeout_s=0.01) == [False]
    may_read.set()
    assert await again.exists(files.keys([3, 99]), timeout_s=60) == [True, False]
    assert all(await files.get(again, range(20)))
    assert all(await files.put(again, range(20, 30)))
    assert again.statistics().pages == 30


async def test_a_batch_that_jumps_between_segments_is_moved_whole(files: Rig) -> None:
    engine = await files.open(capacity=64 * 4096)
    assert all(await files.put(engine, range(40)))
    assert len(files.segment_files()) > 3
    jumping = [number for near in range(20) for number in (near, near + 20)]
    assert all(await files.get(engine, jumping))
    assert all(await files.put(engine, jumping[::-1]))
    assert all(await files.get(engine, jumping))


async def test_what_a_crash_left_beside_the_index_is_swept_up(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(4))
    directory = files.only_segment().parent
    await engine.close()
    for name in ("0000000077.seg", "ab" * 16 + ".probe"):
        (directory / name).write_bytes(b"x" * 9000)
    # What only looks like ours stays: another name, or a directory that the index does not name.
    elsewhere, photos = files.root / ("cd" * 16), files.root / "photos"
    for path in (elsewhere, photos):
        path.mkdir()
        (path / "0000000077.seg").write_bytes(b"mine")
    for name in ("notes.txt", "mine.probe", "77.seg"):
        (directory / name).write_text("not ours")
    (files.root / "writers" / "mine.lock").write_text("not ours")
    engine = await files.open()
    assert {path.name for path in directory.iterdir()} == {"0000000001.seg", "notes.txt", "mine.probe", "77.seg"}
    assert all((path / "0000000077.seg").read_bytes() == b"mine" for path in (elsewhere, photos))
    assert (files.root / "writers" / "mine.lock").exists()
    assert all(await files.get(engine, range(4)))


async def test_a_flipped_bit_of_a_page_or_header_is_a_miss_and_can_be_put_again(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(6))
    file = files.only_segment()
    geometry = geometry_of(files, file)
    files.flip(file, geometry.page_offset(1))
    files.flip(file, geometry.page_offset(2) + 4095)
    files.flip(file, geometry.header_offset(3) + 40)
    assert await files.get(engine, range(6)) == [True, False, False, False, True, True]
    assert engine.statistics().misses == {"corrupt": 3}
    assert await engine.exists(files.keys(range(6)), timeout_s=5) == [True, False, False, False, True, True]
    assert all(await files.put(engine, range(6)))
    assert all(await files.get(engine, range(6)))


async def test_every_flipped_bit_of_a_header_is_noticed(files: Rig) -> None:
    geometry = records.Geometry(namespace=b"n" * 32, page_bytes=4096, slots=8)
    header = records.pack_headers(geometry, indices=[3], keys=[b"k" * 32], checksums=[b"c" * 16])
    used = len(header.rstrip(b"\0"))
    assert records.check_header(header, geometry, index=3, key=b"k" * 32, checksum=b"c" * 16) == ""
    for bit in range(used * 8):
        bad = bytearray(header)
        bad[bit // 8] ^= 1 << bit % 8
        assert records.check_header(bytes(bad), geometry, index=3, key=b"k" * 32, checksum=b"c" * 16) == "corrupt"


async def test_a_truncated_segment_loses_its_tail_only(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(6))
    file = files.only_segment()
    os.truncate(file, geometry_of(files, file).page_offset(3) + 100)
    assert await files.get(engine, range(6)) == [True] * 3 + [False] * 3
    assert engine.statistics().misses == {"truncated": 3}
    os.truncate(file, 100)
    assert await files.get(engine, range(3)) == [False] * 3
    assert all(await files.put(engine, range(6)))
    assert all(await files.get(engine, range(6)))


async def test_a_removed_segment_is_a_miss_for_who_opens_next(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(6))
    await engine.close()
    files.only_segment().unlink()
    engine = await files.open()
    assert await files.get(engine, range(6)) == [False] * 6
    assert engine.statistics().misses == {"missing": 6}
    assert all(await files.put(engine, range(6)))
    assert all(await files.get(engine, range(6)))


async def test_a_foreign_file_in_the_place_of_a_segment_is_kept_aside(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(6))
    await engine.close()
    file = files.only_segment()
    file.write_bytes(b"somebody's diary")
    engine = await files.open()
    assert await files.get(engine, range(6)) == [False] * 6
    assert engine.statistics().misses == {"foreign": 6}
    await files.put(engine, range(6))
    assert all(await files.put(engine, range(6)))
    assert all(await files.get(engine, range(6)))
    assert file.with_suffix(".bad").read_bytes() == b"somebody's diary"


async def test_a_page_of_another_key_in_the_slot_is_foreign(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, [0, 1])
    file = files.only_segment()
    geometry, raw = geometry_of(files, file), file.read_bytes()
    # Page 1 whole, with its header, in the place of page 0: right in itself, and not what was asked for.
    files.overwrite(file, geometry.page_offset(0), raw[geometry.page_offset(1) :][:4096])
    files.overwrite(file, geometry.header_offset(0), raw[geometry.header_offset(1) :][: records.HEADER_BYTES])
    assert await files.get(engine, [0, 1]) == [False, True]
    assert engine.statistics().misses == {"foreign": 1}


async def test_namespaces_never_meet_and_share_the_bound(files: Rig) -> None:
    capacity = 40 * 4096
    one = await files.open(capacity=capacity)
    other = await files.open(capacity=capacity, namespace=b"o" * 32)
    await files.put(one, range(10), [b"one"] * 10)
    assert await files.get(other, range(10)) == [False] * 10
    for first in range(0, 60, 10):
        assert all(await files.put(other, range(first, first + 10)))
        total = sum(file.stat().st_size for file in files.segment_files())
        assert total <= capacity
    await one.exists(files.keys([77]), timeout_s=5)
    assert one.statistics().pages == 0, "what nobody uses makes room for what somebody does"
    assert await files.get(one, range(10)) == [False] * 10
    assert all(await files.put(one, range(10)))
    assert all(await files.get(one, range(10)))


async def test_another_page_size_in_the_same_namespace_is_refused(files: Rig) -> None:
    await files.open()
    segment = files.pool.memory.segments[0]
    engine = files.make()
    smaller = type(files.pool).make(8, 2048)
    assert smaller.memory.segments[0].address != segment.address
    with pytest.raises(InvalidConfig, match="pages of 4096 bytes; the pool has 2048"):
        await engine.register(smaller.memory, smaller.page, namespace=files.NAMESPACE, poller=files.poller)


async def test_a_smaller_capacity_holds_at_once(files: Rig) -> None:
    engine = await files.open(capacity=80 * 4096)
    await files.put(engine, range(60))
    await engine.close()
    engine = await files.open(capacity=30 * 4096)
    assert sum(file.stat().st_size for file in files.segment_files()) <= 30 * 4096
    found = await files.get(engine, range(60))
    assert 0 < sum(found) == engine.statistics().pages <= 30


async def test_clearing_over_and_over_leaks_no_file(files: Rig) -> None:
    engine = await files.open(capacity=64 * 4096)
    await files.put(engine, range(40))
    await files.get(engine, range(40))
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert await engine.clear() == 40
        assert not files.segment_files()
        assert all(await files.put(engine, range(40)))
        assert all(await files.get(engine, range(40)))
    assert len(os.listdir("/proc/self/fd")) <= opened + 1


async def test_only_the_owner_may_read(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(3))
    await engine.probe()
    for path in [files.root, *files.root.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert all(path.parent == files.root or path.parent.parent == files.root for path in files.root.rglob("*"))


async def test_verify_tells_what_is_damaged(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(5))
    file = files.only_segment()
    geometry = geometry_of(files, file)
    files.flip(file, geometry.page_offset(1) + 7)
    os.truncate(file, geometry.page_offset(4))
    verdicts = {verdict.key: verdict async for verdict in engine.verify()}
    causes = [verdicts[key].cause for key in files.keys(range(5))]
    assert causes == ["", "corrupt", "", "", "truncated"]
    assert [verdicts[key].ok for key in files.keys(range(5))] == [True, False, True, True, False]


async def test_errors_of_the_disk_are_misses_and_failures(files: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await files.open()
    await files.put(engine, range(4))

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "pread", broken)
        patch.setattr(segments.os, "preadv", broken)
        patch.setattr(segments.os, "pwrite", broken)
        assert await files.get(engine, range(4)) == [False] * 4
        assert await files.put(engine, range(4, 8)) == [False] * 4
    misses, failures = engine.statistics().misses, engine.statistics().failures
    assert failures == {"unwritable": 4}
    assert sum(misses.values()) == 4
    assert all(await files.put(engine, range(8)))
    assert all(await files.get(engine, range(8)))
    # What failed gave its slots back.
    assert await engine.clear() == 8


async def test_an_index_that_fails_costs_hits_and_nothing_else(files: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await files.open(busy_timeout_s=0.0)
    await files.put(engine, range(4))
    blocker = sqlite3.connect(files.root / "index.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    assert await files.put(engine, range(4, 8)) == [False] * 4
    assert await files.get(engine, range(8)) == [True] * 4 + [False] * 4
    assert await engine.delete(files.keys([0])) == [False]
    with pytest.raises(StorageFailed, match="locked"):
        await engine.probe()
    with pytest.raises(StorageFailed, match="locked"):
        await engine.clear()
    blocker.execute("ROLLBACK")
    blocker.close()
    await engine.probe()
    assert all(await files.put(engine, range(8)))
    assert all(await files.get(engine, range(8)))


async def test_slots_of_a_put_that_could_not_be_published_are_not_lost(files: Rig) -> None:
    engine = await files.open(busy_timeout_s=0.0)
    blocker = sqlite3.connect(files.root / "index.sqlite", isolation_level=None)
    files.touched.clear()
    files.gate.clear()
    writing = asyncio.ensure_future(engine.put_from(files.keys(range(4)), page_ids(range(4)), timeout_s=30))
    await files.touched.wait()
    blocker.execute("BEGIN IMMEDIATE")
    files.gate.set()
    assert await writing == [False] * 4
    assert engine.statistics().failures == {"index busy": 4}
    blocker.execute("ROLLBACK")
    assert await files.put(engine, [9]) == [True]
    assert dict(blocker.execute("SELECT state, COUNT(*) FROM slots GROUP BY state")).get(1) is None
    blocker.close()


async def test_a_lost_directory_is_made_again_by_probe(files: Rig) -> None:
    engine = await files.open()
    await files.put(engine, range(4))
    shutil.rmtree(files.root)
    await files.put(engine, range(4, 8))
    await files.get(engine, range(8))
    await engine.probe()
    assert await files.get(engine, range(8)) == [False] * 8
    assert all(await files.put(engine, range(8)))
    assert all(await files.get(engine, range(8)))
    assert files.segment_files()


async def test_a_place_that_is_no_directory_is_refused(files: Rig) -> None:
    files.root.write_text("a file")
    with pytest.raises(StorageFailed, match="cannot be used"):
        await files.open()


@pytest.fixture(params=["1m"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte, or of the size that a test gives."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", where], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system needs the right to mount: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def remount(where: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", where], check=True)


def those(numbers: range, good: list[bool]) -> list[int]:
    return [number for number, is_good in zip(numbers, good, strict=True) if is_good]


@pytest.mark.parametrize("small_disk", ["8m"], indirect=True)
async def test_a_disk_that_is_full_below_the_capacity_keeps_the_newest_pages(files: Rig, small_disk: Path) -> None:
    files.root = small_disk / "store"
    engine = await files.open(capacity=64 << 20, segment=256 << 10)
    batches = [range(first, first + 60) for first in range(0, 6000, 60)]
    stored = [sum(await files.put(engine, batch)) for batch in batches]
    assert stored == [60] * len(batches), engine.statistics().failures
    found = [sum(await files.get(engine, batch)) for batch in batches]
    # The disk has place for a thousand pages beside the index. The oldest made room for the newest.
    assert 400 < sum(found) < 2048
    assert found[-5:] == [60] * 5 and sum(found[:50]) == 0
    await engine.probe()
    await engine.close()
    # A process that starts on a full disk serves what is there, and stores more.
    fill(small_disk / "filler")
    engine = await files.open(capacity=64 << 20, segment=256 << 10)
    assert engine.statistics().pages > 300
    assert all(await files.put(engine, range(9000, 9020)))
    assert all(await files.get(engine, range(9000, 9020)))


async def test_a_disk_with_no_page_to_give_up_fails_puts(files: Rig, small_disk: Path) -> None:
    files.root = small_disk / "store"
    engine = await files.open(capacity=8 << 20)
    fill(small_disk / "filler")
    assert await files.put(engine, range(4)) == [False] * 4
    with pytest.raises(StorageFailed, match="cannot be used"):
        await engine.probe()
    (small_disk / "filler").unlink()
    await engine.probe()
    assert all(await files.put(engine, range(4)))


def fill(filler: Path) -> None:
    """Leave no byte of a disk."""
    size = 1 << 20
    with filler.open("wb", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


async def test_a_read_only_disk_is_refused(files: Rig, small_disk: Path) -> None:
    remount(small_disk, "ro")
    files.root = small_disk / "store"
    with pytest.raises(StorageFailed, match="Read-only file system"):
        await files.open()
    remount(small_disk, "rw")
    engine = await files.open()
    assert all(await files.put(engine, [1]))


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_second_close_waits_for_the_first(files: Rig, monkeypatch: pytest.MonkeyPatch, cancelled: bool) -> None:
    engine = await files.open()
    await files.put(engine, range(3))
    loop, begun, gate = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    real = Directory.close

    def slow(directory: Directory) -> None:
        loop.call_soon_threadsafe(begun.set)
        gate.wait()
        real(directory)

    monkeypatch.setattr(Directory, "close", slow)
    first = asyncio.create_task(engine.close())
    await begun.wait()
    if cancelled:
        first.cancel()
        await asyncio.wait([first])
    second = asyncio.create_task(engine.close())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    gate.set()
    await second
    await asyncio.wait([first])
    assert first.cancelled() == cancelled
    await engine.close()
    assert not list((files.root / "writers").iterdir())


async def test_closing_waits_for_no_lock_that_another_process_has_on_the_index(files: Rig) -> None:
    engine = await files.open(busy_timeout_s=60)
    await files.put(engine, range(2))
    other = sqlite3.connect(files.root / "index.sqlite", isolation_level=None)
    with contextlib.closing(other):
        other.execute("BEGIN IMMEDIATE")
        putting = asyncio.create_task(files.put(engine, range(2, 6)))
        await asyncio.sleep(0)
        assert engine.statistics().calls_in_flight == 1
        # Far less than the 60 s that a change of the index may wait, and there are two: of the put, and of the end.
        async with asyncio.timeout(40):
            await engine.close()
        assert await putting == [False] * 4
    again = await files.open()
    assert await files.get(again, range(6)) == [True] * 2 + [False] * 4
