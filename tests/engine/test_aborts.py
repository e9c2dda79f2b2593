"""Thousands of aborts at random points: nothing is left behind, of any kind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading

import pytest

from tidekv import RequestFailed, open_storage

REQUESTS = 10_000
AT_ONCE = 32
IDS = 500


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def abort_at_random(pair, source: random.Random, number: int) -> str:
    """One request that is aborted, cancelled, or served, after a random number of turns of the loop."""
    tokens = [source.randrange(3) for _ in range(source.randrange(1, 40))]
    # Ids come again, as soon as their owners have ended: only generations may tell the requests apart.
    request_id = f"r{number % IDS}"
    waiting = asyncio.create_task(pair.engine.restore(pair.request(request_id, tokens)))
    for _ in range(source.randrange(40)):
        await asyncio.sleep(0)
    way = source.random()
    if way < 0.45:
        await pair.engine.abort(request_id)
    elif way < 0.9:
        waiting.cancel()
    try:
        ready = await waiting
    except RequestFailed as failed:
        assert failed.cause == "aborted"
        return "aborted"
    except asyncio.CancelledError:
        return "cancelled"
    if pair.engine._calls.is_live(ready.request_id):
        assert pair.wrong_pages(ready, tokens) == []
        await pair.engine.finish(ready, [1])
    return "served"


async def run_batch(pair, source: random.Random, first: int, count: int) -> None:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with limit:
            await abort_at_random(pair, source, number)

    async with asyncio.TaskGroup() as group:
        for number in range(first, first + count):
            group.create_task(one(number))
    await pair.assert_nothing_held()


@pytest.mark.slow
async def test_ten_thousand_aborts_leave_nothing_behind(make_pair) -> None:
    source = random.Random(7)
    storage = open_storage("memory:?capacity=128KiB")
    # A reported hold-up reads source files, which stay in Python's own cache: not what is counted here.
    async with make_pair(
        device_pages=60, host_pages=60, storage=storage, fetch_run_pages=2, hold_up_limit_s=60.0
    ) as pair:
        await run_batch(pair, source, 0, REQUESTS // 2)
        tasks, threads, files = len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/proc/self/fd"))
        resident = resident_bytes()
        await run_batch(pair, source, REQUESTS // 2, REQUESTS // 4)
        gc.collect()
        blocks = sys.getallocatedblocks()
        await run_batch(pair, source, 3 * REQUESTS // 4, REQUESTS // 4)
        gc.collect()
        grown = sys.getallocatedblocks() - blocks
        assert len(asyncio.all_tasks()) == tasks
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == files
        # A leak of one small object in two aborts would be more.
        assert grown < REQUESTS // 8
        assert resident_bytes() - resident < 32 * 1024 * 1024
        core = pair.core()
        assert core["requests_retracted"] == core["loads"] == core["operations"] == core["queue"] == 0
