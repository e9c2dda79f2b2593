"""What tidekv costs a server that has nothing to transfer: CPU when idle, and time and CPU of a decode step.

A plain server and those of other variants run side by side. Idle CPU is measured on all at the same time. Then each
server in turn answers one request while signals stop the others, so that no other server computes, and the requests
that are compared lie a second apart. Two processes of one program differ by some percent, too: all servers are started
several times, and a second plain server shows what is left of that.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from rich.table import Table

from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.cluster import running
from benchmarks.vllm_pair.conversations import FIRST_WORD
from benchmarks.vllm_pair.server import Server, ServerOptions
from benchmarks.vllm_pair.variants import VARIANTS, calls_folder

PROMPT_TOKENS = 4
OUTPUT_TOKENS = 24
"""Fewer than a page with the prompt: no page is looked up, saved or sent."""
WARM_UP = 10
"""Requests to each server before the first round."""
SPIN_S = 1.5
"""Seconds until a server rests. After its last step vLLM's worker spins for one."""
WAKE_S = 0.03
"""Seconds between the signal that lets a server go on and its request: its timers are overdue."""
SIDES = ("scheduler", "worker")
"""Of the connector, each in a process of its own: a step waits for both, one after the other."""
CALLS = "its calls in a step, µs: " + " + ".join(SIDES)


@dataclass(slots=True)
class Cost:
    """Figures of one server, by start. `idle_cpu`: CPU seconds per second; steps: in seconds, `step_s` by round.

    A step is a share of a whole request, with its way through the API: vLLM may deliver the tokens of several steps at
    once. `calls_s`: the median time in the connector's calls of a step by side, of the last start, if they are timed.
    """

    title: str
    idle_cpu: list[float] = field(default_factory=list)
    step_s: list[list[float]] = field(default_factory=list)
    step_cpu_s: list[float] = field(default_factory=list)
    calls_s: dict[str, float] = field(default_factory=dict)


async def measure_overhead(
    names: Sequence[str], options: ServerOptions, folder: Path, *, starts: int, rounds: int, idle_s: float
) -> list[Cost]:
    """Measure the servers of these variants, each as if it were alone; the first one is the baseline."""
    costs: list[Cost] = []
    for start in range(starts):
        async with AsyncExitStack() as stack:
            # Side by side: servers that start later, or together with others, differ by some percent.
            async with asyncio.TaskGroup() as group:
                starting = [
                    group.create_task(
                        stack.enter_async_context(running(VARIANTS[name], options, folder / f"{start}-{number}-{name}"))
                    )
                    for number, name in enumerate(names)
                ]
            clusters = [one.result() for one in starting]
            servers = [server for cluster in clusters for server in cluster.servers.values()]
            costs = costs or [
                Cost(f"{cluster.variant.title}: {server.name}")
                for cluster in clusters
                for server in cluster.servers.values()
            ]
            await _measure(servers, costs, rounds=rounds, idle_s=idle_s)
    return costs


async def _measure(servers: Sequence[Server], costs: Sequence[Cost], *, rounds: int, idle_s: float) -> None:
    """Add the figures of one start of the servers to their costs."""
    for server in servers:
        for _ in range(WARM_UP):
            await _step_s(server)
    await asyncio.sleep(SPIN_S)
    before_s, started_s = [server.cpu_s() for server in servers], time.perf_counter()
    await asyncio.sleep(idle_s)
    passed_s = time.perf_counter() - started_s
    for server, cost, cpu_s in zip(servers, costs, before_s, strict=True):
        cost.idle_cpu.append((server.cpu_s() - cpu_s) / passed_s)
        cost.step_s.append([])
    for server in servers:
        server.signal(signal.SIGSTOP)
    before_s = [server.cpu_s() for server in servers]
    for _ in range(rounds):
        for server, cost in random.sample(list(zip(servers, costs, strict=True)), len(servers)):
            server.signal(signal.SIGCONT)
            await asyncio.sleep(WAKE_S)
            cost.step_s[-1].append(await _step_s(server))
            server.signal(signal.SIGSTOP)
    for server, cost, cpu_s in zip(servers, costs, before_s, strict=True):
        server.signal(signal.SIGCONT)
        cost.step_cpu_s.append((server.cpu_s() - cpu_s) / rounds / OUTPUT_TOKENS)
        cost.calls_s = read_calls(server)


def read_calls(server: Server) -> dict[str, float]:
    """Return the median seconds in the connector's calls of a step, by side; of several workers the slowest."""
    medians: dict[str, float] = {}
    for path in calls_folder(server.folder, server.name).glob("*.json"):
        side, median_s = path.name.partition("-")[0], statistics.median(json.loads(path.read_text()))
        medians[side] = max(median_s, medians.get(side, 0.0))
    return medians


def overhead_table(costs: Sequence[Cost]) -> Table:
    """Medians of each server, and its ratios to the first server: median over starts, and the interval of 95 %."""
    starts, first = len(costs[0].step_s), costs[0]
    table = Table(
        title=f"Nothing to transfer: medians over {starts} starts, and of the ratios with their 95 % interval"
    )
    for column in ("", "CPU when idle", "step, ms", "CPU of a step, ms", "step, ratio", "CPU of a step, ratio", CALLS):
        table.add_column(column, justify="right")
    for cost in costs:
        step_ratios = [
            statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
            for ours, theirs in zip(cost.step_s, first.step_s, strict=True)
        ]
        cpu_ratios = [one / other for one, other in zip(cost.step_cpu_s, first.step_cpu_s, strict=True)]
        table.add_row(
            cost.title,
            f"{statistics.median(cost.idle_cpu):.2%}",
            f"{1e3 * statistics.median(map(statistics.median, cost.step_s)):.3f}",
            f"{1e3 * statistics.median(cost.step_cpu_s):.3f}",
            _in_words(step_ratios),
            _in_words(cpu_ratios),
            " + ".join(f"{1e6 * cost.calls_s[side]:.0f}" for side in SIDES if side in cost.calls_s) or "-",
        )
    return table


async def _step_s(server: Server) -> float:
    """Return the seconds of a decode step, of one request."""
    # A connection of its own: the server may have been stopped for longer than it keeps one.
    client = Client()
    try:
        answer = await client.complete(
            server.url, [FIRST_WORD] * PROMPT_TOKENS, count=OUTPUT_TOKENS, request_id=f"o-{uuid4().hex[:8]}"
        )
    finally:
        await client.close()
    return answer.total_s / OUTPUT_TOKENS


def _in_words(ratios: Sequence[float]) -> str:
    lowest, highest = median_interval(sorted(ratios))
    return f"{statistics.median(ratios):.3f} ({lowest:.3f} to {highest:.3f})"


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the bounds between which the median of the distribution is, with 95 %: two of its ordered samples.

    How many samples are below that median is a binomial count, whatever the distribution.
    """
    count, tail, rank = len(ordered), 0.0, 0
    while (tail := tail + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    # With five samples or fewer no two of them reach 95 %.
    first = max(0, rank - 1)
    return ordered[first], ordered[count - 1 - first]
