"""Many requests with one prefix at once: prefill sends it once, whichever of them is aborted or cancelled."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.support.configs import engine_config
from tests.support.inside import calls_of
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    NixlTransport,
    PrefillPeer,
    RequestFailed,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill

PAGE_SIZE = 16
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16", page_size=PAGE_SIZE)
PREFIX_PAGES, REQUESTS = 40, 20


def prompts(page_size: int, prefix_pages: int) -> list[list[int]]:
    """One prefix, and for each prompt a page and one token more of its own."""
    prefix = list(range(1000, 1000 + prefix_pages * page_size))
    return [[*prefix, *range(number * 100, number * 100 + page_size + 1)] for number in range(REQUESTS)]


@pytest.mark.nixl
@pytest.mark.parametrize("shares", [True, False])
async def test_the_bytes_of_a_common_prefix_leave_prefill_once(shares: bool) -> None:
    # All 840 pages are within the share of one prefill, 0.75.
    device, host = DevicePool.allocate(LAYOUT, 1200), HostPool.allocate(LAYOUT, 64)
    prefill_pool = DevicePool.allocate(LAYOUT, 1000)
    prefill = SyntheticPrefill(prefill_pool, chunk_pages=5)
    sending = NixlTransport("prefill-0")
    kv = SyntheticKV(device)
    async with (
        PrefillPeer(device=prefill_pool, transport=sending, on_room=prefill.serve) as peer,
        DecodeEngine(
            engine_config(sharing_enabled=shares),
            device=device,
            host=host,
            transport=NixlTransport("decode-0", dials=["127.0.0.1:*"]),
        ) as engine,
    ):
        asked = prompts(PAGE_SIZE, PREFIX_PAGES)
        requests = [
            DecodeRequest(request_id=f"r{number}", tokens=tokens, prefill=peer.address, send_prompt=True)
            for number, tokens in enumerate(asked)
        ]
        ready = await asyncio.gather(*(engine.restore(request) for request in requests))
        for one, tokens in zip(ready, asked, strict=True):
            digests = prompt_digests(pack_tokens(tokens), PAGE_SIZE)
            assert kv.verify(one.pages[: len(digests)].tolist(), digests) == []
        sent_pages = sending.statistics()["bytes_written"] / LAYOUT.page_bytes
        assert sent_pages == (PREFIX_PAGES if shares else REQUESTS * PREFIX_PAGES) + REQUESTS * 2
        assert sum(one.sources["transfer"] for one in ready) <= sent_pages * PAGE_SIZE
        for one in ready:
            await engine.finish(one, [one.first_token])
        await engine.wait_settled()
        core = engine.statistics()["core"]
        assert core["device_protected"] == core["device_draining"] == core["device_owned"] == 0


async def test_who_shares_is_served_whoever_else_is_aborted_or_cancelled(make_pair) -> None:
    async with make_pair(device_pages=600, prefill_pages=600) as pair:
        source = Random(7)
        for turn in range(6):
            asked = [[*tokens[:-1], turn] for tokens in prompts(4, 24)]
            asked = [[turn, *tokens[1:]] for tokens in asked]
            waiting = [
                asyncio.create_task(pair.restore(f"r{turn}.{number}", tokens)) for number, tokens in enumerate(asked)
            ]
            for _ in range(source.randrange(60)):
                await asyncio.sleep(0)
            left = [*source.sample(range(REQUESTS), REQUESTS // 2), 0]
            for number in left:
                if source.random() < 0.5:
                    await pair.engine.abort(f"r{turn}.{number}")
                else:
                    waiting[number].cancel()
            told = await asyncio.gather(*waiting, return_exceptions=True)
            for number, end in enumerate(told):
                if isinstance(end, BaseException):
                    assert number in left, end
                    assert isinstance(end, asyncio.CancelledError) or (
                        isinstance(end, RequestFailed) and end.cause == "aborted"
                    )
                elif calls_of(pair.engine).is_live(f"r{turn}.{number}"):
                    await pair.finish(end, asked[number], [1])
            await pair.assert_nothing_held()
        assert pair.core()["shared_transfer_pages"] > 0
