"""Speed of transfers between unequal numbers of ranks, beside equal ones: `python -m benchmarks.head_slices`.

Two processes, NIXL over shared memory; KV of 128 x 2 bytes per head and token, pages of 16 tokens, 16 layers. Each row
transfers the same bytes in three ways, in turns: whole pages between ranks with as many heads, as with equal numbers of
ranks; through the staging ring of the end with more heads; and as stretches of the slice within each token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.nixl_child import Add, Done, NixlChild, NumpyPool, Write
from tidekv.backends.copies.slice_moves import SliceCopier
from tidekv.engine.poller import PollerThread
from tidekv.states.types import PageIds, PoolMemory, Segment, page_ids
from tidekv.transports.base import PeerMemory
from tidekv.transports.nixl.transport import NixlTransport
from tidekv.transports.prefill.room_writer import RoomSettings
from tidekv.transports.slices import Cut, exchange_of
from tidekv.transports.staging import BeginCopy, Slots, StagedExchange, StagingRing, gathered, scattered

PAGE_SIZE = 16
HEAD_BYTES = 256
PIECES = 32
RING_BYTES = RoomSettings().staging_bytes
CASES = [  # (heads of a prefill rank, heads of a decode rank), of 8 heads in all
    (4, 2),
    (8, 2),
    (2, 4),
    (2, 8),
]


def piece_bytes(heads: int) -> tuple[int, ...]:
    """Return the bytes of each piece of a page with this many heads."""
    return (PAGE_SIZE * heads * HEAD_BYTES,) * PIECES


class Pair:
    """A prefill rank with `ours` heads and a decode rank with `theirs` in a process of its own."""

    def __init__(self, ours: int, theirs: int, pages: int) -> None:
        self.ours, self.theirs, self.pages = ours, theirs, pages
        self.count = min(ours, theirs)
        self.region = np.full(RING_BYTES, 0, np.uint8)
        self.pool = NumpyPool(2 * pages, piece_bytes(ours), seed=1)
        self.staged: tuple[PeerMemory, BeginCopy, StagingRing, StagedExchange] | None = None

    async def start(self) -> None:
        """Start both ends, and make the pool of the decode rank writable in both ways."""
        self.child = await NixlChild.spawn(pages=2 * self.pages, pieces=piece_bytes(self.theirs))
        self.poller = PollerThread()
        self.poller.start()
        self.copier = SliceCopier()
        self.transport = NixlTransport("bench", dials=["127.0.0.1:*"])
        await self.transport.start(poller=self.poller)
        segment = Segment(self.region.ctypes.data, RING_BYTES, RING_BYTES, 1)
        ring = StagingRing(PoolMemory(segments=(segment,), page_count=1))
        await self.transport.register(self.pool.memory, ring.memory)
        ready, ours, theirs = self.child.ready, self.pool.memory, self.child.ready.memory
        row = self.count * HEAD_BYTES
        steps = self.ours * HEAD_BYTES, self.theirs * HEAD_BYTES
        cuts = [Cut(piece, piece, PAGE_SIZE, row, 0, steps[0], 0, steps[1]) for piece in range(PIECES)]
        if self.ours == self.theirs:
            whole = PAGE_SIZE * row
            cuts = [Cut(piece, piece, 1, whole, 0, whole, 0, whole) for piece in range(PIECES)]
        add = partial(self.transport.add_peer, ready.instance, ready.metadata, theirs)
        self.direct = await add(exchange_of(cuts, ours=ours, theirs=theirs))
        if (way := gathered(ring.memory, cuts, ours=ours, theirs=theirs)) is not None:
            self.staged = await add(way.send), self.copier.copying(*way.copy), ring, way

    async def write(self, *, staged: bool) -> float:
        """Return the seconds of a write of all pages, some at once as rooms write them."""
        sources, targets = (page_ids(np.random.permutation(2 * self.pages)[: self.pages].tolist()) for _ in range(2))
        step = RoomSettings().pages_per_write_max
        if staged:
            assert self.staged is not None
            step = min(step, self.staged[3].batch_pages)
        limit = asyncio.Semaphore(RoomSettings().writes_in_flight_max)

        async def part(ours: PageIds, theirs: PageIds) -> None:
            async with limit:
                if not staged:
                    await self.transport.write(self.direct, ours, theirs)
                    return
                assert self.staged is not None
                handle, gather, ring, way = self.staged
                slots = await ring.take(way.slot_bytes, len(ours), timeout_s=60.0)
                assert slots is not None
                await gather(ours, slots.pages)
                await self.transport.write(handle, slots.pages, theirs)
                ring.give_back(slots)

        began_s = time.perf_counter()
        await asyncio.gather(
            *(
                part(sources[first : first + step], targets[first : first + step])
                for first in range(0, len(sources), step)
            )
        )
        return time.perf_counter() - began_s

    async def close(self) -> None:
        """Stop both ends."""
        await self.transport.close()
        await self.copier.close()
        await self.poller.close()
        self.child.end()


class ScatterPair:
    """A prefill rank with `ours` heads in a process of its own, and a decode rank with more, `theirs`, and its ring."""

    def __init__(self, ours: int, theirs: int, pages: int) -> None:
        self.ours, self.theirs, self.pages = ours, theirs, pages
        self.region = np.full(RING_BYTES, 0, np.uint8)
        self.pool = NumpyPool(2 * pages, piece_bytes(theirs))

    async def start(self) -> None:
        """Start both ends, and let the child add the slots of our ring as its peer's pages."""
        self.child = await NixlChild.spawn(pages=2 * self.pages, pieces=piece_bytes(self.ours), seed=1)
        self.poller = PollerThread()
        self.poller.start()
        self.copier = SliceCopier()
        self.transport = NixlTransport("bench", dials=["127.0.0.1:*"])
        await self.transport.start(poller=self.poller)
        segment = Segment(self.region.ctypes.data, RING_BYTES, RING_BYTES, 1)
        self.ring = StagingRing(PoolMemory(segments=(segment,), page_count=1))
        await self.transport.register(self.pool.memory, self.ring.memory)
        row, step = self.ours * HEAD_BYTES, self.theirs * HEAD_BYTES
        cuts = [Cut(piece, piece, PAGE_SIZE, row, 0, row, 0, step) for piece in range(PIECES)]
        way = scattered(self.ring.memory, cuts, ours=self.child.ready.memory, theirs=self.pool.memory)
        assert way is not None
        self.way = way
        self.scatter = self.copier.copying(way.copy.theirs, way.copy.ours)
        answer = await self.child.ask(Add(self.transport.instance, self.transport.metadata(), way.send.theirs))
        assert isinstance(answer, Done), answer

    async def write(self) -> float:
        """Return the seconds until all pages are in place: a batch is copied while the child writes the next ones."""
        sources, targets = (page_ids(np.random.permutation(2 * self.pages)[: self.pages].tolist()) for _ in range(2))
        step = self.way.batch_pages
        written: list[tuple[Slots, PageIds]] = []
        copies: list[asyncio.Future[None]] = []

        async def copy_first() -> None:
            answer = await self.child.answer()
            assert isinstance(answer, Done), answer
            slots, pages = written.pop(0)
            copy = self.scatter(slots.pages, pages)
            copy.add_done_callback(lambda _: self.ring.give_back(slots))
            copies.append(copy)

        began_s = time.perf_counter()
        for first in range(0, self.pages, step):
            if len(written) == RoomSettings().writes_in_flight_max:
                await copy_first()
            pages = targets[first : first + step]
            slots = await self.ring.take(self.way.slot_bytes, len(pages), timeout_s=60.0)
            assert slots is not None
            self.child.tell(Write(sources[first : first + step].tolist(), slots.pages.tolist()))
            written.append((slots, pages))
        while written:
            await copy_first()
        await asyncio.gather(*copies)
        return time.perf_counter() - began_s

    async def close(self) -> None:
        """Stop both ends."""
        self.child.end()
        await self.transport.close()
        await self.copier.close()
        await self.poller.close()


async def measure(pages: int, rounds: int) -> Table:
    """Measure all rows; equal and unequal ends take turns, so that a busy machine slows all of them."""
    table = Table(
        "prefill → decode heads",
        "MB",
        "equal GB/s",
        "staged GB/s",
        "of equal",
        "stretches GB/s",
        "of equal",
        title=f"{pages} pages at random, medians of {rounds}",
    )
    for ours, theirs in CASES:
        count = min(ours, theirs)
        size = pages * sum(piece_bytes(count))
        equal, unequal = Pair(count, count, pages), Pair(ours, theirs, pages)
        await equal.start()
        await unequal.start()
        scattering = ScatterPair(ours, theirs, pages) if theirs > ours else None
        if scattering is not None:
            await scattering.start()
        times: dict[str, list[float]] = {"equal": [], "staged": [], "stretches": []}
        for _ in range(rounds):
            times["equal"].append(await equal.write(staged=False))
            times["stretches"].append(await unequal.write(staged=False))
            if unequal.staged is not None:
                times["staged"].append(await unequal.write(staged=True))
            if scattering is not None:
                times["staged"].append(await scattering.write())
        await equal.close()
        await unequal.close()
        if scattering is not None:
            await scattering.close()
        speeds = {name: size / statistics.median(of) / 1e9 for name, of in times.items() if of}
        row = [f"{ours} → {theirs}", f"{size / 1e6:.1f}", f"{speeds['equal']:.2f}"]
        for name in ("staged", "stretches"):
            cells = (f"{speeds[name]:.2f}", f"{speeds[name] / speeds['equal']:.0%}") if name in speeds else ("", "")
            row += cells
        table.add_row(*row)
    return table


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    Console(width=140).print(asyncio.run(measure(given.pages, given.rounds)))


if __name__ == "__main__":
    main()
