"""A published router in front of two live engines: `python -m tests.support.router_program ENVIRONMENT ROUTER`.

Prints what the router believes and the engines do not have, as a JSON list. The routers listen on all addresses and
have no option against it, so the program first moves into a network namespace with a loopback device only.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from examples.fleet.network import leave_network
from tests.support.configs import engine_config
from tests.support.loopback_pair import PAGE, Pair, loopback_pair
from tidekv.backends.storage.uri import open_storage

MODEL = "m"
NO_NAMESPACE = 3
"""Exit status where no network namespace can be made."""
START_S, AGREE_S = 60.0, 15.0
EVENTS = {1: ("tcp://127.0.0.1:15511", "tcp://127.0.0.1:15512"), 2: ("tcp://127.0.0.1:15521", "tcp://127.0.0.1:15522")}
"""Endpoints of the events and of the replay, by worker."""
SERVERS = {1: 19001, 2: 19002}


def call(port: int, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """One HTTP request on loopback; returns the status and the decoded answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        raw = answer.read()
    try:
        return answer.status, json.loads(raw)
    except ValueError:
        return answer.status, raw.decode(errors="replace")


@contextlib.contextmanager
def program(environment: Path, folder: Path, port: int, path: str, *command: str) -> Iterator[Path]:
    """A program of the environment, until the block ends; yields its log once it answers."""
    log = folder / "router.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(environment / "bin" / "python"), *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
            env={**os.environ, "NO_COLOR": "1", "PYTHONPATH": ""},
        )  # fmt: skip
    try:
        ends_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                if call(port, "GET", path)[0] < 500:
                    break
            if process.poll() is not None or time.monotonic() > ends_s:
                raise SystemExit(f"the router does not answer:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield log
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Router(Protocol):
    """A router that subscribes to both workers."""

    routers: tuple[str, ...]
    """What the engines publish for."""

    def started(self, environment: Path, folder: Path) -> contextlib.AbstractContextManager[Router]:
        """Run it, until the block ends."""

    def credit(self, tokens: Sequence[int], salt: str) -> dict[int, int]:
        """Return the tokens that it believes to be cached, by worker: of all, or of the one that it chooses."""


class Indexer:
    """Dynamo's standalone indexer: credits in any tier, of each worker."""

    routers: tuple[str, ...] = ("dynamo-indexer",)
    port = 18090

    @contextlib.contextmanager
    def started(self, environment: Path, folder: Path) -> Iterator[Router]:
        """Run it."""
        command = ("-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1")
        with program(environment, folder, self.port, "/workers", *command):
            for number, (events, replay) in EVENTS.items():
                call(
                    self.port, "POST", "/register",
                    {"instance_id": number, "endpoint": events, "replay_endpoint": replay, "model_name": MODEL,
                     "block_size": PAGE, "dp_rank": 0},
                )  # fmt: skip
            yield self

    def credit(self, tokens: Sequence[int], salt: str) -> dict[int, int]:
        """See Router."""
        asked = {"token_ids": list(tokens), "model_name": MODEL, **({"cache_salt": salt} if salt else {})}
        status, answer = call(self.port, "POST", "/query", asked)
        found = answer["instances"] if status == 200 else {}
        return {number: found.get(str(number), {"disk": 0})["disk"] for number in EVENTS}


class Selection:
    """Dynamo's selection service: the worker that it chooses, and its overlap."""

    routers: tuple[str, ...] = ("dynamo",)
    port = 18092

    @contextlib.contextmanager
    def started(self, environment: Path, folder: Path) -> Iterator[Router]:
        """Run it."""
        command = ("-m", "dynamo.select_service", "--port", str(self.port), "--threads", "1")
        with program(environment, folder, self.port, "/workers", *command):
            for number, (events, replay) in EVENTS.items():
                call(
                    self.port, "POST", "/workers",
                    {"worker_id": number, "model_name": MODEL, "endpoint": f"http://127.0.0.1:{SERVERS[number]}",
                     "block_size": PAGE, "data_parallel_start_rank": 0, "data_parallel_size": 1,
                     "kv_events_endpoints": {"0": events}, "replay_endpoint": replay, "is_eagle": False},
                )  # fmt: skip
            yield self

    def credit(self, tokens: Sequence[int], salt: str) -> dict[int, int]:
        """See Router."""
        asked = {"token_ids": list(tokens), "model_name": MODEL, **({"cache_salt": salt} if salt else {})}
        status, answer = call(self.port, "POST", "/select", asked)
        return {answer["worker_id"]: answer["overlap"]["disk"]} if status == 200 else {}


class _Server(http.server.BaseHTTPRequestHandler):
    """As much of a vLLM server as vllm-router needs: it answers with its own name."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Health, and nothing else."""
        self._answer({}, 200 if self.path.startswith("/health") else 404)

    def do_POST(self) -> None:
        """A completion."""
        self.rfile.read(int(self.headers["content-length"]))
        address: Any = self.server.server_address
        choice = {"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        whole = {"id": "x", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]}
        self._answer({**whole, "usage": usage, "port": address[1]})

    def _answer(self, value: object, status: int = 200) -> None:
        payload = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


class VllmRouter:
    """vllm-router with its policy kv_aware: the worker that it chooses, and the credit that it logs."""

    routers: tuple[str, ...] = ("vllm-router",)
    port = 19100
    _decision = re.compile(r'KV prefix decision outcome="\w+".*?credited_prefix_tokens=(\d+)')

    @contextlib.contextmanager
    def started(self, environment: Path, folder: Path) -> Iterator[Router]:
        """Run it."""
        command = ["-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--policy", "kv_aware", "--kv-event-block-size", str(PAGE), "--kv-event-model", MODEL]
        command += ["--log-level", "debug", "--prometheus-port", "29100", "--disable-retries"]
        with contextlib.ExitStack() as stack:
            urls = []
            for number, port in SERVERS.items():
                server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _Server)
                stack.callback(server.server_close)
                stack.callback(server.shutdown)
                threading.Thread(target=server.serve_forever, daemon=True).start()
                urls.append(f"http://127.0.0.1:{port}")
                events, replay = EVENTS[number]
                command += ["--kv-event-source", f"{urls[-1]}={events}"]
                command += ["--kv-event-replay-source", f"{urls[-1]}={replay}"]
            self.log = stack.enter_context(
                program(environment, folder, self.port, "/health", *command, "--worker-urls", *urls)
            )
            yield self

    def credit(self, tokens: Sequence[int], salt: str) -> dict[int, int]:
        """See Router."""
        read = self.log.stat().st_size
        asked = {"model": MODEL, "prompt": list(tokens), "max_tokens": 1, **({"cache_salt": salt} if salt else {})}
        status, answer = call(self.port, "POST", "/v1/completions", asked)
        if status != 200:
            return {}
        for _ in range(20):
            with self.log.open("rb") as log:
                log.seek(read)
                fresh = re.sub(rb"\x1b\[[0-9;]*m", b"", log.read()).decode(errors="replace")
            if found := self._decision.findall(fresh):
                return {answer["port"] - SERVERS[1] + 1: int(found[-1])}
            time.sleep(0.05)
        return {answer["port"] - SERVERS[1] + 1: 0}


ROUTERS: dict[str, type[Router]] = {"indexer": Indexer, "selection": Selection, "vllm-router": VllmRouter}


@contextlib.asynccontextmanager
async def worker(number: int, folder: Path, routers: tuple[str, ...]) -> AsyncIterator[Pair]:
    """An engine at the addresses of a worker."""
    events, replay = EVENTS[number]
    config = engine_config(
        kv_events_endpoint=events, kv_events_replay=replay, kv_events_kept_batches=8, kv_events_routers=routers
    )
    place = folder / f"storage-{number}"
    place.mkdir(exist_ok=True)
    storage = open_storage(f"file:{place}?capacity=64MB")
    async with loopback_pair(config, device_pages=128, host_pages=128, storage=storage) as pair:
        yield pair


def prompt(number: int, pages: int = 8) -> list[int]:
    """A prompt that shares nothing with others."""
    return [(1000 * number + 7 * at) % 50_000 for at in range(pages * PAGE)]


async def story(router: Router, folder: Path) -> list[str]:
    """Serve, flush, restart and serve again; returns where the router was wrong."""
    wrong: list[str] = []

    async def expect(what: str, tokens: list[int], owner: int | None, *, salt: str = "") -> None:
        """The router credits the owner, or no worker if there is none, before the time is over."""
        ends_s = time.monotonic() + AGREE_S
        while True:
            found = await asyncio.to_thread(router.credit, [*tokens, 5], salt)
            credited = {number for number, credit in found.items() if credit > 0}
            if credited == (set() if owner is None else {owner}):
                return
            if time.monotonic() > ends_s:
                wrong.append(f"{what}: worker {owner} has the prompt, credited is {found}")
                return
            await asyncio.sleep(0.2)

    async with contextlib.AsyncExitStack() as stack, worker(2, folder, router.routers) as second:
        first = await stack.enter_async_context(worker(1, folder, router.routers))
        for number in range(6):
            await (first, second)[number % 2].serve(prompt(number))
        for number in range(6):
            await expect("served", prompt(number), 1 + number % 2)
        await first.serve(prompt(10), namespace="tenant")
        await expect("salted, asked plainly", prompt(10), None)
        if "vllm-router" not in router.routers:
            await expect("salted, asked with the salt", prompt(10), 1, salt="tenant")
        await first.engine.flush()
        await expect("in storage only", prompt(0), 1)
        await first.engine.flush(("l3",))
        await expect("flushed from everywhere", prompt(0), None)
        await first.serve(prompt(20))
        await expect("served before a restart", prompt(20), 1)
        await stack.aclose()
        async with worker(1, folder, router.routers) as again:
            await expect("restarted and idle", prompt(20), None)
            await again.serve(prompt(21))
            await expect("served after a restart", prompt(21), 1)
            await expect("of the other worker, still", prompt(1), 2)
    return wrong


def main(environment: str, name: str) -> None:
    """Run one router."""
    try:
        leave_network()
    except OSError:
        sys.exit(NO_NAMESPACE)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with ROUTERS[name]().started(Path(environment).absolute(), folder) as router:
            print(json.dumps(asyncio.run(story(router, folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
