"""How a group of ranks ends and starts again: a rank that breaks, differs, or is lost is named."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.inside import calls_of, core_of, runtime_of
from tests.support.waits import LIMIT_S, expected
from tidekv.engine.decode import driver
from tidekv.states.errors import (
    BrokenInvariant,
    EngineClosed,
    InvalidConfig,
    RankBroken,
    RankLost,
    RanksDiverged,
    RequestFailed,
)
from tidekv.states.events import RequestArrived
from tidekv.states.ranks.agreement import Decision


async def test_a_rank_whose_core_breaks_stops_all_by_its_number(world) -> None:
    address = world.free_address()
    members = [world.Rank(rank, 2, address) for rank in range(2)]
    await asyncio.gather(*(member.enter() for member in members))
    readies = await world.restore_all(members, "a")

    def broken(event: object) -> None:
        raise BrokenInvariant("planted")

    core_of(members[1].engine).step = broken  # type: ignore[method-assign, assignment]  # The fault of this test.
    ends = await asyncio.gather(
        *(member.engine.finish(ready) for member, ready in zip(members, readies, strict=True)), return_exceptions=True
    )
    # Rank 0 had taken the finish before the failure of rank 1 could reach it.
    assert isinstance(ends[1], EngineClosed)
    with pytest.raises(EngineClosed, match="rank 1 broke"):
        async with asyncio.timeout(LIMIT_S):
            await calls_of(members[0].engine).wait_until(lambda: False)
    for member, what in zip(members, (RankBroken, BrokenInvariant), strict=True):
        with pytest.raises(what):
            await member.life.aclose()


async def test_a_raise_after_the_agreement_took_a_call_breaks_the_engine_and_leaves_no_event_without_its_id(
    world,
) -> None:
    address = world.free_address()
    members = [world.Rank(rank, 2, address) for rank in range(2)]
    await asyncio.gather(*(member.enter() for member in members))
    driver = runtime_of(members[1].engine).ranks
    heard = driver._heard

    def raise_once() -> None:
        # Called right after the agreement has taken the event.
        driver._heard = heard
        raise RuntimeError("planted")

    driver._heard = raise_once
    async with asyncio.timeout(LIMIT_S):
        ends = await asyncio.gather(
            *(member.restore("a", world.PROMPT) for member in reversed(members)), return_exceptions=True
        )
    assert [str(end) for end in ends] == ["the engine broke: RuntimeError: planted", str(ends[1])]
    assert "rank 1 broke" in str(ends[1])
    assert all(isinstance(end, EngineClosed) for end in ends)
    assert calls_of(members[1].engine).live_ids() == []
    for member, what in zip(members, (RankBroken, RuntimeError), strict=True):
        with pytest.raises(what):
            await member.life.aclose()


async def test_ranks_that_keep_different_pages_stop_with_the_name_of_what_differs(world) -> None:
    address = world.free_address()
    members = [world.Rank(rank, 2, address) for rank in range(2)]
    await asyncio.gather(*(member.enter() for member in members))
    free = core_of(members[1].engine).state.device.free_pages
    free[0], free[1] = free[1], free[0]
    with pytest.raises(EngineClosed, match=r"ranks differ at turn [0-9]+ in: device pool"):
        await world.restore_all(members, "a")
    for member in members:
        with pytest.raises(RanksDiverged):
            await member.life.aclose()


async def test_a_request_that_one_caller_never_makes_fails_with_its_rank(world) -> None:
    async with world.instance(2, hold_s=0.3) as members:
        with pytest.raises(RequestFailed, match="rank 1 did not make the call in time"):
            await members[0].restore("a", world.PROMPT)
        with pytest.raises(RequestFailed, match="did not make the call in time"):
            await members[1].restore("a", world.PROMPT)
        await world.finish_all(members, await world.restore_all(members, "b"))


async def test_a_rank_that_is_configured_differently_is_refused(world) -> None:
    address = world.free_address()
    leader, other = world.Rank(0, 2, address), world.Rank(1, 2, address, host_pages=64)

    async def enter_leader() -> None:
        with pytest.raises((RankLost, asyncio.CancelledError)):
            await leader.enter()

    waiting = asyncio.ensure_future(enter_leader())
    with pytest.raises(InvalidConfig, match="configured differently"):
        await other.enter()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await leader.life.aclose()
    await other.life.aclose()


async def test_a_lost_rank_fails_requests_by_its_name_and_a_new_epoch_begins_empty_when_it_is_back(world) -> None:
    address = world.free_address()
    members = [world.Rank(rank, 3, address) for rank in range(3)]
    await asyncio.gather(*(member.enter() for member in members))
    readies = await world.restore_all(members, "kept")
    # world.Rank 2 ends without leaving, as a killed process does.
    ranks = runtime_of(members[2].engine).ranks
    assert ranks is not None
    for member in members:
        member.gate.clear()
    hanging = [asyncio.ensure_future(member.restore("waits", world.PROMPT[::-1])) for member in members]
    await asyncio.gather(*(world.wait_for_room(member) for member in members))
    await ranks.close()
    for waiting in hanging[:2]:
        with pytest.raises(RequestFailed, match="rank 2 is lost"):
            await waiting
    hanging[2].cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    for member in members:
        member.gate.set()
    for member, ready in zip(members[:2], readies, strict=False):
        with pytest.raises((RankLost, RequestFailed)):
            await member.restore("too early", world.PROMPT)
        assert not calls_of(member.engine).holds(ready)
    await members[2].life.aclose()
    members[2] = world.Rank(2, 3, address)
    await members[2].enter()
    async with asyncio.timeout(LIMIT_S):
        for member in members:
            driver = runtime_of(member.engine).ranks
            assert driver is not None
            await driver.wait_formed()
            assert member.statistics()["epoch"] == 2
    readies = await world.restore_all(members, "again")
    assert readies[0].sources["transfer"] == len(world.PROMPT)
    await world.finish_all(members, readies)
    await world.settle(members)
    await asyncio.gather(*(member.life.aclose() for member in members))


async def test_a_flush_that_not_all_ranks_have_agreed_on_ends_with_the_loss_of_a_rank(world) -> None:
    async with world.instance(2, vote_timeout_s=5.0) as members:
        await members[0].engine.wait_formed()
        # Rank 1 ends without leaving, as a killed process does. The first flush is posted before rank 0 notices that.
        await runtime_of(members[1].engine).ranks.close()
        flushes = [asyncio.create_task(members[0].engine.flush()) for _ in range(2)]
        async with expected("the end of the flushes", limit_s=30.0):
            ends = await asyncio.gather(*flushes, return_exceptions=True)
        assert [type(end) for end in ends] == [RankLost, RankLost]
        with pytest.raises(RankLost, match="rank 1 is lost"):
            await members[0].engine.flush()
        with pytest.raises(RankLost, match="rank 1 is lost"):
            members[0].engine.change_policy(breaker_failures=3)


async def test_requests_that_all_had_agreed_on_just_before_a_loss_fail_as_well(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The core takes one event in each turn of the loop: most arrivals still wait for it when the loss is seen.
    monkeypatch.setattr(driver, "TURN_S_MAX", -1.0)
    count = 40
    arrivals_waiting: list[int] = []
    async with world.instance(2) as members:
        ranks = runtime_of(members[1].engine).ranks
        follow, rank_lost = ranks._follow, ranks.rank_lost

        def follow_and_close(decision: Decision) -> None:
            follow(decision)
            if sum(isinstance(event, RequestArrived) for event in decision.events) == count:
                ranks._channel._peers[0].close()

        def count_and_lose(rank: int, cause: str) -> None:
            arrivals_waiting.append(sum(isinstance(event, RequestArrived) for event in ranks._driver._calls))
            rank_lost(rank, cause)

        ranks._follow, ranks.rank_lost = follow_and_close, count_and_lose
        calls = [member.restore(f"r{number}", world.PROMPT) for member in members for number in range(count)]
        async with asyncio.timeout(LIMIT_S):
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert arrivals_waiting[0] > count // 2
            assert all(isinstance(end, RequestFailed) for end in ends), ends
            assert {end.cause.partition(":")[0] for end in ends} == {"rank 0 is lost", "rank 1 is lost"}
            await asyncio.gather(*(member.engine.wait_formed() for member in members))
            await world.finish_all(members, await world.restore_all(members, "again"))
