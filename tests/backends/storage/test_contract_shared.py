"""The contract of every engine when another process uses the same store at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

from tidekv.backends.storage import Storage
from tidekv.states.types import page_ids

# The rig of conftest.py, which test modules cannot import.
Rig = Any

PAGES_EACH = 8


async def second(rig: Rig, first: Storage, **options: object) -> Storage:
    """Open a further engine on the same store; what is in this process's memory has one only."""
    return first if rig.kind == "memory" else await rig.open(**options)


async def test_a_page_that_vanishes_between_exists_and_get_is_a_miss(rig: Rig) -> None:
    engine = await rig.open()
    other = await second(rig, engine)
    await rig.put(engine, range(6))
    assert all(await engine.exists(rig.keys(range(6)), timeout_s=10))
    assert await other.delete(rig.keys([1, 4])) == [True, True]
    assert await rig.get(engine, range(6)) == [True, False, True, True, False, True]
    assert sum(engine.statistics().misses.values()) == 2
    assert all(await rig.put(engine, range(6)))
    assert all(await rig.get(engine, range(6)))


async def test_writers_of_the_same_keys_leave_the_whole_page_of_one_of_them(rig: Rig) -> None:
    one = await rig.open()
    engines = [one, await second(rig, one)]
    keys = rig.keys(range(PAGES_EACH))
    contents = [f"{number} wrote".encode() for number in range(4)]

    async def write(number: int) -> None:
        mine = page_ids(range(number * PAGES_EACH, (number + 1) * PAGES_EACH))
        for page in mine:
            rig.pool.fill(page, contents[number])
        for _ in range(3):
            await engines[number % 2].put_from(keys, mine, timeout_s=30)

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(write(number))
    there = page_ids(range(40, 40 + PAGES_EACH))
    for engine in engines:
        found = await engine.get_into(keys, there, timeout_s=30)
        # Mooncake refuses a writer while another one writes, and may therefore refuse both.
        assert all(found) or rig.kind == "mooncake"
        for page, good in zip(there, found, strict=True):
            assert not good or any(rig.pool.holds(page, content) for content in contents)
    last = page_ids(range(3 * PAGES_EACH, 4 * PAGES_EACH))
    assert all(await engines[1].put_from(keys, last, timeout_s=30))
    for engine in engines:
        assert all(await engine.get_into(keys, there, timeout_s=30))
        assert all(rig.pool.holds(page, contents[3]) for page in there)


async def test_eviction_under_load_costs_hits_and_nothing_else(rig: Rig) -> None:
    capacity = 48 * (4096 + 128)
    one = await rig.open(capacity=capacity)
    engines = [one, await second(rig, one, capacity=capacity)]
    hits = 0

    async def use(worker: int) -> None:
        nonlocal hits
        mine = page_ids(range(worker * PAGES_EACH, (worker + 1) * PAGES_EACH))
        for turn in range(5):
            keys = rig.keys(range(1000 * worker + turn * PAGES_EACH, 1000 * worker + (turn + 1) * PAGES_EACH))
            for page, key in zip(mine, keys, strict=True):
                rig.pool.fill(page, key)
            await engines[worker % 2].put_from(keys, mine, timeout_s=30)
            rig.pool.array[list(mine)] = 0
            found = await engines[(worker + 1) % 2].get_into(keys, mine, timeout_s=30)
            hits += sum(found)
            for page, key, there in zip(mine, keys, found, strict=True):
                assert not there or rig.pool.holds(page, key)

    async with asyncio.TaskGroup() as group:
        for worker in range(4):
            group.create_task(use(worker))
    assert hits, "what was stored a moment ago is mostly there"
    # An engine without an index that all share learns of pages by reading them too, and makes room when it stores next.
    for number, engine in enumerate(engines):
        assert all(await engine.put_from(rig.keys([9000 + number]), page_ids([0]), timeout_s=30))
    statistics = [engine.statistics() for engine in engines]
    assert sum(found.evictions for found in statistics) > 0
    assert all(found.used_bytes <= capacity for found in statistics)
    assert all(found.calls_in_flight == 0 for found in statistics)
