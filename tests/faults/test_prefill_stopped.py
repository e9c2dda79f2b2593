"""A prefill worker that stops in the middle of a write, and goes on later: its late bytes find their old pages only.

It may be stopped for any time, and it ends what it has begun: only its own message can fence it. So its pages stay
in the quarantine, even if requests need them, until it has reported that it is done with them.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.support.fault_process import Done, Halt
from tests.support.waits import LIMIT_S, pass_s
from tidekv import RequestFailed
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import prompt_digests

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

STOPPED_S = 5.0
PAGE_SIZE = 16
# A peer is out of reach sooner than by default, so that the tests are short; a loaded machine must not pass for it.
LIVENESS = {"heartbeat_s": 0.25, "peer_silence_s": 3.0}


async def stop_midway(child: Any, *, after_pages: int) -> None:
    """Have the child stop itself when it has written that many pages of the next prompt."""
    await child.ask(Halt(after_checks=after_pages, stops=True), Done)


@pytest.mark.parametrize("ways", ["tcp", "all"])
async def test_late_bytes_of_an_aborted_request_land_nowhere_that_has_a_new_owner(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any, pages_of: Any, layout: Any, ways: str
) -> None:
    first, second = await asyncio.gather(
        spawn_prefill(name="first", environment={"UCX_TLS": ways}), spawn_prefill(name="second")
    )
    # Forty pages: the prompt that is aborted has thirty of them, one more is its reserve.
    tokens, small, big = prompt(1, 30), prompt(2, 3), prompt(3, 20)
    settings = {"device_pages": 40, "host_pages": 64, **LIVENESS}
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([second.ready.address], **settings) as decode:
        await stop_midway(first, after_pages=10)
        aborted = decode.start("aborted", tokens, prefill=first.ready.address)
        await first.wait_stopped()
        draining = pages_of(decode.engine, "aborted")
        assert len(draining) == 30
        await decode.engine.abort("aborted")
        with pytest.raises(RequestFailed, match="aborted"):
            await aborted
        assert decode.core()["device_draining"] == 30
        missing = decode.kv.verify(draining, prompt_digests(pack_tokens(tokens), PAGE_SIZE))
        assert len(missing) >= 15, "the write had come too far before it stopped"

        # Others go on with what is left, again and again, and never get a page that is not theirs.
        kept = await decode.restore("kept", small)
        assert not set(kept.pages.tolist()) & set(draining)
        waiting = decode.start("waiting", big)
        for number in range(10, 30):
            ready = await decode.restore(f"r{number}", prompt(number, 2))
            assert not set(ready.pages.tolist()) & set(draining)
            await decode.engine.finish(ready)
        await pass_s(STOPPED_S)
        assert decode.core()["device_draining"] == 30, "a stopped writer passed for one that is done"
        assert not waiting.done()

        first.signal(signal.SIGCONT)
        ready = await waiting
        assert decode.wrong(ready, big) == []
        assert decode.wrong(kept, small) == []
        # The late bytes did come, all of them, to the pages that were kept for them: those without a new owner show it.
        assert (await first.counts())["bytes_written"] == 30 * layout.page_bytes
        digests = prompt_digests(pack_tokens(tokens), PAGE_SIZE)
        late = [at for at in missing if draining[at] not in set(ready.pages.tolist())]
        assert late
        assert decode.kv.verify([draining[at] for at in late], [digests[at] for at in late]) == []
        for request in (ready, kept):
            await decode.engine.finish(request)
        await decode.assert_nothing_held()
        assert decode.core()["device_draining"] == 0
        # The one that was stopped serves again.
        await decode.serve("again", prompt(4, 8), prefill=first.ready.address)
        await decode.assert_nothing_held()


async def test_a_stopped_prefill_fails_its_requests_over_and_keeps_its_pages_until_it_goes_on(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    first, second = await asyncio.gather(spawn_prefill(name="first"), spawn_prefill(name="second"))
    both = [first.ready.address, second.ready.address]
    async with asyncio.timeout(LIMIT_S), decode_over_nixl(both, **LIVENESS) as decode:
        await stop_midway(first, after_pages=4)
        waiting = {n: decode.start(f"r{n}", prompt(n, 10)) for n in range(2)}
        alone = decode.start("alone", prompt(5, 10), prefill=first.ready.address)
        await first.wait_stopped()
        ready = [await restore for restore in waiting.values()]
        with pytest.raises(RequestFailed) as failed:
            await alone
        assert failed.value.cause == "prefill silent"
        assert decode.core()["device_draining"] == 30
        await pass_s(STOPPED_S)
        assert decode.core()["device_draining"] == 30
        first.signal(signal.SIGCONT)
        for number, request in enumerate(ready):
            assert decode.wrong(request, prompt(number, 10)) == []
            await decode.engine.finish(request)
        await decode.assert_nothing_held()
        await decode.serve("again", prompt(6, 10), prefill=first.ready.address)
        await decode.assert_nothing_held()


async def test_a_stopped_prefill_that_is_killed_gives_its_pages_back(
    spawn_prefill: Any, decode_over_nixl: Any, prompt: Any
) -> None:
    child = await spawn_prefill()
    async with asyncio.timeout(LIMIT_S), decode_over_nixl([child.ready.address], **LIVENESS) as decode:
        await stop_midway(child, after_pages=4)
        waiting = decode.start("lost", prompt(1, 10))
        await child.wait_stopped()
        with pytest.raises(RequestFailed, match="was silent for") as failed:
            await waiting
        assert failed.value.cause == "prefill silent"
        assert decode.core()["device_draining"] == 10
        child.signal(signal.SIGKILL)
        await decode.assert_nothing_held()
