"""Test support: prefill and decode workers over NIXL with fault hooks, for the children of fault tests.

Each serves its line until the test closes it, and then closes regularly; see `fault_process` for the messages.
"""

from __future__ import annotations

import asyncio

import msgspec

from demo.prefill_process import ComponentOrder
from tests.support import fault_process as said
from tests.support.fault_hooks import GatedPoller, GatedStorage, LayerGate
from tidekv.backends.copies.pieces import layer_count
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest
from tidekv.engine.poller import PollerThread
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.errors import EngineClosed, RequestFailed
from tidekv.transports.nixl import transport as nixl


class PrefillOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a prefill child.

    Writes are posted in parts of `part_bytes`, so that one can halt between two parts.
    """

    name: str
    layout: KVLayout
    num_pages: int
    listen: str = "127.0.0.1:0"
    chunk_pages: int = 64
    part_bytes: int = 1
    lease_s: float = 10.0
    components: tuple[ComponentOrder, ...] = ()


class DecodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a decode child."""

    name: str
    layout: KVLayout
    device_pages: int
    host_pages: int
    storage: str
    config: EngineConfig


async def serve_prefill(line: said.Line, order: PrefillOrder) -> None:
    """Serve synthetic KV to every promise that includes tokens. Halt stops writes half-way."""
    # Safe here, because this process has only one transport.
    nixl.PART_BYTES = order.part_bytes
    pool = DevicePool.allocate(order.layout, order.num_pages)
    components = [component.pools() for component in order.components]
    prefill = SyntheticPrefill(pool, chunk_pages=order.chunk_pages, components=components)
    poller = PollerThread()
    poller.start()
    gate = GatedPoller(poller)
    transport = nixl.NixlTransport(order.name)
    peer = PrefillPeer(
        PrefillConfig(listen=order.listen, lease_s=order.lease_s),
        device=pool,
        components=components,
        transport=transport,
        on_room=prefill.serve,
    )
    peer._poller = gate
    async with peer, asyncio.TaskGroup() as group:
        telling = group.create_task(_tell_halts(line, gate))
        line.say(said.Ready(address=peer.address))
        async for message in line:
            if isinstance(message, said.AskCounts):
                counts = {**peer.statistics(), **transport.statistics(), "pages_free": prefill.pages_free}
                line.say(said.Counts(counts=counts))
            else:
                _move_gate(line, gate, message)
        gate.open_gate()
        telling.cancel()
    await poller.close()


async def serve_decode(line: said.Line, order: DecodeOrder) -> None:
    """Serve turns. Halt stops reads and writes of storage half-way. Ctrl-C ends it regularly."""
    device = DevicePool.allocate(order.layout, order.device_pages)
    storage = GatedStorage(open_storage(order.storage))
    engine = DecodeEngine(
        order.config,
        device=device,
        host=HostPool.allocate(order.layout, order.host_pages),
        storage=storage,  # type: ignore[arg-type]  # It passes on what it does not gate.
        transport=nixl.NixlTransport(order.name, dials=["127.0.0.1:*"]),
    )
    kv = SyntheticKV(device)
    try:
        async with engine, asyncio.TaskGroup() as group:
            assert storage.gate is not None
            telling = group.create_task(_tell_halts(line, storage.gate))
            line.say(said.Ready(address=engine.peer_address or ""))
            async for message in line:
                if isinstance(message, said.EarlyTurn):
                    group.create_task(_begin_early(line, engine, device, message))
                elif isinstance(message, said.Turn):
                    group.create_task(_take_turn(line, engine, kv, message))
                elif isinstance(message, said.AskCounts):
                    line.say(said.Counts(counts=_core_counts(engine)))
                elif isinstance(message, said.Drain):
                    group.create_task(_drain(line, engine, message))
                elif isinstance(message, said.Settle):
                    await engine.wait_settled()
                    line.say(said.Done())
                else:
                    _move_gate(line, storage.gate, message)
            telling.cancel()
    finally:
        line.say(said.Closed(counts=_core_counts(engine)))


async def _take_turn(line: said.Line, engine: DecodeEngine, kv: SyntheticKV, turn: said.Turn) -> None:
    request = DecodeRequest(
        request_id=turn.request_id, tokens=turn.tokens, prefill=turn.prefill, send_prompt=True, peers=turn.peers
    )
    try:
        ready = await engine.restore(request)
    except RequestFailed as failed:
        line.say(said.Failed(request_id=turn.request_id, cause=failed.cause))
        return
    except EngineClosed as refused:
        line.say(said.Failed(request_id=turn.request_id, cause=str(refused)))
        return
    size = engine.layout.page_size
    digests = prompt_digests(pack_tokens(turn.tokens), size)
    wrong = kv.verify(ready.pages[: len(digests)].tolist(), digests)
    await finish_turn(engine, kv, ready, turn.tokens, turn.output)
    line.say(said.Served(request_id=turn.request_id, sources=dict(ready.sources), wrong=wrong))


async def _drain(line: said.Line, engine: DecodeEngine, order: said.Drain) -> None:
    done = await engine.drain(to=order.to, hand_s=order.hand_s)
    line.say(said.Handed(handed=done.handed, present=done.present, left=done.left, cause=done.cause, live=done.live))


async def _begin_early(line: said.Line, engine: DecodeEngine, device: DevicePool, turn: said.EarlyTurn) -> None:
    layers = layer_count(device)
    LayerGate(layers)
    ready = await engine.restore(
        DecodeRequest(
            request_id=turn.request_id, tokens=turn.tokens, prefill=turn.prefill, send_prompt=True, early=True
        )
    )
    await ready.wait_layer(0)
    line.say(said.Begun(layers=layers if ready.layers_in_place is None else ready.layers_in_place))


async def finish_turn(
    engine: DecodeEngine, kv: SyntheticKV, ready: ReadyRequest, tokens: list[int], output: list[int]
) -> None:
    """Generate `output`: grow, write its synthetic KV, and finish."""
    size = engine.layout.page_size
    written = [*tokens, *output[:-1]]
    engine.grow(ready, len(written) - len(tokens))
    if len(output) > 1:
        digests = prompt_digests(pack_tokens(written), size)
        first = len(tokens) // size
        kv.fill(ready.pages[first : len(digests)].tolist(), digests[first:])
    await engine.finish(ready, output)


async def _tell_halts(line: said.Line, gate: GatedPoller) -> None:
    while True:
        await gate.halted.wait()
        gate.halted.clear()
        line.say(said.Halted())


def _move_gate(line: said.Line, gate: GatedPoller, message: said.AnyMessage) -> None:
    match message:
        case said.Halt(after_checks=after_checks, stops=stops, skips=skips):
            gate.close_gate(after_checks=after_checks, stops_process=stops, skips=skips)
        case said.Open():
            gate.open_gate()
        case _:
            raise AssertionError(f"this child does not handle {message}")
    line.say(said.Done())


def _core_counts(engine: DecodeEngine) -> dict[str, float]:
    core = engine.statistics()["core"]
    assert isinstance(core, dict)
    return core
