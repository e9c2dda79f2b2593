"""The steps: their names, their modules and their time limits, the most important first."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu.report import Report, Setting


@dataclass(frozen=True)
class Step:
    """A step runs in a process of its own, and is killed with all its processes at its limit."""

    name: str
    module: str
    about: str
    limit_s: float = 60.0
    needs_gpu: bool = False

    def load(self) -> Callable[[Setting, Report], None]:
        """Import what it runs."""
        found: Callable[[Setting, Report], None] = importlib.import_module(f"benchmarks.gpu.{self.module}").run
        return found


STEPS = (
    Step("tests", "step_tests", "the tests marked gpu", limit_s=110),
    Step("bytes", "step_bytes", "every byte of copies in all forms and layouts"),
    Step("order", "step_order", "copies behind a forward pass that spins, and planted breaks"),
    Step("pair", "step_pair", "a whole engine and two prefill workers over NIXL, with faults"),
    Step("model", "step_model", "a small model split into prefill and decode: equal tokens", limit_s=110),
    Step("lent", "step_lent", "pages in tensors that a serving engine lends", limit_s=110),
    Step("copies", "step_copies", "speed of copies beside one pinned copy, both forms, launches"),
    Step("load", "step_load", "copies beside other work, threads, time to an outcome"),
    Step("nixl", "step_nixl", "device to device between two processes, beside bare NIXL"),
    Step("pinning", "step_pinning", "time to touch and pin host memory"),
    Step(
        "turns_4k", "step_turns_4k", "conversations from 4k tokens on, with and without the decode cache", limit_s=110
    ),
    Step("turns_32k", "step_turns_32k", "the same from 32k tokens on", limit_s=110, needs_gpu=True),
)
