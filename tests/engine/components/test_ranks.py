"""Windows and states on two ranks that decide as one: each has its slice, and what fails on one fails on all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from benchmarks.ports import free_address
from tests.support.configs import engine_config
from tests.support.inside import runtime_of
from tests.support.waits import LEASE_S, LIMIT_S, PATIENT, PATIENT_GROUP
from tidekv import (
    ComponentPools,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    LoopbackTransport,
    OfferedPages,
    PrefillConfig,
    PrefillPeer,
    RankGroup,
    ReadyRequest,
    RequestFailed,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.storage.base import Storage
from tidekv.engine.config.engine_config import DeviceMode
from tidekv.engine.decode.values import RestoredPages
from tidekv.engine.synthetic.components import component_digest, wrong_components
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.errors import CopyFailed
from tidekv.states.handover.rank_place import RankPlace
from tidekv.transports.loopback import LoopbackNetwork

SIZE = 4
RANKS = 2
FULL = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=SIZE)
WINDOW = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", page_size=SIZE)
RECORD = KVLayout(num_layers=2, num_kv_heads=1, head_dim=12, dtype="float32", page_size=16, kind="mla")
PROMPT = list(range(100, 100 + 6 * SIZE))
PREFILL = ",".join(f"prefill-{rank}" for rank in range(RANKS))
LENT = (
    {"full": [40, 3, 31, 7, 19, 28], "window": [9, 2, 5], "state": [6]},
    {"full": [5, 6, 7, 8, 9, 10], "window": [1, 15, 0], "state": [11]},
)
"""Pages of the prompt that each rank lends, by group: none of them has to be the same."""


def components(host_pages: int) -> tuple[ComponentPools, ...]:
    shapes = (("window", WINDOW, 9), ("state", RECORD, 0))
    return tuple(
        ComponentPools(
            name=kind,
            kind=kind,
            window_tokens=tokens,
            device=DevicePool.allocate(layout, 16),
            host=HostPool.allocate(layout, host_pages) if host_pages else None,
        )
        for kind, layout, tokens in shapes
    )


@dataclass
class Rank:
    """One rank as its caller sees it."""

    number: int
    engine: DecodeEngine
    device: DevicePool
    components: tuple[ComponentPools, ...]

    async def restore_into(self, request_id: str, have_tokens: int = 0) -> RestoredPages:
        """Restore into pages that this rank lends, and verify every byte of every group."""
        lent = LENT[self.number]
        pools = {pools.name: pools.device for pools in self.components}
        for name, pool in pools.items():
            if not have_tokens:
                SyntheticKV(pool).fill(lent[name], [bytes(32)] * len(lent[name]))
        request = DecodeRequest(request_id=request_id, tokens=PROMPT, prefill=PREFILL, send_prompt=True)
        restored = await self.engine.restore_into(
            request, lent["full"], have_tokens, component_pages={name: lent[name] for name in pools}
        )
        digests = prompt_digests(pack_tokens(PROMPT), SIZE)
        assert SyntheticKV(self.device).verify(lent["full"], digests) == []
        for name, pool in pools.items():
            wanted = [component_digest(name, digest) for digest in digests[-len(lent[name]) :]]
            assert SyntheticKV(pool).verify(lent[name], wanted) == [], name
        return restored

    async def offer(self) -> OfferedPages:
        """Offer the pages of the prompt, in every group."""
        lent = LENT[self.number]
        offered = {pools.name: lent[pools.name] for pools in self.components}
        return await self.engine.offer(PROMPT, lent["full"], component_pages=offered)

    async def restore(self, request_id: str, prompt: list[int]) -> ReadyRequest:
        ready = await self.engine.restore(
            DecodeRequest(request_id=request_id, tokens=prompt, prefill=PREFILL, send_prompt=True)
        )
        digests = prompt_digests(pack_tokens(prompt), SIZE)
        assert SyntheticKV(self.device).verify(ready.pages[: len(digests)].tolist(), digests) == []
        assert wrong_components(self.components, ready.component_pages, digests) == {}
        return ready


@asynccontextmanager
async def instance(storage: str | None = None, device_mode: DeviceMode = "owned") -> AsyncIterator[list[Rank]]:
    """Two ranks; with `storage` each has an engine for its slice."""
    address = free_address()
    network = LoopbackNetwork()
    members, entered = [], []
    for rank in range(RANKS):
        pool, theirs, ours = DevicePool.allocate(FULL, 48), components(0), components(16)
        device = DevicePool.allocate(FULL, 48)
        peer = PrefillPeer(
            PrefillConfig(listen=f"prefill-{rank}", lease_s=LEASE_S, place=RankPlace(rank=rank, ranks=RANKS)),
            device=pool,
            transport=LoopbackTransport(f"prefill-{rank}", network),
            components=theirs,
            on_room=SyntheticPrefill(pool, components=theirs).serve,
        )
        engine = DecodeEngine(
            engine_config(**PATIENT, close_deadline_s=2.0, prefetch_threshold_tokens=SIZE, device=device_mode),
            device=device,
            host=HostPool.allocate(FULL, 48),
            components=ours,
            storage=None if storage is None else open_storage(storage),
            transport=LoopbackTransport(f"decode-{rank}", network),
            ranks=RankGroup(
                rank=rank,
                ranks=RANKS,
                address=address,
                **PATIENT_GROUP,
            ),
        )
        entered += [peer, engine]
        members.append(Rank(rank, engine, device, ours))
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(part) for part in entered))
        yield members


def component_pages_of(member: Rank) -> dict[str, Storage]:
    return runtime_of(member.engine).storage_in_use.component_pages


async def on_all(members: list[Rank], request_id: str, prompt: list[int]) -> dict[str, int]:
    """Restore on all ranks, leave the tails as they are, and wait for the backups."""
    readies = await asyncio.gather(*(member.restore(request_id, prompt) for member in members))
    for name, tail in readies[0].component_pages.items():
        assert all(ready.component_pages[name].pages.tolist() == tail.pages.tolist() for ready in readies)
    left = {name: (tail.first, tail.pages) for name, tail in readies[0].component_pages.items()}
    await asyncio.gather(
        *(member.engine.finish(ready, component_pages=left) for member, ready in zip(members, readies, strict=True))
    )
    await asyncio.gather(*(member.engine.wait_settled() for member in members))
    return {source: tokens for source, tokens in readies[0].sources.items() if tokens}


async def test_every_rank_has_its_slice_of_windows_and_records_from_every_tier() -> None:
    async with instance() as members:
        assert await on_all(members, "r1", PROMPT) == {"transfer": len(PROMPT)}
        assert await on_all(members, "r2", PROMPT) == {"l1": len(PROMPT)}
        await members[0].engine.flush(("l1",))
        assert await on_all(members, "r3", PROMPT) == {"l2": len(PROMPT)}


async def test_a_window_that_one_rank_cannot_load_is_asked_of_prefill_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> asyncio.Future[None]:
        copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        copied.set_exception(CopyFailed("the bus is gone"))
        return copied

    async with instance() as members:
        await on_all(members, "r1", PROMPT)
        await members[0].engine.flush(("l1",))
        monkeypatch.setattr(runtime_of(members[1].engine).component_copiers["window"], "to_device", fail)
        assert "transfer" not in await on_all(members, "r2", PROMPT)
        assert all(member.engine.statistics()["core"]["extends"] == 1 for member in members)
        assert await on_all(members, "r3", PROMPT) == {"l1": len(PROMPT)}


async def test_ranks_that_leave_different_things_keep_nothing() -> None:
    """What one rank has not left must not be taken for what another has: the request is dropped on all."""
    async with instance() as members:
        readies = await asyncio.gather(*(member.restore("r1", PROMPT) for member in members))
        left = {name: (tail.first, tail.pages) for name, tail in readies[0].component_pages.items()}
        answers = await asyncio.gather(
            members[0].engine.finish(readies[0], component_pages=left),
            members[1].engine.finish(readies[1]),
            return_exceptions=True,
        )
        assert all(isinstance(answer, RequestFailed) for answer in answers), answers
        # The prompt entered the cache when it was restored, without components.
        assert await on_all(members, "r2", PROMPT) == {"l1": len(PROMPT)}
        assert all(member.engine.statistics()["core"]["sent_back"] == 0 for member in members)


async def test_tails_come_from_the_storage_of_every_rank() -> None:
    async with instance("memory:") as members:
        assert await on_all(members, "r1", PROMPT) == {"transfer": len(PROMPT)}
        await members[0].engine.flush(("l1", "l2"))
        for member in members:
            assert all(engine.statistics().pages for engine in component_pages_of(member).values())
        assert await on_all(members, "r2", PROMPT) == {"l3": len(PROMPT)}
        assert await on_all(members, "r3", PROMPT) == {"l1": len(PROMPT)}


async def test_a_record_that_one_rank_has_lost_is_asked_of_prefill_by_all() -> None:
    async with instance("memory:") as members:
        await on_all(members, "r1", PROMPT)
        keys = prompt_digests(pack_tokens(PROMPT), SIZE)
        await component_pages_of(members[1])["state"].delete(keys[-1:])
        await members[0].engine.flush(("l1", "l2"))
        assert await on_all(members, "r2", PROMPT) == {"l3": len(PROMPT)}
        for member in members:
            copies = member.engine.statistics()["component_copies"]
            assert copies["window"]["to_device_bytes"] > 0 == copies["state"]["to_device_bytes"]
            assert member.engine.statistics()["core"]["sent_back"] == 0


async def test_a_record_that_one_rank_cannot_read_any_more_is_asked_of_prefill_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def get_nothing(keys: list[bytes], *_: object, **__: object) -> list[bool]:
        return [False for _ in keys]

    async with instance("memory:") as members:
        await on_all(members, "r1", PROMPT)
        await members[0].engine.flush(("l1", "l2"))
        monkeypatch.setattr(component_pages_of(members[0])["window"], "get_into", get_nothing)
        assert "transfer" not in await on_all(members, "r2", PROMPT)
        assert all(member.engine.statistics()["core"]["extends"] == 1 for member in members)


# --- Pages that the host engine of each rank lends ---


async def lent_on_all(members: list[Rank], request_id: str, have_tokens: int = 0) -> dict[str, int]:
    """Restore into the lent pages of all ranks, which get the same part of the prompt."""
    restored = await asyncio.gather(*(member.restore_into(request_id, have_tokens) for member in members))
    assert all(one.is_complete and one.sources == restored[0].sources for one in restored)
    return {source: tokens for source, tokens in restored[0].sources.items() if tokens}


async def settled(members: list[Rank]) -> None:
    await asyncio.gather(*(member.engine.wait_settled() for member in members))
    for member in members:
        member.engine.check()


async def test_each_tier_fills_the_pages_of_every_group_that_each_rank_lends() -> None:
    async with instance("memory:", "lent") as members:
        assert await lent_on_all(members, "r1") == {"transfer": len(PROMPT)}
        assert await asyncio.gather(*(member.offer() for member in members)) == [OfferedPages(6, 0, 0)] * RANKS
        await settled(members)
        assert await lent_on_all(members, "r2") == {"l2": len(PROMPT)}
        await members[0].engine.flush(("l2",))
        assert await lent_on_all(members, "r3") == {"l3": len(PROMPT)}
        assert await lent_on_all(members, "r4", len(PROMPT) - SIZE) == {"l1": len(PROMPT) - SIZE, "l2": SIZE}
        assert all(member.engine.statistics()["core"]["extends"] == 0 for member in members)
        await settled(members)


@pytest.mark.parametrize("name", ["window", "state"])
async def test_component_pages_that_the_storage_of_one_rank_cannot_read_are_sent_into_the_lent_pages_of_all(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def get_nothing(keys: list[bytes], *_: object, **__: object) -> list[bool]:
        return [False for _ in keys]

    async with instance("memory:", "lent") as members:
        await lent_on_all(members, "r1")
        await asyncio.gather(*(member.offer() for member in members))
        await settled(members)
        await members[0].engine.flush(("l2",))
        monkeypatch.setattr(component_pages_of(members[1])[name], "get_into", get_nothing)
        assert await lent_on_all(members, "r2") == {"l3": len(PROMPT)}
        core = [member.engine.statistics()["core"] for member in members]
        assert [(each["extends"], each["sent_back"]) for each in core] == [(1, 0)] * RANKS
        await settled(members)


async def test_storage_that_is_attached_later_is_used_when_every_rank_has_it() -> None:
    async with instance() as members:
        await members[0].engine.attach_storage("memory:")
        await on_all(members, "r1", PROMPT)
        await members[0].engine.flush(("l1", "l2"))
        assert await on_all(members, "r2", PROMPT) == {"transfer": len(PROMPT)}
        await members[1].engine.attach_storage("memory:")
        await members[0].engine.flush(("l1", "l2"))
        await on_all(members, "r3", PROMPT)
        await members[0].engine.flush(("l1", "l2"))
        assert await on_all(members, "r4", PROMPT) == {"l3": len(PROMPT)}
