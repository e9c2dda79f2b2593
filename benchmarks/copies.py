"""Throughput of page copies between the pools, next to a plain memcpy: `python -m benchmarks.copies`.

For each shape of page: pages at random places and pages in runs of 16, in both directions, with the pool's own tensors
and with the caller's (one allocation per piece). Every figure is the best of several rounds, in GB/s of page bytes. On
a machine with CUDA the device pool is in GPU memory, and memcpy is still that of the host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.device.pool import DevicePool
from tidekv.backends.host.pool import HostPool
from tidekv.backends.layout import KVLayout

ROUNDS = 5
RUN_PAGES = 16
SHAPES = [  # (layers, kv heads, head_dim, page_size, pages of one copy)
    (4, 2, 32, 16, 512),
    (32, 8, 128, 1, 256),
    (32, 8, 128, 16, 64),
    (32, 8, 128, 64, 16),
]


def memcpy_gb_s(total_bytes: int) -> float:
    """Return the throughput of a copy from one array to another."""
    source, target = np.ones(total_bytes, dtype=np.uint8), np.zeros(total_bytes, dtype=np.uint8)
    best_s = float("inf")
    for _ in range(ROUNDS):
        started_at_s = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - started_at_s)
    return total_bytes / best_s / 1e9


async def best_gb_s(copy: Callable[[], Awaitable[None]], total_bytes: int) -> float:
    """Return the throughput of the fastest of several copies."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        started_at_s = time.perf_counter()
        await copy()
        best_s = min(best_s, time.perf_counter() - started_at_s)
    return total_bytes / best_s / 1e9


def pages_in_runs(page_count: int, total: int, run_pages: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return distinct pages of a pool: runs at random places, in random order."""
    starts = np.random.default_rng(seed).permutation(total // run_pages)[: page_count // run_pages] * run_pages
    return (starts[:, None] + np.arange(run_pages)).reshape(-1)


def device_pool(layout: KVLayout, total: int, device: str, *, wrapped: bool) -> DevicePool:
    """Return a pool of one allocation, or of one per piece."""
    if not wrapped:
        return DevicePool.allocate(layout, total, device=device)
    k, v = (
        [
            torch.zeros(total, *layout.piece_shape, dtype=layout.torch_dtype, device=device)
            for _ in range(layout.num_layers)
        ]
        for _ in range(2)
    )
    return DevicePool.wrap(k, v, layout)


async def main() -> None:
    """Measure all shapes and print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table(title=f"GB/s between {device} pool and host pool")
    for column in ("piece", "page", "pages", "memcpy", "tensors", "order", "to device", "to host"):
        table.add_column(column, justify="right")
    for layers, heads, head_dim, page_size, page_count in SHAPES:
        layout = KVLayout(
            num_layers=layers, num_kv_heads=heads, head_dim=head_dim, dtype="float16", page_size=page_size
        )
        total = 4 * page_count
        host = HostPool.allocate(layout, total)
        total_bytes = page_count * layout.page_bytes
        memcpy = memcpy_gb_s(total_bytes)
        for wrapped in (False, True):
            copier = PageCopier(device_pool(layout, total, device, wrapped=wrapped), host)
            copier.start()
            for name, run_pages in (("random", 1), ("runs", RUN_PAGES)):
                above = pages_in_runs(page_count, total, run_pages, seed=1)
                below = pages_in_runs(page_count, total, run_pages, seed=2)
                up = await best_gb_s(lambda: copier.to_device(below, above), total_bytes)  # noqa: B023  # Awaited here.
                down = await best_gb_s(lambda: copier.to_host(above, below), total_bytes)  # noqa: B023  # Awaited here.
                table.add_row(
                    f"{layout.piece_bytes:,}", f"{layout.page_bytes:,}", str(page_count), f"{memcpy:.2f}",
                    "wrapped" if wrapped else "own", name, f"{up:.2f}", f"{down:.2f}",
                )  # fmt: skip
            await copier.close()
    Console(width=110).print(table)


if __name__ == "__main__":
    asyncio.run(main())
