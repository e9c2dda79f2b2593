"""How much memory there is for pools: what the kernel has left, within every control group that bounds this process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidekv.engine.config.cgroups import Group, groups, number_in, stat_in

KIB = 1024


class Memory(msgspec.Struct, frozen=True):
    """Bytes that there are, bytes that are free, and what sets the bound, in words."""

    total_bytes: int
    free_bytes: int
    bound_by: str


def host_memory(root: Path = Path("/")) -> Memory:
    """Return the memory of this machine or of the tightest control group. Memory of clean files counts as free."""
    meminfo = root / "proc/meminfo"
    found = Memory(
        total_bytes=stat_of(meminfo, "MemTotal:"), free_bytes=stat_of(meminfo, "MemAvailable:"), bound_by="the machine"
    )
    for group in groups("memory", root):
        limit, used = _usage(group)
        if limit is None:
            continue
        free = max(limit - used, 0)
        if free < found.free_bytes or limit < found.total_bytes:
            found = Memory(
                total_bytes=min(limit, found.total_bytes),
                free_bytes=min(free, found.free_bytes),
                bound_by=f"control group {group.directory}",
            )
    return found


def device_memory(device: str) -> Memory:
    """Return the memory of a CUDA device, or of this machine for "cpu"."""
    if device == "cpu":
        return host_memory()
    import torch

    free, total = torch.cuda.mem_get_info(torch.device(device))
    return Memory(total_bytes=total, free_bytes=free, bound_by=device)


def stat_of(meminfo: Path, name: str) -> int:
    """Return one line of /proc/meminfo in bytes; 0 if it is not there."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith(name)), 0)


def _usage(group: Group) -> tuple[int | None, int]:
    """Return limit and use of a group. Its clean file pages are given up on demand, and are not use."""
    if group.version == 2:
        limit, used = number_in(group.directory / "memory.max"), number_in(group.directory / "memory.current")
        cached = stat_in(group.directory / "memory.stat", "inactive_file")
    else:
        limit = number_in(group.directory / "memory.limit_in_bytes")
        used = number_in(group.directory / "memory.usage_in_bytes")
        cached = stat_in(group.directory / "memory.stat", "total_inactive_file")
    return limit, max((used or 0) - cached, 0)
