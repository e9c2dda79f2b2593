"""A prefix from another decode worker beside the same from prefill: `python -m benchmarks.cache_peers --json FILE`.

Three processes over NIXL on the loopback: a prefill worker that keeps what it has computed, so that it only sends; a
decode worker that has all prompts in host memory and shares it; and this one, which restores each prompt from the peer
and from prefill by turns, with empty caches each time. Every byte of the first round is compared, which also opens the
links; it does not count. Each cell has the bytes of one restore and the seconds of all from call to READY.

Prefill's computation, which a peer saves, is in none of the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
import uvloop

from benchmarks.collector import set_collector
from benchmarks.figures import option_parser
from demo.artefact import write_artefact
from demo.prefill_process import PrefillOrder, PrefillProcess
from tidekv import (
    CachePeerOptions,
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    NixlTransport,
    StorageOptions,
)
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests

LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, head_dim=128, dtype="float16", page_size=16)
VOCABULARY = 1 << 16
LENGTHS = (256, 1024, 4096)
"""Tokens of the prompts: whole pages, so that a peer sends all of them."""
NUM_PAGES = sum(LENGTHS) // LAYOUT.page_size + 64
PROGRAM = "python3 dev.py bench cache-peers"


def prompt_of(tokens: int) -> bytes:
    """Return the packed prompt of a length."""
    return np.random.default_rng(tokens).integers(0, VOCABULARY, tokens, dtype=np.uint32).tobytes()


class Worker:
    """A decode worker of this process."""

    def __init__(self, engine: DecodeEngine, prefill: str) -> None:
        self.engine = engine
        self._prefill = prefill
        self._kv = SyntheticKV(engine.device)
        self._names = 0

    async def restore(self, tokens: int, source: str, peers: tuple[str, ...] = (), *, verified: bool = False) -> float:
        """Restore a prompt, all of which must come from `source`; returns the seconds to READY."""
        self._names += 1
        packed = prompt_of(tokens)
        request = DecodeRequest(
            request_id=f"r{self._names}", tokens=packed, prefill=self._prefill, send_prompt=True, peers=peers
        )
        began_s = time.perf_counter()
        ready = await self.engine.restore(request)
        taken_s = time.perf_counter() - began_s
        if ready.sources.get(source) != tokens:
            raise RuntimeError(f"{tokens} tokens were to come from {source}, not {ready.sources}")
        if verified and (wrong := self._kv.verify(list(ready.pages), prompt_digests(packed, LAYOUT.page_size))):
            raise RuntimeError(f"{len(wrong)} pages from {source} have wrong bytes")
        await self.engine.finish(ready)
        await self.engine.wait_settled()
        return taken_s


@asynccontextmanager
async def decode_worker(name: str, prefill: str, *, listen: str | None) -> AsyncIterator[Worker]:
    """Run a decode worker for the block."""
    engine = DecodeEngine(
        EngineConfig(
            model="s",
            vocabulary=VOCABULARY,
            # Neither source gives way to the other one.
            storage=StorageOptions(prefetch="wait_complete", prefetch_threshold_tokens=1),
            cache_peers=CachePeerOptions(
                enabled=True, listen=listen, wait_s=60.0, wait_share=0.5, host_share=1.0, read_share=1.0
            ),
            default_deadline_s=300.0,
        ),
        device=DevicePool.allocate(LAYOUT, NUM_PAGES),
        host=HostPool.allocate(LAYOUT, NUM_PAGES),
        transport=NixlTransport(name=name, dials=["127.0.0.1:*"]),
    )
    async with engine:
        yield Worker(engine, prefill)


async def share(prefill: str) -> None:
    """Be the peer: hold all prompts in host memory, print the address, and share them until stdin ends."""
    async with decode_worker("decode-peer", prefill, listen="127.0.0.1:0") as worker:
        for tokens in LENGTHS:
            await worker.restore(tokens, "transfer")
        print(worker.engine.peer_address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def peer_process(prefill: str) -> AsyncIterator[str]:
    """Run the peer in a process for the block; yields its address."""
    command = [sys.executable, "-m", "benchmarks.cache_peers", "--share", prefill]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        async with asyncio.timeout(120.0):
            address = (await child.stdout.readline()).decode().strip()
        if not address:
            raise RuntimeError("the peer did not start: its errors are above")
        yield address
    finally:
        child.stdin.close()
        try:
            async with asyncio.timeout(60.0):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


async def measure(rounds: int) -> list[dict[str, object]]:
    """Restore each prompt from both sources by turns; returns the cells."""
    order = PrefillOrder(
        name="prefill-0", fingerprint="s", layout=LAYOUT, num_pages=2 * NUM_PAGES, chunk_tokens=4096,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    seconds: dict[tuple[int, str], list[float]] = {}
    async with (
        PrefillProcess(order) as prefill,
        peer_process(prefill.address) as peer,
        decode_worker("decode-0", prefill.address, listen=None) as worker,
    ):
        for number in range(rounds + 1):
            for tokens in LENGTHS:
                sources = [("peer", (peer,)), ("transfer", ())]
                for source, peers in sources if number % 2 else reversed(sources):
                    await worker.engine.flush(("l1", "l2"))
                    taken_s = await worker.restore(tokens, source, peers, verified=not number)
                    if number:
                        seconds.setdefault((tokens, source), []).append(round(taken_s, 6))
    page_bytes = worker.engine.layout.page_bytes
    return [
        {"tokens": tokens, "source": source, "bytes": tokens // LAYOUT.page_size * page_bytes, "ready_s": ready_s}
        for (tokens, source), ready_s in seconds.items()
    ]


def main() -> None:
    """Parse the options and measure, or be the peer."""
    torch.set_num_threads(1)
    if "--share" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--share")
        uvloop.run(share(parser.parse_args().share))
        return
    set_collector()
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    chosen = parser.parse_args()
    path: Path = chosen.json
    write_artefact(path, {"cells": uvloop.run(measure(chosen.rounds))}, PROGRAM)


if __name__ == "__main__":
    main()
