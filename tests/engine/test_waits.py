"""Waits of callers for the core: how many conditions are tested after a step."""

from __future__ import annotations

import asyncio

from tidekv.engine.decode.pending_calls import PendingCalls
from tidekv.engine.decode.values import DecodeRequest
from tidekv.states import commands


async def test_after_a_step_only_waits_are_tested_that_it_may_end() -> None:
    calls = PendingCalls(page_size=1, layer_count=1)
    tested: list[str] = []
    is_over = False

    def condition(name: str) -> bool:
        tested.append(name)
        return is_over

    names = [f"request {number}" for number in range(1000)]
    waits = [asyncio.ensure_future(calls.wait_until(lambda: condition("all")))]
    for number, name in enumerate(names):
        request = DecodeRequest(request_id=name, tokens=[1], prefill="p")
        calls.begin(request, None, request_number=number, deadline_at_s=1.0)  # type: ignore[arg-type]  # Nothing reads it.
        waits.append(asyncio.ensure_future(calls.wait_until(lambda name=name: condition(name), request_id=name)))
    await asyncio.sleep(0)
    tested.clear()
    calls.after_drain()
    assert tested == ["all"]
    tested.clear()
    calls.tell(commands.ReportFailed(request_id=names[7], cause="aborted", detail=""))
    is_over = True
    calls.after_drain()
    assert tested == ["all", names[7]]
    await asyncio.sleep(0)
    assert [wait.done() for wait in waits].count(True) == 2
    calls.end_all("the test is over")
    ended = await asyncio.gather(*waits, return_exceptions=True)
    assert len([error for error in ended if error is not None]) == 999
