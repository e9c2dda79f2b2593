"""A process is gone when it is, and nothing else passes for it."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace

from tidekv.transports import process


def test_this_process_lives_and_has_one_mark() -> None:
    mark = process.this_process()
    assert mark == process.this_process()
    assert mark.pid == os.getpid()
    assert not process.is_gone(mark)


def test_a_killed_process_is_gone_before_and_after_it_is_waited_for(child) -> None:
    running, mark = child
    assert not process.is_gone(mark)
    running.kill()
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_gone(mark)
    running.wait()
    assert process.is_gone(mark)


def test_a_stopped_process_is_not_gone(child) -> None:
    running, mark = child
    os.kill(running.pid, 19)
    os.waitid(os.P_PID, running.pid, os.WSTOPPED | os.WNOWAIT)
    assert not process.is_gone(mark)


def test_a_pid_that_was_given_away_again_is_another_process(child) -> None:
    _, mark = child
    assert process.is_gone(replace(mark, started=mark.started - 1))


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"host": ""}, {"started": 0}])
def test_what_cannot_be_known_is_not_gone(change: dict[str, object]) -> None:
    assert not process.is_gone(replace(process.this_process(), pid=2**31 - 1, **change))
