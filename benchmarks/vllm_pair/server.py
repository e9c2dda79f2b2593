"""One `vllm serve` process on 127.0.0.1: start, readiness, signals, figures, end.

The server is the leader of a process group, since vLLM runs its scheduler and its workers in processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final  # A connector's options are JSON.

import httpx

from tidekv.states.errors import TidekvError

HOST: Final = "127.0.0.1"
READY_S: Final = 300.0
END_S: Final = 20.0
MODEL: Final = "tiny"
ROOT: Final = Path(__file__).resolve().parents[2]
TICKS: Final = os.sysconf("SC_CLK_TCK")


class ServerFailed(TidekvError):
    """A server that ended, or that is not ready in time. The text has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What all servers of a comparison have in common, and the size of one server's KV cache."""

    model: Path
    kv_bytes: int
    block_size: int = 32
    max_model_len: int
    max_batched_tokens: int = 2048
    max_requests: int = 16
    dtype: str = "float32"
    further: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the arguments of `vllm serve`, without those of one server."""
        return [
            str(self.model),
            f"--served-model-name={MODEL}",
            f"--dtype={self.dtype}",
            "--enforce-eager",
            f"--kv-cache-memory-bytes={self.kv_bytes}",
            f"--block-size={self.block_size}",
            f"--max-model-len={self.max_model_len}",
            f"--max-num-batched-tokens={self.max_batched_tokens}",
            f"--max-num-seqs={self.max_requests}",
            "--generation-config=vllm",
            *self.further,
        ]


@dataclass
class Server:
    """A server by name, at a port of its own. `transfer`: its `--kv-transfer-config`, None for a plain vLLM."""

    name: str
    options: ServerOptions
    folder: Path
    transfer: Mapping[str, object] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _earlier: dict[str, float] = field(default_factory=dict)
    _earlier_cpu_s: float = 0.0

    def __post_init__(self) -> None:
        # The port stays with the server over restarts, so that clients and peers find it again.
        self.port = self.port or free_port()

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return f"http://{HOST}:{self.port}"

    @property
    def handover_address(self) -> str:
        """Address at which tidekv's prefill worker listens; only for one that has it."""
        assert self.transfer is not None, f"{self.name} is a plain vLLM"
        extra: Any = self.transfer["kv_connector_extra_config"]
        return str(extra["handover"]["listen"])

    @property
    def log(self) -> Path:
        """File with the output of all its starts."""
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start the process. It is not ready before `wait_ready` returns."""
        assert self._process is None, f"{self.name} runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *self.options.arguments()]
        command += [f"--host={HOST}", f"--port={self.port}"]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self._environment(), start_new_session=True
            )
        self.starts += 1

    async def wait_ready(self, limit_s: float = READY_S) -> None:
        """Wait until the server answers. Raises ServerFailed if it ends, or after `limit_s` seconds."""
        assert self._process is not None, f"{self.name} was not started"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), httpx.AsyncClient() as client:
                while self._process.poll() is None:
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(f"{self.url}/health", timeout=2.0)).is_success:
                            return
                    await asyncio.sleep(0.5)
        ending = self._process.poll()
        what = f"is not ready after {limit_s:g} s" if ending is None else f"ended with {ending}"
        lines = self.log.read_text(errors="replace").splitlines()[-30:]
        raise ServerFailed(f"server {self.name} {what}; the end of {self.log}:\n" + "\n".join(lines))

    async def end(self) -> None:
        """Terminate the server and wait for its end; kill what is left of it after END_S seconds. Idempotent."""
        if self._process is None:
            return
        await self._remember()
        group = self._process.pid
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
        """Kill the server with all its processes (SIGKILL)."""
        assert self._process is not None, f"{self.name} does not run"
        await self._remember()
        self._kill(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        assert self._process is not None, f"{self.name} does not run"
        os.killpg(self._process.pid, number)

    async def reset_prefix_cache(self, *, external: bool = False) -> None:
        """Empty its prefix cache, and with `external` make the connector forget, too."""
        async with httpx.AsyncClient() as client:
            query = "?reset_external=true" if external else ""
            (await client.post(f"{self.url}/reset_prefix_cache{query}", timeout=30.0)).raise_for_status()

    async def metrics(self) -> dict[str, float]:
        """Return its Prometheus samples, summed over all starts, as `read_samples` names them."""
        return add_samples(self._earlier, await self.gauges())

    async def gauges(self) -> dict[str, float]:
        """Return the samples of the present start alone."""
        async with httpx.AsyncClient() as client:
            page = await client.get(f"{self.url}/metrics", timeout=30.0)
        page.raise_for_status()
        return read_samples(page.text)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes, over all starts."""
        return self._earlier_cpu_s + (_group_cpu_s(self._process.pid) if self._process is not None else 0.0)

    async def _remember(self) -> None:
        """Add the figures of the present start to those of the earlier ones; a frozen server has none."""
        assert self._process is not None
        self._earlier_cpu_s += _group_cpu_s(self._process.pid)
        with contextlib.suppress(httpx.HTTPError):
            async with asyncio.timeout(5.0):
                self._earlier = await self.metrics()

    def _kill(self, group: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait(END_S)
        self._process = None

    def _environment(self) -> dict[str, str]:
        path = [str(ROOT / "src"), str(ROOT), *filter(None, [self.environment.get("PYTHONPATH")])]
        return {
            **os.environ,
            # One OpenMP thread per server: with more threads than free cores libgomp spins, and a server computes less
            # than a token a second.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": HOST,
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
            # UCX opens ports on all interfaces by default.
            "UCX_TLS": "tcp,sm,self",
            "UCX_NET_DEVICES": "lo",
            **self.environment,
            "PYTHONPATH": os.pathsep.join(path),
        }


def read_samples(page: str) -> dict[str, float]:
    """Parse a page in Prometheus's text format: sums by name, and by `name{source}` if there is such a label."""
    samples: dict[str, float] = defaultdict(float)
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        name, _, labels = name.partition("{")
        samples[name] += float(value)
        _, found, source = labels.partition('source="')
        if found:
            samples[name + "{" + source.partition('"')[0] + "}"] += float(value)
    return dict(samples)


def add_samples(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by name."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {*one, *other}}


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _group_cpu_s(group: int) -> float:
    """CPU seconds of the processes of a group, and of those that they have waited for."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += sum(map(int, fields[11:15]))
    return total / TICKS


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
