"""A live prefill that never sends withholds at most its share of the device pool; others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.conftest import Pair
from tests.support.waits import expected
from tidekv import DecodeRequest, DevicePool, LoopbackTransport, PrefillConfig, PrefillPeer, RequestFailed

TOKENS = 24
PAGES = 7
"""Pages of a request: six of the prompt, and one of reserve."""


@asynccontextmanager
async def silent_prefill(pair: Pair) -> AsyncIterator[None]:
    """A prefill that takes promises and never sends."""

    async def never(room: object) -> None:
        await asyncio.Event().wait()

    pool = DevicePool.allocate(pair.device.layout, 256)
    transport = LoopbackTransport("silent", pair.network)
    async with PrefillPeer(PrefillConfig(listen="silent"), device=pool, transport=transport, on_room=never):
        yield


def prompt(number: int) -> list[int]:
    return list(range(number * TOKENS, (number + 1) * TOKENS))


@asynccontextmanager
async def waiting(pair: Pair, count: int) -> AsyncIterator[None]:
    """Begin so many requests to the silent prefill: some get their pages, the others wait. Aborts them at the end."""
    requests = [
        DecodeRequest(request_id=f"s{number}", tokens=prompt(number), prefill="silent") for number in range(count)
    ]
    tasks = [asyncio.create_task(pair.engine.restore(request)) for request in requests]
    async with expected("the arrival of all requests"):
        # No public call waits for an arrival.
        while len(pair.engine.states()) < count or not pair.core()["rooms"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pair.assert_nothing_held()
    assert pair.engine.statistics()["prefill_pages"] == {}


async def test_nine_requests_to_a_silent_prefill_do_not_stop_those_of_another(make_pair) -> None:
    async with make_pair(device_pages=64, prefill_share=0.75) as pair, silent_prefill(pair), waiting(pair, 9):
        held = pair.engine.statistics()["prefill_pages"]["silent"]
        assert held == 48 // PAGES * PAGES
        assert sum(state == "PREALLOC" for state in pair.engine.states().values()) == 3
        async with expected("the service of requests to the other prefill"):
            readies = await asyncio.gather(*(pair.restore(f"g{number}", prompt(20 + number)) for number in range(2)))
            for number in range(9):
                await pair.finish(await pair.restore(f"h{number}", prompt(30 + number)), prompt(30 + number), [1])
        assert pair.engine.statistics()["prefill_pages"] == {"silent": held}
        for number, ready in enumerate(readies):
            await pair.finish(ready, prompt(20 + number), [1])


async def test_a_request_that_never_got_pages_fails_with_the_quota_in_its_cause(make_pair) -> None:
    async with make_pair(device_pages=64, prefill_share=0.75) as pair, silent_prefill(pair), waiting(pair, 6):
        late = DecodeRequest(request_id="late", tokens=prompt(9), prefill="silent", deadline_s=0.1)
        with pytest.raises(RequestFailed, match="in PREALLOC: prefill silent is at its quota of device pages"):
            await pair.engine.restore(late)
