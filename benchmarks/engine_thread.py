"""Cost of each call of an `EngineThread` for a synchronous scheduler: `python -m benchmarks.engine_thread`.

Two rigs on loopback. In the first, 256 requests wait for a prefill worker that never answers; it measures a poll
without news while the engine's thread runs its heartbeats and timers. In the second, 256 requests are READY, and a loop
grows them token by token, as in continuous batching. Times are wall-clock times of the calling thread in µs, which
include waiting for the interpreter lock that the engine's thread shares. A poll without news must take at most 5 µs;
the exit code is 1 if its median or mean is above.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.table import Table

from tidekv.backends.device.pool import DevicePool
from tidekv.backends.layout import KVLayout
from tidekv.engine.config.engine_config import EngineConfig
from tidekv.engine.decode.decode_engine import DecodeEngine
from tidekv.engine.decode.values import DecodeRequest, ReadyRequest
from tidekv.engine.demo.synthetic_prefill import SyntheticPrefill
from tidekv.engine.prefill.prefill_config import PrefillConfig
from tidekv.engine.prefill.prefill_peer import PrefillPeer
from tidekv.engine.thread.engine_thread import EngineThread, Restored
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport
from tidekv.transports.prefill.prefill_room import Room

IN_FLIGHT = 256
POLLS = 200_000
STEPS = 64
PROMPT_TOKENS = 60
POLL_US_MAX = 5.0
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, dtype="bfloat16", page_size=16)


async def never_answer(room: Room) -> None:
    """Serve a room without ever answering."""
    await room.received()


@contextmanager
def rig(*, answers: bool) -> Iterator[EngineThread]:
    """Yield an engine's thread with a prefill peer on the same loop."""
    network = LoopbackNetwork()
    pool = DevicePool.allocate(LAYOUT, IN_FLIGHT * 5)
    serve = SyntheticPrefill(pool).serve if answers else never_answer
    peer = PrefillPeer(
        PrefillConfig(listen="prefill"), device=pool, transport=LoopbackTransport("prefill-0", network), on_room=serve
    )
    device = DevicePool.allocate(LAYOUT, IN_FLIGHT * 12)
    transport = LoopbackTransport("decode-0", network)
    with EngineThread(
        DecodeEngine(EngineConfig(loop_stall_report_s=1.0), device=device, transport=transport)
    ) as thread:

        async def start(_: DecodeEngine) -> None:
            await peer.__aenter__()

        async def stop(_: DecodeEngine) -> None:
            await peer.__aexit__(None, None, None)

        thread.call(start)
        try:
            yield thread
        finally:
            for number in range(IN_FLIGHT):
                thread.abort(f"r{number}")
            thread.call(stop)


def timed(call: Callable[[], object], count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the time of each of `count` calls in µs, minus the cost of reading the clock."""
    clock = time.perf_counter_ns
    stamps = np.empty(count + 1, dtype=np.int64)
    for number in range(count):
        stamps[number] = clock()
        call()
    stamps[count] = clock()
    for_nothing = np.empty(10_001, dtype=np.int64)
    for number in range(10_001):
        for_nothing[number] = clock()
    return np.maximum(np.diff(stamps) - np.median(np.diff(for_nothing)), 0) / 1000


def submit_all(thread: EngineThread) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Submit all requests with different prompts; returns the time of each call."""
    numbers = iter(range(IN_FLIGHT))

    def submit() -> None:
        number = next(numbers)
        tokens = np.arange(number * 1000, number * 1000 + PROMPT_TOKENS, dtype=np.uint32)
        thread.submit(DecodeRequest(request_id=f"r{number}", tokens=tokens, prefill="prefill", send_prompt=True))

    return timed(submit, IN_FLIGHT)


def take_all(thread: EngineThread) -> list[ReadyRequest]:
    """Poll until every request is READY."""
    batch: list[ReadyRequest] = []
    while len(batch) < IN_FLIGHT:
        for outcome in thread.poll(10.0):
            assert isinstance(outcome, Restored), outcome
            batch.append(outcome.ready)
    return batch


def main() -> int:
    """Measure all calls and print the table."""
    rows: list[tuple[str, np.ndarray[tuple[int], np.dtype[np.float64]]]] = []
    with rig(answers=False) as thread:
        rows.append(("poll, nothing in flight", timed(thread.poll, POLLS)))
        rows.append(("submit (prompt of 60 tokens)", submit_all(thread)))
        thread.statistics()
        polls = timed(thread.poll, POLLS)
        rows.append((f"poll, {IN_FLIGHT} in flight, nothing new", polls))
        rows.append(("call and its answer (statistics)", timed(thread.statistics, 500)))
    with rig(answers=True) as thread:
        submit_all(thread)
        batch = take_all(thread)
        thread.wait_settled()
        steps = timed(lambda: thread.grow_many(batch), STEPS) / IN_FLIGHT
        rows.append((f"grow_many of {IN_FLIGHT}, per request and token", steps))
        requests = iter(batch * STEPS)
        rows.append(("grow by a token, one request", timed(lambda: thread.grow(next(requests)), IN_FLIGHT * 16)))
        ending = iter(batch)
        rows.append(("finish (the loop's work beside it)", timed(lambda: thread.finish(next(ending)), IN_FLIGHT)))
    table = Table(title=f"µs of the caller's thread, {IN_FLIGHT} requests")
    for column in ("call", "count", "mean", "p50", "p99", "max"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for name, spent in rows:
        figures = (spent.mean(), np.percentile(spent, 50), np.percentile(spent, 99), spent.max())
        table.add_row(name, f"{len(spent):,}", *(f"{figure:,.2f}" for figure in figures))
    Console(width=110).print(table)
    return int(max(float(polls.mean()), float(np.median(polls))) > POLL_US_MAX)


if __name__ == "__main__":
    sys.exit(main())
