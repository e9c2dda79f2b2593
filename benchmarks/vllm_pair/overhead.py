"""What tidekv costs a server that has nothing to transfer: CPU when idle, and the time of a decode step.

Idle CPU is measured on plain servers and on tidekv's at the same time. A step is compared within one process, where
`toggled_connector` switches the connector's calls off in every other group of steps: plain servers alone differ by more
than the calls take.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import uuid4

from rich.table import Table

from benchmarks.servers.conversations import FIRST_WORD
from benchmarks.servers.program import Program
from benchmarks.vllm_pair.client import Client
from benchmarks.vllm_pair.cluster import running
from benchmarks.vllm_pair.server import ServerOptions
from benchmarks.vllm_pair.variants import TOGGLED, VARIANTS, steps_folder

COMPARED: Final = (VARIANTS["single"], VARIANTS["single"], TOGGLED)
"""The second plain server shows by how much equal servers differ."""
PROMPT_TOKENS: Final = 4
REQUEST_STEPS: Final = 1000
"""Steps of a request."""
SPIN_S: Final = 1.5
"""Seconds until a server rests. After its last step vLLM's worker spins for one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Figures of one server. `idle_cpu`: CPU seconds per second; `step_s`: seconds of a step, median over requests.

    `pairs`: seconds of a step with the connector's calls and without them, if they are toggled.
    """

    title: str
    idle_cpu: float
    step_s: float
    pairs: Sequence[tuple[float, float]] = field(default_factory=list)


async def measure_overhead(options: ServerOptions, folder: Path, *, steps: int, idle_s: float) -> list[Cost]:
    """Measure idle servers for `idle_s` seconds, and then `steps` decode steps of each in turn."""
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            starting = [
                group.create_task(stack.enter_async_context(running(variant, options, folder / str(number))))
                for number, variant in enumerate(COMPARED)
            ]
        clusters = [one.result() for one in starting]
        servers = [server for cluster in clusters for server in cluster.servers.values()]
        titles = [f"{one.variant.title}: {server.name}" for one in clusters for server in one.servers.values()]
        for server in servers:
            await _steps_s(server, REQUEST_STEPS)
        await asyncio.sleep(SPIN_S)
        before_s, started_s = [_cpu_s(server) for server in servers], time.perf_counter()
        await asyncio.sleep(idle_s)
        passed_s = time.perf_counter() - started_s
        idle_cpu = [(_cpu_s(server) - cpu_s) / passed_s for server, cpu_s in zip(servers, before_s, strict=True)]
        step_s = [await _steps_s(server, steps) for server in servers]
        return [
            Cost(title, cpu, seconds, read_pairs(server))
            for title, cpu, seconds, server in zip(titles, idle_cpu, step_s, servers, strict=True)
        ]


def read_pairs(server: Program) -> list[tuple[float, float]]:
    """Return the seconds of a step with and without the connector's calls, of all workers; empty for a plain server."""
    files = steps_folder(server.folder, server.name).glob("*.json")
    return [(on_s, off_s) for path in sorted(files) for on_s, off_s in json.loads(path.read_text())]


def overhead_table(costs: Sequence[Cost]) -> Table:
    """Figures of each server; for toggled calls the median of the ratios of a step with them to one without."""
    table = Table(title="Nothing to transfer")
    for column in ("", "CPU when idle", "step, ms", "step with the calls : without, 95 % interval", "pairs"):
        table.add_column(column, justify="right")
    for cost in costs:
        ratios = sorted(on_s / off_s for on_s, off_s in cost.pairs)
        table.add_row(
            cost.title,
            f"{cost.idle_cpu:.2%}",
            f"{1e3 * cost.step_s:.3f}",
            f"{statistics.median(ratios):.4f} ({' to '.join(f'{one:.4f}' for one in median_interval(ratios))})"
            if ratios
            else "-",
            str(len(ratios) or "-"),
        )
    return table


def _cpu_s(server: Program) -> float:
    return sum(server.cpu_s().values())


async def _steps_s(server: Program, steps: int) -> float:
    """Decode `steps` tokens in requests of REQUEST_STEPS, and return the seconds of a step."""
    client, seconds = Client(), []
    try:
        for _ in range(-(-steps // REQUEST_STEPS)):
            answer = await client.complete(
                server.url, [FIRST_WORD] * PROMPT_TOKENS, count=REQUEST_STEPS, request_id=f"o-{uuid4().hex[:8]}"
            )
            seconds.append(answer.total_s / REQUEST_STEPS)
    finally:
        await client.close()
    return statistics.median(seconds)


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
