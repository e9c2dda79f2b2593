"""Speed of reads from storage across numbers of ranks: `python -m benchmarks.stored_layouts`.

One rank reads the pages of a prompt from the `file:` engine, page cache warm: as ranks of its own number stored them,
and as those of 1, 2 and 4 ranks did. KV of 8 heads of 128 x 2 bytes, pages of 16 tokens, 16 layers: 1 MiB for one rank.
All rows of a round follow one another. A row "2 ranks read pages of 4" is also what every read of 2 ranks would cost if
pages were stored by slices of a grid of 4: the slices have the same sizes and are copied to the same places.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tidekv import HostPool, KVLayout, open_storage
from tidekv.backends.storage.base import Storage
from tidekv.engine.converted_storage import ConvertedStorage
from tidekv.engine.poller import PollerThread
from tidekv.engine.stored_layouts import RankLayout, other_layouts
from tidekv.states.types import page_ids

HEADS, LAYERS, PAGE_SIZE, HEAD_DIM = 8, 16, 16, 128
WIDTHS = (1, 2, 4)
TIMEOUT_S = 60.0


class Rank:
    """The first rank of some, with its pool and an engine of its own."""

    def __init__(self, root: Path, ranks: int, rank: int, pages: int) -> None:
        layout = KVLayout(
            num_layers=LAYERS, num_kv_heads=HEADS // ranks, head_dim=HEAD_DIM, dtype="float16", page_size=PAGE_SIZE
        )
        self.ranks = ranks
        self.place = RankLayout(layout.identity("bench"), rank, ranks)
        self.host = HostPool.allocate(layout, pages)
        self.storage = open_storage(f"file:{root}?capacity=16GiB")

    async def open(self, poller: PollerThread) -> None:
        """Open the engine."""
        namespace = self.place.namespace()
        await self.storage.register(self.host.memory, self.host.page, namespace=namespace, poller=poller)


async def write(root: Path, writers: int, keys: list[bytes], poller: PollerThread) -> None:
    """Store all pages of an instance of so many ranks."""
    for number in range(writers):
        rank = Rank(root, writers, number, len(keys))
        await rank.open(poller)
        for page in range(len(keys)):
            rank.host.page(page)[:] = bytes([page % 256]) * rank.host.layout.page_bytes
        assert all(await rank.storage.put_from(keys, page_ids(range(len(keys))), timeout_s=TIMEOUT_S))
        await rank.storage.close()


async def open_reader(
    stack: AsyncExitStack, folder: Path, readers: int, pages: int, poller: PollerThread
) -> tuple[Storage, HostPool]:
    """Open the engine of the first of so many ranks, which reads what it finds in the folder."""
    rank = Rank(folder, readers, 0, pages)
    await rank.open(poller)
    layouts = other_layouts(rank.place)
    storage = ConvertedStorage(rank.storage, host=rank.host, layouts=layouts, copies=1, poller=poller)
    stack.push_async_callback(storage.close)
    await storage.look()
    return storage, rank.host


async def measure(root: Path, pages: int, rounds: int) -> Table:
    """Measure all pairs; returns the table of medians."""
    keys = [hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(pages)]
    times: dict[tuple[int, int], list[float]] = {pair: [] for pair in itertools.product(WIDTHS, WIDTHS)}
    page_bytes = {}
    poller = PollerThread()
    poller.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(poller.close)
        for writers in WIDTHS:
            await write(root / f"of-{writers}", writers, keys, poller)
        opened = {}
        for readers, writers in times:
            opened[readers, writers] = await open_reader(stack, root / f"of-{writers}", readers, pages, poller)
        for number in range(rounds + 1):
            for (readers, writers), (storage, host) in opened.items():
                page_bytes[readers] = host.layout.page_bytes
                began_s = time.perf_counter()
                good = await storage.get_into(keys, page_ids(range(pages)), timeout_s=TIMEOUT_S)
                # The first round touches memory for the first time.
                if number:
                    times[readers, writers].append(time.perf_counter() - began_s)
                assert all(good)
    table = Table("reader", "pages of", "MB read of each page", "MB/s of its own pages", "of equal")
    for (readers, writers), took in times.items():
        read = page_bytes[readers] * max(readers / writers, 1)
        speed = pages * page_bytes[readers] / statistics.median(took) / 1e6
        ratio = statistics.median(equal / other for equal, other in zip(times[readers, readers], took, strict=True))
        table.add_row(f"1 of {readers}", str(writers), f"{read / 1e6:.2f}", f"{speed:,.0f}", f"{ratio:.0%}")
    return table


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        Console(width=100).print(asyncio.run(measure(Path(folder), given.pages, given.rounds)))


if __name__ == "__main__":
    main()
