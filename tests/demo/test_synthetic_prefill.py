"""The synthetic prefill worker gives its pages back when, and only when, no reader is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    InvalidRequest,
    KVLayout,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    RequestFailed,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
PAGES = 8
PROMPT = list(range(24))  # Six pages: three chunks of two.


@asynccontextmanager
async def workers(
    on_room: Callable[[SyntheticPrefill, Room], Awaitable[None]],
) -> AsyncIterator[tuple[DecodeEngine, SyntheticPrefill, LoopbackNetwork]]:
    network = LoopbackNetwork()
    pool = DevicePool.allocate(LAYOUT, PAGES)
    prefill = SyntheticPrefill(pool, chunk_pages=2)
    async with (
        PrefillPeer(
            PrefillConfig(listen="prefill"),
            device=pool,
            transport=LoopbackTransport("prefill-0", network),
            on_room=lambda room: on_room(prefill, room),
        ),
        DecodeEngine(
            EngineConfig(),
            device=DevicePool.allocate(LAYOUT, 16),
            host=None,
            transport=LoopbackTransport("decode-0", network),
        ) as engine,
    ):
        yield engine, prefill, network


def request(tokens: list[int]) -> DecodeRequest:
    return DecodeRequest(request_id="r1", tokens=tokens, prefill="prefill", send_prompt=True)


class HeldWrites:
    """Writes that have begun and do not end before they may."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        network.before_write = self._hold

    async def _hold(self, writer: str, target: str, pages: int) -> None:
        self.began.set()
        await self.may_end.wait()


async def test_a_cancelled_room_keeps_its_pages_until_the_last_write_has_ended() -> None:
    serving: list[asyncio.Task[None]] = []

    async def serve(prefill: SyntheticPrefill, room: Room) -> None:
        serving.append(asyncio.create_task(prefill.serve(room)))
        await asyncio.wait(serving)

    async with workers(serve) as (engine, prefill, network):
        held = HeldWrites(network)
        restoring = asyncio.create_task(engine.restore(request(PROMPT)))
        await held.began.wait()
        serving[0].cancel()
        # The room fails at once, in the words of the cancellation: decode does not wait for the write.
        with pytest.raises(RequestFailed, match="CancelledError"):
            await restoring
        assert not serving[0].done()
        assert prefill.pages_free == PAGES - 6
        held.may_end.set()
        await asyncio.wait(serving)
        assert serving[0].cancelled()
        assert prefill.pages_free == PAGES
        assert prefill.rooms_served == 0


async def test_a_prefill_that_raises_keeps_its_pages_until_the_last_write_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[BaseException] = []

    async def serve(prefill: SyntheticPrefill, room: Room) -> None:
        fill, fills = prefill._kv.fill, []

        def fill_once(pages: object, digests: object) -> None:
            fills.append(pages)
            if len(fills) > 1:
                raise MemoryError("no more")
            fill(pages, digests)

        monkeypatch.setattr(prefill._kv, "fill", fill_once)
        try:
            await prefill.serve(room)
        except MemoryError as error:
            raised.append(error)

    async with workers(serve) as (engine, prefill, network):
        held = HeldWrites(network)
        with pytest.raises(RequestFailed, match="MemoryError"):
            await engine.restore(request(PROMPT))
        assert held.began.is_set()
        assert prefill.pages_free == PAGES - 6
        held.may_end.set()
        await engine.wait_settled()
        async with asyncio.timeout(LIMIT_S), prefill.freed:
            await prefill.freed.wait_for(lambda: prefill.pages_free == PAGES)
    assert len(raised) == 1


async def test_a_prompt_that_the_pool_never_holds_is_refused_in_words() -> None:
    async def serve(prefill: SyntheticPrefill, room: Room) -> None:
        with pytest.raises(InvalidRequest, match=f"needs 9 pages; the prefill pool has {PAGES}"):
            await prefill.serve(room)
        room.fail("refused")

    async with workers(serve) as (engine, prefill, _):
        with pytest.raises(RequestFailed, match="refused"):
            await engine.restore(request(list(range(33))))
        assert prefill.pages_free == PAGES


async def test_kept_prefixes_are_sent_without_being_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    network = LoopbackNetwork()
    pool = DevicePool.allocate(LAYOUT, 16)
    prefill = SyntheticPrefill(pool, chunk_pages=2, keep_prefixes=True)
    filled: list[int] = []
    fill = prefill._kv.fill

    def counted(pages: Sequence[int], digests: Sequence[bytes]) -> None:
        filled.append(len(pages))
        fill(pages, digests)

    monkeypatch.setattr(prefill._kv, "fill", counted)
    device = DevicePool.allocate(LAYOUT, 16)
    async with (
        PrefillPeer(
            PrefillConfig(listen="prefill"),
            device=pool,
            transport=LoopbackTransport("prefill-0", network),
            on_room=prefill.serve,
        ),
        DecodeEngine(EngineConfig(), device=device, transport=LoopbackTransport("decode-0", network)) as engine,
    ):
        for number, (tokens, pages_filled) in enumerate(((PROMPT, 6), ([*PROMPT, *range(90, 96)], 2), (PROMPT, 1))):
            filled.clear()
            ready = await engine.restore(
                DecodeRequest(request_id=f"r{number}", tokens=tokens, prefill="prefill", send_prompt=True, cache=False)
            )
            digests = prompt_digests(pack_tokens(tokens), LAYOUT.page_size)
            assert SyntheticKV(device).verify(ready.pages.tolist(), digests) == []
            assert sum(filled) == pages_filled
            await engine.finish(ready)
            await engine.wait_settled()
            async with asyncio.timeout(LIMIT_S), prefill.freed:
                await prefill.freed.wait_for(lambda count=number: prefill.rooms_served > count)
        ahead = [*range(300, 300 + len(PROMPT))]
        filled.clear()
        await prefill.compute(pack_tokens(ahead))
        assert sum(filled) == 6
        ready = await engine.restore(
            DecodeRequest(request_id="ahead", tokens=ahead, prefill="prefill", send_prompt=True, cache=False)
        )
        assert SyntheticKV(device).verify(ready.pages.tolist(), prompt_digests(pack_tokens(ahead), 4)) == []
        assert sum(filled) == 6 + 1
        await engine.finish(ready)
