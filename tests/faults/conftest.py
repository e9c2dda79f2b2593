"""A decode engine in the test's process, prefill workers in it or in processes of their own, joined by NIXL.

Every restore verifies every byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest

from tests.support.configs import engine_config
from tests.support.fault_hooks import GatedPoller
from tests.support.fault_process import FaultProcess
from tests.support.fault_workers import DecodeOrder, PrefillOrder, finish_turn, serve_decode, serve_prefill
from tests.support.inside import calls_of, core_of
from tests.support.waits import PATIENT
from tidekv import (
    ComponentPools,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    NixlTransport,
    PrefillPeer,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.storage.base import Storage
from tidekv.engine.decode.values import ReadyRequest
from tidekv.engine.poller import PollerThread
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.synthetic.components import wrong_components
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.transports.nixl import transport
from tidekv.transports.prefill.prefill_room import Room

PAGE_SIZE = 16
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32", page_size=PAGE_SIZE)


@dataclass
class Decode:
    """A decode engine, and the calls tests make on it. `prefills` are the default peers of its requests."""

    engine: DecodeEngine
    device: DevicePool
    prefills: Sequence[str]
    components: Sequence[ComponentPools] = ()
    kv: SyntheticKV = field(init=False)

    def __post_init__(self) -> None:
        self.kv = SyntheticKV(self.device)

    def request(self, request_id: str, tokens: Sequence[int], **options: Any) -> DecodeRequest:
        options.setdefault("prefill", self.prefills)
        return DecodeRequest(request_id=request_id, tokens=tokens, send_prompt=True, **options)

    def start(self, request_id: str, tokens: Sequence[int], **options: Any) -> asyncio.Task[ReadyRequest]:
        """Begin a restore that is verified when it is READY."""
        return asyncio.create_task(self.restore(request_id, tokens, **options))

    async def restore(self, request_id: str, tokens: Sequence[int], **options: Any) -> ReadyRequest:
        ready = await self.engine.restore(self.request(request_id, tokens, **options))
        assert self.wrong(ready, tokens) == []
        assert sum(ready.sources.values()) == len(tokens)
        return ready

    def wrong(self, ready: ReadyRequest, tokens: Sequence[int]) -> list[int]:
        """Pages of the prompt, by place, with wrong bytes; the component pages must be right."""
        digests = prompt_digests(pack_tokens(tokens), PAGE_SIZE)
        assert wrong_components(self.components, ready.component_pages, digests) == {}
        return self.kv.verify(ready.pages[: len(digests)].tolist(), digests)

    async def serve(self, request_id: str, tokens: list[int], output: Sequence[int] = (1,), **options: Any) -> dict:
        """A whole turn; returns its tokens by source."""
        ready = await self.restore(request_id, tokens, **options)
        await finish_turn(self.engine, self.kv, ready, tokens, list(output))
        return dict(ready.sources)

    def core(self) -> dict[str, int]:
        statistics = self.engine.statistics()["core"]
        assert isinstance(statistics, dict)
        return statistics

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds after a step of the core."""
        await calls_of(self.engine).wait_until(holds)

    async def assert_nothing_held(self) -> None:
        await self.engine.wait_settled()
        core = self.core()
        for pool in ("device", "host", *(f"{pools.name}_device" for pools in self.components)):
            assert core[f"{pool}_free"] + core[f"{pool}_cached"] == core[f"{pool}_total"], core
            assert core[f"{pool}_protected"] == 0, core
        core_of(self.engine).check()


@dataclass
class Prefill:
    """A prefill peer in this process; `gate` holds its writes over NIXL."""

    peer: PrefillPeer
    worker: SyntheticPrefill
    gate: GatedPoller
    rooms: dict[str, Room]
    """The newest room of each request."""

    @property
    def address(self) -> str:
        return self.peer.address


def words(first: int, pages: int, tail: int = 0) -> list[int]:
    """A prompt of that many pages, unlike every prompt with another `first`."""
    return [1_000_000 * first + number for number in range(pages * PAGE_SIZE + tail)]


@pytest.fixture(autouse=True)
def writes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of this process is posted page by page, so that it can halt between two of them."""
    monkeypatch.setattr(transport, "PART_BYTES", 1)


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    return words


@pytest.fixture
def layout() -> KVLayout:
    return LAYOUT


@asynccontextmanager
async def open_decode(
    prefills: Iterable[str],
    *,
    device_pages: int = 96,
    host_pages: int = 96,
    storage: Storage | None = None,
    components: Sequence[ComponentPools] = (),
    **config: Any,
) -> AsyncIterator[Decode]:
    device = DevicePool.allocate(LAYOUT, device_pages)
    config = {**PATIENT, "prefetch_threshold_tokens": 0, "fetch_run_pages": 8, "loop_stall_report_s": 60.0} | config
    engine = DecodeEngine(
        engine_config(**config),
        device=device,
        host=HostPool.allocate(LAYOUT, host_pages),
        components=components,
        storage=storage,
        transport=NixlTransport("decode-0", dials=["127.0.0.1:*"]),
    )
    async with engine:
        yield Decode(engine, device, list(prefills), components)


@asynccontextmanager
async def open_prefill(
    *,
    name: str = "prefill-0",
    num_pages: int = 256,
    components: Sequence[ComponentPools] = (),
    **options: Any,
) -> AsyncIterator[Prefill]:
    pool = DevicePool.allocate(LAYOUT, num_pages)
    worker = SyntheticPrefill(pool, chunk_pages=64, components=components)
    poller = PollerThread()
    poller.start()
    gate = GatedPoller(poller)
    rooms: dict[str, Room] = {}

    async def serve(room: Room) -> None:
        rooms[room.request_id] = room
        await worker.serve(room)

    prefill = PrefillPeer(
        PrefillConfig(**options), device=pool, components=components, transport=NixlTransport(name), on_room=serve
    )
    prefill._poller = gate
    async with prefill as peer:
        try:
            yield Prefill(peer, worker, gate, rooms)
        finally:
            gate.open_gate()
    assert await poller.close() == 0


async def some_milliseconds(source: Random, waiting: asyncio.Task[ReadyRequest]) -> None:
    """Let a restore go on for a random time: it takes from some hundred microseconds, on a hit, to tens of
    milliseconds.
    """
    await asyncio.wait([waiting], timeout=source.choice((0, 0.0005, 0.002, 0.005, 0.01, 0.03)))


@pytest.fixture
def abort_at_random(abort_at_random: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
    """That of all tests, with times of NIXL."""
    return partial(abort_at_random, pause=some_milliseconds)


Opens = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
def decode_over_nixl() -> Opens:
    return open_decode


@pytest.fixture
def prefill_over_nixl() -> Opens:
    return open_prefill


@pytest.fixture
async def spawn_prefill() -> AsyncIterator[Callable[..., Awaitable[FaultProcess]]]:
    """Starts prefill children, which are gone at the end."""
    children: list[FaultProcess] = []

    async def spawn(environment: dict[str, str] | None = None, **options: Any) -> FaultProcess:
        order = PrefillOrder(**({"name": "prefill", "layout": LAYOUT, "num_pages": 256} | options))
        children.append(await FaultProcess.start(serve_prefill, order, environment=environment))
        return children[-1]

    yield spawn
    for child in children:
        child.end()


@pytest.fixture
async def spawn_decode() -> AsyncIterator[Callable[..., Awaitable[FaultProcess]]]:
    """Starts decode children, which are gone at the end."""
    children: list[FaultProcess] = []

    async def spawn(storage: str, name: str = "decode", **config: Any) -> FaultProcess:
        order = DecodeOrder(
            name=name,
            layout=LAYOUT,
            device_pages=96,
            host_pages=96,
            storage=storage,
            config=engine_config(**({**PATIENT, "prefetch_threshold_tokens": 0, "fetch_run_pages": 8} | config)),
        )
        children.append(await FaultProcess.start(serve_decode, order))
        return children[-1]

    yield spawn
    for child in children:
        child.end()
