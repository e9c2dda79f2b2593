"""A real model whose decode step begins with the first layer of a restore: its token is that of one process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from tests.support.configs import engine_config
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    KVLayout,
    LayersLost,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
)
from tidekv.backends.copies import cpu_moves
from tidekv.engine.demo.model import ModelShape, PagedModel, build_llama, generate_in_one_process, greedy
from tidekv.transports.loopback import LoopbackNetwork
from tidekv.transports.prefill.prefill_room import Room

SHAPE = ModelShape(vocab_size=64, hidden_size=64, mlp_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=16, dtype="float64", page_size=4)
PROMPT = torch.randint(0, 64, (25,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("fails", [False, True], ids=["undisturbed", "a layer is lost"])
async def test_the_token_after_the_first_is_exact(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    model, network = build_llama(SHAPE), LoopbackNetwork()
    theirs, ours = DevicePool.allocate(LAYOUT, 64), DevicePool.allocate(LAYOUT, 64)
    passed = [threading.Event() for _ in range(4)]
    copy = cpu_moves._GroupMover.layer_to_device

    def behind_the_model(mover: Any, host_pages: Any, device_pages: Any, runs: Any, layer: int) -> None:
        # Layer i is copied only after the model has computed layer i - 1: a model that did not wait would read zeros.
        if layer:
            passed[layer - 1].wait(60)
        if layer == 2 and fails:
            raise ZeroDivisionError("a bug of the copy")
        copy(mover, host_pages, device_pages, runs, layer)

    async def serve(room: Room) -> None:
        prompt, pages = memoryview(room.tokens).cast("I").tolist(), list(range(7))
        first_token = greedy(PagedModel(model, theirs).prefill_chunk(prompt, 0, pages)).token
        await room.send(pages, start_token=0)
        await room.finish(first_token=first_token)
        await room.received()

    async with (
        PrefillPeer(
            PrefillConfig(listen="prefill"),
            device=theirs,
            transport=LoopbackTransport("prefill-0", network),
            on_room=serve,
        ),
        DecodeEngine(
            engine_config(),
            device=ours,
            host=HostPool.allocate(LAYOUT, 64),
            transport=LoopbackTransport("decode-0", network),
        ) as engine,
    ):
        engine._runtime.copier._small_pages_max = 0

        def request(request_id: str, *, early: bool) -> DecodeRequest:
            return DecodeRequest(request_id=request_id, tokens=PROMPT, prefill="prefill", send_prompt=True, early=early)

        await engine.finish(await engine.restore(request("warm", early=False)))
        await engine.wait_settled()
        await engine.flush(("l1",))
        for row in ours.rows:
            row.zero_()
        monkeypatch.setattr(cpu_moves._GroupMover, "layer_to_device", behind_the_model)
        ready = await engine.restore(request("early", early=True))
        loop, losses = asyncio.get_running_loop(), 0

        def wait_layer(layer: int) -> None:
            if layer:
                passed[layer - 1].set()
            asyncio.run_coroutine_threadsafe(ready.wait_layer(layer), loop).result(60)

        while True:
            try:
                await ready.wait_layer(0)
                engine.grow(ready)
                logits = await asyncio.to_thread(
                    PagedModel(model, ours).decode_step,
                    ready.first_token,
                    len(PROMPT),
                    ready.pages.tolist(),
                    wait_layer=wait_layer,
                )
                break
            except LayersLost:
                losses += 1
        assert losses == fails
        assert [ready.first_token, greedy(logits).token] == generate_in_one_process(model, PROMPT, 2)
        await engine.finish(ready, [ready.first_token, greedy(logits).token])
