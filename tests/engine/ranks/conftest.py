"""Several ranks of an instance in one process, each with a prefill rank of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.ports import free_address
from tests.support.configs import engine_config
from tests.support.inside import calls_of, core_of
from tests.support.waits import LEASE_S, LIMIT_S, PATIENT
from tidekv import (
    CachePeerOptions,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    LoopbackNetwork,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.storage.base import Storage
from tidekv.engine.decode.values import ReadyRequest
from tidekv.engine.ranks.group import RankGroup
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.errors import StorageFailed
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.types import PageIds
from tidekv.transports.prefill.prefill_room import Room

PAGE_SIZE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE_SIZE)
PROMPT = list(range(100, 142))  # Ten pages of four tokens and a tail of two.
FULL_PAGES = 10


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
        self,
        rank: int,
        ranks: int,
        address: str,
        *,
        device_pages: int = 64,
        host_pages: int = 128,
        journals: str = "",
        metrics: bool = False,
        stages: int = 1,
        device: str = "owned",
        peers: CachePeerOptions | None = None,
        network: LoopbackNetwork | None = None,
        page_checksums: bool = False,
        **fields: object,
    ) -> None:
        self.number = rank
        self.transport = LoopbackTransport(f"decode-{rank}", network)
        self.prefills = [f"prefill-{at} of {address}" for at in range(ranks)]
        # Stages have layers of their own, and not equally many.
        layout = LAYOUT if stages == 1 else replace(LAYOUT, num_layers=2 + rank)
        self.device = DevicePool.allocate(layout, device_pages)
        self.kv = SyntheticKV(self.device)
        self.storage = MoodyStorage(open_storage("memory:?capacity=64MiB"))
        self.gate = asyncio.Event()
        """Prefill computes while it is set."""
        self.gate.set()
        prefill_pool = DevicePool.allocate(layout, max(256, 2 * device_pages))
        self.prefill = SyntheticPrefill(prefill_pool, chunk_pages=3)
        self.peer = PrefillPeer(
            PrefillConfig(
                listen=self.prefills[rank], lease_s=LEASE_S, place=RankPlace(rank=rank, ranks=ranks, stages=stages)
            ),
            device=prefill_pool,
            transport=LoopbackTransport(f"prefill-{rank}", network),
            on_room=self._serve,
        )
        self.host = HostPool.allocate(layout, host_pages)
        group = {"silence_s": 30.0, "vote_timeout_s": 60.0, "hold_s": 60.0, "form_timeout_s": LIMIT_S, **fields}
        self.engine = DecodeEngine(
            engine_config(
                **PATIENT,
                device=device,
                prefetch_threshold_tokens=0,
                close_deadline_s=2.0,
                metrics_listen="127.0.0.1:0" if metrics else None,
                journal_path=f"{journals}/rank-{rank}.jsonl" if journals else None,
                cache_peers=peers or CachePeerOptions(),
                page_checksums=page_checksums,
            ),
            device=self.device,
            host=self.host,
            storage=self.storage,
            transport=self.transport,
            ranks=RankGroup(rank=rank, ranks=ranks, stages=stages, address=address, **group),  # type: ignore[arg-type]  # Seconds.
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
                request_id=request_id, tokens=tokens, prefill=",".join(self.prefills), send_prompt=True, **options
            )
        )
        digests = prompt_digests(pack_tokens(tokens), PAGE_SIZE)
        assert self.kv.verify(ready.pages[: len(digests)].tolist(), digests) == []
        return ready

    def books(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        core = core_of(self.engine)
        nodes = sorted(
            (node.namespace, node.edge, tuple(node.device or ()), tuple(node.host or ()), node.depth_pages)
            for node in core.state.index.nodes()
        )
        return (nodes, list(core.state.device.free_pages), list(core.state.host.free_pages), len(core.queue))

    def statistics(self) -> dict[str, object]:
        found = self.engine.statistics()["ranks"]
        assert isinstance(found, dict)
        return found


@asynccontextmanager
async def instance(ranks: int, **fields: object) -> AsyncIterator[list[Rank]]:
    address = free_address()
    members = [Rank(rank, ranks, address, **fields) for rank in range(ranks)]
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(member.enter() for member in members))
        try:
            yield members
        finally:
            await asyncio.gather(*(member.life.aclose() for member in members))


async def restore_all(
    members: list[Rank], request_id: str, tokens: Sequence[int] = PROMPT, **options: object
) -> list[ReadyRequest]:
    readies = await asyncio.gather(*(member.restore(request_id, tokens, **options) for member in members))
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
        core_of(member.engine).check()


async def wait_for_room(member: Rank) -> None:
    async with asyncio.timeout(LIMIT_S):
        await calls_of(member.engine).wait_until(lambda: len(core_of(member.engine).rooms) > 0)


@pytest.fixture
def world() -> SimpleNamespace:
    """What tests of ranks are written in."""
    return SimpleNamespace(
        Rank=Rank,
        instance=instance,
        restore_all=restore_all,
        finish_all=finish_all,
        settle=settle,
        wait_for_room=wait_for_room,
        free_address=free_address,
        PROMPT=PROMPT,
        FULL_PAGES=FULL_PAGES,
        PAGE_SIZE=PAGE_SIZE,
    )
