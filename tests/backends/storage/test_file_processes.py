"""The file engine with several engines and processes on one directory, some of which die at any moment."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.inside import file_store_of
from tidekv.states.types import page_ids

# The rig of conftest.py, which test modules cannot import.
Rig = Any

PAGE_BYTES = 4096
# benchmarks/storage_kills.py does many more, and kills readers, too.
KILLS = int(os.environ.get("TIDEKV_STORAGE_KILLS", "12"))

# A process that keeps forking writers and killing them, each after it has reported some batches. Forked from a process
# that has no threads, because importing everything again for each of them would take most of the time.
SCRIPT = """
import asyncio, hashlib, os, random, signal, sys
import numpy as np
from tidekv.backends.storage import open_storage
from tidekv.states.types import PoolMemory, Segment, page_ids

root, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
PAGE, PAGES = 4096, 16

def key_of(number):
    return hashlib.sha256(number.to_bytes(8, "little")).digest()

def content_of(number):
    seed = int.from_bytes(key_of(number)[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, PAGE, np.uint8)

async def write(child, out, batches):
    chooser = random.Random(child)
    array = np.zeros((PAGES, PAGE), np.uint8)
    segment = Segment(address=array.ctypes.data, piece_bytes=PAGE, stride_bytes=PAGE, page_count=PAGES)
    pool = PoolMemory(segments=(segment,), page_count=PAGES)
    engine = open_storage(f"file:{root}?io=threads&capacity={60 * PAGE}&chunk={4 * PAGE}")
    await engine.register(pool, lambda page: memoryview(array[page]), namespace=b"n" * 32, poller=None)
    for _ in range(batches):
        numbers = [chooser.randrange(100) for _ in range(PAGES)]
        for page, number in enumerate(numbers):
            array[page] = content_of(number)
        await engine.put_from([key_of(number) for number in numbers], page_ids(range(PAGES)), timeout_s=30)
        os.write(out, b".")
    await engine.close()

chooser = random.Random(seed)
for child in range(kills):
    inside, outside = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(write(seed * 1000 + child, outside, 200))
        finally:
            os._exit(0)
    os.close(outside)
    for _ in range(chooser.randrange(1, 6)):
        os.read(inside, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(inside)
    os.write(1, b"k")
"""


async def start(root: Path, *, kills: int, seed: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, str(root), str(kills), str(seed), stdout=asyncio.subprocess.PIPE
    )


def states(root: Path) -> dict[int, int]:
    """Count slots by state in the index."""
    db = sqlite3.connect(root / "index.sqlite")
    try:
        return dict(db.execute("SELECT state, COUNT(*) FROM slots GROUP BY state"))
    finally:
        db.close()


# Importing takes the child longer than its work; once is enough.
@pytest.mark.nixl
@pytest.mark.parametrize("files", ["file-nixl"], indirect=True)
async def test_writers_killed_at_any_moment_leave_no_wrong_byte_and_no_lost_room(files: Rig) -> None:
    capacity = 60 * PAGE_BYTES
    engine = await files.open(capacity=capacity)
    children = [await start(files.root, kills=KILLS // 2, seed=seed) for seed in (1, 2)]
    found_of_others = 0
    killed = 0
    for child in children:
        assert child.stdout is not None
        while await child.stdout.read(1):
            killed += 1
            await files.put(engine, range(killed, killed + 4))
            # The rig checks each page that is reported as present.
            found_of_others += sum(await files.get(engine, range(30 + killed % 2, 100, 2)))
            assert sum(file.stat().st_size for file in files.root.glob("*/*.seg")) <= capacity
        assert await child.wait() == 0
    assert killed == KILLS // 2 * 2
    assert found_of_others > 0
    await engine.close()
    again = await files.open(capacity=capacity)
    assert not states(files.root).get(1), "what the dead had reserved is free"
    found = await files.get(again, range(64))
    assert all([verdict.ok async for verdict in again.verify()])
    # Every slot can be written: the whole store is ours.
    assert await again.clear() >= sum(found)
    assert all(await files.put(again, range(40)))
    assert all(await files.get(again, range(40)))
    assert len(list((files.root / "writers").iterdir())) == 1


async def test_locks_of_those_who_died_while_they_opened_are_removed(files: Rig) -> None:
    engine = await files.open(capacity=40 * PAGE_BYTES)
    stranger = files.root / "writers" / f"{'0' * 32}.lock"
    stranger.touch()
    other_rig = type(files)(files.kind, files.root, files.poller)
    other = await other_rig.open(capacity=40 * PAGE_BYTES)
    assert not stranger.exists()
    assert len(list((files.root / "writers").iterdir())) == 2
    assert all(await files.put(engine, range(4)))
    assert all(await other_rig.get(other, range(4)))
    await other_rig.close()


async def test_a_reserved_slot_of_a_living_writer_is_left_to_it(files: Rig) -> None:
    one = await files.open(capacity=40 * PAGE_BYTES)
    files.pool.fill(0, files.keys([500])[0])
    files.touched.clear()
    files.gate.clear()
    writing = asyncio.ensure_future(one.put_from(files.keys([500]), page_ids([0]), timeout_s=30))
    await files.touched.wait()
    assert states(files.root).get(1) == 1
    other_rig = type(files)(files.kind, files.root, files.poller)
    other = await other_rig.open(capacity=40 * PAGE_BYTES)
    for first in range(0, 100, 20):
        await other_rig.put(other, range(first, first + 20))
    files.gate.set()
    assert await writing == [True]
    assert await files.get(one, [500]) == [True]
    await other_rig.close()


@pytest.mark.parametrize("how", ["evict", "clear", "overwrite"])
async def test_a_slot_with_a_new_tenant_is_a_miss(files: Rig, how: str) -> None:
    """A reader that has found its slots is held up while another engine gives the slots to other pages."""
    slow = await files.open(capacity=40 * PAGE_BYTES, inline=0)
    await files.put(slow, range(8))
    quick_rig = type(files)("file-threads", files.root, files.poller)
    quick = await quick_rig.open(capacity=40 * PAGE_BYTES)
    files.touched.clear()
    files.pool.array[:] = 0
    if files.kind == "file-nixl":
        files.poller.gate.clear()
        files.poller.submitted.clear()
    files.gate.clear()
    reading = asyncio.ensure_future(slow.get_into(files.keys(range(8)), page_ids(range(8)), timeout_s=30))
    await (files.poller.submitted if files.kind == "file-nixl" else files.touched).wait()
    if how == "clear":
        await quick.clear()
    if how != "overwrite":
        for first in range(100, 160, 20):
            await quick_rig.put(quick, range(first, first + 20))
    else:
        for _ in range(12):
            await quick_rig.put(quick, range(8), [b"new"] * 8)
    files.poller.gate.set()
    files.gate.set()
    good = await reading
    for page, key in enumerate(files.keys(range(8))):
        # Whole old bytes, whole new bytes, or a miss.
        assert not good[page] or files.pool.holds(page, key) or (how == "overwrite" and files.pool.holds(page, b"new"))
    if how == "evict":
        assert not any(good)
        assert not any(await files.get(slow, range(8)))
    await quick_rig.close()


async def test_two_engines_that_put_the_same_keys_agree(files: Rig) -> None:
    one = await files.open(capacity=200 * PAGE_BYTES)
    other_rig = type(files)(files.kind, files.root, files.poller)
    other = await other_rig.open(capacity=200 * PAGE_BYTES)
    for turn in range(4):
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(rig.put(engine, range(turn, turn + 20)))
                for rig, engine in ((files, one), (other_rig, other))
            ]
        assert all(all(task.result()) for task in tasks)
        assert all(await files.get(one, range(turn, turn + 20)))
        assert all(await other_rig.get(other, range(turn, turn + 20)))
    await one.exists(files.keys([999]), timeout_s=5)
    assert one.statistics().pages == 23
    assert states(files.root)[2] == 23
    await other_rig.close()


@pytest.mark.parametrize("namespace", [b"n" * 32, b"o" * 32])
async def test_a_writer_that_is_taken_for_dead_publishes_nothing(files: Rig, namespace: bytes) -> None:
    engine = await files.open(capacity=40 * PAGE_BYTES)
    files.touched.clear()
    files.gate.clear()
    writing = asyncio.ensure_future(engine.put_from(files.keys([1]), page_ids([0]), timeout_s=30))
    await files.touched.wait()
    (lock,) = (files.root / "writers").iterdir()
    os.unlink(lock)
    other_rig = type(files)(files.kind, files.root, files.poller)
    other = await other_rig.open(capacity=40 * PAGE_BYTES, namespace=namespace)
    assert not states(files.root).get(1), "also what was reserved in another namespace is free"
    files.gate.set()
    assert await writing == [False]
    assert engine.statistics().failures == {"reservation lost": 1}
    assert await other_rig.get(other, [1]) == [False]
    await other_rig.close()


async def test_a_page_that_another_engine_removed_or_replaced_meanwhile_is_no_damage(files: Rig) -> None:
    first, second = await files.open(), await files.open()
    assert all(await files.put(first, range(4)))
    # The second one knows the slots; it does not look at the index again for keys that it knows.
    assert all(await files.get(second, range(4)))
    listed = next(file_store_of(second).stored())
    assert await first.delete(files.keys([0, 1])) == [True, True]
    assert await files.put(first, [1]) == [True]
    assert await files.get(second, range(4)) == [False, True, True, True]
    assert second.statistics().misses == {"missing": 1}
    # Nor is it to a check of pages that were listed before.
    verdicts = await file_store_of(second).verify(listed)
    assert [verdict.key for verdict in verdicts if verdict.ok] == files.keys(range(2, 4))
    assert len(verdicts) == 2
