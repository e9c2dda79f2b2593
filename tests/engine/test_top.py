"""`tidekv top` looks at a running engine."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from tests.support.neighbours import Worker, neighbours, sharing
from tidekv import (
    DevicePool,
    InvalidRequest,
    KVLayout,
    LoopbackNetwork,
    LoopbackTransport,
    MetricsOptions,
    PrefillConfig,
    PrefillPeer,
    open_storage,
)
from tidekv.engine.trace import top
from tidekv.states.errors import StorageFailed

PROMPT = list(range(100, 142))  # Ten pages of four tokens and a tail of two.


def printed(renderable: Any) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # A StringIO.
    return text


async def test_top_shows_what_a_live_engine_has(make_pair) -> None:
    async with make_pair(metrics_listen="127.0.0.1:0") as pair:
        address = pair.engine.metrics_address
        held = await pair.restore("held", PROMPT)
        await pair.finish(await pair.restore("done", PROMPT[:20]), PROMPT[:20], [1])
        await pair.engine.wait_settled()
        command = [sys.executable, "-m", "tidekv", "top", address, "--once"]
        once = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, env={**os.environ, "COLUMNS": "160"}
        )
        words = (await once.communicate())[0].decode()
        core = pair.core()
        assert once.returncode == 0
        # Requests by state, restores by outcome, pages by condition, tokens by source: equal to the engine's figures.
        assert re.search(r"READY +│ +1 ", words), words
        assert re.search(r"ready +│ +2 ", words), words
        row = next(line for line in words.splitlines() if line.startswith("│ device"))
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        pinned = core["device_cached"] - core["device_evictable"]
        # The READY request pins the pages of its prompt; those of the ended one are a prefix of them.
        assert pinned == core["device_protected"] > 0
        names = ("device_evictable", "device_draining", "device_free")
        assert [int(cell) for cell in cells[2:]] == [core["device_owned"], pinned, *(core[name] for name in names)]
        other = next(line for line in words.splitlines() if line.startswith("│ host"))
        assert f" {core['host_evictable']} " in other
        assert re.search(r"transfer +│ +42 ", words), words
        assert re.search(r"l1 +│ +20 ", words), words
        await pair.engine.finish(held)


async def test_top_shows_the_rooms_of_a_prefill_peer() -> None:
    pool = DevicePool.allocate(KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", page_size=4), 8)
    transport = LoopbackTransport("prefill-0", LoopbackNetwork())
    async with PrefillPeer(
        PrefillConfig(listen="prefill", metrics_listen="127.0.0.1:0"), device=pool, transport=transport
    ) as peer:
        now = await asyncio.to_thread(top.scrape, peer.metrics_address)
    words = printed(top.show(now, None, 0.0))
    assert re.search(r"sending +│ +0 ", words), words
    assert re.search(r"bytes sent +│ +0 ", words), words


async def test_top_prints_a_picture_each_interval_into_a_pipe(make_pair) -> None:
    async with make_pair(metrics_listen="127.0.0.1:0") as pair:
        command = [sys.executable, "-m", "tidekv", "top", pair.engine.metrics_address, "--interval-s", "0.1"]
        piped = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert piped.stdout is not None
        seen = b""
        while seen.count(b"tokens by source") < 2:
            seen += await piped.stdout.readline()
        piped.terminate()
        await piped.communicate()
    assert b"\x1b" not in seen


async def test_top_tells_rates_since_the_last_look(make_pair) -> None:
    async with make_pair(metrics_listen="127.0.0.1:0") as pair:
        address = pair.engine.metrics_address
        await pair.engine.finish(await pair.restore("first", PROMPT))
        before = await asyncio.to_thread(top.scrape, address)
        for number in range(4):
            await pair.engine.finish(await pair.restore(f"r{number}", PROMPT))
        now = await asyncio.to_thread(top.scrape, address)
    words = printed(top.show(now, before, 2.0))
    assert re.search(r"ready +│ +5 +│ +2\.0 ", words), words


async def test_top_tells_that_storage_is_left_alone(make_pair) -> None:
    storage = open_storage("memory:?capacity=64MiB")
    async with make_pair(metrics_listen="127.0.0.1:0", storage=storage, breaker_failures=1) as pair:
        words = printed(top.show(await asyncio.to_thread(top.scrape, pair.engine.metrics_address), None, 0.0))
        assert "breaker" not in words

        async def fail(keys: object, *, timeout_s: float) -> list[bool]:
            raise StorageFailed("the index is gone")

        storage.exists = fail  # type: ignore[method-assign]  # The engine under it stays whole.
        await pair.engine.finish(await pair.restore("r1", PROMPT))
        words = printed(top.show(await asyncio.to_thread(top.scrape, pair.engine.metrics_address), None, 0.0))
        assert "storage is not used: the breaker is open" in words


def test_top_of_what_is_no_engine_is_one_clear_error() -> None:
    with pytest.raises(InvalidRequest, match=r"no engine answers at '127\.0\.0\.1:9'"):
        top.scrape("127.0.0.1:9")


async def test_top_shows_what_peers_were_asked_and_sent_and_why_others_were_not() -> None:
    metrics = {"metrics": MetricsOptions(listen="127.0.0.1:0")}
    async with neighbours(configs=[metrics, metrics], options=sharing(allow=("peers:*",))) as all_of:
        first, second = all_of.workers
        assert "peers" not in printed(top.show(await scraped(first), None, 0.0))
        await first.serve(PROMPT)
        await first.engine.wait_settled()
        payload = {"source_control_endpoint": "elsewhere:1"}
        action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        await second.serve(PROMPT, [first.address], kv_hints=hints)
        await second.serve([1, 2, 3, 4, 5, 6], ["nowhere:1"])
        await second.serve([7, 8, 9, 10, 11, 12], ["nowhere:1"])
        reader, source = [printed(top.show(await scraped(one), None, 0.0)) for one in (second, first)]
        for row in (
            r"asked, times +│ +2 ", r"pages read +│ +10 ", r"pages they lacked +│ +1 ",
            r"named by hints, refused +│ +1 ", r"pages not asked: paused +│ +1 ",
        ):  # fmt: skip
            assert re.search(row, reader), reader
        assert re.search(r"pages sent to them +│ +10 ", source), source
        await first.engine.drain(0)
        assert "draining: 0 requests live, 0 pages stored since the start, 0 left to store" in printed(
            top.show(await scraped(first), None, 0.0)
        )


async def scraped(worker: Worker) -> top.Sample:
    address = worker.engine.metrics_address
    assert address is not None
    return await asyncio.to_thread(top.scrape, address)


def test_top_shows_what_a_run_has_left_to_store() -> None:
    now: top.Sample = {
        "tidekv_requests": {("READY",): 2.0}, "tidekv_pool_pages": {}, "tidekv_live": {("pages_to_store",): 7.0},
        "tidekv_pages_total": {("stored",): 30.0}, "tidekv_engine": {("draining", "engine"): 0.0},
    }  # fmt: skip
    words = "storing what storage lacks: 2 requests live, 30 pages stored since the start, 7 left to store"
    assert words in printed(top.show(now, None, 0.0))
