"""Rooms of several decode workers with one request id: each prefill call gets the room of its own prompt."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.support.prompts import DIGEST, OTHER, PROMPT
from tests.support.waits import LIMIT_S, until
from tidekv.states import events
from tidekv.states.errors import InvalidRequest, RemoteProtocolError, TransferFailed
from tidekv.states.handover import room_claims
from tidekv.states.handover.prompt_digest import digest_of


async def test_two_decode_workers_with_one_id_get_the_pages_of_their_own_prompts(world) -> None:
    prefill = await world.prefill()
    one, other = await world.decode(name="decode-0"), await world.decode(name="decode-1")
    one.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    other.promise(prefill.address, "r1", tokens=8, promised=0, pages=[3, 4], prompt_digest=OTHER.digest)
    await asyncio.gather(one.wait(events.PromiseSent), other.wait(events.PromiseSent))
    await prefill.serve("r1", [20, 21], prompt=OTHER)
    await prefill.serve("r1", [30, 31])
    await asyncio.gather(one.wait_done("r1"), other.wait_done("r1"))
    assert world.same(one, prefill, [(1, 30), (2, 31)])
    assert world.same(other, prefill, [(3, 20), (4, 21)])


async def test_two_workers_with_one_id_and_one_prompt_are_served_each(world) -> None:
    prefill = await world.prefill()
    decodes = [await world.decode(name=f"decode-{number}") for number in range(2)]
    serving = [asyncio.ensure_future(prefill.serve("r1", [30 + number])) for number in range(2)]
    for decode in decodes:
        decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    await asyncio.gather(*(decode.wait_done("r1") for decode in decodes))
    rooms = await asyncio.gather(*serving)
    assert rooms[0] is not rooms[1]
    assert sorted(room._key.instance for room in rooms) == ["decode-0", "decode-1"]


async def test_a_wait_that_is_cancelled_as_its_room_comes_gives_the_room_to_the_next(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    cancelled = asyncio.ensure_future(prefill.sender.room("r1", PROMPT))
    waiting = asyncio.ensure_future(prefill.sender.room("r1", PROMPT))
    await asyncio.sleep(0)
    offer = prefill.sender._offer

    def offer_and_cancel(room) -> None:
        offer(room)
        cancelled.cancel()

    prefill.sender._offer = offer_and_cancel
    link.send(decode.promise(decode.room()))
    async with asyncio.timeout(LIMIT_S):
        assert (await waiting).request_id == "r1"
    assert cancelled.cancelled()
    assert prefill.sender.statistics()["rooms_waited_for"] == 0


async def test_a_room_for_another_prompt_than_prefill_waits_for_is_refused_in_words(world) -> None:
    now = [100.0]
    prefill = await world.prefill(clock=lambda: now[0])
    decode = await world.decode()
    waiting = asyncio.ensure_future(prefill.room("r1"))
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2], prompt_digest=OTHER.digest)
    decode.promise(prefill.address, "r2", tokens=8, promised=0, pages=[3, 4], prompt_digest=OTHER.digest)
    await decode.wait(events.PromiseSent, request_id="r2")
    await until(lambda: prefill.sender.statistics()["rooms_sending"] == 2)
    prefill.sender.check_leases()
    # Not at once: the request that computes the other prompt may ask for it next.
    assert not decode.of(events.RoomFailed)
    now[0] += room_claims.MISMATCH_S
    prefill.sender.check_leases()
    failed = await decode.wait(events.RoomFailed)
    assert failed.request_id == "r1"
    assert failed.cause.startswith("other prompt: prefill has computed another prompt under the name 'r1'")
    assert prefill.sender.counts["rooms_mismatched"] == 1
    assert set(decode.pool.page(1)) == {0}
    # What prefill waits for still comes.
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[5, 6], generation=1)
    assert (await waiting).generation == 1
    await decode.wait(events.RoomDrained, request_id="r1")


async def test_nothing_is_sent_before_the_prompt_is_named(world, decode) -> None:
    rooms = []
    prefill = await world.prefill(on_room=rooms.append)
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room()))
    await until(lambda: len(rooms) == 1)
    for call in (
        rooms[0].send([30, 31], start_token=0),
        rooms[0].send_component_pages("window", [1]),
        rooms[0].finish(first_token=1),
    ):
        with pytest.raises(InvalidRequest, match=r"call room\.confirm\(prompt_digest\(tokens\)\)"):
            await call
    with pytest.raises(TransferFailed, match="another prompt under the name 'r1'"):
        rooms[0].confirm(OTHER)
    assert rooms[0].cause.startswith("other prompt: ")
    assert prefill.sender.statistics()["bytes_sent"] == 0
    link.send(decode.promise(decode.room(generation=1)))
    await until(lambda: len(rooms) == 2)
    rooms[1].confirm(rooms[1].prompt)
    await rooms[1].send([30, 31], start_token=0)
    await rooms[1].finish(first_token=1)
    await until(lambda: prefill.sender.statistics()["bytes_sent"] > 0)


async def test_tokens_that_would_be_stored_are_those_of_the_digest(world, decode) -> None:
    prefill = await world.prefill()
    tokens = bytes(range(8))
    good = digest_of(tokens, b"")
    named = {"tokens": 2, "promised": 0, "pages": [1]}
    decode.promise = _with(decode.promise, key_seed=b"", prompt_digest=good.digest)
    _, room = await _open(decode, prefill, good, **named)
    for wrong in (bytes(8), bytes(4)):
        with pytest.raises(InvalidRequest):
            await room.finish(first_token=1, tokens=wrong)
    await room.send([30], start_token=0)
    await room.finish(first_token=1, tokens=tokens)
    assert room.tokens == tokens
    # A promise whose own tokens are others contradicts itself.
    decode.promise = _with(decode.promise, tokens=bytes(8))
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room("r2"), **named))
    failed = await decode.receive(link)
    assert "tokens that are not those of its digest" in failed.cause
    assert RemoteProtocolError.__name__ not in failed.cause


def _with(promise, **changes):
    return lambda *args, **more: replace(promise(*args, **more), **changes)


async def _open(decode, prefill, prompt, **named):
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room(), **named))
    return link, await prefill.room("r1", prompt)


def test_digests_differ_in_tokens_length_and_namespace() -> None:
    digests = [
        digest_of(packed, seed).digest
        for packed in (b"", b"\0\0\0\0", b"\0\0\0\0\0\0\0\0", b"\1\0\0\0")
        for seed in (b"", bytes(32), bytes([1]) * 32)
    ]
    assert len(set(digests)) == len(digests)
    assert PROMPT.digest == DIGEST == digest_of(b"", b"").digest
