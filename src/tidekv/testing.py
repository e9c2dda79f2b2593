"""Tests of an embedding: a decode engine and a prefill worker in one process, with KV that shows every wrong byte.

    async with loopback_pair() as pair:
        ready = await pair.restore("r1", range(10))      # Every byte of every page is compared.
        await pair.generate(ready, [11, 12])             # The service's part: grow, write KV, finish.
        await pair.check_idle()                          # Every page and every lock was given back.

Nothing here needs a model, a GPU, a network or a second process. The engine is the real one, with its threads; only the
bytes move by loopback, and only its clock stands still until `advance`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.chain import Tokens, pack_tokens
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.base import Storage
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill, synthetic_first_token
from tidekv.states.events import ClockAdvanced
from tidekv.states.validation import SecondsOrZero, checked
from tidekv.transports import wire
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport
from tidekv.transports.prefill.prefill_room import Room

__all__ = ["LAYOUT", "Clock", "FaultSwitch", "LoopbackPair", "SyntheticKV", "loopback_pair", "synthetic_first_token"]

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
"""Pages of four tokens."""
PREFILL = "prefill"
IDLE_S = 60.0


class Clock:
    """Seconds that pass only by `LoopbackPair.advance`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class FaultSwitch:
    """Faults between the workers of a pair. All are off until they are switched on."""

    def __init__(self, network: LoopbackNetwork, *, decode: str) -> None:
        """`decode` is the instance of the decode worker."""
        self.prefill_raises: str | None = None
        """Prefill fails each new request with this text."""
        self.is_silent = False
        """No message of prefill arrives any more."""
        self._network = network
        self._decode = decode
        self._may_write = asyncio.Event()
        self._may_write.set()
        network.before_write = self._before_write
        network.loses = self._loses

    def hold_writes(self) -> None:
        """Keep all further pages of prefill on their way, until `release_writes`."""
        self._may_write.clear()

    def release_writes(self) -> None:
        """Let the pages that were held arrive, and all further ones."""
        self._may_write.set()

    def cut_links(self) -> None:
        """Break the link between both workers once; decode dials again when it needs it."""
        self._network.cut(self._decode)

    async def _before_write(self, writer: str, target: str, pages: int) -> None:
        await self._may_write.wait()

    def _loses(self, sender: str, message: wire.Message) -> bool:
        return self.is_silent and sender.startswith(PREFILL)


@dataclass
class LoopbackPair:
    """Both workers, and what a test asks of them. Made by `loopback_pair`."""

    engine: DecodeEngine
    peer: PrefillPeer
    prefill: SyntheticPrefill
    """Serves the prompts of requests with `send_prompt`: the bytes of each page depend on every token up to its end."""
    device: DevicePool
    host: HostPool | None
    network: LoopbackNetwork
    faults: FaultSwitch
    clock: Clock | None = None
    """None: real time."""
    kv: SyntheticKV = field(init=False)
    """Fills and verifies device pages."""

    def __post_init__(self) -> None:
        self.kv = SyntheticKV(self.device)

    def request(self, request_id: str, tokens: Tokens, **options: Any) -> DecodeRequest:
        """Return a request that the prefill of the pair can serve. `options` are further fields of DecodeRequest."""
        return DecodeRequest(request_id=request_id, tokens=tokens, prefill=PREFILL, send_prompt=True, **options)

    async def restore(self, request_id: str, tokens: Tokens, **options: Any) -> ReadyRequest:
        """Restore a prompt, and compare every byte of its pages. Raises as `DecodeEngine.restore`, AssertionError for
        wrong pages.
        """
        ready = await self.engine.restore(self.request(request_id, tokens, **options))
        wrong = self.wrong_pages(ready, tokens)
        assert not wrong, f"request {request_id!r}: pages {wrong} of the prompt have wrong bytes"
        assert sum(ready.sources.values()) == ready.prompt_tokens, (request_id, ready.sources)
        return ready

    def wrong_pages(self, ready: ReadyRequest, tokens: Tokens) -> list[int]:
        """Return the positions of the prompt's pages that differ, in any byte, from what prefill computes."""
        digests = prompt_digests(pack_tokens(tokens), self.device.layout.page_size)
        return self.kv.verify(ready.pages[: len(digests)].tolist(), digests)

    async def generate(self, ready: ReadyRequest, output: Sequence[int]) -> None:
        """Do a service's part: grow the request, write the KV of its output, and finish it."""
        self.engine.grow(ready, max(len(output) - 1, 0))
        if len(output) > 1:
            page_size = self.device.layout.page_size
            digests = prompt_digests(ready.packed_tokens + pack_tokens(output[:-1]), page_size)
            first = ready.prompt_tokens // page_size
            self.kv.fill(ready.pages[first : len(digests)].tolist(), digests[first:])
        await self.engine.finish(ready, output)

    def advance(self, seconds: float) -> None:
        """Let this much time pass at once for the engine's deadlines, limits and estimates. Heartbeats of links, and
        whatever the operating system bounds, follow real time.
        """
        assert self.clock is not None, "the pair has real time: give loopback_pair a clock"
        self.clock.now_s += checked(seconds, SecondsOrZero, "seconds")
        self.engine._runtime.driver.post(ClockAdvanced(at_s=self.clock.now_s))

    async def check_idle(self) -> None:
        """Raise AssertionError, which names what is held, unless the service has given everything back: each request
        by `finish`, `retract` or `abort`, each retracted one by `resume` or `drop`. Waits for backups and for rooms
        that end, at most 60 s. Raises BrokenInvariant for a bug of tidekv.
        """
        async with asyncio.timeout(IDLE_S):
            await self.engine.wait_settled()
        self.engine.check()
        live = self.engine.states()
        assert not live, f"requests that were not given back (finish, retract or abort): {live}"
        for name, pool in self.engine.balance().items():
            held = {state: getattr(pool, state) for state in ("owned", "draining", "protected")}
            assert not any(held.values()), f"{name} pages are held by retracted requests without resume or drop: {held}"


@asynccontextmanager
async def loopback_pair(
    *,
    config: EngineConfig | None = None,
    layout: KVLayout = LAYOUT,
    device_pages: int = 64,
    host_pages: int = 128,
    host_path: str | Path | None = None,
    prefill_pages: int = 256,
    storage: Storage | None = None,
    clock: Clock | None = None,
    prefill_namespace: str = "",
    prefill_config: PrefillConfig | None = None,
    prefill_parts: Mapping[str, Any] | None = None,
) -> AsyncIterator[LoopbackPair]:
    """Run a decode engine and a prefill worker without a model, for as long as the block lasts.

    `config`, `storage` and the pools of `device_pages` and `host_pages` (0: none) are those of the engine, which closes
    the storage. `host_path`: the file of a lasting host pool, which a later pair may have again. `clock`: the time of
    both workers; None: real time. The bytes that prefill computes depend on `prefill_namespace`, too, which
    `wrong_pages` does not expect. `prefill_config`, but for its address, and `prefill_parts` are further arguments of
    `PrefillPeer`.
    """
    network = LoopbackNetwork()
    transport = LoopbackTransport("decode-0", network)
    faults = FaultSwitch(network, decode=transport.instance)
    device = DevicePool.allocate(layout, device_pages)
    host = HostPool.allocate(layout, host_pages, path=host_path) if host_pages else None
    prefill_pool = DevicePool.allocate(layout, prefill_pages)
    prefill = SyntheticPrefill(prefill_pool, chunk_pages=3, namespace=prefill_namespace)

    async def serve(room: Room) -> None:
        if faults.prefill_raises is not None:
            raise RuntimeError(faults.prefill_raises)
        await prefill.serve(room)

    class Peer(PrefillPeer):
        """A peer with the time of the test."""

        _clock = PrefillPeer._clock if clock is None else staticmethod(clock)

    peer = Peer(
        msgspec.structs.replace(prefill_config or PrefillConfig(), listen=PREFILL),
        device=prefill_pool,
        transport=LoopbackTransport("prefill-0", network),
        on_room=serve,
        **(prefill_parts or {}),
    )
    engine = DecodeEngine(
        config or EngineConfig(),
        device=device,
        host=host,
        storage=storage,
        transport=transport,
    )
    if clock is not None:
        engine._runtime.clock = clock
    try:
        async with peer, engine:
            pair = LoopbackPair(engine, peer, prefill, device, host, network, faults, clock)
            try:
                yield pair
            finally:
                faults.release_writes()  # The workers wait for writes in flight at their end.
    finally:
        if host is not None:
            host.close()
