"""A batch grows in one call: requests without a page are returned, and all others have grown."""

from __future__ import annotations

import pytest

from tidekv import EngineStatistics, InvalidRequest


async def test_the_requests_of_a_batch_for_which_no_page_is_left_are_returned(make_pair) -> None:
    async with make_pair(device_pages=6, host_pages=0) as pair:
        batch = [await pair.restore(name, [number] * 8) for number, name in enumerate(("r1", "r2"), start=1)]
        assert pair.engine.grow_many(batch, 4) == []
        assert [ready.length for ready in batch] == [12, 12]
        short = pair.engine.grow_many(batch, 1)
        assert set(map(id, short)) <= set(map(id, batch))
        assert short
        assert all((ready.length == 12) == (ready in short) for ready in batch)
        given_back = batch.pop()
        await pair.engine.finish(given_back)
        before = batch[0].length
        with pytest.raises(InvalidRequest):
            pair.engine.grow_many([batch[0], given_back], 1)
        assert batch[0].length == before
        await pair.engine.finish(batch[0])
        await pair.check_idle()


async def test_statistics_have_the_names_of_their_type(make_pair) -> None:
    async with make_pair() as pair:
        statistics = pair.engine.statistics()
        assert set(statistics) == set(EngineStatistics.__annotations__)
