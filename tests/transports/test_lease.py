"""How long prefill keeps a room: leases, lost links, and peers that are forgotten."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.waits import LIMIT_S
from tidekv.states.errors import InvalidConfig
from tidekv.transports import wire


async def test_the_lease_ends_a_room_and_stops_its_writes(world, decode) -> None:
    now_s = 0.0
    prefill = await world.prefill(lease_s=10.0, clock=lambda: now_s)
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room()))
    room = await prefill.room("r1")
    await room.send([30], start_token=0)
    assert isinstance(await decode.hear(link), wire.Chunk)
    now_s = 9.9
    link.send(wire.Ping(sent_at=0.0))
    assert isinstance(await decode.hear(link), wire.Ping)
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
    room.expire()
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
    with pytest.raises(InvalidConfig, match="lease_s"):
        await world.prefill(lease_s=0.0)
