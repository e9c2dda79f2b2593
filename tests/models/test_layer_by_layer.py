"""The example service begins a step with the first layer of a restore, and its tokens are those of one process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from demo.compute import ComputeThread
from demo.model import ModelShape, PagedModel, build_llama, generate_in_one_process, greedy
from examples.service.decode import Batch, decode_worker
from examples.service.model import ByteTokenizer, ServedModel
from examples.service.prefill import DistantPrefill
from tests.support.configs import engine_config
from tests.support.inside import copy_on_streams_only
from tidekv import DecodeEngine, DevicePool, HostPool, KVLayout, LoopbackTransport, PrefillConfig, PrefillPeer
from tidekv.backends.copies import cpu_moves
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

SHAPE = ModelShape(vocab_size=64, hidden_size=64, mlp_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=16, dtype="float64", page_size=4)
PROMPT = torch.randint(0, 64, (25,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("fails", [False, True], ids=["undisturbed", "a layer is lost"])
async def test_the_tokens_of_a_step_that_begins_early_are_exact(
    monkeypatch: pytest.MonkeyPatch, fails: bool, tokens: int
) -> None:
    model, network = build_llama(SHAPE), LoopbackNetwork()
    theirs, ours = DevicePool.allocate(LAYOUT, 64), DevicePool.allocate(LAYOUT, 64)
    wanted = [threading.Event() for _ in range(5)]
    copy, read = cpu_moves._GroupMover.layer_to_device, PagedModel._read_layer

    def behind_the_model(mover: Any, host_pages: Any, device_pages: Any, runs: Any, layer: int) -> None:
        # Layer i is copied only after the model has asked for it: a model that did not wait would read zeros.
        if layer and tokens > 1:
            wanted[layer].wait(60)
        if layer == 2 and fails:
            raise ZeroDivisionError("a bug of the copy")
        copy(mover, host_pages, device_pages, runs, layer)

    def asking(paged: PagedModel, cache: Any, layer: int, *arguments: Any) -> None:
        if paged.pool is ours:
            wanted[layer].set()
        read(paged, cache, layer, *arguments)

    async def serve(room: Room) -> None:
        prompt, pages = memoryview(room.tokens).cast("I").tolist(), list(range(7))
        first_token = greedy(PagedModel(model, theirs).prefill_chunk(prompt, 0, pages)).token
        await room.send(pages, start_token=0)
        await room.finish(first_token=first_token)
        await room.received()

    engine = DecodeEngine(
        engine_config(),
        device=ours,
        host=HostPool.allocate(LAYOUT, 64),
        transport=LoopbackTransport("decode-0", network),
    )
    served = ServedModel("tiny", model, ByteTokenizer(), LAYOUT, "tiny", 1024, frozenset(), is_random=True)
    with ComputeThread("decode") as compute:
        batch = Batch(PagedModel(model, ours), compute, batch_max=4)
        async with (
            PrefillPeer(
                PrefillConfig(listen="prefill"),
                device=theirs,
                transport=LoopbackTransport("prefill-0", network),
                on_room=serve,
            ),
            decode_worker(
                engine,
                batch,
                served,
                DistantPrefill(["prefill"]),
                name="decode-0",
                device_pages=64,
                layer_by_layer=True,
            ) as worker,
        ):
            copy_on_streams_only(engine)

            async def answer(count: int) -> tuple[list[int], int]:
                generation = worker.start(PROMPT, count)
                async with asyncio.timeout(60):
                    told = [token async for token in generation]
                    assert generation.task is not None
                    await generation.task  # The next request finds no other one.
                return told, generation.sources.get("l2", 0)

            expected = generate_in_one_process(model, PROMPT, tokens)
            assert await answer(tokens) == (expected, 0)
            await engine.wait_settled()
            await engine.flush(("l1",))
            for row in ours.rows:
                row.zero_()
            for event in wanted:
                event.clear()
            monkeypatch.setattr(cpu_moves._GroupMover, "layer_to_device", behind_the_model)
            monkeypatch.setattr(PagedModel, "_read_layer", asking)
            assert await answer(tokens) == (expected, 0 if fails else 24)
            assert worker.counts["steps_by_layer"] == (tokens > 1)
            assert engine.statistics()["core"].get("copies_failed", 0) == fails
