"""Memory available for pools: the kernel's free memory within every control group that bounds this process.

The control groups that bound this process, of version 1 or 2, read from files. `root` is / except in tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

UNLIMITED = 1 << 60
"""Version 1 writes a number near 2**63 for no limit."""


class ControlGroup(NamedTuple):
    """One control group that contains this process, directly or by a child group."""

    directory: Path
    version: Literal[1, 2]


def groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the groups of this process for one controller, innermost first; nothing if there are none."""
    mounted = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from (ControlGroup(directory, 2) for directory in _upwards(mounted, path))
        elif controller in controllers.split(","):
            for base in (mounted / controller, mounted / controllers):
                if base.is_dir():
                    yield from (ControlGroup(directory, 1) for directory in _upwards(base, path))
                    break


def number_in(file: Path) -> int | None:
    """Return the number in a file of a group; None if there is no file or no limit."""
    text = next(iter(_lines(file)), "").strip()
    if not text.isdigit() or int(text) >= UNLIMITED:
        return None
    return int(text)


def stat_in(file: Path, name: str) -> int:
    """Return one number of a file of names and numbers, 0 if it is not there."""
    for line in _lines(file):
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return the number of CPUs that the groups allow, the minimum of all levels; None: no limit."""
    least: float | None = None
    for group in groups("cpu", root):
        if group.version == 2:
            quota, _, period = next(iter(_lines(group.directory / "cpu.max")), "max").partition(" ")
        else:
            quota = next(iter(_lines(group.directory / "cpu.cfs_quota_us")), "-1")
            period = next(iter(_lines(group.directory / "cpu.cfs_period_us")), "")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cpus = int(quota) / int(period)
            least = cpus if least is None else min(least, cpus)
    return least


def _upwards(base: Path, path: str) -> Iterator[Path]:
    """Yield the directory of a group and its parents, up to the mount point of the hierarchy.

    In a container the path may be one of the host, which does not exist: then the mounted group is the container's own.
    """
    parts = [part for part in path.split("/") if part]
    if ".." in parts or not base.joinpath(*parts).is_dir():
        parts = []
    for count in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:count])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # Not mounted, not Linux, or not readable: no known bound.


KIB = 1024


class Memory(msgspec.Struct, frozen=True):
    """Total bytes, free bytes, and a description of what sets the bound."""

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


def stat_of(meminfo: Path, name: str) -> int:
    """Return one line of /proc/meminfo in bytes; 0 if it is not there."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith(name)), 0)


def _usage(group: ControlGroup) -> tuple[int | None, int]:
    """Return limit and use of a group. Its clean file pages are reclaimed on demand, and do not count as use."""
    if group.version == 2:
        limit, used = number_in(group.directory / "memory.max"), number_in(group.directory / "memory.current")
        cached = stat_in(group.directory / "memory.stat", "inactive_file")
    else:
        limit = number_in(group.directory / "memory.limit_in_bytes")
        used = number_in(group.directory / "memory.usage_in_bytes")
        cached = stat_in(group.directory / "memory.stat", "total_inactive_file")
    return limit, max((used or 0) - cached, 0)
