"""Cost of the prefix index per request: conversations of many turns, replayed against the index and its page pools.

    python -m benchmarks.index [--requests 4000] [--page-size 64] [--pages 15000]

Each request matches its prompt, locks the match, makes room, takes pages, inserts, locks the leaf and stays locked
until 16 later ones have arrived. Prompts are packed in advance. Prints microseconds per request, by call. They are for
orientation: medians over rounds in one process on the current machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections import deque
from time import perf_counter_ns

import numpy as np

from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import PrefixIndex, Receipt

LIVE_REQUESTS = 16
STEPS = ("match", "lock", "evict", "take", "insert", "relock", "unlock")


def conversations(count: int, page_size: int, seed: int = 7) -> list[bytes]:
    """Return packed prompts of `count` requests: 64 conversations at a time, each turn adds question and answer."""
    source = np.random.default_rng(seed)
    system = [source.integers(0, 100_000, 2048, dtype=np.int32) for _ in range(4)]
    live: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    prompts = []
    for _ in range(count):
        place = int(source.integers(0, 64))
        if place >= len(live):
            live.append(system[len(live) % 4])
            place = len(live) - 1
        elif len(live[place]) > 60_000 or source.random() < 0.05:
            live[place] = system[place % 4]
        added = source.integers(0, 100_000, int(source.lognormal(6.5, 1.0)) + 1, dtype=np.int32)
        live[place] = np.concatenate((live[place], added))
        full = len(live[place]) // page_size * page_size
        prompts.append(live[place][:full].tobytes())
    return prompts


def replay(prompts: list[bytes], page_size: int, page_count: int) -> tuple[dict[str, float], float]:
    """Run all requests on a new index; returns microseconds per request by step, and the share of matched pages."""
    device = PagePool("device", page_count)
    index = PrefixIndex(key_bytes=page_size * 4, device=device, host=PagePool("host", 0))
    held: deque[Receipt] = deque()
    spent = [0] * len(STEPS)
    matched = pages = 0
    gc.collect()
    for prompt in prompts:
        total = len(prompt) // (page_size * 4)
        times = [perf_counter_ns()]
        match = index.match("", prompt)
        times.append(perf_counter_ns())
        receipt = index.lock(match.device_node)
        times.append(perf_counter_ns())
        needed = total - match.device_pages
        while (short := needed - device.free) > 0 and index.evict_device(short) < short:
            index.unlock(held.popleft())
        times.append(perf_counter_ns())
        ours = device.take(needed)
        times.append(perf_counter_ns())
        inserted = index.insert("", prompt, index.device_path(match.device_node) + ours)
        times.append(perf_counter_ns())
        held.append(index.lock(inserted.node))
        index.unlock(receipt)
        times.append(perf_counter_ns())
        if len(held) > LIVE_REQUESTS:
            index.unlock(held.popleft())
        times.append(perf_counter_ns())
        for step in range(len(STEPS)):
            spent[step] += times[step + 1] - times[step]
        matched += match.device_pages
        pages += total
    index.check()
    return {step: time / len(prompts) / 1e3 for step, time in zip(STEPS, spent, strict=True)}, matched / pages


def main() -> None:
    """Replay in rounds and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--pages", type=int, default=15_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    prompts = conversations(chosen.requests, chosen.page_size)
    tokens = sum(map(len, prompts)) / 4 / len(prompts)
    rounds = [replay(prompts, chosen.page_size, chosen.pages) for _ in range(chosen.rounds)]
    print(f"{len(prompts)} requests, {tokens:.0f} tokens each, {rounds[0][1]:.0%} of their pages matched")
    for step in STEPS:
        print(f"{step:8} {statistics.median(times[step] for times, _ in rounds):8.2f} us")
    print(f"{'total':8} {statistics.median(sum(times.values()) for times, _ in rounds):8.2f} us a request")


if __name__ == "__main__":
    main()
