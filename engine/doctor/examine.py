"""Runs all checks: those that only read in this process, the others in child processes with a deadline."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tidekv.engine.doctor.finding import Finding
from tidekv.engine.doctor.machine import machine_findings
from tidekv.engine.doctor.pools import host_pools

DEADLINE_S: Final = 30.0
KILLED_S: Final = 1.0


def probe_commands(storage: str | None) -> dict[str, list[str]]:
    """Commands of the checks that run in child processes, by check. `storage` is checked only with a directory."""
    names: dict[str, tuple[str, ...]] = {"nixl": (), "ucx": (), "gpu": (), "event loop": ()}
    if storage is not None:
        names["storage"] = (storage,)
    return {
        name: [sys.executable, "-m", "tidekv.engine.doctor.probe", name, *arguments]
        for name, arguments in names.items()
    }


def examine(*, storage: str | None = None, deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Run every check and return the findings. Returns within the deadline plus a second, even if a check hangs."""
    return [*machine_findings(), host_pools(), *run_probes(probe_commands(storage), deadline_s=deadline_s)]


def run_probes(commands: Mapping[str, Sequence[str]], *, deadline_s: float) -> list[Finding]:
    """Run commands one after the other, so that they do not slow each other down. One that hangs is killed."""
    ends_at_s = time.monotonic() + deadline_s
    found: list[Finding] = []
    for check, command in commands.items():
        left_s = ends_at_s - time.monotonic()
        if left_s > 0:
            found += _answer(check, command, left_s)
        else:
            advice = "Run it again with a longer --deadline-s; look first at what the checks before it found."
            found.append(Finding(check, "warn", f"not run: the checks before it took all {deadline_s:.0f} s", advice))
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
            # The child is stuck in the kernel, on a disk or a driver, and dies when that returns. Do not wait for it.
            for pipe in (child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()
        advice = "Look at what it waits for: a driver, a network file system. Workers would hang there, too."
        return [Finding(check, "bad", f"gave no answer within {timeout_s:.0f} s", advice)]
    except BaseException:
        child.kill()  # Ctrl-C: leave no child behind.
        raise
    try:
        return msgspec.json.decode(said.strip().rpartition(b"\n")[2], type=list[Finding])
    except msgspec.MsgspecError:
        lines = complained.decode(errors="replace").strip().splitlines() or ["no output"]
        found = f"ended with exit code {child.returncode}: {lines[-1]}"
        return [Finding(check, "bad", found, "Run it again; if it still fails, reinstall tidekv and its dependencies.")]
