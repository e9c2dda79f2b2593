"""The README: its program runs when pasted, it stays short, and its pictures are those of the generator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waits import LIMIT_S
from tools.data_path_picture import pictures

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def program() -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.nixl
def test_the_program_runs_when_pasted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=program(), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "first {'l1': 0, 'l2': 0, 'l3': 0, 'transfer': 100}",
        "second {'l1': 96, 'l2': 0, 'l3': 0, 'transfer': 24}",
    ]


def test_the_readme_stays_a_screen_and_its_program_short() -> None:
    assert len([line for line in program().splitlines() if line]) <= 25
    assert len(README.splitlines()) <= 95


@pytest.mark.parametrize("name", pictures())
def test_the_pictures_are_generated(name: str) -> None:
    assert (ROOT / "docs" / "images" / name).read_text() == pictures()[name]
    assert f"docs/images/{name}" in README
