"""Entering, leaving and misusing an engine: clear errors, nothing left running, whatever goes wrong half-way."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.configs import engine_config
from tests.support.inside import calls_of, runtime_of
from tidekv import (
    CapacityError,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineClosed,
    EngineConfig,
    HostPool,
    InvalidConfig,
    InvalidRequest,
    KVLayout,
    LoopbackTransport,
    RequestFailed,
    open_storage,
)
from tidekv.engine.decode import runtime
from tidekv.states.errors import BrokenInvariant
from tidekv.transports.loopback import LoopbackNetwork

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
REQUEST = DecodeRequest(request_id="r", tokens=[1, 2, 3], prefill="nobody")


def make_engine(config: EngineConfig | None = None, **parts_given: object) -> DecodeEngine:
    parts_given.setdefault("transport", LoopbackTransport("decode", LoopbackNetwork()))
    return DecodeEngine(config or EngineConfig(), device=DevicePool.allocate(LAYOUT, 8), **parts_given)


@pytest.fixture
def ours() -> Callable[[], set[str]]:
    """Tasks and threads that an engine of this test has left: other tests' threads may end later than they."""
    before = set(threading.enumerate())

    def left() -> set[str]:
        tasks = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        threads = set(threading.enumerate()) - before
        return tasks | {thread.name for thread in threads if thread.name.startswith("tidekv")}

    return left


async def test_an_engine_is_entered_once_and_goes_on_where_somebody_tries_again(ours) -> None:
    engine = make_engine()
    async with engine:
        with pytest.raises(EngineClosed, match="entered before"):
            await engine.__aenter__()
        with pytest.raises(RequestFailed):
            await engine.restore(REQUEST)
    with pytest.raises(EngineClosed, match="entered before"):
        await engine.__aenter__()
    assert ours() == set()


async def test_calls_outside_of_the_block_say_so() -> None:
    engine = make_engine()
    for _ in range(2):
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: engine.restore(REQUEST),
            lambda: engine.abort("r"),
            lambda: engine.flush(),
            lambda: engine.drain(),
            lambda: engine.wait_settled(),
            lambda: engine.attach_storage("memory:?capacity=1MiB"),
            lambda: engine.detach_storage(),
        ]
        for call in calls:
            with pytest.raises(EngineClosed):
                await call()
        if runtime_of(engine).loop is None:
            with pytest.raises(EngineClosed, match="not started"):
                engine.statistics()
            async with engine:
                pass
    assert engine.statistics()["events"] == 0


async def test_another_loop_is_refused_and_changes_nothing(make_pair) -> None:
    async with make_pair() as pair:
        ready = await pair.restore("r1", [1] * 5)
        before = pair.core()

        def use_from_outside() -> None:
            with pytest.raises(InvalidRequest, match="run_coroutine_threadsafe"):
                asyncio.run(pair.engine.restore(pair.request("r2", [1])))
            for call in (lambda: pair.engine.grow(ready, 4), lambda: pair.engine.drop(ready)):
                with pytest.raises(InvalidRequest, match="run_coroutine_threadsafe"):
                    call()

        await asyncio.to_thread(use_from_outside)
        assert pair.core() == before
        await pair.engine.finish(await pair.restore("r2", [1] * 3))
        await pair.engine.finish(ready)


class Refusing(LoopbackTransport):
    """A transport that takes no memory."""

    async def register(self, *memories: object) -> None:
        raise InvalidConfig("no memory today")


async def test_a_start_that_fails_half_way_stops_what_it_started(tmp_path, ours) -> None:
    host = HostPool.allocate(LAYOUT, 8)
    with pytest.raises(InvalidConfig, match="no memory today"):
        await make_engine(transport=Refusing("decode", LoopbackNetwork())).__aenter__()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Exception, match="file"):
        await make_engine(host=host, storage=open_storage(f"file:{tmp_path}/file?capacity=1MiB")).__aenter__()
    with pytest.raises(InvalidConfig):
        await make_engine(engine_config(journal_path=f"{tmp_path}/file/journal")).__aenter__()
    assert ours() == set()


async def test_an_exception_within_the_block_comes_out_as_it_is(make_pair, ours) -> None:
    waiting: asyncio.Task[object] | None = None
    with pytest.raises(KeyError, match="mine"):
        async with make_pair() as pair:
            await pair.restore("r1", [1] * 5)
            waiting = asyncio.create_task(pair.engine.restore(pair.request("r2", [2] * 30)))
            await asyncio.sleep(0)
            raise KeyError("mine")
    assert waiting is not None
    with pytest.raises(RequestFailed, match="engine closed"):
        await waiting
    assert ours() == set()


async def test_a_cancelled_close_still_closes_everything(make_pair, ours) -> None:
    held = asyncio.Event()
    inside = asyncio.Event()

    async def hold(*_: object) -> None:
        await held.wait()

    async def live() -> None:
        async with make_pair() as pair:
            pair.network.before_write = hold
            waiting = asyncio.create_task(pair.engine.restore(pair.request("r1", [1] * 5)))
            await calls_of(pair.engine).wait_until(lambda: pair.core()["requests_transfer"] == 1)
            waiting.cancel()
            inside.set()

    task = asyncio.create_task(live())
    await inside.wait()
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    held.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ours() == set()


class HangingStorage:
    """Storage with a `close` that never returns."""

    def __init__(self) -> None:
        self._storage = open_storage("memory:?capacity=1MiB")

    async def close(self) -> None:
        await asyncio.Event().wait()

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


async def test_a_part_that_hangs_does_not_keep_the_others_from_closing(monkeypatch: pytest.MonkeyPatch, ours) -> None:
    monkeypatch.setattr(runtime, "CLOSE_PART_S", 0.05)
    engine = make_engine(
        EngineConfig(close_deadline_s=0.05), host=HostPool.allocate(LAYOUT, 8), storage=HangingStorage()
    )
    with pytest.raises(ExceptionGroup, match="closing the engine") as caught:
        async with engine:
            pass
    assert "closing memory:?capacity=1048576 did not end" in str(caught.value.exceptions[0])
    await asyncio.sleep(0)
    assert ours() == set()


async def test_a_copier_that_hangs_is_left_behind_at_the_deadline(monkeypatch: pytest.MonkeyPatch, ours) -> None:
    monkeypatch.setattr(runtime, "CLOSE_PART_S", 3600.0)
    monkeypatch.setattr(runtime, "STOP_MIN_S", 0.1)
    engine = make_engine(EngineConfig(close_deadline_s=0.05), host=HostPool.allocate(LAYOUT, 8))

    async def hang() -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(40):
        with pytest.raises(ExceptionGroup, match="closing the engine") as caught:
            async with engine:
                copier = runtime_of(engine).copier
                assert copier is not None
                close, copier.close = copier.close, hang  # type: ignore[method-assign]  # The fault of this test.
    assert "PageCopier did not end in time" in str(caught.value.exceptions[0])
    await close()
    await asyncio.sleep(0)
    assert ours() == set()


async def test_a_store_whose_index_another_process_keeps_locked_does_not_hold_up_the_end(
    make_pair, tmp_path: Path
) -> None:
    uri = f"file:{tmp_path}/pages?io=threads&capacity=4MiB&busy_timeout_s=60"
    async with contextlib.AsyncExitStack() as stack:
        pair = await stack.enter_async_context(make_pair(storage=open_storage(uri), close_deadline_s=2.0))
        ready = await pair.restore("r1", list(range(20)))
        other = sqlite3.connect(tmp_path / "pages" / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await pair.finish(ready, list(range(20)), [1])
        await calls_of(pair.engine).wait_until(lambda: runtime_of(pair.engine).executor.storage_calls == 1)
        engine = stack.pop_all()
        # Far less than what one change of the index may wait.
        async with asyncio.timeout(40):
            await engine.aclose()
        other.close()


async def test_a_burst_within_one_turn_of_the_loop_keeps_to_the_bound_of_the_queue(make_pair) -> None:
    async with make_pair(queue_max=3, device_pages=8) as pair:
        ready = await pair.restore("big", [1] * 24)
        burst = [asyncio.create_task(pair.engine.restore(pair.request(f"r{n}", [n + 9] * 20))) for n in range(10)]
        for task in burst[3:]:
            with pytest.raises(CapacityError):
                await task
        await pair.engine.finish(ready)
        for task in burst[:3]:
            await pair.engine.finish(await task)


async def test_two_engines_live_in_one_process(make_pair) -> None:
    async with make_pair() as one, make_pair() as other:
        ready = [await pair.restore("r1", list(range(9))) for pair in (one, other)]
        with pytest.raises(InvalidRequest):
            await one.engine.finish(ready[1])
        for pair, its in zip((one, other), ready, strict=True):
            await pair.engine.finish(its)
            await pair.assert_nothing_held()


async def test_a_prefill_peer_is_entered_once_too(make_pair) -> None:
    async with make_pair() as pair:
        with pytest.raises(EngineClosed, match="entered before"):
            await pair.peer.__aenter__()
        await pair.engine.finish(await pair.restore("r1", [1] * 5))


async def test_a_broken_engine_tells_every_later_call_what_broke_it(make_pair) -> None:
    with pytest.raises(BrokenInvariant, match="planted"):
        async with make_pair() as pair:
            runtime_of(pair.engine)._break(BrokenInvariant("planted"))
            for _ in range(2):
                with pytest.raises(EngineClosed, match="the engine broke: BrokenInvariant: planted"):
                    await pair.restore("r1", [1] * 9)
