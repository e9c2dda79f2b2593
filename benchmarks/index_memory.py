"""Memory per page in the index: `python -m benchmarks.index_memory --json FILE [--trace RECORDING]`.

A recording is inserted, without evictions, until the index holds a million pages. The memory that the interpreter has
allocated for the index, without the bytes of the keys, is divided by the number of pages. Without a recording the
prompts have 150 pages, of which 50 are shared.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.figures import Figures, option_parser
from demo.blocks import VOCABULARY, TraceOptions
from demo.traces import read_trace
from tidekv.states.pages.page_pool import PagePool
from tidekv.states.prefix.index import PrefixIndex

PAGE = 64
KEY_BYTES = 4 * PAGE
SHARED, OWN = 50, 100


def made_up() -> Iterator[bytes]:
    """Yield prompts that begin with one of a hundred prefixes."""
    number = 0
    while True:
        begin = np.random.default_rng(number % 100).integers(0, VOCABULARY, SHARED * PAGE, dtype=np.uint32)
        end = np.random.default_rng(1000 + number).integers(0, VOCABULARY, OWN * PAGE, dtype=np.uint32)
        yield begin.tobytes() + end.tobytes()
        number += 1


def recorded(path: Path) -> Iterator[bytes]:
    """Yield the prompts of a recording, in whole pages."""
    for request in read_trace(path, TraceOptions(time_scale=0.0)):
        packed = request.prompt.packed(VOCABULARY)
        yield packed[: len(packed) // KEY_BYTES * KEY_BYTES]


def main() -> None:
    """Parse the options and measure."""
    parser = option_parser(__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--pages", type=int, default=1_000_000)
    chosen = parser.parse_args()
    with Figures(chosen.json) as figures:
        prompts = recorded(chosen.trace) if chosen.trace else made_up()
        first = next(prompts)
        gc.collect()
        tracemalloc.start()
        device = PagePool("device", chosen.pages)
        index = PrefixIndex(key_bytes=KEY_BYTES, device=device, host=PagePool("host", 0))
        prompt: bytes | None = first
        while prompt:
            match = index.match("", prompt)
            needed = len(prompt) // KEY_BYTES - match.device_pages
            if needed > device.free:
                break
            taken = device.take(needed)
            index.insert("", prompt, index.device_path(match.device_node) + taken)
            prompt = next(prompts, None)
        del match, taken
        prompt, prompts = None, iter(())
        gc.collect()
        allocated, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        nodes = list(index.nodes())
        keys = sum(len(node.edge) for node in nodes)
        pages = device.cached
        detail = f"{pages:,} pages in {len(nodes):,} nodes; {allocated / 1e6:.0f} MB, of which keys {keys / 1e6:.0f} MB"
        figures.add("index.memory", (allocated - keys) / pages, detail)


if __name__ == "__main__":
    main()
