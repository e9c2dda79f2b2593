"""How many votes there are: one a turn for all requests together, none while nothing changes; and what growth needs."""

from __future__ import annotations

import asyncio
import urllib.request

import pytest

from tests.support.inside import calls_of, core_of, reserve_of, runtime_of
from tests.support.waits import expected
from tidekv.states import events
from tidekv.states.errors import InvalidRequest, OutOfPages


async def test_votes_end_when_ranks_are_idle_and_one_vote_serves_many_requests(world) -> None:
    async with world.instance(2) as members:
        before = members[0].statistics()["votes"]
        readies = await asyncio.gather(
            *(
                asyncio.gather(*(member.restore(f"r{number}", [number, 1, 2, 3, 4]) for member in members))
                for number in range(20)
            )
        )
        votes = members[0].statistics()["votes"]
        assert isinstance(votes, int)
        assert isinstance(before, int)
        assert 0 < votes - before < 40
        for pair in readies:
            await world.finish_all(members, list(pair))
        await world.settle(members)
        quiet = await quiet_votes(members)
        await asyncio.sleep(0.3)
        assert [member.statistics()["votes"] for member in members] == [quiet] * 2


async def quiet_votes(members) -> int:
    """Votes of rank 0 once nothing is voted on any more."""
    before: list[int] = []
    async with expected("the end of votes"):
        while True:
            votes = [member.statistics()["votes"] for member in members]
            # Between two turns the votes of all ranks are equal, and no rank has anything to send.
            is_quiet = len(set(votes)) == 1 and all(runtime_of(member.engine).ranks.is_caught_up for member in members)
            if is_quiet and votes == before:
                return votes[0]
            before = votes
            await asyncio.sleep(0.2)  # Far longer than a turn: news on its way to another rank has arrived.


async def test_256_requests_in_flight_are_one_collective_a_turn_and_none_while_they_wait(world) -> None:
    count = 256
    # Three pages each, and a quarter of the pool more than one prefill may withhold.
    async with world.instance(2, device_pages=4 * count, silence_s=20.0) as members:
        for member in members:
            member.gate.clear()
        before = members[0].statistics()
        serving = [
            asyncio.gather(*(member.restore(f"r{number}", [number, 1, 2, 3, 4]) for member in members))
            for number in range(count)
        ]
        await asyncio.gather(
            *(
                calls_of(member.engine).wait_until(lambda engine=member.engine: len(core_of(engine).rooms) == count)
                for member in members
            )
        )
        # All wait for prefill: that is no reason to vote.
        waiting = await quiet_votes(members)
        for member in members:
            member.gate.set()
        readies = await asyncio.gather(*serving)
        after = members[0].statistics()
        assert after["votes"] - before["votes"] == after["turns"] - before["turns"]
        # Each request has more than two facts to agree on: arrival, promise, pages, first token.
        assert after["votes"] - before["votes"] < count
        # A rank may be READY before the others have taken the answer that made it so.
        counted = await quiet_votes(members)
        assert [member.statistics()["votes"] for member in members] == [counted] * 2
        assert waiting < after["votes"]
        for pair in readies:
            for member, ready in zip(members, pair, strict=True):
                await member.engine.abort(ready.request_id)
        await world.settle(members)
        idle = await quiet_votes(members)
        await asyncio.sleep(0.3)
        assert [member.statistics()["votes"] for member in members] == [idle] * 2


async def test_votes_are_among_the_metrics(world) -> None:
    async with world.instance(2, metrics=True) as members:
        await world.finish_all(members, await world.restore_all(members, "a"))
        await world.settle(members)
        address = members[1].engine.metrics_address
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics").read().decode())
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        assert float(lines["tidekv_vote_seconds_count"]) > 0
        assert float(lines['tidekv_engine{name="epoch",part="ranks"}']) == 1


async def test_growth_beyond_the_reserve_is_agreed_on_and_the_same_on_all_ranks(world) -> None:
    async with world.instance(2) as members:
        await members[0].engine.wait_formed()
        readies = await world.restore_all(members, "a")
        reserve = len(reserve_of(readies[0]))
        tokens = (reserve + 5) * world.PAGE_SIZE
        taken = await asyncio.gather(
            *(member.engine.wait_grown(ready, tokens) for member, ready in zip(members, readies, strict=True))
        )
        assert taken[0] == taken[1]
        assert len(taken[0]) >= reserve + 4
        assert all(ready.length == len(world.PROMPT) + tokens for ready in readies)
        output = list(range(tokens + 1))
        await world.finish_all(members, readies, output)
        await world.settle(members)


async def test_growth_within_the_reserve_waits_for_no_other_rank(world, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world.instance(2, hold_s=600.0) as members:
        readies = await world.restore_all(members, "a")
        ready, engine = readies[0], members[0].engine
        reserve = reserve_of(ready)
        room = len(ready.pages) * world.PAGE_SIZE - ready.length
        asked: list[events.GrowthTaken] = []
        post = runtime_of(engine).ranks.post

        def noted(event: events.Event) -> None:
            if isinstance(event, events.GrowthTaken):
                asked.append(event)
            post(event)

        monkeypatch.setattr(runtime_of(engine).ranks, "post", noted)
        async with expected("growth within the reserve", limit_s=30.0):
            taken = await engine.wait_grown(ready, room + len(reserve) * world.PAGE_SIZE)
        assert taken == reserve
        # The pages taken are reported; no more are requested.
        assert [(event.page_count, event.wanted) for event in asked] == [(len(reserve), 0)]
        await world.finish_all(members, readies)
        await world.settle(members)


async def test_growth_that_one_caller_alone_wants_or_that_cannot_be_had_is_refused_and_changes_nothing(world) -> None:
    async with world.instance(2, hold_s=0.5) as members:
        readies = await world.restore_all(members, "a")
        lengths = [ready.length for ready in readies]
        with pytest.raises(OutOfPages):
            await members[1].engine.wait_grown(readies[1], 20 * world.PAGE_SIZE)
        for member, ready in zip(members, readies, strict=True):
            with pytest.raises(InvalidRequest, match="tokens must be a whole number, 0 or more, not -1"):
                await member.engine.wait_grown(ready, -1)
        beyond = [member.engine.wait_grown(ready, 400) for member, ready in zip(members, readies, strict=True)]
        assert [type(end) for end in await asyncio.gather(*beyond, return_exceptions=True)] == [OutOfPages] * 2
        assert [ready.length for ready in readies] == lengths
        await world.finish_all(members, readies)
        await world.settle(members)
