"""A request ended at any turn of the loop between its call and its end: right bytes or a clear end, no leak.

The states of a request are few, the awaits on its way are many. So a request over all four sources is ended after one
turn of the loop, after two, and so on until it is over before it can be ended.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.support.waits import LIMIT_S
from tidekv import EngineClosed, InvalidRequest, RequestFailed, open_storage
from tidekv.engine.decode.values import ReadyRequest

PROMPT = list(range(100, 126))
TURNS_MAX = 400

Call = Callable[[Any], Awaitable[object]]


@pytest.fixture(autouse=True)
def one_event_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many places to be cut at as there can be."""
    monkeypatch.setattr("tidekv.engine.decode.driver.TURN_S_MAX", -1.0)


async def warm(pair: Any) -> None:
    """Two pages of PROMPT are on the device, four on the host, six in storage; no request holds any of them."""
    for length, tiers in ((24, ("l1", "l2")), (16, ("l1",)), (8, ())):
        ready = await pair.restore("warm", PROMPT[:length])
        await pair.engine.finish(ready)
        await pair.engine.wait_settled()
        await pair.engine.flush(tiers=tiers)


async def some_turns(call: asyncio.Future[Any], turns: int) -> bool:
    """Let the loop turn so often; False where the call was over before."""
    for _ in range(turns):
        if call.done():
            return False
        await asyncio.sleep(0)
    return not call.done()


def turn_counts() -> Iterator[int]:
    """Every turn first, where most happens; then bigger and bigger steps, for machines where threads take long."""
    turns = 0
    while turns < TURNS_MAX:
        yield turns
        turns += 1 if turns < 60 else turns // 4


async def abort(pair: Any, restoring: asyncio.Task[ReadyRequest]) -> None:
    await pair.engine.abort("r")


async def cancel(pair: Any, restoring: asyncio.Task[ReadyRequest]) -> None:
    restoring.cancel()


async def both(pair: Any, restoring: asyncio.Task[ReadyRequest]) -> None:
    restoring.cancel()
    await pair.engine.abort("r")


@pytest.mark.parametrize("end", [abort, cancel, both], ids=lambda end: end.__name__)
async def test_a_restore_that_is_ended_at_any_turn_holds_nothing(
    make_pair, end: Callable[[Any, asyncio.Task[ReadyRequest]], Awaitable[None]]
) -> None:
    async with make_pair(storage=open_storage("memory:?capacity=64MiB")) as pair:
        cut = 0
        for turns in turn_counts():
            await warm(pair)
            restoring = asyncio.create_task(pair.engine.restore(pair.request("r", PROMPT)))
            if not await some_turns(restoring, turns):
                break
            await end(pair, restoring)
            cut += 1
            try:
                async with asyncio.timeout(LIMIT_S):
                    ready = await restoring
            except (RequestFailed, asyncio.CancelledError):
                pass
            else:
                # It was READY already: either its pages are right, or `grow` refuses because the request has ended.
                with suppress(InvalidRequest):
                    pair.engine.grow(ready, 0)
                    assert pair.wrong_pages(ready, PROMPT) == []
                    await pair.engine.finish(ready)
            await pair.assert_nothing_held()
            await pair.engine.flush()
            assert pair.core()["device_free"] == pair.core()["device_total"], turns
        assert cut > 10
        assert pair.wrong_pages(await restoring, PROMPT) == []
        await pair.engine.finish(await restoring)
        for _ in range(100):  # The last words to prefill are on their way.
            await asyncio.sleep(0)
        statistics = pair.peer.statistics()
        assert [statistics[f"rooms_{kind}"] for kind in ("sending", "finished", "draining")] == [0, 0, 0]
        assert statistics["rooms_aborted"] > 0


async def finish(pair: Any, ready: ReadyRequest) -> None:
    await pair.engine.finish(ready)


async def retract(pair: Any, ready: ReadyRequest) -> None:
    pair.engine.drop(await pair.engine.retract(ready))


@pytest.mark.parametrize("call", [finish, retract], ids=lambda call: call.__name__)
async def test_giving_back_that_is_cancelled_at_any_turn_is_done_all_the_same(
    make_pair, call: Callable[[Any, ReadyRequest], Awaitable[None]]
) -> None:
    async with make_pair(storage=open_storage("memory:?capacity=64MiB")) as pair:
        for turns in turn_counts():
            ready = await pair.restore("r", PROMPT)
            giving = asyncio.create_task(call(pair, ready))
            if not await some_turns(giving, turns):
                break
            giving.cancel()
            with suppress(asyncio.CancelledError):
                await giving
            if pair.engine.holds(ready):
                # The task was cancelled before its first turn: it never called.
                assert turns == 0
                await pair.engine.finish(ready)
            await pair.assert_nothing_held()
            assert pair.core()["requests_retracted"] == 0
        assert turns > 1
        await giving
        await pair.assert_nothing_held()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 12, 17, 23, 30, 40, 60])
async def test_an_engine_that_is_left_at_any_turn_leaves_no_task_and_ends_its_calls(make_pair, turns: int) -> None:
    before = asyncio.all_tasks()
    async with make_pair(storage=open_storage("memory:?capacity=64MiB")) as pair:
        await warm(pair)
        restoring = asyncio.create_task(pair.engine.restore(pair.request("r", PROMPT)))
        await some_turns(restoring, turns)
    async with asyncio.timeout(LIMIT_S):
        try:
            await restoring
        except RequestFailed as failed:
            assert failed.cause == "engine closed"
        except EngineClosed:
            # It had not been taken yet.
            assert turns <= 1
    del pair
    gc.collect()
    assert asyncio.all_tasks() == before
