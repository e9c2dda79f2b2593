"""SGLang's transfer backend with KV in GPU memory: it follows the stream of the forward, not only the current one.

The GPU is a real one (marked `gpu`), or threads stand in for its streams. The model is slow: what does not wait for it
moves other bytes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any  # SGLang's objects are not typed here.

import pytest
import torch

from benchmarks.gpu.thread_streams import ThreadStreams
from tests.support.sglang_contract import PAGE, HookRegistry, KVPoll, MHATokenToKVPool, modules
from tests.support.sglang_servers import Servers
from tests.support.waits import LIMIT_S
from tidekv.engine.integrations.sglang.handover import pools
from tidekv.engine.integrations.sglang.handover.plugin import register
from tidekv.engine.thread import server_streams

pytestmark = pytest.mark.nixl
PROMPT = list(range(100, 122))
THEIRS, OURS = [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]
STEP_S = 0.1
"""Seconds by which the model is behind, on threads; passing does not depend on it."""
STEP_CYCLES = 100_000_000
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class StandIn:
    """Streams for which threads stand in; that of the forward is not the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._streams = ThreadStreams()
        self._pause = threading.Event()
        self.forward = self._streams.make()
        monkeypatch.setattr(server_streams, "streams_of", lambda _: self._streams)
        monkeypatch.setattr(pools, "CudaStream", lambda stream: stream)

    def enqueue(self, work: Callable[[], None]) -> None:
        self.forward.enqueue(lambda: self._pause.wait(STEP_S))
        self.forward.enqueue(work)

    def settle(self) -> None:
        self._streams.synchronize()

    def close(self) -> None:
        self._pause.set()
        self._streams.close()


class Gpu:
    """A stream of the forward on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settle = torch.cuda.synchronize
        self.forward = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it.
        monkeypatch.setattr(MHATokenToKVPool, "device", "cuda")

    def enqueue(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.forward):
            torch.cuda._sleep(STEP_CYCLES)  # type: ignore[no-untyped-call]  # Keeps a stream busy for sure.
            work()

    def close(self) -> None:
        self.settle()


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    device = (StandIn if request.param == "stand-in" else Gpu)(monkeypatch)
    monkeypatch.setenv("UCX_TLS", "tcp" if request.param == "stand-in" else "tcp,cuda_copy")
    yield device
    device.close()


@pytest.fixture
def servers(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    with started(device, monkeypatch, {}, {}) as servers:
        yield servers


@contextmanager
def started(
    device: Any, monkeypatch: pytest.MonkeyPatch, prefill: dict[str, Any], decode: dict[str, Any]
) -> Iterator[Servers]:
    """Start both servers, with these options of their engines."""

    def give(engine: dict[str, Any]) -> None:
        monkeypatch.setenv("TIDEKV_SGLANG", json.dumps({"dials": ["127.0.0.1:*"], "host": "1MB", "engine": engine}))

    give(prefill)
    with modules():
        register()
        HookRegistry.apply_hooks()
        first = sys.modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue()
        give(decode)
        servers = Servers(first)
        for queue, pool in zip((servers.prefill, servers.decode), servers.pools, strict=True):
            scheduler = getattr(queue, "scheduler", None) or SimpleNamespace()
            scheduler.forward_stream, queue.scheduler, pool.enqueue = device.forward, scheduler, device.enqueue
        # Nothing that the backend does may wait for the whole device.
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the device was synchronized"))
        try:
            yield servers
        finally:
            servers.close()


def test_pages_are_sent_and_restored_behind_the_forward(servers: Servers, device: Any) -> None:
    # A request that has ended gave these pages back, and the forward still writes to them.
    servers.pools[1].compute([1] * 24, OURS)
    asked = servers.ask(PROMPT, OURS, 11)
    sent = servers.send(PROMPT, THEIRS, 11, chunks=2)
    servers.commit(asked)
    device.settle()
    assert servers.pools[1].holds(PROMPT, OURS)
    servers.wait(lambda: sent.disagg_kv_sender.poll() == KVPoll.Success)
    servers.settle()
    # From host memory, into pages that the forward still writes to.
    servers.pools[1].compute([1] * 24, [20, 21, 22, 23, 24, 25])
    asked = servers.ask(PROMPT, [20, 21, 22, 23, 24, 25], 12)
    servers.send(PROMPT, THEIRS, 12)
    servers.commit(asked)
    device.settle()
    assert servers.pools[1].holds(PROMPT, [20, 21, 22, 23, 24, 25])
    assert asked.kv_receiver.restore.sources["l2"] == 20
    servers.settle()


def test_what_the_tree_takes_in_is_read_behind_the_forward_that_computes_it(servers: Servers, device: Any) -> None:
    asked = servers.ask(PROMPT, OURS, 11)
    servers.send(PROMPT, THEIRS, 11)
    servers.wait(lambda: asked.kv_receiver.poll() == KVPoll.Success)
    # What the tree takes in is computed by a forward that is only enqueued; until then the pages hold something else.
    servers.pools[1]._compute([1] * 24, OURS)
    servers.pools[1].compute(PROMPT, OURS)
    servers.commit(asked)
    servers.settle()
    device.settle()
    servers.pools[1].compute([1] * 24, OURS)
    again = servers.ask(PROMPT, [20, 21, 22, 23, 24, 25], 12)
    servers.send(PROMPT, THEIRS, 12)
    servers.commit(again)
    device.settle()
    assert servers.pools[1].holds(PROMPT, [20, 21, 22, 23, 24, 25])
    servers.settle()


def test_what_decode_has_is_read_behind_the_forward_that_used_its_pages(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = {"enabled": True, "listen": "127.0.0.1:0", "read_share": 1.0}
    reading = {"enabled": True, "wait_s": LIMIT_S, "wait_share": 1.0, "host_share": 1.0}
    storage = {"prefetch_threshold_tokens": PAGE}
    prefill = {"cache_peers": reading, "storage": storage}
    with started(device, monkeypatch, prefill, {"cache_peers": sharing}) as servers:
        asked = servers.ask(PROMPT, OURS, 11)
        servers.send(PROMPT, THEIRS, 11)
        servers.commit(asked)
        servers.settle()
        scheduler = servers.prefill.scheduler
        free = [slot // PAGE for slot in scheduler.token_to_kv_pool_allocator.free_slots[: 5 * PAGE : PAGE]]
        servers.ask(PROMPT, [20, 21, 22, 23, 24, 25], 12)
        # Requests that have ended gave these pages back, and the forward still writes to them.
        for _ in range(10):
            servers.pools[0].compute([1] * 20, free)
        servers.bootstrap(PROMPT, 12)
        device.settle()
        (path,) = [path for path in scheduler.tree_cache.paths.values() if len(path) == 20]
        assert [slot // PAGE for slot in path[::PAGE]] == free
        assert servers.pools[0].holds(PROMPT[:20], free)
