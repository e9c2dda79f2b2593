"""Bits flipped on the way, in host memory and in storage: with `page_checksums` no request becomes READY with them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from tests.support.configs import engine_config
from tests.support.inside import core_of
from tests.support.waits import PATIENT, expected
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    InvalidConfig,
    KVLayout,
    NixlTransport,
    PrefillPeer,
    Replayer,
    RequestFailed,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.storage.memory import MemoryStorage
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.types import PageIds
from tidekv.transports.base import PeerMemory
from tidekv.transports.loopback import LoopbackTransport

PROMPT = list(range(100, 142))  # Ten pages of four tokens and a partial one of two.


def flip(pool: DevicePool, page: int) -> None:
    """Flip one bit in the middle of a page."""
    row = pool.rows[len(pool.rows) // 2][page]
    row[len(row) // 2] ^= 4


@pytest.fixture
def flipped_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[DevicePool, int], list[int]]:
    """Flip a bit of the last page of each of the next writes to a pool; returns the pages."""

    def flip_next(pool: DevicePool, count: int) -> list[int]:
        flipped: list[int] = []
        for kind in (LoopbackTransport, NixlTransport):

            async def write(
                self: object, peer: object, our_pages: PageIds, their_pages: PageIds, whole: object = kind.write
            ) -> int:
                written = await whole(self, peer, our_pages, their_pages)  # type: ignore[operator]  # The original.
                if len(flipped) < count:
                    flip(pool, their_pages[-1])
                    flipped.append(their_pages[-1])
                return int(written)

            monkeypatch.setattr(kind, "write", write)
        return flipped

    return flip_next


async def kept_in_host_memory(pair) -> None:
    ready = await pair.restore("warm", PROMPT)
    await pair.finish(ready, PROMPT, [1])
    await pair.engine.wait_settled()
    await pair.engine.flush(("l1",))


def host_pages(pair) -> list[int]:
    index = core_of(pair.engine).state.index
    return [page for node in index.nodes() if node.host is not None for page in node.host]


async def test_every_tier_serves_the_right_bytes_with_checksums(make_pair) -> None:
    async with make_pair(storage=open_storage("memory:"), page_checksums=True) as pair:
        await kept_in_host_memory(pair)
        ready = await pair.restore("from host", PROMPT)
        assert ready.sources == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}
        await pair.finish(ready, PROMPT, [1, 2, 3])
        await pair.engine.wait_settled()
        await pair.engine.flush()
        ready = await pair.restore("from storage", PROMPT)
        assert ready.sources == {"l1": 0, "l2": 0, "l3": 40, "transfer": 2}
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush(("l1",))
        ready = await pair.restore("fetched, then from host", PROMPT)
        assert ready.sources == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()
        assert pair.core()["l2_damaged"] == pair.engine.statistics()["receiver"]["pages_damaged"] == 0


@pytest.mark.parametrize("page", [0, 4, 9])
async def test_a_bit_flipped_in_host_memory_is_found_and_the_page_leaves_it(make_pair, page: int) -> None:
    async with make_pair(page_checksums=True) as pair:
        await kept_in_host_memory(pair)
        pair.host.array[sorted(host_pages(pair))[page], 77] ^= 16
        ready = await pair.restore("r1", PROMPT)
        assert ready.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 42}
        assert pair.core()["l2_damaged"] == 1
        await pair.engine.wait_settled()
        assert host_pages(pair) == []
        # The next finish keeps good copies again.
        await pair.finish(ready, PROMPT, [1])
        await pair.engine.wait_settled()
        await pair.engine.flush(("l1",))
        ready = await pair.restore("r2", PROMPT)
        assert ready.sources == {"l1": 0, "l2": 40, "l3": 0, "transfer": 2}
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_without_the_option_a_flipped_bit_of_host_memory_reaches_ready(make_pair) -> None:
    async with make_pair() as pair:
        await kept_in_host_memory(pair)
        pair.host.array[sorted(host_pages(pair))[4], 77] ^= 16
        ready = await pair.engine.restore(pair.request("r1", PROMPT))
        assert pair.wrong_pages(ready, PROMPT) == [4]
        await pair.finish(ready, PROMPT, [1])


async def test_a_damaged_host_page_is_not_put_in_storage(make_pair) -> None:
    async with make_pair(page_checksums=True) as pair:
        await kept_in_host_memory(pair)
        pages = next(node.host for node in core_of(pair.engine).state.index.nodes() if node.host)
        pair.host.array[pages[3], 5] ^= 1
        storage = MemoryStorage(capacity_bytes=1 << 20)
        await pair.engine.attach_storage(storage)
        # Its pages come from prefill again, after the damage was found on the way to the device.
        await pair.finish(await pair.restore("r1", PROMPT), PROMPT, [1])
        await pair.engine.wait_settled()
        assert storage.statistics().pages == 10
        # Now the damage is found by the put: the pages are on the device still, so no copy has looked at them.
        await storage.clear()
        await pair.engine.attach_storage(MemoryStorage(capacity_bytes=1 << 20))
        pages = next(node.host for node in core_of(pair.engine).state.index.nodes() if node.host)
        pair.host.array[pages[3], 5] ^= 1
        await pair.finish(await pair.restore("r2", PROMPT), PROMPT, [1])
        await pair.engine.wait_settled()
        assert pair.engine.statistics()["storage"]["pages"] == 3
        assert pair.core()["l2_damaged"] == 2
        assert host_pages(pair) == []
        await pair.assert_nothing_held()


async def test_a_bit_flipped_in_memory_storage_is_found(make_pair) -> None:
    storage = MemoryStorage(capacity_bytes=1 << 20)
    async with make_pair(storage=storage, page_checksums=True) as pair:
        await kept_in_host_memory(pair)
        await pair.engine.flush()
        list(storage._pages.values())[4].page[9] ^= 2
        ready = await pair.restore("r1", PROMPT)
        assert ready.sources["l3"] < 40
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_pages_damaged_on_the_way_are_asked_for_again(make_pair, flipped_writes, caplog) -> None:
    async with make_pair(page_checksums=True) as pair:
        flipped = flipped_writes(pair.device, 1)
        with caplog.at_level(logging.WARNING):
            ready = await pair.restore("r1", PROMPT)
        assert len(flipped) == 1
        assert ready.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 42}
        assert pair.core()["prefill_retries"] == 1
        assert pair.engine.statistics()["receiver"]["pages_damaged"] == 1
        (record,) = [
            record.getMessage() for record in caplog.records if "is not what prefill sent" in record.getMessage()
        ]
        assert "request_id=r1" in record
        assert f"device page {flipped[0]}" in record
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_pages_that_stay_damaged_fail_the_request_by_name(make_pair, flipped_writes) -> None:
    async with make_pair(page_checksums=True) as pair:
        flipped_writes(pair.device, 1000)
        with pytest.raises(RequestFailed) as failed:
            await pair.engine.restore(pair.request("r1", PROMPT))
        assert failed.value.cause == "pages damaged"
        assert "of the prompt" in failed.value.detail
        await pair.assert_nothing_held()


async def test_without_the_option_a_flipped_bit_of_a_transfer_reaches_ready(make_pair, flipped_writes) -> None:
    async with make_pair() as pair:
        flipped_writes(pair.device, 1)
        ready = await pair.engine.restore(pair.request("r1", PROMPT))
        assert len(pair.wrong_pages(ready, PROMPT)) == 1
        await pair.finish(ready, PROMPT, [1])


async def test_a_page_that_changes_at_prefill_while_it_is_written_is_found(make_pair, monkeypatch) -> None:
    whole, flipped = LoopbackTransport.write, list[int]()
    async with make_pair(page_checksums=True) as pair:

        async def write(self: LoopbackTransport, peer: PeerMemory, our_pages: PageIds, their_pages: PageIds) -> int:
            if not flipped:
                flipped.append(our_pages[-1])
                flip(pair.prefill._kv._pool, our_pages[-1])
            return await whole(self, peer, our_pages, their_pages)

        monkeypatch.setattr(LoopbackTransport, "write", write)
        async with expected("a restore that starts over"):
            ready = await pair.engine.restore(pair.request("r1", PROMPT))
        assert pair.core()["prefill_retries"] == 1
        await pair.finish(ready, PROMPT, [1])


async def test_damage_of_the_partial_last_page_is_found(make_pair, flipped_writes) -> None:
    async with make_pair(page_checksums=True) as pair:
        await pair.finish(await pair.restore("warm", PROMPT), PROMPT, [1])
        # All full pages are on the device: only the partial page is sent.
        flipped = flipped_writes(pair.device, 1)
        ready = await pair.restore("r1", PROMPT)
        assert ready.sources["transfer"] == 2
        assert len(flipped) == 1
        assert pair.core()["prefill_retries"] == 1
        await pair.finish(ready, PROMPT, [1])


async def test_requests_that_share_a_damaged_transfer_get_the_right_bytes(make_pair, flipped_writes) -> None:
    async with make_pair(page_checksums=True) as pair:
        flipped_writes(pair.device, 2)
        async with expected("three requests with one prompt"):
            done = await asyncio.gather(*(pair.restore(f"r{at}", PROMPT) for at in range(3)))
        for ready in done:
            await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()


@pytest.mark.parametrize("seed", range(6))
async def test_bits_that_flip_anywhere_at_any_time_reach_no_ready_request(
    make_pair, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    source, ends = Random(seed), Counter[str]()
    async with make_pair(page_checksums=True, device_pages=48, host_pages=40) as pair:
        write = LoopbackTransport.write

        async def flipping(self: LoopbackTransport, peer: PeerMemory, our_pages: PageIds, their_pages: PageIds) -> int:
            written = await write(self, peer, our_pages, their_pages)
            if source.random() < 0.1:
                flip(pair.device, source.choice(their_pages))
            return written

        monkeypatch.setattr(LoopbackTransport, "write", flipping)

        async def serve(client: int) -> None:
            for turn in range(8):
                # Some pages are shared by all, some by the turns of one client, and the rest by none.
                own = range(client * 1000, client * 1000 + source.randrange(1, 40))
                prompt = [*PROMPT[: source.choice((0, 12, 40))], *own]
                if (pages := host_pages(pair)) and source.random() < 0.3:
                    pair.host.array[source.choice(pages), source.randrange(pair.host.layout.page_bytes)] ^= (
                        1 << source.randrange(8)
                    )
                try:
                    # `restore` compares every byte.
                    ready = await pair.restore(f"c{client} t{turn}", prompt)
                except RequestFailed as failed:
                    ends[failed.cause] += 1
                    continue
                ends["ready"] += 1
                await pair.finish(ready, prompt, [1, 2, 3])
                if source.random() < 0.3:
                    await pair.engine.flush(("l1",))

        async with expected("the end of all requests"):
            await asyncio.gather(*(serve(client) for client in range(4)))
        await pair.assert_nothing_held()
        assert set(ends) <= {"ready", "pages damaged"}
        assert ends["ready"] > 16


async def test_a_mismatch_is_a_fact_of_the_journal(make_pair, flipped_writes, tmp_path) -> None:
    journal = tmp_path / "journal"
    async with make_pair(page_checksums=True, journal_path=str(journal)) as pair:
        await kept_in_host_memory(pair)
        pair.host.array[sorted(host_pages(pair))[0], 1] ^= 1
        flipped_writes(pair.device, 1)
        await pair.finish(await pair.restore("r1", PROMPT), PROMPT, [1])
        await pair.engine.wait_settled()
    text = journal.read_text()
    assert "pages damaged: page " in text
    assert "its checksum differs" in text
    assert Replayer(journal).run().complete


async def test_a_prefill_that_cannot_send_checksums_is_refused_by_name(make_pair, monkeypatch) -> None:
    async with make_pair(page_checksums=True) as pair:
        sender = pair.peer._sender
        monkeypatch.setattr(sender, "_rank", dataclasses.replace(sender._rank, hashing=None))
        with pytest.raises(RequestFailed) as failed:
            await pair.engine.restore(pair.request("r1", PROMPT))
        assert failed.value.cause == "prefill does not match"
        assert "page_checksums" in failed.value.detail


@pytest.mark.parametrize("count", [0, 1, 1000])
async def test_a_wrong_number_of_checksums_breaks_the_room(make_pair, monkeypatch, count: int) -> None:
    class Wrong:
        """Sends bytes that are no checksums of the pages."""

        def hashing(self, memory: object) -> Callable[[PageIds], asyncio.Future[bytes]]:
            def begin(pages: PageIds) -> asyncio.Future[bytes]:
                done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                done.set_result(bytes(count))
                return done

            return begin

    async with make_pair(page_checksums=True) as pair:
        sender = pair.peer._sender
        monkeypatch.setattr(sender, "_rank", dataclasses.replace(sender._rank, hashing=Wrong()))
        with pytest.raises(RequestFailed) as failed:
            await pair.engine.restore(pair.request("r1", PROMPT))
        assert failed.value.cause == "protocol error"
        assert "bytes of checksums came for" in failed.value.detail
        await pair.assert_nothing_held()


def test_pools_on_a_gpu_are_refused_by_name() -> None:
    class OnGPU(DevicePool):
        """A pool that names memory of a GPU."""

    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
    pool = OnGPU.allocate(layout, 4)
    pool.memory = type(pool.memory)(segments=pool.memory.segments, page_count=4, kind="VRAM", device=1)
    with pytest.raises(InvalidConfig, match=r"page_checksums needs a device pool in host memory: .* CUDA device 1"):
        DecodeEngine(engine_config(page_checksums=True), device=pool, transport=LoopbackTransport("decode"))


@pytest.mark.nixl
@pytest.mark.parametrize("flips", [0, 1, 1000])
async def test_a_bit_flipped_by_a_real_write_is_found(flipped_writes, flips: int) -> None:
    # Pages so large that they are hashed on the thread.
    layout = KVLayout(num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16", page_size=16)
    device, prefill_pool = DevicePool.allocate(layout, 32), DevicePool.allocate(layout, 64)
    prefill, kv = SyntheticPrefill(prefill_pool, chunk_pages=5), SyntheticKV(device)
    tokens = list(range(1000, 1000 + 20 * 16 + 3))
    async with (
        PrefillPeer(device=prefill_pool, transport=NixlTransport("prefill-0"), on_room=prefill.serve) as peer,
        DecodeEngine(
            engine_config(**PATIENT, page_checksums=True),
            device=device,
            host=HostPool.allocate(layout, 32),
            transport=NixlTransport("decode-0", dials=["127.0.0.1:*"]),
        ) as engine,
    ):
        flipped_writes(device, flips)
        request = DecodeRequest(request_id="r1", tokens=tokens, prefill=peer.address, send_prompt=True)
        if flips == 1000:
            with pytest.raises(RequestFailed, match="pages damaged"):
                await engine.restore(request)
            return
        ready = await engine.restore(request)
        assert kv.verify(ready.pages.tolist(), prompt_digests(pack_tokens(tokens), 16)) == []
        assert engine.statistics()["receiver"]["pages_damaged"] == flips
        await engine.finish(ready, [ready.first_token])
