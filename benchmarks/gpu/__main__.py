"""Throughput of the CUDA paths on this machine's GPU: `python -m benchmarks.gpu [--json FILE]`, in a few minutes.

Pinned copies are the limit. Measured against it: pages at random places, in both directions and both forms; the size at
which the forms are equal; the slowdown of a decode-like step by copies beside it; the CPU time of the threads that wait
for copies; the time until layer 0 can be read; and a NIXL write in device memory. Without a GPU the program prints one
line to that effect and exits.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.load import decode_like, layer_times_ms, nixl_gb_s, slowdown_percent, waiting_cpu
from benchmarks.gpu.rig import (
    ALWAYS,
    NEVER,
    SHAPES,
    TO_DEVICE,
    TO_HOST,
    Pools,
    Rig,
    meeting_point,
    page_speeds,
    pinned_limits,
)
from tidekv.backends.copies.cuda import KERNEL_BELOW_BYTES, CopyChoice, CopyForm

NO_GPU = "there was no GPU: the CUDA paths have not run"
# In a process of its own with a timeout: NIXL and UCX may end a process that exceeds their capabilities.
NIXL_TIMEOUT_S = 60


@dataclass
class Report:
    """Figures by name for the target table, rows of the printed table, and what could not be measured."""

    about: dict[str, str]
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def row(self, what: str, measured: str, asked: str = "") -> None:
        """Add a row."""
        self.rows.append((what, measured, asked))

    def figure(self, name: str, value: float, words: str) -> None:
        """Add a figure of the target table."""
        self.figures[name], self.words[name] = value, words

    def print(self) -> None:
        """Print the table below a description of the machine."""
        table = Table("what", "measured", "asked", title=", ".join(f"{name} {is_}" for name, is_ in self.about.items()))
        for row in self.rows:
            table.add_row(*row)
        Console(width=None if Console().is_terminal else 150).print(table)


def about() -> dict[str, str]:
    """Return card, driver, versions and date."""
    found = {"card": torch.cuda.get_device_name(), "driver": driver(), "torch": torch.__version__}
    found["CUDA"] = str(torch.version.cuda)
    spec = importlib.util.find_spec("triton")
    found["triton"] = "none" if spec is None else str(importlib.import_module("triton").__version__)
    found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    return found


def driver() -> str:
    """Return the driver's version if nvidia-smi reports it."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return lines[0] if lines else "unknown"


def measure_speeds(rig: Rig, report: Report) -> None:
    """Measure the limit, pages in both forms, and the size at which these are equal."""
    limits = pinned_limits(rig)
    for way in (TO_DEVICE, TO_HOST):
        report.row(f"one pinned copy {way}, the limit", f"{limits[way]:.1f} GB/s")
    speeds = page_speeds(rig, limits)
    for speed in speeds:
        measured = f"{speed.gb_s:.1f} GB/s, {speed.percent:.0f} %"
        name = f"{speed.form.value} copies {speed.way}, {speed.shape}{', chosen' if speed.chosen else ''}"
        report.row(name, measured, "≥ 90 %" if speed.chosen else "")
    worst = min((speed for speed in speeds if speed.chosen), key=lambda speed: speed.percent)
    words = f"the least: {worst.form.value} {worst.way}, {worst.shape}: {worst.gb_s:.1f} of {worst.limit_gb_s:.1f} GB/s"
    report.figure("gpu.copies", worst.percent, words)
    points = meeting_point(rig)
    for stretch_bytes, both in points:
        report.row(
            f"stretches of {stretch_bytes >> 10} KiB, the slower way",
            f"kernel {both[CopyForm.KERNEL]:.1f} GB/s, async {both[CopyForm.ASYNC]:.1f} GB/s",
            "kernel" if stretch_bytes < KERNEL_BELOW_BYTES else "async",
        )
    first = [stretch for stretch, both in points if both[CopyForm.ASYNC] >= both[CopyForm.KERNEL]]
    if points:
        met = f"{first[0] >> 10} KiB" if first else "no stretch that was tried"
        report.row("async is as fast as the kernel from", met, f"kernel_below_bytes is {KERNEL_BELOW_BYTES >> 10} KiB")


async def measure_load(rig: Rig, report: Report) -> None:
    """Measure a step beside copies, the threads that wait, and layers."""
    step = decode_like(rig)
    chosen: dict[str, float] = {}
    for shape in SHAPES[:2]:
        pools = Pools(rig, shape)
        slower = await slowdown_percent(rig, pools, None, step)
        report.row(f"decode-like step beside copies as chosen, {shape}", f"{slower:+.1f} %", "≤ 3 %")
        chosen[str(shape)] = slower
        for way in (TO_DEVICE, TO_HOST):
            slower = await slowdown_percent(rig, pools, None, step, (way,))
            report.row(f"the same, copies {way} alone", f"{slower:+.1f} %")
        for form, below_bytes in ((CopyForm.KERNEL, ALWAYS), (CopyForm.ASYNC, NEVER)):
            if rig.find_launch() is not None:
                slower = await slowdown_percent(rig, pools, CopyChoice(below_bytes), step)
                report.row(f"the same, {form.value}", f"{slower:+.1f} %")
    worst = max(chosen, key=lambda name: chosen[name])
    report.figure("gpu.compute", chosen[worst], f"copies both ways without a pause, {worst}")
    pools = Pools(rig, SHAPES[1])
    cpu = await waiting_cpu(pools)
    report.row(
        "threads that wait for copies", f"{cpu['wait']:.2f} % of a core, {cpu['copies_per_s']:.0f} copies/s", "≤ 1 %"
    )
    report.row("threads that launch them", f"{cpu['launch']:.1f} % of a core")
    words = f"they sleep in the driver; {cpu['copies_per_s']:.0f} copies/s, launching takes {cpu['launch']:.1f} %"
    report.figure("gpu.polling", cpu["wait"], words)
    times = await layer_times_ms(rig, pools)
    report.row("layer 0 can be read, of 64 MiB by layers", f"{times['first']:.2f} ms")
    report.row("all layers can be read", f"{times['all']:.2f} ms; {times['plain']:.2f} ms without layers")


def measure_nixl(report: Report) -> None:
    """Measure a write in device memory, in a process that may crash."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--nixl-only"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NIXL_TIMEOUT_S)
        said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        measured = said[-1] if said else f"it exited with {done.returncode} and printed nothing"
    except subprocess.TimeoutExpired:
        measured = f"it was not done after {NIXL_TIMEOUT_S} s"
    report.row("NIXL write between pools on the device", measured)


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write figures and rows to this file")
    parser.add_argument("--nixl-only", action="store_true", help="measure only the write by NIXL, and print its speed")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"not measured: {NO_GPU}")
        if chosen.json:
            chosen.json.write_text(json.dumps({"verdict": "not measured", "why": NO_GPU}, indent=1))
        return
    rig = Rig.of_this_machine()
    if chosen.nixl_only:
        print(f"{asyncio.run(nixl_gb_s(rig)):.1f} GB/s")
        return
    report = Report(about())
    measure_speeds(rig, report)
    asyncio.run(measure_load(rig, report))
    measure_nixl(report)
    report.print()
    if chosen.json:
        found = {"verdict": "measured", "about": report.about, "figures": report.figures, "words": report.words}
        rest = {"missing": report.missing, "notes": [str(report.about)], "rows": report.rows}
        chosen.json.write_text(json.dumps(found | rest, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
