"""A writer's memory is reused when the kernel reports that the writer has ended, and never before."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import pytest
from msgspec.structs import replace

from tests.support.waits import LIMIT_S
from tidekv.transports import process
from tidekv.transports.wire import ProcessMark

Child = tuple[subprocess.Popen[bytes], ProcessMark]


@pytest.fixture(params=["pidfd", "no pidfd here"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By a descriptor, or where a sandbox forbids those."""
    monkeypatch.setattr(process, "LOOK_INTERVAL_S", 0.001)
    if request.param != "pidfd":

        def refused(pid: int) -> int:
            raise PermissionError(1, "not in this sandbox")

        monkeypatch.setattr(os, "pidfd_open", refused)
    return str(request.param)


async def is_waiting(waiting: asyncio.Task[None]) -> bool:
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    return not done


async def test_a_living_and_a_stopped_process_are_waited_for_and_a_killed_one_has_ended(child: Child, way: str) -> None:
    running, mark = child
    waiting = asyncio.create_task(process.wait_dead(mark))
    assert await is_waiting(waiting)
    os.kill(running.pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, running.pid, os.WSTOPPED | os.WNOWAIT)
    assert await is_waiting(waiting)
    running.kill()
    async with asyncio.timeout(LIMIT_S):
        await waiting


async def test_a_process_that_is_gone_already_is_not_waited_for(child: Child, way: str) -> None:
    running, mark = child
    running.kill()
    running.wait()
    async with asyncio.timeout(LIMIT_S):
        await process.wait_dead(mark)


async def test_a_pid_that_was_given_away_again_is_another_process(child: Child, way: str) -> None:
    _, mark = child
    async with asyncio.timeout(LIMIT_S):
        await process.wait_dead(replace(mark, started=mark.started - 1))


async def test_waiting_can_be_given_up_and_leaves_no_descriptor(child: Child, way: str) -> None:
    _, mark = child
    before = len(os.listdir("/proc/self/fd"))
    waiting = asyncio.create_task(process.wait_dead(mark))
    assert await is_waiting(waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_processes_of_this_kernel_are_judged(child: Child) -> None:
    _, mark = child
    assert process.is_observable(mark)
    assert not process.is_observable(process.this_process())
    for other in (replace(mark, host="elsewhere"), replace(mark, host=""), replace(mark, pid=0)):
        assert not process.is_observable(other)
    assert not process.is_observable(replace(mark, started=0))
