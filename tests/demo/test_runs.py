"""Conversations with the model and recordings with synthetic KV, served over loopback in one process."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo import model as paged
from demo.blocks import TraceOptions
from demo.compute import ComputeThread
from demo.conversation_run import Answer, ConversationRun
from demo.conversations import SOURCES, Lengths, Workload, WorkloadOptions, make_workload
from demo.model_prefill import ModelPrefill
from demo.phase import Pass, Phase, held_by
from demo.prefix_pages import PrefixPages
from demo.trace_run import TraceRun
from demo.traces import read_trace
from tests.support.configs import engine_config
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    HostPool,
    InvalidRequest,
    KVLayout,
    LoopbackTransport,
    PrefillConfig,
    PrefillPeer,
    RequestFailed,
    open_storage,
)
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.transports.loopback import LoopbackNetwork

SHAPE = paged.ModelShape(num_layers=2, hidden_size=64, mlp_size=128, num_heads=2, num_kv_heads=1)
PAGE_SIZE = 8
MODEL_LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=32, dtype="float64", page_size=PAGE_SIZE)
SYNTHETIC_LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", page_size=PAGE_SIZE)
WORKLOAD = make_workload(
    WorkloadOptions(conversations=5, rounds=3, system=Lengths(40), user=Lengths(14, 0.5, 4), output=Lengths(12, 0.3, 6))
)


@pytest.fixture(scope="module")
def llama() -> paged.Llama:
    return paged.build_llama(SHAPE)


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    with ComputeThread("test") as thread:
        yield thread


@dataclass
class Served:
    """What a run over loopback left to look at."""

    phase: Phase
    answers: list[Answer]
    pages: PrefixPages
    tokens_computed: int
    bytes_sent: int


@asynccontextmanager
async def decode_engine(
    network: LoopbackNetwork, layout: KVLayout, *, l1: int, l2: int
) -> AsyncIterator[tuple[DecodeEngine, DevicePool]]:
    device = DevicePool.allocate(layout, l1)
    host = HostPool.allocate(layout, l2) if l2 else None
    config = engine_config(prefetch_threshold_tokens=PAGE_SIZE)
    storage = open_storage("memory:?capacity=64MB") if l2 else None
    transport = LoopbackTransport("decode-0", network)
    async with DecodeEngine(config, device=device, host=host, storage=storage, transport=transport) as engine:
        yield engine, device


async def serve(
    llama: paged.Llama,
    compute: ComputeThread,
    *,
    workload: Workload = WORKLOAD,
    l1: int = 40,
    l2: int = 40,
    cache: bool = True,
    damage: str = "",
) -> Served:
    """Serve the workload once, with pools so small that all sources are used."""
    network = LoopbackNetwork()
    pool = DevicePool.allocate(MODEL_LAYOUT, 200)
    pages = PrefixPages(200, PAGE_SIZE)
    prefill = ModelPrefill(paged.PagedModel(llama, pool), pages, compute, chunk_tokens=2 * PAGE_SIZE)
    phase = Phase("run")
    transport = LoopbackTransport("prefill-0", network)
    async with PrefillPeer(
        PrefillConfig(listen="prefill"), device=pool, transport=transport, on_room=prefill.serve
    ) as peer:
        async with decode_engine(network, MODEL_LAYOUT, l1=l1, l2=l2 if cache else 0) as (engine, device):
            run = ConversationRun(
                Pass(engine=engine, prefill="prefill", phase=phase, in_flight_max=2, cache=cache),
                paged.PagedModel(llama, device),
                compute,
                workload=workload,
                damage=damage,
            )
            await run.run()
            await engine.wait_settled()
            phase.held = held_by(engine)
        sent = int(peer.statistics()["bytes_sent"])
    return Served(phase, run.answers, pages, prefill.tokens_computed, sent)


def first_difference(llama: paged.Llama, answers: list[Answer]) -> str:
    """Name the first turn with tokens that differ from those of one process; empty if there is none."""
    for answer in answers:
        if paged.generate_in_one_process(llama, answer.prompt, len(answer.output)) != list(answer.output):
            return answer.turn.request_id
    return ""


async def test_conversations_give_the_tokens_of_one_process_from_all_sources(
    llama: paged.Llama, compute: ComputeThread
) -> None:
    served = await serve(llama, compute)
    assert len(served.answers) == 15
    assert first_difference(llama, served.answers) == ""
    assert all(served.phase.tokens[source] for source in SOURCES), served.phase.tokens
    assert served.phase.prompt_tokens == sum(len(answer.prompt) for answer in served.answers)
    assert served.phase.held == {}
    assert served.pages.counts()["in_use"] == 0
    # Prefill sent the deltas and nothing else, and computed no prefix twice.
    assert served.bytes_sent == served.phase.delta_pages * MODEL_LAYOUT.page_bytes
    assert served.tokens_computed < served.phase.prompt_tokens / 2


async def test_without_a_decode_cache_everything_is_sent_and_the_tokens_are_the_same(
    llama: paged.Llama, compute: ComputeThread
) -> None:
    served = await serve(llama, compute, cache=False)
    assert first_difference(llama, served.answers) == ""
    assert served.phase.tokens["transfer"] == served.phase.prompt_tokens
    assert served.bytes_sent == served.phase.prompt_pages * MODEL_LAYOUT.page_bytes
    assert served.phase.held == {}


@pytest.mark.parametrize("source", SOURCES)
async def test_one_damaged_page_of_any_source_changes_tokens(
    llama: paged.Llama, compute: ComputeThread, source: str
) -> None:
    served = await serve(llama, compute, damage=source)
    assert first_difference(llama, served.answers) != ""


async def test_requests_that_run_out_of_pages_are_retracted_and_resumed(
    llama: paged.Llama, compute: ComputeThread
) -> None:
    # Two prompts fit, two prompts with their outputs do not.
    workload = make_workload(
        WorkloadOptions(conversations=2, rounds=1, system=Lengths(8), user=Lengths(8), output=Lengths(60))
    )
    served = await serve(llama, compute, workload=workload, l1=12)
    assert served.phase.retractions > 0
    assert first_difference(llama, served.answers) == ""
    assert served.phase.held == {}


async def test_a_wrong_prompt_fails_its_request_and_keeps_no_pages(llama: paged.Llama, compute: ComputeThread) -> None:
    network = LoopbackNetwork()
    pool = DevicePool.allocate(MODEL_LAYOUT, 4)
    pages = PrefixPages(4, PAGE_SIZE)
    prefill = ModelPrefill(paged.PagedModel(llama, pool), pages, compute, chunk_tokens=PAGE_SIZE)
    transport = LoopbackTransport("prefill-0", network)
    with pytest.raises(InvalidRequest, match="multiple of the page size"):
        ModelPrefill(paged.PagedModel(llama, pool), pages, compute, chunk_tokens=PAGE_SIZE + 1)
    async with (
        PrefillPeer(PrefillConfig(listen="prefill"), device=pool, transport=transport, on_room=prefill.serve),
        decode_engine(network, MODEL_LAYOUT, l1=20, l2=0) as (engine, _),
    ):
        for prompt in ([1] * 33, [10**6] * 9):  # Longer than the prefill pool; a token the model does not know.
            with pytest.raises(RequestFailed):
                await engine.restore(DecodeRequest(request_id="r", tokens=prompt, prefill="prefill", send_prompt=True))
        ready = await engine.restore(DecodeRequest(request_id="r", tokens=[1] * 9, prefill="prefill", send_prompt=True))
        await engine.finish(ready)
    assert pages.counts()["in_use"] == 0


def write_trace(path: Path, requests: int) -> Path:
    """Write a recording of prompts that share beginnings at random."""
    source = random.Random(7)
    lines = []
    for number in range(requests):
        ids = [*range(source.randrange(4)), *(100 * number + block for block in range(1, 3))]
        tokens = 512 * (len(ids) - 1) + source.randrange(1, 513)
        lines.append({"timestamp": number, "input_length": tokens, "output_length": 70, "hash_ids": ids})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("damage", [False, True])
async def test_a_replay_verifies_every_page(tmp_path: Path, compute: ComputeThread, damage: bool) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 30)
    requests = list(read_trace(path, TraceOptions(length_scale=1 / 8)))
    network = LoopbackNetwork()
    pool = DevicePool.allocate(SYNTHETIC_LAYOUT, 400)
    prefill = SyntheticPrefill(pool, vocabulary=1000)
    phase = Phase("replay")
    async with (
        PrefillPeer(
            PrefillConfig(listen="prefill"),
            device=pool,
            transport=LoopbackTransport("prefill-0", network),
            on_room=prefill.serve,
        ),
        decode_engine(network, SYNTHETIC_LAYOUT, l1=200, l2=220) as (engine, device),
    ):
        run = TraceRun(
            Pass(engine=engine, prefill="prefill", phase=phase, in_flight_max=3),
            device,
            compute,
            vocabulary=1000,
        )
        await run.run(iter(requests[:10]))
        if damage:
            await engine.wait_settled()
            # Whatever is cached is wrong from here on.
            for row in device.rows:
                row.bitwise_not_()
        await run.run(iter(requests[10:]))
        await engine.wait_settled()
        # The last request's output is cached as well, and has the bytes of its own prefix.
        said = requests[-1].prompt.packed(1000) + requests[-1].output(1000)
        ready = await engine.restore(DecodeRequest(request_id="r", tokens=said, prefill="prefill", send_prompt=True))
        assert ready.sources["transfer"] <= PAGE_SIZE
        assert damage or SyntheticKV(device).verify(ready.pages.tolist(), prompt_digests(said, PAGE_SIZE)) == []
        await engine.finish(ready)
        await engine.wait_settled()
        assert held_by(engine) == {}
    assert phase.requests == 30
    assert run.verdicts.pages == phase.prompt_pages
    assert phase.prompt_tokens == sum(request.prompt.token_count for request in requests)
    assert phase.tokens["l1"] > 0
    if damage:
        assert run.verdicts.wrong
        assert "pages differ, the first is page 0 of the prompt" in run.verdicts.wrong[0]
    else:
        assert run.verdicts.wrong == []
