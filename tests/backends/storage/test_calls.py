"""Calls into an engine: what one that may not start any more leaves behind."""

from __future__ import annotations

import asyncio

from tidekv.backends.storage.calls import Call


async def test_a_call_that_is_too_late_when_its_turn_comes_leaves_the_slot_to_others() -> None:
    limit = asyncio.Semaphore(1)
    assert not await Call(0.0).start(limit)
    assert not limit.locked()
    call = Call(60.0)
    assert await call.start(limit)
    waiting = asyncio.create_task(call.start(limit))
    await asyncio.sleep(0)
    # Its caller is gone before the slot is free.
    call.abandoned = True
    limit.release()
    assert not await waiting
    assert not limit.locked()
