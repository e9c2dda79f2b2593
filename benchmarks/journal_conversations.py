"""Cost of a journal in conversations over NIXL: `python -m benchmarks.journal_conversations`.

Two decode engines in this process, one with a journal and one without, and a prefill worker in a process of its own,
connected by NIXL. The engines take turns in serving the same conversations, block by block, in changing order, so that
changes of the machine's speed affect both alike. The figure is the CPU time of this process (loop, journal, poller and
copy threads) per request, and the median increase over the pairs of blocks. A block lasts until the journal has written
its records. `journal.py` has the load of the engine's other figures: long prompts, 256 at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import threading
import time
from array import array
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import uvloop
from rich.console import Console
from rich.table import Table

from demo.prefill_process import PrefillOrder, PrefillProcess
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    JournalOptions,
    KVLayout,
    NixlTransport,
    Replayer,
)
from tidekv.engine.journal.journal import COALESCE_S
from tidekv.states.commands import Command
from tidekv.states.events import Event

VOCABULARY = 32000
WATCHED_BLOCKS = 5
DEVICE_TOKENS, HOST_TOKENS = 1 << 17, 1 << 18
OUTPUT_TOKENS = 64


@dataclass(frozen=True)
class Load:
    """Description of the requests, and the layout of their KV."""

    layout: KVLayout
    conversations: int
    turns: int
    turn_tokens: int

    @property
    def requests(self) -> int:
        """Number of requests in a block."""
        return self.conversations * self.turns

    @property
    def order(self) -> PrefillOrder:
        """Return the order for the prefill worker."""
        return PrefillOrder(
            name="prefill-0",
            fingerprint="synthetic",
            layout=self.layout,
            num_pages=DEVICE_TOKENS // self.layout.page_size,
            chunk_tokens=256,
            vocabulary=VOCABULARY,
        )

    def prompts(self, block: int) -> list[list[tuple[array[int], array[int]]]]:
        """Return prompt and output of each turn of each conversation of a block."""
        words = random.Random(block)
        talks = []
        for _ in range(self.conversations):
            said, talk = array("I"), []
            for _ in range(self.turns):
                said = said + array("I", words.choices(range(VOCABULARY), k=self.turn_tokens))
                output = array("I", words.choices(range(VOCABULARY), k=OUTPUT_TOKENS))
                talk.append((said, output))
                said = said + output
            talks.append(talk)
        return talks


class Side:
    """One of the two engines, and the results of its blocks."""

    def __init__(self, name: str, load: Load, journal: str | None) -> None:
        self.load = load
        layout = load.layout
        self.engine = DecodeEngine(
            EngineConfig(model="synthetic", journal=JournalOptions(path=journal)),
            device=DevicePool.allocate(layout, DEVICE_TOKENS // layout.page_size),
            host=HostPool.allocate(layout, HOST_TOKENS // layout.page_size),
            transport=NixlTransport(name=name, dials=["127.0.0.1:*"]),
        )
        self.requests = 0
        self.block_s: list[float] = []
        self.stepped_s = self.writer_s = 0.0

    def watch_journal(self) -> None:
        """From now on, sum up the loop's time in the journal. The measurement itself has a cost, too."""
        journal, driver = self.engine._runtime.journal, self.engine._runtime.driver
        assert journal is not None
        clock = time.thread_time

        def watched(event: Event, given: list[Command], error: str = "") -> None:
            started_s = clock()
            journal.stepped(event, given, error)
            self.stepped_s += clock() - started_s

        between = SimpleNamespace(stepped=watched)
        driver._watchers = tuple(between if watcher is journal else watcher for watcher in driver._watchers)

    async def serve(self, address: str, block: int) -> None:
        """Serve every turn of every conversation of a block, with the conversations in parallel."""
        talks = self.load.prompts(block)

        async def converse(number: int) -> None:
            for turn, (prompt, output) in enumerate(talks[number]):
                name = f"b{block}-c{number}-{turn}"
                ready = await self.engine.restore(
                    DecodeRequest(request_id=name, tokens=prompt, prefill=address, send_prompt=True)
                )
                self.engine.grow(ready, len(output))
                await self.engine.finish(ready, output)
                self.requests += 1

        gc.collect()
        started_s, writer_s = time.process_time(), _writer_cpu_s()
        async with asyncio.TaskGroup() as group:
            for number in range(len(talks)):
                group.create_task(converse(number))
        await self.engine.wait_settled()
        # Data that the journal has yet to write belongs to this block. The other engine waits equally long.
        await asyncio.sleep(2 * COALESCE_S)
        self.block_s.append(time.process_time() - started_s)
        self.writer_s += _writer_cpu_s() - writer_s


def _writer_cpu_s() -> float:
    """Return the CPU time of the journal's thread (Linux only), which is part of the process's time."""
    for thread in threading.enumerate():
        if thread.name == "tidekv-journal" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


async def measure(pairs: int, load: Load) -> None:
    """Print a table of the pairs, and check that the measured journal replays."""
    block_requests = load.requests
    with tempfile.TemporaryDirectory(prefix="tidekv-") as folder:
        path = Path(folder) / "run.journal"
        async with AsyncExitStack() as stack:
            prefill = await stack.enter_async_context(PrefillProcess(load.order))
            off, on = Side("decode-off", load, None), Side("decode-on", load, str(path))
            for side in (off, on):
                await stack.enter_async_context(side.engine)
            for pair in range(-1, pairs):
                for side in (on, off) if pair % 2 else (off, on):
                    await prefill.counts(forget=True)
                    await side.serve(prefill.address, pair)
                if pair < 0:
                    # The first pair is a warm-up.
                    off.block_s, on.block_s = [], []
            pair_s = list(on.block_s)
            on.watch_journal()
            on.writer_s = 0.0
            for block in range(pairs, pairs + WATCHED_BLOCKS):
                await prefill.counts(forget=True)
                await on.serve(prefill.address, block)
            watched_s, on.block_s = sum(on.block_s[pairs:]), pair_s
            events = int(str(on.engine.statistics()["events"]))
        journal_bytes = path.stat().st_size
        started_s = time.perf_counter()
        replayed = Replayer(path).run()
        replay_s = time.perf_counter() - started_s
    grown = [with_s / without_s - 1 for with_s, without_s in zip(on.block_s, off.block_s, strict=True)]
    table = Table("pair", "without, µs a request", "with, µs a request", "grows by")
    for pair, ratio in enumerate(grown):
        costs = [f"{side.block_s[pair] / block_requests * 1e6:.0f}" for side in (off, on)]
        table.add_row(str(pair), *costs, f"{ratio:+.1%}")
    console = Console(width=120)
    page_kib = load.layout.page_bytes / 1024
    console.print(f"pages of {load.layout.page_size} tokens and {page_kib:g} KiB")
    console.print(table)
    low, middle, high = statistics.quantiles(grown, n=4)
    console.print(
        f"median {middle:+.1%} (half of the pairs {low:+.1%} to {high:+.1%}), all together "
        f"{sum(on.block_s) / sum(off.block_s) - 1:+.1%}; {pairs} pairs of {block_requests} requests"
    )
    loop_us, writer_us = (seconds / (block_requests * WATCHED_BLOCKS) * 1e6 for seconds in (on.stepped_s, on.writer_s))
    direct = (on.stepped_s + on.writer_s) / (watched_s - on.stepped_s - on.writer_s)
    console.print(
        f"seen directly: {loop_us:.0f} µs a request on the loop and {writer_us:.0f} µs on the journal's thread: "
        f"{direct:+.1%}"
    )
    console.print(
        f"{journal_bytes / on.requests:.0f} bytes and {events / on.requests:.1f} events a request; "
        f"replay identical: {replayed.complete}, {replayed.events / replay_s:.0f} events/s"
    )


def load_of(options: argparse.Namespace) -> Load:
    """Return the load that the options describe."""
    layout = KVLayout(
        num_layers=options.layers,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype="bfloat16",
        page_size=options.page_size,
    )
    return Load(
        layout=layout, conversations=options.conversations, turns=options.turns, turn_tokens=options.turn_tokens
    )


def option_parser() -> argparse.ArgumentParser:
    """Return the parser of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--turn-tokens", type=int, default=192)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=16)
    return parser


def main() -> None:
    """Parse the options and measure."""
    options = option_parser().parse_args()
    uvloop.run(measure(options.pairs, load_of(options)))


if __name__ == "__main__":
    main()
