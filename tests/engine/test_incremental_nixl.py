"""Incremental transfer over real NIXL: the bytes that leave prefill are those of the delta, and no others."""

from __future__ import annotations

import pytest

from tests.support.configs import engine_config
from tests.support.waits import PATIENT
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    NixlTransport,
    PrefillPeer,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill

PAGE_SIZE = 16
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16", page_size=PAGE_SIZE)


@pytest.mark.nixl
async def test_bytes_sent_are_the_pages_of_the_delta(tmp_path) -> None:
    device, host = DevicePool.allocate(LAYOUT, 128), HostPool.allocate(LAYOUT, 128)
    prefill_pool = DevicePool.allocate(LAYOUT, 200)
    prefill = SyntheticPrefill(prefill_pool, chunk_pages=5)
    sending = NixlTransport("prefill-0")
    kv = SyntheticKV(device)
    async with (
        PrefillPeer(device=prefill_pool, transport=sending, on_room=prefill.serve) as peer,
        DecodeEngine(
            engine_config(prefetch_threshold_tokens=0, fetch_run_pages=8, **PATIENT),
            device=device,
            host=host,
            storage=open_storage(f"file:{tmp_path}?capacity=64MiB"),
            transport=NixlTransport("decode-0", dials=["127.0.0.1:*"]),
        ) as engine,
    ):

        async def bytes_for(request_id: str, tokens: list[int]) -> tuple[int, dict[str, int]]:
            before = sending.statistics()["bytes_written"]
            ready = await engine.restore(
                DecodeRequest(request_id=request_id, tokens=tokens, prefill=peer.address, send_prompt=True)
            )
            assert kv.verify(ready.pages.tolist(), prompt_digests(pack_tokens(tokens), PAGE_SIZE)) == []
            await engine.finish(ready, [ready.first_token])
            await engine.wait_settled()
            return int(sending.statistics()["bytes_written"] - before), dict(ready.sources)

        first = list(range(1000, 1000 + 40 * PAGE_SIZE))
        assert await bytes_for("whole", first) == (
            40 * LAYOUT.page_bytes,
            {"l1": 0, "l2": 0, "l3": 0, "transfer": 40 * PAGE_SIZE},
        )
        longer = [*first, *range(5)]
        assert await bytes_for("delta", longer) == (
            LAYOUT.page_bytes,
            {"l1": 40 * PAGE_SIZE, "l2": 0, "l3": 0, "transfer": 5},
        )
        assert await bytes_for("full hit", first) == (0, {"l1": 40 * PAGE_SIZE, "l2": 0, "l3": 0, "transfer": 0})
        await engine.flush(("l1",))
        assert await bytes_for("from host", first) == (0, {"l1": 0, "l2": 40 * PAGE_SIZE, "l3": 0, "transfer": 0})
        await engine.flush(("l1", "l2"))
        assert await bytes_for("from storage", longer) == (
            LAYOUT.page_bytes,
            {"l1": 0, "l2": 0, "l3": 40 * PAGE_SIZE, "transfer": 5},
        )
        core = engine.statistics()["core"]
        assert core["device_protected"] == core["host_protected"] == 0
