"""A real small model, made at random and split into prefill and decode: its tokens are those of one process."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter

import uvloop

from benchmarks.gpu.report import Report, Setting
from demo.conversations import WorkloadOptions
from demo.main_job import TierOptions, run_conversations, sources_used


def run(setting: Setting, report: Report) -> None:
    """Serve conversations, with and without the decode cache, and once with a page damaged on purpose."""
    os.environ.setdefault("UCX_MODULES", "^ib")
    options = (
        WorkloadOptions(conversations=2, rounds=2) if setting.short else WorkloadOptions(conversations=5, rounds=3)
    )
    tiers = TierOptions(device=str(setting.device), compare=not setting.short)
    began_s, served = time.perf_counter(), Counter[str]()

    def progress(phase: str, count: int) -> None:
        # In the log of a step that hangs: how far it came.
        served[phase] += count
        print(f"{time.perf_counter() - began_s:.1f} s: {phase}: {served[phase]}", flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run_conversations(options, tiers, progress=progress))
        failures = "; ".join(result.failures)
        report.check("tokens equal those of one process", not failures, failures or f"{result.compared} compared")
        for phase in result.phases:
            used = f"{phase.requests} requests, tokens by source {dict(phase.tokens)}"
            report.note(f"{phase.name}: {used}, {phase.ready_ms(50):.1f} ms to READY")
        report.row("smallest margin of a token", f"{result.smallest_margin:.2g}")
        if setting.short:
            return
        report.check("all tiers served", len(sources_used(result.phases[0])) == 4, str(sources_used(result.phases[0])))
        few = TierOptions(device=str(setting.device), compare=False)
        damaged = runner.run(run_conversations(WorkloadOptions(conversations=2, rounds=2), few, damage="l1"))
        report.check("planted: a page damaged on the device changes the tokens", bool(damaged.failures))
