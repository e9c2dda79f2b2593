"""The process behind a decode worker's rooms, over loopback: not there, unlike decode, lost, silent, dead, or well."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tests.support.waits import LIMIT_S, expected
from tidekv.states import events
from tidekv.states.errors import InvalidConfig, LinkClosed
from tidekv.states.types import GroupIdentity
from tidekv.transports import base, wire
from tidekv.transports.decode import prefill_link


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
    await decode.wait_done("r1")


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
    ("ours", "theirs", "text"),
    [
        ((DRAFT,), (), "layer group 'draft' of a page: ours is GroupIdentity(name='draft'"),
        ((), (DRAFT,), "layer group 'draft' of a page: ours is 'absent', theirs is GroupIdentity(name='draft'"),
        ((SCALES, DRAFT), (SCALES,), "layer group 'draft' of a page"),
        ((DRAFT,), (msgspec.structs.replace(DRAFT, head_dim=4),), "head_dim of layer group 'draft': ours is 2"),
        ((DRAFT, SCALES), (SCALES, DRAFT), "order of layer groups: ours is ('draft', 'scales')"),
    ],
)
async def test_a_side_without_a_layer_group_is_refused_by_the_groups_name(
    world, ours: tuple[GroupIdentity, ...], theirs: tuple[GroupIdentity, ...], text: str
) -> None:
    # Another group is other bytes a page as well: the group is what is reported.
    decode = await world.decode(identity=world.identity(groups=ours))
    prefill = await world.prefill(identity=world.identity(groups=theirs, page_bytes=64))
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    failed = await decode.wait(events.RoomFailed)
    assert failed.settled
    assert text in failed.cause
    assert "page_bytes" not in failed.cause.partition("(")[0]


async def test_another_rank_is_a_mismatch(world) -> None:
    decode, prefill = await world.decode(ranks=2), await world.prefill(ranks=2, rank=1)
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    assert "differs in rank" in (await decode.wait(events.RoomFailed, settled=True)).cause


async def test_a_lost_link_is_lost_once_and_the_same_process_settles_its_rooms(world) -> None:
    gate = world.Gate(world.network)
    decode, prefill = await world.decode(heartbeat_s=0.01, missed_s=5.0), await world.prefill()
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


async def test_a_link_that_is_lost_again_is_dialled_again(world) -> None:
    decode, prefill = await world.decode(heartbeat_s=0.01, missed_s=5.0), await world.prefill()
    for number in range(2):
        for name in ("gone", "kept"):
            decode.promise(prefill.address, f"{name} {number}", tokens=8, promised=0, pages=[1, 2])
            await decode.wait(events.PromiseSent, request_id=f"{name} {number}")
        world.network.cut(decode.transport.instance)
        await decode.wait(events.WriterLost, count=number + 1)
        # One room of the lost link is over; the other one is still to be settled.
        decode.receiver.received(f"gone {number}", 0)
        decode.receiver.abort(f"kept {number}", 0)
        async with expected("a redial that settles the room", limit_s=20.0):
            await decode.wait(events.RoomDrained, request_id=f"kept {number}")
            await asyncio.gather(*(task for task in asyncio.all_tasks() if ": redial " in task.get_name()))
    assert decode.receiver.statistics()["redials"] == 2
    assert decode.receiver.statistics()["rooms_unsettled"] == 0


async def test_a_dead_writer_settles_its_rooms_and_its_successor_is_another_one(world) -> None:
    gate = world.Gate(world.network)
    decode, prefill = await world.decode(heartbeat_s=0.01, missed_s=5.0), await world.prefill("prefill:1")
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
    await decode.wait_done("r1")
    assert decode.of(events.PromiseSent)[-1].writer == again.transport.instance != writer
    # Nothing of the dead writer arrived after its death was reported.
    assert decode.pool.page(1) == bytes(world.PAGE_BYTES)
    assert decode.receiver.statistics()["rooms_unsettled"] == 0


async def test_a_writer_reached_by_two_addresses_is_lost_as_one(world) -> None:
    decode, prefill = await world.decode(), await world.prefill("prefill:1")
    world.network._listeners["alias:1"] = world.network.listener("prefill:1")
    decode.promise("prefill:1", "r1", tokens=8, promised=0, pages=[1, 2])
    decode.promise("alias:1", "r2", tokens=8, promised=0, pages=[3, 4])
    (await prefill.room("r1"))._room_writers[0].peer.link.break_off("cut")
    other = await prefill.room("r2")
    await decode.wait(events.WriterLost)
    # The core gives up both rooms, so both have to settle.
    await decode.wait(events.RoomDrained, request_id="r2")
    assert await other.received() == "aborted"
    await decode.wait(events.RoomDrained, request_id="r1")
    assert len(decode.of(events.WriterLost)) == 1


async def test_a_silent_peer_is_lost_though_its_link_is_open(world) -> None:
    decode, prefill = await world.decode(heartbeat_s=0.01, missed_s=0.5), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    await decode.wait(events.PromiseSent)
    world.network.loses = lambda sender, message: True
    lost = await decode.wait(events.WriterLost)
    assert "was silent for" in lost.cause


async def test_pings_keep_a_link_and_its_lease_alive(world) -> None:
    now_s = 0.0

    def clock() -> float:
        return now_s

    decode = await world.decode(heartbeat_s=0.01, missed_s=5.0, lease_s=20.0)
    prefill = await world.prefill(lease_s=10.0, clock=clock)
    decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    room = await prefill.room("r1")
    # More rounds than the beats that may be missed.
    for now_s in range(9, 9 * 12, 9):
        # The second ping was taken by prefill at this time for sure.
        for _ in range(2):
            answered = world.watch(lambda sender, message: sender == prefill.transport.instance)
            await answered.wait()
        prefill.sender.check_leases()
        assert room._lease_until_s == now_s + 10.0
    assert room.cause is None
    assert not decode.of(events.WriterLost)


async def test_times_must_make_sense(world) -> None:
    with pytest.raises(InvalidConfig, match="heartbeat_s"):
        await world.decode(heartbeat_s=3.0)


@pytest.mark.parametrize("end", ["silence", "cancelled", "cancelled as it completes"])
async def test_a_dial_that_ends_without_a_handshake_leaves_no_link(
    world, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    dialled = asyncio.Event()

    async def mute(link: base.Link) -> None:
        dialled.set()
        with suppress(LinkClosed):
            while True:
                await link.receive()

    listening = world.transport("mute")
    await listening.start(poller=None)
    world.closers.append(listening.close)
    listener = await listening.listen("mute:0", mute)
    decode = await world.decode(heartbeat_s=0.01, missed_s=0.05 if end == "silence" else 5.0)
    if end == "cancelled as it completes":
        real = prefill_link.PrefillLink._within_silence

        async def completes(link: prefill_link.PrefillLink, work: Any) -> Any:
            await real(link, work)
            # The end of the handshake and the cancellation came in one iteration of the loop.
            raise asyncio.CancelledError

        monkeypatch.setattr(prefill_link.PrefillLink, "_within_silence", completes)
        prefill = await world.prefill()
        opened = world.watch(lambda sender, message: isinstance(message, wire.Hello))
        decode.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
        await asyncio.wait_for(opened.wait(), LIMIT_S)
        for _ in range(50):
            await asyncio.sleep(0)
    else:
        decode.promise(listener.address, "r1", tokens=8, promised=0, pages=[1, 2])
        await asyncio.wait_for(dialled.wait(), LIMIT_S)
        if end == "silence":
            failed = await decode.wait(events.RoomFailed)
            assert failed.settled and "handshake" in failed.cause
        else:
            await decode.receiver.close()
    assert decode.transport.links == set()
