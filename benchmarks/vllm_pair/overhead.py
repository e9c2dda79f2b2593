"""What tidekv costs a server that has nothing to transfer: CPU when idle, and time and CPU of a decode step.

A plain server and those of other variants run side by side. Idle CPU is measured on all at the same time, steps in
alternating short bursts, so that other load on the machine meets all. Two servers of the same program differ, too:
a second plain server shows by how much.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
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
BURST = 8
"""Requests of one half of a pair: their CPU time is some hundred times the kernel's resolution of 10 ms."""
SIDES = ("scheduler", "worker")
"""Of the connector, each in a process of its own: a step waits for both, one after the other."""
CALLS = "its calls in a step, µs: " + " + ".join(SIDES)
SPIN_S = 1.5
"""Seconds before a burst. After its last step vLLM's worker spins for one more, which slows other servers down."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Figures of one server. `idle_cpu`: CPU seconds per second; steps: by pair, in seconds.

    `step_s` is of the fastest request of a burst, since other load only adds to it, and includes its share of the
    request's way through the API: vLLM may deliver the tokens of several steps at once. `step_cpu_s` is of the whole
    burst. `calls_s`: time in the connector's calls of a step, the median by side, if they are timed.
    """

    title: str
    idle_cpu: Sequence[float]
    step_s: Sequence[float]
    step_cpu_s: Sequence[float]
    calls_s: Mapping[str, float]


async def measure_overhead(
    names: Sequence[str], options: ServerOptions, folder: Path, *, idle_s: float, pairs: int
) -> list[Cost]:
    """Measure the servers of these variants, each as if it were alone; the first one is the baseline."""
    async with AsyncExitStack() as stack:
        clusters = [
            await stack.enter_async_context(running(VARIANTS[name], options, folder / f"{number}-{name}"))
            for number, name in enumerate(names)
        ]
        servers = [server for cluster in clusters for server in cluster.servers.values()]
        titles = [
            f"{cluster.variant.title}: {server.name}" for cluster in clusters for server in cluster.servers.values()
        ]
        client = Client()
        stack.push_async_callback(client.close)
        for server in servers:
            await _burst(client, server)  # Warms up.
        idle = await _idle(servers, idle_s)
        step: list[list[tuple[float, float]]] = [[] for _ in servers]
        for number in range(pairs):
            # Alternating order: neither is always the second one.
            for at in range(len(servers)) if number % 2 else reversed(range(len(servers))):
                step[at].append(await _burst(client, servers[at]))
        return [
            Cost(title, idle[at], [one[0] for one in step[at]], [one[1] for one in step[at]], read_calls(servers[at]))
            for at, title in enumerate(titles)
        ]


def read_calls(server: Server) -> dict[str, float]:
    """Return the median seconds in the connector's calls of a step, by side; of several workers the slowest."""
    medians: dict[str, float] = {}
    for path in calls_folder(server.folder, server.name).glob("*.json"):
        side, median_s = path.name.partition("-")[0], statistics.median(json.loads(path.read_text()))
        medians[side] = max(median_s, medians.get(side, 0.0))
    return medians


def overhead_table(costs: Sequence[Cost]) -> Table:
    """Medians of each server, and of the ratios of pairs to the first server with their intervals of 95 %."""
    table = Table(title="Nothing to transfer: medians, and medians of the ratios by pair (95 % interval)")
    for column in ("", "CPU when idle", "step, ms", "CPU of a step, ms", "step, ratio", "CPU of a step, ratio", CALLS):
        table.add_column(column, justify="right")
    first = costs[0]
    for cost in costs:
        table.add_row(
            cost.title,
            f"{statistics.median(cost.idle_cpu):.2%}",
            f"{1e3 * statistics.median(cost.step_s):.3f}",
            f"{1e3 * statistics.median(cost.step_cpu_s):.3f}",
            _ratio(cost.step_s, first.step_s),
            _ratio(cost.step_cpu_s, first.step_cpu_s),
            " + ".join(f"{1e6 * cost.calls_s[side]:.0f}" for side in SIDES if side in cost.calls_s) or "-",
        )
    return table


async def _idle(servers: Sequence[Server], seconds: float) -> list[list[float]]:
    """CPU seconds per second of servers without requests, in slices."""
    found: list[list[float]] = [[] for _ in servers]
    for _ in range(5):
        before, started_s = [server.cpu_s() for server in servers], time.perf_counter()
        await asyncio.sleep(seconds / 5)
        passed_s = time.perf_counter() - started_s
        for at, server in enumerate(servers):
            found[at].append((server.cpu_s() - before[at]) / passed_s)
    return found


async def _burst(client: Client, server: Server) -> tuple[float, float]:
    """Seconds of a decode step of the fastest of some requests, one after the other, and CPU seconds of one of all."""
    await asyncio.sleep(SPIN_S)
    before_cpu_s, steps_s = server.cpu_s(), list[float]()
    for number in range(BURST):
        prompt = [FIRST_WORD + number] * PROMPT_TOKENS
        answer = await client.complete(server.url, prompt, count=OUTPUT_TOKENS, request_id=f"o-{uuid4().hex[:8]}")
        steps_s.append(answer.total_s / OUTPUT_TOKENS)
    return min(steps_s), (server.cpu_s() - before_cpu_s) / BURST / OUTPUT_TOKENS


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True) if other)
    if not ratios:
        return "-"
    lowest, highest = median_interval(ratios)
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
