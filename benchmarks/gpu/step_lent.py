"""Pages in tensors that a serving engine lends, of the shapes that SGLang and vLLM allocate.

The contract tests of both integrations, which need neither, drive them with a model that is behind its stream. An
engine with `device="lent"` restores into them and is offered what they hold, by way of all sources; and the copies
of the storage role move pages between vLLM's blocks of any strides and host memory, behind a forward pass that spins.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import uvloop

from benchmarks.gpu.copy_rig import CopyRig, Forward
from benchmarks.gpu.report import Report, Setting
from benchmarks.gpu.step_tests import run_pytest
from demo.prefill_process import PrefillOrder, PrefillProcess
from tidekv.backends.copies.block_order import BlockMover, BlockPool, PagedBlocks
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.config.engine_config import EngineConfig, StorageOptions
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.states.errors import InvalidConfig, RequestFailed
from tidekv.transports.nixl.transport import NixlTransport

MODEL = "gpu-lent"
CONTRACTS = ("tests/integrations/test_vllm_on_gpu.py", "tests/integrations/test_sglang_on_gpu.py")
SHORT = ("tests/integrations/test_vllm_block_copies.py",)
CONTRACTS_S = 60.0
LAYERS, HEADS, DIM, PAGE = 3, 4, 64, 16
LAYOUT = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", page_size=PAGE)
Lend = Callable[[int, torch.device], DevicePool]


def sglang_pool(pages: int, device: torch.device) -> DevicePool:
    """Lend K and V of each layer as [slots, heads, dim]."""
    shape = (pages * PAGE, HEADS, DIM)
    k, v = ([torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)] for _ in range(2))
    return DevicePool.wrap(k, v, LAYOUT)


def vllm_pool(pages: int, device: torch.device) -> DevicePool:
    """Lend one tensor a layer, [K and V, blocks, tokens of a block, heads, dim]."""
    layers = [torch.zeros(2, pages, PAGE, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    return DevicePool.wrap([layer[0] for layer in layers], [layer[1] for layer in layers], LAYOUT)


def flashinfer_pool(pages: int, device: torch.device) -> DevicePool:
    """Lend one tensor a layer, [blocks, K and V, tokens of a block, heads, dim]."""
    layers = [torch.zeros(pages, 2, PAGE, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    return DevicePool.wrap([layer[:, 0] for layer in layers], [layer[:, 1] for layer in layers], LAYOUT)


def heads_first_pool(pages: int, device: torch.device) -> DevicePool:
    """Lend one tensor a layer, [K and V, blocks, heads, tokens of a block, dim], as [blocks, tokens, heads, dim]."""
    layers = [torch.zeros(2, pages, HEADS, PAGE, DIM, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    views = [layer.permute(0, 1, 3, 2, 4) for layer in layers]
    return DevicePool.wrap([view[0] for view in views], [view[1] for view in views], LAYOUT)


LENT: dict[str, Lend] = {
    "K and V apart, as SGLang": sglang_pool,
    "one tensor a layer, K and V first, as vLLM": vllm_pool,
    "one tensor a layer, blocks first, as FlashInfer": flashinfer_pool,
    "heads before tokens": heads_first_pool,
}


async def check_engine(
    setting: Setting, report: Report, name: str, device: DevicePool, prefill: PrefillProcess
) -> None:
    """Restore into lent pages from every source, offer them, and abort."""
    kv = SyntheticKV(device)
    random = np.random.default_rng(3)
    folder = setting.work / f"storage-{len(report.checks)}"
    tokens: list[int] = random.integers(0, 50_000, 20 * PAGE + 5).tolist()
    digests = prompt_digests(pack_tokens(tokens), PAGE)
    config = EngineConfig(
        model=MODEL,
        device="lent",
        storage=StorageOptions(prefetch="wait_complete", prefetch_threshold_tokens=0),
    )
    async with DecodeEngine(
        config,
        device=device,
        host=HostPool.allocate(LAYOUT, 64),
        storage=open_storage(f"file:{folder}?capacity=64MiB"),
        transport=NixlTransport("lent"),
    ) as engine:

        def request(number: int) -> DecodeRequest:
            return DecodeRequest(
                request_id=f"{name} {number}", tokens=tokens, prefill=str(prefill.address), send_prompt=True
            )

        expected = {"transfer": "transfer", "l2": "l2", "l3": "l3", "l1": "l1"}
        for number, source in enumerate(expected):
            pages = random.permutation(device.num_pages)[: len(digests)].tolist()
            have = 0
            if source == "l1":
                have = 4 * PAGE
                kv.fill(pages[:4], digests[:4])
            elif source == "l3":
                await engine.wait_settled()
                await engine.flush(("l2",))
            restored = await engine.restore_into(request(number), pages, have)
            wrong = kv.verify(pages, digests)
            passed = restored.is_complete and not wrong and restored.sources[source] > 0
            report.check(f"{name}: restored from {source}", passed, f"{restored.sources}, wrong pages {wrong}")
            await engine.offer(tokens, pages)
        tokens[0] += 1
        call = asyncio.ensure_future(engine.restore_into(request(9), list(range(len(digests)))))
        await asyncio.sleep(0.001)
        await engine.abort(f"{name} 9")
        try:
            outcome = f"{(await call).restored_tokens} tokens"
        except RequestFailed as failed:
            outcome = failed.cause
        report.check(f"{name}: an aborted restore ends", True, outcome)


async def serve(setting: Setting, report: Report) -> None:
    """Check all shapes that can be lent on this device, and report the others."""
    order = PrefillOrder(
        name="prefill",
        fingerprint=MODEL,
        layout=LAYOUT,
        num_pages=256,
        chunk_tokens=8 * PAGE,
        vocabulary=50_000,
        device=str(setting.device),
    )
    async with PrefillProcess(order) as prefill:
        for name, lend in LENT.items():
            try:
                device = lend(64, setting.device)
            except InvalidConfig as error:
                report.note(f"refused: {name}: {error}")
                continue
            with report.checking(f"{name}: the engine runs to its end"):
                await check_engine(setting, report, name, device, prefill)


def blocks_of(order: str, count: int, device: torch.device) -> list[torch.Tensor]:
    """Return vLLM's tensors, seen as [block, head, token, K and V]: heads or tokens first in memory."""
    if order == "HND":
        return [torch.zeros(count, HEADS, PAGE, 2 * DIM, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    layers = [torch.zeros(count, PAGE, HEADS, 2 * DIM, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    return [layer.permute(0, 2, 1, 3) for layer in layers]


def naive_page(tensors: list[torch.Tensor], block: int) -> torch.Tensor:
    """Return a page's bytes, token by token: layer 0 K, layer 0 V, layer 1 K…"""
    parts = []
    for tensor in tensors:
        whole = tensor[block].cpu()
        for first in (0, DIM):
            parts += [whole[:, token, first : first + DIM] for token in range(PAGE)]
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])


def check_blocks(rig: CopyRig, order: str, *, rounds: int) -> str:
    """Save blocks behind a forward pass that spins, in its stream, reuse them at once, and load them elsewhere."""
    count = 24
    tensors = blocks_of(order, count, rig.device)
    blocks = PagedBlocks(tensors, layout=LAYOUT, block_size=PAGE, num_blocks=count)
    host = HostPool.allocate(LAYOUT, count)
    pool = BlockPool(blocks)
    mover = BlockMover(pool, host)
    forward = Forward(rig)
    random = np.random.default_rng(5)
    for _ in range(rounds):
        wanted = [torch.randn(tensor.shape, dtype=torch.bfloat16).to(rig.device) for tensor in tensors]
        rig.synchronize()
        forward.spin(10)
        for tensor, values in zip(tensors, wanted, strict=True):
            forward.do(partial(tensor.copy_, values))
        if rig.stand_ins is not None:
            forward.synchronize()  # On the CPU these copies are made at once.
        chosen = random.permutation(count)[:8].tolist()
        pages = random.permutation(count)[:8]
        entered = pool.enter(chosen)
        forward.do(partial(mover.to_host, np.array(entered), pages))
        for tensor in tensors:
            forward.do(tensor.zero_)
        rig.synchronize()
        pool.leave(entered)
        expected = [naive_page(wanted, block) for block in chosen]
        for page, block, values in zip(pages.tolist(), chosen, expected, strict=True):
            if not torch.equal(host.buffer[page], values):
                return f"a saved page differs from block {block}"
        targets = random.permutation(count)[:8].tolist()
        forward.spin(10)
        forward.do(lambda: tensors[0].fill_(1))
        entered = pool.enter(targets)
        forward.do(partial(mover.to_device, pages, np.array(entered)))
        rig.synchronize()
        pool.leave(entered)
        for block, values in zip(targets, expected, strict=True):
            if not torch.equal(naive_page(tensors, block), values):
                return f"loaded block {block} differs"
        rig.synchronize()
    return ""


def run(setting: Setting, report: Report) -> None:
    """Check lent pools behind an engine, then the copies of the vLLM connector."""
    os.environ.setdefault("UCX_MODULES", "^ib")
    files, chosen = (CONTRACTS, ["-m", "gpu"]) if setting.on_cuda else (SHORT if setting.short else CONTRACTS, [])
    run_pytest(setting, report, files, *chosen, limit_s=CONTRACTS_S)
    rig = CopyRig(setting)
    for order in ("HND", "NHD"):
        wrong = check_blocks(rig, order, rounds=2 if setting.short else 10)
        report.check(f"pages of vLLM's blocks, {order}, behind a forward pass", not wrong, wrong)
    rig.close()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(setting, report))
