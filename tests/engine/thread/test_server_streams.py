"""Calls with pages in GPU memory begin behind the work of the host engine's streams, for which threads stand in.

A stream that a test holds does nothing more until it is released, so what did not wait for it is seen at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from benchmarks.gpu.thread_streams import ThreadStreams
from tests.support.configs import engine_config
from tests.support.waits import LIMIT_S
from tidekv import (
    DecodeRequest,
    DevicePool,
    EngineClosed,
    EngineThread,
    Failed,
    KVLayout,
    NixlTransport,
    Offered,
    PeerOptions,
    PrefillPeer,
    PrefillThread,
    PrefixRead,
    RequestFailed,
    Restored,
    RestoredInto,
    prompt_digest,
)
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.thread import server_streams as module
from tidekv.engine.thread.server_streams import ServerStreams

PAGE = 4
PROMPT = list(range(100, 122))
PAGES = [9, 3, 4, 11, 40, 5]
LOOK_S = 0.2
"""Seconds for which a test looks for what must not happen; it fails sooner, and passes on any machine."""


class Device:
    """A device whose present stream a test can hold."""

    def __init__(self) -> None:
        self.streams = ThreadStreams()
        self._held: list[threading.Event] = []

    def hold(self) -> threading.Event:
        """Let the stream do nothing more until the event is set."""
        held = threading.Event()
        self._held.append(held)
        self.streams.current().enqueue(held.wait)
        return held

    def close(self) -> None:
        for held in self._held:
            held.set()
        self.streams.close()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Stands in for the GPU that has every pool."""
    device = Device()
    monkeypatch.setattr(module, "streams_of", lambda _: device.streams)
    yield device
    device.close()


def digests() -> Any:
    return prompt_digests(pack_tokens(PROMPT), PAGE)


def test_a_restore_begins_behind_the_work_that_uses_its_pages(device: Device, running) -> None:
    with running(device="lent") as rig:
        held = device.hold()
        rig.thread.restore_into(rig.request("r1"), PAGES)
        later = device.hold()
        assert rig.thread.call(lambda engine: engine.abort("r1")) is False, "the engine knows it too soon"
        held.set()
        # What the stream was given after the call is not waited for.
        outcome = rig.outcome()
        assert isinstance(outcome, RestoredInto) and outcome.restored.is_complete
        assert SyntheticKV(rig.device).verify(PAGES, digests()) == []
        later.set()
        rig.assert_nothing_held()


def test_an_offer_reads_what_the_stream_has_still_to_write(device: Device, running) -> None:
    with running(device="lent") as rig:
        held = device.hold()
        device.streams.current().enqueue(lambda: SyntheticKV(rig.device).fill(PAGES, digests()))
        later = device.hold()
        rig.thread.offer(PROMPT, PAGES)
        assert rig.thread.poll(LOOK_S) == [], "it did not wait for the stream"
        held.set()
        assert rig.thread.poll(LOOK_S) == [], "it did not wait for all that the stream had"
        later.set()
        outcome = rig.outcome()
        assert isinstance(outcome, Offered) and outcome.offered.written == 5
        rig.thread.restore_into(rig.request("r1"), [50, 51, 52, 53, 54, 55])
        restored = rig.outcome()
        assert isinstance(restored, RestoredInto) and restored.restored.sources["l2"] == 20
        assert SyntheticKV(rig.device).verify([50, 51, 52, 53, 54, 55], digests()) == []


@pytest.mark.parametrize("name", ["wait_settled", "flush", "drain"])
def test_calls_that_wait_for_the_engine_wait_for_what_the_device_holds_back(device: Device, running, name: str) -> None:
    """They end behind an offer that the engine did not have when they were called."""
    with running(device="lent") as rig, ThreadPoolExecutor(1) as elsewhere:
        held = device.hold()
        rig.thread.offer(PROMPT, PAGES)
        ended = elsewhere.submit(getattr(rig.thread, name))
        try:
            with pytest.raises(TimeoutError):
                ended.result(LOOK_S)
        finally:
            held.set()
        ended.result(LIMIT_S)
        outcome = rig.outcome()
        assert isinstance(outcome, Offered) and outcome.offered.written == 5


def test_a_restore_that_waits_for_the_device_is_aborted(device: Device, running) -> None:
    with running(device="lent") as rig:
        held = device.hold()
        rig.thread.restore_into(rig.request("r1"), PAGES)
        assert rig.thread.abort("r1")
        held.set()
        outcome = rig.outcome()
        assert isinstance(outcome, Failed) and isinstance(outcome.error, RequestFailed)
        assert outcome.error.cause == "aborted"
        rig.assert_nothing_held()


def test_a_device_that_fails_fails_the_calls_behind_it(device: Device, running) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    with running(device="lent") as rig:
        device.streams.current().enqueue(fail)
        rig.thread.restore_into(rig.request("r1"), PAGES)
        outcome = rig.outcome()
        assert isinstance(outcome, Failed) and "illegal memory access" in str(outcome.error)
        rig.thread.offer(PROMPT, PAGES)
        assert isinstance(rig.outcome(), Failed)
        rig.assert_nothing_held()


def test_the_end_does_not_wait_for_a_device_that_hangs(
    device: Device, running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    with running(device="lent") as rig:
        device.hold()
        ticket = rig.thread.restore_into(rig.request("r1"), PAGES)
        rig.thread.close()
        outcome = rig.outcome()
        assert isinstance(outcome, Failed) and outcome.ticket == ticket
        with pytest.raises(EngineClosed):
            rig.thread.restore_into(rig.request("r2"), PAGES)


def test_a_call_is_behind_the_other_streams_that_the_host_engine_names(device: Device, running) -> None:
    forward = device.streams.make()
    server = ServerStreams(device.streams, lambda: [forward])
    held = threading.Event()
    forward.enqueue(held.wait)
    with running(device="lent", server=server) as rig:
        rig.thread.restore_into(rig.request("r1"), PAGES)
        assert rig.thread.poll(LOOK_S) == []
        held.set()
        outcome = rig.outcome()
        assert isinstance(outcome, RestoredInto) and outcome.restored.is_complete


class Pair:
    """Prefill over NIXL, and a decode engine of its own pages in host memory."""

    def __init__(self, device: Device, stack: ExitStack) -> None:
        layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE)
        self.device, self.prompts = device, PROMPT
        self.source, self.target = DevicePool.allocate(layout, 16), DevicePool.allocate(layout, 16)
        self.pages = [9, 2, 7, 4, 5, 0]
        peer = PrefillPeer(device=self.source, transport=NixlTransport("prefill"))
        self.prefill = stack.enter_context(PrefillThread(peer, promise_timeout_s=LIMIT_S))
        config = engine_config(peer=PeerOptions(attempts=2, silence_s=10.0))
        transport = NixlTransport("decode", dials=["127.0.0.1:*"])
        self.decode = stack.enter_context(EngineThread(DecodeEngine(config, device=self.target, transport=transport)))
        self.decode.submit(DecodeRequest(request_id="r", tokens=PROMPT, prefill=self.prefill.address))
        self.prefill.open("r", prompt_digest(PROMPT))

    def compute(self, first: int, end: int) -> torch.Tensor:
        """Enqueue what fills some pages; returns the bytes that they will have."""
        pages = self.pages[first:end]
        content = torch.randint(0, 255, (len(pages), self.source.layout.page_bytes)).to(torch.uint8)
        self.device.streams.current().enqueue(lambda: self.source.write_pages(pages, content))
        return content

    def send(self, first: int, end: int) -> None:
        tail = len(PROMPT) if end == len(self.pages) else None
        self.prefill.send("r", self.pages[first:end], start_token=first * PAGE, end_token=tail)

    def restored(self) -> torch.Tensor:
        (outcome,) = self.decode.poll(LIMIT_S)
        assert isinstance(outcome, Restored), outcome
        return self.target.read_pages(outcome.ready.pages)


@pytest.fixture
def pair(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # UCX's transport within a process aborts if one of its agents ends while another connects to it.
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ExitStack() as stack:
        yield Pair(device, stack)


@pytest.mark.nixl
def test_pages_are_sent_behind_the_work_that_fills_them(pair: Pair) -> None:
    """What is handed over after the pages, the first token, does not overtake them."""
    held = pair.device.hold()
    first = pair.compute(0, 4)
    pair.send(0, 4)
    again = pair.device.hold()
    second = pair.compute(4, 6)
    pair.send(4, 6)
    pair.prefill.finish("r", first_token=7)
    later = pair.device.hold()
    assert pair.decode.poll(LOOK_S) == [], "pages were sent that were not computed"
    held.set()
    assert pair.decode.poll(LOOK_S) == [], "the last pages were sent before they were computed"
    again.set()
    restored = pair.restored()
    assert torch.equal(restored[:4], first)
    assert torch.equal(restored[4], second[0])
    later.set()


@pytest.mark.nixl
def test_pages_that_are_withdrawn_while_they_wait_are_not_sent(pair: Pair) -> None:
    held = pair.device.hold()
    pair.compute(0, 6)
    pair.send(0, 6)
    pair.prefill.finish("r", first_token=7)
    pair.prefill.restart("r", "preempted")
    again = pair.device.hold()
    content = pair.compute(0, 6)
    pair.send(0, 6)
    pair.prefill.finish("r", first_token=8)
    held.set()
    assert pair.decode.poll(LOOK_S) == [], "pages were sent that were withdrawn"
    again.set()
    assert torch.equal(pair.restored()[:5], content[:5])


@pytest.mark.nixl
def test_a_device_that_fails_ends_the_hand_over(pair: Pair) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    pair.device.streams.current().enqueue(fail)
    pair.send(0, 6)
    (ended,) = pair.prefill.poll(LIMIT_S)
    assert "the device has failed" in ended.cause and "illegal memory access" in ended.cause


class Reads:
    """Stands in for what the peer of a pair reads: 16 tokens, once `gate` is open; the first four were there."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.begun, self.gate = pair, threading.Event(), asyncio.Event()
        self.has_ended = False
        pair.prefill._peer.read_prefix = self.read  # type: ignore[assignment, method-assign]
        assert pair.prefill.read_prefix("other", [], 4, tokens=b"", namespace="").tokens == 4, "no decode asks for it"
        self.wait(lambda: pair.prefill.promised("r") is not None)
        assert pair.prefill.promised("r") == 0, "decode shares nothing"

    async def read(self, *args: object, **named: object) -> int:
        self.begun.set()
        try:
            await self.gate.wait()
        finally:
            for _ in range(3):  # As long as a copy is under way.
                await asyncio.sleep(0)
            self.has_ended = True
        return 16

    def start(self) -> PrefixRead:
        return self.pair.prefill.read_prefix("r", self.pair.pages, 4, tokens=b"", namespace="")

    @staticmethod
    def wait(condition: Any) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end_s, "it did not happen"
            time.sleep(0.001)


@pytest.mark.nixl
def test_a_read_begins_behind_the_work_that_uses_its_pages(pair: Pair) -> None:
    reads = Reads(pair)
    reads.gate.set()
    held = pair.device.hold()
    read = reads.start()
    assert not reads.begun.wait(LOOK_S), "pages were written that the device still uses"
    assert not read.is_done
    held.set()
    reads.wait(lambda: read.is_done)
    assert read.tokens == 16


@pytest.mark.nixl
def test_a_read_that_waits_for_the_device_is_ended_before_it_begins(pair: Pair) -> None:
    reads = Reads(pair)
    held = pair.device.hold()
    read = reads.start()
    pair.prefill.end_read(read)
    assert read.is_done and read.tokens == 4
    held.set()
    assert not reads.begun.wait(LOOK_S)


@pytest.mark.nixl
def test_the_end_of_a_read_waits_until_nothing_writes_to_its_pages(pair: Pair) -> None:
    reads = Reads(pair)
    read = reads.start()
    assert reads.begun.wait(LIMIT_S)
    pair.prefill.end_read(read)
    assert reads.has_ended and read.tokens == 4


@pytest.mark.nixl
def test_behind_a_device_that_fails_nothing_is_read(pair: Pair) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    reads = Reads(pair)
    pair.device.streams.current().enqueue(fail)
    read = reads.start()
    reads.wait(lambda: read.is_done)
    assert read.tokens == 4 and not reads.begun.is_set()


@pytest.mark.nixl
def test_a_read_that_the_end_of_the_reader_cuts_says_so(pair: Pair) -> None:
    async def ends(*args: object, **named: object) -> int:
        raise EngineClosed("the reader has closed")

    reads = Reads(pair)
    pair.prefill._peer.read_prefix = ends  # type: ignore[assignment, method-assign]
    read = reads.start()
    reads.wait(lambda: read.is_done)
    with pytest.raises(EngineClosed, match="reader has closed"):
        _ = read.tokens
