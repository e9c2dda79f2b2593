"""Cost of a journal: `python -m benchmarks.journal`, CPU time of the engine's process per request.

Two processes with an engine each, one with a journal and one without, and the load of `engine.py` for both: prompts of
4,096 tokens, the first half of which is cached in device memory, host memory or storage, 256 of them in flight at once,
and full pools. Prefill is scripted, and storage keeps only keys, so no other process takes part.

Both engines prepare their tiers for the same prompts, and then serve them at the same time on the same core, between
which the system switches every few milliseconds. Changes of the machine's speed thus affect both alike. This was not so
when one process served blocks with the two engines in turn: such pairs were spread over tens of points, with medians of
10 and 11 % instead of the 14 % found here. Two engines on one core have colder caches than a single one, which may add
to that. The figure of a block is the CPU time of the process, all threads, from the first call until nothing is in
flight and the journal is written, without the time of script and storage. The result is the median increase over the
pairs, and next to it the ratio of the sums.

Then the journal's own time is measured directly, in blocks of a third engine: its calls on the loop, without the cost
of the clock, and its thread. This excludes its effect on the caches of other code, which is a large part of its cost.
Then the journal is replayed.

Finally `journal_conversations.py` runs in a process of its own: conversations over NIXL, with shorter prompts that are
nearly all cached. Until version 5 of the journal that was the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.engine import OUTPUT_TOKENS, TIERS, Load, Rig  # Not that of the package: engine.py in this folder.
from tidekv import Replayer
from tidekv.engine.journal.journal import COALESCE_S
from tidekv.states.commands import Command
from tidekv.states.events import Event

READY, GO = "ready", "go"
WATCHED_BLOCKS = 3
CLOCK_CALLS = 20_000


class Side:
    """One of the two engines, and the results of its blocks."""

    def __init__(self, load: Load, in_flight: int, journal: str | None) -> None:
        self.rig = Rig(load, in_flight, journal)
        self.block_us: list[float] = []
        """CPU per request, for each block."""
        self.loop_s = self.writer_s = 0.0
        self.calls = 0
        """Observed steps and turn ends."""

    def watch_journal(self) -> None:
        """From now on, sum up the loop's time in the journal. The measurement itself has a cost, too."""
        journal, driver = self.rig.engine._runtime.journal, self.rig.engine._runtime.driver
        assert journal is not None
        clock = time.thread_time

        def watched(event: Event, given: list[Command], error: str = "") -> None:
            started_s = clock()
            journal.stepped(event, given, error)
            self.loop_s += clock() - started_s
            self.calls += 1

        end_turn = journal.end_turn

        def watched_end() -> None:
            started_s = clock()
            end_turn()
            self.loop_s += clock() - started_s
            self.calls += 1

        between = SimpleNamespace(stepped=watched)
        driver._watchers = tuple(between if watcher is journal else watcher for watcher in driver._watchers)
        journal.end_turn = watched_end  # type: ignore[method-assign]  # What it watches.

    async def prepare(self) -> tuple[list[array[int]], list[array[int]]]:
        """Return prompts and outputs of a block."""
        prompts = await self.rig.prepare()
        outputs = [self.rig.tokens(OUTPUT_TOKENS) for _ in prompts]
        # Data that the journal has yet to write must not count for the next block.
        await asyncio.sleep(3 * COALESCE_S)
        return prompts, outputs

    async def serve(self, prompts: list[array[int]], outputs: list[array[int]]) -> None:
        """Serve one block."""
        rig = self.rig
        rig.script.expected = len(prompts)
        gc.collect()
        loop_s, calls = self.loop_s, self.calls
        writer_s, rig_s, started_s = _writer_cpu_s(), rig.rig_cpu_s, time.process_time()
        async with asyncio.TaskGroup() as group:
            restores = [group.create_task(rig._restore(prompt)) for prompt in prompts]
        async with asyncio.TaskGroup() as group:
            for restore, output in zip(restores, outputs, strict=True):
                group.create_task(rig._finish(restore.result(), output))
        await rig.engine.wait_settled()
        await asyncio.sleep(3 * COALESCE_S)
        took_s = time.process_time() - started_s - (rig.rig_cpu_s - rig_s)
        self.block_us.append(took_s / len(prompts) * 1e6)
        self.loop_s, self.calls = self.loop_s - loop_s, self.calls - calls
        self.writer_s = _writer_cpu_s() - writer_s


def _writer_cpu_s() -> float:
    """Return the CPU time of the journal's thread (Linux only), which is part of the process's time."""
    for thread in threading.enumerate():
        if thread.name == "tidekv-journal" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def _clock_s() -> float:
    """Return the time that two readings of the clock add to a measured interval."""
    started_s = time.thread_time()
    for _ in range(CLOCK_CALLS):
        time.thread_time()
    return (time.thread_time() - started_s) / CLOCK_CALLS


class Process:
    """One of the two compared engines, in a process of its own."""

    def __init__(self, arguments: list[str], side: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.journal", *arguments, "--side", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, word: str) -> None:
        """Send a line to the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """Return a line from the process. Raises RuntimeError if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of one side has ended with code {self._process.wait()}")
        return line.strip()

    def end(self) -> None:
        """Make the process end, and wait for it."""
        self._process.communicate("end\n")


async def _be_a_side(load: Load, in_flight: int, journal: str | None) -> None:
    """Run one side: prepare, wait for the command, serve a block, print µs per request; repeatedly."""
    side = Side(load, in_flight, journal)
    async with side.rig.engine:
        while True:
            block = await side.prepare()
            print(READY, flush=True)
            if (await asyncio.to_thread(sys.stdin.readline)).strip() != GO:
                return
            await side.serve(*block)
            print(side.block_us[-1], flush=True)


def measure_pairs(pairs: int, arguments: list[str]) -> list[tuple[float, float]]:
    """Return µs per request without a journal and with one, for each pair of blocks."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        sides = [Process(arguments, side) for side in ("off", "on")]
    finally:
        os.sched_setaffinity(0, cores)
    found = []
    for pair in range(-1, pairs):
        assert [side.hear() for side in sides] == [READY, READY]
        for side in sides[:: -1 if pair % 2 else 1]:
            side.say(GO)
        without_us, with_us = (float(side.hear()) for side in sides)
        if pair >= 0:
            # The first pair is a warm-up.
            found.append((without_us, with_us))
    for side in sides:
        side.end()
    return found


async def _see_directly(side: Side) -> tuple[float, float, float]:
    """Return µs per request on the loop and on the journal's thread, and of the rest of the engine."""
    clock_s = _clock_s()
    side.watch_journal()
    found = []
    for _ in range(WATCHED_BLOCKS):
        await side.serve(*await side.prepare())
        scale = 1e6 / side.rig.in_flight
        loop_us, writer_us = (side.loop_s - side.calls * clock_s) * scale, side.writer_s * scale
        watching_us = 2 * side.calls * clock_s * scale
        found.append((loop_us, writer_us, side.block_us.pop() - loop_us - writer_us - watching_us))
    loop, writer, rest = (statistics.median(column) for column in zip(*found, strict=True))
    return loop, writer, rest


def show_pairs(found: list[tuple[float, float]], in_flight: int, console: Console) -> None:
    """Print a table of the pairs, and their median."""
    grown = [with_us / without_us - 1 for without_us, with_us in found]
    table = Table("pair", "without, µs a request", "with, µs a request", "grows by")
    for pair, ((without_us, with_us), ratio) in enumerate(zip(found, grown, strict=True)):
        table.add_row(str(pair), f"{without_us:.0f}", f"{with_us:.0f}", f"{ratio:+.1%}")
    console.print(table)
    low, middle, high = statistics.quantiles(grown, n=4)
    sums = [sum(column) for column in zip(*found, strict=True)]
    console.print(
        f"median {middle:+.1%} (half of the pairs {low:+.1%} to {high:+.1%}); means {sums[0] / len(found):.0f} and "
        f"{sums[1] / len(found):.0f} µs a request: {sums[1] / sums[0] - 1:+.1%}; {len(found)} pairs of {in_flight} "
        "requests"
    )


async def measure_directly(load: Load, in_flight: int, console: Console) -> None:
    """Print the time of the journal's own calls, and check that the measured journal replays."""
    with tempfile.TemporaryDirectory(prefix="tidekv-") as folder:
        path = Path(folder) / "run.journal"
        on = Side(load, in_flight, str(path))
        async with on.rig.engine:
            await on.serve(*await on.prepare())
            loop_us, writer_us, rest_us = await _see_directly(on)
            events = int(str(on.rig.engine.statistics()["events"]))
        journal_bytes = path.stat().st_size
        gc.collect()
        started_s = time.perf_counter()
        replayed = Replayer(path).run()
        replay_s = time.perf_counter() - started_s
    console.print(
        f"seen directly: {loop_us:.0f} µs a request on the loop and {writer_us:.0f} µs on the journal's thread: "
        f"{(loop_us + writer_us) / rest_us:+.1%}"
    )
    console.print(
        f"{journal_bytes / on.rig.requests:.0f} bytes and {events / on.rig.requests:.1f} events a request, with those "
        f"that fill the pools; replay identical: {replayed.complete}, {replayed.events / replay_s:.0f} events/s"
    )


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--conversation-pairs", type=int, default=5, help="0 skips the conversations")
    parser.add_argument("--side", choices=("off", "on"), help="run as one of the two compared processes")
    options = parser.parse_args()
    load = Load(options.prompt_tokens, options.page_size, options.chunk_tokens, TIERS)
    if options.side:
        with tempfile.TemporaryDirectory(prefix="tidekv-") as folder:
            journal = f"{folder}/run.journal" if options.side == "on" else None
            uvloop.run(_be_a_side(load, options.in_flight, journal))
        return
    console = Console(width=120)
    console.print(f"prompts of {load.prompt_tokens} tokens, {options.in_flight} in flight, half of them cached")
    show_pairs(measure_pairs(options.pairs, sys.argv[1:]), options.in_flight, console)
    uvloop.run(measure_directly(load, options.in_flight, console))
    if options.conversation_pairs:
        print("\nconversations over NIXL:", flush=True)
        subprocess.run(
            [sys.executable, "-m", "benchmarks.journal_conversations", "--pairs", str(options.conversation_pairs)],
            check=True,
        )


if __name__ == "__main__":
    main()
