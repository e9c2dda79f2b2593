"""Signs of life beside a link: what a thread answers while its event loop is stalled, and what decode makes of it."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading

import pytest
import uvloop

from benchmarks.ports import free_address
from tests.support.waits import LIMIT_S, until
from tidekv import DevicePool, EngineConfig, KVLayout, NixlTransport, PeerOptions, PrefillPeer, PrefillThread
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest
from tidekv.engine.prompts import prompt_digest
from tidekv.states import events
from tidekv.transports.control import liveness
from tidekv.transports.control.connection import ControlListener, ControlOptions, dial
from tidekv.transports.control.liveness import LivenessThread, stalled_s
from tidekv.transports.loopback import LoopbackLink

KEY = b"k" * liveness.KEY_BYTES


async def hold(link: object) -> None:
    """A link that its listener keeps open."""
    await asyncio.Event().wait()


async def test_a_thread_answers_for_a_loop_that_does_not_turn_and_says_for_how_long() -> None:
    started, release = threading.Event(), threading.Event()
    opened: list[tuple[str, bytes]] = []

    async def listen() -> None:
        listener = ControlListener(hold, ControlOptions())
        await listener.open("127.0.0.1:0")
        opened.append((listener.address, listener.liveness_key))
        asyncio.get_running_loop().call_soon(started.set)
        await asyncio.sleep(0)
        release.wait(LIMIT_S)  # The loop is stalled from here on.
        await listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    try:
        await asyncio.to_thread(started.wait, LIMIT_S)
        ((address, key),) = opened
        host, port = address.split(":")
        first = await stalled_s(host, int(port), key, within_s=LIMIT_S)
        second = await stalled_s(host, int(port), key, within_s=LIMIT_S)
        assert first is not None and second is not None
        assert second > first
        assert await stalled_s(host, int(port), KEY, within_s=0.1) is None
    finally:
        release.set()
        await asyncio.to_thread(thread.join, LIMIT_S)
    assert await stalled_s(host, int(port), key, within_s=0.1) is None


def test_uvloop_asks_as_asyncio_does() -> None:
    async def ask() -> float | None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = LivenessThread()
            thread.start([listening])
            try:
                return await stalled_s(*listening.getsockname(), thread.key, within_s=LIMIT_S)
            finally:
                thread.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask()) is not None


async def test_a_link_asks_the_address_that_it_has_dialled() -> None:
    listener = ControlListener(hold, ControlOptions(secret="s"))
    await listener.open("localhost:0")
    link = await dial(listener.address, ControlOptions(secret="s"))
    assert await link.stalled_s(listener.liveness_key, within_s=LIMIT_S) is not None
    await link.close()
    await listener.close()


async def test_datagrams_of_strangers_are_not_answered_and_end_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wild:
        thread = LivenessThread()
        thread.start([listening])
        where = listening.getsockname()
        wild.settimeout(0.1)
        for datagram in (b"", b"x", bytes(48), bytes(49), bytes(2000)):
            wild.sendto(datagram, where)
        with pytest.raises(TimeoutError):
            wild.recv(100)
        assert await stalled_s(*where, thread.key, within_s=LIMIT_S) is not None
        thread.close()


async def test_a_taken_udp_port_leaves_the_listener_without_signs_of_life() -> None:
    # `free_address` binds the UDP port of this number, and no connection of another process gets the TCP port.
    address = free_address()
    listener = ControlListener(hold, ControlOptions())
    await listener.open(address)
    assert listener.liveness_key == b""
    await listener.close()


@pytest.mark.parametrize("answer", ["stalled", "turning", "none"])
async def test_a_room_outlives_the_silence_of_its_prefill_only_while_that_says_that_its_loop_is_stalled(
    world, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    asked: list[bytes] = []

    async def says(link: LoopbackLink, key: bytes, *, within_s: float) -> float | None:
        asked.append(key)
        return {"stalled": 9.0, "turning": 0.0, "none": None}[answer]

    monkeypatch.setattr(LoopbackLink, "stalled_s", says)
    decode, prefill = await world.decode(heartbeat_s=0.01, missed_s=0.05, late_s=0.5), await world.prefill()
    prefill.sender._listener.liveness_key = KEY
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    await decode.wait(events.PromiseSent)
    world.network.loses = lambda sender, message: sender == prefill.transport.instance
    if answer == "stalled":
        # Several times the silence that loses a link.
        await until(lambda: len(asked) > 4)
        assert not decode.of(events.WriterLost)
        assert decode.receiver.statistics()["links_late"] == 1
    await decode.wait(events.WriterLost)  # In the end a stalled loop counts as lost, too.
    assert set(asked) == {KEY}
    assert decode.receiver.statistics()["links_late"] == (answer == "stalled")


@pytest.mark.nixl
async def test_a_prefill_that_computes_on_its_loop_for_longer_than_the_silence_is_late_and_keeps_its_rooms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
    source, target = DevicePool.allocate(layout, 8), DevicePool.allocate(layout, 8)
    peer = PrefillPeer(device=source, transport=NixlTransport("prefill"))
    config = EngineConfig(peer=PeerOptions(silence_s=0.4, heartbeat_s=0.1, retries_late=False))
    tokens = list(range(8))
    with PrefillThread(peer, promise_timeout_s=LIMIT_S) as prefill:
        async with DecodeEngine(
            config, device=target, transport=NixlTransport("decode", dials=["127.0.0.1:*"])
        ) as engine:
            prefill.open("r", prompt_digest(tokens))
            restored = asyncio.ensure_future(
                engine.restore(DecodeRequest(request_id="r", tokens=tokens, prefill=prefill.address))
            )
            await until(lambda: engine.statistics()["receiver"]["links"] == 1 or restored.done())
            release = threading.Event()
            prefill._loop.post(functools.partial(release.wait, LIMIT_S))
            await until(lambda: engine.statistics()["receiver"]["links_late"] == 1 or restored.done())
            release.set()
            prefill.send("r", [0, 1], start_token=0)
            prefill.finish("r", first_token=1)
            ready = await restored
            assert sum(ready.sources.values()) == len(tokens)
            await engine.finish(ready, [1])
