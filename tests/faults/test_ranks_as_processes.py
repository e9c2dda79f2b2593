"""Ranks as real processes that vote over sockets: equal books, one-rank faults, and a rank that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tidekv.engine.workload.rank_process import RankPlan, RankProcess, Serve, Served, Stop

pytestmark = [pytest.mark.slow, pytest.mark.nixl]


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@asynccontextmanager
async def instance(ranks: int, fault_rate: float) -> AsyncIterator[list[RankProcess]]:
    address, *prefills = (free_address() for _ in range(ranks + 1))
    prefill = ",".join(prefills)
    members = [RankProcess(RankPlan(rank, ranks, address, prefill, fault_rate=fault_rate)) for rank in range(ranks)]
    try:
        assert await asyncio.gather(*(member.hear() for member in members)) == ["ready"] * ranks
        yield members
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
            assert all(one.ends == {"finished": 40} for one in served), served
            assert len({one.books for one in served}) == 1
            assert all(one.sources == served[0].sources for one in served)
            assert served[0].sources["l1"] > 0


async def test_a_killed_rank_is_named_and_all_serve_again_when_it_is_back() -> None:
    async with instance(2, fault_rate=0.0) as members:
        await serve_all(members, Serve(1, 20))
        work = Serve(2, 1500)
        members[0].tell(work)
        members[1].tell(work)
        await asyncio.sleep(0.5)  # In the midst of the work: nothing says where.
        assert members[1].process.pid is not None
        os.kill(members[1].process.pid, signal.SIGKILL)
        served = await members[0].hear()
        assert isinstance(served, Served)
        assert len(served.causes) > 0
        assert all("rank 1 is lost" in cause for cause in served.causes), served.causes
        await members[1].join()
        members[1] = RankProcess(members[1].plan)
        assert await members[1].hear() == "ready"
        served = await serve_all(members, Serve(3, 30))
        assert all(one.ends == {"finished": 30} for one in served), served
        assert len({one.books for one in served}) == 1
        assert all(one.statistics["epoch"] == 2 for one in served)


async def test_a_stopped_rank_is_named_by_its_silence_and_joins_again_when_it_goes_on() -> None:
    async with instance(2, fault_rate=0.0) as members:
        await serve_all(members, Serve(1, 20))
        for member in members:
            member.tell(Serve(2, 300))
        await asyncio.sleep(0.3)
        pid = members[1].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        served = await members[0].hear()
        os.kill(pid, signal.SIGCONT)
        assert isinstance(served, Served)
        assert all("rank 1 is lost: silent for" in cause for cause in served.causes), served.causes
        awake = await members[1].hear()
        assert isinstance(awake, Served)
        assert all("is lost" in cause for cause in awake.causes), awake.causes
        served = await serve_all(members, Serve(3, 30))
        assert all(one.ends == {"finished": 30} for one in served), served
        assert len({one.books for one in served}) == 1
