"""The example service as its users have it: real processes, over HTTP, asked by the `openai` client."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from demo.model import ModelShape, build_llama, generate_in_one_process
from tests.support import warm_python

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


class Service:
    """A running service."""

    def __init__(self, process: subprocess.Popen[str], url: str, model: str) -> None:
        self.process = process
        self.url = url
        self.model = model
        self.openai = import_module("openai").OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        )
        self._http = httpx.Client(base_url=url, timeout=WAIT_S)

    def get(self, path: str) -> Any:
        return self._http.get(path).json()

    def health(self) -> tuple[int, dict[str, Any]]:
        answer = self._http.get("/health")
        return answer.status_code, answer.json()

    def complete(self, prompt: object, max_tokens: int = 16, **options: object) -> Any:
        return self.openai.completions.create(model=self.model, prompt=prompt, max_tokens=max_tokens, **options)

    def tokens(self, prompt: object, max_tokens: int = 16, **options: object) -> list[int]:
        (choice,) = self.complete(prompt, max_tokens, **options).choices
        return choice.token_ids

    def counts(self) -> dict[str, int]:
        return self.get("/requests")["counts"]

    def wait_for(self, path: str, holds: Any) -> Any:
        """Ask until the answer is as it should be."""
        deadline = time.monotonic() + WAIT_S
        while not holds(answer := self.get(path)):
            assert time.monotonic() < deadline, answer
            assert self.process.poll() is None, "the service has ended"
        return answer

    def wait_idle(self) -> dict[str, Any]:
        """Wait until no request is live, and no page is in use."""
        return self.wait_for("/requests", is_idle)

    def close(self) -> int:
        self.openai.close()
        self._http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def is_idle(answer: dict[str, Any]) -> bool:
    in_use = sum(pool["owned"] + pool["draining"] for pool in answer["pools"].values())
    return not answer["requests"] and not in_use


@contextmanager
def run_service(log: Path, *options: str) -> Iterator[Service]:
    """Run a service for as long as the block lasts."""
    command = [warm_python.executable(), "-m", "examples.service", "--port", "0", *options]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)
        )
    assert process.stdout is not None
    words = process.stdout.readline().split()
    if not words:
        process.wait()
        process.stdout.close()
        pytest.fail(f"the service did not start:\n{log.read_text()}")
    service = Service(process, url=words[-1], model=words[1])
    try:
        yield service
    finally:
        code = service.close()
        print(log.read_text())
        assert code == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that a service is started for: its start alone takes 5 s."""
    for item in items:
        if {"service", "serving"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    """The client's module: a second of imports, in workers that use a service only."""
    return import_module("openai")


Serving = Callable[..., AbstractContextManager[Service]]


@pytest.fixture
def serving() -> Serving:
    """Run services: `with serving(log, *options) as service`."""
    return run_service


class Shared:
    """The service of a module's tests, started when one needs it, and again after one that ended it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stack = ExitStack()
        self._running: Service | None = None

    def service(self) -> Service:
        if self._running is not None and self._running.process.poll() is not None:
            self.close()
        if self._running is None:
            # With little memory: 24 pages of 16 tokens on the device, and eight places in the queue.
            options = ("--device-pages", "24", "--host-pages", "512", "--queue-max", "8")
            self._running = self._stack.enter_context(run_service(self._log, *options))
        return self._running

    def close(self) -> None:
        self._running = None
        self._stack.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("service") / "log")
    yield made
    made.close()


@pytest.fixture
def service(shared: Shared) -> Service:
    """A running service with little memory."""
    return shared.service()


@pytest.fixture(scope="module")
def generate() -> Any:
    """`generate(prompt, count)`: what transformers' own generate() makes of a prompt, in this process."""
    llama = build_llama(ModelShape(vocab_size=256))

    def run(prompt: str | Sequence[int], count: int) -> list[int]:
        tokens = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        return generate_in_one_process(llama, tokens, count)

    return run
