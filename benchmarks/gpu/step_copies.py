"""Copies between host and device beside one pinned copy: by pages, forms and stretches; and their launch."""

from __future__ import annotations

import statistics
import time
from functools import partial

from benchmarks.gpu.copy_rig import ALWAYS, NEVER
from benchmarks.gpu.report import Report, Setting
from benchmarks.gpu.rig import TO_DEVICE, TO_HOST, Pools, Rig, meeting_point, page_speeds, pinned_limits
from tidekv.backends.copies.cuda import KERNEL_BELOW_BYTES, CopyForm
from tidekv.backends.copies.streams import streams_of


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
            f"stretches of {stretch_bytes >> 10} KiB to the device",
            f"kernel {both[CopyForm.KERNEL]:.1f} GB/s, async {both[CopyForm.ASYNC]:.1f} GB/s",
            "kernel" if stretch_bytes < KERNEL_BELOW_BYTES else "async",
        )
    first = [stretch for stretch, both in points if both[CopyForm.ASYNC] >= both[CopyForm.KERNEL]]
    if points:
        met = f"{first[0] >> 10} KiB" if first else "no stretch that was tried"
        report.row("async is as fast as the kernel from", met, f"kernel_below_bytes is {KERNEL_BELOW_BYTES >> 10} KiB")


def measure_launches(rig: Rig, report: Report) -> None:
    """Measure the CPU time that the launch of a copy takes, by form and number of scattered pages."""
    pools = Pools(rig, rig.shapes[-1])
    for form, below_bytes in (("kernel", ALWAYS), ("async", NEVER)):
        mover = pools.mover(below_bytes)
        if form == "kernel" and not mover.has_kernel:
            continue
        stream = streams_of(rig.device).make()
        for pages in (1, 16, 256):
            above, below = pools.pages(1, seed=1)[:pages], pools.pages(1, seed=2)[:pages]
            for way in (TO_DEVICE,) if form == "kernel" else (TO_DEVICE, TO_HOST):
                launch = partial(mover.to_device, below, above)
                if way == TO_HOST:
                    launch = partial(mover.to_host, above, below)
                spent_s = []
                for _ in range(5 * rig.rounds):
                    began_s = time.thread_time()
                    stream.run(launch)
                    spent_s.append(time.thread_time() - began_s)
                    rig.synchronize()
                us = 1e6 * statistics.median(spent_s)
                report.row(f"CPU time to launch a copy of {len(above)} pages {way}, {form}", f"{us:.0f} µs")


def run(setting: Setting, report: Report) -> None:
    """Measure speeds, then launches."""
    rig = Rig.of(setting)
    measure_speeds(rig, report)
    measure_launches(rig, report)
