"""A prefill worker that is killed in the middle of a write: no request hangs, and none reads what it left behind."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.support.fault_process import Done, Halt, Halted
from tests.support.waits import LIMIT_S
from tidekv import RequestFailed

pytestmark = pytest.mark.nixl

PAGES = 24


async def halt_midway(child: Any) -> None:
    await child.ask(Halt(after_checks=PAGES // 2), Done)


async def test_the_next_prefill_serves_and_the_restarted_one_does_again(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    first, second = await asyncio.gather(spawn_prefill(name="first"), spawn_prefill(name="second"))
    addresses = [first.ready.address, second.ready.address]
    async with asyncio.timeout(LIMIT_S), decode_over_nixl(addresses) as decode:
        await halt_midway(first)
        waiting = {n: decode.start(f"r{n}", prompt(n, PAGES, tail=n)) for n in range(3)}
        await first.line.hear(Halted)
        first.signal(signal.SIGKILL)
        assert await first.wait_ended() == -signal.SIGKILL
        for number, restore in waiting.items():
            ready = await restore
            await decode.engine.finish(ready, [number])
        # The pages that the dead one had been writing to are free again: its death is proven.
        await decode.assert_nothing_held()
        assert decode.core()["prefill_retries"] >= 3
        restarted = await spawn_prefill(name="first", listen=first.ready.address)
        assert restarted.ready.address == first.ready.address
        ready = await decode.restore("again", prompt(9, PAGES))
        assert (await restarted.counts())["pages_written"] == PAGES
        await decode.engine.finish(ready)
        await decode.assert_nothing_held()


async def test_with_one_prefill_the_request_fails_and_says_why(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    child = await spawn_prefill()
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([child.ready.address]) as decode:
        kept = await decode.restore("kept", prompt(1, PAGES))
        await halt_midway(child)
        waiting = decode.start("lost", prompt(2, PAGES))
        await child.line.hear(Halted)
        child.signal(signal.SIGKILL)
        with pytest.raises(RequestFailed) as failed:
            await waiting
        assert failed.value.cause in ("prefill lost", "prefill process gone")
        # Requests that were READY are unaffected.
        assert decode.wrong(kept, prompt(1, PAGES)) == []
        await decode.engine.finish(kept)
        await decode.assert_nothing_held()
        # What failed left nothing in the cache; what was cached is usable, once another prefill sends the first token.
        assert decode.engine.probe_prefix(prompt(2, PAGES))["l1"] == 0
        await spawn_prefill(listen=child.ready.address)
        assert (await decode.serve("lost", prompt(2, PAGES)))["transfer"] == PAGES * 16
        assert (await decode.serve("hit", prompt(1, PAGES)))["l1"] == PAGES * 16
        await decode.assert_nothing_held()
