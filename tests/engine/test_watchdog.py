"""The watchdog names the code that holds the loop up, and costs nothing while the engine is idle."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from tidekv.engine import watchdog as module
from tidekv.engine.watchdog import LoopStall, Watchdog


def hold_the_loop_up(until: threading.Event) -> None:
    until.wait()


async def test_a_callback_that_holds_the_loop_up_is_named() -> None:
    seen = threading.Event()
    reports: list[LoopStall] = []

    def report(hold_up: LoopStall) -> None:
        reports.append(hold_up)
        seen.set()

    watchdog = Watchdog(limit_s=0.02, report=report)
    watchdog.start()
    watchdog.set_busy(True)
    hold_the_loop_up(seen)
    watchdog.set_busy(False)
    watchdog.close()
    assert watchdog.hold_up_count >= 1
    assert "hold_the_loop_up" in reports[0].stack
    assert reports[0].seconds >= 0.02


async def test_an_idle_engine_is_not_watched() -> None:
    watchdog = Watchdog(limit_s=0.01)
    watchdog.start()
    until = threading.Event()
    threading.Timer(0.05, until.set).start()
    hold_the_loop_up(until)
    await asyncio.sleep(0)
    watchdog.close()
    assert watchdog.hold_up_count == 0
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
    hold_the_loop_up(reported)
    with caplog.at_level(logging.ERROR):
        watchdog.close()
    assert "did not end" in caplog.text
    released.set()
