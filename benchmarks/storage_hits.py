"""Hit ratio of a full `file:` store beside an optimal one: `python -m benchmarks.storage_hits SESSIONS --json FILE`.

Recorded sessions of coding agents ask a store for their prompts, one request after the other in order of time, as a
decode engine does: `exists` for all pages of a prompt, of which those up to the first missing one are hits, and a put
of the prefix. The same is counted for an optimal store of as many pages, which knows the rest of the recording. There
are three workloads: all requests, those without subagents, and prompts cut at 131,072 tokens, each with stores of
several sizes. Pages stand for 512 tokens and have 512 bytes, since only their number matters.

The figure is the least hit ratio over the optimal one, over all workloads and sizes.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import heapq
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import takewhile
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.figures import Figures, option_parser
from demo.blocks import TraceOptions
from demo.traces import numbered_lines, read_trace
from tidekv.backends.storage import open_storage
from tidekv.backends.storage.file.records import HEADER_BYTES
from tidekv.backends.storage.prefix_put import put_prefix
from tidekv.engine.poller import PollerThread
from tidekv.states.types import PoolMemory, Segment, page_ids

SHARES = (0.05, 0.1, 0.2)
"""Pages of the store over the different pages of the recording."""
PAGE_BYTES = 512
BLOCKS = 8
"""Recorded blocks of a page, of 64 tokens each."""
CONTEXT_TOKENS = 131_072
SESSIONS_AT_ONCE = 16
TIMEOUT_S = 60.0

Prompts = Sequence[Sequence[bytes]]


def prompts_of(recording: Path, *, sessions: int, tokens_max: int = 0) -> list[list[bytes]]:
    """Return the page keys of each request, in order of time; `tokens_max` cuts prompts, 0 does not."""
    prompts = []
    for request in read_trace(recording, TraceOptions(sessions_max=sessions, sessions_at_once=SESSIONS_AT_ONCE)):
        blocks = request.prompt.ids[: tokens_max // request.prompt.block_tokens] if tokens_max else request.prompt.ids
        # The last block of a page stands for all before it, as the hash of a page does.
        ends = blocks[BLOCKS - 1 :: BLOCKS].tolist()
        prompts.append([hashlib.sha256(end.to_bytes(8, "little")).digest() for end in ends])
    return prompts


def without_subagents(recording: Path, sessions: int, target: Path) -> Path:
    """Write the first sessions of a recording without the requests of subagents, and return that file."""
    with gzip.open(target, "wb", compresslevel=1) as file:
        for number, line in numbered_lines(recording):
            if number > sessions:
                break
            session = msgspec.json.decode(line)
            session["requests"] = [step for step in session["requests"] if step["type"] != "subagent"]
            file.write(msgspec.json.encode(session) + b"\n")
    return target


def optimal_hits(prompts: Prompts, capacity: int) -> int:
    """Return the hits of a store of `capacity` pages that knows the future.

    It keeps the pages that are used soonest, and does not store those that are never used again (Belady 1966, with
    bypass). Of a prompt, a page is used again no sooner than the pages before it, so what it keeps of a prompt is a
    prefix, and each of its pages a hit.
    """
    uses: defaultdict[bytes, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        for key in prompt:
            uses[key].append(number)
    kept: dict[bytes, int] = {}
    latest: list[tuple[int, int, bytes]] = []
    hits = 0
    for number, prompt in enumerate(prompts):
        hits += sum(1 for _ in takewhile(kept.__contains__, prompt))
        for depth, key in enumerate(prompt):
            at = bisect_right(uses[key], number)
            if at == len(uses[key]):
                kept.pop(key, None)
                continue
            kept[key] = uses[key][at]
            heapq.heappush(latest, (-kept[key], -depth, key))
        while len(kept) > capacity:
            use, _, key = heapq.heappop(latest)
            # Entries of earlier uses are stale.
            if kept.get(key) == -use:
                del kept[key]
    return hits


async def file_hits(prompts: Prompts, pages: int) -> tuple[int, int]:
    """Return how many pages a `file:` store of about `pages` had when asked for, and the most that it held at once."""
    page = np.zeros(PAGE_BYTES, np.uint8)
    segment = Segment(address=page.ctypes.data, piece_bytes=PAGE_BYTES, stride_bytes=PAGE_BYTES, page_count=1)
    hits = held = 0
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tidekv-hits-"))
        poller = PollerThread()
        stack.push_async_callback(poller.close)
        storage = open_storage(f"file:{folder}/store", {"capacity": pages * (PAGE_BYTES + HEADER_BYTES)})
        stack.push_async_callback(storage.close)
        pool = PoolMemory(segments=(segment,), page_count=1)
        await storage.register(pool, lambda _: page.data, namespace=b"h" * 32, poller=poller)
        for prompt in prompts:
            there = await storage.exists(prompt, timeout_s=TIMEOUT_S)
            hits += sum(takewhile(bool, there))
            await put_prefix(storage, prompt, page_ids([0] * len(prompt)), timeout_s=TIMEOUT_S)
            held = max(held, storage.statistics().pages)
    return hits, held


def main() -> None:
    """Parse the options and compare."""
    parser = option_parser(__doc__)
    parser.add_argument("sessions", type=Path, help="the recording")
    parser.add_argument("--count", type=int, default=40, help="sessions of it")
    chosen = parser.parse_args()
    with Figures(chosen.json) as figures, tempfile.TemporaryDirectory() as folder:
        alone = without_subagents(chosen.sessions, chosen.count, Path(folder) / "alone.jsonl.gz")
        ratios: list[tuple[float, str]] = []
        for name, path, tokens_max in (
            ("all requests", chosen.sessions, 0),
            ("without subagents", alone, 0),
            ("cut at 131k tokens", chosen.sessions, CONTEXT_TOKENS),
        ):
            prompts = prompts_of(path, sessions=chosen.count, tokens_max=tokens_max)
            asked = sum(map(len, prompts))
            different = len({key for prompt in prompts for key in prompt})
            for share in SHARES:
                hits, held = asyncio.run(file_hits(prompts, round(share * different)))
                best = optimal_hits(prompts, held)
                words = f"{name}, {held:,} of {different:,} pages: {hits / asked:.1%} hit, optimal {best / asked:.1%}"
                figures.note(words)
                ratios.append((100 * hits / best, words))
        figures.add("hits", *min(ratios))


if __name__ == "__main__":
    main()
