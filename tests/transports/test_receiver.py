"""The hand-over over loopback, seen from the decode side: every way in which a room begins and ends."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tidekv.states import events
from tidekv.states.errors import InvalidConfig, LocalProtocolError
from tidekv.states.shapes import GroupIdentity, page_ids
from tidekv.transports import wire


async def done(decode, request_id: str, *, spans: int = 1) -> None:
    """Wait until each span's last chunk and the aux of a request are there."""
    await decode.wait(events.ChunkLanded, request_id=request_id, last=True, count=spans) if spans else None
    await decode.wait(events.AuxLanded, request_id=request_id)


async def test_a_whole_prompt_arrives_with_its_first_token(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=22, promised=0, pages=range(10, 16))
    room = await prefill.serve("r1", range(30, 36))
    await decode.wait(events.ChunkLanded, last=True)
    await decode.wait(events.AuxLanded)
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
    await done(decode, "r1")
    assert world.same(decode, prefill, [(10, 34), (11, 35)])
    assert prefill.transport.statistics()["bytes_written"] == 2 * world.PAGE_BYTES
    chunks = decode.of(events.ChunkLanded)
    assert [page for chunk in chunks for page in range(chunk.first, chunk.first + chunk.count)] == [4, 5]
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("sends", [True, False])
async def test_a_full_hit_moves_nothing_and_still_brings_the_first_token(world, sends: bool) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=24, promised=24, pages=[])
    await prefill.serve("r1", range(30, 36) if sends else [])
    await done(decode, "r1")
    (chunk,) = decode.of(events.ChunkLanded)
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
    await done(decode, "r1")
    if when == "after":
        decode.receiver.extend("r1", 0, 1, 1, page_ids([20, 21]))
    await decode.wait(events.ChunkLanded, span=1, last=True)
    assert world.same(decode, prefill, [(10, 34), (11, 35), (20, 31), (21, 32)])
    decode.receiver.received("r1", 0)
    assert await room.received() == "received"
    assert prefill.sender.statistics()["pages_sent"] == 4


async def test_an_extend_of_a_full_hit_that_prefill_never_sent_is_refused(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=24, promised=24, pages=[])
    await prefill.serve("r1", [])
    await done(decode, "r1")
    decode.receiver.extend("r1", 0, 1, 0, page_ids([20]))
    refused = await decode.wait(events.RoomRefused)
    assert (refused.request_id, refused.generation, refused.span) == ("r1", 0, 1)


async def test_a_lease_that_ended_while_decode_lives_is_told_and_drained(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    room = await prefill.room("r1")
    room.expire()
    assert await room.received() == "lease ended"
    assert "not heard of" in (await decode.wait(events.RoomFailed, settled=False)).cause
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
    # The bytes landed before the word: whoever gets the pages next is safe.
    assert world.same(decode, prefill, [(0, 30), (3, 33)])
    assert not decode.of(events.ChunkLanded)
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
    await done(decode, "r2")
    assert [event.request_id for event in decode.of(events.PromiseSent)] == ["r2"]
    assert prefill.sender.statistics()["rooms_finished"] == 1


async def test_an_abort_of_an_unknown_room_is_drained_at_once(world) -> None:
    decode = await world.decode()
    decode.receiver.abort("never", 3)
    assert decode.of(events.RoomDrained, request_id="never", generation=3, rank=0)


async def test_an_unreachable_prefill_fails_the_room_settled(world) -> None:
    decode = await world.decode()
    decode.promise("nowhere:1", "r1", tokens=4, promised=0, pages=[1])
    decode.promise("nowhere:1", "r2", tokens=4, promised=0, pages=[2])
    failed = await decode.wait(events.RoomFailed, request_id="r2")
    assert failed.settled
    assert "nowhere:1" in failed.cause
    assert decode.of(events.RoomFailed, request_id="r1", settled=True)
    assert not decode.of(events.WriterLost)
    prefill = await world.prefill("nowhere:1")
    decode.promise("nowhere:1", "r1", tokens=4, promised=0, pages=[1], generation=1)
    await prefill.serve("r1", [30])
    await done(decode, "r1")


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("page_size", 8), ("dtype", "bfloat16"), ("kind", "mla"), ("piece_bytes", (16, 16))],
)
async def test_a_mismatch_names_the_field_and_fails_the_room_settled(world, field: str, value: object) -> None:
    decode = await world.decode()
    prefill = await world.prefill(identity=world.identity(**{field: value}))
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    failed = await decode.wait(events.RoomFailed)
    assert failed.settled
    assert f"differs in {field}" in failed.cause
    assert repr(value) in failed.cause
    assert prefill.sender.statistics()["peers"] == 0


DRAFT = GroupIdentity(name="draft", kind="mha", dtype="uint8", layers=1, kv_heads=1, head_dim=2)
SCALES = msgspec.structs.replace(DRAFT, name="scales")


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ((DRAFT,), (), "layer group 'draft' of a page: ours is GroupIdentity(name='draft'"),
        ((), (DRAFT,), "layer group 'draft' of a page: ours is 'absent', theirs is GroupIdentity(name='draft'"),
        ((SCALES, DRAFT), (SCALES,), "layer group 'draft' of a page"),
        ((DRAFT,), (msgspec.structs.replace(DRAFT, head_dim=4),), "head_dim of layer group 'draft': ours is 2"),
        ((DRAFT, SCALES), (SCALES, DRAFT), "order of layer groups: ours is ('draft', 'scales')"),
    ],
)
async def test_a_side_without_a_layer_group_is_refused_by_the_groups_name(
    world, ours: tuple[GroupIdentity, ...], theirs: tuple[GroupIdentity, ...], words: str
) -> None:
    # Another group is other bytes a page as well: the group is what is told.
    decode = await world.decode(identity=world.identity(groups=ours))
    prefill = await world.prefill(identity=world.identity(groups=theirs, page_bytes=64))
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    failed = await decode.wait(events.RoomFailed)
    assert failed.settled
    assert words in failed.cause
    assert "page_bytes" not in failed.cause.partition("(")[0]


async def test_another_rank_is_a_mismatch(world) -> None:
    decode, prefill = await world.decode(ranks=2), await world.prefill(ranks=2, rank=1)
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    assert "differs in rank" in (await decode.wait(events.RoomFailed, settled=True)).cause


async def test_two_requests_at_once_do_not_meet(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=32, promised=8, pages=range(6))
    decode.promise(prefill.address, "r10", tokens=32, promised=0, pages=range(10, 18))
    rooms = await asyncio.gather(
        prefill.serve("r1", range(20, 28), chunk=1, first_token=1),
        prefill.serve("r10", range(40, 48), chunk=2, first_token=2),
    )
    await done(decode, "r1")
    await done(decode, "r10")
    assert world.same(decode, prefill, zip(range(6), range(22, 28), strict=True))
    assert world.same(decode, prefill, zip(range(10, 18), range(40, 48), strict=True))
    assert sorted((told[0], told[2]) for told in decode.aux) == [("r1", 1), ("r10", 2)]
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
    await done(one, "same")
    two.promise(prefill.address, "same", tokens=8, promised=4, pages=[3])
    second = await rooms.get()
    assert await prefill.room("same") is second
    await second.send([40, 41], start_token=0)
    await second.finish(first_token=5)
    await done(two, "same")
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
    await decode.wait(events.AuxLanded, generation=1)
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


async def test_a_lost_link_is_lost_once_and_the_same_process_settles_its_rooms(world) -> None:
    gate = world.Gate(world.network)
    decode, prefill = await world.decode(heartbeat_s=0.01, missed_s=0.05), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=16, promised=0, pages=range(4))
    room = await prefill.room("r1")
    await room.send(range(30, 34), start_token=0)
    await gate.reached.wait()
    # A ping of prefill that comes after our abort: then prefill has taken the abort of the new link.
    aborted = world.watch(lambda sender, message: isinstance(message, wire.Abort))
    world.network.cut(decode.transport.instance)
    lost = await decode.wait(events.WriterLost)
    assert lost.writer == prefill.transport.instance
    decode.receiver.abort("r1", 0)
    await aborted.wait()
    answered = world.watch(lambda sender, message: sender == lost.writer and isinstance(message, wire.Ping))
    await answered.wait()
    # The redial found the same process, but the write is still in flight.
    assert decode.receiver.statistics()["redials"] == 1
    assert not decode.of(events.RoomDrained)
    gate.open.set()
    await decode.wait(events.RoomDrained, request_id="r1")
    assert world.same(decode, prefill, [(0, 30)])
    assert await room.received() == "aborted"
    assert len(decode.of(events.WriterLost)) == 1
    assert not decode.of(events.WriterDead)
    assert decode.receiver.statistics()["rooms_unsettled"] == 0


async def test_a_dead_writer_settles_its_rooms_and_its_successor_is_another_one(world) -> None:
    gate = world.Gate(world.network)
    decode, prefill = await world.decode(heartbeat_s=0.01, missed_s=0.05), await world.prefill("prefill:1")
    decode.promise("prefill:1", "r1", tokens=8, promised=0, pages=[1, 2])
    room = await prefill.room("r1")
    await room.send([30, 31], start_token=0)
    await gate.reached.wait()
    world.network.kill(prefill.transport.instance)
    writer = prefill.transport.instance
    await decode.wait(events.WriterLost, writer=writer)
    await decode.wait(events.WriterDead, writer=writer)
    gate.open.set()
    assert decode.events.index(decode.of(events.WriterLost)[0]) < decode.events.index(decode.of(events.WriterDead)[0])
    again = await world.prefill("prefill:1")
    decode.promise("prefill:1", "r1", tokens=8, promised=0, pages=[3, 4], generation=1)
    await again.serve("r1", [30, 31])
    await done(decode, "r1")
    assert decode.of(events.PromiseSent)[-1].writer == again.transport.instance != writer
    # Nothing of the dead writer landed after its death was told.
    assert decode.pool.page(1) == bytes(world.PAGE_BYTES)
    assert decode.receiver.statistics()["rooms_unsettled"] == 0


async def test_a_writer_reached_by_two_addresses_is_lost_as_one(world) -> None:
    decode, prefill = await world.decode(), await world.prefill("prefill:1")
    world.network._listeners["alias:1"] = world.network.listener("prefill:1")
    decode.promise("prefill:1", "r1", tokens=8, promised=0, pages=[1, 2])
    decode.promise("alias:1", "r2", tokens=8, promised=0, pages=[3, 4])
    (await prefill.room("r1")).deliveries[0].peer.link.break_off("cut")
    other = await prefill.room("r2")
    await decode.wait(events.WriterLost)
    # The core gives up both rooms, so both have to settle.
    await decode.wait(events.RoomDrained, request_id="r2")
    assert await other.received() == "aborted"
    await decode.wait(events.RoomDrained, request_id="r1")
    assert len(decode.of(events.WriterLost)) == 1


async def test_a_silent_peer_is_lost_though_its_link_is_open(world) -> None:
    decode, prefill = await world.decode(heartbeat_s=0.01, missed_s=0.03), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    await decode.wait(events.PromiseSent)
    world.network.loses = lambda sender, message: True
    lost = await decode.wait(events.WriterLost)
    assert "not heard of" in lost.cause


async def test_pings_keep_a_link_and_its_lease_alive(world) -> None:
    now_s = 0.0

    def clock() -> float:
        return now_s

    decode = await world.decode(heartbeat_s=0.01, missed_s=0.05, lease_s=0.2)
    prefill = await world.prefill(lease_s=10.0, clock=clock)
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    room = await prefill.room("r1")
    # More rounds than the beats that may be missed.
    for now_s in range(9, 9 * 12, 9):
        answered = world.watch(lambda sender, message: sender == prefill.transport.instance)
        await answered.wait()
        prefill.sender.check_leases()
        assert room.lease_until_s == now_s + 10.0
    assert room.cause is None
    assert not decode.of(events.WriterLost)


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
    await done(decode, "r2")


async def test_a_promise_over_the_limit_of_a_frame_fails_its_room_only(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    count = wire.FRAME_BYTES_MAX // 4
    decode.receiver.promise(
        prefill.address, "r1", 0, prompt_tokens=count, promised_tokens=count, pages=page_ids(), tokens=bytes(4 * count)
    )
    decode.promise(prefill.address, "r2", tokens=4, promised=0, pages=[2])
    failed = await decode.wait(events.RoomFailed)
    assert (failed.request_id, failed.settled) == ("r1", True)
    assert "at most" in failed.cause
    await prefill.serve("r2", [30])
    await done(decode, "r2")


async def test_times_must_make_sense(world) -> None:
    with pytest.raises(InvalidConfig, match="heartbeat_s"):
        await world.decode(heartbeat_s=3.0)
