"""One store for a prefill worker and two decode workers: what one wrote the others hit, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.inside import runtime_of, serve_rooms, store_of
from tidekv import (
    DevicePool,
    HostPool,
    InvalidConfig,
    InvalidRequest,
    KVLayout,
    PrefillPeer,
    open_storage,
    prompt_digest,
)
from tidekv.backends.keys.chain import pack_tokens, page_digests
from tidekv.backends.storage.base import Storage, StorageStatistics
from tidekv.engine.prefill.prefill_peer import PromptStoreSettings
from tidekv.states.errors import StorageFailed
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport

PROMPT = list(range(100, 122))  # Five pages of four tokens and a tail of two.
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)

Open = Callable[[], Storage]


@pytest.fixture
def shared(tmp_path: Path) -> Open:
    """Engines on one directory."""
    return lambda: open_storage(f"file:{tmp_path}/pages?io=threads&capacity=16MiB")


async def test_what_prefill_wrote_every_decode_worker_hits(make_pair, shared: Open) -> None:
    async with make_pair(prefill_storage=shared()) as first, first.another_decode(storage=shared()) as second:
        ready = await first.restore("r1", PROMPT)
        await first.peer.wait_stored()
        assert first.peer.statistics()["store_pages_written"] == 5
        hit = await second.restore("r1", PROMPT)
        assert hit.sources == {"l1": 0, "l2": 0, "l3": 20, "transfer": 2}
        assert hit.first_token == ready.first_token
        await first.peer.wait_stored()
        statistics = first.peer.statistics()
        assert (statistics["store_pages_written"], statistics["store_pages_present"]) == (5, 5)
        for pair, restored in ((first, ready), (second, hit)):
            await pair.finish(restored, PROMPT, [1])
            await pair.assert_nothing_held()


async def test_three_workers_hit_what_each_other_wrote(make_pair, shared: Open) -> None:
    async with (
        make_pair(storage=shared(), prefill_storage=shared()) as first,
        first.another_decode(storage=shared()) as second,
    ):
        ready = await first.restore("turn 1", PROMPT)
        await first.finish(ready, PROMPT, [1, 2, 3])
        await first.engine.wait_settled()
        # The last output token has no KV: 24 tokens are whole pages, five of them prefill's too, one decode's alone.
        dialog = [*PROMPT, 1, 2, 3, 50, 51, 52]
        second_turn = await second.restore("turn 2", dialog)
        assert second_turn.sources == {"l1": 0, "l2": 0, "l3": 24, "transfer": 4}
        await second.finish(second_turn, dialog, [7, 8])
        await second.engine.wait_settled()
        await first.engine.flush()
        longer = [*dialog, 7, 8, 9]
        third_turn = await first.restore("turn 3", longer)
        assert third_turn.sources == {"l1": 0, "l2": 0, "l3": 28, "transfer": 3}
        await first.engine.finish(third_turn)
        for pair in (first, second):
            await pair.assert_nothing_held()


async def test_namespaces_never_meet_and_hidden_prompts_are_not_stored(make_pair, shared: Open) -> None:
    async with make_pair(prefill_storage=shared(), prefill_namespace="adapter") as first:
        hidden = await first.engine.restore(first.request("hidden", PROMPT, namespace="adapter", cache=False))
        await first.peer.wait_stored()
        assert not first.peer.statistics()["store_pages_written"]
        await first.engine.finish(hidden)
        adapted = await first.engine.restore(first.request("adapted", PROMPT, namespace="adapter"))
        await first.engine.finish(adapted)
        await first.peer.wait_stored()
        assert first.peer.statistics()["store_pages_written"] == 5
        async with first.another_decode(storage=shared()) as second:
            plain = await second.engine.restore(second.request("plain", PROMPT))
            assert plain.sources["l3"] == 0
            await second.engine.finish(plain)
            same = await second.engine.restore(second.request("same", PROMPT, namespace="adapter"))
            assert same.sources["l3"] == 20
            assert (
                second.kv.verify(same.pages[:5].tolist(), page_digests(pack_tokens(PROMPT), 4, namespace="adapter"))
                == []
            )
            await second.engine.finish(same)


async def test_tokens_of_the_embedder_name_the_pages_where_the_promise_brings_none(make_pair, shared: Open) -> None:
    async with make_pair(prefill_storage=shared()) as pair:
        serve_rooms(pair.peer, None)

        async def restore_routed(name: str, tokens: bytes | None) -> None:
            request = pair.request(name, PROMPT)
            object.__setattr__(request, "send_prompt", False)
            restoring = asyncio.create_task(pair.engine.restore(request))
            room = await pair.peer.room(name, prompt_digest(PROMPT))
            assert room.tokens is None
            await room.send(range(6), start_token=0)
            with pytest.raises(InvalidRequest, match="22 tokens"):
                await room.finish(first_token=1, tokens=b"1234")
            assert not room.is_finished
            await room.finish(first_token=1, tokens=tokens)
            await pair.engine.abort((await restoring).request_id)

        await restore_routed("unnamed", None)
        await pair.peer.wait_stored()
        assert pair.peer.statistics()["store_rooms_without_tokens"] == 1
        await pair.engine.flush()
        await restore_routed("named", pack_tokens(PROMPT))
        await pair.peer.wait_stored()
        assert pair.peer.statistics()["store_pages_written"] == 5


class Slow:
    """An engine with puts that wait for a gate; with `fails`, `exists` raises."""

    uri = "slow:"

    def __init__(self, *, fails: bool = False) -> None:
        self.gate = asyncio.Event()
        self.fails = fails
        self.closed = False

    async def register(self, *_: object, **__: object) -> None: ...

    async def exists(self, keys: list[bytes], *, timeout_s: float) -> list[bool]:
        if self.fails:
            raise StorageFailed("gone")
        return [False] * len(keys)

    async def put_from(self, keys: list[bytes], pages: object, *, timeout_s: float) -> list[bool]:
        await self.gate.wait()
        return [True] * len(keys)

    def statistics(self) -> StorageStatistics:
        return StorageStatistics(self.uri, 0, 0, 1 << 20, 0, 0, 0, 0, 0, 0)

    async def close(self) -> None:
        self.closed = True


async def test_slow_storage_holds_no_page_of_prefill_for_longer_than_the_copy(make_pair) -> None:
    slow = Slow()
    settings = PromptStoreSettings(hold_s=0.05)
    async with make_pair(
        prefill_storage=slow, prefill_host=HostPool.allocate(LAYOUT, 5), prefill_store=settings
    ) as pair:
        for number in range(3):
            ready = await pair.restore(f"r{number}", [number, *PROMPT[1:]])
            await pair.engine.finish(ready)
            await pair.engine.flush()
            # The first has all host pages; the others' rooms end when their time is up, though no put does.
        async with pair.prefill.freed:
            await pair.prefill.freed.wait_for(lambda: pair.prefill.pages_free == 256)
        statistics = pair.peer.statistics()
        assert statistics["store_pages_declined"] == 10
        slow.gate.set()
        await pair.peer.wait_stored()
        assert pair.peer.statistics()["store_pages_written"] == 5
    assert slow.closed


async def test_pages_are_not_given_back_to_prefill_while_they_are_copied(make_pair, monkeypatch) -> None:
    storage = open_storage("memory:?capacity=1MiB")
    copying, copied = asyncio.Event(), asyncio.Event()
    async with make_pair(prefill_storage=storage) as pair:
        copier = runtime_of(store_of(pair.peer)).copier
        assert copier is not None
        to_host = copier.to_host

        def hold(*pages: object) -> asyncio.Future[None]:
            async def copy_later() -> None:
                copying.set()
                await copied.wait()
                await to_host(*pages)

            return asyncio.ensure_future(copy_later())

        monkeypatch.setattr(copier, "to_host", hold)
        try:
            ready = await pair.restore("r1", PROMPT)
            await pair.engine.finish(ready)
            await copying.wait()
            # Decode's last word is on its way; nothing else is waited for than the copy.
            for _ in range(10_000):
                if all(room.outcome for room in pair.peer._sender._rooms):
                    break
                await asyncio.sleep(0)
            assert pair.prefill.pages_free == 250
        finally:
            copied.set()
        await pair.peer.wait_stored()
        async with pair.prefill.freed:
            await pair.prefill.freed.wait_for(lambda: pair.prefill.pages_free == 256)
        assert storage.statistics().pages == 5


async def test_broken_storage_fails_nobody(make_pair) -> None:
    storage = Slow(fails=True)
    storage.gate.set()
    async with make_pair(prefill_storage=storage) as pair:
        for written in (0, 5):
            ready = await pair.restore("r1", PROMPT)
            await pair.finish(ready, PROMPT, [1])
            await pair.peer.wait_stored()
            assert pair.peer.statistics()["store_pages_written"] == written
            # Host memory has kept what could not be stored.
            storage.fails = False
            await pair.engine.flush()


async def test_closing_waits_a_while_for_puts_and_then_cuts_them(make_pair) -> None:
    slow = Slow()
    settings = PromptStoreSettings(close_wait_s=0.01)
    async with make_pair(prefill_storage=slow, prefill_store=settings) as pair:
        ready = await pair.restore("r1", PROMPT)
        await pair.engine.finish(ready)
    assert slow.closed
    assert pair.peer.statistics()["store_rooms"] == 0
    assert pair.peer.statistics()["store_closed_early"] == 1


async def test_memory_is_written_too_and_a_wrong_pool_is_refused(make_pair) -> None:
    storage = open_storage("memory:?capacity=1MiB")
    async with make_pair(prefill_storage=storage) as pair:
        ready = await pair.restore("r1", PROMPT)
        await pair.engine.finish(ready)
        await pair.peer.wait_stored()
        assert storage.statistics().pages == 5
    transport = LoopbackTransport("prefill-0", LoopbackNetwork())
    with pytest.raises(InvalidConfig, match="DevicePool"):
        PrefillPeer(device=object(), transport=transport, storage=storage)
    other = KVLayout(num_layers=1, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
    with pytest.raises(InvalidConfig, match="host pool has"):
        PrefillPeer(
            device=DevicePool.allocate(LAYOUT, 4),
            host=HostPool.allocate(other, 4),
            transport=transport,
            storage=storage,
        )
