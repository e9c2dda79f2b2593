"""Time in which host memory is touched and pinned, up to 64 GiB."""

from __future__ import annotations

import gc
import time

from benchmarks.gpu.report import Report, Setting
from tidekv.backends.host import pool as host_pool
from tidekv.backends.layout import KVLayout

GIB = 1 << 30
SIZES_GIB = (1, 8, 64)
# Beyond the pool itself: the rest of the machine needs some.
SPARE_BYTES = 8 * GIB
SECONDS_MAX = 40.0
PAGE = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16)


def available_bytes() -> int:
    """Return the memory that can be had without swapping."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def run(setting: Setting, report: Report) -> None:
    """Allocate pools of growing sizes, one after the other."""
    seconds_per_byte = 0.0
    for size_bytes in [gib * GIB for gib in SIZES_GIB] if setting.on_cuda and not setting.short else [16 << 20]:
        name = f"{size_bytes / GIB:g} GiB"
        if size_bytes + SPARE_BYTES > available_bytes() and setting.on_cuda:
            report.note(f"{name}: skipped, {available_bytes() / GIB:.0f} GiB are available")
            continue
        if seconds_per_byte * size_bytes > SECONDS_MAX:
            report.note(f"{name}: skipped, it would take {seconds_per_byte * size_bytes:.0f} s")
            continue
        began_s = time.perf_counter()
        pool = host_pool.HostPool.allocate(PAGE, size_bytes // PAGE.page_bytes, pin=False)
        touched_s = time.perf_counter() - began_s
        report.row(f"a host pool of {name} is allocated and touched", f"{touched_s:.2f} s")
        if setting.on_cuda:
            host_pool._pin(pool)
            pinned_s = time.perf_counter() - began_s - touched_s
            report.row(f"a host pool of {name} is pinned", f"{pinned_s:.2f} s")
        seconds_per_byte = (time.perf_counter() - began_s) / size_bytes
        del pool
        gc.collect()
