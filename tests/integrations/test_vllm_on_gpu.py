"""vLLM's connector with KV in GPU memory, driven as vLLM's model runner does: a step is enqueued, and nothing waits.

The GPU is a real one (marked `gpu`), or threads stand in for its streams. In both the model is slow: a save, a send or
a restore that does not wait for the stream of the model reads, or loses, other bytes. Blocks that vLLM gets back are
overwritten at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any  # vLLM's objects are not typed here.

import pytest
import torch

from benchmarks.gpu.thread_streams import ThreadStreams
from tests.support.vllm_contract import BLOCK, Vllm
from tests.support.vllm_handover import HandoverVllm, request_of, started_vllms
from tidekv.engine.thread import server_streams

pytestmark = pytest.mark.nixl
PROMPT = [*range(100, 100 + 4 * BLOCK), 1, 2]
PLACES = [7, 3, 11, 2, 5]
OTHERS = [12, 13, 14, 15, 16]
STEP_S = 0.02
"""Seconds by which the model is behind, on threads; passing does not depend on it."""
STEP_CYCLES = 20_000_000


class StandIn:
    """A stream of the model for which a thread stands in."""

    name = "cpu"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._streams = ThreadStreams()
        self._pause = threading.Event()
        monkeypatch.setattr(server_streams, "streams_of", lambda _: self._streams)

    def enqueue(self, work: Callable[[], None]) -> None:
        self._streams.current().enqueue(lambda: self._pause.wait(STEP_S))
        self._streams.current().enqueue(work)

    def settle(self) -> None:
        """Wait for the model, as a test does and a server does not."""
        self._streams.synchronize()

    def close(self) -> None:
        self._pause.set()
        self._streams.close()


class Gpu:
    """A stream of the model on a GPU; this thread's current one, as vLLM's is."""

    name = "cuda"

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))  # type: ignore[no-untyped-call]

    def enqueue(self, work: Callable[[], None]) -> None:
        torch.cuda._sleep(STEP_CYCLES)  # type: ignore[no-untyped-call]  # The only way to keep a stream busy for sure.
        work()

    def settle(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize()
        self._stack.close()


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    device = StandIn(monkeypatch) if request.param == "stand-in" else Gpu()
    if request.param == "gpu":
        # Nothing that the connector does may wait for the whole device.
        monkeypatch.setattr(device, "settle", torch.cuda.synchronize)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the device was synchronized"))
    yield device
    monkeypatch.undo()
    device.close()


Start = Callable[..., HandoverVllm]


@pytest.fixture
def start(connector: ModuleType, device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes vLLMs, which end with the test."""
    transports = "tcp" if device.name == "cpu" else "tcp,cuda_copy"
    options = {"device": device.name, "enqueue": device.enqueue}
    with started_vllms(connector, monkeypatch, transports=transports, **options) as start_one:
        yield start_one


def prefilled(prefill: HandoverVllm, name: str, blocks: list[int]) -> dict[str, Any]:
    """A prompt that prefill has enqueued in steps, and what its answer says."""
    assert prefill.add(request_of(name, PROMPT, {"do_remote_decode": True}), blocks) == 0
    return prefill.answer(name, chunk=12)


@pytest.mark.parametrize("is_head_first", [True, False], ids=["heads first", "tokens first"])
def test_decode_gets_what_the_model_of_prefill_has_still_to_compute(
    start: Start, device: Any, is_head_first: bool
) -> None:
    prefill = start("kv_producer", is_head_first=is_head_first)
    decode = start("kv_consumer", is_head_first=is_head_first)
    for turn in range(3):
        # The last user of these blocks may still write to them, since vLLM gives them on while its steps run.
        decode.overwrite([1, 2, 3, 4, 5])
        name = f"d{turn}"
        decode.add(request_of(name, [turn, *PROMPT[1:]], _asked(prefill, turn)), [1, 2, 3, 4, 5])
        decode.step_until(partial(decode.loaded.__contains__, name))
        assert decode.holds(name, [turn, *PROMPT[1:]])
        device.settle()
        assert decode.holds(name, [turn, *PROMPT[1:]]), "an earlier step wrote to the blocks after the restore"
        prefill.step_until(partial(prefill.freed.__contains__, f"p{turn}"))
        prefill.overwrite(PLACES)
    assert not decode.invalid


def _asked(prefill: HandoverVllm, turn: int) -> dict[str, Any]:
    name, tokens = f"p{turn}", [turn, *PROMPT[1:]]
    assert prefill.add(request_of(name, tokens, {"do_remote_decode": True}), PLACES) == 0
    return prefill.answer(name, chunk=12)


def test_what_decode_offers_is_read_after_the_step_and_restored_behind_the_next(start: Start, device: Any) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    assert decode.add(request_of("own", PROMPT, None), PLACES) == 0
    decode.compute("own", chunk=100)
    assert decode.finish("own") == (True, None)
    decode.step_until(lambda: decode.freed)
    decode.overwrite(PLACES)
    assert decode.counts["offer_pages_written"] == 4
    params = prefilled(prefill, "p", PLACES)
    decode.overwrite(OTHERS)
    decode.add(request_of("d", PROMPT, params), OTHERS)
    decode.step_until(lambda: decode.loaded)
    device.settle()
    assert decode.holds("d", PROMPT)
    assert decode.counts["restore_tokens_l2"] == 4 * BLOCK
    assert decode.counts["restore_tokens_transfer"] == 2


def test_a_prompt_that_prefill_preempts_is_sent_as_it_was_computed_again(start: Start) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = {"do_remote_prefill": True, "prefill": prefill.address, "room": "r"}
    decode.add(request_of("d", PROMPT, params), [1, 2, 3, 4, 5])
    decode.step()
    prefill.add(request_of("p", PROMPT, {"do_remote_decode": True, "room": "r"}), PLACES)
    prefill.step({"p": 2 * BLOCK})
    prefill.preempt("p", OTHERS)
    prefill.compute("p", chunk=12)
    assert prefill.finish("p")[0]
    decode.step_until(lambda: decode.loaded)
    assert decode.holds("d", PROMPT)
    assert not decode.invalid


def test_an_aborted_restore_gives_its_blocks_back_and_writes_no_more(start: Start, device: Any) -> None:
    prefill, decode = start("kv_producer"), start("kv_consumer")
    params = prefilled(prefill, "p", PLACES)
    decode.overwrite(OTHERS)
    decode.add(request_of("d", PROMPT, params), OTHERS)
    decode.step()
    assert decode.finish("d") == (False, None)
    decode.step_until(lambda: decode.loaded)
    decode.overwrite(OTHERS)
    prefill.step_until(lambda: prefill.freed)
    device.settle()
    assert all((cache[OTHERS] == 7.0).all() for cache in decode.caches)


def test_the_storage_role_saves_and_loads_kv_behind_the_model(
    connector: ModuleType, device: Any, tmp_path: Path
) -> None:
    vllm = Vllm(connector, f"file:{tmp_path}?capacity=1GB", device=device.name)

    def wipe() -> None:
        for cache in vllm.caches.values():
            cache.zero_()

    try:
        saved = [vllm.page(block) for block in PLACES[:4]]
        # What the stream has still to write is saved, and what it has still to do with blocks comes before the load.
        content = {name: cache.clone() for name, cache in vllm.caches.items()}
        wipe()
        device.enqueue(lambda: [cache.copy_(content[name]) for name, cache in vllm.caches.items()])
        assert vllm.serve(PROMPT, PLACES) == 0
        device.enqueue(wipe)
        assert vllm.serve(PROMPT, OTHERS) == 4 * BLOCK
        device.settle()
        assert [vllm.page(block) for block in OTHERS[:4]] == saved
    finally:
        vllm.close()
