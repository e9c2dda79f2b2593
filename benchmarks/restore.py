"""What the tiers cost together: `python benchmarks/restore.py --json FILE`.

A decode engine with a `file:` store, and a prefill worker in another process that keeps prefixes, so that it only
sends. Pages are 1 MiB. Measured are: storage to device through the host, beside the slower of the two stages by itself;
a prompt of which half comes from storage and half by transfer, beside either half alone; and how often storage is asked
for a prefix of 10,000 tokens that 50 waiting requests share. Times are to READY, medians of rounds.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable

import numpy as np
import torch
import uvloop
from figures import Figures, option_parser

from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    NixlTransport,
    open_storage,
)
from tidekv.backends.copies import PageCopier
from tidekv.engine.poller import PollerThread
from tidekv.engine.workload.prefill_process import PrefillOrder, PrefillProcess
from tidekv.states.shapes import page_ids

VOCABULARY = 1 << 16
LARGE = KVLayout(num_layers=16, num_kv_heads=8, head_dim=128, dtype="float16", page_size=16)
SMALL = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, dtype="bfloat16", page_size=16)
HALF_PAGES = 64
SHARED_TOKENS, SHARERS = 10_000, 50


class Pair:
    """An engine and the address of its prefill worker."""

    def __init__(self, engine: DecodeEngine, address: str) -> None:
        self.engine = engine
        self.address = address
        self._names = 0

    async def ready_s(self, tokens: bytes, *, cache: bool = False) -> tuple[float, dict[str, int]]:
        """Seconds to READY, and tokens by source; the request is finished."""
        self._names += 1
        request = DecodeRequest(
            request_id=f"r{self._names}", tokens=tokens, prefill=self.address, prompt="send", cache=cache
        )
        began_s = time.perf_counter()
        ready = await self.engine.restore(request)
        spent_s = time.perf_counter() - began_s
        await self.engine.finish(ready)
        await self.engine.wait_settled()
        return spent_s, dict(ready.sources)

    async def forget(self) -> None:
        """Leave pages in storage alone."""
        await self.engine.flush(("l1", "l2"))


def tokens_of(seed: int, count: int) -> bytes:
    """Packed tokens."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.uint32).tobytes()


async def best_stage_s(rounds: int) -> tuple[float, float]:
    """Seconds that storage, and copies, take for the pages of one half, each in one call."""
    host, device = HostPool.allocate(LARGE, HALF_PAGES), DevicePool.allocate(LARGE, HALF_PAGES)
    poller = PollerThread()
    poller.start()
    copier = PageCopier(device, host)
    copier.start()
    pages = page_ids(range(HALF_PAGES))
    keys = [hashlib.sha256(str(page).encode()).digest() for page in pages]

    async def median_s(work: Callable[[], Awaitable[object]]) -> float:
        spent = []
        for _ in range(rounds + 1):
            began_s = time.perf_counter()
            await work()
            spent.append(time.perf_counter() - began_s)
        return statistics.median(spent[1:])

    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        storage = open_storage(f"file:{folder}?capacity={4 * HALF_PAGES * LARGE.page_bytes}")
        await storage.register(host.memory, host.page, namespace=b"b" * 32, poller=poller)
        assert all(await storage.put_from(keys, pages, timeout_s=60.0))
        read_s = await median_s(lambda: storage.get_into(keys, pages, timeout_s=60.0))
        await storage.close()
    copy_s = await median_s(lambda: copier.to_device(pages, pages))
    await copier.close()
    await poller.close()
    return read_s, copy_s


async def measure_tiers(figures: Figures, rounds: int) -> None:
    """Pipeline and overlap."""
    page_tokens = LARGE.page_size
    half = tokens_of(1, HALF_PAGES * page_tokens)
    # One token more, which is a page of its own: the last page of a prompt is always sent.
    end = tokens_of(2, 1)
    other = tokens_of(3, HALF_PAGES * page_tokens)
    order = PrefillOrder(
        name="prefill-0", fingerprint="s", layout=LARGE, num_pages=6 * HALF_PAGES, chunk_tokens=32 * page_tokens,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        async with (
            PrefillProcess(order) as prefill,
            DecodeEngine(
                EngineConfig(model="s", prefetch_threshold_tokens=page_tokens, default_deadline_s=300.0),
                device=DevicePool.allocate(LARGE, 3 * HALF_PAGES),
                host=HostPool.allocate(LARGE, 3 * HALF_PAGES),
                storage=open_storage(f"file:{folder}?capacity={8 * HALF_PAGES * LARGE.page_bytes}"),
                transport=NixlTransport(name="decode-0"),
            ) as engine,
        ):
            pair = Pair(engine, prefill.address)
            await pair.ready_s(half, cache=True)
            # Prefill has all of it from now on.
            for prompt in (half + end, half + other, other + end):
                await pair.ready_s(prompt)
            spent: dict[str, list[float]] = {"restore": [], "transfer": [], "both": []}
            for _ in range(rounds):
                for name, prompt in (("restore", half + end), ("transfer", other + end), ("both", half + other)):
                    await pair.forget()
                    seconds, sources = await pair.ready_s(prompt)
                    wanted = 0 if name == "transfer" else HALF_PAGES * page_tokens
                    assert sources["l3"] == wanted, (name, sources)
                    spent[name].append(seconds)
    stages_s = await best_stage_s(rounds)
    restore_s, transfer_s, both_s = (statistics.median(spent[name]) for name in ("restore", "transfer", "both"))
    read_ms, copy_ms = (1e3 * seconds for seconds in stages_s)
    figures.add(
        "restore.pipeline",
        100 * max(stages_s) / restore_s,
        f"{restore_s * 1e3:.0f} ms for {HALF_PAGES} MiB; storage alone {read_ms:.0f} ms, copies alone {copy_ms:.0f} ms",
    )
    figures.add(
        "restore.overlap",
        both_s / max(restore_s, transfer_s),
        f"both {both_s * 1e3:.0f} ms, restore {restore_s * 1e3:.0f} ms, transfer {transfer_s * 1e3:.0f} ms",
    )


async def measure_sharing(figures: Figures) -> None:
    """50 requests that come at once, with one prefix in storage."""
    prefix = tokens_of(4, SHARED_TOKENS // SMALL.page_size * SMALL.page_size)
    prefix_pages = len(prefix) // 4 // SMALL.page_size
    num_pages = prefix_pages + 4 * SHARERS
    order = PrefillOrder(
        name="prefill-0", fingerprint="s", layout=SMALL, num_pages=4 * num_pages, chunk_tokens=4096,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    async with (
        PrefillProcess(order) as prefill,
        DecodeEngine(
            EngineConfig(model="s", prefetch_threshold_tokens=16, default_deadline_s=300.0),
            device=DevicePool.allocate(SMALL, num_pages),
            host=HostPool.allocate(SMALL, num_pages),
            storage=open_storage("memory:?capacity=64MB"),
            transport=NixlTransport(name="decode-0"),
        ) as engine,
    ):
        pair = Pair(engine, prefill.address)
        await pair.ready_s(prefix, cache=True)
        await pair.forget()
        before = engine._parts.storage.statistics().hits
        async with asyncio.TaskGroup() as group:
            for number in range(SHARERS):
                tail = tokens_of(100 + number, SMALL.page_size)
                group.create_task(_hold(engine, prefill.address, f"s{number}", prefix + tail))
        read = engine._parts.storage.statistics().hits - before
    figures.add("restore.loads", read / prefix_pages, f"{read} pages read for {SHARERS} requests with {prefix_pages}")


async def _hold(engine: DecodeEngine, address: str, name: str, tokens: bytes) -> None:
    request = DecodeRequest(request_id=name, tokens=tokens, prefill=address, prompt="send")
    await engine.finish(await engine.restore(request))


async def measure(figures: Figures, rounds: int) -> None:
    """Everything, in turn."""
    await measure_sharing(figures)
    await measure_tiers(figures, rounds)


def main() -> None:
    """Read the options and measure."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with Figures(chosen.json) as figures:
        uvloop.run(measure(figures, chosen.rounds))


if __name__ == "__main__":
    main()
