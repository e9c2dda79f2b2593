"""A look-up counts the tokens of a prompt in each tier, asks storage within its time, and takes nothing."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.inside import core_of
from tests.support.waits import LIMIT_S
from tidekv import InvalidRequest, PromptLookUp, StorageFailed, open_storage

TOKENS = list(range(100, 122))  # Five full pages of four tokens, and two.


async def found_in(pair, **options: object) -> tuple[int, int, int, int]:
    found: PromptLookUp = await pair.engine.look_up(TOKENS, timeout_s=LIMIT_S, **options)
    assert found.not_asked == ""
    return found.l1, found.l2, found.l3, found.transfer


async def test_each_tier_counts_what_the_tiers_before_it_lack(make_pair) -> None:
    async with make_pair(storage=open_storage("memory:")) as pair:
        assert await found_in(pair) == (0, 0, 0, 22)
        ready = await pair.restore("r1", TOKENS)
        await pair.finish(ready, TOKENS, [1])
        await pair.engine.wait_settled()
        before = pair.engine.balance()
        assert await found_in(pair) == (20, 0, 0, 2)
        await pair.engine.flush(("l1",))
        assert await found_in(pair) == (0, 20, 0, 2)
        await pair.engine.flush(("l2",))
        assert await found_in(pair) == (0, 0, 20, 2)
        assert await found_in(pair, namespace="other") == (0, 0, 0, 22)
        assert pair.engine.balance()["device"].total == before["device"].total
        pair.engine.check()


async def test_the_time_to_ready_is_estimated_from_measured_speeds_only(make_pair) -> None:
    async with make_pair(prefetch="soonest") as pair:
        assert (await pair.engine.look_up(TOKENS)).ready_s is None
        await pair.finish(await pair.restore("r1", TOKENS), TOKENS, [1])
        page_s = core_of(pair.engine).rooms.source_load.page_s
        assert page_s > 0
        found = await pair.engine.look_up(TOKENS)
        assert found.not_asked == ""
        assert found.ready_s == pytest.approx(page_s)  # The last page, of which two tokens are missing.
        absent = await pair.engine.look_up(range(500, 522))
        assert (absent.ready_s, absent.not_asked) == (pytest.approx(6 * page_s), "no storage is attached")
        assert (await pair.engine.look_up(TOKENS[:20])).ready_s == 0.0


@pytest.mark.parametrize("way", ["hangs", "fails"])
async def test_storage_that_hangs_or_fails_counts_as_empty_with_the_cause(
    make_pair, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    storage = open_storage("memory:")

    async def exists(keys: object, *, timeout_s: float, **above: object) -> list[bool]:
        if way == "fails":
            raise StorageFailed("no disk")
        await asyncio.Event().wait()
        raise AssertionError

    async with make_pair(storage=storage) as pair:
        monkeypatch.setattr(storage, "exists", exists)
        found = await pair.engine.look_up(TOKENS, timeout_s=0.05)
        assert (found.l3, found.transfer) == (0, 22)
        assert ("did not answer within 0.05 s" if way == "hangs" else "no disk") in found.not_asked
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await pair.engine.look_up(TOKENS, timeout_s=0.0)
