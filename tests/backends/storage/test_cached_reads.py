"""Small reads that the event loop makes itself, and questions that it answers without the index."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import threading
from typing import Any

import pytest

from tests.support.inside import file_store_of
from tidekv.backends.storage.file import segments
from tidekv.states.errors import InvalidRequest
from tidekv.states.types import page_ids

# The rig of conftest.py, which test modules cannot import.
Rig = Any


class Threads:
    """Notes in which threads a rig's pages are asked for."""

    def __init__(self, files: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        asked = files.buffer_of

        def noted(page: int) -> memoryview:
            self.names.append(threading.current_thread().name)
            return asked(page)  # type: ignore[no-any-return]  # The rig is Any.

        monkeypatch.setattr(files, "buffer_of", noted)

    def take(self) -> set[str]:
        """The threads since this was last asked."""
        names, self.names = set(self.names), []
        return names


OWN = {threading.main_thread().name}


async def read(files: Rig, engine: Any, numbers: range) -> list[bool]:
    keys = files.keys(numbers)
    return await engine.get_into(keys, page_ids(range(len(keys))), timeout_s=30)  # type: ignore[no-any-return]


async def test_a_small_read_of_cached_pages_needs_no_thread(files: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(files, monkeypatch)
    engine = await files.open()
    assert all(await files.put(engine, range(8)))
    threads.take()
    files.pool.array[:] = 0
    reading = read(files, engine, range(8))
    with pytest.raises(StopIteration) as told:
        reading.send(None)
    assert told.value.value == [True] * 8
    assert threads.take() == OWN
    assert all(files.pool.holds(page, key) for page, key in enumerate(files.keys(range(8))))
    assert engine.statistics().hits == 8
    assert engine.statistics().read_bytes == 8 * 4096


async def test_a_turn_of_the_loop_makes_one_read_and_threads_the_others(
    files: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await files.open()
    assert all(await files.put(engine, range(8)))
    made: list[object] = []
    cached = segments.Segments.read_cached

    def noted(self: segments.Segments, first: int, pages: list[memoryview]) -> bytes | None:
        made.append(first)
        return cached(self, first, pages)

    monkeypatch.setattr(segments.Segments, "read_cached", noted)

    async def one(page: int) -> list[bool]:
        return await engine.get_into(files.keys([page]), page_ids([page]), timeout_s=30)  # type: ignore[no-any-return]

    assert await asyncio.gather(*(one(page) for page in range(8))) == [[True]] * 8
    assert len(made) == 1
    await asyncio.sleep(0)
    assert await one(3) == [True]
    assert len(made) == 2


@pytest.mark.parametrize("why", ["large", "switched off", "not in memory", "no such reads", "late"])
async def test_other_reads_go_to_threads(files: Rig, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    threads = Threads(files, monkeypatch)
    engine = await files.open(inline=0 if why == "switched off" else 8 * 4096)
    numbers = range(9 if why == "large" else 8)
    assert all(await files.put(engine, numbers))
    threads.take()
    preadv = os.preadv

    def not_now(file: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EAGAIN if why == "not in memory" else errno.EOPNOTSUPP, "not now")
        return preadv(file, buffers, offset)

    if why in ("not in memory", "no such reads"):
        monkeypatch.setattr(segments.os, "preadv", not_now)
    if why == "late":
        late = await engine.get_into(files.keys(numbers), page_ids(numbers), timeout_s=0)
        assert late == [False] * 8
        assert engine.statistics().misses == {"late": 8}
        return
    assert await read(files, engine, numbers) == [True] * len(numbers)
    assert threads.take() - OWN, "a thread of the engine's has read them"


async def test_a_cached_page_that_is_damaged_is_a_miss_with_its_cause(files: Rig) -> None:
    engine = await files.open()
    assert all(await files.put(engine, range(4)))
    file = files.only_segment()
    slots = int.from_bytes(file.read_bytes()[12:16], "little")
    geometry = segments.Geometry(namespace=files.NAMESPACE, page_bytes=4096, slots=slots)
    files.flip(file, geometry.page_offset(1) + 9)
    files.flip(file, geometry.header_offset(2) + 60)
    assert await files.get(engine, range(4)) == [True, False, False, True]
    assert engine.statistics().misses == {"corrupt": 2}


async def test_what_others_put_is_seen_though_nothing_is_asked_while_they_change_nothing(
    files: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await files.open()
    other_rig = type(files)(files.kind, files.root, files.poller)
    other = await other_rig.open()
    assert all(await files.put(one, [1]))
    assert await other.exists(files.keys([1, 2]), timeout_s=30) == [True, False]
    asked: list[str] = []
    index = file_store_of(other)._place.index
    refresh = index.refresh

    def noted() -> bool:
        asked.append("refresh")
        return refresh()  # type: ignore[no-any-return]  # The rig is Any.

    monkeypatch.setattr(index, "refresh", noted)
    monkeypatch.setattr(type(file_store_of(other)), "is_stale", False)
    for _ in range(3):
        assert await other.exists(files.keys([1, 2]), timeout_s=30) == [True, False]
    assert not asked
    assert all(await files.put(one, [2]))
    assert await other.exists(files.keys([1, 2]), timeout_s=30) == [True, True]
    assert asked == ["refresh"]
    assert await one.delete(files.keys([1])) == [True]
    assert await other.exists(files.keys([3]), timeout_s=30) == [False]
    assert await other.exists(files.keys([1]), timeout_s=30) == [False]
    await other_rig.close()


async def test_a_change_that_writes_no_tick_is_seen_when_what_is_known_is_old(
    files: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await files.open()
    other_rig = type(files)(files.kind, files.root, files.poller)
    other = await other_rig.open()
    assert await other.exists(files.keys([1]), timeout_s=30) == [False]
    monkeypatch.setattr(file_store_of(one)._place.index._tick, "write", lambda _: None)
    assert all(await files.put(one, [1]))
    monkeypatch.setattr(type(file_store_of(other)), "is_stale", True)
    await other.exists(files.keys([1]), timeout_s=30)
    assert file_store_of(other)._catching_up is not None
    await file_store_of(other)._catching_up
    assert await other.exists(files.keys([1]), timeout_s=30) == [True]
    await other_rig.close()


async def test_a_change_that_fails_after_its_tick_leaves_nothing_unseen(files: Rig) -> None:
    one = await files.open(busy_timeout_s=0.0)
    other_rig = type(files)(files.kind, files.root, files.poller)
    other = await other_rig.open()
    assert all(await files.put(one, [1]))
    index = file_store_of(one)._place.index
    index._tick.write(index._seen + 1)
    for engine in (one, other):
        assert not file_store_of(engine).is_current
        assert await engine.exists(files.keys([1, 2]), timeout_s=30) == [True, False]
    assert all(await other_rig.put(other, [2]))
    assert await one.exists(files.keys([2]), timeout_s=30) == [True]
    assert file_store_of(one).is_current
    blocker = sqlite3.connect(files.root / "index.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    assert await files.put(one, [3]) == [False]
    blocker.execute("ROLLBACK")
    blocker.close()
    assert await one.exists(files.keys([1, 2, 3]), timeout_s=30) == [True, True, False]
    await other_rig.close()


@pytest.mark.parametrize("bad", [bytearray(32), b"short", "x" * 32, memoryview(bytes(32)), None])
async def test_a_key_that_is_no_digest_is_refused(files: Rig, bad: object) -> None:
    engine = await files.open()
    with pytest.raises(InvalidRequest, match="key number 1 must be 32 bytes"):
        await engine.exists([bytes(32), bad], timeout_s=1)
