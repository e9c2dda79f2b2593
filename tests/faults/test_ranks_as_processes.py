"""Ranks as real processes that vote over sockets: equal books, one-rank faults, and a rank that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.ports import free_address
from tests.support.rank_faults import Divergence
from tests.support.rank_process import Midway, Plant, RankPlan, RankProcess, Serve, Served, Stop

pytestmark = [pytest.mark.slow, pytest.mark.nixl]


@asynccontextmanager
async def instance(
    ranks: int, fault_rate: float, *, pages: int = 96, ends: bool = True, silence_s: float = 20.0
) -> AsyncIterator[list[RankProcess]]:
    """So many processes; with `ends` they leave in order."""
    address, *prefills = (free_address() for _ in range(ranks + 1))
    prefill = ",".join(prefills)
    members = [
        RankProcess(RankPlan(rank, ranks, address, prefill, pages, pages, fault_rate=fault_rate, silence_s=silence_s))
        for rank in range(ranks)
    ]
    try:
        assert await asyncio.gather(*(member.hear() for member in members)) == ["ready"] * ranks
        yield members
        if not ends:
            return
        for member in members:
            member.tell(Stop())
        assert await asyncio.gather(*(member.join() for member in members)) == [0] * ranks
    finally:
        for member in members:
            member.process.kill()


async def serve_all(members: list[RankProcess], work: Serve) -> list[Served]:
    served = await asyncio.gather(*(member.serve(work) for member in members))
    assert all(one.wrong_pages == 0 for one in served)
    return list(served)


@pytest.mark.parametrize("ranks", [2, 4])
async def test_processes_serve_with_faults_of_their_own_and_keep_the_same(ranks: int) -> None:
    async with instance(ranks, fault_rate=0.1) as members:
        for seed in (1, 2):
            served = await serve_all(members, Serve(seed, 40))
            assert len({one.books for one in served}) == 1
            assert all((one.sources, one.ends) == (served[0].sources, served[0].ends) for one in served)
            # If a prefill rank fails a room, the request fails on all ranks; no other failure costs a request.
            assert {cause for one in served for cause in one.causes} <= {"prefill failed"}
            assert served[0].ends["finished"] > 20
            assert served[0].sources["l1"] > 0


def lost_of(served: list[list[Served]]) -> list[int]:
    """Layers that callers lost, by rank."""
    return [sum(one.layers_lost for one in of_rank) for of_rank in zip(*served, strict=True)]


async def test_callers_that_begin_early_get_the_same_layers_and_losses_on_all_processes() -> None:
    async with instance(2, fault_rate=0.1) as members:
        served: list[list[Served]] = []
        # How many have begun when a copy fails depends on what else the machine does.
        while len(served) < 3 or (len(served) < 12 and not all(lost_of(served))):
            served.append(await serve_all(members, Serve(len(served) + 1, 60, early=True)))
        for round_ in served:
            assert len({one.books for one in round_}) == 1
            assert all((one.sources, one.ends) == (round_[0].sources, round_[0].ends) for one in round_)
            assert {cause for one in round_ for cause in one.causes} <= {"prefill failed"}
        assert all(sum(round_[rank].begun_early for round_ in served) > 5 for rank in range(2)), served
        assert all(lost_of(served)), served
        # A copy fails on one rank at a time, and its layers are lost on both.
        assert served[-1][0].faults.get("layer_fails", 0) + served[-1][1].faults.get("layer_fails", 0) > 0


@pytest.mark.parametrize("ranks", [2, 4])
async def test_agents_are_served_with_faults_of_one_rank_and_all_keep_the_same(ranks: int) -> None:
    async with instance(ranks, fault_rate=0.1, pages=1024) as members:
        served = await serve_all(members, Serve(5, 48, agents=True))
        assert len({one.books for one in served}) == 1
        assert all((one.sources, one.ends) == (served[0].sources, served[0].ends) for one in served)
        assert served[0].sources["l1"] > served[0].sources["transfer"]
        assert len({tuple(sorted(one.faults.items())) for one in served}) > 1  # Each has faults of its own.


@pytest.mark.skipif("TIDEKV_AGENT_TRACE" not in os.environ, reason="TIDEKV_AGENT_TRACE names no recording of agents")
@pytest.mark.parametrize("ranks", [2, 4])
async def test_recorded_agents_are_served_with_faults_of_one_rank_and_all_keep_the_same(ranks: int) -> None:
    async with instance(ranks, fault_rate=0.1, pages=4096) as members:
        for round_ in range(4):
            work = Serve(round_, 40, trace=os.environ["TIDEKV_AGENT_TRACE"], first=40 * round_)
            served = await serve_all(members, work)
            assert len({one.books for one in served}) == 1
            assert all((one.sources, one.ends) == (served[0].sources, served[0].ends) for one in served)


@pytest.mark.parametrize("part", ["index", "device pool", "host pool"])
async def test_a_divergence_that_was_planted_on_one_rank_is_named_on_all(part: Divergence) -> None:
    async with instance(2, fault_rate=0.0, ends=False) as members:
        await serve_all(members, Serve(1, 20))
        members[1].tell(Plant(part))
        # A tree is compared when ranks are idle: behind the last of these requests, so that the next ones detect it.
        rounds = [await serve_all(members, Serve(seed, 20)) for seed in (2, 3)]
        for rank in range(2):
            causes = [cause for served in rounds for cause in served[rank].causes]
            assert any("ranks differ" in cause and f"in: {part}" in cause for cause in causes), causes


@pytest.mark.parametrize("early", [False, True])
async def test_a_killed_rank_is_named_and_all_serve_again_when_it_is_back(early: bool) -> None:
    async with instance(2, fault_rate=0.0) as members:
        await serve_all(members, Serve(1, 20))
        for member in members:
            member.tell(Serve(2, 1500, midway=40, early=early))
        assert await members[0].hear() == Midway()
        assert members[1].process.pid is not None
        os.kill(members[1].process.pid, signal.SIGKILL)
        served = await members[0].hear()
        assert isinstance(served, Served)
        assert len(served.causes) > 0
        assert any("rank 1 is lost" in cause for cause in served.causes), served.causes
        await members[1].join()
        members[1] = RankProcess(members[1].plan)
        assert await members[1].hear() == "ready"
        served = await serve_all(members, Serve(3, 30))
        assert all(one.ends == {"finished": 30} for one in served), served
        assert len({one.books for one in served}) == 1
        assert all(one.statistics["epoch"] == 2 for one in served)


async def test_a_stopped_rank_is_named_by_its_silence_and_joins_again_when_it_goes_on() -> None:
    async with instance(2, fault_rate=0.0, silence_s=4.0) as members:
        await serve_all(members, Serve(1, 20))
        for member in members:
            member.tell(Serve(2, 300, midway=20))
        assert [await member.hear() for member in members] == [Midway()] * 2
        pid = members[1].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        served = await members[0].hear()
        os.kill(pid, signal.SIGCONT)
        assert isinstance(served, Served)
        assert served.causes
        assert all("rank 1 is lost: silent for" in cause for cause in served.causes), served.causes
        awake = await members[1].hear()
        assert isinstance(awake, Served)
        assert awake.causes
        assert all("is lost" in cause for cause in awake.causes), awake.causes
        served = await serve_all(members, Serve(3, 30))
        assert all(one.ends == {"finished": 30} for one in served), served
        assert len({one.books for one in served}) == 1
