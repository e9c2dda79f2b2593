"""An engine that has served many requests: its numbers have grown, and nothing of it breaks."""

from __future__ import annotations

import pytest

PROMPT = list(range(10))


@pytest.mark.parametrize("served", [2**15 - 2, 2**32])
async def test_requests_are_served_however_many_came_before(make_pair, served: int) -> None:
    async with make_pair() as pair:
        pair.engine._arrivals._number = served
        for number in range(4):
            ready = await pair.restore(f"r{number}", [*PROMPT, number])
            await pair.engine.finish(ready)
        assert pair.engine.statistics()["receiver"].get("rooms_broken", 0) == 0
        await pair.assert_nothing_held()
