"""The last resort: where no prefill is left, the caller computes the rest itself."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.inside import core_of
from tidekv import DecodeEngine, DecodeRequest, DevicePool, EngineConfig, KVLayout, LoopbackTransport, RequestFailed
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.decode.values import RecomputeJob
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.states.errors import EngineClosed, InvalidConfig
from tidekv.transports.loopback import LoopbackNetwork

PAGE_SIZE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE_SIZE)
PROMPT = list(range(30))


def digests_of(tokens: list[int]) -> list[bytes]:
    return prompt_digests(pack_tokens(tokens), PAGE_SIZE)


async def test_the_caller_computes_what_no_prefill_sends() -> None:
    device = DevicePool.allocate(LAYOUT, 32)
    kv = SyntheticKV(device)
    starts: list[int] = []

    async def recompute(job: RecomputeJob) -> tuple[int, dict[str, object]]:
        starts.append(job.start_token)
        first = job.start_token // PAGE_SIZE
        digests = prompt_digests(job.packed_tokens, PAGE_SIZE)
        kv.fill(job.pages[first:].tolist(), digests[first:])
        return 77, {"computed": "here"}

    transport = LoopbackTransport("decode", LoopbackNetwork())
    engine = DecodeEngine(EngineConfig(), device=device, transport=transport)
    engine.recompute_with(recompute)
    async with engine:
        ready = await engine.restore(DecodeRequest(request_id="r1", tokens=PROMPT, prefill=["nobody", "no one"]))
        assert (ready.first_token, ready.aux) == (77, {"computed": "here"})
        assert kv.verify(ready.pages.tolist(), digests_of(PROMPT)) == []
        assert ready.sources == {"l1": 0, "l2": 0, "l3": 0, "transfer": 0, "recompute": 30}
        await engine.finish(ready, [77])
        # What was computed is cache like any other: the next one starts behind it.
        again = await engine.restore(DecodeRequest(request_id="r2", tokens=[*PROMPT, 1], prefill="nobody"))
        assert again.sources == {"l1": 28, "l2": 0, "l3": 0, "transfer": 0, "recompute": 3}
        assert starts == [0, 28]
        await engine.finish(again, [77])
        await engine.wait_settled()
        core_of(engine).check()
        core = engine.statistics()["core"]
        assert core["device_free"] + core["device_cached"] == core["device_total"]


async def test_a_last_resort_that_fails_tells_why() -> None:
    async def recompute(job: RecomputeJob) -> tuple[int, dict[str, object]]:
        raise MemoryError("no room for activations")

    device = DevicePool.allocate(LAYOUT, 32)
    transport = LoopbackTransport("decode", LoopbackNetwork())
    engine = DecodeEngine(EngineConfig(), device=device, transport=transport)
    engine.recompute_with(recompute)
    async with engine:
        with pytest.raises(RequestFailed, match="no room for activations") as failed:
            await engine.restore(DecodeRequest(request_id="r1", tokens=PROMPT, prefill="nobody"))
        assert failed.value.cause == "recompute failed"
        await engine.wait_settled()
        assert engine.statistics()["core"]["device_free"] == 32


async def test_pages_of_an_aborted_computation_are_kept_until_it_ends() -> None:
    device = DevicePool.allocate(LAYOUT, 32)
    started, may_end = asyncio.Event(), asyncio.Event()

    async def recompute(job: RecomputeJob) -> tuple[int, dict[str, object]]:
        started.set()
        await may_end.wait()
        return 1, {}

    transport = LoopbackTransport("decode", LoopbackNetwork())
    engine = DecodeEngine(EngineConfig(), device=device, transport=transport)
    engine.recompute_with(recompute)
    async with engine:
        restoring = asyncio.create_task(engine.restore(DecodeRequest(request_id="r1", tokens=PROMPT, prefill="nobody")))
        await started.wait()
        await engine.abort("r1")
        with pytest.raises(RequestFailed, match="aborted"):
            await restoring
        assert engine.statistics()["core"]["device_owned"] == 8
        core_of(engine).check()
        may_end.set()
        await engine.wait_settled()
        core_of(engine).check()
        assert engine.statistics()["core"]["device_free"] == 32


async def test_the_last_resort_is_a_function_that_is_given_before_the_start() -> None:
    async def recompute(job: RecomputeJob) -> tuple[int, dict[str, object]]:
        return 1, {}

    transport = LoopbackTransport("decode", LoopbackNetwork())
    engine = DecodeEngine(EngineConfig(), device=DevicePool.allocate(LAYOUT, 4), transport=transport)
    with pytest.raises(InvalidConfig, match="recompute must be a coroutine function, not 5"):
        engine.recompute_with(5)
    async with engine:
        with pytest.raises(EngineClosed, match="before the engine is entered"):
            engine.recompute_with(recompute)
