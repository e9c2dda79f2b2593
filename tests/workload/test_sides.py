"""`tidekv prefill` and `tidekv decode`, as a user starts them: in two processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest


@pytest.mark.nixl
@pytest.mark.slow
def test_a_decode_worker_finds_a_prefill_worker_that_runs_already() -> None:
    environment = {**os.environ, "TIDEKV_SECRET": "between us", "PYTHONUNBUFFERED": "1"}
    prefill = subprocess.Popen(
        [sys.executable, "-m", "tidekv", "prefill", "--listen", "127.0.0.1:0"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert prefill.stdout is not None
        listening = re.search(r"prefill worker at (\S+),", prefill.stdout.readline())
        assert listening is not None
        decode = [sys.executable, "-m", "tidekv", "decode", "--prefill", listening[1]]
        served = subprocess.run(
            [*decode, "--conversations", "2", "--rounds", "2"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert served.returncode == 0, served.stdout + served.stderr
        assert "generated tokens equal those of one process" in served.stdout.replace("\n", " ")
        stranger = subprocess.run(
            [*decode, "--conversations", "1", "--rounds", "1"],
            env={**environment, "TIDEKV_SECRET": "another"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert stranger.returncode == 2, stranger.stdout + stranger.stderr
        assert "failed" in stranger.stderr
        prefill.send_signal(signal.SIGTERM)
        said, _ = prefill.communicate(timeout=30)
        assert "ended" in said
        assert prefill.returncode == 0
    finally:
        if prefill.poll() is None:
            prefill.kill()
            prefill.wait()
