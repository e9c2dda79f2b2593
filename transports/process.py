"""Whether another process of this machine still lives: the proof of death that lets a quarantined page go.

A pid alone proves nothing, since it may have been given away again, and a pid of another process namespace says
nothing at all: hence the mark. Must never guess: what cannot be proven is not dead.

Waiting for the proven death of a process on this host, after which memory that it may have written can be reused.

A missed heartbeat proves nothing, and neither does a closed connection: a stopped process keeps its writes and
continues them later. What proves death is that the kernel says so.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tidekv.transports.control.wire import ProcessMark


def this_process() -> ProcessMark:
    """The mark of the calling process."""
    pid = os.getpid()
    return ProcessMark(host=_host(), pid=pid, started=_started(pid) or 0)


def is_gone(mark: ProcessMark) -> bool:
    """True when the marked process ran on this host and runs no more; False when it runs, or nobody here can know."""
    if not mark.host or mark.host != _host() or not mark.started:
        return False
    return _started(mark.pid) != mark.started


def _host() -> str:
    """Boot of the machine and process namespace; empty where /proc does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Start time in kernel ticks; None where there is no such process, or only its zombie, which writes no more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command may hold anything, blanks and brackets too: the fields start after its last bracket.
    fields = text[text.rindex(")") + 2 :].split()
    # A zombie whose other threads still run is alive: its first thread has merely returned.
    return None if fields[0] in ("Z", "X", "x") and int(fields[17]) <= 1 else int(fields[19])


LOOK_INTERVAL_S = 0.1


def is_judged_here(mark: ProcessMark) -> bool:
    """Tell whether the kernel can tell us of this process's end: another one of our boot and our pid namespace."""
    ours = this_process()
    return bool(mark.host) and mark.host == ours.host and mark.started > 0 and mark.pid not in (0, ours.pid)


async def wait_dead(mark: ProcessMark) -> None:
    """Return once a process of this host has ended; never before. A stopped process has not. May be cancelled."""
    try:
        descriptor = os.pidfd_open(mark.pid)
    except ProcessLookupError:
        return
    except OSError:
        # No pidfd here (an old kernel, a sandbox's filter): look at /proc now and then.
        while not is_gone(mark):  # noqa: ASYNC110  # Nothing could set an event: the process is another one.
            await asyncio.sleep(LOOK_INTERVAL_S)
        return
    try:
        # The descriptor pins whatever process has the pid now; if that is another one, ours is gone already.
        if not is_gone(mark):
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
