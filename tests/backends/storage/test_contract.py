"""What every engine owes, asked of every engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tidekv.backends.storage import calls
from tidekv.backends.storage.base import Siblings
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest
from tidekv.states.types import PoolMemory, Segment, page_ids

# The rig of conftest.py, which test modules cannot import.
Rig = Any


async def test_what_was_put_is_got_and_the_rest_is_missing(rig: Rig) -> None:
    engine = await rig.open()
    assert await rig.put(engine, range(0, 20, 2)) == [True] * 10
    assert await rig.get(engine, range(20)) == [True, False] * 10
    statistics = engine.statistics()
    assert (statistics.pages, statistics.puts, statistics.hits) == (10, 10, 10)
    assert statistics.misses == {"missing": 10}
    assert statistics.read_bytes == statistics.written_bytes == 10 * 4096
    assert 0 < statistics.used_bytes <= statistics.capacity_bytes


async def test_exists_tells_what_is_there(rig: Rig) -> None:
    engine = await rig.open()
    await rig.put(engine, [1, 2])
    assert await engine.exists(rig.keys([0, 1, 2, 3]), timeout_s=5) == [False, True, True, False]
    assert await engine.exists([], timeout_s=5) == []


async def test_empty_batches_are_answered_with_nothing(rig: Rig) -> None:
    engine = await rig.open()
    assert await engine.get_into([], page_ids(), timeout_s=5) == []
    assert await engine.put_from([], page_ids(), timeout_s=5) == []
    assert await engine.delete([]) == []
    assert await engine.clear() == 0


async def test_a_key_that_is_put_again_has_the_new_bytes(rig: Rig) -> None:
    engine = await rig.open()
    await rig.put(engine, [1], [b"old"])
    assert await rig.put(engine, [1], [b"new"]) == [True]
    assert await engine.get_into(rig.keys([1]), page_ids([5]), timeout_s=5) == [True]
    assert rig.pool.holds(5, b"new")
    assert engine.statistics().pages == 1


async def test_a_key_twice_in_one_batch_has_one_of_the_two_pages(rig: Rig) -> None:
    engine = await rig.open()
    key = rig.keys([1])[0]
    for page, content in enumerate((b"one", b"other", b"last")):
        rig.pool.fill(page, content)
    assert await engine.put_from([key, key, key], page_ids(range(3)), timeout_s=5) == [True] * 3
    assert engine.statistics().pages == 1
    assert await engine.get_into([key], page_ids([7]), timeout_s=5) == [True]
    assert rig.pool.holds(7, b"last")
    assert await engine.clear() == 1


async def test_pages_scattered_over_the_pool_are_paired_with_their_keys(rig: Rig) -> None:
    engine = await rig.open()
    order = [17, 3, 40, 41, 42, 9, 0, 63]
    for page in order:
        rig.pool.fill(page, rig.keys([page])[0])
    assert all(await engine.put_from(rig.keys(order), page_ids(order), timeout_s=5))
    rig.pool.array[:] = 0
    backwards = order[::-1]
    assert all(await engine.get_into(rig.keys(order), page_ids(backwards), timeout_s=5))
    assert all(rig.pool.holds(page, rig.keys([number])[0]) for number, page in zip(order, backwards, strict=True))
    untouched = [page for page in range(64) if page not in order]
    assert not rig.pool.array[untouched].any()


async def test_delete_tells_what_was_there(rig: Rig) -> None:
    engine = await rig.open()
    await rig.put(engine, [1, 2, 3])
    assert await engine.delete(rig.keys([2, 9])) == [True, False]
    assert await rig.get(engine, [1, 2, 3]) == [True, False, True]
    assert await engine.delete(rig.keys([2])) == [False]


async def test_clear_forgets_everything_and_the_engine_goes_on(rig: Rig) -> None:
    engine = await rig.open()
    await rig.put(engine, range(10))
    assert await engine.clear() == 10
    assert engine.statistics().pages == 0
    assert not any(await rig.get(engine, range(10)))
    assert all(await rig.put(engine, range(10)))
    assert all(await rig.get(engine, range(10)))


async def test_the_bound_holds_and_the_longest_unused_go(rig: Rig) -> None:
    capacity = 40 * 4096
    engine = await rig.open(capacity=capacity, **rig.evicts_one_by_one)
    for first in range(0, 60, 4):
        assert all(await rig.put(engine, range(first, first + 4)))
        assert await rig.get(engine, [0]) == [True], "what is used all the time stays"
        assert engine.statistics().used_bytes <= capacity
    statistics = engine.statistics()
    assert statistics.evictions > 0
    # A file engine spends some of its capacity on headers.
    assert 20 <= statistics.pages <= 40
    assert statistics.pages + statistics.evictions == 60
    assert await rig.get(engine, [56, 57, 58, 59]) == [True] * 4
    assert await rig.get(engine, [1, 2, 3, 4]) == [False] * 4


async def test_a_batch_larger_than_the_store_is_stored_in_part(rig: Rig) -> None:
    engine = await rig.open(capacity=16 * 4096)
    stored = await rig.put(engine, range(64))
    found = await rig.get(engine, range(64))
    assert 0 < sum(found) <= 16
    assert all(was for was, there in zip(stored, found, strict=True) if there)
    assert engine.statistics().used_bytes <= 16 * 4096


async def test_a_second_pool_is_refused(rig: Rig) -> None:
    engine = await rig.open()
    with pytest.raises(InvalidRequest, match="has a pool already"):
        await engine.register(rig.pool.memory, rig.buffer_of, namespace=rig.NAMESPACE, poller=rig.poller)
    assert all(await rig.put(engine, [1]))


async def test_without_a_pool_nothing_goes(rig: Rig) -> None:
    engine = rig.make()
    for call in (engine.exists([], timeout_s=1), engine.clear(), engine.probe(), engine.delete([])):
        with pytest.raises(InvalidRequest, match="no pool yet"):
            await call


async def test_a_pool_that_cannot_be_served_is_refused(rig: Rig) -> None:
    engine = rig.make()
    segment = Segment(address=1 << 20, piece_bytes=64, stride_bytes=64, page_count=4)
    for pool in (
        PoolMemory(segments=(segment, segment), page_count=4),
        PoolMemory(segments=(segment,), page_count=4, kind="VRAM"),
    ):
        with pytest.raises(InvalidConfig, match="page-first pool in host memory"):
            await engine.register(pool, rig.buffer_of, namespace=rig.NAMESPACE, poller=rig.poller)
    for namespace in (b"short", "n" * 32, None):
        with pytest.raises(InvalidConfig, match="32 bytes"):
            await engine.register(rig.pool.memory, rig.buffer_of, namespace=namespace, poller=rig.poller)
    await engine.register(rig.pool.memory, rig.buffer_of, namespace=rig.NAMESPACE, poller=rig.poller)


async def test_a_capacity_without_room_for_a_page_is_refused(rig: Rig) -> None:
    engine = rig.make(capacity=4095)
    with pytest.raises(InvalidConfig, match="holds no page of 4096 bytes"):
        await engine.register(rig.pool.memory, rig.buffer_of, namespace=rig.NAMESPACE, poller=rig.poller)


async def test_bad_batches_are_refused_and_change_nothing(rig: Rig) -> None:
    engine = await rig.open()
    await rig.put(engine, [1])
    key = rig.keys([1])[0]
    before = rig.pool.array.copy()
    for keys, pages, words in (
        ([key], [0, 1], "in pairs"),
        ([key], [64], "page 64"),
        ([key], [-1], "page -1"),
        ([key[:31]], [0], "32 bytes"),
        (["../../../../etc/passwd".ljust(32, "x")], [0], "32 bytes"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            await engine.get_into(keys, page_ids(pages), timeout_s=5)
        with pytest.raises(InvalidRequest, match=words):
            await engine.put_from(keys, page_ids(pages), timeout_s=5)
    with pytest.raises(InvalidRequest, match="one page"):
        await engine.get_into([key, key], page_ids([3, 3]), timeout_s=5)
    for call in (engine.exists, engine.delete):
        with pytest.raises(InvalidRequest, match="32 bytes"):
            await (call([b"x"], timeout_s=1) if call == engine.exists else call([b"x"]))
    assert (rig.pool.array == before).all()
    assert engine.statistics().pages == 1


async def test_what_is_not_started_in_time_is_late(rig: Rig) -> None:
    engine = await rig.open()
    await rig.put(engine, [1])
    rig.pool.array[:] = 0
    assert await engine.get_into(rig.keys([1]), page_ids([0]), timeout_s=0) == [False]
    assert await engine.put_from(rig.keys([2]), page_ids([0]), timeout_s=0) == [False]
    assert not rig.pool.array.any()
    assert engine.statistics().misses == engine.statistics().failures == {"late": 1}
    assert await rig.get(engine, [1, 2]) == [True, False]


@pytest.mark.parametrize("direction", ["get", "put"])
async def test_past_its_deadline_a_call_starts_nothing_more_and_settles_what_runs(
    rig: Rig, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now_s))
    # A chunk a page: most engines have a few under way at once, the memory engine one page.
    engine = await rig.open(**rig.page_a_chunk)
    await rig.put(engine, range(16))
    call = engine.get_into if direction == "get" else engine.put_from
    rig.touched.clear()
    rig.gate.clear()
    task = asyncio.ensure_future(call(rig.keys(range(16)), page_ids(range(16)), timeout_s=60))
    await rig.touched.wait()
    now_s = 61.0
    done, _ = await asyncio.wait({task}, timeout=0.02)
    assert not done
    assert engine.statistics().calls_in_flight == 1
    rig.gate.set()
    good = await task
    assert good[0], "what was started in time still counts"
    assert sum(good) <= 4
    statistics = engine.statistics()
    assert (statistics.misses if direction == "get" else statistics.failures) == {"late": 16 - sum(good)}


@pytest.mark.parametrize("direction", ["get", "put"])
async def test_a_cancelled_call_ends_only_when_its_pages_are_settled(rig: Rig, direction: str) -> None:
    engine = await rig.open(**rig.on_threads)
    await rig.put(engine, range(8))
    call = engine.get_into if direction == "get" else engine.put_from
    rig.touched.clear()
    rig.gate.clear()
    task = asyncio.ensure_future(call(rig.keys(range(8)), page_ids(range(8)), timeout_s=30))
    await rig.touched.wait()
    for _ in range(3):
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=0.02)
        assert not done
    assert engine.statistics().calls_in_flight == 1
    rig.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.statistics().calls_in_flight == 0
    rig.pool.array[:] = 0
    assert await rig.get(engine, range(8)) == [True] * 8, "what was there is there"


async def test_closing_waits_for_what_is_in_flight_and_refuses_what_comes_after(rig: Rig) -> None:
    engine = await rig.open(**rig.on_threads)
    await rig.put(engine, [1])
    rig.touched.clear()
    rig.gate.clear()
    read = asyncio.ensure_future(engine.get_into(rig.keys([1]), page_ids([0]), timeout_s=30))
    await rig.touched.wait()
    closing = asyncio.ensure_future(engine.close())
    done, _ = await asyncio.wait({read, closing}, timeout=0.02)
    assert not done
    with pytest.raises(EngineClosed):
        await engine.get_into(rig.keys([1]), page_ids([1]), timeout_s=30)
    rig.gate.set()
    assert await read == [True]
    await closing
    await engine.close()
    for call in (engine.exists([], timeout_s=1), engine.clear(), engine.probe(), engine.delete([])):
        with pytest.raises(EngineClosed):
            await call
    assert engine.statistics().calls_in_flight == 0


async def test_closing_starts_nothing_more_of_a_long_call(rig: Rig) -> None:
    engine = await rig.open(**rig.page_a_chunk)
    await rig.put(engine, range(32))
    rig.touched.clear()
    rig.gate.clear()
    read = asyncio.ensure_future(engine.get_into(rig.keys(range(32)), page_ids(range(32)), timeout_s=30))
    await rig.touched.wait()
    closing = asyncio.ensure_future(engine.close())
    for _ in range(10):
        # Closing runs as a task of its own: it has begun after two turns of the loop.
        await asyncio.sleep(0)
    rig.gate.set()
    read_pages = await read
    await closing
    assert read_pages[0]
    assert sum(read_pages) <= 4


async def test_many_calls_at_once_never_mix_pages_up(rig: Rig) -> None:
    engine = await rig.open(capacity=200 * 4096)

    async def use(worker: int) -> None:
        mine = page_ids(range(worker * 8, worker * 8 + 8))
        for turn in range(6):
            numbers = [(turn * 5 + at) % 40 for at in range(8)]
            for page, key in zip(mine, rig.keys(numbers), strict=True):
                rig.pool.fill(page, key)
            assert all(await engine.put_from(rig.keys(numbers), mine, timeout_s=30))
            rig.pool.array[list(mine)] = 0
            wanted = [(turn * 7 + at + worker) % 40 for at in range(8)]
            good = await engine.get_into(rig.keys(wanted), mine, timeout_s=30)
            for page, key, there in zip(mine, rig.keys(wanted), good, strict=True):
                assert not there or rig.pool.holds(page, key)

    async with asyncio.TaskGroup() as group:
        for worker in range(8):
            group.create_task(use(worker))
    assert engine.statistics().calls_in_flight == 0
    assert engine.statistics().pages == len({turn * 5 + at for turn in range(6) for at in range(8)})


async def test_probe_and_verify_find_a_good_store_good(rig: Rig) -> None:
    engine = await rig.open()
    await engine.probe()
    await rig.put(engine, range(5))
    verdicts = [verdict async for verdict in engine.verify()]
    assert sorted(verdict.key for verdict in verdicts) == sorted(rig.keys(range(5)))
    assert all(verdict.ok and not verdict.cause for verdict in verdicts)


async def test_two_engines_in_one_process_share_no_state(rig: Rig, tmp_path: Any) -> None:
    one = await rig.open()
    rig.root = tmp_path / "other"
    other = await rig.open()
    await rig.put(one, [1])
    assert await rig.get(other, [1]) == [False]
    await one.close()
    assert all(await rig.put(other, [2]))
    assert await rig.get(other, [2]) == [True]


async def test_an_engine_opened_once_more_holds_pages_of_another_size_beside_it(rig: Rig) -> None:
    engine = await rig.open()
    sibling = engine.sibling()
    assert isinstance(engine, Siblings) and isinstance(sibling, Siblings) and sibling.uri == engine.uri
    try:
        pool = type(rig.pool).make(8, 1536)
        await sibling.register(pool.memory, pool.page, namespace=b"c" * 32, poller=rig.poller)
        keys = rig.keys([1, 2, 3])
        for page in range(3):
            pool.fill(page, bytes([page]))
        assert await rig.put(engine, [1, 2]) == [True, True]
        assert await sibling.exists(keys, timeout_s=5) == [False] * 3
        assert await sibling.put_from(keys, page_ids(range(3)), timeout_s=5) == [True] * 3
        assert await sibling.get_into(keys, page_ids([5, 6, 7]), timeout_s=5) == [True] * 3
        assert all(pool.holds(5 + page, bytes([page])) for page in range(3))
        assert await rig.get(engine, [1, 2, 3]) == [True, True, False]
        assert await engine.clear() == 2
        assert await sibling.exists(keys, timeout_s=5) == [True] * 3
    finally:
        await sibling.close()
    assert await engine.exists(keys, timeout_s=5) == [False] * 3


async def test_of_a_prefix_larger_than_the_store_the_head_is_kept(rig: Rig) -> None:
    engine = await rig.open(capacity=SMALL, **rig.evicts_one_by_one)
    stored = await rig.put(engine, range(40))
    held = stored.index(False)
    assert 4 <= held <= 16
    assert stored == [True] * held + [False] * (40 - held)
    assert await rig.get(engine, range(40)) == stored


async def test_the_end_of_a_prefix_is_evicted_before_its_head(rig: Rig) -> None:
    engine, held = await _open_small(rig)
    assert all(await rig.put(engine, range(held)))
    assert all(await rig.put(engine, [100, 101]))
    assert await engine.exists(rig.keys(range(held)), timeout_s=5) == [True] * (held - 2) + [False] * 2


async def test_a_prefix_that_is_read_is_evicted_from_its_end(rig: Rig) -> None:
    engine, held = await _open_small(rig)
    assert all(await rig.put(engine, range(held)))
    assert all(await rig.get(engine, range(held - 1)))
    assert all(await rig.put(engine, range(100, 103)))
    there = await engine.exists(rig.keys(range(held)), timeout_s=5)
    assert there == [True] * (held - 3) + [False] * 3, "the page that was not read goes first, then the last ones"


async def test_a_prefix_that_came_in_batches_is_evicted_from_its_end_once_it_was_touched(rig: Rig) -> None:
    engine, held = await _open_small(rig)
    assert all(await rig.put(engine, range(2)))
    assert all(await rig.put(engine, range(2, held)))
    assert await engine.touch(rig.keys(range(held + 2)), timeout_s=5) == [True] * held + [False] * 2
    assert all(await rig.put(engine, [100, 101, 102]))
    assert await engine.exists(rig.keys(range(held)), timeout_s=5) == [True] * (held - 3) + [False] * 3


SMALL = 16 * (4096 + 128)


async def _open_small(rig: Rig) -> tuple[Any, int]:
    """Open an empty engine of few pages; return it, and how many it holds."""
    engine = await rig.open(capacity=SMALL, **rig.evicts_one_by_one)
    held = sum(await rig.put(engine, range(200, 240)))
    await engine.clear()
    return engine, held
