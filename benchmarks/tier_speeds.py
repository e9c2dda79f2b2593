"""Throughput of pages to and from host, storage, and another process: `dev.py bench tiers`.

An overview of all paths; other programs of this folder compare each of them with a hand-written baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.nixl_child import NixlChild, NumpyPool
from benchmarks.plots import plot_bandwidth, save_plot
from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout
from tidekv.backends.storage.uri import open_storage
from tidekv.engine.poller import PollerThread
from tidekv.states.errors import StorageFailed
from tidekv.states.types import page_ids
from tidekv.transports.nixl.transport import NixlTransport

LAYOUT = KVLayout(num_layers=16, num_kv_heads=8, head_dim=128, dtype="float16", page_size=16)
PAGES = 64
ROUNDS = 5
STORAGE_TIMEOUT_S = 120.0
WAYS = (
    "memcpy",
    "L2 → L1, host to device",
    "L1 → L2, device to host",
    "L3 → L2, storage read",
    "L2 → L3, storage write",
    "prefill → L1, NIXL",
)


async def measure_tiers(*, storage: str = "", pages: int = PAGES, rounds: int = ROUNDS) -> dict[str, float]:
    """Return GB/s of each of `WAYS`: the median over rounds of one batch of pages at random places.

    `storage` is a URI; empty uses files in a temporary directory. Raises errors of the storage engine, and
    StorageFailed if it does not keep a batch.
    """
    total_bytes = pages * LAYOUT.page_bytes
    speeds = {WAYS[0]: await _memcpy(total_bytes, rounds)}
    poller, storage_poller = PollerThread(), PollerThread(name="tidekv-storage-poller")
    poller.start()
    storage_poller.start()
    try:
        speeds |= await _copies(pages, rounds)
        with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
            uri = storage or f"file:{folder}/pages?capacity={4 * rounds * total_bytes}"
            speeds |= await _storage(uri, storage_poller, pages, rounds)
        speeds[WAYS[5]] = await _transfer(poller, pages, rounds)
    finally:
        await poller.close()
        await storage_poller.close()
    return {way: speeds[way] for way in WAYS}


async def _gb_s(work: Callable[[], Awaitable[None]], total_bytes: int, rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):
        started_at_s = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - started_at_s)
    # Without the first round, which touches the memory for the first time.
    return total_bytes / median(seconds[1:]) / 1e9


async def _memcpy(total_bytes: int, rounds: int) -> float:
    source, target = np.ones(total_bytes, np.uint8), np.zeros(total_bytes, np.uint8)

    async def copy() -> None:
        np.copyto(target, source)

    return await _gb_s(copy, total_bytes, rounds)


async def _copies(pages: int, rounds: int) -> dict[str, float]:
    device, host = DevicePool.allocate(LAYOUT, 2 * pages), HostPool.allocate(LAYOUT, 2 * pages)
    copier = PageCopier(device, host)
    copier.start()
    random = np.random.default_rng(1)
    above, below = (page_ids(random.permutation(2 * pages)[:pages].tolist()) for _ in range(2))
    total_bytes = pages * LAYOUT.page_bytes

    async def up() -> None:
        await copier.to_device(below, above)

    async def down() -> None:
        await copier.to_host(above, below)

    try:
        return {WAYS[1]: await _gb_s(up, total_bytes, rounds), WAYS[2]: await _gb_s(down, total_bytes, rounds)}
    finally:
        await copier.close()


async def _storage(uri: str, poller: PollerThread, pages: int, rounds: int) -> dict[str, float]:
    host = HostPool.allocate(LAYOUT, pages)
    engine = open_storage(uri)
    ids = page_ids(range(pages))
    batches = iter(range(rounds + 1))
    keys: list[bytes] = []

    async def put() -> None:
        keys[:] = _keys(next(batches), pages)
        if not all(await engine.put_from(keys, ids, timeout_s=STORAGE_TIMEOUT_S)):
            raise StorageFailed(f"{engine.uri} did not take a batch of {pages} pages")

    async def get() -> None:
        if not all(await engine.get_into(keys, ids, timeout_s=STORAGE_TIMEOUT_S)):
            raise StorageFailed(f"{engine.uri} did not keep a batch of {pages} pages")

    total_bytes = pages * LAYOUT.page_bytes
    try:
        await engine.register(host.memory, host.page, namespace=b"b" * 32, poller=poller)
        written = await _gb_s(put, total_bytes, rounds)
        return {WAYS[3]: await _gb_s(get, total_bytes, rounds), WAYS[4]: written}
    finally:
        await engine.close()


def _keys(batch: int, pages: int) -> list[bytes]:
    return [hashlib.sha256(f"bench {batch} {page}".encode()).digest() for page in range(pages)]


async def _transfer(poller: PollerThread, pages: int, rounds: int) -> float:
    pieces = (LAYOUT.piece_bytes,) * (LAYOUT.page_bytes // LAYOUT.piece_bytes)
    pool = NumpyPool(pages, pieces, seed=1)
    child = await NixlChild.spawn(pages=pages, pieces=pieces)
    transport = NixlTransport("bench", dials=["127.0.0.1:*"])
    try:
        await transport.start(poller=poller)
        await transport.register(pool.memory)
        peer = await transport.add_peer(child.ready.instance, child.ready.metadata, child.ready.memory)
        random = np.random.default_rng(2)
        ours, theirs = (page_ids(random.permutation(pages).tolist()) for _ in range(2))

        async def write() -> None:
            await transport.write(peer, ours, theirs)

        return await _gb_s(write, pages * LAYOUT.page_bytes, rounds)
    finally:
        await transport.close()
        child.end()


def print_tiers(speeds: dict[str, float], *, pages: int = PAGES) -> None:
    """Print the throughputs as a table."""
    batch, page = pages * LAYOUT.page_bytes / 1e6, LAYOUT.page_bytes / 1e6
    table = Table("way", "GB/s", title=f"{batch:.0f} MB in pages of {page:.2f} MB at random places")
    for way, speed in speeds.items():
        table.add_row(way, f"{speed:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast pages go each way.")
    parser.add_argument("--storage", default="", help="storage URI; empty: files in a temporary directory")
    parser.add_argument("--plot", type=Path, help="draw it to this .png or .svg file, too")
    options = parser.parse_args()
    speeds = asyncio.run(measure_tiers(storage=options.storage))
    print_tiers(speeds)
    if options.plot is not None:
        figure = plot_bandwidth(speeds, page_bytes=LAYOUT.page_bytes, batch_bytes=PAGES * LAYOUT.page_bytes)
        save_plot(figure, options.plot)


if __name__ == "__main__":
    main()
