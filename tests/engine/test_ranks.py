"""Engines that decide as one: several ranks of an instance in one process, each with a prefill rank of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    LoopbackTransport,
    PrefillPeer,
    Replayer,
    open_storage,
)
from tidekv.backends.keys import pack_tokens
from tidekv.backends.storage.base import Storage
from tidekv.engine.rank_group import RankGroup
from tidekv.engine.values import ReadyRequest
from tidekv.engine.workload.synthetic import SyntheticKV, prompt_digests
from tidekv.engine.workload.synthetic_prefill import SyntheticPrefill
from tidekv.states.errors import (
    BrokenInvariant,
    EngineClosed,
    InvalidConfig,
    InvalidRequest,
    RankBroken,
    RankLost,
    RanksDiverged,
    RequestFailed,
    StorageFailed,
)
from tidekv.states.shapes import PageIds
from tidekv.transports.outgoing import Room

PAGE_SIZE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE_SIZE)
PROMPT = list(range(100, 142))  # Ten pages of four tokens and a tail of two.
FULL_PAGES = 10


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


class MoodyStorage:
    """A storage engine that lacks pages or fails, on the rank that has it."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.fault = ""

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        if self.fault == "error":
            raise StorageFailed("the disk is gone")
        flags = await self._inner.get_into(keys, pages, timeout_s=timeout_s)
        return [False] * len(flags) if self.fault == "nothing" else flags


class Rank:
    """One rank: an engine, its pools, and a prefill rank."""

    def __init__(
        self, rank: int, ranks: int, address: str, *, host_pages: int = 128, journals: str = "", **fields: object
    ) -> None:
        self.prefills = [f"prefill-{at} of {address}" for at in range(ranks)]
        self.device = DevicePool.allocate(LAYOUT, 64)
        self.kv = SyntheticKV(self.device)
        self.storage = MoodyStorage(open_storage("memory:?capacity=64MiB"))
        self.gate = asyncio.Event()
        """Prefill computes while it is set."""
        self.gate.set()
        prefill_pool = DevicePool.allocate(LAYOUT, 256)
        self.prefill = SyntheticPrefill(prefill_pool, chunk_pages=3)
        self.peer = PrefillPeer(
            device=prefill_pool,
            transport=LoopbackTransport(f"prefill-{rank}"),
            listen=self.prefills[rank],
            on_room=self._serve,
            rank=rank,
            ranks=ranks,
        )
        group = {"silence_s": 1.0, "hold_s": 2.0, "form_timeout_s": 20.0, **fields}
        self.engine = DecodeEngine(
            EngineConfig(
                prefetch_threshold_tokens=0,
                close_deadline_s=2.0,
                journal=f"{journals}/rank-{rank}.jsonl" if journals else None,
            ),
            device=self.device,
            host=HostPool.allocate(LAYOUT, host_pages),
            storage=self.storage,
            transport=LoopbackTransport(f"decode-{rank}"),
            ranks=RankGroup(rank=rank, ranks=ranks, address=address, **group),  # type: ignore[arg-type]  # Seconds.
        )
        self.life = AsyncExitStack()

    async def _serve(self, room: Room) -> None:
        await self.gate.wait()
        await self.prefill.serve(room)

    async def enter(self) -> None:
        await self.life.enter_async_context(self.peer)
        await self.life.enter_async_context(self.engine)

    async def restore(self, request_id: str, tokens: Sequence[int], **options: object) -> ReadyRequest:
        ready = await self.engine.restore(
            DecodeRequest(
                request_id=request_id, tokens=tokens, prefill=",".join(self.prefills), prompt="send", **options
            )
        )
        digests = prompt_digests(pack_tokens(tokens), PAGE_SIZE)
        assert self.kv.verify(ready.pages[: len(digests)].tolist(), digests) == []
        return ready

    def books(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        core = self.engine._core
        nodes = sorted(
            (node.namespace, node.edge, tuple(node.device or ()), tuple(node.host or ()), node.depth_pages)
            for node in core.books.index.nodes()
        )
        return (nodes, list(core.books.device.free_pages), list(core.books.host.free_pages), len(core.queue))

    def statistics(self) -> dict[str, object]:
        found = self.engine.statistics()["ranks"]
        assert isinstance(found, dict)
        return found


@asynccontextmanager
async def instance(ranks: int, **fields: object) -> AsyncIterator[list[Rank]]:
    address = free_address()
    members = [Rank(rank, ranks, address, **fields) for rank in range(ranks)]
    async with asyncio.timeout(30):
        await asyncio.gather(*(member.enter() for member in members))
        try:
            yield members
        finally:
            await asyncio.gather(*(member.life.aclose() for member in members))


async def restore_all(members: list[Rank], request_id: str, tokens: Sequence[int] = PROMPT) -> list[ReadyRequest]:
    readies = await asyncio.gather(*(member.restore(request_id, tokens) for member in members))
    assert all(ready.pages.tolist() == readies[0].pages.tolist() for ready in readies)
    assert all(ready.sources == readies[0].sources for ready in readies)
    return list(readies)


async def finish_all(members: list[Rank], readies: list[ReadyRequest], output: Sequence[int] = (1,)) -> None:
    inserted = await asyncio.gather(
        *(member.engine.finish(ready, output) for member, ready in zip(members, readies, strict=True))
    )
    assert len(set(inserted)) == 1


async def settle(members: list[Rank]) -> None:
    await asyncio.gather(*(member.engine.wait_settled() for member in members))
    assert all(member.books() == members[0].books() for member in members)
    for member in members:
        member.engine._core.check()


async def wait_for_room(member: Rank) -> None:
    async with asyncio.timeout(10):
        await member.engine._calls.wait_until(lambda: len(member.engine._core.rooms) > 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
async def test_ranks_serve_through_every_tier_with_equal_pages(ranks: int) -> None:
    async with instance(ranks) as members:
        readies = await restore_all(members, "first")
        assert readies[0].sources["transfer"] == len(PROMPT)
        await finish_all(members, readies)
        await settle(members)
        readies = await restore_all(members, "l1")
        assert readies[0].sources["l1"] == FULL_PAGES * PAGE_SIZE
        await finish_all(members, readies)
        await members[0].engine.flush(("l1",))
        readies = await restore_all(members, "l2")
        assert readies[0].sources["l2"] == FULL_PAGES * PAGE_SIZE
        await finish_all(members, readies)
        await settle(members)
        await members[0].engine.flush(("l1", "l2"))
        readies = await restore_all(members, "l3")
        assert readies[0].sources["l3"] == FULL_PAGES * PAGE_SIZE
        await finish_all(members, readies)
        await settle(members)


async def test_callers_that_submit_in_different_orders_are_served_in_the_leaders() -> None:
    async with instance(2) as members:
        prompts = {f"r{number}": [number * 50 + at for at in range(30)] for number in range(12)}
        names = list(prompts)

        async def serve(member: Rank, order: list[str]) -> dict[str, list[int]]:
            async def one(name: str) -> tuple[str, list[int]]:
                ready = await member.restore(name, prompts[name])
                pages = ready.pages.tolist()
                await member.engine.finish(ready)
                return name, pages

            return dict(await asyncio.gather(*(one(name) for name in order)))

        first, second = await asyncio.gather(serve(members[0], names), serve(members[1], names[::-1]))
        assert first == second
        await settle(members)


@pytest.mark.parametrize("fault", ["nothing", "error"])
@pytest.mark.parametrize("at", [0, 1])
async def test_storage_that_fails_on_one_rank_cuts_the_plan_on_all(fault: str, at: int) -> None:
    async with instance(2) as members:
        await finish_all(members, await restore_all(members, "warm"))
        await settle(members)
        await members[0].engine.flush(("l1", "l2"))
        members[at].storage.fault = fault
        readies = await restore_all(members, "cut")
        assert readies[0].sources["l3"] == 0
        assert readies[0].sources["transfer"] == len(PROMPT)
        await finish_all(members, readies)
        await settle(members)


async def test_a_copy_that_cannot_be_started_on_one_rank_cuts_the_plan_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with instance(2) as members:
        await finish_all(members, await restore_all(members, "warm"))
        await settle(members)
        await members[0].engine.flush(("l1",))

        def refuse(host_pages: PageIds, device_pages: PageIds) -> None:
            raise MemoryError("no staging memory on this rank")

        copier = members[1].engine._parts.copier
        assert copier is not None
        monkeypatch.setattr(copier, "to_device", refuse)
        readies = await restore_all(members, "cut")
        assert readies[0].sources["l2"] == 0
        assert readies[0].sources["transfer"] == len(PROMPT)
        await finish_all(members, readies)
        await settle(members)


async def test_the_journal_of_each_rank_holds_the_same_events_and_replays(tmp_path: Path) -> None:
    async with instance(2, journals=str(tmp_path)) as members:
        await finish_all(members, await restore_all(members, "warm"))
        await settle(members)
        await members[0].engine.flush(("l1",))
        members[1].storage.fault = "nothing"
        await finish_all(members, await restore_all(members, "again"))
        await settle(members)
        books = members[0].books()
    for rank in range(2):
        replayer = Replayer(tmp_path / f"rank-{rank}.jsonl")
        assert replayer.run().complete
        assert list(replayer.core.books.device.free_pages) == books[1]


async def test_an_abort_on_one_rank_ends_the_request_on_all() -> None:
    async with instance(2) as members:
        readies = await restore_all(members, "a")
        await members[1].engine.abort("a")
        with pytest.raises((RequestFailed, InvalidRequest)):
            await members[0].engine.finish(readies[0])
        await settle(members)


async def test_votes_end_when_ranks_are_idle_and_one_vote_serves_many_requests() -> None:
    async with instance(2) as members:
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
            await finish_all(members, list(pair))
        await settle(members)
        await asyncio.sleep(0.2)  # The last vote, in which they agree that they are idle.
        quiet = [member.statistics()["votes"] for member in members]
        await asyncio.sleep(0.3)
        assert [member.statistics()["votes"] for member in members] == quiet


async def test_only_the_leader_flushes_and_changes_policies() -> None:
    async with instance(2) as members:
        with pytest.raises(InvalidRequest, match="call them on rank 0"):
            await members[1].engine.flush()
        with pytest.raises(InvalidRequest, match="call them on rank 0"):
            members[1].engine.change_policy(breaker_failures=3)
        members[0].engine.change_policy(breaker_failures=3)
        await finish_all(members, await restore_all(members, "a"))
        await settle(members)
        assert [member.engine.policy.breaker_failures for member in members] == [3, 3]


async def test_storage_is_used_while_all_ranks_have_one() -> None:
    async with instance(2) as members:
        await finish_all(members, await restore_all(members, "warm"))
        await settle(members)
        await members[0].engine.flush()
        await members[1].engine.detach_storage()
        readies = await restore_all(members, "without")
        assert readies[0].sources["l3"] == 0
        await finish_all(members, readies)
        await members[1].engine.attach_storage("memory:?capacity=64MiB")
        await settle(members)
        assert all(member.engine._core.books.storage_available for member in members)


async def test_a_rank_whose_core_breaks_stops_all_by_its_number() -> None:
    address = free_address()
    members = [Rank(rank, 2, address) for rank in range(2)]
    await asyncio.gather(*(member.enter() for member in members))
    readies = await restore_all(members, "a")

    def broken(event: object) -> None:
        raise BrokenInvariant("planted")

    members[1].engine._core.step = broken  # type: ignore[method-assign, assignment]  # The fault of this test.
    ends = await asyncio.gather(
        *(member.engine.finish(ready) for member, ready in zip(members, readies, strict=True)), return_exceptions=True
    )
    # Rank 0 had taken the finish before it could hear of anything.
    assert isinstance(ends[1], EngineClosed)
    with pytest.raises(EngineClosed, match="rank 1 broke"):
        async with asyncio.timeout(10):
            await members[0].engine._calls.wait_until(lambda: False)
    for member, what in zip(members, (RankBroken, BrokenInvariant), strict=True):
        with pytest.raises(what):
            await member.life.aclose()


async def test_ranks_that_keep_different_pages_stop_with_the_name_of_what_differs() -> None:
    address = free_address()
    members = [Rank(rank, 2, address) for rank in range(2)]
    await asyncio.gather(*(member.enter() for member in members))
    free = members[1].engine._core.books.device.free_pages
    free[0], free[1] = free[1], free[0]
    with pytest.raises(EngineClosed, match=r"ranks differ at turn [0-9]+ in: device pool"):
        await restore_all(members, "a")
    for member in members:
        with pytest.raises(RanksDiverged):
            await member.life.aclose()


async def test_a_request_that_one_caller_never_makes_fails_with_its_rank() -> None:
    async with instance(2, hold_s=0.3) as members:
        with pytest.raises(RequestFailed, match="rank 1 did not make the call in time"):
            await members[0].restore("a", PROMPT)
        with pytest.raises(RequestFailed, match="did not make the call in time"):
            await members[1].restore("a", PROMPT)
        await finish_all(members, await restore_all(members, "b"))


async def test_a_rank_that_is_configured_differently_is_refused() -> None:
    address = free_address()
    leader, other = Rank(0, 2, address), Rank(1, 2, address, host_pages=64)

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


async def test_a_lost_rank_fails_requests_by_its_name_and_a_new_epoch_begins_empty_when_it_is_back() -> None:
    address = free_address()
    members = [Rank(rank, 3, address) for rank in range(3)]
    await asyncio.gather(*(member.enter() for member in members))
    readies = await restore_all(members, "kept")
    # Rank 2 ends without leaving, as a killed process does.
    ranks = members[2].engine._parts.ranks
    assert ranks is not None
    for member in members:
        member.gate.clear()
    hanging = [asyncio.ensure_future(member.restore("waits", PROMPT[::-1])) for member in members]
    await asyncio.gather(*(wait_for_room(member) for member in members))
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
            await member.restore("too early", PROMPT)
        assert not member.engine._calls.holds(ready)
    await members[2].life.aclose()
    members[2] = Rank(2, 3, address)
    await members[2].enter()
    async with asyncio.timeout(20):
        for member in members:
            driver = member.engine._parts.ranks
            assert driver is not None
            await driver.wait_formed()
            assert member.statistics()["epoch"] == 2
    readies = await restore_all(members, "again")
    assert readies[0].sources["transfer"] == len(PROMPT)
    await finish_all(members, readies)
    await settle(members)
    await asyncio.gather(*(member.life.aclose() for member in members))
