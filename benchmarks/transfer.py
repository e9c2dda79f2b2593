"""What the NIXL transport costs beside NIXL itself: `python benchmarks/transfer.py`.

A second process offers the target pool. Each row writes the same pages by `NixlTransport.write` and by one bare request
of NIXL that is polled without a pause, and says what reached the target per second; below, how much of a core the
sleeping progress thread takes while nothing happens.

Between the two stands the same bare request, made by a thread that an event loop hands it to and hears of its end from.
NIXL copies while it posts, for milliseconds, so no loop can have it sooner: it is the limit of the transport.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures
from rich.console import Console
from rich.table import Table

from tidekv.engine.nixl_child import NixlChild, NumpyPool
from tidekv.engine.poller import PollerThread
from tidekv.states.shapes import PageIds, page_ids
from tidekv.transports.nixl import NixlTransport
from tidekv.transports.nixl_plan import WritePlan, paired_pages

ROUNDS = 15
IDLE_S = 3.0
SHAPES = [  # (pages of a write, bytes of a piece, pieces of a page)
    (1, 65536, 1),
    (1024, 65536, 1),
    (1024, 4096, 1),
    (64, 32768, 32),
]


def bare_write(transport: NixlTransport, peer: Any, ours: PageIds, theirs: PageIds) -> float:
    """Seconds of one bare request over the same prepared lists, from its making to its release, on this thread."""
    agent = transport._agent
    assert agent is not None
    started_at_s = time.perf_counter()
    pages = paired_pages(ours, theirs, numbering=peer.numbering, peer="")
    plan = WritePlan(peer.numbering, *pages, part_bytes=2**62, part_descriptors=2**31 - 1)
    request = agent.write_request(peer.our_list, peer.their_list, plan.part(0))
    done = request.post()
    while not done:
        done = request.check()
    request.release()
    return time.perf_counter() - started_at_s


class Handed:
    """A thread that does what the loop gives it, one thing at a time, and tells it of the end; no more than that."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def seconds(self, job: Callable[[], object]) -> float:
        """How long the loop waits for a job."""
        started_at_s = time.perf_counter()
        ended: asyncio.Future[None] = self._loop.create_future()
        self._jobs.put((job, ended))
        await ended
        return time.perf_counter() - started_at_s

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, ended = item
            try:
                job()
            except Exception as error:  # It is raised in the loop.
                self._loop.call_soon_threadsafe(ended.set_exception, error)
            else:
                self._loop.call_soon_threadsafe(ended.set_result, None)


async def measure(table: Table, pages: int, piece_bytes: int, pieces: int) -> dict[str, float]:
    """Fill one pair of rows; the transport's bandwidth over that of bare NIXL, medians of pairs, by row."""
    pool_pages = pages + 64
    pool = NumpyPool(pool_pages, (piece_bytes,) * pieces, seed=1)
    child = await NixlChild.spawn(pages=pool_pages, pieces=(piece_bytes,) * pieces)
    poller = PollerThread()
    poller.start()
    transport = NixlTransport("bench")
    await transport.start(poller=poller)
    await transport.register(pool.memory)
    ready = child.ready
    peer = await transport.add_peer(ready.instance, ready.metadata, ready.memory)
    random = np.random.default_rng(0)
    ratios: dict[str, float] = {}
    handed = Handed()
    for order in ("random", "consecutive"):
        with_us: list[float] = []
        by_thread: list[float] = []
        bare: list[float] = []
        for turn in range(ROUNDS if pages > 1 else 300):
            ours, theirs = (page_ids(random.permutation(pool_pages)[:pages].tolist()) for _ in range(2))
            if order == "consecutive":
                ours, theirs = page_ids(range(pages)), page_ids(range(64, 64 + pages))
            # Now one goes first, now the other: what the one before left in the caches is nobody's privilege.
            if turn % 2:
                bare.append(bare_write(transport, peer, ours, theirs))
            started_at_s = time.perf_counter()
            await transport.write(peer, ours, theirs)
            with_us.append(time.perf_counter() - started_at_s)
            by_thread.append(await handed.seconds(partial(bare_write, transport, peer, ours, theirs)))
            if not turn % 2:
                bare.append(bare_write(transport, peer, ours, theirs))
        row = [f"{pages} x {pieces} x {piece_bytes // 1024} KiB", order]
        for seconds in (with_us, by_thread, bare):
            middle_s = statistics.median(seconds)
            row += [f"{middle_s * 1e6:.0f}", f"{pages * sum((piece_bytes,) * pieces) / middle_s / 1e9:.2f}"]
        table.add_row(*row)
        pairs = zip(with_us, bare, strict=True)
        ratios[f"{row[0]}, {order}"] = statistics.median(bare_s / ours_s for ours_s, bare_s in pairs)
        pairs = zip(with_us, by_thread, strict=True)
        ratios[f"{row[0]}, {order}, of the limit"] = statistics.median(limit_s / ours_s for ours_s, limit_s in pairs)
    handed.close()
    await transport.close()
    await poller.close()
    child.end()
    return ratios


async def idle_share() -> float:
    """Part of a core that a started transport and its poller take while nothing happens."""
    poller = PollerThread()
    poller.start()
    transport = NixlTransport("idle")
    await transport.start(poller=poller)
    await transport.register(NumpyPool(16, (4096,)).memory)
    before = os.times()
    await asyncio.sleep(IDLE_S)
    after = os.times()
    await transport.close()
    await poller.close()
    return (after.user + after.system - before.user - before.system) / IDLE_S


async def main(path: Path | None) -> None:
    """Measure and print; with a path, write the figures there."""
    kinds = ("transport", "bare, by a thread", "bare NIXL")
    heads = [head for kind in kinds for head in (f"{kind} µs", "GB/s")]
    table = Table("write", "pages", *heads, title="medians")
    ratios: dict[str, float] = {}
    for shape in SHAPES:
        ratios |= await measure(table, *shape)
    console = Console()
    console.print(table)
    console.print(f"idle transport: {100 * await idle_share():.1f} % of a core")
    if path is not None:
        with Figures(path) as figures:
            # Of one page the time counts that passes, which is in the table above, and no bandwidth.
            bulk = [shape for shape in ratios if not shape.startswith("1 x") and not shape.endswith("of the limit")]
            least = min(bulk, key=lambda shape: ratios[shape])
            told = "; ".join(f"{shape}: {100 * ratio:.0f} %" for shape, ratio in ratios.items())
            figures.add("transfer.least", 100 * ratios[least], told)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    asyncio.run(main(parser.parse_args().json))
