"""A decode engine and a prefill peer with a window and a state, over loopback or NIXL; every byte is verified."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.configs import engine_config
from tests.support.inside import core_of
from tidekv import (
    ComponentPools,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    KVLayout,
    LoopbackTransport,
    NixlTransport,
    PageLayout,
    PrefillConfig,
    PrefillPeer,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.decode.values import ReadyRequest
from tidekv.engine.synthetic.components import component_digest, wrong_components
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.transports.loopback import LoopbackNetwork

SIZE = 4
FULL = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=SIZE)
WINDOW = PageLayout.of(
    full=KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16", page_size=SIZE),
    scales=KVLayout(num_layers=3, num_kv_heads=2, head_dim=1, dtype="float32", page_size=SIZE),
)
RECORD = PageLayout.of(
    full=KVLayout(kind="mla", num_layers=2, page_size=24, num_kv_heads=1, head_dim=16, dtype="float32"),
    convolution=KVLayout(kind="mla", num_layers=2, page_size=24, num_kv_heads=1, head_dim=4, dtype="float16"),
)
WINDOW_TOKENS = 10
COMPONENT_PAGES = 3


def window(num_pages: int = 24, *, layout: Any = WINDOW, tokens: int = WINDOW_TOKENS) -> ComponentPools:
    return ComponentPools(
        name="swa", kind="window", window_tokens=tokens, device=DevicePool.allocate(layout, num_pages)
    )


def state(num_pages: int = 8) -> ComponentPools:
    return ComponentPools(name="ssm", kind="state", device=DevicePool.allocate(RECORD, num_pages))


def both() -> list[ComponentPools]:
    return [state(), window()]


@dataclass
class Worker:
    """A decode worker with components, its prefill, and what tests ask of them."""

    engine: DecodeEngine
    device: DevicePool
    components: Sequence[ComponentPools]
    peer: PrefillPeer
    prefill: SyntheticPrefill
    network: LoopbackNetwork
    kv: SyntheticKV = field(init=False)

    def __post_init__(self) -> None:
        self.kv = SyntheticKV(self.device)

    def request(self, request_id: str, tokens: Sequence[int], **options: Any) -> DecodeRequest:
        options.setdefault("prefill", self.peer.address)
        return DecodeRequest(request_id=request_id, tokens=tokens, send_prompt=True, **options)

    async def restore(self, request_id: str, tokens: Sequence[int], **options: Any) -> ReadyRequest:
        """Restore, and verify every byte of every page, of the window and of the record."""
        ready = await self.engine.restore(self.request(request_id, tokens, **options))
        self.verify(ready, tokens)
        return ready

    def verify(self, ready: ReadyRequest, tokens: Sequence[int]) -> None:
        digests = prompt_digests(pack_tokens(tokens), SIZE)
        assert self.kv.verify(ready.pages[: len(digests)].tolist(), digests) == []
        assert wrong_components(self.components, ready.component_pages, digests) == {}
        assert set(ready.component_pages) == {pools.name for pools in self.components}
        for pools in self.components:
            tail = ready.component_pages[pools.name]
            needed = max(0, len(tokens) - (pools.window_tokens or 1)) // SIZE
            assert (tail.first, tail.first + len(tail.pages)) == (needed, len(digests))

    async def finish(self, ready: ReadyRequest, tokens: Sequence[int]) -> None:
        """Give back, and leave what there is of components at the end of the last full page."""
        boundary = len(tokens) // SIZE
        left = {}
        for name, tail in ready.component_pages.items():
            if boundary == tail.first + len(tail.pages):
                left[name] = (tail.first, tail.pages)
        await self.engine.finish(ready, component_pages=left)

    def core(self) -> dict[str, int]:
        statistics = self.engine.statistics()["core"]
        assert isinstance(statistics, dict)
        return statistics

    async def assert_nothing_held(self) -> None:
        """Every page of every pool is free or cached."""
        await self.engine.wait_settled()
        core = self.core()
        for pool in ("device", *(f"{pools.name}_device" for pools in self.components)):
            assert core[f"{pool}_free"] + core[f"{pool}_cached"] == core[f"{pool}_total"], (pool, core)
            assert core[f"{pool}_protected"] == 0, (pool, core)
        core_of(self.engine).check()


MakeWorker = Callable[..., AbstractAsyncContextManager[Worker]]


@asynccontextmanager
async def open_worker(
    *,
    components: Callable[[], list[ComponentPools]] = both,
    prefill_components: Callable[[], list[ComponentPools]] | None = None,
    nixl: bool = False,
    device_pages: int = 64,
    **config: Any,
) -> AsyncIterator[Worker]:
    network = LoopbackNetwork()
    ends = [
        NixlTransport(name, dials=["127.0.0.1:*"]) if nixl else LoopbackTransport(name, network)
        for name in ("prefill-0", "decode-0")
    ]
    here, there = components(), (prefill_components or components)()
    device, prefill_pool = DevicePool.allocate(FULL, device_pages), DevicePool.allocate(FULL, 256)
    prefill = SyntheticPrefill(prefill_pool, chunk_pages=3, components=there)
    async with (
        PrefillPeer(
            PrefillConfig(listen="127.0.0.1:0" if nixl else "prefill"),
            device=prefill_pool,
            components=there,
            transport=ends[0],
            on_room=prefill.serve,
        ) as peer,
        DecodeEngine(
            engine_config(prefetch_threshold_tokens=0, **config), device=device, components=here, transport=ends[1]
        ) as engine,
    ):
        yield Worker(engine, device, here, peer, prefill, network)


@pytest.fixture
def make_worker() -> MakeWorker:
    return open_worker


@pytest.fixture
def pools() -> dict[str, Callable[..., ComponentPools]]:
    """Makers of the window's and the state's pools."""
    return {"window": window, "state": state}


@pytest.fixture
def digest_of() -> Callable[[str, bytes], bytes]:
    return component_digest
