"""Conversations of several turns with a model whose prefill takes real time, with and without the decode cache.

The prefill worker keeps the prompts that it has computed in both cases, so what differs is what decode keeps: without a
cache it is sent the whole prompt of every turn. Both are served by turns, and decode in batches; the first time is not
counted, because kernels are loaded in it.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import uvloop

from benchmarks.gpu.report import Report, Setting
from demo.compute import ComputeThread
from demo.conversation_run import StepBatcher
from demo.main_job import model_layout
from demo.model import DecodeStep, Llama, ModelShape, PagedModel, build_llama
from demo.prefill_process import PrefillOrder, PrefillProcess
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.engine.config.engine_config import AdmissionOptions, EngineConfig, PeerOptions, StorageOptions
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest
from tidekv.transports.nixl.transport import NixlTransport

PAGE = 64
ROUNDS = 2
LARGE = ModelShape(
    vocab_size=32_000,
    hidden_size=2048,
    mlp_size=8192,
    num_layers=12,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    context_tokens=65_536,
    dtype="bfloat16",
    weight_std=0.02,
)
TINY = ModelShape(num_layers=2)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Size of a run: `prompt_tokens` of the first turn, and what each further one adds."""

    shape: ModelShape
    prompt_tokens: int
    conversations: int
    turns: int
    chunk_tokens: int
    output_tokens: int = 16
    user_tokens: int = 112

    @property
    def pages(self) -> int:
        """Pages of one conversation at its end."""
        tokens = self.prompt_tokens + self.turns * (self.output_tokens + self.user_tokens)
        return -(-tokens // PAGE) + 1


@dataclass
class Arm:
    """What clients saw: seconds to the first token by turn, and how long all took."""

    first_token_s: list[tuple[int, float]] = field(default_factory=list)
    wall_s: float = 0.0
    output_tokens: int = 0
    transferred: int = 0
    prompt_tokens: int = 0

    def later_ms(self) -> list[float]:
        """Return milliseconds to the first token of all turns but the first."""
        return [1e3 * seconds for turn, seconds in self.first_token_s if turn]

    def first_ms(self) -> list[float]:
        """Return those of the first turns, whose prompts nothing knows."""
        return [1e3 * seconds for turn, seconds in self.first_token_s if not turn]


async def serve(
    setting: Setting,
    turns: Turns,
    llama: Llama,
    compute: ComputeThread,
    prefill: PrefillProcess,
    arm: Arm,
    *,
    cache: bool,
) -> None:
    """Serve all conversations at once, each turn after the one before, from new pools, and add what clients saw."""
    layout = model_layout(turns.shape, PAGE)
    total = turns.conversations * turns.pages
    await prefill.counts(forget=True)
    # Three quarters of the conversations fit in L1: the others come back from L2.
    device = DevicePool.allocate(layout, max(total * 3 // 4, turns.pages + 2), device=setting.device)
    config = EngineConfig(
        model=turns.shape.fingerprint,
        storage=StorageOptions(prefetch_threshold_tokens=0),
        admission=AdmissionOptions(prefill_share=1.0),
        peer=PeerOptions(lease_s=30.0, silence_s=10.0),
    )
    host = HostPool.allocate(layout, total + 8) if cache else None
    async with DecodeEngine(config, device=device, host=host, transport=NixlTransport("decode")) as engine:
        batcher = StepBatcher(PagedModel(llama, device), compute)
        clients = Clients(engine, batcher, prefill, turns, cache)
        async with batcher.running():
            await clients.converse(Arm(), number=turns.conversations, count=2)
            began_s = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for number in range(turns.conversations):
                    group.create_task(clients.converse(arm, number=number, count=turns.turns))
            arm.wall_s += time.perf_counter() - began_s
        await engine.wait_settled()


@dataclass(frozen=True)
class Clients:
    """Conversations with one decode engine."""

    engine: DecodeEngine
    batcher: StepBatcher
    prefill: PrefillProcess
    turns: Turns
    cache: bool

    async def converse(self, arm: Arm, *, number: int, count: int) -> None:
        """Take this many turns of a conversation."""
        random = np.random.default_rng(number)
        vocabulary = self.turns.shape.vocab_size
        prompt: list[int] = random.integers(0, vocabulary, self.turns.prompt_tokens).tolist()
        for turn in range(count):
            request = DecodeRequest(
                request_id=f"{number} {turn}",
                tokens=prompt,
                prefill=str(self.prefill.address),
                send_prompt=True,
                cache=self.cache,
            )
            began_s = time.perf_counter()
            ready = await self.engine.restore(request)
            arm.first_token_s.append((turn, time.perf_counter() - began_s))
            arm.prompt_tokens += len(prompt)
            arm.transferred += ready.sources["transfer"]
            output = await self._generated(ready, len(prompt))
            arm.output_tokens += len(output)
            await self.engine.finish(ready, output, keep=self.cache)
            prompt = [*prompt, *output, *random.integers(0, vocabulary, self.turns.user_tokens).tolist()]

    async def _generated(self, ready: ReadyRequest, start: int) -> list[int]:
        """Decode, one token after the other, beside the other conversations."""
        output = [ready.first_token]
        self.engine.grow(ready, self.turns.output_tokens - 1)
        pages = ready.pages.tolist()
        while len(output) < self.turns.output_tokens:
            choice = await self.batcher.step(DecodeStep(output[-1], start + len(output) - 1, pages))
            output.append(choice.token)
        return output


def tell(report: Report, name: str, arm: Arm) -> None:
    """Add the rows of one arm."""
    p50, p99 = np.percentile(arm.later_ms(), (50, 99))
    report.row(f"{name}: first token of a first turn, p50", f"{np.median(arm.first_ms()):.0f} ms")
    report.row(f"{name}: first token of later turns, p50", f"{p50:.1f} ms")
    report.row(f"{name}: mean and p99 of these", f"{np.mean(arm.later_ms()):.1f} ms, {p99:.1f} ms")
    report.row(f"{name}: throughput", f"{arm.output_tokens / arm.wall_s:.1f} tokens/s")
    report.row(f"{name}: prompt tokens sent", f"{arm.transferred} of {arm.prompt_tokens}")


def run_turns(setting: Setting, report: Report, turns: Turns) -> None:
    """Serve with and without the decode cache, and compare."""
    os.environ.setdefault("UCX_MODULES", "^ib")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_both(setting, report, turns))


async def serve_both(setting: Setting, report: Report, turns: Turns) -> None:
    """Serve from one prefill worker, whose kept prompts are dropped in between."""
    order = PrefillOrder(
        name="prefill",
        fingerprint=turns.shape.fingerprint,
        layout=model_layout(turns.shape, PAGE),
        num_pages=2 * turns.conversations * turns.pages,
        chunk_tokens=turns.chunk_tokens,
        vocabulary=turns.shape.vocab_size,
        model=turns.shape,
        device=str(setting.device),
    )
    arms = {"decode cache on": Arm(), "decode cache off": Arm()}
    with ComputeThread("decode") as compute:
        building = asyncio.ensure_future(compute.run(partial(build_llama, turns.shape, setting.device)))
        async with PrefillProcess(order) as prefill:
            llama = await building
            for number in range(ROUNDS):
                for (name, counted), cache in zip(arms.items(), (True, False), strict=True):
                    arm = counted if number else Arm()
                    await serve(setting, turns, llama, compute, prefill, arm, cache=cache)
                    report.note(f"{name}, round {number}: served after {arm.wall_s:.1f} s in all")
    for name, arm in arms.items():
        tell(report, name, arm)
    on, off = arms.values()
    report.check("every turn was served", len(on.first_token_s) == len(off.first_token_s))
    report.check("with the cache less is sent", on.transferred < off.transferred)
    faster = np.median(off.later_ms()) / np.median(on.later_ms())
    mean = 100 * (np.mean(on.later_ms()) / np.mean(off.later_ms()) - 1)
    p99 = 100 * (np.percentile(on.later_ms(), 99) / np.percentile(off.later_ms(), 99) - 1)
    more = on.output_tokens / on.wall_s / (off.output_tokens / off.wall_s)
    report.row("p50 of later turns, off ÷ on", f"{faster:.2f}", "8, published elsewhere")
    report.row("mean, p99 of later turns, on against off", f"{mean:+.0f} %, {p99:+.0f} %", "-39 %, -52 %, published")
    report.row("throughput, on ÷ off", f"{more:.2f}", "1.32, published elsewhere")
