"""`change_request` on an engine: order of admission, deadlines, refusals, and the journal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.waits import until
from tidekv import InvalidRequest, Replayer, RequestFailed

PROMPT = list(range(100, 132))
OTHER = list(range(300, 332))


async def test_the_last_of_the_queue_is_served_first_with_a_higher_priority(make_pair, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with make_pair(device_pages=10, host_pages=0, journal_path=str(journal)) as pair:
        big = await pair.restore("big", PROMPT)
        order: list[str] = []

        async def serve(name: str, tokens: list[int]) -> None:
            ready = await pair.restore(name, tokens)
            order.append(name)
            await pair.engine.finish(ready)

        waiting = [asyncio.create_task(serve(name, tokens)) for name, tokens in (("r1", OTHER), ("r2", OTHER[::-1]))]
        await until(lambda: len(pair.engine.states()) == 3)
        assert pair.engine.change_request("r2", priority=7)
        assert pair.engine.change_request("r2", deadline_s=1000.0)
        assert not pair.engine.change_request("big", priority=7)
        assert not pair.engine.change_request("nobody", priority=7)
        await pair.engine.finish(big)
        await asyncio.gather(*waiting)
        assert order == ["r2", "r1"]
        await pair.assert_nothing_held()
    assert Replayer(journal).run().complete


async def test_a_request_may_be_given_less_time(make_pair) -> None:
    async with make_pair(device_pages=10, host_pages=0) as pair:
        big = await pair.restore("big", PROMPT)
        waiting = asyncio.create_task(pair.restore("r1", OTHER))
        await until(lambda: len(pair.engine.states()) == 2)
        assert pair.engine.change_request("r1", deadline_s=0.001)
        with pytest.raises(RequestFailed, match="deadline"):
            await waiting
        await pair.engine.finish(big)
        await pair.assert_nothing_held()


@pytest.mark.parametrize(
    "wrong", [{}, {"priority": "high"}, {"priority": 10**9}, {"deadline_s": 0}, {"deadline_s": -1.0}], ids=str
)
async def test_what_a_request_may_not_have_it_may_not_be_given(make_pair, wrong: dict[str, object]) -> None:
    async with make_pair() as pair:
        with pytest.raises(InvalidRequest, match=r"priority|deadline_s"):
            pair.engine.change_request("r1", **wrong)


async def test_room_of_rejected_tokens_is_used_again_before_a_page_is_taken(make_pair) -> None:
    async with make_pair(device_pages=8, host_pages=0) as pair:
        ready = await pair.restore("r1", PROMPT[:8])
        assert len(pair.engine.grow(ready, 5)) == 2
        written, drafted = 9, 7  # Four of the five were rejected.
        assert pair.engine.grow(ready, max(0, written + drafted - ready.length)) == []
        assert ready.length == 16
        assert pair.engine.grow(ready, max(0, 10 + 3 - ready.length)) == []
        await pair.engine.finish(ready, [1])
        await pair.assert_nothing_held()
