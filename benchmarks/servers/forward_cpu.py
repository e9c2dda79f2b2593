"""CPU time of the forward passes of a serving engine, apart from what it schedules, keeps and transfers.

An engine's plugin wraps its forward passes with `count`. Each process then keeps the sum in a file of its own, in the
folder that the environment of its server names.
"""

from __future__ import annotations

import os
import struct
import time
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any, Final  # An engine's calls.

FOLDER: Final = "TIDEKV_BENCHMARK_FORWARD_CPU"
"""Environment variable of a server."""
_SECONDS: Final = struct.Struct("=d")


def count(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `original`, and add the CPU time that all threads of this process had meanwhile."""
    started_s = time.process_time()
    try:
        return original(*args, **kwargs)
    finally:
        kept = _kept(os.getpid())
        (before_s,) = _SECONDS.unpack_from(kept)
        _SECONDS.pack_into(kept, 0, before_s + time.process_time() - started_s)


def register() -> None:
    """Count the forward passes and the sampling of vLLM's workers. vLLM calls it in each of its processes."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for name in ("_model_forward", "_sample"):
        _wrap(GPUModelRunner, name)


def spent_s(folder: Path) -> float:
    """Return the CPU seconds of all forward passes so far, of all processes that have `folder`."""
    return sum(float(*_SECONDS.unpack(file.read_bytes())) for file in folder.glob("*"))


def _wrap(kind: Any, name: str) -> None:
    original = getattr(kind, name)
    if hasattr(original, "is_counted"):
        return

    def counted(*args: Any, **kwargs: Any) -> Any:
        return count(original, *args, **kwargs)

    counted.is_counted = True  # type: ignore[attr-defined]  # A plugin may be loaded twice in a process.
    setattr(kind, name, counted)


@cache
def _kept(process: int) -> mmap:
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / str(process)).open("w+b") as file:
        file.write(_SECONDS.pack(0.0))
        file.flush()
        return mmap(file.fileno(), _SECONDS.size)
