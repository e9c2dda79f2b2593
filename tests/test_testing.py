"""The tools that users test their embedding with: they pass what is right, and find what is planted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from examples.testing.service_leaks import TURNS, Service, serve_all, test_nothing_stays_behind
from tests.support.snippets import snippet
from tidekv import DecodeRequest, RequestFailed
from tidekv.testing import Clock, loopback_pair

__all__ = ["test_nothing_stays_behind"]  # The example itself is one of these tests.


class FinishLeftOut(Service):
    """Forgets a client that has left."""

    async def serve(self, request: DecodeRequest, output: list[int], end: str) -> None:
        if end == "client left":
            await self.engine.restore(request)
        else:
            await super().serve(request, output, end)


class LockKept(Service):
    """Forgets a retracted request, whose host pages stay locked."""

    async def serve(self, request: DecodeRequest, output: list[int], end: str) -> None:
        if end == "preempted":
            await self.engine.retract(await self.engine.restore(request))
        else:
            await super().serve(request, output, end)


@pytest.mark.parametrize(
    ("service", "found"),
    [
        (FinishLeftOut, r"not given back \(finish, retract or abort\): {'r\d': 'READY'"),
        (LockKept, r"host pages are held by retracted requests without resume or drop: .*'protected': [1-9]"),
    ],
)
def test_the_example_finds_a_planted_leak(service: type[Service], found: str) -> None:
    @given(TURNS)
    @settings(database=None, phases=[Phase.generate])  # Shrinking it would take half a minute.
    def nothing_stays_behind(turns: list[tuple[list[int], str]]) -> None:
        asyncio.run(serve_all(service, turns))

    with pytest.raises(AssertionError, match=found):
        nothing_stays_behind()


async def test_the_page_about_testing_is_true() -> None:
    names: dict[str, Any] = {}
    exec(snippet("docs/testing.md", "import asyncio"), names)
    await names["test_a_prompt_is_found_again"]()
    await names["test_a_request_ends_at_its_deadline"]()


async def test_the_bytes_of_a_page_depend_on_every_token_before_it() -> None:
    async with loopback_pair() as pair:
        ready = await pair.restore("r1", [1, 2, 3, 4, 5, 6, 7, 8])
        assert pair.wrong_pages(ready, [1, 2, 3, 4, 5, 6, 7, 9]) == [1]
        assert pair.wrong_pages(ready, [9, 2, 3, 4, 5, 6, 7, 8]) == [0, 1]
        await pair.generate(ready, [9, 10])
        again = await pair.restore("r2", [1, 2, 3, 4, 5, 6, 7, 8, 9])
        assert again.sources["l1"] == 8
        await pair.generate(again, [1])
        await pair.check_idle()


async def test_each_fault_of_the_switch_is_met_by_the_request() -> None:
    async with loopback_pair(clock=Clock()) as pair:
        pair.faults.prefill_raises = "no memory"
        with pytest.raises(RequestFailed, match="no memory"):
            await pair.restore("r1", [1, 2, 3])
        pair.faults.prefill_raises = None
        pair.faults.hold_writes()
        waiting = asyncio.ensure_future(pair.restore("r2", [1, 2, 3]))
        while pair.peer.statistics()["writes_in_flight"] == 0:  # noqa: ASYNC110  # A count has no wake-up.
            await asyncio.sleep(0)
        assert not waiting.done()
        pair.faults.release_writes()
        await pair.generate(await waiting, [4])
        pair.faults.cut_links()
        await pair.generate(await pair.restore("r3", [4, 5, 6]), [4])
        await pair.check_idle()


async def test_time_passes_for_a_request_only_when_the_test_says_so() -> None:
    async with loopback_pair(clock=Clock()) as pair:
        pair.faults.hold_writes()
        waiting = asyncio.ensure_future(pair.restore("r1", [1, 2, 3], deadline_s=3600.0))
        while not pair.engine.states():  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0)
        pair.advance(3599.0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        pair.advance(1.0)
        with pytest.raises(RequestFailed, match="deadline"):
            await waiting
        pair.faults.release_writes()
        await pair.check_idle()


async def test_a_silent_prefill_fails_a_request_at_its_deadline() -> None:
    async with loopback_pair(clock=Clock()) as pair:
        await pair.generate(await pair.restore("r1", [1, 2, 3]), [4])
        pair.faults.is_silent = True
        waiting = asyncio.ensure_future(pair.restore("r2", [5, 6, 7], deadline_s=10.0))
        while not pair.engine.states():  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0)
        pair.advance(10.0)
        with pytest.raises(RequestFailed):
            await waiting
        pair.faults.is_silent = False
