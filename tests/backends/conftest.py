"""Real servers for storage engines, each a process of its own on 127.0.0.1; tests are skipped if none is installed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ports import free_port
from tests.support.waits import LIMIT_S


class RedisServer:
    """A redis-server of our own on a free port, with nothing on disk but what `dir` needs."""

    def __init__(self, directory: Path, *settings: str, port: int | None = None, tls: Path | None = None) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("there is no redis-server here; Debian has it: apt-get install redis-server")
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port() if port is None else port
        self.address = f"127.0.0.1:{self.port}"
        self._tls = f"--tls --insecure --cert {tls} --key {tls}".split() if tls else []
        ports = f"--port 0 --tls-port {self.port}" if tls else f"--port {self.port}"
        place = f"{ports} --bind 127.0.0.1 --dir {directory}".split()
        self._process = subprocess.Popen(
            ["redis-server", *place, "--save", "", "--appendonly", "no", *settings], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        said = ""
        while "Ready to accept connections" not in said:
            said = self._process.stdout.readline()
            assert said, "redis-server did not start"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def command(self, *words: str) -> str:
        """Give a command by redis-cli."""
        to = ["redis-cli", "-p", str(self.port), *self._tls]
        answer = subprocess.run([*to, *words], capture_output=True, text=True, check=True).stdout.strip()
        assert not answer.startswith(("ERR", "(error)", "NOAUTH")), answer
        return answer

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.communicate()


# One request at a time: moto answers 500 to two that write one key at once.
MOTO = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

served, one = DomainDispatcherApplication(create_backend_app), threading.Lock()

def serve(environ, start_response):
    with one:
        return served(environ, start_response)

run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True)
"""


class S3Server:
    """A moto server of our own, with one bucket. What it keeps is gone with it."""

    def __init__(self, port: int = 0) -> None:
        if importlib.util.find_spec("moto") is None:
            pytest.skip("there is no moto here; it comes with tidekv[dev]")
        self._process = subprocess.Popen(
            [sys.executable, "-c", MOTO, str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        while (
            found := re.search(r"Running on (http://127\.0\.0\.1:(\d+))", line := self._process.stderr.readline())
        ) is None:
            assert line, "moto did not start"
        self.address, self.port = found[1], int(found[2])
        # It writes a line for each request, which no test reads.
        self._drain = threading.Thread(target=self._process.stderr.read)
        self._drain.start()
        self.request("PUT", "")

    def request(self, method: str, path: str, content: bytes | None = None) -> bytes:
        """Do a request on the bucket; moto checks no signatures."""
        to = urllib.request.Request(f"{self.address}/tidekv-test{path}", method=method, data=content)
        who = "test/20200101/us-east-1/s3/aws4_request"
        to.add_header("Authorization", f"AWS4-HMAC-SHA256 Credential={who}, SignedHeaders=host, Signature=0")
        to.add_header("Content-Type", "application/octet-stream")
        with urllib.request.urlopen(to) as answer:
            return bytes(answer.read())

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        self._drain.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests that do not hurt it."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def start_s3() -> Iterator[Callable[..., S3Server]]:
    """Start servers for one test."""
    servers: list[S3Server] = []

    def start(port: int = 0) -> S3Server:
        servers.append(S3Server(port))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


MOONCAKE_NODE = """
import sys
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"failed: {code}", flush=True)
sys.stdin.read()
store.close()
"""


class MooncakeServers:
    """A Mooncake master and one store node with 64 MiB, each a process."""

    def __init__(self, directory: Path, *, port: int | None = None) -> None:
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:
            pytest.skip(
                f"Mooncake's library does not load here ({error}); apt-get install libibverbs1 libnuma1 libcurl4"
            )
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port() if port is None else port
        self.address = f"127.0.0.1:{self.port}"
        admin_port = free_port()
        self.admin = f"http://127.0.0.1:{admin_port}"
        program = Path(importlib.import_module("mooncake").__path__[0]) / "mooncake_master"
        places = f"-rpc_address=127.0.0.1 -rpc_port={self.port} -metrics_host=127.0.0.1 -metrics_port={admin_port}"
        self._log = (directory / "mooncake.log").open("ab")
        # The lease must outlast the reading of a batch.
        command = [program, *places.split(), "-default_kv_lease_ttl=2000"]
        self.master = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        give_up_s = time.monotonic() + LIMIT_S
        while not _listens(self.port):
            assert self.master.poll() is None and time.monotonic() < give_up_s, "mooncake_master did not start"
        self.node = subprocess.Popen(
            [sys.executable, "-c", MOONCAKE_NODE, self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.node.stdout is not None
        while "ready" not in (line := self.node.stdout.readline()):
            assert line and "failed" not in line, f"the store node did not start: {line}"

    def stop(self) -> None:
        for process in (self.node, self.master):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.communicate()
        self._log.close()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def mooncake_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServers]:
    """One store for all tests that do not hurt it."""
    servers = MooncakeServers(tmp_path_factory.mktemp("mooncake"))
    yield servers
    servers.stop()


@pytest.fixture
def start_mooncake(tmp_path: Path) -> Iterator[Callable[..., MooncakeServers]]:
    """Start stores for one test."""
    stores: list[MooncakeServers] = []

    def start(port: int | None = None) -> MooncakeServers:
        stores.append(MooncakeServers(tmp_path / "mooncake", port=port))
        return stores[-1]

    yield start
    for servers in stores:
        servers.stop()


@pytest.fixture
def free_address() -> str:
    """An address without a listener."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests that do not hurt it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Start servers for one test."""
    servers: list[RedisServer] = []

    def start(*settings: str, **how: Any) -> RedisServer:
        servers.append(RedisServer(tmp_path / f"redis{len(servers)}", *settings, **how))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
