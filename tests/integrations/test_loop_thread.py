"""The loop thread of the integrations ends within its deadline, whatever hangs on it."""

from __future__ import annotations

import asyncio

import pytest

from tidekv.engine.integrations import loop_thread
from tidekv.engine.integrations.loop_thread import LoopThread
from tidekv.states.errors import EngineClosed, TidekvError


def test_a_last_step_that_hangs_is_left_behind_with_the_thread_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread("tidekv-test")

    async def hang() -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(loop_thread, "CLOSE_S", 0.05)
        with pytest.raises(TidekvError, match=r"tidekv-test: .*hang did not end within 0.05 s"):
            thread.close(hang())
    thread._thread.join(60.0)
    assert not thread._thread.is_alive()
    with pytest.raises(EngineClosed):
        thread.post(print)
