"""Decode workers of one prefill, in this process and without a network, which read from each other's host memory."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tidekv import (
    CachePeerOptions,
    ComponentPools,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    LoopbackNetwork,
    LoopbackTransport,
    PeerOptions,
    PrefillPeer,
    ReadyRequest,
    StorageOptions,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.components import wrong_components
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.types import PageIds
from tidekv.transports.loopback import LoopbackPeer

PAGE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float16", page_size=PAGE)
PROMPT = list(range(100, 142))  # Ten pages of four tokens and a partial one of two.
PATIENT = PeerOptions(heartbeat_s=0.2, silence_s=60.0, lease_s=120.0)
"""No peer is silent because this machine is busy."""


def sharing(**fields: Any) -> CachePeerOptions:
    """Options of workers that share, and wait long enough for each other."""
    return CachePeerOptions(**{"enabled": True, "listen": "peers:0", "wait_s": 30.0, "wait_share": 0.9, **fields})


@dataclass
class Worker:
    """One decode worker: its engine and pools, and what it can check."""

    name: str
    engine: DecodeEngine
    device: DevicePool
    host: HostPool
    transport: LoopbackTransport
    prefill: str
    kv: SyntheticKV = field(init=False)
    made: int = 0

    def __post_init__(self) -> None:
        self.kv = SyntheticKV(self.device)

    def request(self, tokens: Sequence[int], peers: Sequence[str] = (), **fields: Any) -> DecodeRequest:
        """A request for a prompt, with an id of its own."""
        self.made += 1
        return DecodeRequest(
            request_id=f"{self.name}-{self.made}",
            tokens=list(tokens),
            prefill=self.prefill,
            send_prompt=True,
            peers=peers,
            **fields,
        )

    async def ready(self, tokens: Sequence[int], peers: Sequence[str] = (), **fields: Any) -> ReadyRequest:
        """Restore a prompt, and verify every byte of it."""
        ready = await self.engine.restore(self.request(tokens, peers, **fields))
        namespace = str(fields.get("namespace", ""))
        digests = prompt_digests(pack_tokens(list(tokens)), PAGE, namespace=namespace)
        assert self.kv.verify(list(ready.pages), digests) == [], f"wrong bytes at {self.name}"
        assert wrong_components(self.engine.components, ready.component_pages, digests) == {}
        return ready

    async def serve(self, tokens: Sequence[int], peers: Sequence[str] = (), **fields: Any) -> dict[str, int]:
        """Restore a prompt and give it back; returns where its tokens came from."""
        ready = await self.ready(tokens, peers, **fields)
        await self.engine.finish(ready, [])
        return dict(ready.sources)

    @property
    def address(self) -> str:
        """Where others read its host memory."""
        assert self.engine.peer_address is not None
        return self.engine.peer_address

    def core(self) -> dict[str, int]:
        """Counts of the core."""
        return dict(self.engine.statistics()["core"])


def lie(patch: pytest.MonkeyPatch, writer: Worker, count: int = 1) -> list[int]:
    """Flip a bit of the fifth page of the next `count` writes of a worker to others, behind its checksum; returns the
    pages.
    """
    flipped: list[int] = []
    whole = LoopbackTransport.write

    async def write(self: LoopbackTransport, peer: LoopbackPeer, ours: PageIds, theirs: PageIds) -> int:
        written = await whole(self, peer, ours, theirs)
        if self is writer.transport and len(flipped) < count:
            segment = peer.exchange.theirs.segments[0]
            at = segment.address + theirs[4] * segment.stride_bytes
            ctypes.c_uint8.from_address(at).value ^= 4
            flipped.append(theirs[4])
        return written

    patch.setattr(LoopbackTransport, "write", write)
    return flipped


class Gate:
    """Holds the writes of one worker, from the first on."""

    def __init__(self, writer: str) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()
        self._writer = writer

    async def hold(self, writer: str, target: str, pages: int) -> None:
        """Hold a write of that worker until the gate is opened."""
        if writer == self._writer:
            self.reached.set()
            await self.opened.wait()


@dataclass
class GatedNetwork:
    """A loopback network in which writes of a worker can be held."""

    network: LoopbackNetwork
    gates: list[Gate] = field(default_factory=list, kw_only=True)

    def hold(self, writer: Worker) -> Gate:
        """Hold the writes of a worker, until the gate is opened, or the test ends."""
        gate = Gate(writer.transport.instance)
        self.gates.append(gate)
        self.network.before_write = gate.hold
        return gate


@dataclass
class Neighbours(GatedNetwork):
    """Decode workers, and the network between them."""

    prefill: SyntheticPrefill
    workers: list[Worker]

    def __getitem__(self, number: int) -> Worker:
        return self.workers[number]


@contextlib.asynccontextmanager
async def neighbours(
    count: int = 2,
    *,
    host_pages: int = 64,
    options: CachePeerOptions | None = None,
    configs: Sequence[dict[str, Any]] = (),
    namespace: str = "",
    components: Callable[[], Sequence[ComponentPools]] = tuple,
    network: LoopbackNetwork | None = None,
    first: int = 0,
    **fields: Any,
) -> AsyncIterator[Neighbours]:
    """So many running decode workers; `configs` has further options of each, `components` makes the
    pools of each, and of prefill. Others on the same network have another
    `first` number.
    """
    network = network or LoopbackNetwork()
    pool = DevicePool.allocate(LAYOUT, 256)
    of_prefill = components()
    prefill = SyntheticPrefill(pool, vocabulary=1000, namespace=namespace, components=of_prefill)
    options = options or sharing()
    storage = StorageOptions(prefetch="timeout", prefetch_threshold_tokens=1)
    async with contextlib.AsyncExitStack() as stack:
        peer = await stack.enter_async_context(
            PrefillPeer(
                device=pool,
                components=of_prefill,
                transport=LoopbackTransport(f"prefill-{first}", network),
                on_room=prefill.serve,
            )
        )
        workers = []
        for number in range(count):
            more = configs[number] if number < len(configs) else {}
            config = EngineConfig(**{"storage": storage, "peer": PATIENT, "cache_peers": options, **fields, **more})
            device, host = DevicePool.allocate(LAYOUT, 64), HostPool.allocate(LAYOUT, host_pages)
            transport = LoopbackTransport(f"decode-{first + number}", network)
            engine = DecodeEngine(config, device=device, host=host, components=components(), transport=transport)
            await stack.enter_async_context(engine)
            workers.append(Worker(f"decode-{first + number}", engine, device, host, transport, peer.address))
        all_of = Neighbours(network, prefill, workers)
        try:
            yield all_of
        finally:
            for gate in all_of.gates:
                gate.opened.set()
