"""Statistics have every counter from the start, and count only what happened."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.inside import runtime_of
from tidekv.engine.prefill import prompt_store
from tidekv.states.core_state import COUNTERS
from tidekv.transports.decode import receiver
from tidekv.transports.prefill import sender

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(100, 122))


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds that sends no wake-up."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # See above.
            await asyncio.sleep(0)


def test_every_counter_of_the_core_is_listed_and_no_other() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "states").rglob("*.py"))
    # The outcome of a hint is a part of its counter's name.
    hints = {f"hints_{outcome}" for outcome in ("accepted", "clipped", "deferred", "missing")}
    # Of two names, one counts what peers do, the other what storage does.
    found = re.findall(r"\bcount\(\s*\"(\w+)\"(?: if \w+\(\w+\) else \"(\w+)\")?", sources)
    assert {name for names in found for name in names if name} | hints == set(COUNTERS)


@pytest.mark.parametrize("module", [receiver, sender, prompt_store])
def test_every_count_of_a_module_is_listed(module) -> None:
    used = set(re.findall(r"counts\[\"(\w+)\"\] \+=", Path(module.__file__).read_text()))
    assert used
    assert used <= set(module.COUNTS)


async def test_no_counter_appears_after_its_first_event(make_pair) -> None:
    async with make_pair() as pair:
        core, prefill = set(pair.core()), set(pair.peer.statistics())
        received = set(pair.engine.statistics()["receiver"])
        await pair.finish(await pair.restore("r1", PROMPT), PROMPT, [1, 2])
        await pair.assert_nothing_held()
        assert set(pair.core()) == core
        assert set(pair.peer.statistics()) == prefill
        assert set(pair.engine.statistics()["receiver"]) == received


async def test_stalls_of_the_loop_are_counted(make_pair) -> None:
    async with make_pair(loop_stall_report_s=0.01) as pair:
        assert isinstance(pair.engine.statistics()["loop_stalls"], int)
        runtime_of(pair.engine).watchdog.set_busy(True)
        give_up_s = time.monotonic() + 60.0
        while not pair.engine.statistics()["loop_stalls"]:
            time.sleep(0.001)  # noqa: ASYNC251  # It stalls the loop on purpose.
            assert time.monotonic() < give_up_s
        runtime_of(pair.engine).watchdog.set_busy(False)


async def test_an_orderly_close_is_no_lost_link_and_a_cut_one_is(make_pair) -> None:
    async with make_pair() as pair:
        async with pair.another_decode() as other:
            await other.finish(await other.restore("r1", PROMPT), PROMPT, [1])
        await pair.finish(await pair.restore("r1", PROMPT), PROMPT, [1])
        await until(lambda: pair.peer.statistics()["peers"] == 1)
        assert pair.peer.statistics()["links_lost"] == 0
        pair.network.cut(runtime_of(pair.engine).transport.instance)
        await until(lambda: pair.peer.statistics()["links_lost"] > 0)
        assert pair.peer.statistics()["links_lost"] == 1
