"""Waiting for the proven death of a process on this host, after which memory that it may have written can be reused.

A missed heartbeat proves nothing, and neither does a closed connection: a stopped process keeps its writes and
continues them later. What proves death is that the kernel says so.
"""

from __future__ import annotations

import asyncio
import os

from tidekv.transports import process
from tidekv.transports.control.wire import ProcessMark

LOOK_INTERVAL_S = 0.1


def is_judged_here(mark: ProcessMark) -> bool:
    """Tell whether the kernel can tell us of this process's end: another one of our boot and our pid namespace."""
    ours = process.this_process()
    return bool(mark.host) and mark.host == ours.host and mark.started > 0 and mark.pid not in (0, ours.pid)


async def wait_dead(mark: ProcessMark) -> None:
    """Return once a process of this host has ended; never before. A stopped process has not. May be cancelled."""
    try:
        descriptor = os.pidfd_open(mark.pid)
    except ProcessLookupError:
        return
    except OSError:
        # No pidfd here (an old kernel, a sandbox's filter): look at /proc now and then.
        while not process.is_gone(mark):  # noqa: ASYNC110  # Nothing could set an event: the process is another one.
            await asyncio.sleep(LOOK_INTERVAL_S)
        return
    try:
        # The descriptor pins whatever process has the pid now; if that is another one, ours is gone already.
        if not process.is_gone(mark):
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
