"""Copies beside other work: a decode-like step, matrix products, the lanes' threads, and the way to an outcome."""

from __future__ import annotations

import asyncio
import dataclasses

from benchmarks.gpu.copy_rig import ALWAYS, NEVER
from benchmarks.gpu.load import decode_like, ending_us, layer_times_ms, matmul_like, memory_gb_s, slowdown, waiting_cpu
from benchmarks.gpu.report import Report, Setting
from benchmarks.gpu.rig import TO_DEVICE, TO_HOST, Pools, Rig
from tidekv.backends.copies.cuda import CopyChoice, CopyForm


async def measure_load(rig: Rig, report: Report) -> None:
    """Measure steps beside copies, the threads that wait, and layers."""
    step = decode_like(rig)
    whole_gb_s = memory_gb_s(rig)
    report.row("device memory, read and written by a copy within it", f"{whole_gb_s:.0f} GB/s")
    chosen: dict[str, float] = {}
    for shape in rig.shapes[:2]:
        pools = Pools(rig, shape)
        beside = await slowdown(rig, pools, None, step)
        report.row(f"decode-like step beside copies as chosen, {shape}", f"{beside.percent:+.1f} %", "≤ 3 %")
        share = 100 * beside.memory_gb_s / whole_gb_s
        words = f"{beside.bus_gb_s:.1f} GB/s over the bus, {share:.1f} % of the device memory's GB/s"
        report.row("the copies beside it, staged", words)
        chosen[str(shape)] = beside.percent
        for way in (TO_DEVICE, TO_HOST):
            beside = await slowdown(rig, pools, None, step, (way,))
            report.row(f"the same, copies {way} alone", f"{beside.percent:+.1f} %, {beside.bus_gb_s:.1f} GB/s")
        for form, below_bytes in ((CopyForm.KERNEL, ALWAYS), (CopyForm.ASYNC, NEVER)):
            if rig.find_launch() is not None:
                beside = await slowdown(rig, pools, CopyChoice(below_bytes), step)
                report.row(f"the same, {form.value}", f"{beside.percent:+.1f} %, {beside.bus_gb_s:.1f} GB/s")
    worst = max(chosen, key=lambda name: chosen[name])
    report.figure("gpu.compute", chosen[worst], f"copies both ways without a pause, {worst}")
    pools = Pools(rig, rig.shapes[1])
    # A product takes longer than a step of decoding.
    products = dataclasses.replace(rig, steps=max(2, rig.steps // 5))
    product = matmul_like(products)
    for name, choice in (("as chosen", None), ("kernel", CopyChoice(ALWAYS)), ("async", CopyChoice(NEVER))):
        if choice is None or rig.find_launch() is not None:
            beside = await slowdown(products, pools, choice, product)
            report.row(f"matrix products beside copies, {name}, {rig.shapes[1]}", f"{beside.percent:+.1f} %", "≤ 3 %")
    cpu = await waiting_cpu(pools)
    report.row(
        "threads that wait for copies", f"{cpu['wait']:.2f} % of a core, {cpu['copies_per_s']:.0f} copies/s", "≤ 1 %"
    )
    report.row("threads that launch them", f"{cpu['launch']:.1f} % of a core")
    words = f"they sleep in the driver; {cpu['copies_per_s']:.0f} copies/s, launching takes {cpu['launch']:.1f} %"
    report.figure("gpu.polling", cpu["wait"], words)
    ending = await ending_us(rig, pools)
    report.row("a copy of one page, awaited", f"{ending['awaited']:.0f} µs")
    report.row("the same, launched and waited for by one thread", f"{ending['bare']:.0f} µs")
    report.row("its launch", f"{ending['launch']:.0f} µs")
    times = await layer_times_ms(rig, pools)
    report.row("layer 0 can be read, of 64 MiB by layers", f"{times['first']:.2f} ms")
    report.row("all layers can be read", f"{times['all']:.2f} ms; {times['plain']:.2f} ms without layers")


def run(setting: Setting, report: Report) -> None:
    """Measure all of it."""
    asyncio.run(measure_load(Rig.of(setting), report))
