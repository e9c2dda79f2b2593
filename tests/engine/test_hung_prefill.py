"""A prefill that accepts links and sends nothing: the next prefill of the list gets its share of the time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tidekv import DecodeRequest, LoopbackTransport, RequestFailed
from tidekv.transports.base import Link

PROMPT = list(range(100, 142))


async def never_hello(link: Link) -> None:
    await asyncio.Event().wait()


async def test_the_prefill_behind_a_hung_one_serves_the_request_in_time(make_pair) -> None:
    # Were it not for the share of the deadline, the silence of the first would be waited for.
    async with make_pair(peer_silence_s=60.0, heartbeat_s=1.0, lease_s=60.0) as pair:
        hung = LoopbackTransport("hung", pair.network)
        listener = await hung.listen("hung", never_hello)
        ready = await pair.engine.restore(
            replace(pair.request("r1", PROMPT, deadline_s=6.0), prefill=["hung", "prefill"])
        )
        assert pair.wrong_pages(ready, PROMPT) == []
        assert pair.core()["prefill_retries"] == 1
        await pair.finish(ready, PROMPT, [1])
        await pair.assert_nothing_held()
        await listener.close()


async def test_a_hung_prefill_alone_fails_the_request_by_its_silence_and_not_by_its_deadline(make_pair) -> None:
    async with make_pair(peer_silence_s=0.5, heartbeat_s=0.1) as pair:
        hung = LoopbackTransport("hung", pair.network)
        listener = await hung.listen("hung", never_hello)
        with pytest.raises(RequestFailed, match="did not complete the handshake"):
            await pair.engine.restore(DecodeRequest(request_id="r1", tokens=PROMPT, prefill="hung", deadline_s=60.0))
        await pair.assert_nothing_held()
        await listener.close()
