"""Five hundred requests over NIXL, aborted at random points: what they held, took or started is all given back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.inside import calls_of
from tests.support.threads import thread_names, threads_left
from tests.support.waits import LIMIT_S
from tidekv import ReadyRequest, open_storage

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

REQUESTS = 500
AT_ONCE = 8


def open_files() -> list[str]:
    """What is open in this process, but for segments of storage: those are opened as they are used, and are bounded."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{number}")))
    return sorted(target for target in found if not target.endswith(".seg"))


async def test_five_hundred_aborts_leave_nothing_behind(
    tmp_path: Path,
    prefill_over_nixl: Any,
    decode_over_nixl: Any,
    prompt: Any,
    abort_at_random: Any,
    resident_bytes: Any,
) -> None:
    source = random.Random(11)
    storage = open_storage(f"file:{tmp_path}?capacity=4MiB&segment=1MiB")
    outcomes: dict[str, int] = {}
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl(num_pages=200) as prefill,
        decode_over_nixl([prefill.address], storage=storage, device_pages=72, host_pages=48) as decode,
    ):

        async def check_and_finish(tokens: list[int], ready: ReadyRequest) -> None:
            assert decode.wrong(ready, tokens) == []
            await decode.engine.finish(ready, [1])

        async def lane(lane: int, numbers: Any) -> None:
            for _ in numbers:
                tokens = prompt(source.randrange(12), source.randrange(1, 24), tail=source.randrange(3))
                # Ids come again as soon as their owners have ended: only generations distinguish the requests.
                request = decode.request(f"r{lane}", tokens)
                outcome = await abort_at_random(decode.engine, request, source, partial(check_and_finish, tokens))
                await decode.until(lambda: not calls_of(decode.engine).is_live(f"r{lane}"))
                outcomes[outcome] = outcomes.get(outcome, 0) + 1

        async def run(first: int, count: int) -> None:
            numbers = iter(range(first, first + count))
            async with asyncio.TaskGroup() as group:
                for number in range(AT_ONCE):
                    group.create_task(lane(number, numbers))
            await decode.assert_nothing_held()
            async with prefill.worker.freed:
                await prefill.worker.freed.wait_for(lambda: prefill.worker.pages_free == 200)
            gc.collect()

        # The two know each other from here on: most aborts shall find a transfer under way.
        await decode.serve("first", prompt(0, 20))
        await run(0, REQUESTS // 2)
        tasks, threads, files = len(asyncio.all_tasks()), thread_names(), open_files()
        resident = resident_bytes()
        tracemalloc.start()
        await run(REQUESTS // 2, REQUESTS // 4)
        traced = tracemalloc.get_traced_memory()[0]
        await run(REQUESTS * 3 // 4, REQUESTS // 4)
        grown = tracemalloc.get_traced_memory()[0] - traced
        tracemalloc.stop()
        assert len(asyncio.all_tasks()) <= tasks
        assert threads_left(threads) == []
        assert open_files() == files
        # A leak of one page would be 16 KiB; of one small object a request, some ten KiB.
        assert grown < 128 * 1024
        assert resident_bytes() - resident < 16 * 1024 * 1024
        assert prefill.peer.statistics()["writes_in_flight"] == 0
        assert sum(outcomes.values()) == REQUESTS
        assert min(outcomes.get(outcome, 0) for outcome in ("aborted", "cancelled", "served")) >= 20, outcomes
