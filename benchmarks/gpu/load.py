"""Interference of copies with other work: a decode-like step beside them, the threads that wait, and layers.

Copies run as an engine's do, through `PageCopier`, in both directions at once and without a pause.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.rig import TO_DEVICE, TO_HOST, Pools, Rig
from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.copies.cuda import CopyChoice
from tidekv.backends.copies.streams import streams_of

# Bytes of one copy: the KV of a prompt of some hundred tokens.
COPY_BYTES = 64 << 20
WAYS = (TO_DEVICE, TO_HOST)
# Copies of one direction in flight at a time, enough to keep the bus busy.
IN_FLIGHT = 3
BATCH, HEADS = 64, 32


@dataclass(frozen=True)
class GraphedStep:
    """A captured step. It keeps the tensors that the graph reads alive, which the graph itself does not."""

    graph: torch.cuda.CUDAGraph
    step: Callable[[], None]

    def __call__(self) -> None:
        """Launch the graph."""
        self.graph.replay()


def decode_like(rig: Rig) -> Callable[[], None]:
    """Return a memory-bound step that reads 2 GiB of weights and KV like decoding, as a CUDA graph."""
    dtype, hidden, context = torch.bfloat16, rig.hidden, rig.context
    weights = [torch.randn(hidden, hidden, dtype=dtype, device=rig.device) for _ in range(8)]
    hidden_state = torch.randn(BATCH, hidden, dtype=dtype, device=rig.device)
    query = torch.randn(BATCH, HEADS, 1, 128, dtype=dtype, device=rig.device)
    key, value = (torch.randn(BATCH, HEADS, context, 128, dtype=dtype, device=rig.device) for _ in range(2))

    def step() -> None:
        state = hidden_state
        for weight in weights:
            state = torch.nn.functional.rms_norm(state @ weight, (hidden,))
        torch.nn.functional.scaled_dot_product_attention(query, key, value)

    if rig.device.type != "cuda":
        return step
    stream = torch.cuda.Stream(rig.device)  # type: ignore[no-untyped-call]  # torch has no types for it.
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return GraphedStep(graph, step)


def matmul_like(rig: Rig) -> Callable[[], None]:
    """Return a product of square matrices, which is bound by the multiprocessors."""
    left, right = (torch.randn(rig.matmul, rig.matmul, dtype=torch.bfloat16, device=rig.device) for _ in range(2))
    out = torch.empty_like(left)

    def step() -> None:
        torch.matmul(left, right, out=out)

    return step


def steps_ms(rig: Rig, step: Callable[[], None]) -> float:
    """Return milliseconds on the device per step, of many that are queued at once."""
    count = rig.steps
    if rig.device.type != "cuda":
        began_s = time.perf_counter()
        for _ in range(count):
            step()
        return 1e3 * (time.perf_counter() - began_s) / count
    stream = torch.cuda.Stream(rig.device)  # type: ignore[no-untyped-call]  # As above.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # As above.
    with torch.cuda.stream(stream):
        begin.record(stream)
        for _ in range(count):
            step()
        end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


@asynccontextmanager
async def copying(copier: PageCopier, pools: Pools, ways: tuple[str, ...] = WAYS) -> AsyncIterator[list[int]]:
    """Copy in these directions without a pause for the duration of the block. The list grows by each copy's bytes."""
    pages = max(1, min(COPY_BYTES // pools.device.layout.page_bytes, pools.count // (2 * IN_FLIGHT)))
    above, below = pools.pages(1, seed=1), pools.pages(1, seed=2)
    done: list[int] = []
    stopped = False
    running = asyncio.Event()

    async def keep_copying(number: int, way: str) -> None:
        # Each copy has pages of its own, so that no copy reads what another writes.
        mine = slice(number * pages, (number + 1) * pages)
        up = way == TO_DEVICE
        while not stopped:
            await (copier.to_device(below[mine], above[mine]) if up else copier.to_host(above[mine], below[mine]))
            done.append(pages * pools.device.layout.page_bytes)
            running.set()

    async with asyncio.TaskGroup() as group:
        for number in range(IN_FLIGHT * len(ways)):
            group.create_task(keep_copying(number, ways[number % len(ways)]))
        try:
            await running.wait()
            yield done
        finally:
            stopped = True


async def started(pools: Pools, choice: CopyChoice | None = None) -> PageCopier:
    """Return a started copier, with its kernel compiled if there is one."""
    copier = PageCopier(pools.device, pools.host, choice=choice)
    copier.start()
    await copier.to_device([], [])
    return copier


@dataclass(frozen=True)
class Beside:
    """The slowdown of steps beside copies, and GB/s of these copies, over the bus and in device memory."""

    percent: float
    bus_gb_s: float

    @property
    def memory_gb_s(self) -> float:
        """GB/s of device memory that staged copies read and write: they stage each byte, and gather or scatter it."""
        return 3 * self.bus_gb_s


async def slowdown(
    rig: Rig, pools: Pools, choice: CopyChoice | None, step: Callable[[], None], ways: tuple[str, ...] = WAYS
) -> Beside:
    """Return the slowdown of steps on the device while pages are copied in these directions; the median of pairs."""
    copier = await started(pools, choice)
    slower, gb_s = [], []
    await asyncio.to_thread(steps_ms, rig, step)
    for _ in range(max(3, rig.rounds // 2)):
        alone_ms = await asyncio.to_thread(steps_ms, rig, step)
        async with copying(copier, pools, ways) as done:
            began_s, before_bytes = time.perf_counter(), sum(done)
            beside_ms = await asyncio.to_thread(steps_ms, rig, step)
            gb_s.append((sum(done) - before_bytes) / (time.perf_counter() - began_s) / 1e9)
        slower.append(100 * (beside_ms / alone_ms - 1))
    await copier.close()
    return Beside(statistics.median(slower), statistics.median(gb_s))


def memory_gb_s(rig: Rig) -> float:
    """Return GB/s that a copy within the device reads and writes."""
    source, target = (torch.zeros(rig.total_bytes, dtype=torch.uint8, device=rig.device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    return 2 * rig.gb_s(copy, rig.total_bytes)


def lane_cpu_s(ending: str) -> float:
    """Return CPU seconds of the lanes' threads with this ending of their names."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.ident is not None and thread.name.startswith("tidekv-copy-") and thread.name.endswith(ending)
    ]
    return sum(time.clock_gettime(clock) for clock in clocks)


async def waiting_cpu(pools: Pools) -> dict[str, float]:
    """Return percent of a core of the threads that wait and that launch while copies never pause, and copies/s."""
    copier = await started(pools)
    async with copying(copier, pools) as done:
        began_s, wait_s, launch_s = time.perf_counter(), lane_cpu_s("-wait"), lane_cpu_s("-launch")
        before = len(done)
        await asyncio.sleep(pools.rig.load_s)
        wall_s = time.perf_counter() - began_s
        shares = {"wait": lane_cpu_s("-wait") - wait_s, "launch": lane_cpu_s("-launch") - launch_s}
        found = {name: 100 * spent_s / wall_s for name, spent_s in shares.items()}
        found["copies_per_s"] = (len(done) - before) / wall_s
    await copier.close()
    return found


async def ending_us(rig: Rig, pools: Pools) -> dict[str, float]:
    """Return microseconds of a copy of one page: awaited, and launched and waited for by one thread; and of the launch.

    The difference of the first two is the way from the caller to the launching thread, and from the event's end to the
    future's.
    """
    copier = await started(pools)
    mover = pools.mover()
    above, below = pools.pages(1, seed=1)[:1], pools.pages(1, seed=2)[:1]
    stream = streams_of(rig.device).make()
    spent: dict[str, list[float]] = {"awaited": [], "bare": [], "launch": []}

    def bare() -> None:
        began_s = time.perf_counter()
        stream.run(partial(mover.to_device, below, above))
        spent["launch"].append(time.perf_counter() - began_s)
        stream.mark().wait()
        spent["bare"].append(time.perf_counter() - began_s)

    for _ in range(20 * rig.rounds):
        bare()
        began_s = time.perf_counter()
        await copier.to_device(below, above)
        spent["awaited"].append(time.perf_counter() - began_s)
    await copier.close()
    return {name: 1e6 * statistics.median(times) for name, times in spent.items()}


async def layer_times_ms(rig: Rig, pools: Pools) -> dict[str, float]:
    """Return milliseconds from the call until layer 0, and all layers, can be read; and of a copy without layers."""
    copier = await started(pools)
    pages = max(1, COPY_BYTES // pools.device.layout.page_bytes)
    above, below = pools.pages(1, seed=1)[:pages], pools.pages(1, seed=2)[:pages]
    spent: dict[str, list[float]] = {"first": [], "all": [], "plain": []}
    for _ in range(rig.rounds):
        began_s = time.perf_counter()
        await copier.to_device(below, above)
        spent["plain"].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        copy = copier.to_device_by_layer(below, above)
        await copy.launched
        while not copy.is_ready(0):  # noqa: ASYNC110  # What is measured has no event of asyncio's.
            await asyncio.sleep(0)
        spent["first"].append(time.perf_counter() - began_s)
        await copy.done
        spent["all"].append(time.perf_counter() - began_s)
    await copier.close()
    return {name: 1e3 * statistics.median(times) for name, times in spent.items()}
