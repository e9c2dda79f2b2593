"""The example of a fleet: what it reports, and a short run of its processes behind the published router."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from examples.fleet.load import ANSWER_TOKENS, Turn, wrong_answers
from examples.fleet.report import Happening, draw, run_of
from examples.service.model import load
from examples.service.prefill import DistantPrefill
from tidekv.engine.demo.model import generate_in_one_process

ROOT = Path(__file__).resolve().parents[2]
ROUTERS = os.environ.get("TIDEKV_TEST_ROUTERS")
RUN_S = 400


def fleet(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.fleet", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)


def turn(asked_at_s: float, ended_at_s: float, *, error: str = "", **sources: int) -> Turn:
    return Turn(asked_at_s, [1] * sum(sources.values()), [2] * (not error), sources, 0.5, ended_at_s, error)


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
    run = run_of("kv_aware", turns, happenings, wrong=0, token_bytes=2)
    assert (run.requests, run.lost_with_decode, run.failed) == (4, 1, 2)
    assert run.errors == ["asked later", "late"]
    assert (run.own_hit_rate, run.hit_rate, run.transfer_bytes) == (0.3, 0.6, 80)
    assert run.hits == [(5.0, 0.3)]
    draw([run], tmp_path / "fleet.svg")
    assert "decode-0 killed" in (tmp_path / "fleet.svg").read_text()


@pytest.mark.slow
def test_a_router_that_is_not_installed_is_one_line_of_error(tmp_path: Path) -> None:
    done = fleet("--router", str(tmp_path / "vllm-router"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"examples.fleet: vllm-router is not at {tmp_path}/vllm-router: python3 -m venv")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.nixl
@pytest.mark.slow(limit_s=RUN_S)
@pytest.mark.skipif(ROUTERS is None, reason="TIDEKV_TEST_ROUTERS names no environment: see .ci/routers")
@pytest.mark.skipif(which("redis-server") is None, reason="no redis-server")
def test_a_fleet_serves_exact_answers_while_its_parts_are_killed(tmp_path: Path) -> None:
    options = ("--seconds", "60", "--users", "4", "--policy", "kv_aware", "--json", str(tmp_path / "run.json"))
    done = fleet(*options, "--router", f"{ROUTERS}/bin/vllm-router", "--logs", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "run.json").read_text())
    assert (run["failed"], run["wrong"]) == (0, 0)
    assert run["tokens"]["l1"] > 0
    assert {what.rpartition(" ")[2] for _, what in run["happenings"]} == {"serving", "killed", "restarts"}
