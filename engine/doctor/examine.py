"""All checks at once: those that only read, and those in child processes, each until a deadline."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tidekv.engine.doctor.finding import Finding
from tidekv.engine.doctor.machine import machine_findings

DEADLINE_S: Final = 30.0
KILLED_S: Final = 1.0


def probe_commands(storage: str | None) -> dict[str, list[str]]:
    """What is run in processes of its own, by check. Without a directory storage is not looked at."""
    names: dict[str, tuple[str, ...]] = {"nixl": (), "ucx": (), "gpu": (), "event loop": ()}
    if storage is not None:
        names["storage"] = (storage,)
    return {
        name: [sys.executable, "-m", "tidekv.engine.doctor.probe", name, *arguments]
        for name, arguments in names.items()
    }


def examine(*, storage: str | None = None, deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Run every check and return what they found. Returns within the deadline and a second, whatever hangs."""
    return [*machine_findings(), *run_probes(probe_commands(storage), deadline_s=deadline_s)]


def run_probes(commands: Mapping[str, Sequence[str]], *, deadline_s: float) -> list[Finding]:
    """Run commands one after the other, so that they do not slow each other down; one that hangs is killed."""
    ends_at_s = time.monotonic() + deadline_s
    found: list[Finding] = []
    for check, command in commands.items():
        found += _answer(check, command, max(ends_at_s - time.monotonic(), 0.0))
    return found


def _answer(check: str, command: Sequence[str], timeout_s: float) -> list[Finding]:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        said, complained = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.communicate(timeout=KILLED_S)
        except subprocess.TimeoutExpired:
            # It is stuck in the kernel, on a disk or a driver; it ends when that does, and we do not wait.
            for pipe in (child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()
        advice = "Look at what it waits for: a driver, a network file system. Workers would hang there, too."
        return [Finding(check, "bad", f"gave no answer within {timeout_s:.0f} s", advice)]
    except BaseException:
        child.kill()  # Ctrl-C: the doctor leaves nothing behind.
        raise
    try:
        return msgspec.json.decode(said.strip().rpartition(b"\n")[2], type=list[Finding])
    except msgspec.MsgspecError:
        lines = complained.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        found = f"ended with exit code {child.returncode}: {lines[-1]}"
        return [Finding(check, "bad", found, "Run again; if it stays, reinstall tidekv and what it needs.")]
