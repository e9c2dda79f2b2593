"""`tidekv prefill` and `tidekv decode`, as a user starts them: in two processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.support import warm_python
from tests.support.waits import LIMIT_S


@pytest.mark.nixl
@pytest.mark.slow
def test_a_decode_worker_finds_a_prefill_worker_that_runs_already(
    prefill_command: Callable[[dict[str, str]], AbstractContextManager[tuple[subprocess.Popen[str], str]]],
) -> None:
    # An option of both sides; they would refuse each other if one of them did not take it.
    both = {"TIDEKV_ENGINE_BIGRAM_KEYS": "true"}

    def decode(address: str, secret: str, *rounds: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [warm_python.executable(), "-m", "tidekv", "decode", "--prefill", address, *rounds],
            env={**os.environ, **both, "TIDEKV_SECRET": secret},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    with prefill_command({**both, "TIDEKV_SECRET": "between us"}) as (prefill, address):
        served = decode(address, "between us", "--conversations", "2", "--rounds", "2")
        assert served.returncode == 0, served.stdout + served.stderr
        assert "generated tokens equal those of one process" in served.stdout.replace("\n", " ")
        stranger = decode(address, "another", "--conversations", "1", "--rounds", "1")
        assert stranger.returncode == 2, stranger.stdout + stranger.stderr
        assert "wrong secret" in stranger.stderr
        prefill.send_signal(signal.SIGTERM)
        said, _ = prefill.communicate(timeout=LIMIT_S)
        assert "ended" in said
        assert prefill.returncode == 0


@pytest.mark.nixl
@pytest.mark.slow
def test_a_prefill_worker_that_is_stopped_right_behind_its_address_closes_in_order(
    prefill_command: Callable[[dict[str, str]], AbstractContextManager[tuple[subprocess.Popen[str], str]]],
) -> None:
    for _attempt in range(3):
        with prefill_command({}) as (prefill, _):
            prefill.send_signal(signal.SIGTERM)
            said, _ = prefill.communicate(timeout=LIMIT_S)
            assert "ended" in said
            assert prefill.returncode == 0


@pytest.mark.nixl
@pytest.mark.slow
def test_a_prefill_worker_that_does_not_run_is_one_line_with_advice() -> None:
    with socket.socket() as silent:
        # Bound but not listening: connections are refused.
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [warm_python.executable(), "-m", "tidekv", "decode", "--prefill", address, "--conversations", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "connection refused" in line
    assert "start the program that listens there, or correct the address" in line
