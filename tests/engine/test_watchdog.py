"""The watchdog names the code that stalls the loop, and costs nothing while the engine is idle."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tidekv.engine import watchdog as module
from tidekv.engine.watchdog import LoopStall, Watchdog


@pytest.fixture(autouse=True)
def collections_only_where_a_test_makes_them() -> Iterator[None]:
    """The report of a stall names a full collection that ends meanwhile."""
    gc.disable()
    yield
    gc.enable()


def stall_the_loop(until: threading.Event) -> None:
    until.wait()


async def test_a_callback_that_stalls_the_loop_is_named() -> None:
    seen = threading.Event()
    reports: list[LoopStall] = []

    def report(stall: LoopStall) -> None:
        reports.append(stall)
        seen.set()

    watchdog = Watchdog(limit_s=0.02, report=report)
    watchdog.start()
    watchdog.set_busy(True)
    stall_the_loop(seen)
    watchdog.set_busy(False)
    watchdog.close()
    assert watchdog.stalls >= 1
    assert "stall_the_loop" in reports[0].stack
    assert reports[0].seconds >= 0.02


async def test_a_stall_is_one_line_with_its_place_and_the_stack_is_at_debug_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = threading.Event()
    watchdog = Watchdog(limit_s=0.02, report=lambda _: seen.set())
    watchdog.start()
    with caplog.at_level(logging.DEBUG, "tidekv.engine"):
        watchdog.set_busy(True)
        stall_the_loop(seen)
        watchdog.set_busy(False)
        watchdog.close()
    told = [record for record in caplog.records if "the event loop stalls" in record.getMessage()]
    assert len(told) == watchdog.stalls
    assert told[0].levelname == "WARNING"
    assert "\n" not in told[0].getMessage()
    # The thread is in `Event.wait` of the standard library; the place is the code that called it.
    line = stall_the_loop.__code__.co_firstlineno + 1
    assert told[0].tidekv["where"] == f"{__file__}:{line} stall_the_loop"  # type: ignore[attr-defined]  # What the engine's log adds.
    (stack, *_) = (record for record in caplog.records if "stack of the stalled" in record.getMessage())
    assert stack.levelname == "DEBUG"
    assert "stall_the_loop" in stack.getMessage()


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen by the thread", "over before the thread looked"])
async def test_a_collection_of_garbage_is_named_and_not_only_what_it_interrupted(is_seen: bool) -> None:
    seen = threading.Event()
    ends: list[str] = []
    watchdog = Watchdog(
        limit_s=0.02 if is_seen else 0.0, report=lambda _: seen.set(), on_end=lambda _, __, where: ends.append(where)
    )
    if is_seen:
        watchdog.start()
        watchdog.set_busy(True)
        gc.collect()
        stall_the_loop(seen)
        watchdog.set_busy(False)
        assert ends == [
            f"{module.COLLECTED}, in {__file__}:{stall_the_loop.__code__.co_firstlineno + 1} stall_the_loop"
        ]
    else:
        watchdog._loop = asyncio.get_running_loop()
        watchdog.set_busy(True)
        gc.collect()
        watchdog.set_busy(False)
        assert ends == [module.COLLECTED]
    watchdog.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_process_that_was_not_scheduled_is_not_blamed_on_the_program_that_runs_the_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[LoopStall] = []
    watchdog = Watchdog(limit_s=36_000.0, report=reports.append)

    def note_once_the_loop_waits(loop_thread: int) -> None:
        # In the kernel, as the watching thread finds it after the process was stopped.
        while main.__code__ in [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[loop_thread])]:
            pass
        watchdog._note(3.0, 1.0)

    async def main() -> None:
        watchdog.start()
        await asyncio.sleep(0)
        await asyncio.to_thread(note_once_the_loop_waits, threading.get_ident())
        watchdog.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert [stall.where for stall in reports] == [""]
    assert "the process was not scheduled" in caplog.text
    assert __file__ not in caplog.text


async def test_the_end_of_a_stall_is_told_with_its_time_and_place_even_if_the_work_ends_behind_it() -> None:
    seen = threading.Event()
    ends: list[tuple[float, float, str]] = []
    watchdog = Watchdog(limit_s=0.02, report=lambda _: seen.set(), on_end=lambda *end: ends.append(end))
    watchdog.start()
    watchdog.set_busy(True)
    began_at_s = time.monotonic()
    stall_the_loop(seen)
    watchdog.set_busy(False)
    watchdog.close()
    ((at_s, seconds, where),) = ends
    assert began_at_s < at_s <= time.monotonic()
    assert 0.02 <= seconds <= at_s - began_at_s + 0.01
    assert where.endswith(" stall_the_loop")


async def test_an_idle_engine_is_not_watched() -> None:
    watchdog = Watchdog(limit_s=0.01)
    watchdog.start()
    until = threading.Event()
    threading.Timer(0.05, until.set).start()
    stall_the_loop(until)
    await asyncio.sleep(0)
    watchdog.close()
    assert watchdog.stalls == 0
    assert watchdog._thread is not None
    assert not watchdog._thread.is_alive()


async def test_closing_does_not_wait_for_the_next_beat() -> None:
    watchdog = Watchdog(limit_s=36_000.0)
    watchdog.start()
    watchdog.set_busy(True)
    closing = threading.Thread(target=watchdog.close, daemon=True)
    watchdog.set_busy(False)
    closing.start()
    closing.join(10.0)
    assert not closing.is_alive()


async def test_a_report_that_hangs_does_not_keep_the_watchdog_from_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    reported, released = threading.Event(), threading.Event()

    def hang(_: LoopStall) -> None:
        reported.set()
        released.wait()

    watchdog = Watchdog(limit_s=0.02, report=hang)
    watchdog.start()
    watchdog.set_busy(True)
    stall_the_loop(reported)
    with caplog.at_level(logging.ERROR):
        watchdog.close()
    assert "did not end" in caplog.text
    released.set()
