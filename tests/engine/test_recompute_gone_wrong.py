"""What a caller's own recompute may do wrong: it fails one request, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.inside import core_of, driver_of
from tests.support.waits import LIMIT_S
from tidekv import DecodeEngine, DecodeRequest, DevicePool, EngineConfig, KVLayout, LoopbackTransport, RequestFailed
from tidekv.engine.decode import driver
from tidekv.engine.decode.values import RecomputeJob
from tidekv.states import commands, events
from tidekv.transports.loopback import LoopbackNetwork

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
REQUEST = DecodeRequest(request_id="r1", tokens=list(range(10)), prefill="nobody")


def make_engine(recompute: Callable[[RecomputeJob], Awaitable[object]]) -> DecodeEngine:
    transport = LoopbackTransport("decode", LoopbackNetwork())
    engine = DecodeEngine(EngineConfig(), device=DevicePool.allocate(LAYOUT, 8), transport=transport)
    engine.recompute_with(recompute)
    return engine


WRONG = [None, 5, (5, None), ("no token", {}), (5, [1]), (1, {}, 2), (-1, {}), (1.5, {}), (2**40, {}), (True, {})]


@pytest.mark.parametrize("answer", WRONG, ids=repr)
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
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(RequestFailed, match="cancelled itself"):
                await engine.restore(REQUEST)
            await engine.wait_settled()
        assert engine.statistics()["core"]["device_free"] == 8


def abort_behind_recompute(engine: DecodeEngine) -> None:
    """Have an abort wait in the inbox from the moment at which the caller is first asked to recompute."""
    inner = driver_of(engine)
    perform = inner._perform

    def perform_and_abort(command: commands.Command) -> None:
        perform(command)
        if isinstance(command, commands.Recompute):
            inner._perform = perform
            inner.post(events.AbortRequested(at_s=inner.clock(), request_id="r1"))

    inner._perform = perform_and_abort


async def test_an_abort_before_the_work_begins_asks_nobody_and_gives_the_pages_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One turn takes both events, however slow the machine is: the work's task starts behind it.
    monkeypatch.setattr(driver, "TURN_S_MAX", 60.0)
    asked: list[RecomputeJob] = []

    async def recompute(job: RecomputeJob) -> object:
        asked.append(job)
        return 1, {}

    async with make_engine(recompute) as engine:
        abort_behind_recompute(engine)
        with pytest.raises(RequestFailed, match="aborted"):
            await engine.restore(REQUEST)
        await engine.wait_settled()
        assert asked == []
        assert engine.statistics()["core"]["device_free"] == 8


@pytest.mark.parametrize("outcome", ["answers", "raises", "cancels itself"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
async def test_an_abort_just_after_the_work_began_keeps_the_pages_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, outcome: str, at_once: bool
) -> None:
    # A turn takes one event: the work's task starts before the abort is taken.
    monkeypatch.setattr(driver, "TURN_S_MAX", -1.0)
    may_end = asyncio.Event()
    begun: list[RecomputeJob] = []

    async def recompute(job: RecomputeJob) -> object:
        begun.append(job)
        if not at_once:
            await may_end.wait()
        if outcome == "raises":
            raise MemoryError("no room for activations")
        if outcome == "cancels itself":
            raise asyncio.CancelledError
        return len(begun), {}

    async with make_engine(recompute) as engine:
        abort_behind_recompute(engine)
        with pytest.raises(RequestFailed, match="aborted"):
            await engine.restore(REQUEST)
        assert len(begun) == 1
        if not at_once:
            # The work still writes to these pages: they are not reused, though their request is gone.
            assert engine.statistics()["core"]["device_owned"] == len(begun[0].pages) == 3
            assert engine.statistics()["core"]["device_free"] == 5
            may_end.set()
        await engine.wait_settled()
        assert engine.statistics()["core"]["device_free"] == 8
        core_of(engine).check()
        if outcome == "answers":
            # The name serves again, with an answer of its own.
            assert (await engine.restore(REQUEST)).first_token == 2


class Moody:
    """Storage with calls that end in a cancellation of their own."""

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
        async with asyncio.timeout(LIMIT_S):
            ready = await pair.restore("r1", list(range(20)))
            await pair.engine.finish(ready)
            await pair.assert_nothing_held()
        assert pair.engine.statistics()["effects_raised"] == 0
