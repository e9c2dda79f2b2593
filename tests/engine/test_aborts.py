"""Thousands of aborts at random points: nothing is left behind, of any kind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys

import pytest

from tests.support.threads import thread_names, threads_left
from tidekv import ReadyRequest, open_storage

REQUESTS = 5_000
AT_ONCE = 32
IDS = 500


async def run_batch(pair, abort_at_random, source: random.Random, first: int, count: int) -> None:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        tokens = [source.randrange(3) for _ in range(source.randrange(1, 40))]

        async def check_and_finish(ready: ReadyRequest) -> None:
            assert pair.wrong_pages(ready, tokens) == []
            await pair.engine.finish(ready, [1])

        async with limit:
            # Ids are reused as soon as the requests with them have ended: only generations distinguish the requests.
            request = pair.request(f"r{number % IDS}", tokens)
            await abort_at_random(pair.engine, request, source, check_and_finish)

    async with asyncio.TaskGroup() as group:
        for number in range(first, first + count):
            group.create_task(one(number))
    await pair.assert_nothing_held()


@pytest.mark.slow
async def test_five_thousand_aborts_leave_nothing_behind(make_pair, abort_at_random, resident_bytes) -> None:
    source = random.Random(7)
    storage = open_storage("memory:?capacity=128KiB")
    # A reported hold-up reads source files, which stay in Python's own cache: not what is counted here.
    async with make_pair(
        device_pages=60, host_pages=60, storage=storage, fetch_run_pages=2, loop_stall_report_s=60.0
    ) as pair:
        await run_batch(pair, abort_at_random, source, 0, REQUESTS // 2)
        tasks, threads, files = len(asyncio.all_tasks()), thread_names(), len(os.listdir("/proc/self/fd"))
        resident = resident_bytes()
        grown = []
        for first in range(REQUESTS // 2, REQUESTS, REQUESTS // 4):
            gc.collect()
            blocks = sys.getallocatedblocks()
            await run_batch(pair, abort_at_random, source, first, REQUESTS // 4)
            gc.collect()
            grown.append(sys.getallocatedblocks() - blocks)
        assert len(asyncio.all_tasks()) == tasks
        assert threads_left(threads) == []
        assert len(os.listdir("/proc/self/fd")) == files
        # A leak of one small object in two aborts would be more, in both parts. A cache that fills is in one only.
        assert min(grown) < REQUESTS // 8, grown
        assert resident_bytes() - resident < 32 * 1024 * 1024
        core = pair.core()
        assert core["requests_retracted"] == core["loads"] == core["operations"] == core["queue"] == 0
