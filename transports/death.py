"""Proof that a process on this host is dead, after which memory that it may have written can be reused.

A missed heartbeat proves nothing, and neither does a closed connection: a stopped process keeps its writes and
continues them later. What proves death is that the kernel says so. A process is named by its pid, by the boot and the
pid namespace in which that pid means something, and by its start time, since pids are used again.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import NamedTuple

LOOK_INTERVAL_S = 0.1


class ProcessIdentity(NamedTuple):
    """Names one process for ever; `start` is its start time in clock ticks since boot, 0 where that is not known."""

    pid: int
    boot_id: str
    start: int


def process_identity() -> ProcessIdentity:
    """Tell who this process is, for a peer's `wait_dead`.

    `boot_id` holds the pid namespace too, and is empty where /proc does not tell: two containers of one host must not
    look up each other's pids, since a pid that does not exist *here* would pass for a dead process.
    """
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ProcessIdentity(pid=pid, boot_id="", start=0)
    found = _start_and_state(pid)
    return ProcessIdentity(pid=pid, boot_id=f"{boot}/{namespace}", start=0 if found is None else found[0])


def is_of_this_host(identity: ProcessIdentity) -> bool:
    """Tell whether the kernel here can judge this process: same boot of the same machine, same pid namespace."""
    return bool(identity.boot_id) and identity.start > 0 and identity.boot_id == process_identity().boot_id


def is_alive(identity: ProcessIdentity) -> bool:
    """Tell whether a process of this host runs, or is stopped, and may run on."""
    found = _start_and_state(identity.pid)
    if found is None or found[0] != identity.start:
        return False
    if found[1] not in "ZX":
        return True
    # A zombie runs no code and has no memory; but where only its main thread has ended, others may still run.
    try:
        return len(os.listdir(f"/proc/{identity.pid}/task")) > 1
    except FileNotFoundError:
        return False


async def wait_dead(identity: ProcessIdentity) -> None:
    """Return once a process of this host has ended; never before. A stopped process has not. May be cancelled."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    except OSError:
        # No pidfd here (an old kernel, a sandbox's filter): look at /proc now and then.
        while is_alive(identity):  # noqa: ASYNC110  # Nothing could set an event: the process is another one.
            await asyncio.sleep(LOOK_INTERVAL_S)
        return
    try:
        # The descriptor pins whatever process has the pid now; if that is another one, ours is gone already.
        if is_alive(identity):
            await _wait_readable(descriptor)
    finally:
        os.close(descriptor)


async def _wait_readable(descriptor: int) -> None:
    """Wait until a pidfd is readable: its process, with all threads, has ended."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _start_and_state(pid: int) -> tuple[int, str] | None:
    """Read a process's start time in ticks and its state letter; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in parentheses and may hold anything, so the fields are counted from the last one.
    fields = text.rpartition(")")[2].split()
    return int(fields[19]), fields[0]
