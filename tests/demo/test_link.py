"""The link of a stated deployment: its speed in tokens is that of the large model, and no byte is faster."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from demo import main_job
from demo.conversations import Lengths, WorkloadOptions
from demo.link import LARGE_MODEL, Throttle
from tidekv import KVLayout

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, dtype="float64", page_size=16)


def test_the_link_carries_as_many_tokens_of_the_small_model() -> None:
    assert LARGE_MODEL.kv_bytes_per_token == 327_680
    token_bytes = LAYOUT.page_bytes / LAYOUT.page_size
    assert LARGE_MODEL.bytes_per_s(LAYOUT) / token_bytes == pytest.approx(25e9 / 8 / 327_680)
    assert "25 Gb/s" in LARGE_MODEL.describe(LAYOUT)


async def test_writes_of_all_callers_share_the_line() -> None:
    throttle = Throttle(1000.0)
    first = throttle.reserve(10)
    assert throttle.reserve(20) == pytest.approx(first + 0.02)
    started_s = time.perf_counter()
    await throttle.until(first + 0.02)
    assert time.perf_counter() - started_s >= 0.025


@pytest.mark.usefixtures("warm_children")
@pytest.mark.nixl
@pytest.mark.slow
async def test_a_slow_link_is_felt_without_the_cache_and_every_token_is_right() -> None:
    options = WorkloadOptions(conversations=1, rounds=3, system=Lengths(200), user=Lengths(8), output=Lengths(4))
    slow = replace(LARGE_MODEL, link_bits_per_s=25e8)
    result = await main_job.run_conversations(options, main_job.TierOptions(), deployment=slow)
    assert result.failures == []
    cached, uncached = result.phases
    assert cached.bytes_sent < uncached.bytes_sent / 2
    rate = slow.bytes_per_s(result.layout)
    assert uncached.wall_s >= uncached.bytes_sent / rate
