"""The hand-over over loopback, seen from the decode side: every way in which a room begins and ends."""

from __future__ import annotations

import asyncio

import pytest

from tidekv.states import events
from tidekv.states.errors import LocalProtocolError
from tidekv.states.types import page_ids
from tidekv.transports import wire


async def test_a_whole_prompt_arrives_with_its_first_token(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=22, promised=0, pages=range(10, 16))
    room = await prefill.serve("r1", range(30, 36))
    await decode.wait(events.ChunkReceived, last=True)
    await decode.wait(events.AuxReceived)
    assert world.same(decode, prefill, zip(range(10, 16), range(30, 36), strict=True))
    assert decode.aux == [("r1", 0, 11, {"by": "prefill"})]
    assert prefill.sender.statistics()["bytes_sent"] == 6 * world.PAGE_BYTES
    sent = decode.of(events.PromiseSent)
    assert [(event.writer, event.ranks) for event in sent] == [(prefill.transport.instance, 1)]
    decode.receiver.received("r1", 0)
    assert await room.received() == "received"
    assert prefill.sender.statistics()["rooms_received"] == 1


async def test_only_the_delta_moves(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=22, promised=16, pages=[10, 11])
    await prefill.serve("r1", range(30, 36))
    await decode.wait_done("r1")
    assert world.same(decode, prefill, [(10, 34), (11, 35)])
    assert prefill.transport.statistics()["bytes_written"] == 2 * world.PAGE_BYTES
    chunks = decode.of(events.ChunkReceived)
    assert [page for chunk in chunks for page in range(chunk.first, chunk.first + chunk.count)] == [4, 5]
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("sends", [True, False])
async def test_a_full_hit_moves_nothing_and_still_brings_the_first_token(world, sends: bool) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=24, promised=24, pages=[])
    await prefill.serve("r1", range(30, 36) if sends else [])
    await decode.wait_done("r1")
    (chunk,) = decode.of(events.ChunkReceived)
    assert (chunk.first, chunk.count, chunk.last) == (6, 0, True)
    assert prefill.transport.statistics()["writes"] == 0
    assert decode.aux[0][2] == 11


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_extend_is_served_before_and_after_prefill_finished(world, when: str) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=24, promised=16, pages=[10, 11])
    if when == "before":
        decode.receiver.extend("r1", 0, 1, 1, page_ids([20, 21]))
    room = await prefill.serve("r1", range(30, 36))
    await decode.wait_done("r1")
    if when == "after":
        decode.receiver.extend("r1", 0, 1, 1, page_ids([20, 21]))
    await decode.wait(events.ChunkReceived, span=1, last=True)
    assert world.same(decode, prefill, [(10, 34), (11, 35), (20, 31), (21, 32)])
    decode.receiver.received("r1", 0)
    assert await room.received() == "received"
    assert prefill.sender.statistics()["pages_sent"] == 4


async def test_an_extend_of_a_full_hit_that_prefill_never_sent_is_refused(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=24, promised=24, pages=[])
    await prefill.serve("r1", [])
    await decode.wait_done("r1")
    decode.receiver.extend("r1", 0, 1, 0, page_ids([20]))
    refused = await decode.wait(events.RoomRefused)
    assert (refused.request_id, refused.generation, refused.span) == ("r1", 0, 1)


async def test_a_lease_that_ended_while_decode_lives_is_told_and_drained(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    room = await prefill.room("r1")
    room._expire()
    assert await room.received() == "lease ended"
    assert "did not name the room" in (await decode.wait(events.RoomFailed, settled=False)).cause
    await decode.wait(events.RoomDrained)


async def test_an_abort_is_drained_only_after_the_write_in_flight(world) -> None:
    gate = world.Gate(world.network)
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=16, promised=0, pages=range(4))
    room = await prefill.room("r1")
    sending = asyncio.create_task(room.send(range(30, 34), start_token=0))
    await gate.reached.wait()
    await sending
    decode.receiver.abort("r1", 0)
    await room.aborted.wait()
    settled = asyncio.create_task(room.received())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not decode.of(events.RoomDrained)
    assert not settled.done()
    assert decode.pool.page(0) == bytes(world.PAGE_BYTES)
    gate.open.set()
    drained = await decode.wait(events.RoomDrained)
    assert (drained.request_id, drained.generation, drained.rank) == ("r1", 0, 0)
    # The bytes arrived before the message: the next owner of the pages is safe.
    assert world.same(decode, prefill, [(0, 30), (3, 33)])
    assert not decode.of(events.ChunkReceived)
    assert await settled == "aborted"
    # What the prefill loop still does is harmless.
    await room.send([34], start_token=16)
    await room.finish(first_token=1)
    assert decode.receiver.statistics()["rooms_unsettled"] == 0


async def test_an_abort_while_connecting_is_drained_at_once_and_promises_nothing(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=16, promised=0, pages=range(4))
    decode.promise(prefill.address, "r2", tokens=4, promised=0, pages=[5])
    decode.receiver.abort("r1", 0)
    assert decode.of(events.RoomDrained, request_id="r1", rank=0)
    await prefill.serve("r2", [30])
    await decode.wait_done("r2")
    assert [event.request_id for event in decode.of(events.PromiseSent)] == ["r2"]
    assert prefill.sender.statistics()["rooms_finished"] == 1


async def test_an_abort_of_an_unknown_room_is_drained_at_once(world) -> None:
    decode = await world.decode()
    decode.receiver.abort("never", 3)
    assert decode.of(events.RoomDrained, request_id="never", generation=3, rank=0)


async def test_two_requests_at_once_do_not_meet(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=32, promised=8, pages=range(6))
    decode.promise(prefill.address, "r10", tokens=32, promised=0, pages=range(10, 18))
    rooms = await asyncio.gather(
        prefill.serve("r1", range(20, 28), chunk=1, first_token=1),
        prefill.serve("r10", range(40, 48), chunk=2, first_token=2),
    )
    await decode.wait_done("r1")
    await decode.wait_done("r10")
    assert world.same(decode, prefill, zip(range(6), range(22, 28), strict=True))
    assert world.same(decode, prefill, zip(range(10, 18), range(40, 48), strict=True))
    assert sorted((aux[0], aux[2]) for aux in decode.aux) == [("r1", 1), ("r10", 2)]
    decode.receiver.received("r10", 0)
    assert await rooms[1].received() == "received"
    assert not rooms[0].aborted.is_set()


async def test_two_decode_workers_use_one_prefill(world) -> None:
    rooms = asyncio.Queue()
    one, two = await world.decode(), await world.decode(name="decode-1")
    prefill = await world.prefill(on_room=rooms.put_nowait)
    one.promise(prefill.address, "same", tokens=8, promised=0, pages=[1, 2])
    first = await prefill.serve("same", [30, 31])
    assert await rooms.get() is first
    await one.wait_done("same")
    two.promise(prefill.address, "same", tokens=8, promised=4, pages=[3])
    second = await rooms.get()
    assert await prefill.room("same") is second
    await second.send([40, 41], start_token=0)
    await second.finish(first_token=5)
    await two.wait_done("same")
    assert world.same(one, prefill, [(1, 30), (2, 31)])
    assert world.same(two, prefill, [(3, 41)])
    two.receiver.received("same", 0)
    assert await second.received() == "received"
    one.receiver.received("same", 0)
    assert await first.received() == "received"


async def test_a_new_generation_replaces_the_older_one(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    old = await prefill.room("r1")
    decode.promise(prefill.address, "r1", tokens=8, promised=4, pages=[3], generation=1)
    assert await old.received() == "replaced"
    assert old.aborted.is_set()
    new = await prefill.serve("r1", [30, 31])
    assert new.generation == 1
    await decode.wait(events.AuxReceived, generation=1)
    decode.receiver.abort("r1", 0)
    await decode.wait(events.RoomDrained, generation=0)
    assert new.outcome is None


async def test_prefill_that_fails_says_why_and_then_drains(world) -> None:
    gate = world.Gate(world.network)
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    room = await prefill.room("r1")
    await room.send([30, 31], start_token=0)
    await gate.reached.wait()
    room.fail("out of memory")
    failed = await decode.wait(events.RoomFailed)
    assert (failed.cause, failed.settled) == ("out of memory", False)
    assert not decode.of(events.RoomDrained)
    gate.open.set()
    await decode.wait(events.RoomDrained)
    assert await room.received() == "failed"
    assert len(decode.of(events.RoomFailed)) == 1


async def test_a_room_is_promised_once(world) -> None:
    decode = await world.decode()
    decode.promise("nowhere:1", "r1", tokens=4, promised=0, pages=[1])
    with pytest.raises(LocalProtocolError, match="already"):
        decode.promise("nowhere:1", "r1", tokens=4, promised=0, pages=[1])
    await decode.wait(events.RoomFailed)


@pytest.mark.parametrize("name", ["", "x" * 600, "a\nb", "\ud800"])
async def test_a_request_id_that_no_frame_holds_fails_its_room_only(world, name: str) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, name, tokens=4, promised=0, pages=[1])
    decode.promise(prefill.address, "r2", tokens=4, promised=0, pages=[2])
    failed = await decode.wait(events.RoomFailed)
    assert (failed.request_id, failed.settled) == (name, True)
    await prefill.serve("r2", [30])
    await decode.wait_done("r2")


async def test_a_promise_over_the_limit_of_a_frame_fails_its_room_only(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    count = wire.FRAME_BYTES_MAX // 4
    decode.promise(prefill.address, "r1", tokens=count, promised=count, pages=[], packed=bytes(4 * count))
    decode.promise(prefill.address, "r2", tokens=4, promised=0, pages=[2])
    failed = await decode.wait(events.RoomFailed)
    assert (failed.request_id, failed.settled) == ("r1", True)
    assert "at most" in failed.cause
    await prefill.serve("r2", [30])
    await decode.wait_done("r2")
