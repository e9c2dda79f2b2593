"""A decode engine and a prefill worker in this process, without a network."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    LoopbackNetwork,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    ReadyRequest,
    Recompute,
)
from tidekv.engine.synthetic.prefill import SyntheticPrefill

PAGE = 16
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", page_size=PAGE)


class Pair:
    """An engine, and how to serve a request with it."""

    def __init__(self, engine: DecodeEngine, prefill: str) -> None:
        self.engine = engine
        self.prefill = prefill
        self._requests = 0

    async def ready(self, tokens: Sequence[int], **fields: Any) -> ReadyRequest:
        """Restore a prompt; the caller gives it back."""
        self._requests += 1
        request = DecodeRequest(
            request_id=f"r{self._requests}", tokens=list(tokens), prefill=self.prefill, send_prompt=True, **fields
        )
        return await self.engine.restore(request)

    async def serve(self, tokens: Sequence[int], **fields: Any) -> dict[str, int]:
        """Restore a prompt and give it back; returns where its tokens came from."""
        ready = await self.ready(tokens, **fields)
        await self.engine.finish(ready, [])
        await self.engine.wait_settled()
        return dict(ready.sources)


@contextlib.asynccontextmanager
async def loopback_pair(
    config: EngineConfig,
    *,
    device_pages: int = 32,
    host_pages: int = 32,
    recompute: Recompute | None = None,
    **parts: Any,
) -> AsyncIterator[Pair]:
    """A running pair; `parts` are further arguments of the engine, `device` among them if a test needs its pages."""
    network = LoopbackNetwork()
    pool = DevicePool.allocate(LAYOUT, 64)
    synthetic = SyntheticPrefill(pool, vocabulary=1000, namespace="")
    engine = DecodeEngine(
        config,
        host=HostPool.allocate(LAYOUT, host_pages) if host_pages else None,
        transport=LoopbackTransport("decode-0", network),
        **{"device": DevicePool.allocate(LAYOUT, device_pages), **parts},
    )
    if recompute is not None:
        engine.recompute_with(recompute)
    peer = PrefillPeer(
        PrefillConfig(model=config.model, bigram_keys=config.bigram_keys),
        device=pool,
        transport=LoopbackTransport("prefill-0", network),
        on_room=synthetic.serve,
    )
    async with peer, engine:
        yield Pair(engine, peer.address)
