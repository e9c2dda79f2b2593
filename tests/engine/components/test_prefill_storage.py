"""A prefill worker writes windows and records to storage, and a decode worker restores a prompt from there alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.engine.components.conftest import FULL, SIZE, Worker, component
from tests.support.configs import engine_config
from tests.support.placing_storage import PlainStorage
from tests.support.waits import LEASE_S, PATIENT, PATIENT_STORE
from tidekv import (
    DecodeEngine,
    DevicePool,
    HostPool,
    InvalidConfig,
    InvalidRequest,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    PromptStoreSettings,
    Room,
    open_storage,
)
from tidekv.backends.storage.base import Storage
from tidekv.engine.synthetic.components import component_digest
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.transports.loopback import LoopbackNetwork

WHOLE = list(range(100, 100 + 6 * SIZE))
LONGER = [*WHOLE, 7, 8]
KINDS = ("window", "state")
Keep = Callable[[Room, SyntheticKV], None]


@asynccontextmanager
async def pair(
    folder: Path, *, writes: bool, reads: bool, keep: Keep | None = None
) -> AsyncIterator[tuple[PrefillPeer, Worker, list[dict[str, int]]]]:
    """A prefill worker that writes to storage or not, and a decode worker that uses it or not."""
    network, asked = LoopbackNetwork(), list[dict[str, int]]()
    theirs, ours = (tuple(component(kind, 24, 16) for kind in KINDS) for _ in range(2))
    pool, device = DevicePool.allocate(FULL, 48), DevicePool.allocate(FULL, 48)
    prefill = SyntheticPrefill(pool, components=theirs)

    def storage() -> Storage:
        return open_storage(f"file:{folder}?capacity=64MB")

    async def serve(room: Room) -> None:
        asked.append({name: request.requested for name, request in room.component_pages.items()})
        if keep is not None:
            keep(room, SyntheticKV(theirs[1].device))
        await prefill.serve(room)

    peer = PrefillPeer(
        PrefillConfig(listen="prefill", lease_s=LEASE_S, store=PromptStoreSettings(**PATIENT_STORE)),
        device=pool,
        transport=LoopbackTransport("prefill-0", network),
        components=theirs,
        on_room=serve,
        storage=storage() if writes else None,
    )
    engine = DecodeEngine(
        engine_config(**PATIENT, prefetch_threshold_tokens=0),
        device=device,
        host=HostPool.allocate(FULL, 48),
        components=ours,
        storage=storage() if reads else None,
        transport=LoopbackTransport("decode-0", network),
    )
    async with peer, engine:
        yield peer, Worker(engine, device, ours), asked


async def test_what_prefill_wrote_of_windows_and_records_a_decode_worker_restores(tmp_path: Path) -> None:
    async with pair(tmp_path, writes=True, reads=False) as (peer, worker, asked):
        await worker.restore("r1", WHOLE)
        await peer.wait_stored()
        statistics = peer.statistics()
        # The window's pages at positions 3 to 5, and the record after the last one.
        assert asked == [{"window": 3, "state": 1}]
        assert (statistics["store_pages_written"], statistics["store_component_pages_written"]) == (6, 4)
    async with pair(tmp_path, writes=True, reads=True) as (peer, worker, asked):
        ready = await worker.restore("r2", WHOLE)
        assert {source: tokens for source, tokens in ready.sources.items() if tokens} == {"l3": len(WHOLE)}
        assert asked == [{"window": 0, "state": 0}]
        await peer.wait_stored()
        # Nothing was sent of components, so there is nothing to write.
        assert peer.statistics()["store_component_pages_written"] == 0


@pytest.mark.parametrize("pages", [3, 6])
async def test_what_prefill_keeps_inside_of_a_prompt_serves_prompts_that_end_there(tmp_path: Path, pages: int) -> None:
    def keep(room: Room, kv: SyntheticKV) -> None:
        """The record after some pages, in a page that the prefill uses for nothing else."""
        digest = prompt_digests(bytes(room.tokens or b"")[: len(WHOLE) * 4], SIZE)[pages - 1]
        kv.fill([23], [component_digest("state", digest)])
        room.keep_component_pages("state", pages - 1, [23])

    async with pair(tmp_path, writes=True, reads=False, keep=keep) as (peer, worker, _):
        await worker.restore("r1", LONGER)
        await peer.wait_stored()
        # Of the window positions 4 and 5; the page behind them is not full, and the record after it has no place.
        assert peer.statistics()["store_component_pages_written"] == 3
    async with pair(tmp_path, writes=False, reads=True) as (_, worker, asked):
        ready = await worker.restore("r2", WHOLE[: pages * SIZE])
        assert ready.sources["l3"] == pages * SIZE
        # Of the window, position 3 was not sent, and none before it, so all of it is.
        assert asked == [{"window": 3, "state": 0}]


async def test_windows_that_prefill_keeps_are_stored_whole_however_long_they_are(tmp_path: Path) -> None:
    def keep(room: Room, _: SyntheticKV) -> None:
        room.keep_component_pages("window", 0, range(12, 16))

    async with pair(tmp_path, writes=True, reads=False, keep=keep) as (peer, worker, _):
        await worker.restore("r1", LONGER)
        await peer.wait_stored()
        assert peer.statistics()["store_component_pages_written"] == 6
        assert peer.statistics()["store_component_pages_declined"] == 0


async def test_pages_that_cannot_be_kept_are_refused_by_name(tmp_path: Path) -> None:
    errors = []

    def keep(room: Room, _: SyntheticKV) -> None:
        for name, first, pages in (("x", 0, [1]), ("state", 6, [1]), ("state", -1, [1]), ("window", 0, [99])):
            with pytest.raises(InvalidRequest) as caught:
                room.keep_component_pages(name, first, pages)
            errors.append(str(caught.value))

    async with pair(tmp_path, writes=True, reads=False, keep=keep) as (peer, worker, _):
        await worker.restore("r1", LONGER)
        await peer.wait_stored()
        assert peer.statistics()["store_component_pages_written"] == 2
    assert "no component 'x' to keep pages of; there are window, state" in errors[0]
    assert "positions [6, 7) of component 'state'; its prompt has full pages [0, 6)" in errors[1]
    assert "positions [-1, 0)" in errors[2]
    assert "of component 'window' are not all in the pool of 24" in errors[3]


async def test_storage_for_one_size_of_pages_is_refused() -> None:
    peer = PrefillPeer(
        PrefillConfig(listen="prefill", lease_s=LEASE_S),
        device=DevicePool.allocate(FULL, 8),
        transport=LoopbackTransport("prefill-0", LoopbackNetwork()),
        components=(component("state", 4, 0),),
        storage=PlainStorage(),
    )
    with pytest.raises(InvalidConfig, match="plain: cannot hold component 'state'"):
        async with peer:
            pass
