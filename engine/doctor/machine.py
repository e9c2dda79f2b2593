"""Checks that only read small files and limits of this process. `root` is / except in tests."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from tidekv.engine.config.memory import cpu_limit, host_memory
from tidekv.engine.doctor.finding import Finding, in_bytes
from tidekv.transports.nixl.rdma_module import rdma_devices

GIB: Final = 1 << 30
LOCKED_WANTED_BYTES: Final = 8 * GIB
FILES_WANTED: Final = 8192
SHARED_WANTED_BYTES: Final = GIB
PACKAGES: Final = ("tidekv", "torch", "numpy", "nixl", "uvloop", "msgspec", "xxhash", "transitions")
STEADY_CLOCKS: Final = ("tsc", "kvm-clock", "arch_sys_counter", "xen", "hyperv_clocksource_tsc_page")
LISTENING: Final = "0A"  # TCP_LISTEN in /proc/net/tcp.
CLOCK_UNSYNCHRONIZED: Final = 5  # TIME_ERROR of adjtimex.


def machine_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Check versions, CPUs, memory, limits, shared memory, clocks and devices. Takes milliseconds."""
    yield versions()
    yield cpus(root)
    yield memory(root)
    has_rdma = any(rdma_devices(root))
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_rdma=has_rdma)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield shared_memory(root)
    yield same_host_copies(root)
    yield rdma(root, environment=os.environ)
    yield clock(root, state=_clock_state())


def versions() -> Finding:
    """List the versions of tidekv and its main dependencies."""
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        advised = (
            "." if "tidekv" in missing else "tidekv"
        )  # In a checkout; no index has it. Installed, it adds the rest.
        return Finding("versions", "bad", f"not installed: {', '.join(missing)}", f"Run: pip install {advised}")
    return Finding("versions", "ok", ", ".join(found))


def cpus(root: Path) -> Finding:
    """Check the number of CPUs: a worker needs one for its loop and part of another for its threads.

    A quota is worse than fewer CPUs, because it stops all threads at once.
    """
    usable, quota = len(os.sched_getaffinity(0)), cpu_limit(root)
    found = f"{usable} usable" + (f", limited to {quota:g} by a control group" if quota is not None else "")
    if min(usable, quota or usable) < 2:
        return Finding("cpus", "warn", found, "Give a worker at least two CPUs: its loop and its copies share them.")
    if quota is not None and quota < usable:
        advice = "Pin CPUs to the worker instead of a quota: when that is used up, its event loop stands still."
        return Finding("cpus", "warn", found, advice)
    return Finding("cpus", "ok", found)


def memory(root: Path) -> Finding:
    """Check the memory available for pools on the host."""
    there = host_memory(root)
    found = f"{in_bytes(there.free_bytes)} of {in_bytes(there.total_bytes)} free, bound by {there.bound_by}"
    if there.free_bytes < GIB:
        return Finding("memory", "warn", found, "Free memory, or raise the limit: less than 1 GiB is left for L2.")
    return Finding("memory", "ok", found)


def locked_memory(limit: int, *, has_rdma: bool) -> Finding:
    """Check `ulimit -l`: pinned pools and RDMA lock memory."""
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    found = f"ulimit -l is {in_bytes(limit)}"
    if limit >= LOCKED_WANTED_BYTES:
        return Finding("locked memory", "ok", found)
    advice = "Raise it (LimitMEMLOCK=infinity, docker run --ulimit memlock=-1): RDMA cannot register more than that."
    return Finding("locked memory", "bad" if has_rdma else "warn", found, advice)


def open_files(soft: int, hard: int) -> Finding:
    """Check `ulimit -n`: each link, storage file and server connection is an open file."""
    found = f"ulimit -n is {soft} (at most {hard})"
    if soft >= FILES_WANTED or soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", found)
    advice = f"Raise it to {FILES_WANTED} or more (LimitNOFILE=, docker run --ulimit nofile=): links and files add up."
    return Finding("open files", "bad" if soft < 256 else "warn", found, advice)


def shared_memory(root: Path) -> Finding:
    """Check /dev/shm, by which UCX moves data between processes of one host."""
    folder = root / "dev/shm"
    if not folder.is_dir():
        return Finding("shared memory", "warn", "there is no /dev/shm", "Mount one: same-host transfers go by TCP.")
    room = os.statvfs(folder)
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"/dev/shm has {in_bytes(free)} of {in_bytes(size)} free"
    if size < SHARED_WANTED_BYTES:
        advice = "Make it larger (docker run --shm-size=4g; an emptyDir of medium Memory): 64 MiB is Docker's default."
        return Finding("shared memory", "warn", found, advice)
    return Finding("shared memory", "ok", found)


def same_host_copies(root: Path) -> Finding:
    """Check cross-memory attach, by which a process writes into another one of the same user."""
    scope = _first_line(root / "proc/sys/kernel/yama/ptrace_scope")
    if scope in ("", "0"):
        return Finding("same-host copies", "ok", "cross-memory attach is allowed")
    advice = "For prefill and decode on one host: sysctl kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE."
    return Finding("same-host copies", "warn", f"kernel.yama.ptrace_scope is {scope}", advice)


def rdma(root: Path, *, environment: Mapping[str, str]) -> Finding:
    """Check for RDMA between hosts, and list the UCX settings of the environment."""
    devices = rdma_devices(root)
    variables = ", ".join(f"{name}={environment[name]}" for name in sorted(environment) if name.startswith("UCX_"))
    found = (f"devices: {', '.join(devices)}" if devices else "no RDMA device: UCX uses TCP and shared memory") + (
        f"; {variables}" if variables else ""
    )
    if devices and not (root / "dev/infiniband").is_dir():
        advice = "Give the container /dev/infiniband: the host has RDMA devices that it cannot open."
        return Finding("rdma", "bad", found, advice)
    if not devices:
        return Finding("rdma", "warn", found, "Fine on one host; between hosts use RDMA, TCP is far slower.")
    return Finding("rdma", "ok", found)


def listening(root: Path = Path("/"), *, pid: int | str = "self") -> list[str]:
    """Addresses of the TCP sockets that a process listens on, as host:port."""
    process = root / "proc" / str(pid)
    targets = set()
    for descriptor in (process / "fd").iterdir():
        try:
            targets.add(os.readlink(descriptor))
        except OSError:
            continue  # It was closed meanwhile.
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (process / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue  # A kernel without IPv6 has no such table.
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in targets:
                found.append(_address(fields[1]))
    return sorted(found)


def data_plane(addresses: list[str], *, environment: Mapping[str, str]) -> Finding:
    """Check the addresses on which UCX opens ports if a worker listens on an address of the network."""
    devices = environment.get("UCX_NET_DEVICES", "")
    chosen = f"UCX_NET_DEVICES={devices}" if devices else "UCX_NET_DEVICES is not set"
    found = f"{chosen}; UCX listens on {', '.join(addresses) or 'no TCP port'}"
    if devices or all(ip_address(address.rpartition(":")[0].strip("[]")).is_loopback for address in addresses):
        return Finding("data plane", "ok", found)
    advice = (
        "Workers on loopback use lo only. For others set UCX_NET_DEVICES to the devices of a private network: a "
        "program that reaches these ports reads and writes the worker's memory, without any secret."
    )
    return Finding("data plane", "warn", f"{found} if a worker is on the network", advice)


def _address(hexadecimal: str) -> str:
    """An address of /proc/net/tcp, whose words are in the byte order of this machine."""
    packed, _, port = hexadecimal.partition(":")
    words = bytes.fromhex(packed)
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    host = str(ip_address(words))
    return f"[{host}]:{int(port, 16)}" if len(words) == 16 else f"{host}:{int(port, 16)}"


def clock(root: Path, *, state: int) -> Finding:
    """Check the clocks. Deadlines read the monotonic one, which must be cheap; events and logs the wall clock."""
    source = _first_line(root / "sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    if source not in (*STEADY_CLOCKS, "unknown"):
        advice = (
            "Boot with a better clock source (tsc): each reading of this one is a system call of about a microsecond."
        )
        return Finding("clock", "warn", f"clock source {source}", advice)
    if state == CLOCK_UNSYNCHRONIZED:
        advice = "Run chrony or another time service: otherwise times in journals of several hosts do not compare."
        return Finding("clock", "warn", f"clock source {source}; the wall clock is not synchronized", advice)
    return Finding("clock", "ok", f"clock source {source}")


def _clock_state() -> int:
    """Return whether the kernel considers the wall clock synchronized. Changes nothing and needs no privileges."""
    question = ctypes.create_string_buffer(512)  # A struct timex with modes = 0.
    return int(ctypes.CDLL(None).adjtimex(question))


def _first_line(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""
