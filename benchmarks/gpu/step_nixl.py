"""Writes of the NIXL transport between two processes on one device, beside bare NIXL and a copy within the device."""

from __future__ import annotations

import os
import statistics

import torch
import uvloop

from benchmarks.gpu.report import Report, Setting
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.ucx_log import logging_to, tell_path
from benchmarks.transfer import Row, measure_stream
from benchmarks.transfer_pairs import Rig as Pair
from benchmarks.transfer_pairs import Shape

SHAPES = (Shape(64, 32 << 10, 64), Shape(512, 32 << 10, 1), Shape(64, 256 << 10, 8))
TINY = (Shape(4, 4096, 2),)


async def measure(report: Report, shape: Shape, *, device: str, pairs: int) -> None:
    """Measure one shape, with pages at random."""
    pair = Pair(shape, device=device)
    await pair.start()
    row = Row(shape, "random")
    lists = pair.page_lists("random")
    await pair.transport.write(pair.peer, lists[0].ours, lists[0].theirs)
    arrived = await pair.has_written(int(lists[0].ours[0]), int(lists[0].theirs[0]))
    report.check(f"the bytes of a write are in place, {shape}", arrived)
    await measure_stream(row, pair, lists, pairs=pairs)
    ours, bare = (
        row.stream_writes * shape.size_bytes / statistics.median(times) / 1e9
        for times in (row.streamed, row.bare_streamed)
    )
    report.row(f"NIXL writes between two processes, {shape}", f"{ours:.2f} GB/s", f"bare NIXL {bare:.2f} GB/s")
    report.row(f"the same as a share of bare NIXL, {shape}", f"{row.share():.0f} %", "≥ 90 %")
    await pair.close()


def run(setting: Setting, report: Report) -> None:
    """Measure a copy within the device, and all shapes."""
    os.environ.setdefault("UCX_MODULES", "^ib")
    log = setting.work / "ucx.log"
    os.environ.update(logging_to(log))
    rig = Rig.of(setting)
    source, target = (torch.zeros(rig.total_bytes, dtype=torch.uint8, device=rig.device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    within = rig.gb_s(copy, rig.total_bytes)
    report.row("a copy within the device", f"{within:.0f} GB/s")
    for shape in TINY if setting.short or not setting.on_cuda else SHAPES:
        uvloop.run(measure(report, shape, device=str(setting.device), pairs=3 if setting.short else 9))
    tell_path(report, log)
