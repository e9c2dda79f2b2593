"""A decode worker with a window and a state over the loopback transport; its embedder checks every byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.configs import engine_config
from tests.support.waits import LEASE_S
from tidekv import (
    ComponentPools,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineThread,
    HostPool,
    KVLayout,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    ReadyRequest,
    open_storage,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.storage.base import Storage
from tidekv.engine.decode.component_pages import LeftComponents, WindowPages
from tidekv.engine.decode.values import Recompute
from tidekv.engine.synthetic.components import component_digest, wrong_components
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.component_specs import ComponentKind
from tidekv.transports.loopback import LoopbackNetwork

SIZE = 4
WINDOW_TOKENS = 9
FULL = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=SIZE)
WINDOW = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, dtype="float32", page_size=SIZE)
RECORD = KVLayout(num_layers=2, num_kv_heads=1, head_dim=12, dtype="float32", page_size=16, kind="mla")


def component(
    kind: ComponentKind,
    device_pages: int,
    host_pages: int,
    window_tokens: int = WINDOW_TOKENS,
    *,
    folder: Path | None = None,
) -> ComponentPools:
    """A window or a state, called by its kind. `folder`: that of its lasting host pool."""
    layout = WINDOW if kind == "window" else RECORD
    return ComponentPools(
        name=kind,
        kind=kind,
        window_tokens=window_tokens if kind == "window" else 0,
        device=DevicePool.allocate(layout, device_pages),
        host=HostPool.allocate(layout, host_pages, path=folder and folder / kind) if host_pages else None,
    )


@dataclass
class Worker:
    """A decode worker as its embedder sees it."""

    engine: DecodeEngine
    device: DevicePool
    components: tuple[ComponentPools, ...]

    async def restore(self, request_id: str, prompt: list[int], **fields: object) -> ReadyRequest:
        """Restore, and verify every byte of every pool."""
        fields = {"prefill": "prefill", "send_prompt": True, **fields}
        ready = await self.engine.restore(DecodeRequest(request_id=request_id, tokens=prompt, **fields))
        self.verify(ready, prompt)
        return ready

    def verify(self, ready: ReadyRequest, tokens: list[int]) -> None:
        """Pages, windows and records hold what these tokens lead to."""
        digests = prompt_digests(pack_tokens(tokens), SIZE)
        assert SyntheticKV(self.device).verify(ready.pages[: len(digests)].tolist(), digests) == []
        assert wrong_components(self.components, ready.component_pages, digests) == {}

    def generate(self, ready: ReadyRequest, prompt: list[int], output: list[int]) -> LeftComponents:
        """Write the KV of all but the last token, page by page and in place; returns what can be left of components.

        The record is a snapshot: it is written whenever a page is full, and so is left where the last one is.
        """
        self.engine.grow(ready, len(output))
        tokens = prompt + output[:-1]
        kv = {pools.name: SyntheticKV(pools.device) for pools in self.components}
        windows = {
            pools.name: WindowPages(ready.component_pages[pools.name], window_tokens=WINDOW_TOKENS, page_size=SIZE)
            for pools in self.components
            if pools.kind == "window"
        }
        snapshot = len(prompt) if len(prompt) % SIZE == 0 else 0
        for end in range(len(prompt) + 1, len(tokens) + 1):
            digest = prompt_digests(pack_tokens(tokens[:end]), SIZE)[-1]
            SyntheticKV(self.device).fill([int(ready.pages[(end - 1) // SIZE])], [digest])
            for name, tail in ready.component_pages.items():
                if name in windows:
                    windows[name].grow(end)
                    kv[name].fill([windows[name].pages[-1]], [component_digest(name, digest)])
                elif end % SIZE == 0:
                    kv[name].fill([tail.record], [component_digest(name, digest)])
                    snapshot = end
        left: dict[str, tuple[int, list[int]]] = {}
        for name, tail in ready.component_pages.items():
            if name in windows:
                left[name] = windows[name].left(len(tokens))
            elif snapshot:
                left[name] = (snapshot // SIZE - 1, [tail.record])
        return left

    async def answer(
        self, request_id: str, prompt: list[int], output: list[int], *, leaves: bool = True, **fields: object
    ) -> dict[str, int]:
        """Restore, generate, finish, and wait for the backups; returns the sources."""
        ready = await self.restore(request_id, prompt, **fields)
        left = self.generate(ready, prompt, output) if output else self.generate(ready, prompt, [0])
        await self.engine.finish(ready, output, component_pages=left if leaves else None)
        await self.engine.wait_settled()
        return {source: tokens for source, tokens in ready.sources.items() if tokens}

    def pages(self, name: str, tier: str = "device") -> dict[str, int]:
        """Pages of a component's pool by condition."""
        counts = self.core()
        return {
            condition: counts[f"{name}_{tier}_{condition}"]
            for condition in ("free", "owned", "cached", "draining", "protected")
        }

    def core(self) -> dict[str, int]:
        """The core in numbers."""
        counts = self.engine.statistics()["core"]
        assert isinstance(counts, dict)
        return counts

    def expect_nothing_held(self) -> None:
        """Every page is free or cached; none is owned, draining or protected."""
        for pools in self.components:
            for tier in ("device", "host"):
                pages = self.pages(pools.name, tier)
                assert not (pages["owned"] or pages["draining"] or pages["protected"]), (pools.name, tier, pages)
        counts = self.core()
        assert not (counts["device_owned"] or counts["device_draining"] or counts["device_protected"])


MakeWorker = Callable[..., AbstractAsyncContextManager[Worker]]


@pytest.fixture
def worker() -> MakeWorker:
    """Opens a worker, with its prefill."""

    @asynccontextmanager
    async def open_worker(
        *kinds: ComponentKind,
        device_pages: int = 16,
        host_pages: int = 16,
        recompute: Recompute | None = None,
        journal: Path | None = None,
        storage: str | Storage | None = None,
        without_host: tuple[ComponentKind, ...] = (),
        folder: Path | None = None,
        **settings: object,
    ) -> AsyncIterator[Worker]:
        chosen: tuple[ComponentKind, ...] = kinds or ("window", "state")
        network = LoopbackNetwork()
        device, prefill_pool = DevicePool.allocate(FULL, 48), DevicePool.allocate(FULL, 48)
        theirs = tuple(component(kind, 24, 0) for kind in chosen)
        ours = tuple(
            component(kind, device_pages, 0 if kind in without_host else host_pages, folder=folder) for kind in chosen
        )
        host = HostPool.allocate(FULL, 48, path=folder and folder / "full") if host_pages else None
        engine = DecodeEngine(
            engine_config(journal_path=None if journal is None else str(journal), **settings),
            device=device,
            host=host,
            components=ours,
            storage=open_storage(storage) if isinstance(storage, str) else storage,
            transport=LoopbackTransport("decode-0", network),
        )
        if recompute is not None:
            engine.recompute_with(recompute)
        async with (
            PrefillPeer(
                PrefillConfig(listen="prefill", lease_s=LEASE_S),
                device=prefill_pool,
                transport=LoopbackTransport("prefill-0", network),
                components=theirs,
                on_room=SyntheticPrefill(prefill_pool, chunk_pages=3, components=theirs).serve,
            ),
            engine,
        ):
            made = Worker(engine, device, ours)
            yield made
        for pool in (host, *(pools.host for pools in ours)):
            if pool is not None:
                pool.close()

    return open_worker


@pytest.fixture
def made_parts() -> tuple[dict[str, object], Callable[[EngineThread], Callable[[], None]]]:
    """What an engine on a thread is made of, and what starts its prefill on that thread; calling what this returns
    stops it.
    """
    network = LoopbackNetwork()
    theirs = (component("window", 24, 0), component("state", 24, 0))
    prefill_pool = DevicePool.allocate(FULL, 48)
    parts = {
        "device": DevicePool.allocate(FULL, 48),
        "host": HostPool.allocate(FULL, 48),
        "components": (component("window", 16, 16), component("state", 16, 16)),
        "transport": LoopbackTransport("decode-0", network),
    }
    peer = PrefillPeer(
        PrefillConfig(listen="prefill", lease_s=LEASE_S),
        device=prefill_pool,
        transport=LoopbackTransport("prefill-0", network),
        components=theirs,
        on_room=SyntheticPrefill(prefill_pool, components=theirs).serve,
    )

    def start(thread: EngineThread) -> Callable[[], None]:
        thread.call(lambda _: peer.__aenter__())
        return lambda: thread.call(lambda _: peer.__aexit__(None, None, None))

    return parts, start
