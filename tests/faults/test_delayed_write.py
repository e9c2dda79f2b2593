"""A remote write that is under way when its request ends, and lands later: the next owner's bytes stay intact.

Deterministic, over loopback: a write is held before its bytes move and let go at the worst moment. The same without the
quarantine shows that the check can fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from tests.support.inside import calls_of
from tests.support.waits import LIMIT_S

FIRST = list(range(1000, 1040))  # Ten pages of four tokens.
NEXT = list(range(2000, 2040))
DEVICE_PAGES = 14  # Room for one of them, with the page that its growth reserves.


class HeldWrites:
    """Holds the writes that start while it is closed, until they are let go."""

    def __init__(self, network: Any) -> None:
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        self.is_closed = True
        network.before_write = self.before_write

    async def before_write(self, writer: str, target: str, pages: int) -> None:
        if self.is_closed:
            self.started.set()
            await self.let_go.wait()


Begins = Callable[..., AbstractAsyncContextManager[tuple[HeldWrites, asyncio.Task[Any], set[int]]]]


@pytest.fixture
def begun(pages_of: Any) -> Begins:
    """The first request, with a write of it on its way; and the pages that it is about to hit. When the block is left
    the write goes on.
    """

    @asynccontextmanager
    async def begin(pair: Any, **options: Any) -> AsyncIterator[tuple[HeldWrites, asyncio.Task[Any], set[int]]]:
        held = HeldWrites(pair.network)
        waiting = asyncio.create_task(pair.engine.restore(pair.request("first", FIRST, **options)))
        await held.started.wait()
        held.is_closed = False
        targets = set(pages_of(pair.engine, "first"))
        assert len(targets) == 10
        try:
            yield held, waiting, targets
        finally:
            held.let_go.set()

    return begin


@pytest.mark.parametrize("way", ["aborted", "cancelled", "deadline", "link lost"])
async def test_a_late_write_hits_nobody_but_the_quarantine(make_pair: Any, begun: Any, leave: Any, way: str) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        make_pair(device_pages=DEVICE_PAGES, heartbeat_s=0.05) as pair,
        begun(pair, deadline_s=0.05 if way == "deadline" else None) as (held, waiting, targets),
    ):
        await leave(pair.engine, pair.network, waiting, way)
        waits_for_pages = asyncio.create_task(pair.restore("next", NEXT))
        # A request that fits beside the quarantine is served, from other pages.
        small = await pair.restore("small", NEXT[:8])
        assert not set(small.pages.tolist()) & targets
        assert pair.core()["device_draining"] == 10
        assert not waits_for_pages.done()
        held.let_go.set()
        await pair.engine.finish(small)
        ready = await waits_for_pages
        await pair.finish(ready, NEXT, [1])
        await pair.assert_nothing_held()
        again = await pair.restore("again", NEXT)
        assert again.sources["l1"] == len(NEXT)
        await pair.finish(again, NEXT, [1])


async def test_without_the_quarantine_the_next_owner_is_overwritten(
    make_pair: Any, begun: Any, leave: Any, without_quarantine: None
) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        make_pair(device_pages=DEVICE_PAGES) as pair,
        begun(pair) as (held, waiting, targets),
    ):
        await leave(pair.engine, pair.network, waiting, "aborted")
        ready = await pair.restore("next", NEXT)
        assert set(ready.pages.tolist()) & targets
        held.let_go.set()
        # Drained comes after the last write; it is late by now, since no request waits for it.
        await calls_of(pair.engine).wait_until(lambda: pair.core().get("frames_late", 0) > 0)
        assert pair.wrong_pages(ready, NEXT) != []
        await pair.engine.finish(ready)
