"""The processes of a fleet: a store, prefill and decode workers, and a router in front of the decode workers.

Everything listens on loopback. What is started here ends with `Fleet.close`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which

import httpx
import msgspec

from examples.service.options import PrefillOptions
from tidekv import InvalidConfig

START_S = 120.0
STOP_S = 60.0
HOST = "127.0.0.1"
PAGE_TOKENS = 16
MODEL = "tidekv-random-llama"
ROUTER_INSTALL = "python3 -m venv .venv-routers; .venv-routers/bin/pip install vllm-router==0.1.17"


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a fleet. `router`: the program `vllm-router`; `logs`: a directory for what the processes print.

    The conversations of 30 users have 1,100 pages: more than the memory of one decode worker, fewer than that of all.
    Device memory has room for the requests that are served at the same time.
    """

    router: Path
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


class Fleet:
    """All members. `url` is the router's."""

    def __init__(self, options: FleetOptions, policy: str) -> None:
        """Choose free ports; nothing is started. Raises InvalidConfig if a program is not installed."""
        ports = iter(_free_ports(2 + 1 + options.prefills + 3 * options.decodes))
        logs = options.logs / policy
        logs.mkdir(parents=True, exist_ok=True)
        self.store: Member | None = None
        storage: list[str] = []
        if options.store:
            port = next(ports)
            server = which("redis-server") or which("valkey-server")
            if server is None:
                raise InvalidConfig("the store needs redis-server or valkey-server; install one, or give --no-store")
            keeps_nothing = ["--save", "", "--appendonly", "no", "--dir", str(logs)]
            started = [server, "--port", str(port), "--bind", HOST, *keeps_nothing]
            self.store = Member("store", started, f"tcp:{port}", logs / "store")
            storage = ["--storage", f"redis://{HOST}:{port}"]
        self.prefills: list[Member] = []
        addresses: list[str] = []
        for number in range(options.prefills):
            port = next(ports)
            addresses.append(f"{HOST}:{port}")
            one = PrefillOptions(listen=addresses[-1], name=f"prefill-{number}", page_size=PAGE_TOKENS)
            command = [sys.executable, "-m", "examples.service.prefill", msgspec.json.encode(one).decode()]
            self.prefills.append(Member(one.name, command, f"tcp:{port}", logs / one.name))
        self.decodes: list[Member] = []
        workers, sources, replays = list[str](), list[str](), list[str]()
        for number in range(options.decodes):
            port, events, replay = next(ports), f"tcp://{HOST}:{next(ports)}", f"tcp://{HOST}:{next(ports)}"
            workers.append(url := f"http://{HOST}:{port}")
            sources += ["--kv-event-source", f"{url}={events}"]
            replays += ["--kv-event-replay-source", f"{url}={replay}"]
            name = f"decode-{number}"
            command = [sys.executable, "-m", "examples.service", "--port", str(port), "--name", name, *storage]
            command += [part for address in addresses for part in ("--prefill", address)]
            command += ["--kv-events", events, "--kv-events-replay", replay, "--page-size", str(PAGE_TOKENS)]
            command += ["--device-pages", str(options.device_pages), "--host-pages", str(options.host_pages)]
            self.decodes.append(Member(name, command, f"{url}/health", logs / name))
        port, metrics = next(ports), next(ports)
        self.url = f"http://{HOST}:{port}"
        command = [str(options.router), "--host", HOST, "--port", str(port), "--policy", policy]
        command += ["--prometheus-host", HOST, "--prometheus-port", str(metrics)]
        command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        command += ["--health-success-threshold", "1", "--health-check-timeout-secs", "5"]
        if policy == "kv_aware":
            command += ["--kv-event-block-size", str(PAGE_TOKENS), "--kv-event-model", MODEL, *sources, *replays]
        self.router = Member("router", [*command, "--worker-urls", *workers], f"{self.url}/health", logs / "router")
        self._started: list[Member] = []

    async def __aenter__(self) -> Fleet:
        """Start everything; the router last."""
        try:
            await self._start([*self.prefills, *([] if self.store is None else [self.store])])
            await self._start(self.decodes)
            await self._start([self.router])
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

    async def _start(self, members: Sequence[Member]) -> None:
        self._started += members
        results = await asyncio.gather(*(member.start() for member in members), return_exceptions=True)
        self._started = [member for member in self._started if member.process is not None]
        for error in results:
            if isinstance(error, BaseException):
                raise error


def find_router(given: Path | None) -> Path:
    """Return the program `vllm-router`. Raises InvalidConfig, which says how to install it."""
    checkout = Path(__file__).resolve().parents[2]
    found = which("vllm-router")
    candidates = [given] if given is not None else [checkout / ".venv-routers" / "bin" / "vllm-router"]
    candidates += [Path(found)] if given is None and found else []
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise InvalidConfig(f"vllm-router is not at {candidates[0]}: {ROUTER_INSTALL}, or name it with --router")


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
