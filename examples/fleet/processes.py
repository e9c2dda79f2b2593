"""The processes of a fleet: a store, prefill and decode workers, and a router of the decode workers.

Everything listens on loopback. What is started here ends with `Fleet.close`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Literal

import httpx
import msgspec

from benchmarks.ports import free_port
from examples.service.options import PrefillOptions
from tidekv import InvalidConfig

START_S = 300.0
"""A process that starts again has the other ones beside it: on two busy cores that takes minutes."""
STOP_S = 60.0
HOST = "127.0.0.1"
PAGE_TOKENS = 16
MODEL = "tidekv-random-llama"
Router = Literal["vllm-router", "dynamo"]
PACKAGES: dict[Router, str] = {"vllm-router": "vllm-router==0.1.17", "dynamo": "ai-dynamo-runtime==1.6.1"}


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a fleet. `environment` has the router; `logs` is a directory for what the processes print.

    The conversations of 30 users have 1,100 pages: more than the memory of one decode worker, fewer than that of all.
    Device memory has room for the requests that are served at the same time.
    """

    router: Router
    environment: Path
    logs: Path
    prefills: int = 2
    decodes: int = 3
    device_pages: int = 192
    host_pages: int = 640
    store: bool = True


class Member:
    """One process, which can be killed, stopped in order, and started again with the same command."""

    def __init__(self, name: str, command: Sequence[str], ready_url: str, log: Path) -> None:
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self.cpu_s = 0.0
        """Seconds of CPU that its ended processes used while they served: from ready to the signal that ended them."""
        self._cpu_at_ready_s = 0.0
        self._command = command
        self._ready_url = ready_url
        self._log = log

    async def start(self) -> None:
        """Start it, and wait until it serves. Raises InvalidConfig, which names its log, if it does not."""
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            async with asyncio.timeout(START_S):
                while not await self._is_ready():
                    if self.process.returncode is not None:
                        raise InvalidConfig(f"{self.name} ended with {self.process.returncode}: see {self._log}")
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise InvalidConfig(f"{self.name} did not serve within {START_S:.0f} s: see {self._log}") from None
        self._cpu_at_ready_s = _cpu_s(self.process.pid)

    async def kill(self) -> None:
        """End it without warning, as a lost machine does."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Ask it to end; a decode worker first answers what it has accepted."""
        try:
            async with asyncio.timeout(STOP_S):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self.kill()

    async def _end(self, number: signal.Signals) -> None:
        assert self.process is not None, f"{self.name} was not started"
        used_s = _cpu_s(self.process.pid)
        self.cpu_s += max(0.0, used_s - self._cpu_at_ready_s)
        self._cpu_at_ready_s = used_s
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        await self.process.wait()

    async def _is_ready(self) -> bool:
        if self._ready_url.startswith("tcp:"):
            try:
                _, writer = await asyncio.open_connection(HOST, int(self._ready_url.removeprefix("tcp:")))
            except OSError:
                return False
            writer.close()
            return True
        async with httpx.AsyncClient(timeout=2.0) as http:
            try:
                return (await http.get(self._ready_url)).status_code == httpx.codes.OK
            except httpx.HTTPError:
                return False


@dataclass(frozen=True)
class Endpoints:
    """Addresses of a decode worker."""

    url: str
    events: str
    replay: str


class Fleet:
    """All members. `url` is the router's; `workers` are the addresses of the decode workers."""

    def __init__(self, options: FleetOptions, policy: str) -> None:
        """Choose free ports; nothing is started. Raises InvalidConfig if a program is not installed."""
        self._ports = iter(free_port() for _ in range(3 + options.prefills + 3 * options.decodes))
        self._logs = options.logs / policy
        self._logs.mkdir(parents=True, exist_ok=True)
        self._is_dynamo = options.router == "dynamo"
        self.store = self._make_store() if options.store else None
        prefills = [f"{HOST}:{next(self._ports)}" for _ in range(options.prefills)]
        self.prefills = [self._prefill(number, address) for number, address in enumerate(prefills)]
        self.workers = [
            Endpoints(f"http://{HOST}:{next(self._ports)}", self._tcp(), self._tcp()) for _ in range(options.decodes)
        ]
        self.decodes = [self._decode(number, worker, prefills, options) for number, worker in enumerate(self.workers)]
        self.url = f"http://{HOST}:{next(self._ports)}"
        self.router: Member | None = None
        if not self._is_dynamo:
            self.router = self._member("router", self._vllm_router(options, policy), f"{self.url}/health")
        elif policy == "kv_aware":
            port = self.url.rpartition(":")[2]
            command = [options.environment / "bin" / "python", "-m", "dynamo.select_service", "--port", port]
            self.router = self._member("router", [str(part) for part in command], f"{self.url}/health")
        self._started: list[Member] = []

    @property
    def members(self) -> list[Member]:
        """All processes."""
        optional = [one for one in (self.store, self.router) if one is not None]
        return [*self.prefills, *self.decodes, *optional]

    def _member(self, name: str, command: Sequence[str], ready_url: str) -> Member:
        return Member(name, command, ready_url, self._logs / name)

    def _tcp(self) -> str:
        return f"tcp://{HOST}:{next(self._ports)}"

    def _make_store(self) -> Member:
        server = which("redis-server") or which("valkey-server")
        if server is None:
            raise InvalidConfig("the store needs redis-server or valkey-server; install one, or give --no-store")
        self._store_port = next(self._ports)
        command = [server, "--port", str(self._store_port), "--bind", HOST, "--save", "", "--appendonly", "no"]
        return self._member("store", [*command, "--dir", str(self._logs)], f"tcp:{self._store_port}")

    def _prefill(self, number: int, address: str) -> Member:
        options = PrefillOptions(listen=address, name=f"prefill-{number}", page_size=PAGE_TOKENS)
        command = [sys.executable, "-m", "examples.service.prefill", msgspec.json.encode(options).decode()]
        return self._member(options.name, command, f"tcp:{address.rpartition(':')[2]}")

    def _decode(self, number: int, worker: Endpoints, prefills: Sequence[str], options: FleetOptions) -> Member:
        name = f"decode-{number}"
        command = [sys.executable, "-m", "examples.service", "--name", name, "--page-size", str(PAGE_TOKENS)]
        command += ["--port", worker.url.rpartition(":")[2], "--kv-events", worker.events]
        command += ["--kv-events-replay", worker.replay, "--router", options.router]
        command += [part for address in prefills for part in ("--prefill", address)]
        command += ["--device-pages", str(options.device_pages), "--host-pages", str(options.host_pages)]
        if self.store is not None:
            command += ["--storage", f"redis://{HOST}:{self._store_port}"]
        return self._member(name, command, f"{worker.url}/health")

    def _vllm_router(self, options: FleetOptions, policy: str) -> list[str]:
        command = [str(options.environment / "bin" / "vllm-router"), "--host", HOST, "--policy", policy]
        command += ["--port", self.url.rpartition(":")[2]]
        command += ["--prometheus-host", HOST, "--prometheus-port", str(next(self._ports))]
        command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        command += ["--health-success-threshold", "1", "--health-check-timeout-secs", "5"]
        if policy == "kv_aware":
            command += ["--kv-event-block-size", str(PAGE_TOKENS), "--kv-event-model", MODEL]
            for worker in self.workers:
                command += ["--kv-event-source", f"{worker.url}={worker.events}"]
                command += ["--kv-event-replay-source", f"{worker.url}={worker.replay}"]
        return [*command, "--worker-urls", *(worker.url for worker in self.workers)]

    async def __aenter__(self) -> Fleet:
        """Start everything; the router last."""
        try:
            await self._start([*self.prefills, *([] if self.store is None else [self.store])])
            await self._start(self.decodes)
            if self.router is not None:
                await self._start([self.router])
                if self._is_dynamo:
                    await self._register()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End everything."""
        await self.close()

    async def close(self) -> None:
        """End everything that was started; the router first. Idempotent."""
        while self._started:
            await self._started.pop().stop()

    async def _register(self) -> None:
        """Tell Dynamo's selection service the workers, numbered from 1, and where they publish KV events."""
        async with httpx.AsyncClient(base_url=self.url, timeout=START_S) as http:
            for number, worker in enumerate(self.workers, start=1):
                about = {
                    "worker_id": number,
                    "model_name": MODEL,
                    "endpoint": worker.url,
                    "block_size": PAGE_TOKENS,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "kv_events_endpoints": {"0": worker.events},
                    "replay_endpoint": worker.replay,
                }
                (await http.post("/workers", json=about)).raise_for_status()

    async def _start(self, members: Sequence[Member]) -> None:
        self._started += members
        results = await asyncio.gather(*(member.start() for member in members), return_exceptions=True)
        self._started = [member for member in self._started if member.process is not None]
        for error in results:
            if isinstance(error, BaseException):
                raise error


def find_environment(router: Router, given: Path | None) -> Path:
    """Return the environment that has the router. Raises InvalidConfig, which says how to install it."""
    environment = given or Path(__file__).resolve().parents[2] / ".venv-routers"
    python = environment / "bin" / "python"
    if router == "dynamo":
        is_there = any(environment.glob("lib/python3*/site-packages/dynamo/select_service/__main__.py"))
    else:
        is_there = os.access(environment / "bin" / router, os.X_OK)
    if not (is_there and os.access(python, os.X_OK)):
        raise InvalidConfig(
            f"{environment} has no {PACKAGES[router].partition('=')[0]}: python3 -m venv .venv-routers; "
            f".venv-routers/bin/pip install {PACKAGES[router]}, or name an environment with --environment"
        )
    return environment


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # Its own times in user and system mode: fields 14 and 15, counted from before the name.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
