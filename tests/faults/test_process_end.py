"""Processes end with their own exit code, with and without the system's RDMA libraries beside those of NIXL."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.rdma_libraries import process_environment
from tests.support.waits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "examples" / "pair"
ENGINE = """
import asyncio, sys, tidekv
LAYOUT = tidekv.KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
async def main():
    transport = tidekv.NixlTransport(name="decode-0")
    device = tidekv.DevicePool.allocate(LAYOUT, 4)
    async with tidekv.DecodeEngine(tidekv.EngineConfig(), device=device, transport=transport):
        print(open("/proc/self/maps").read().count("libuct_ib") > 0)
asyncio.run(main())
sys.exit(3)
"""

pytestmark = [pytest.mark.nixl, pytest.mark.slow]


@pytest.fixture
def beside() -> dict[str, str]:
    """The environment of a process that finds the system's RDMA libraries."""
    return process_environment("with")


@pytest.fixture(params=["without", "with"], ids=["without RDMA libraries", "with RDMA libraries"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    return process_environment(request.param)


def ended(command: list[str], environment: Mapping[str, str], **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=LIMIT_S, **options
    )


def test_the_program_of_the_readme_ends_with_code_0(beside: dict[str, str], tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    done = ended(["-"], beside, input=program, cwd=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("{'l1'") == 2


def test_the_workers_of_the_pair_end_with_code_0(beside: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "prefill.py", "127.0.0.1:0"], cwd=PAIR, env=beside, stdout=subprocess.PIPE, text=True
    ) as prefill:
        try:
            assert prefill.stdout is not None
            address = prefill.stdout.readline().split()[-1]
            done = ended(["decode.py", address], beside, cwd=str(PAIR))
            assert done.returncode == 0, done.stderr
            prefill.send_signal(signal.SIGTERM)
            prefill.communicate(timeout=LIMIT_S)
            assert prefill.returncode == 0
        finally:
            prefill.kill()


def test_tidekv_run_ends_with_code_0(beside: dict[str, str], tmp_path: Path) -> None:
    options = ["--conversations", "1", "--rounds", "2", "--no-compare", "--no-deployment"]
    done = ended(["-m", "tidekv", "run", *options], beside, cwd=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("modules", "is_loaded"), [(None, False), ("all", True)], ids=["as it is", "with UCX's RDMA module"]
)
def test_a_process_ends_with_a_code_of_its_own(
    environment: dict[str, str], modules: str | None, is_loaded: bool
) -> None:
    chosen = environment if modules is None else environment | {"UCX_MODULES": modules}
    done = ended(["-c", ENGINE], chosen)
    assert (done.returncode, done.stdout) == (3, f"{is_loaded}\n"), done.stderr


def test_the_doctor_tells_how_processes_end(environment: dict[str, str]) -> None:
    for modules, level in ({}, "ok"), ({"UCX_MODULES": "all"}, "warn" if "LD_LIBRARY_PATH" in environment else "ok"):
        done = ended(["-m", "tidekv", "doctor", "--json"], environment | modules)
        found = {finding["check"]: finding for finding in json.loads(done.stdout)}
        assert found["process end"]["level"] == level, found["process end"]
