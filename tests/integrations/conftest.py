"""What tests of integrations share: SGLang's base class (its own, from an unpacked wheel that TIDEKV_TEST_SGLANG names,
or one made of its contract), vLLM's connector upon its contract, and an engine of our own beside what others wrote.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType

import pytest

from tests.support.configs import engine_config
from tests.support.vllm_contract import upon_contract
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
)
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.synthetic.prefill import SyntheticPrefill

Restored = Callable[[list[int]], Awaitable[tuple[dict[str, int], list[bytes]]]]

MODULE = "sglang.srt.mem_cache.hicache_storage"


class HiCacheStorage(ABC):
    """What SGLang 0.5.23 asks of a storage backend, as its own class declares it."""

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def exists(self, key): ...


@pytest.fixture
def connector() -> Iterator[ModuleType]:
    """The module of vLLM's connector, upon the contract."""
    with upon_contract() as module:
        yield module


@pytest.fixture(params=["contract", "wheel"])
def backend(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module under test, upon either base class."""
    place = os.environ.get("TIDEKV_TEST_SGLANG")
    if request.param == "wheel" and place is None:
        pytest.skip("set TIDEKV_TEST_SGLANG to an unpacked wheel of sglang to test with its own classes")
    before = dict(sys.modules)
    package = types.ModuleType("sglang")
    package.__path__ = [f"{place}/sglang"] if request.param == "wheel" else []
    sys.modules["sglang"] = package
    if request.param == "contract":
        for name in ("sglang.srt", "sglang.srt.mem_cache"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[MODULE] = types.ModuleType(MODULE)
        vars(sys.modules[MODULE])["HiCacheStorage"] = HiCacheStorage
    try:
        yield importlib.import_module("tidekv.engine.integrations.sglang.hicache")
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith("sglang") or name == "tidekv.engine.integrations.sglang.hicache":
                del sys.modules[name]
        sys.modules.pop("tidekv.engine.integrations.sglang.hicache", None)


@asynccontextmanager
async def _engine_on(uri: str, layout: KVLayout) -> AsyncIterator[Restored]:
    prefill_pool = DevicePool.allocate(layout, 32)
    device = DevicePool.allocate(layout, 64)
    engine = DecodeEngine(
        engine_config(model="m", prefetch_threshold_tokens=1),
        device=device,
        host=HostPool.allocate(layout, 64),
        storage=open_storage(uri),
        transport=NixlTransport(name="decode-0", dials=["127.0.0.1:*"]),
    )
    peer = PrefillPeer(
        PrefillConfig(model="m"),
        device=prefill_pool,
        transport=NixlTransport("prefill-0"),
        on_room=SyntheticPrefill(prefill_pool, vocabulary=1000).serve,
    )
    async with peer, engine:

        async def restored(tokens: list[int]) -> tuple[dict[str, int], list[bytes]]:
            ready = await engine.restore(
                DecodeRequest(request_id=str(tokens[0]), tokens=tokens, prefill=peer.address, send_prompt=True)
            )
            pages = [page.numpy().tobytes() for page in device.read_pages(ready.pages[:4])]
            await engine.finish(ready, [ready.first_token])
            return dict(ready.sources), pages

        yield restored
        await engine.wait_settled()


@pytest.fixture
def engine_on() -> Callable[[str, KVLayout], AbstractAsyncContextManager[Restored]]:
    """A decode engine and its prefill, with the storage of a URI, for pages of a layout: `restored(tokens)` serves a
    prompt, and returns how many tokens came from where, and what the first 4 pages hold. When the block is left well,
    all is stored.
    """
    return _engine_on
