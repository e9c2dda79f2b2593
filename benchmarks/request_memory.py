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
from pathlib import Path
from types import TracebackType
from typing import Self

import uvloop

from benchmarks.engine import TIERS, Load, Rig  # Not that of the package: engine.py here.
from benchmarks.figures import Figures, option_parser

LOAD = Load(prompt_tokens=4096, page_size=64, chunk_tokens=512, tiers=TIERS)
KEY_BYTES = 4
"""Bytes of a token in a page's key."""


class Allocated:
    """Bytes that the interpreter allocates from its entry until all requests of a rig have rooms."""

    def __init__(self, rig: Rig) -> None:
        self.bytes = 0
        rig.script.on_all_open = self._take

    def __enter__(self) -> Self:
        tracemalloc.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tracemalloc.stop()

    def _take(self) -> None:
        if tracemalloc.is_tracing():
            gc.collect()
            self.bytes, _ = tracemalloc.get_traced_memory()


async def measure(in_flight: int) -> tuple[float, float]:
    """Return bytes a request, all and those of keys, of the second block of an engine: its caches are full by then."""
    with tempfile.TemporaryDirectory(prefix="tidekv-bench-") as folder:
        rig = Rig(LOAD, in_flight, str(Path(folder) / "run.journal"))
        async with rig.engine:
            await rig.block()
            allocated = Allocated(rig)
            block = await rig.block(allocated)
    keys = KEY_BYTES * (block.sources["l3"] + block.sources["transfer"])
    return allocated.bytes / in_flight, keys / in_flight


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
