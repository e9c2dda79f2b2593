"""A server program on 127.0.0.1: start, readiness, signals, end. Each start is the leader of a process group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.ports import HOST, free_port
from benchmarks.servers.samples import add_samples
from tidekv.states.errors import TidekvError

READY_S: Final = 300.0
END_S: Final = 20.0
TICKS: Final = os.sysconf("SC_CLK_TCK")


class ServerFailed(TidekvError):
    """A server that ended, or that is not ready in time. The text has the end of its log."""


@dataclass
class Program(ABC):
    """A server by name, at a port of its own. Its log is in `folder`."""

    name: str
    folder: Path
    port: int = 0

    def __post_init__(self) -> None:
        # The port stays with the server over restarts, so that clients and peers find it again.
        self.port = self.port or free_port()
        self.serving = asyncio.Event()
        """Set from `wait_ready` on, until it is ended or killed."""
        self._earlier_cpu_s: dict[str, float] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """Return the program and its arguments."""

    def environment(self) -> Mapping[str, str]:
        """Return its environment variables."""
        return os.environ

    @abstractmethod
    async def is_ready(self) -> bool:
        """Ask whether it serves."""

    async def before_end(self, group: int) -> None:
        """Keep the figures of this start, while its process group still runs, although it may be frozen."""
        self._earlier_cpu_s = add_samples(self._earlier_cpu_s, self._group_cpu_s(group))

    @property
    def group(self) -> int | None:
        """Its process group; None if it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return f"http://{HOST}:{self.port}"

    @property
    def log(self) -> Path:
        """File with the output of all its starts."""
        return self.folder / f"{self.name}.log"

    def part_of(self, command: str) -> str:
        """Return the part that a process with this command line is of it; empty if parts do not matter."""
        return ""

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of its processes by part, over all starts."""
        present = self._group_cpu_s(self.group) if self.group is not None else {}
        return add_samples(self._earlier_cpu_s, present)

    def _group_cpu_s(self, group: int) -> dict[str, float]:
        """CPU seconds of the processes of a group by part, and of those that they have waited for."""
        spent: dict[str, float] = {}
        for process, fields in _processes(group):
            with contextlib.suppress(OSError):
                part = self.part_of((process / "cmdline").read_bytes().decode(errors="replace"))
                spent[part] = spent.get(part, 0.0) + sum(map(int, fields[11:15])) / TICKS
        return spent

    def start(self) -> None:
        """Start the process. It is not ready before `wait_ready` returns."""
        assert self._process is None, f"{self.name} runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment()),
                start_new_session=True,
            )

    async def wait_ready(self, limit_s: float = READY_S) -> None:
        """Wait until it serves. Raises ServerFailed if it ends, or after `limit_s` seconds."""
        assert self._process is not None, f"{self.name} was not started"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._process.poll() is None:
                    if await self.is_ready():
                        self.serving.set()
                        return
                    await asyncio.sleep(0.5)
        ending = self._process.poll()
        what = f"is not ready after {limit_s:g} s" if ending is None else f"ended with {ending}"
        lines = self.log.read_text(errors="replace").splitlines()[-30:]
        raise ServerFailed(f"server {self.name} {what}; the end of {self.log}:\n" + "\n".join(lines))

    async def end(self) -> None:
        """Terminate it and wait for its end; kill what is left of it after END_S seconds. Idempotent."""
        if self._process is None:
            return
        self.serving.clear()
        group = self._process.pid
        await self.before_end(group)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
            os.killpg(group, signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while _is_alive(group):
                    self._process.poll()
                    await asyncio.sleep(0.1)
        self._kill(group)

    async def kill(self) -> None:
        """Kill all its processes (SIGKILL)."""
        assert self._process is not None, f"{self.name} does not run"
        self.serving.clear()
        await self.before_end(self._process.pid)
        self._kill(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        assert self._process is not None, f"{self.name} does not run"
        os.killpg(self._process.pid, number)

    def _kill(self, group: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait(END_S)
        self._process = None


def _is_alive(group: int) -> bool:
    """Whether a process of a group runs. One that has ended stays in its group until its parent has waited for it."""
    return any(fields[0] != "Z" for _, fields in _processes(group))


def _processes(group: int) -> Iterator[tuple[Path, list[str]]]:
    """The folders in /proc of the processes of a group, and the fields of their stat, from the state on."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                yield stat.parent, fields
