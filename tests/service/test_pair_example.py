"""The example of two processes: its programs print what its docstrings and the docs promise, in sixty lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waits import LIMIT_S

PAIR = Path(__file__).resolve().parents[2] / "examples" / "pair"


@pytest.mark.nixl
def test_the_pair_restores_the_second_turn_locally() -> None:
    with subprocess.Popen(
        [sys.executable, "prefill.py", "127.0.0.1:0"], cwd=PAIR, stdout=subprocess.PIPE, text=True
    ) as prefill:
        try:
            assert prefill.stdout is not None
            address = prefill.stdout.readline().split()[-1]
            done = subprocess.run(
                [sys.executable, "decode.py", address], cwd=PAIR, capture_output=True, text=True, timeout=LIMIT_S
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines() == [
                "turn-1 {'l1': 0, 'l2': 0, 'l3': 0, 'transfer': 200}",
                "turn-2 {'l1': 240, 'l2': 0, 'l3': 0, 'transfer': 4}",
            ]
            assert prefill.stdout.readline() == "turn-1: received; decode had 0 tokens\n"
            assert prefill.stdout.readline() == "turn-2: received; decode had 240 tokens\n"
        finally:
            prefill.terminate()


def test_the_pair_stays_small() -> None:
    assert sum(len(file.read_text().splitlines()) for file in PAIR.glob("*.py")) <= 60
