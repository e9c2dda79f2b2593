"""Cost of transferring slices of the heads within each token: `python -m benchmarks.head_slices`.

Two processes, NIXL over shared memory; KV of 128 x 2 bytes per head and token, pages of 16 tokens, 16 layers. Each row
writes the same bytes in two ways: as stretches of the slice within each token, as done between unequal numbers of
ranks, and as whole pieces of that size, as a layout with heads outside of tokens would allow. The last column is the
cost of first gathering the slice into such pieces by one strided copy.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.nixl_child import NixlChild, NumpyPool
from tidekv.engine.poller import PollerThread
from tidekv.states.types import page_ids
from tidekv.transports.nixl.transport import NixlTransport
from tidekv.transports.slices import Cut, exchange_of

PAGE_SIZE = 16
HEAD_BYTES = 256
PIECES = 32
CASES = [  # (heads of a prefill rank, heads of a decode rank), of 8 heads in all
    (4, 2),
    (2, 4),
    (8, 2),
    (8, 8),
]


def piece_bytes(heads: int) -> tuple[int, ...]:
    """Return the bytes of each piece of a page with this many heads."""
    return (PAGE_SIZE * heads * HEAD_BYTES,) * PIECES


async def write(ours: int, theirs: int, pages: int, rounds: int) -> float:
    """Return the seconds of a write of the heads that both have."""
    count = min(ours, theirs)
    pool = NumpyPool(2 * pages, piece_bytes(ours), seed=1)
    child = await NixlChild.spawn(pages=2 * pages, pieces=piece_bytes(theirs))
    poller = PollerThread()
    poller.start()
    transport = NixlTransport("bench")
    await transport.start(poller=poller)
    await transport.register(pool.memory)
    ready = child.ready
    cuts = [
        Cut(piece, piece, PAGE_SIZE, count * HEAD_BYTES, 0, ours * HEAD_BYTES, 0, theirs * HEAD_BYTES)
        for piece in range(PIECES)
    ]
    exchange = exchange_of(cuts, ours=pool.memory, theirs=ready.memory)
    peer = await transport.add_peer(ready.instance, ready.metadata, ready.memory, exchange)
    random = np.random.default_rng(0)
    times = []
    for _ in range(rounds):
        sources, targets = (page_ids(random.permutation(2 * pages)[:pages].tolist()) for _ in range(2))
        began_s = time.perf_counter()
        await transport.write(peer, sources, targets)
        times.append(time.perf_counter() - began_s)
    await transport.close()
    await poller.close()
    child.end()
    return statistics.median(times)


def gather(ours: int, count: int, pages: int, rounds: int) -> float:
    """Return the seconds of gathering this many heads of each token, for all pieces."""
    source = torch.ones(PIECES, pages, PAGE_SIZE, ours, HEAD_BYTES, dtype=torch.uint8)
    target = torch.zeros(PIECES, pages, PAGE_SIZE, count, HEAD_BYTES, dtype=torch.uint8)
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        target.copy_(source[:, :, :, :count])
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


async def measure(pages: int, rounds: int) -> Table:
    """Measure all rows."""
    title = f"{pages} pages at random, medians of {rounds}"
    table = Table(
        "prefill → decode heads", "bytes of a stretch", "MB", "stretches ms", "GB/s", "whole ms", "GB/s", title=title
    )
    table.add_column("gather ms")
    for ours, theirs in CASES:
        count = min(ours, theirs)
        size = pages * sum(piece_bytes(count))
        row = [f"{ours} → {theirs}", str(count * HEAD_BYTES), f"{size / 1e6:.1f}"]
        for seconds in (await write(ours, theirs, pages, rounds), await write(count, count, pages, rounds)):
            row += [f"{1e3 * seconds:.2f}", f"{size / seconds / 1e9:.2f}"]
        table.add_row(*row, f"{1e3 * gather(ours, count, pages, rounds):.2f}")
    return table


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    Console(width=140).print(asyncio.run(measure(given.pages, given.rounds)))


if __name__ == "__main__":
    main()
