"""A slow prefill worker and a slow disk delay the requests that need them, and no others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_hooks import GatedStorage
from tests.support.inside import core_of
from tests.support.waits import LIMIT_S
from tidekv import open_storage
from tidekv.states.records.stages import State

pytestmark = pytest.mark.nixl

PAGE_SIZE = 16


async def test_a_slow_prefill_delays_its_own_requests_only(
    prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl(name="slow") as slow,
        prefill_over_nixl(name="fast") as fast,
        decode_over_nixl([fast.address], device_pages=60) as decode,
    ):
        slow.gate.close_gate(after_checks=2)
        held = [decode.start(f"slow{n}", prompt(n, 10), prefill=slow.address) for n in range(2)]
        await slow.gate.halted.wait()
        for number in range(10, 40):
            await decode.serve(f"fast{number}", prompt(number, 12))
        assert not any(restore.done() for restore in held)
        slow.gate.open_gate()
        for restore in held:
            await decode.engine.finish(await restore)
        await decode.assert_nothing_held()


async def in_storage_only(decode: Any, tokens: list[int]) -> None:
    await decode.serve("warm", tokens)
    await decode.engine.wait_settled()
    await decode.engine.flush()


async def test_a_slow_disk_delays_only_who_reads_from_it(
    tmp_path: Path, prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    # The gate halts what a poller drives, and that is NIXL, but not what the loop reads by itself.
    storage = GatedStorage(open_storage(f"file:{tmp_path}?capacity=64MiB&io=nixl&inline=0"))
    stored = prompt(1, 16)
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl() as prefill,
        decode_over_nixl([prefill.address], storage=storage, prefetch="timeout", prefetch_base_s=LIMIT_S) as decode,
    ):
        await in_storage_only(decode, stored)
        storage.gate.close_gate()
        reads = decode.start("reads", stored)
        await storage.gate.halted.wait()
        # Their backups wait for the disk as well, and block no request.
        for number in range(10, 40):
            await decode.serve(f"r{number}", prompt(number, 12))
        assert core_of(decode.engine).request("reads").state is State.PREFETCH
        storage.gate.open_gate()
        ready = await reads
        assert ready.sources["l3"] == 16 * PAGE_SIZE
        await decode.engine.finish(ready)
        await decode.assert_nothing_held()


async def test_who_reads_from_a_disk_that_hangs_is_served_by_prefill(
    tmp_path: Path, prefill_over_nixl: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    storage = GatedStorage(open_storage(f"file:{tmp_path}?capacity=64MiB&io=nixl&inline=0"))
    stored = prompt(1, 16)
    async with (
        asyncio.timeout(LIMIT_S),
        prefill_over_nixl() as prefill,
        decode_over_nixl([prefill.address], storage=storage, prefetch="timeout", prefetch_base_s=0.1) as decode,
    ):
        await in_storage_only(decode, stored)
        storage.gate.close_gate()
        ready = await decode.restore("reads", stored)
        assert ready.sources["transfer"] == 16 * PAGE_SIZE
        await decode.engine.finish(ready)
        # The reads that hang may still write to their host pages: those have no owner until the reads have ended.
        assert decode.core()["host_owned"] + decode.core()["host_draining"] >= 16
        storage.gate.open_gate()
        await decode.assert_nothing_held()
        assert decode.wrong(await decode.restore("again", stored), stored) == []
