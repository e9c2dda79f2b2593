"""Waiting for what must not be left behind: a cancelled waiter goes on waiting, and cancels nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tidekv.transports.blocking import call_in_thread, settled


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_waiter_raises_at_the_end_and_not_before(timeout_s: float | None, *, fails: bool) -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    calls: list[str] = []
    task = asyncio.create_task(settled(future, timeout_s=timeout_s, on_cancel=lambda: calls.append("stop")))
    for number in range(1, 4):
        await turns()
        task.cancel()
        await turns()
        assert not task.done()
        assert not future.done()
        assert len(calls) == number
    if fails:
        future.set_exception(OSError("no route"))
    else:
        future.set_result(7)
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("timeout_s", [None, 60.0])
async def test_the_outcome_is_the_futures(timeout_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    for early in (False, True):
        good, bad = loop.create_future(), loop.create_future()
        tasks = [asyncio.create_task(settled(future, timeout_s=timeout_s)) for future in (good, bad)]
        if not early:
            await turns()
        good.set_result(7)
        bad.set_exception(OSError("no route"))
        assert await tasks[0] == 7
        with pytest.raises(OSError, match="no route"):
            await tasks[1]


async def test_a_future_that_others_cancel_is_no_wait_for_ever() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(settled(future))
    await turns()
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_past_the_deadline_the_future_goes_on() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await settled(future, timeout_s=0.0)
    assert not future.done()
    future.set_result(None)


async def test_the_loop_does_not_wait_for_the_start_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[threading.Event] = []
    wait = threading.Event.wait

    def note(event: threading.Event, timeout: float | None = None) -> bool:
        waited.append(event)
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", note)
    idents = {await call_in_thread(threading.get_ident, what="a test", timeout_s=60.0) for _ in range(3)}
    assert threading.get_ident() not in idents
    assert waited == []
