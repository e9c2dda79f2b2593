"""Owned tasks end with their owner, and their failures surface."""

from __future__ import annotations

import asyncio

import pytest

from tidekv.transports.tasks import OwnedTasks


async def test_closing_cancels_and_waits() -> None:
    tasks = OwnedTasks("test")
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    tasks.spawn(work(), name="work")
    await asyncio.sleep(0)
    assert len(tasks) == 1
    await tasks.close()
    assert ended.is_set()
    assert len(tasks) == 0
    with pytest.raises(RuntimeError, match="closing"):
        tasks.spawn(work(), name="late")


async def test_a_failure_is_told_at_once_and_raised_at_close() -> None:
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context["exception"]))
    tasks = OwnedTasks("test")

    async def fail() -> None:
        raise ZeroDivisionError

    await asyncio.wait([tasks.spawn(fail(), name="fail")])
    await asyncio.sleep(0)
    assert [type(error) for error in heard] == [ZeroDivisionError]
    with pytest.raises(ZeroDivisionError):
        await tasks.close()
    await tasks.close()
