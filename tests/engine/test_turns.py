"""A turn of the driver may end behind any event: others run in between, and nothing that was promised depends on it."""

from __future__ import annotations

import pytest

from tidekv import InvalidRequest, open_storage

PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.


@pytest.fixture(params=[-1.0, 60.0], ids=["an event a turn", "all in one turn"])
def turn_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr("tidekv.engine.decode.driver.TURN_S_MAX", request.param)
    return request.param


async def test_a_request_goes_through_every_tier_whatever_a_turn_takes(make_pair, turn_s: float) -> None:
    async with make_pair(storage=open_storage("memory:?capacity=64MiB"), device_pages=16, host_pages=8) as pair:
        for turn in range(4):
            ready = await pair.restore(f"r{turn}", PROMPT)
            await pair.finish(ready, PROMPT, [1, 2, 3])
            await pair.engine.wait_settled()
            await pair.engine.flush(tiers=("l1",) if turn % 2 else ("l1", "l2"))
        assert ready.sources["l2"] + ready.sources["l3"] == 20
        retracted = await pair.engine.retract(await pair.restore("again", PROMPT))
        resumed = await pair.engine.resume(retracted)
        assert pair.wrong_pages(resumed, PROMPT) == []
        await pair.engine.finish(resumed)
        await pair.assert_nothing_held()


async def test_a_caller_that_ran_before_the_abort_of_its_ready_request_is_told_at_the_next_call(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other order of an abort that comes just when a request became READY."""
    async with make_pair() as pair:
        with monkeypatch.context() as patch:
            pair.abort_when_ready(patch, before_its_caller=False)
            ready = await pair.engine.restore(pair.request("r1", PROMPT))
        assert pair.wrong_pages(ready, PROMPT) == []
        await pair.assert_nothing_held()
        for call in (lambda: pair.engine.grow(ready, 1), lambda: pair.engine.grow(ready, 0)):
            with pytest.raises(InvalidRequest, match="given back already"):
                call()
        with pytest.raises(InvalidRequest, match="given back already"):
            await pair.engine.finish(ready)
        # The name is free, and what becomes of it is nothing to the first caller.
        again = await pair.restore("r1", PROMPT)
        with pytest.raises(InvalidRequest, match="given back already"):
            pair.engine.grow(ready, 1)
        await pair.engine.finish(again)
        await pair.assert_nothing_held()
