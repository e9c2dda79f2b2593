"""The error a caller gets when no prefill sends the rest: one of a few causes, and the detail behind it."""

from __future__ import annotations

import asyncio

import pytest

from tidekv import (
    DecodeRequest,
    DevicePool,
    InvalidRequest,
    LoopbackTransport,
    PrefillCause,
    PrefillConfig,
    PrefillPeer,
    RequestFailed,
    prompt_digest,
)
from tidekv.states.errors import LocalProtocolError
from tidekv.transports import wire
from tidekv.transports.base import Link
from tidekv.transports.decode.prefill_link import cause_of

PROMPT = list(range(100, 142))


async def failure(pair, prefill: str) -> RequestFailed:
    with pytest.raises(RequestFailed) as failed:
        await pair.engine.restore(DecodeRequest(request_id="r1", tokens=PROMPT, prefill=prefill, deadline_s=30.0))
    await pair.assert_nothing_held()
    return failed.value


async def test_an_address_at_which_nothing_listens(make_pair) -> None:
    async with make_pair() as pair:
        failed = await failure(pair, "nobody")
        assert failed.cause == PrefillCause.CONNECTION_REFUSED
        assert "nobody" in failed.detail
        assert PrefillCause(failed.cause).retryable


async def test_a_prefill_of_another_model_is_told_by_the_field(make_pair) -> None:
    async with make_pair() as pair:
        pool = DevicePool.allocate(pair.device.layout, 8)
        transport = LoopbackTransport("other", pair.network)
        async with PrefillPeer(PrefillConfig(listen="other", model="another model"), device=pool, transport=transport):
            failed = await failure(pair, "other")
        assert failed.cause == PrefillCause.MISMATCH
        assert "differs in model: ours is '', theirs is 'another model'" in failed.detail
        assert not PrefillCause(failed.cause).retryable


async def test_an_exception_in_on_room(make_pair, caplog: pytest.LogCaptureFixture) -> None:
    async def bug(room: object) -> None:
        raise ZeroDivisionError("first line\nsecond line")

    async with make_pair() as pair:
        pool = DevicePool.allocate(pair.device.layout, 8)
        transport = LoopbackTransport("buggy", pair.network)
        async with PrefillPeer(PrefillConfig(listen="buggy"), device=pool, transport=transport, on_room=bug):
            failed = await failure(pair, "buggy")
        assert failed.cause == PrefillCause.RAISED
        assert failed.detail == "ZeroDivisionError: first line\\nsecond line"
        assert caplog.text.count("on_room raised") == 1


async def test_a_prefill_that_closes(make_pair) -> None:
    async with make_pair() as pair:
        pool = DevicePool.allocate(pair.device.layout, 8)
        transport = LoopbackTransport("closing", pair.network)
        peer = PrefillPeer(PrefillConfig(listen="closing"), device=pool, transport=transport)
        async with peer:
            restoring = asyncio.create_task(failure(pair, "closing"))
            await peer.room("r1", prompt_digest(PROMPT))
        assert (await restoring).cause == PrefillCause.CLOSING


async def test_a_prefill_that_begins_with_anything_but_hello(make_pair) -> None:
    async def rogue(link: Link) -> None:
        link.send(wire.Ping(sent_at=0.0))
        await asyncio.Event().wait()

    async with make_pair() as pair:
        transport = LoopbackTransport("rogue", pair.network)
        listener = await transport.listen("rogue", rogue)
        failed = await failure(pair, "rogue")
        assert failed.cause == PrefillCause.PROTOCOL_ERROR
        assert "may not send now" in failed.detail
        await listener.close()


async def test_a_prompt_whose_promise_no_frame_holds_is_refused_at_the_call(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_pair() as pair:
        pages = -(-len(PROMPT) // pair.device.layout.page_size)
        monkeypatch.setattr(wire, "FRAME_BYTES_MAX", wire.PROMISE_BYTES_MAX + 4 * (len(PROMPT) + pages) - 1)
        request = DecodeRequest(request_id="r1", tokens=PROMPT, prefill=pair.peer.address, send_prompt=True)
        with pytest.raises(InvalidRequest, match=r"'r1': its promise .* a frame has"):
            await pair.engine.restore(request)
        monkeypatch.setattr(wire, "FRAME_BYTES_MAX", wire.PROMISE_BYTES_MAX + 4 * pages - 1)
        with pytest.raises(InvalidRequest, match=r"its promise .* \(0 tokens sent"):
            await pair.engine.restore(DecodeRequest(request_id="r1", tokens=PROMPT, prefill="nobody"))
        await pair.assert_nothing_held()


def test_a_frame_that_is_too_large_is_no_cause_to_try_again() -> None:
    assert cause_of(LocalProtocolError("Promise has 9000000 bytes")) is PrefillCause.MISCONFIGURED
    assert not PrefillCause.MISCONFIGURED.retryable
