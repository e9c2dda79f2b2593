"""CPU time in `benchmarks/engine.py`: samples of the loop's thread by part, and the time of each thread."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

SAMPLE_S = 0.001
PARTS = (
    ("/transitions/", "machine"),
    ("/states/request/", "machine"),
    ("/states/prefix/", "index"),
    ("/states/pages/", "pools"),
    ("/states/core_state.py", "pools"),
    ("/states/", "rules"),
    ("/engine/journal/", "journal"),
    ("/structlog/", "journal"),
    ("/transports/", "wire"),
    ("/backends/keys.py", "keys"),
    ("/backends/storage/", "storage"),
    ("/backends/", "tensors"),
    ("/torch/", "tensors"),
    ("/benchmarks/engine_rig.py", "rig"),
    ("/benchmarks/", "caller"),
    ("/tidekv/engine/", "engine"),
    ("/engine/", "engine"),
    ("/asyncio/", "loop"),
)


class Sampler:
    """Samples the position of the loop's thread, in ticks of the process's CPU time."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()

    def __enter__(self) -> Sampler:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        if frame is not None:
            self.lines[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1
        while frame is not None:
            name = frame.f_code.co_filename
            for words, part in PARTS:
                if words in name:
                    self.parts[part] += 1
                    return
            frame = frame.f_back
        self.parts["loop"] += 1


def thread_times() -> dict[str, float]:
    """Return the CPU time of each thread of this process, by name (Linux only)."""
    return {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }
