"""The example of a fleet: what it reports, and a short run of its processes behind the published router."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import examples.fleet.__main__ as fleet_main
from demo.model import generate_in_one_process
from examples.fleet.load import ANSWER_TOKENS, Load, Turn, wrong_answers
from examples.fleet.report import Happening, Setting, draw, rows_of, run_of
from examples.fleet.routes import AVOIDED_S, InTurn, Route, Workers
from examples.service.model import load
from examples.service.prefill import DistantPrefill
from tidekv import InvalidConfig

ROOT = Path(__file__).resolve().parents[2]
ROUTERS = os.environ.get("TIDEKV_TEST_ROUTERS")
RUN_S = 400


def fleet(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.fleet", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)


def turn(asked_at_s: float, ended_at_s: float, *, error: str = "", worker: str = "decode-0", **sources: int) -> Turn:
    answer = [2] * (not error)
    return Turn(asked_at_s, [1] * sum(sources.values()), answer, worker, sources, 0.5, 0.2, ended_at_s, error)


def test_each_request_begins_with_another_prefill() -> None:
    prefill = DistantPrefill(["a:1", "b:2", "c:3"])
    assert [prefill.take_addresses()[0] for _ in range(4)] == ["b:2", "c:3", "a:1", "b:2"]
    assert sorted(prefill.take_addresses()) == ["a:1", "b:2", "c:3"]


def test_an_answer_with_another_token_is_found() -> None:
    model = load("", page_size=1)
    first = [5, 6, 7, 8]
    answer = generate_in_one_process(model.llama, first, ANSWER_TOKENS)
    second = [*first, *answer, 9]
    turns = [Turn(0.0, first, answer), Turn(1.0, second, generate_in_one_process(model.llama, second, ANSWER_TOKENS))]
    turns.append(Turn(2.0, [*second, *turns[1].answer, 3], error="lost"))
    assert wrong_answers(model, turns) == 0
    turns[0].answer[-1] ^= 1
    turns[1].prompt[len(first) + ANSWER_TOKENS - 1] ^= 1
    assert wrong_answers(model, turns) >= 1


def test_only_a_request_that_a_killed_decode_worker_may_have_had_is_lost_with_it(tmp_path: Path) -> None:
    turns = [
        turn(0.0, 1.0, l1=10, l2=20, l3=30, transfer=40),
        turn(11.0, 15.2, error="broken off"),  # Asked before the kill, ended right behind it.
        turn(11.0, 25.0, error="late"),
        turn(15.1, 15.3, error="asked later"),
    ]
    happenings = [Happening(12.0, "prefill-0 killed"), Happening(15.0, "decode-0 killed", True)]
    setting = Setting("vllm-router", "kv_aware", 30.0, 4)
    run = run_of(setting, turns, happenings, wrong=0, token_bytes=2, cpu_s={"decode-0": 3.0})
    assert (run.requests, run.lost_with_decode, run.failed) == (4, 1, 2)
    assert run.errors == ["asked later", "late"]
    assert (run.own_hit_rate, run.hit_rate, run.transfer_bytes) == (0.3, 0.6, 80)
    assert run.hits == [(5.0, 0.3)]
    assert run.outside_worker_p50_s == pytest.approx(0.3)
    draw([run], tmp_path / "fleet.svg")
    assert "decode-0 killed" in (tmp_path / "fleet.svg").read_text()


def test_the_table_tells_how_the_workers_shared_the_requests() -> None:
    setting = Setting("vllm-router", "kv_aware", 30.0, 4)
    uneven = [turn(at_s, at_s + 1, l1=1, worker=f"decode-{int(at_s > 2)}") for at_s in (0.0, 1.0, 2.0, 3.0)]
    even = [turn(at_s, at_s + 1, transfer=1, worker=f"decode-{at_s}") for at_s in (0, 1, 2)]
    runs = [run_of(setting, turns, [], wrong=0, token_bytes=2, cpu_s={"decode-0": 3.0}) for turns in (uneven, even)]
    rows = rows_of(runs)
    assert rows["requests of decode-0, p50 there"] == ["3, 200 ms", "1, 200 ms"]
    assert rows["requests of decode-2, p50 there"] == ["0", "1, 200 ms"]
    assert rows["requests at the busiest worker of ten seconds"] == ["75%", "33%"]
    assert rows["CPU of decode for a request"] == ["750 ms", "1,000 ms"]
    assert rows["prompt tokens from prefill for a request"] == ["0", "1"]


def test_a_worker_that_has_refused_is_asked_for_nothing_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("examples.fleet.routes.time", SimpleNamespace(monotonic=lambda: now_s))
    workers = Workers(["a", "b"])
    workers.note(Route("a", is_only=False, is_refused=True))
    workers.note(Route("b", is_only=False))
    assert workers.willing() == [1]
    workers.note(Route("b", is_only=False, is_refused=True))
    assert workers.willing() == [0, 1], "one worker must be asked"
    now_s += AVOIDED_S
    assert workers.willing() == [0, 1]


class Refusing(BaseHTTPRequestHandler):
    """A worker that drains."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        """Refuse."""
        self.send_error(503)


class Serving(Refusing):
    """A worker that answers a completion."""

    def do_POST(self) -> None:
        """Send all tokens at once."""
        self.rfile.read(int(self.headers["content-length"]))
        choices = [{"index": 0, "text": "", "finish_reason": None, "token_ids": [7] * ANSWER_TOKENS}]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "worker": "decode-1"}
        events = [{"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": choices}]
        events.append({**events[0], "choices": [], "usage": {**usage, "sources": {"l1": 1}, "first_token_s": 0.5}})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


async def test_a_user_whose_worker_drains_asks_another_one() -> None:
    with served(Refusing) as draining, served(Serving) as other:
        load = Load(InTurn([draining, other, draining]), 3, seed=1)
        load.stop()
        turns = [Turn(0.0, [1]) for _ in range(3)]
        for each in turns:
            await load._ask(each)
        await load.run()
    assert [each.error for each in turns] == [""] * 3
    assert [each.worker for each in turns] == ["decode-1"] * 3
    assert (turns[0].answer, turns[0].sources, turns[0].in_worker_s) == ([7] * ANSWER_TOKENS, {"l1": 1}, 0.5)


def test_a_process_that_does_not_start_again_is_one_line_of_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python", "vllm-router"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).touch(mode=0o700)

    async def run(*_: object, **__: object) -> None:
        async with asyncio.TaskGroup():
            raise InvalidConfig("decode-1 did not serve")

    monkeypatch.setattr(fleet_main, "_run", run)
    monkeypatch.setattr(fleet_main.signal, "signal", lambda *_: None)  # This process's handlers stay.
    done = CliRunner().invoke(fleet_main.app, ["--environment", str(tmp_path), "--logs", str(tmp_path)])
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == "examples.fleet: decode-1 did not serve"


@pytest.mark.slow
@pytest.mark.parametrize(("router", "package"), [("vllm-router", "vllm-router"), ("dynamo", "ai-dynamo-runtime")])
def test_a_router_that_is_not_installed_is_one_line_of_error(tmp_path: Path, router: str, package: str) -> None:
    done = fleet("--router", router, "--environment", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"examples.fleet: {tmp_path} has no {package}: python3 -m venv")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.nixl
@pytest.mark.slow(limit_s=RUN_S)
@pytest.mark.skipif(ROUTERS is None, reason="TIDEKV_TEST_ROUTERS names no environment: see .ci/routers")
@pytest.mark.skipif(which("redis-server") is None, reason="no redis-server")
@pytest.mark.parametrize("router", ["vllm-router", "dynamo"])
def test_a_fleet_serves_exact_answers_while_its_parts_are_killed(tmp_path: Path, router: str) -> None:
    options = ("--seconds", "30", "--users", "4", "--policy", "kv_aware", "--json", str(tmp_path / "run.json"))
    done = fleet(*options, "--router", router, "--environment", str(ROUTERS), "--logs", str(tmp_path))
    if "needs a network namespace" in done.stderr:
        pytest.skip("no network namespace can be made here, and Dynamo's service listens on all addresses")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "run.json").read_text())["figures"]
    assert (run["failed"], run["wrong"]) == (0, 0)
    assert run["tokens"]["l1"] > 0
    assert sum(share["requests"] for share in run["shares"].values()) == run["requests"] - run["lost_with_decode"]
    assert {what.rpartition(" ")[2] for _, what in run["happenings"]} == {"serving", "killed", "restarts"}
