"""How long prefill keeps a room: leases, lost links, and peers that are forgotten."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.support.waits import LIMIT_S
from tidekv.states import events
from tidekv.states.errors import InvalidConfig, LinkClosed
from tidekv.transports import wire
from tidekv.transports.decode import prefill_link


async def test_the_lease_ends_a_room_and_stops_its_writes(world, decode) -> None:
    now_s = 0.0
    prefill = await world.prefill(lease_s=10.0, clock=lambda: now_s)
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room()))
    room = await prefill.room("r1")
    await room.send([30], start_token=0)
    assert isinstance(await decode.receive(link), wire.Chunk)
    now_s = 9.9
    link.send(wire.Ping(sent_at=0.0, rooms=(("r1", 0),)))
    assert isinstance(await decode.receive(link), wire.Ping)
    now_s = 19.8
    prefill.sender.check_leases()
    assert room.cause is None
    # The lease is looked at before each write too, not only by the timer.
    now_s = 20.0
    await room.send([31], start_token=4)
    assert await room.received() == "lease ended"
    assert room.aborted.is_set()
    assert prefill.transport.statistics()["writes"] == 1


async def test_the_lease_does_not_end_a_room_with_a_write_in_flight(world, decode) -> None:
    gate = world.Gate(world.network)
    now_s = 0.0
    prefill = await world.prefill(lease_s=10.0, clock=lambda: now_s)
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room()))
    room = await prefill.room("r1")
    await room.send([30, 31], start_token=0)
    await gate.reached.wait()
    now_s = 11.0
    prefill.sender.check_leases()
    received = asyncio.create_task(room.received())
    await asyncio.sleep(0)
    assert room.outcome == "lease ended"
    assert not received.done()
    assert prefill.sender.statistics()["rooms_draining"] == 1
    gate.open.set()
    assert await received == "lease ended"


async def test_the_timer_looks_at_leases_while_there_are_rooms(world, decode) -> None:
    prefill = await world.prefill(lease_s=0.05)
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room()))
    room = await prefill.room("r1")
    async with asyncio.timeout(LIMIT_S):
        assert await room.received() == "lease ended"
    assert prefill.sender._lease_timer is None or not prefill.sender._rooms


async def test_a_lost_link_pauses_rooms_until_the_lease_ends(world, decode) -> None:
    now_s = 0.0
    prefill = await world.prefill(lease_s=10.0, clock=lambda: now_s)
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room()))
    room = await prefill.room("r1")
    await link.close("lost")
    await room.aborted.wait()
    await room.send([30, 31], start_token=0)
    await room.finish(first_token=1)
    prefill.sender.check_leases()
    assert room.outcome is None
    assert prefill.transport.statistics()["writes"] == 0
    now_s = 10.0
    prefill.sender.check_leases()
    assert await room.received() == "lease ended"
    assert prefill.sender.statistics()["rooms_draining"] == 0


async def test_a_peer_is_forgotten_when_its_link_and_its_rooms_are_gone(world, decode) -> None:
    prefill = await world.prefill()
    forgotten = asyncio.Queue()

    async def remove_peer(peer) -> None:
        forgotten.put_nowait(peer.instance)

    prefill.transport.remove_peer = remove_peer
    idle = await decode.dial(prefill.address)
    await idle.close()
    assert await forgotten.get() == decode.transport.instance
    busy = await decode.dial(prefill.address)
    busy.send(decode.promise(decode.room()))
    room = await prefill.room("r1")
    await busy.close()
    await room.aborted.wait()
    assert forgotten.empty()
    room._expire()
    assert await forgotten.get() == decode.transport.instance
    assert prefill.sender.statistics()["peers"] == 0


async def test_received_over_another_link_ends_a_paused_room(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room()))
    room = await prefill.room("r1")
    await link.close("lost")
    await room.aborted.wait()
    again = await decode.dial(prefill.address)
    again.send(wire.Received(room=decode.room()))
    assert await room.received() == "received"


async def test_a_lease_must_be_positive(world) -> None:
    for lease_s in (0.0, float("inf"), float("nan")):
        with pytest.raises(InvalidConfig, match="lease_s"):
            await world.prefill(lease_s=lease_s)
        with pytest.raises(InvalidConfig, match="lease_s"):
            await world.decode(lease_s=lease_s)
    with pytest.raises(InvalidConfig, match="heartbeat_s < lease_s"):
        await world.decode(heartbeat_s=1.0, missed_s=1.0, lease_s=1.0)


async def test_rooms_do_not_end_because_prefills_own_loop_was_late_for_their_pings(world, decode) -> None:
    now_s = 0.0
    prefill = await world.prefill(lease_s=10.0, clock=lambda: now_s)
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room("r")))
    room = await prefill.room("r")
    now_s = 11.0
    prefill.sender._on_lease_timer(float("-inf"))
    assert room.outcome is None
    # One check is left out, not all of a loop that is always late.
    prefill.sender._on_lease_timer(float("-inf"))
    assert room.outcome == "lease ended"


async def test_a_room_that_decode_does_not_name_ends_with_its_lease_though_decode_lives(world, decode) -> None:
    now_s = 0.0
    prefill = await world.prefill(lease_s=10.0, clock=lambda: now_s)
    link = await decode.dial(prefill.address)
    for name in ("lost", "extended", "kept"):
        link.send(decode.promise(decode.room(name)))
    rooms = {name: await prefill.room(name) for name in ("lost", "extended", "kept")}
    now_s = 9.0
    link.send(decode.extend(decode.room("extended"), 1, 0))
    # Another generation, and a room that there is not, renew nothing.
    link.send(wire.Ping(sent_at=0.0, rooms=(("kept", 0), ("lost", 1), ("never", 0))))
    assert isinstance(await decode.receive(link), wire.Ping)
    now_s = 10.0
    prefill.sender.check_leases()
    assert {name: room.outcome for name, room in rooms.items()} == {
        "lost": "lease ended",
        "extended": None,
        "kept": None,
    }
    failed = await decode.receive(link)
    assert isinstance(failed, wire.FailedRoom)
    assert "did not name the room for 10 s" in failed.cause


async def test_pages_of_a_room_whose_received_was_lost_are_given_back(world) -> None:
    decode = await world.decode(heartbeat_s=0.01, missed_s=0.5, lease_s=0.6)
    prefill = await world.prefill(lease_s=30.0)
    for name in ("r1", "r2"):
        decode.promise(prefill.address, name, tokens=8, promised=0, pages=[1, 2])
    served, other = await prefill.serve("r1", [30, 31]), await prefill.room("r2")
    await decode.wait_done("r1")
    world.network.loses = lambda sender, message: isinstance(message, wire.Received)
    decode.receiver.received("r1", 0)
    async with asyncio.timeout(20):
        assert await served.received() == "lease ended"
    assert other.cause is None
    assert prefill.sender.statistics()["rooms_finished"] == 0


@pytest.mark.parametrize(("asked_s", "given_s"), [(4.0, 4.0), (40.0, 10.0)])
async def test_the_lease_is_what_decode_asks_for_bounded_by_prefills_own(
    world, decode, asked_s: float, given_s: float
) -> None:
    now_s = 0.0
    prefill = await world.prefill(lease_s=10.0, clock=lambda: now_s)
    link = await decode.dial(prefill.address, msgspec.structs.replace(decode.hello(), lease_s=asked_s))
    link.send(decode.promise(decode.room()))
    room = await prefill.room("r1")
    now_s = given_s - 0.1
    prefill.sender.check_leases()
    assert room.outcome is None
    now_s = given_s
    prefill.sender.check_leases()
    assert room.outcome == "lease ended"


async def test_a_heartbeat_that_is_not_shorter_than_the_lease_is_refused_at_hello(world, decode) -> None:
    prefill = await world.prefill(lease_s=2.0)
    link = await decode.dial(prefill.address, msgspec.structs.replace(decode.hello(), heartbeat_s=2.0))
    with pytest.raises(LinkClosed, match="heartbeat_s, which must be less than the lease of 2 s"):
        await decode.receive(link)
    receiving = await world.decode(name="decode-1", heartbeat_s=2.0, missed_s=4.0, lease_s=8.0)
    receiving.promise(prefill.address, "r1", tokens=8, promised=0, pages=[1, 2])
    failed = await receiving.wait(events.RoomFailed)
    assert failed.settled
    assert "heartbeat_s, which must be less than the lease of 2 s: ours is 2.0" in failed.cause
    # It is configured in another way, and broke nothing: it is not kept away.
    assert prefill.sender.statistics()["violations"] == 0


async def test_a_room_that_waits_for_other_ranks_ends_with_its_lease(world, decode) -> None:
    now_s = 0.0
    prefill = await world.prefill(lease_s=10.0, clock=lambda: now_s)
    link = await decode.dial(prefill.address, msgspec.structs.replace(decode.hello(), ranks=2, kv_heads_total=1))
    for name in ("r1", "r2"):
        link.send(msgspec.structs.replace(decode.promise(decode.room(name)), ranks=2, group="g"))
    link.send(wire.Ping(sent_at=0.0))
    assert isinstance(await decode.receive(link), wire.Ping)
    now_s = 9.0
    link.send(wire.Ping(sent_at=0.0, rooms=(("r2", 0),)))
    assert isinstance(await decode.receive(link), wire.Ping)
    assert prefill.sender.statistics()["rooms_pending"] == 2
    now_s = 10.0
    prefill.sender.check_leases()
    refused = await decode.receive(link)
    assert isinstance(refused, wire.Refused)
    assert refused.room.request_id == "r1"
    assert prefill.sender.statistics()["rooms_pending"] == 1


def test_many_rooms_are_named_in_several_pings() -> None:
    rooms = [(f"r{number}", number) for number in range(2 * wire.ROOMS_NAMED_MAX + 1)]
    named = prefill_link.batches(rooms, wire.ROOMS_NAMED_MAX)
    assert [len(batch) for batch in named] == [wire.ROOMS_NAMED_MAX, wire.ROOMS_NAMED_MAX, 1]
    assert [room for batch in named for room in batch] == rooms
    longest = tuple(("\U0001f600" * wire.NAME_CHARACTERS_MAX, 2**63 - 1) for _ in range(wire.ROOMS_NAMED_MAX))
    assert len(wire.encode_frame(wire.Ping(sent_at=1.0, rooms=longest))) < wire.FRAME_BYTES_MAX


async def test_a_rank_that_has_received_all_need_not_name_the_room_for_the_others(world, decode) -> None:
    now_s = 0.0
    prefill = await world.prefill(lease_s=10.0, clock=lambda: now_s)
    other = type(decode)(world, "decode-1")
    await other.start()
    links = []
    for rank, dialler in enumerate((decode, other)):
        greeting = msgspec.structs.replace(dialler.hello(), rank=rank, ranks=2, kv_heads_total=1)
        links.append(await dialler.dial(prefill.address, greeting))
        promise = dialler.promise(dialler.room())
        links[rank].send(msgspec.structs.replace(promise, rank=rank, ranks=2, group="g"))
    room = await prefill.room("r1")
    links[0].send(wire.Received(room=decode.room()))
    now_s = 9.0
    # The first link's ping comes behind its Received, and names nothing.
    for link, dialler, rooms in ((links[0], decode, ()), (links[1], other, (("r1", 0),))):
        link.send(wire.Ping(sent_at=0.0, rooms=rooms))
        assert isinstance(await dialler.receive(link), wire.Ping)
    now_s = 18.0
    prefill.sender.check_leases()
    assert room.outcome is None
    now_s = 19.0
    prefill.sender.check_leases()
    assert room.outcome == "lease ended"
