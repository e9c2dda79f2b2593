"""What a caller's own recompute may do wrong: it fails one request, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tidekv import DecodeEngine, DecodeRequest, DevicePool, EngineConfig, KVLayout, LoopbackTransport, RequestFailed
from tidekv.engine.values import RecomputeJob
from tidekv.states import commands, events
from tidekv.transports.loopback import LoopbackNetwork

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
REQUEST = DecodeRequest(request_id="r1", tokens=list(range(10)), prefill="nobody")


def make_engine(recompute: Callable[[RecomputeJob], Awaitable[object]]) -> DecodeEngine:
    transport = LoopbackTransport("decode", LoopbackNetwork())
    return DecodeEngine(EngineConfig(), device=DevicePool.allocate(LAYOUT, 8), transport=transport, recompute=recompute)


@pytest.mark.parametrize("answer", [None, 5, (5, None), ("no token", {}), (5, [1]), (1, {}, 2)], ids=repr)
async def test_an_answer_of_another_shape_fails_its_request_only(answer: object) -> None:
    async def recompute(job: RecomputeJob) -> object:
        return answer

    async with make_engine(recompute) as engine:
        with pytest.raises(RequestFailed, match="recompute failed"):
            await engine.restore(REQUEST)
        await engine.wait_settled()
        assert engine.statistics()["core"]["device_free"] == 8


async def test_a_recompute_that_cancels_itself_has_failed() -> None:
    async def recompute(job: RecomputeJob) -> object:
        raise asyncio.CancelledError

    async with make_engine(recompute) as engine:
        async with asyncio.timeout(5):
            with pytest.raises(RequestFailed, match="cancelled itself"):
                await engine.restore(REQUEST)
            await engine.wait_settled()
        assert engine.statistics()["core"]["device_free"] == 8


async def test_an_abort_before_the_work_begins_asks_nobody_and_gives_the_pages_back() -> None:
    asked: list[RecomputeJob] = []

    async def recompute(job: RecomputeJob) -> object:
        asked.append(job)
        return 1, {}

    async with make_engine(recompute) as engine:
        driver = engine._driver
        perform = driver._perform

        def abort_behind(command: commands.Command) -> None:
            perform(command)
            if isinstance(command, commands.Recompute):
                driver.post(events.AbortRequested(at_s=driver.clock(), request_id="r1"))

        driver._perform = abort_behind
        with pytest.raises(RequestFailed, match="aborted"):
            await engine.restore(REQUEST)
        await engine.wait_settled()
        assert asked == []
        assert engine.statistics()["core"]["device_free"] == 8


class Moody:
    """Storage whose calls end in a cancellation of their own."""

    def __init__(self, storage: object) -> None:
        self._storage = storage

    async def exists(self, *_: object, **__: object) -> list[bool]:
        raise asyncio.CancelledError

    get_into = put_from = exists

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


async def test_storage_that_cancels_itself_is_a_failure_of_storage(make_pair) -> None:
    from tidekv import open_storage

    async with make_pair(storage=Moody(open_storage("memory:?capacity=1MiB")), query_deadline_s=60.0) as pair:
        async with asyncio.timeout(10):
            ready = await pair.restore("r1", list(range(20)))
            await pair.engine.finish(ready)
            await pair.assert_nothing_held()
        assert pair.engine.statistics()["effects_raised"] == 0
