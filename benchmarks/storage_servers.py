"""Throughput of storage on a server, and its effect on the event loop: `python -m benchmarks.storage_servers URI…`.

    redis-server --port 7000 --save '' &
    python -m benchmarks.storage_servers redis://127.0.0.1:7000

For each URI and page size, batches are put under new keys and read back, three times; figures are medians. Meanwhile a
task repeatedly sleeps for a millisecond: its delay is the loop's lag, printed next to that of an idle loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from tidekv.backends.storage import open_storage
from tidekv.engine.cli.store_tools import OpenStore, opened
from tidekv.states.types import page_ids

ROUNDS = 3
BATCH_BYTES = 64 << 20
PAGE_BYTES = (64 << 10, 1 << 20, 8 << 20)
LAG_PAUSE_S = 0.001
IDLE_S = 2.0
TIMEOUT_S = 300.0


async def lags_ms(until: asyncio.Event) -> list[float]:
    """Return the lag of each short sleep, until the event is set."""
    late = []
    while not until.is_set():
        started_s = time.perf_counter()
        await asyncio.sleep(LAG_PAUSE_S)
        late.append(1000 * (time.perf_counter() - started_s - LAG_PAUSE_S))
    return late


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def idle_lag_ms() -> float:
    """Return the lag of an idle loop."""
    until = asyncio.Event()
    asyncio.get_running_loop().call_later(IDLE_S, until.set)
    return p99(await lags_ms(until))


async def measure(store: OpenStore, page_bytes: int) -> tuple[float, float, float, float]:
    """Return MB/s of puts and gets, and the p99 and maximum of the loop's lag, in ms."""
    count = min(BATCH_BYTES // page_bytes, store.batch_pages)
    pages = page_ids(range(count))
    until = asyncio.Event()
    lag = asyncio.get_running_loop().create_task(lags_ms(until))
    puts, gets = [], []
    for turn in range(ROUNDS):
        keys = [hashlib.sha256(f"{page_bytes} {turn} {number}".encode()).digest() for number in range(count)]
        started_s = time.perf_counter()
        assert all(await store.storage.put_from(keys, pages, timeout_s=TIMEOUT_S))
        middle_s = time.perf_counter()
        assert all(await store.storage.get_into(keys, pages, timeout_s=TIMEOUT_S))
        puts.append(count * page_bytes / (middle_s - started_s) / 1e6)
        gets.append(count * page_bytes / (time.perf_counter() - middle_s) / 1e6)
        await store.storage.delete(keys)
    until.set()
    late = await lag
    return statistics.median(puts), statistics.median(gets), p99(late), max(late)


async def main(uris: list[str]) -> None:
    """Measure every store, and print a table."""
    table = Table("store", "page", "put MB/s", "get MB/s", "loop lag p99 ms", "max ms", "idle p99 ms")
    for uri in uris:
        for page_bytes in PAGE_BYTES:
            namespace = hashlib.sha256(f"benchmark {page_bytes}".encode()).digest()
            idle = await idle_lag_ms()
            async with opened(open_storage(uri), namespace=namespace, page_bytes=page_bytes) as (store,):
                put, get, late, worst = await measure(store, page_bytes)
                await store.storage.clear()
            row = f"{put:.0f}", f"{get:.0f}", f"{late:.1f}", f"{worst:.1f}", f"{idle:.1f}"
            table.add_row(uri.partition(":")[0], f"{page_bytes >> 10} KiB", *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
