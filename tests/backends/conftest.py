"""Real servers for storage engines, each a process of its own on 127.0.0.1; tests say skipped where there is none."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


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
        # It writes a line for each request, which nobody reads.
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


@pytest.fixture
def free_address() -> str:
    """A place where nobody listens."""
    return f"127.0.0.1:{free_port()}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


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
