"""The example of two processes: its programs print what its docstrings and the docs promise, in sixty lines of code."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.waits import LIMIT_S

PAIR = Path(__file__).resolve().parents[2] / "examples" / "pair"


@pytest.mark.slow
@pytest.mark.nixl
def test_the_pair_restores_the_second_turn_locally() -> None:
    with subprocess.Popen(
        [warm_python.executable(), "prefill.py", "127.0.0.1:0"], cwd=PAIR, stdout=subprocess.PIPE, text=True
    ) as prefill:
        try:
            assert prefill.stdout is not None
            address = prefill.stdout.readline().split()[-1]
            done = subprocess.run(
                [warm_python.executable(), "decode.py", address],
                cwd=PAIR,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines() == [
                "turn-1 {'l1': 0, 'l2': 0, 'l3': 0, 'transfer': 200}",
                "turn-2 {'l1': 240, 'l2': 0, 'l3': 0, 'transfer': 4}",
            ]
            assert prefill.stdout.readline() == "turn-1: received; decode had 0 tokens\n"
            assert prefill.stdout.readline() == "turn-2: received; decode had 240 tokens\n"
            # A job in the background ignores Ctrl-C, and so do its children.
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                prefill.send_signal(signal.SIGINT)
                assert prefill.communicate(timeout=LIMIT_S)[0] == "ended\n"
                assert prefill.returncode == 0
        finally:
            prefill.kill()


@pytest.mark.slow
@pytest.mark.nixl
def test_a_wrong_address_is_one_line_of_error() -> None:
    with socket.socket() as taken:
        # Bound but not listening: prefill cannot bind the port, and nothing accepts decode's connection.
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for program, given, words in (
            ("decode.py", address, ("connection refused", address, "correct the address")),
            ("decode.py", "nonsense", ("must be host:port", "'nonsense'")),
            ("prefill.py", address, (f"cannot listen on {address}", "in use")),
            ("prefill.py", "nonsense", ("must be host:port", "'nonsense'")),
        ):
            done = subprocess.run(
                [warm_python.executable(), program, given], cwd=PAIR, capture_output=True, text=True, timeout=LIMIT_S
            )
            assert done.returncode == 1, done.stdout + done.stderr
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"{program}: ")
            assert all(word in line for word in words), line


def test_the_pair_stays_small() -> None:
    lines = [line for file in PAIR.glob("*.py") for line in file.read_text().splitlines()]
    assert sum(bool(line.strip()) for line in lines) <= 60
