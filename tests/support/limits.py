"""Time limits of tests: a test that hangs is named and ends its process, and a slow one must be marked.

A plugin for pytest, registered by `tests/conftest.py`. The limits are for hangs: many times what a test takes on a
quiet machine, so that a busy one does not reach them.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

import pytest

LIMIT_S = 60.0
"""Maximum time of a test, its fixtures included."""
SLOW_LIMIT_S = 300.0
"""The same of a test marked `slow`; `slow(limit_s=…)` gives it another one."""
HELD_S = 20.0
"""Time beyond the limit after which a test is ended that keeps the interpreter from running its signal handler."""

EXIT_S = 120.0
"""Maximum time of the interpreter's end."""


def limit_of(item: pytest.Item) -> float:
    """Return the time limit of a test in seconds."""
    slow = item.get_closest_marker("slow")
    return LIMIT_S if slow is None else float(slow.kwargs.get("limit_s", SLOW_LIMIT_S))


class TimeLimits:
    """Ends the process of a test that exceeds its limit, with the test's name and all stacks on stderr.

    With xdist that is one worker: the test is reported as failed and another worker goes on.
    """

    def __init__(self, config: pytest.Config) -> None:
        # Tests replace file descriptor 2; pytest does not capture it while it is configured.
        self._out: TextIO = os.fdopen(os.dup(2), "w")
        self._is_on = not config.getoption("usepdb")
        self._unmarked_max_s: float | None = config.getoption("unmarked_max")
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._test, self._limit_s = "", LIMIT_S

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self._is_on:
            return (yield)
        self._test, self._limit_s = item.nodeid, limit_of(item)
        before = signal.signal(signal.SIGALRM, self._end)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        # A C function that holds the interpreter's lock keeps the handler waiting; this needs no lock.
        faulthandler.dump_traceback_later(self._limit_s + HELD_S, exit=True, file=self._out)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        print(f"\n{self._test} took more than {self._limit_s:g} s. All stacks:", file=self._out, flush=True)
        faulthandler.dump_traceback(self._out)
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:
            tasks = set()  # No loop runs in the thread of the tests.
        for task in tasks:
            print(f"\n{task.get_name()}:", file=self._out)
            task.print_stack(file=self._out)
        self._out.flush()
        os._exit(1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "slow" not in report.keywords:
            self._seconds[report.nodeid] += report.duration

    def too_slow(self) -> list[str]:
        """Return a line for each test that is not marked `slow` and took more than --unmarked-max."""
        if self._unmarked_max_s is None:
            return []
        slow = sorted((-seconds, test) for test, seconds in self._seconds.items() if seconds > self._unmarked_max_s)
        return [f"{-seconds:.1f} s: {test}" for seconds, test in slow]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.too_slow() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = self.too_slow()
        if lines:
            terminalreporter.section("tests that need the marker slow", red=True)
            for line in lines:
                terminalreporter.line(line)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """End the interpreter, with all stacks, if a thread that a test left keeps it from its end."""
        if hasattr(config, "workerinput"):
            return  # A worker of xdist waits here until the others have ended, and is ended by their parent.
        faulthandler.dump_traceback_later(EXIT_S, exit=True, file=self._out)


def add_options(parser: pytest.Parser) -> None:
    """Add the options of `TimeLimits`."""
    parser.addoption(
        "--unmarked-max",
        type=float,
        metavar="S",
        help="fail the run if a test without the marker slow takes more than S seconds",
    )
