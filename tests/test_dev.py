"""`python3 dev.py test`: which tests it runs and in how many processes; the limits of a test's time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import dev
from tools import environment

CORES = len(os.sched_getaffinity(0))
IN_PARALLEL = ["-n", str(min(2 * CORES, dev.WORKERS_MAX)), "--dist", "worksteal"]
DEFAULT = ["-m", "not slow and not thorough"]
PATH = str(dev.ROOT / "tests" / "test_dev.py")


@pytest.mark.parametrize(
    ("given", "everything", "expected"),
    [
        ([], False, [*IN_PARALLEL, *DEFAULT]),
        ([], True, IN_PARALLEL),
        (["--all", "-x"], False, [*IN_PARALLEL, "-x"]),
        # A word that is a folder of the checkout but not of tests is the value of an option.
        (["-k", "engine"], False, [*IN_PARALLEL, *DEFAULT, "-k", "engine"]),
        ([PATH], False, [PATH]),
        ([f"{PATH}::test_x", "-s", "--all"], False, [f"{PATH}::test_x", "-s"]),
        ([f"{PATH}.missing"], False, [*IN_PARALLEL, *DEFAULT, f"{PATH}.missing"]),
    ],
)
def test_tests_run_in_parallel_unless_they_are_named(given: list[str], everything: bool, expected: list[str]) -> None:
    assert dev.pytest_arguments(given, everything=everything) == expected


@pytest.mark.parametrize(
    ("has", "wanted", "filled"),
    [("", "demo", True), ("demo", "demo", False), ("dev", "demo", False), ("demo", "dev", True), ("dev", "dev", False)],
)
def test_an_environment_is_filled_with_what_a_command_needs(
    has: str, wanted: str, filled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Sequence[str]] = []

    def fill(directory: Path, requirements: Sequence[str], *, marker: Path, wanted: str) -> None:
        if not (marker.is_file() and marker.read_text() == wanted):
            given.append(requirements)

    monkeypatch.setattr(environment, "fill", fill)
    monkeypatch.setattr(dev, "MARKER", tmp_path / "marker")
    if has:
        dev.MARKER.write_text(dev.wanted_marker(has))
    dev.set_up(wanted)
    assert given == ([["-c", str(dev.CONSTRAINTS), "-e", f"{dev.ROOT}[{wanted}]"]] if filled else [])


def test_processes_of_tests_keep_their_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(dev, "set_up", lambda extra, newest: None)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(dict(os.environ)))
    dev.main(["test"])
    assert "PYTHONDONTWRITEBYTECODE" not in started[0]


SERVERS = ("vllm", "sglang")
"""Extras of servers that have an environment of their own."""


def test_each_requirement_of_the_development_environment_has_one_version() -> None:
    lines = [line for line in dev.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    names = {line.partition("==")[0] for line in lines}
    assert len(names) == len(lines)
    project = tomllib.loads((dev.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(each for name, extra in extras.items() if name not in SERVERS for each in extra),
    ]
    wanted = [re.match(r"[\w-]+", each)[0].lower() for each in wanted if not each.startswith("tidekv[")]
    assert set(wanted) - names == set()


CONFTEST = """
from tests.support import limits
def pytest_addoption(parser): limits.add_options(parser)
def pytest_configure(config):
    config.addinivalue_line("markers", "slow(limit_s): slow")
    config.pluginmanager.register(limits.TimeLimits(config))
"""


def run_pytest(directory: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests of this source under the limits, by a process of its own."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_it.py").write_text(f"import asyncio, threading, time\nimport pytest\n{source}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", "."]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(dev.ROOT / "src"), str(dev.ROOT)])}
    words = [*command, *arguments, "test_it.py"]
    return subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_a_test_that_hangs_is_named_with_the_stacks_of_threads_and_tasks(tmp_path: Path) -> None:
    source = """
from tests.support import limits
limits.LIMIT_S = 1.0
async def wait_for_nobody():
    await asyncio.Event().wait()

@pytest.mark.parametrize("way", ["this way"])
def test_hangs(way):
    asyncio.run(wait_for_nobody())
"""
    done = run_pytest(tmp_path, source)
    assert done.returncode == 1
    assert "test_it.py::test_hangs[this way] took more than 1 s" in done.stderr
    assert "in test_hangs" in done.stderr and "in wait_for_nobody" in done.stderr


def test_a_test_whose_thread_takes_no_signal_is_ended_with_its_stack(tmp_path: Path) -> None:
    source = """
import signal
from tests.support import limits
limits.LIMIT_S, limits.HELD_S = 0.5, 0.5
def test_holds():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()
"""
    done = run_pytest(tmp_path, source)
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in test_holds" in done.stderr


def test_a_slow_test_has_more_time_and_a_limit_of_its_own(tmp_path: Path) -> None:
    source = """
from tests.support import limits
limits.LIMIT_S = 0.3
@pytest.mark.slow
def test_slow():
    time.sleep(1.0)

@pytest.mark.slow(limit_s=0.5)
def test_limited():
    threading.Event().wait()
"""
    done = run_pytest(tmp_path, source)
    assert done.returncode == 1
    assert "test_it.py::test_limited took more than 0.5 s" in done.stderr
    assert "test_slow took" not in done.stderr


def test_a_slow_test_without_its_marker_fails_a_run_that_asks(tmp_path: Path) -> None:
    source = """
def test_fast(): pass
def test_unmarked(): time.sleep(1.2)
@pytest.mark.slow
def test_marked(): time.sleep(1.2)
"""
    done = run_pytest(tmp_path, source, "--unmarked-max=1")
    assert done.returncode == 1
    assert "s: test_it.py::test_unmarked" in done.stdout
    assert "test_marked" not in done.stdout and "test_fast" not in done.stdout
    assert run_pytest(tmp_path, source).returncode == 0
