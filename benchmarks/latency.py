"""Delay of outcomes, and the cost of waiting for them: `python -m benchmarks.latency --json FILE`.

A decode engine on uvloop with 256 requests in flight, each with 4,096 tokens, half of them cached; a prefill worker in
another process answers each after four seconds on average, over NIXL. Measured are: the time from the frame that makes
a request READY to its caller's coroutine; the time from the end of the last write, as the prefill worker's loop
receives it, to the same place (both processes share a clock); the loop's lag; the messages that decode sends; the CPU
time of polling threads. Then, on idle engines: one small page read from storage and copied to the device, from call to
outcome; and the number of pages that a conversation hashes. `--awake` prevents the cores from sleeping, as on hosts
configured that way.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import uvloop

from benchmarks.collector import set_collector
from benchmarks.engine_rig import KeyStorage, Script, ScriptedTransport
from benchmarks.figures import Figures, option_parser
from tidekv import (
    DecodeEngine,
    DecodeRequest,
    DevicePool,
    EngineConfig,
    HostPool,
    KVLayout,
    NixlTransport,
    PrefillConfig,
    PrefillPeer,
    open_storage,
)
from tidekv.backends.copies.copier import PageCopier
from tidekv.backends.keys import chain as keys_module
from tidekv.engine.poller import PollerThread
from tidekv.states.types import PageIds, page_ids
from tidekv.transports import wire
from tidekv.transports.control.connection import ControlLink
from tidekv.transports.decode.prefill_link import PrefillLink
from tidekv.transports.decode.receiver import Receiver
from tidekv.transports.prefill.prefill_room import Room

IN_FLIGHT = 256
PROMPT_TOKENS = 4096
PAGE = 64
ANSWER_S, ANSWER_S_MAX = 4.0, 12.0
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, dtype="bfloat16", page_size=PAGE)
LAG_PAUSE_S = 0.001
IDLE_S = 2.0
SMALL_CALLS = 400
TURNS, TURN_TOKENS = 8, 1024
TURNS_MAX = 1 << 12
"""Maximum requests of one task of the load, each with tokens of its own."""


async def be_prefill(parent: Connection) -> None:
    """Run a prefill worker that answers after a delay.

    At the end it reports when which pages of decode were written.
    """
    pool = DevicePool.allocate(LAYOUT, PROMPT_TOKENS // PAGE + 1)
    written: list[tuple[int, int]] = []
    transport = NixlTransport(name="prefill-0")
    write = transport.write

    async def noted(peer: Any, our_pages: PageIds, their_pages: PageIds) -> int:
        size = await write(peer, our_pages, their_pages)
        written.append((their_pages[-1], time.monotonic_ns()))
        return size

    transport.write = noted  # type: ignore[method-assign]  # What it watches.

    async def serve(room: Room) -> None:
        assert room.tokens is not None
        # Limited, because otherwise the last of so many would prolong the run by half a minute.
        await asyncio.sleep(min(random.expovariate(1 / ANSWER_S), ANSWER_S_MAX))
        await room.send(page_ids(range(-(-len(room.tokens) // 4 // PAGE))), start_token=0)
        await room.finish(first_token=1)
        await room.received()

    async with PrefillPeer(PrefillConfig(model="synthetic"), device=pool, transport=transport, on_room=serve) as peer:
        parent.send(peer.address)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, parent.recv):
            parent.send((written, poller_cpu_s()))
            written = []


def prefill_process(parent: Connection) -> None:
    """Run the process of the prefill worker."""
    torch.set_num_threads(1)
    uvloop.run(be_prefill(parent))


@contextmanager
def awake() -> Iterator[None]:
    """Keep the cores from sleeping, by a process on each that runs only if the core is idle otherwise (Linux only)."""
    context = multiprocessing.get_context("spawn")
    spinners = [context.Process(target=spin, args=(core, os.getpid())) for core in os.sched_getaffinity(0)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def spin(core: int, parent: int) -> None:
    """Spin on one core until the parent has ended."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


def poller_cpu_s() -> float:
    """Return the CPU time of the polling threads of this process (Linux only)."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and "poller" in thread.name
    )


class Load:
    """Keeps 256 requests in flight for some seconds, and records their times."""

    def __init__(self, engine: DecodeEngine, address: str, arrived_ns: dict[str, int]) -> None:
        self.engine = engine
        self.address = address
        self.outcome_us: list[float] = []
        self.ready_at: list[tuple[int, int]] = []
        self.lag_ms: list[float] = []
        self._arrived_ns = arrived_ns
        self._over = False
        count = IN_FLIGHT * TURNS_MAX + PROMPT_TOKENS
        self._component_pages = np.random.default_rng(IN_FLIGHT).integers(0, 1 << 16, count, dtype=np.uint32).tobytes()

    async def run(self, seconds: float) -> int:
        """Serve; returns the number of requests."""
        async with asyncio.TaskGroup() as group:
            lag = group.create_task(self._lag())
            tasks = [group.create_task(self._serve(number)) for number in range(IN_FLIGHT)]
            await asyncio.sleep(seconds)
            self._over = True
            await asyncio.wait(tasks)
            lag.cancel()
        return len(self.outcome_us)

    async def _serve(self, number: int) -> None:
        half_bytes = PROMPT_TOKENS // 2 * 4
        prefix = np.random.default_rng(number).integers(0, 1 << 16, PROMPT_TOKENS // 2, dtype=np.uint32).tobytes()
        turn = 0
        while not self._over:
            turn += 1
            name = f"r{number}-{turn}"
            # Sliced from tokens made in advance, because making them takes longer than what is measured.
            at = 4 * (number * TURNS_MAX + turn)
            tail = self._component_pages[at : at + half_bytes]
            request = DecodeRequest(request_id=name, tokens=prefix + tail, prefill=self.address, send_prompt=True)
            ready = await self.engine.restore(request)
            now_ns = time.monotonic_ns()
            if turn > 1:
                self.outcome_us.append((now_ns - self._arrived_ns.pop(name)) / 1e3)
                self.ready_at.append((int(ready.pages[PROMPT_TOKENS // PAGE - 1]), now_ns))
            await self.engine.finish(ready)

    async def _lag(self) -> None:
        while True:
            asked_s = time.perf_counter()
            await asyncio.sleep(LAG_PAUSE_S)
            self.lag_ms.append((time.perf_counter() - asked_s - LAG_PAUSE_S) * 1e3)


def since_written_us(ready_at: list[tuple[int, int]], written: list[tuple[int, int]]) -> list[float]:
    """Return for each READY request the time since the last write to its last page."""
    times: dict[int, list[int]] = {}
    for page, at_ns in written:
        times.setdefault(page, []).append(at_ns)
    waits = []
    for page, at_ns in ready_at:
        before = bisect.bisect_right(times.get(page, []), at_ns)
        if before:
            waits.append((at_ns - times[page][before - 1]) / 1e3)
    return waits


async def measure_load(figures: Figures, seconds: float) -> None:
    """Measure the hand-over with 256 requests in flight."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=prefill_process, args=(theirs,))
    child.start()
    loop = asyncio.get_running_loop()
    address = await loop.run_in_executor(None, ours.recv)
    sent: Counter[str] = Counter()
    send = ControlLink.send

    def counted(link: ControlLink, message: wire.Message) -> None:
        sent[type(message).__name__] += 1
        send(link, message)

    ControlLink.send = counted  # type: ignore[method-assign]  # What it watches.
    take = Receiver.take
    arrived_ns: dict[str, int] = {}

    def noted(receiver: Receiver, link: PrefillLink[Any], message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Chunk | wire.Aux):
            arrived_ns[message.room.request_id] = time.monotonic_ns()
        take(receiver, link, message)

    Receiver.take = noted  # type: ignore[method-assign]  # What it watches.
    device = DevicePool.allocate(LAYOUT, IN_FLIGHT * (2 * PROMPT_TOKENS // PAGE))
    config = EngineConfig(model="synthetic", loop_stall_report_s=1.0)
    try:
        async with DecodeEngine(
            config, device=device, transport=NixlTransport(name="decode-0", dials=["127.0.0.1:*"])
        ) as engine:
            load = Load(engine, address, arrived_ns)

            async def asked() -> tuple[list[tuple[int, int]], float]:
                ours.send(True)
                written, cpu_s = await loop.run_in_executor(None, ours.recv)
                return written, cpu_s

            _, cpu_s = await asked()
            began_s = time.perf_counter()
            count = await load.run(seconds)
            wall_s = time.perf_counter() - began_s
            written, end_cpu_s = await asked()
            await asyncio.sleep(1.0)
            cpu_before_s = poller_cpu_s()
            _, idle_cpu_s = await asked()
            await asyncio.sleep(IDLE_S)
            _, idle_end_cpu_s = await asked()
            idle_s = poller_cpu_s() - cpu_before_s + idle_end_cpu_s - idle_cpu_s
        ours.send(False)
        child.join()
    finally:
        Receiver.take = take  # type: ignore[method-assign]  # As it was.
        ControlLink.send = send  # type: ignore[method-assign]  # As it was.
        if child.is_alive():
            child.kill()
    figures.note(f"{count} requests in {wall_s:.1f} s with {IN_FLIGHT} in flight")
    add_percentiles(figures, "outcome", load.outcome_us)
    add_percentiles(figures, "handover", since_written_us(load.ready_at, written))
    figures.add("lag.p99", float(np.percentile(load.lag_ms, 99)), f"p50 {np.median(load.lag_ms):.2f} ms")
    total = count + IN_FLIGHT
    per_request = {name: messages / total for name, messages in sent.items() if name not in ("Ping", "Hello")}
    rates = ", ".join(f"{name} {rate:.2f}" for name, rate in per_request.items())
    figures.add("round_trips", sum(per_request.values()), f"decode's messages a request: {rates}")
    figures.add(
        "poller.busy", 100 * (end_cpu_s - cpu_s) / wall_s, f"the prefill worker's, {count / wall_s:.0f} rooms/s"
    )
    figures.add("poller.idle", 100 * idle_s / IDLE_S)


def add_percentiles(figures: Figures, name: str, values: list[float]) -> None:
    """Add p50 and p99 of values in microseconds."""
    p50, p99 = (float(np.percentile(values, percent)) for percent in (50, 99))
    for percent, value in (("p50", p50), ("p99", p99)):
        figures.add(f"{name}.{percent}", value, f"p50 {p50:.0f} µs, p99 {p99:.0f} µs, {len(values)} of them")


async def note_hop(figures: Figures) -> None:
    """Note the lower bound on this loop: resolving a future, until its coroutine runs."""
    loop = asyncio.get_running_loop()
    spent = []
    for _ in range(2000):
        future: asyncio.Future[None] = loop.create_future()
        began_s = time.perf_counter()
        loop.call_soon(future.set_result, None)
        await future
        spent.append((time.perf_counter() - began_s) * 1e6)
    figures.note(f"limit: a future resolved in the loop's next turn, to its coroutine: {np.median(spent):.1f} µs p50")


async def measure_small_calls(figures: Figures) -> None:
    """Measure one page read from storage, and one copied to the device."""
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_size=PAGE)
    host, device = HostPool.allocate(layout, 4), DevicePool.allocate(layout, 4)
    poller = PollerThread()
    poller.start()
    copier = PageCopier(device, host)
    copier.start()
    pages = page_ids([1])
    key = [hashlib.sha256(b"page").digest()]

    async def times(call: Callable[[], Any]) -> list[float]:
        spent = []
        for _ in range(SMALL_CALLS):
            began_s = time.perf_counter()
            await call()
            spent.append((time.perf_counter() - began_s) * 1e6)
            await asyncio.sleep(0.001)
        return spent

    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        storage = open_storage(f"file:{folder}?capacity=64MB")
        await storage.register(host.memory, host.page, namespace=b"b" * 32, poller=poller)
        assert all(await storage.put_from(key, pages, timeout_s=10.0))
        add_percentiles(figures, "storage", await times(lambda: storage.get_into(key, pages, timeout_s=10.0)))
        await storage.close()
    add_percentiles(figures, "copy", await times(lambda: copier.to_device(pages, pages)))
    await copier.close()
    await poller.close()
    figures.note(f"a small page has {layout.page_bytes >> 10} KiB; its read and copy are timed from call to outcome")


async def measure_hashing(figures: Figures) -> None:
    """Measure the pages that a conversation hashes, relative to its new pages."""
    hashed = 0
    sha256 = keys_module.sha256

    def counted(*arguments: Any) -> Any:
        nonlocal hashed
        hashed += 1
        return sha256(*arguments)

    keys_module.sha256 = counted  # type: ignore[assignment]  # What it watches.
    try:
        script = Script(chunk_pages=8, page_size=PAGE)
        async with DecodeEngine(
            EngineConfig(model="synthetic"),
            device=DevicePool.allocate(LAYOUT, 1024),
            host=HostPool.allocate(LAYOUT, 1024),
            storage=KeyStorage(),
            transport=ScriptedTransport(script),
        ) as engine:
            said = b""
            hashed = 0
            for turn in range(TURNS):
                said += np.random.default_rng(turn).integers(0, 1 << 16, TURN_TOKENS, dtype=np.uint32).tobytes()
                request = DecodeRequest(request_id=f"turn-{turn}", tokens=said, prefill="prefill")
                await engine.finish(await engine.restore(request))
                await engine.wait_settled()
    finally:
        keys_module.sha256 = sha256
    new = TURNS * TURN_TOKENS // PAGE
    figures.add("keys.hashed", hashed / new, f"{hashed} pages hashed for {new} new ones in {TURNS} turns")


async def measure(figures: Figures, seconds: float) -> None:
    """Run all measurements in turn."""
    await note_hop(figures)
    await measure_hashing(figures)
    await measure_small_calls(figures)
    await measure_load(figures, seconds)


def main() -> None:
    """Parse the options and measure."""
    parser = option_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--awake", action="store_true", help="keep the cores from sleeping")
    chosen = parser.parse_args()
    set_collector()
    torch.set_num_threads(1)
    with Figures(chosen.json) as figures, awake() if chosen.awake else nullcontext():
        uvloop.run(measure(figures, chosen.seconds))


if __name__ == "__main__":
    main()
