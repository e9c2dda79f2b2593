"""Proof that a process of this machine has ended, after which memory that it may have written can be reused.

A pid alone proves nothing, since the kernel reuses pids, and a pid of another process namespace has no meaning here:
hence the mark. A missed heartbeat or a closed connection proves nothing either: a stopped process keeps its writes and
continues them later. Only the kernel's report is proof; without it a process is not considered dead.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tidekv.transports.wire import ProcessMark


def this_process() -> ProcessMark:
    """Return the mark of the calling process."""
    pid = os.getpid()
    return ProcessMark(host=_host(), pid=pid, started=_started(pid) or 0)


def is_gone(mark: ProcessMark) -> bool:
    """True if the marked process ran on this host and has ended; False if it runs, or if that is unknown here."""
    if not mark.host or mark.host != _host() or not mark.started:
        return False
    return _started(mark.pid) != mark.started


def _host() -> str:
    """Boot id of the machine and process namespace; empty if /proc does not show them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Start time in kernel ticks; None if there is no such process, or only its zombie, which writes no more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may contain blanks and brackets: the fields start after its last closing bracket.
    fields = text[text.rindex(")") + 2 :].split()
    # A zombie with other running threads is alive: only its first thread has returned. Field 17 is the thread count.
    return None if fields[0] in ("Z", "X", "x") and int(fields[17]) <= 1 else int(fields[19])


LOOK_INTERVAL_S = 0.1


def is_observable(mark: ProcessMark) -> bool:
    """Whether this kernel can report the end of the process: another process of our boot and pid namespace."""
    ours = this_process()
    return bool(mark.host) and mark.host == ours.host and mark.started > 0 and mark.pid not in (0, ours.pid)


async def wait_dead(mark: ProcessMark) -> None:
    """Return once a process of this host has ended, never before. A stopped process has not ended. May be cancelled."""
    try:
        descriptor = os.pidfd_open(mark.pid)
    except ProcessLookupError:
        return
    except OSError:
        # No pidfd here (an old kernel, a sandbox's filter): poll /proc.
        while not is_gone(mark):  # noqa: ASYNC110  # No event exists: another process ends.
            await asyncio.sleep(LOOK_INTERVAL_S)
        return
    try:
        # The descriptor refers to the process that has the pid now; if that is a later one, the marked one is gone.
        if not is_gone(mark):
            await _wait_readable(descriptor)
    finally:
        os.close(descriptor)


async def _wait_readable(descriptor: int) -> None:
    """Wait until a pidfd is readable: its process has ended, with all threads."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
