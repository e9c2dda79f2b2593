"""Decode workers that are killed while prefill's NIXL loads their metadata or connects to them: prefill lives on."""

from __future__ import annotations

import asyncio
import os
import signal
from random import Random
from typing import Any

import pytest

from tests.support.fault_process import Turn
from tests.support.waits import LIMIT_S

pytestmark = pytest.mark.nixl

KILLS = int(os.environ.get("TIDEKV_KILLS", "4"))
"""Decode workers that are killed. By hand: TIDEKV_KILLS=40 TIDEKV_KILLS_SEED=1 python -m pytest -s."""
SEED = int(os.environ.get("TIDEKV_KILLS_SEED", "0")) or int.from_bytes(os.urandom(4))
AFTER_MAX_S = 0.05


@pytest.mark.slow(limit_s=120 + 10 * KILLS)
async def test_prefill_survives_decode_workers_that_die_right_after_their_hello(
    spawn_prefill: Any, spawn_decode: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    print(f"TIDEKV_KILLS_SEED={SEED}")
    dice = Random(SEED)
    prefill = await spawn_prefill()
    async with asyncio.timeout(LIMIT_S + 10 * KILLS):
        for number in range(KILLS):
            child = await spawn_decode("memory:?capacity=1MiB")
            # It dials, says Hello and asks for pages.
            child.line.say(
                Turn(request_id=f"r{number}", tokens=prompt(number, 20), prefill=[prefill.ready.address], output=[1])
            )
            # A moment at random is the point: its load, its connection, or its first page.
            await asyncio.sleep(dice.uniform(0, AFTER_MAX_S))
            child.signal(signal.SIGKILL)
            assert await child.wait_ended() == -signal.SIGKILL
        # It answers: it is alive.
        print(await prefill.counts())
        async with decode_over_nixl([prefill.ready.address]) as decode:
            assert (await decode.serve("good", prompt(99, 20)))["transfer"] == 20 * 16
            await decode.assert_nothing_held()
        await prefill.counts()
