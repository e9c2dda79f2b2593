"""A request costs the same however many prefill workers have links: counts of calls on the loop, without a clock."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.engine import Load, Rig
from benchmarks.request_profile import Profile
from tidekv import DecodeRequest
from tidekv.transports.decode.prefill_link import PrefillLink

REQUESTS = 4


async def calls_at(prefills: int) -> int:
    """Return the calls that requests of the first of so many prefill workers make."""
    rig = Rig(Load(256, 16, 64, ("l1",)), 2, None)
    async with rig.engine:

        async def serve(number: int) -> None:
            request = DecodeRequest(request_id=f"r{rig.requests}", tokens=rig.tokens(256), prefill=f"prefill-{number}")
            rig.requests += 1
            await rig.engine.finish(await rig.engine.restore(request), b"")
            await rig.engine.wait_settled()

        for number in range(prefills):
            await serve(number)
        with Profile() as profile:
            for _ in range(REQUESTS):
                await serve(0)
    return profile.by_part()[0].total()


async def rest(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.slow
async def test_a_request_makes_as_many_calls_with_many_prefills_as_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    # A heartbeat belongs to a time, and to no request.
    monkeypatch.setattr(PrefillLink, "_beat", rest)
    assert await calls_at(64) <= 1.05 * await calls_at(4)
