"""What a journal costs: `python benchmarks/journal.py`.

A decode engine and a prefill worker in a process of its own, joined by NIXL, serve turns of conversations. Pairs of
runs, with the journal and without, one after the other in changing order; the figure is the CPU time of the decode
process (loop, journal, poller and copy threads) per request, and the median over the pairs of how much it grows.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import time
from array import array
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from tidekv import DecodeEngine, DecodeRequest, DevicePool, EngineConfig, HostPool, KVLayout, NixlTransport, Replayer
from tidekv.engine.workload.prefill_process import PrefillOrder, PrefillProcess

PAGE_SIZE = 16
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, dtype="bfloat16", page_size=PAGE_SIZE)
VOCABULARY = 32000


class Run:
    """What one run took."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.events = 0
        self.requests = 0


async def serve(address: str, journal: str | None, *, conversations: int, turns: int, turn_tokens: int) -> Run:
    """Serve every turn of every conversation; the conversations run side by side."""
    run = Run()
    device = DevicePool.allocate(LAYOUT, 8192)
    host = HostPool.allocate(LAYOUT, 16384)
    config = EngineConfig(model="synthetic", journal=journal)
    async with DecodeEngine(config, device=device, host=host, transport=NixlTransport(name="decode-0")) as engine:

        async def converse(number: int) -> None:
            words = random.Random(number)
            said: list[int] = []
            for turn in range(turns):
                said += [words.randrange(VOCABULARY) for _ in range(turn_tokens)]
                output = array("I", [words.randrange(VOCABULARY) for _ in range(64)])
                ready = await engine.restore(
                    DecodeRequest(
                        request_id=f"c{number}-{turn}", tokens=array("I", said), prefill=address, prompt="send"
                    )
                )
                engine.grow(ready, len(output))
                await engine.finish(ready, output)
                said += output
                run.requests += 1

        await engine.restore(
            DecodeRequest(request_id="warm", tokens=[1] * 64, prefill=address, prompt="send", cache=False)
        )
        gc.collect()
        started_s = time.process_time()
        async with asyncio.TaskGroup() as group:
            for number in range(conversations):
                group.create_task(converse(number))
        await engine.wait_settled()
        run.cpu_s = time.process_time() - started_s
        run.events = int(str(engine.statistics()["events"]))
    return run


async def measure(pairs: int, conversations: int, turns: int, turn_tokens: int) -> None:
    """Print a table of the pairs, and check that what was measured replays."""
    order = PrefillOrder(
        name="prefill-0",
        fingerprint="synthetic",
        layout=LAYOUT,
        num_pages=8192,
        chunk_tokens=16 * PAGE_SIZE,
        vocabulary=VOCABULARY,
    )
    table = Table("pair", "without, µs a request", "with, µs a request", "grows by")
    grown: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tidekv-") as folder:
        path = str(Path(folder) / "run.journal")
        async with PrefillProcess(order) as prefill:
            for pair in range(-1, pairs):
                runs = {}
                for journal in (path, None) if pair % 2 else (None, path):
                    await prefill.counts(forget=True)
                    runs[journal is not None] = await serve(
                        prefill.address, journal, conversations=conversations, turns=turns, turn_tokens=turn_tokens
                    )
                if pair < 0:
                    continue  # The first pair warms both processes up.
                off, on = runs[False], runs[True]
                grown.append(on.cpu_s / off.cpu_s - 1)
                costs = [run.cpu_s / run.requests * 1e6 for run in (off, on)]
                table.add_row(str(pair), f"{costs[0]:.0f}", f"{costs[1]:.0f}", f"{grown[-1]:+.1%}")
        journal_bytes = len(await asyncio.to_thread(Path(path).read_bytes))
        started_s = time.perf_counter()
        replayed = Replayer(path).run()
        replay_s = time.perf_counter() - started_s
    console = Console()
    console.print(table)
    console.print(
        f"median {statistics.median(grown):+.1%} of {pairs} pairs, {on.requests} requests each; "
        f"{journal_bytes / on.requests:.0f} bytes and {on.events / on.requests:.1f} events a request; "
        f"replay identical: {replayed.complete}, {replayed.events / replay_s:.0f} events/s"
    )


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--turn-tokens", type=int, default=192)
    options = parser.parse_args()
    uvloop.run(measure(options.pairs, options.conversations, options.turns, options.turn_tokens))


if __name__ == "__main__":
    main()
