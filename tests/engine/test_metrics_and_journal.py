"""Every counter that is scraped follows from the journal: counted once more, naively, for a run with faults."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.inside import calls_of, core_of, runtime_of
from tests.support.recount import counters_of, recount, scraped
from tests.support.waits import LIMIT_S
from tidekv import DecodeRequest, Replayer, RequestFailed, open_storage
from tidekv.backends.storage.base import Storage
from tidekv.engine.metrics import MetricsCollector, MetricsFold
from tidekv.engine.metrics.collector import CONDITIONS, LIVE, POOLS
from tidekv.states.core_state import COUNTERS
from tidekv.states.errors import CopyFailed, StorageFailed
from tidekv.states.records.causes import DECLINED
from tidekv.states.records.stages import State
from tidekv.states.types import PageIds

PROMPT = list(range(100, 142))  # Ten pages of four tokens and a tail of two.
OTHER = list(range(300, 342))
OF_THE_PROCESS = {
    # Metrics of the running process: they follow from no event, so a replay cannot reproduce them.
    "tidekv_engine", "tidekv_loop_lag_seconds", "tidekv_poller_cpu_seconds", "tidekv_poller_rounds",
}  # fmt: skip


class MoodyStorage:
    """A storage engine that misbehaves once, in the way a test sets."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.mood = ""
        self.held = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def _take(self, mood: str) -> bool:
        if self.mood != mood:
            return False
        self.mood = ""
        return True

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        if self._take("query fails"):
            raise StorageFailed("the index is gone")
        if self._take("query hangs"):
            await self.held.wait()
        return await self._inner.exists(keys, timeout_s=timeout_s)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        if self._take("fetch fails"):
            raise StorageFailed("the disk is gone")
        if self._take("fetch hangs"):
            await self.held.wait()
        flags = await self._inner.get_into(keys, pages, timeout_s=timeout_s)
        return [True, *[False] * (len(flags) - 1)] if self._take("fetch is short") else flags

    async def put_from(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        if self._take("put fails"):
            raise StorageFailed("the disk is full")
        return await self._inner.put_from(keys, pages, timeout_s=timeout_s)


async def run_with_faults(pair: Any, storage: MoodyStorage) -> None:
    """Everything that has a counter happens at least once."""
    engine = pair.engine

    async def serve(name: str, mood: str = "", tokens: list[int] = PROMPT, **options: Any) -> None:
        await engine.wait_settled()
        await engine.flush()
        storage.mood = mood
        ready = await pair.restore(name, tokens, **options)
        storage.held.set()
        engine.grow(ready, 1)
        await engine.finish(ready, [7])

    await serve("put fails", "put fails")
    await serve("cold", tokens=OTHER)
    await serve("warm")
    for mood in ("fetch fails", "fetch hangs", "fetch is short", "query fails", "query hangs"):
        storage.held.clear()
        await serve(mood, mood)
    engine.change_policy(prefetch_threshold_tokens=100_000)
    await serve("threshold")
    engine.change_policy(prefetch_threshold_tokens=0, fetch_pages_in_flight_max=3)
    await serve("limit")
    engine.change_policy(fetch_pages_in_flight_max=0, breaker_failures=1, breaker_backoff_s=0.01)
    await serve("opens the breaker", "query fails")
    await calls_of(engine).wait_until(lambda: not core_of(engine).storage.is_open)
    await engine.wait_settled()
    await engine.flush(("l1",))
    copier = runtime_of(engine).copier
    to_device = copier.to_device

    def fail_once(host_pages: object, device_pages: object) -> asyncio.Future[None]:
        copier.to_device = to_device
        copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        copied.set_exception(CopyFailed("the copy engine is gone"))
        return copied

    copier.to_device = fail_once
    ready = await pair.restore("copy fails", PROMPT)
    retracted = await engine.retract(ready)
    await engine.finish(await engine.resume(retracted))
    with pytest.raises(RequestFailed):
        await engine.restore(DecodeRequest(request_id="nobody", tokens=OTHER[:9], prefill="nobody"))
    aborted = asyncio.ensure_future(pair.restore("aborted", OTHER))
    await asyncio.sleep(0)
    await engine.abort("aborted")
    with pytest.raises(RequestFailed):
        await aborted
    await engine.detach_storage()
    await engine.wait_settled()


async def test_every_counter_follows_from_the_journal(make_pair, tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    storage = MoodyStorage(open_storage("memory:?capacity=64MiB"))
    limits = {"prefetch": "timeout", "query_deadline_s": 0.05, "prefetch_base_s": 0.05}
    limits |= {"fetch_run_pages": 16, "close_deadline_s": 5.0}
    # The speed of this machine must not determine what is fetched.
    limits["fetch_deadline_share"] = 0.0
    async with make_pair(
        storage=storage, device_pages=24, journal_path=str(path), metrics_listen="127.0.0.1:0", **limits
    ) as pair:
        await run_with_faults(pair, storage)
        families, live = scraped(await asyncio.to_thread(fetch_text, f"http://{pair.engine.metrics_address}/metrics"))
        statistics = pair.core()

    replayer = Replayer(path)
    again = MetricsFold(replayer.core)
    naive = recount(replayer, again, page_bytes=pair.device.memory.page_bytes)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(again, page_bytes=pair.device.memory.page_bytes))
    replayed_families, replayed = scraped(generate_latest(registry).decode())
    # The same families and the same numbers, but for what is of the process.
    assert families - replayed_families == OF_THE_PROCESS
    assert {key: live[key] for key in replayed} == pytest.approx(replayed)
    assert counters_of(replayed) == pytest.approx(naive)
    # Causes are those that were injected.
    assert {cause: count for (name, cause), count in live.items() if name == "tidekv_cuts_total"} == {
        "copy_failed": 1, "fetch_failed": 1, "fetch_late": 1, "fetch_short": 1,
    }  # fmt: skip
    declined = {cause: count for (name, cause), count in live.items() if name == "tidekv_declined_pages_total"}
    assert declined == {"limit": 7}
    assert set(declined) <= set(DECLINED)
    # Every number of the core is exported, under its own name.
    assert exported(statistics) == set(statistics)


def fetch_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def exported(statistics: dict[str, int]) -> set[str]:
    """Names of `Core.statistics` that have a metric. A name without one makes the test above fail."""
    gauges = {f"{pool}_{condition}" for pool in POOLS for condition in CONDITIONS}
    gauges |= {f"requests_{state.value.lower()}" for state in State if state is not State.FAILED}
    gauges |= {*LIVE, "l3_breaker_open", "evicted_over_share"}
    # Every counter is a label of `tidekv_core_total`.
    counters = set(COUNTERS)
    return (gauges | counters) & set(statistics)
