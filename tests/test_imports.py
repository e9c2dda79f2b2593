"""What importing the package costs, and that it prints nothing by itself."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum

import pytest

import tidekv
from tests.support.waits import LIMIT_S

HEAVY = ("torch", "transformers", "nixl", "numpy")


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S)


def test_no_help_text_waits_for_heavy_libraries() -> None:
    found = run_python(f"""
import sys
from tidekv.engine.cli.main import app
for command in ([], ["run"], ["store"], ["simulate"]):
    try:
        app([*command, "--help"])
    except SystemExit as end:
        assert not end.code, end.code
    print(command, sorted(set({HEAVY}) & set(sys.modules)))
""")
    said = [line for line in found.stdout.splitlines() if line.startswith("[")]
    assert said == ["[] []", "['run'] []", "['store'] []", "['simulate'] []"]


def test_importing_the_package_imports_nothing_heavy_and_every_name_comes_when_asked_for() -> None:
    found = run_python(f"""
import sys, tidekv
print(sorted(set({HEAVY}) & set(sys.modules)))
from tidekv import *
print(all(name in globals() for name in tidekv.__all__))
""")
    assert found.stdout.splitlines() == ["[]", "True"]


def test_names_asked_for_later_are_the_public_ones() -> None:
    imported_at_once = {
        name
        for name in tidekv.__all__
        if isinstance(value := getattr(tidekv, name), type) and issubclass(value, (Exception, Enum))
    }
    assert set(tidekv._LATER) | imported_at_once | {"__version__"} == set(tidekv.__all__)


@pytest.mark.parametrize(("verbose", "said"), [([], ["WARNING"]), (["-v"], ["INFO", "WARNING"])])
def test_the_command_line_shows_warnings_and_requests_where_asked(verbose: list[str], said: list[str]) -> None:
    found = run_python(f"""
import logging
from tidekv.engine.cli.main import app
@app.command()
def warn() -> None:
    logging.getLogger("tidekv.engine").info("careful")
    logging.getLogger("tidekv.engine").warning("careful")
app({[*verbose, "warn"]}, standalone_mode=False)
""")
    assert [line.split(" ", 2)[2] for line in found.stderr.splitlines()] == [
        f"{level} tidekv.engine: careful" for level in said
    ]
    assert found.stdout == ""


def test_without_a_configured_log_warnings_are_on_stderr() -> None:
    found = run_python("""
from tidekv.engine.log import engine_log
engine_log("tidekv.engine").info("a request arrived")
engine_log("tidekv.engine").warning("careful", pages=3)
""")
    assert found.stderr.splitlines() == ["careful: pages=3"]
