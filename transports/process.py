"""Whether another process of this machine still lives: the proof of death that lets a quarantined page go.

A pid alone proves nothing, since it may have been given away again, and a pid of another process namespace says
nothing at all: hence the mark. Must never guess: what cannot be proven is not dead.
"""

from __future__ import annotations

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
