"""tidekv in real SGLang servers on a CPU, driven by the harness of `python3 dev.py sglang`.

Skipped unless TIDEKV_TEST_SGLANG_VENV names an environment with SGLang for CPUs; `.ci/sglang` makes one and runs these.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

VENV = os.environ.get("TIDEKV_TEST_SGLANG_VENV")
pytestmark = [
    pytest.mark.slow(limit_s=1800),
    pytest.mark.skipif(
        VENV is None, reason="set TIDEKV_TEST_SGLANG_VENV, or run .ci/sglang, to start real SGLang servers"
    ),
]
ROOT = Path(__file__).parents[2]
SMALL = ("--conversations", 4, "--turns", 3, "--tokens", "300:700")


async def figures_of(file: Path, *arguments: object) -> list[dict[str, Any]]:
    """Run the harness by the environment's Python; returns its figures. Every token was compared with one server."""
    assert VENV is not None
    process = await asyncio.create_subprocess_exec(
        f"{VENV}/bin/python",
        "-m",
        "benchmarks.sglang_pair",
        *map(str, arguments),
        "--json",
        str(file),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode(errors="replace")[-4000:]
    found: list[dict[str, Any]] = json.loads(await asyncio.to_thread(file.read_text))["figures"]
    return found


def check_served(figures: dict[str, Any]) -> None:
    assert figures["answers"]
    assert not figures["wrong"]
    assert not figures["lost"]
    assert not figures["http_errors"]
    assert not any(figures["held"].values()), "pages are held after the last answer"


def tokens_by_tier(figures: dict[str, Any]) -> list[int]:
    """Tokens that decode had in L1, L2 and L3 as it asked prefill, over all requests."""
    return [sum(given[tier] for given in figures["promised"].values()) for tier in (1, 2, 3)]


async def test_hicache_is_served_from_our_store(tmp_path: Path) -> None:
    (figures,) = await figures_of(tmp_path / "figures", "--cache", "store", *SMALL, "--at", "2:reset:decode-0")
    check_served(figures)
    assert tokens_by_tier(figures)[2] > 0, "nothing came from storage"


async def test_hicache_serves_right_tokens_from_our_damaged_store(tmp_path: Path) -> None:
    (figures,) = await figures_of(
        tmp_path / "figures", "faults", "--cache", "store", "--fault", "damage", "--conversations", 3, "--turns", 3
    )
    assert figures["answers"] == 9
    assert not figures["wrong"]
    assert not figures["lost"], "SGLang answers HTTP 500, since it has promised the pages; the client asks again"


async def test_a_pair_survives_a_kill_a_flush_and_aborts(tmp_path: Path) -> None:
    events = ("--prefill", 2, "--at", "1:kill:prefill-0", "--at", "2:reset:decode-0", "--aborts", 0.2, "--parallel", 2)
    (figures,) = await figures_of(tmp_path / "figures", "--cache", "tidekv", *SMALL, *events)
    check_served(figures)


async def test_a_retracted_request_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # SGLang's own switch: it retracts one of several running requests every few steps.
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "true")
    arguments = ("--cache", "tidekv", *SMALL, "--parallel", 3, "--output", 48)
    (figures,) = await figures_of(tmp_path / "figures", *arguments)
    check_served(figures)
    assert figures["metrics"]["sglang:num_retracted_requests_total"] > 0


@pytest.mark.parametrize("fault", ["flush", "memory", "freeze", "damage", "hang"])
async def test_no_fault_reaches_a_client(tmp_path: Path, fault: str) -> None:
    arguments = ("faults", "--cache", "tidekv", "--fault", fault, "--conversations", 4, "--turns", 3)
    (figures,) = await figures_of(tmp_path / "figures", *arguments)
    check_served(figures)
