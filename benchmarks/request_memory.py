"""Memory of a request in flight, beside its pages: `python -m benchmarks.request_memory --json FILE`.

An engine of `engine.py` has a block of requests with prompts of 4,096 tokens, half of them cached, in flight: all have
rooms, and prefill has sent nothing. Counted is what the interpreter has allocated since they arrived, less the keys of
the pages that they add to the index: four bytes for each token that comes from storage or prefill. The packed tokens of
a prompt are 16 KB of it.
"""

from __future__ import annotations

import gc
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from benchmarks.engine import TIERS, Load, Rig  # Not that of the package: engine.py here.
from benchmarks.figures import Figures, option_parser

LOAD = Load(prompt_tokens=4096, page_size=64, chunk_tokens=512, tiers=TIERS)
KEY_BYTES = 4
"""Bytes of a token in a page's key."""


async def measure(in_flight: int) -> tuple[float, float]:
    """Return bytes a request, all and those of keys, of the second block of an engine: its caches are full by then."""
    allocated = 0

    def take() -> None:
        nonlocal allocated
        if tracemalloc.is_tracing():
            gc.collect()
            allocated, _ = tracemalloc.get_traced_memory()

    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        rig = Rig(LOAD, in_flight, str(Path(folder) / "run.journal"))
        rig.script.on_all_open = take
        async with rig.engine:
            await rig.block()
            block = await rig.block(tracing())
    keys = KEY_BYTES * (block.sources["l3"] + block.sources["transfer"])
    return allocated / in_flight, keys / in_flight


@contextmanager
def tracing() -> Iterator[None]:
    """Trace what the interpreter allocates in the block."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def main() -> None:
    """Parse the options and measure."""
    parser = option_parser(__doc__)
    parser.add_argument("--in-flight", type=int, default=256)
    chosen = parser.parse_args()
    with Figures(chosen.json) as figures:
        allocated, keys = uvloop.run(measure(chosen.in_flight))
        words = f"{chosen.in_flight} in flight; {keys / 1e3:.1f} KB of keys in the index beside it"
        figures.add("engine.memory", (allocated - keys) / 1e3, words)


if __name__ == "__main__":
    main()
