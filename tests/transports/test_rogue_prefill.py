"""What a prefill that breaks the protocol can do to a decode worker: fail its own room, or lose its link."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.support.waits import LIMIT_S
from tidekv.states import events
from tidekv.transports import wire
from tidekv.transports.aux_values import encode_aux
from tidekv.transports.control import handshake as hello
from tidekv.transports.loopback import LoopbackTransport


class Rogue:
    """A prefill that sends what a test wants."""

    def __init__(self, world, address: str = "rogue:1") -> None:
        self.pool = world.Pool(8)
        self.identity = world.identity()
        self.lies: dict[str, object] = {}
        """Fields of its Hello that are not true."""
        self.says_hello = asyncio.Event()
        self.says_hello.set()
        self.transport = LoopbackTransport("rogue", world.network)
        self.address = address
        self.link = None
        self.accepted = asyncio.Event()
        self.opened = asyncio.Event()
        self.received: list[wire.Message] = []
        self._news = asyncio.Event()
        self.world = world

    async def start(self) -> None:
        await self.transport.start(poller=None)
        await self.transport.register(self.pool.memory)
        self.listener = await self.transport.listen(self.address, self._serve)
        self.world.closers.append(self.close)

    async def close(self) -> None:
        await self.listener.close()
        await self.transport.close()

    async def _serve(self, link) -> None:
        greeting = hello.make_hello(self.transport, memory=self.pool.memory, identity=self.identity, lease_s=1.0)
        self.accepted.set()
        await self.says_hello.wait()
        link.send(msgspec.structs.replace(greeting, **self.lies))
        self.link = link
        self.opened.set()
        try:
            while True:
                self.received.append(await link.receive())
                link.mark_greeted()
                self._news.set()
        except Exception as error:
            self.received.append(wire.Bye(cause=str(error)))
            self._news.set()

    async def receive(self, kind: type) -> wire.Message:
        async with asyncio.timeout(LIMIT_S):
            while not (found := [message for message in self.received if isinstance(message, kind)]):
                self._news.clear()
                await self._news.wait()
        return found[-1]


@pytest.fixture
async def rogue(world) -> Rogue:
    rogue = Rogue(world)
    await rogue.start()
    return rogue


def chunk(room: wire.RoomId, **changes: object) -> wire.Chunk:
    fields = {"rank": 0, "span": 0, "first": 2, "count": 1, "last": False} | changes
    return wire.Chunk(room=room, **fields)


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": 3},
        {"first": 1},
        {"count": 3},
        {"count": 2**31 - 1},
        {"last": True},
        {"span": 1},
        {"rank": 1},
    ],
    ids=["gap", "before the span", "beyond the end", "far beyond", "too early a last", "foreign span", "other rank"],
)
async def test_a_wrong_chunk_fails_its_room_and_no_other(world, rogue, wrong: dict[str, object]) -> None:
    decode = await world.decode()
    decode.promise(rogue.address, "r1", tokens=16, promised=8, pages=[1, 2])
    decode.promise(rogue.address, "r2", tokens=16, promised=8, pages=[3, 4])
    await decode.wait(events.PromiseSent, request_id="r2")
    room = (await rogue.receive(wire.Promise)).room
    first = next(message.room for message in rogue.received if isinstance(message, wire.Promise))
    assert (first.request_id, room.request_id) == ("r1", "r2")
    rogue.link.send(chunk(first, **wrong))
    failed = await decode.wait(events.RoomFailed)
    assert (failed.request_id, failed.settled) == ("r1", False)
    assert "broke the protocol" in failed.cause
    # Prefill is stopped without an abort of the core; what it still sends is late.
    assert (await rogue.receive(wire.Abort)).room == first
    rogue.link.send(chunk(first))
    rogue.link.send(wire.Drained(room=first, rank=0))
    await decode.wait(events.RoomDrained, request_id="r1")
    rogue.link.send(chunk(room, count=2, last=True))
    await decode.wait(events.ChunkReceived, request_id="r2", last=True)
    assert len(decode.of(events.ChunkReceived)) == 1
    assert decode.receiver.counts["rooms_broken"] == 1
    assert decode.receiver.counts["frames_late"] == 1


async def test_chunks_after_the_last_and_backwards_are_broken(world, rogue) -> None:
    decode = await world.decode()
    for name in ("r1", "r2"):
        decode.promise(rogue.address, name, tokens=16, promised=8, pages=[1, 2])
    await decode.wait(events.PromiseSent, count=2)
    await rogue.receive(wire.Promise)
    one, two = (message.room for message in rogue.received if isinstance(message, wire.Promise))
    rogue.link.send(chunk(one, count=2, last=True))
    rogue.link.send(chunk(one, first=4, count=0, last=True))
    assert "after the span's last" in (await decode.wait(events.RoomFailed, request_id="r1")).cause
    rogue.link.send(chunk(two))
    rogue.link.send(chunk(two))
    assert "does not continue at its cursor" in (await decode.wait(events.RoomFailed, request_id="r2")).cause


async def test_foreign_rooms_are_dropped_and_counted(world, rogue) -> None:
    decode = await world.decode()
    decode.promise(rogue.address, "r1", tokens=16, promised=8, pages=[1, 2], generation=4)
    room = (await rogue.receive(wire.Promise)).room
    for changes in ({"instance": "other"}, {"epoch": "before"}, {"request_id": "r"}, {"generation": 3}):
        fields = {"instance": room.instance, "epoch": room.epoch, "request_id": "r1", "generation": 4} | changes
        rogue.link.send(chunk(wire.RoomId(**fields), count=2, last=True))
        rogue.link.send(wire.Drained(room=wire.RoomId(**fields), rank=0))
    rogue.link.send(chunk(room, count=2, last=True))
    await decode.wait(events.ChunkReceived)
    assert len(decode.events) == 2
    assert decode.receiver.counts["frames_foreign"] == 8


async def test_a_second_aux_is_late_and_drained_without_a_cause_fails_the_room(world, rogue) -> None:
    decode = await world.decode()
    decode.promise(rogue.address, "r1", tokens=16, promised=8, pages=[1, 2])
    room = (await rogue.receive(wire.Promise)).room
    rogue.link.send(wire.Aux(room=room, rank=0, first_token=3, aux=encode_aux({"a": 1}), cached={"l1": 4}))
    rogue.link.send(wire.Aux(room=room, rank=0, first_token=4))
    rogue.link.send(wire.Drained(room=room, rank=0))
    await decode.wait(events.RoomDrained)
    assert decode.aux == [("r1", 0, 3, {"a": 1, "cached_tokens": {"l1": 4}})]
    assert not decode.of(events.RoomFailed)[0].settled
    assert decode.receiver.counts["frames_late"] == 1


@pytest.mark.parametrize("message", [wire.Received, wire.Abort])
async def test_a_message_of_the_wrong_direction_ends_the_link(world, rogue, message) -> None:
    decode = await world.decode()
    decode.promise(rogue.address, "r1", tokens=16, promised=8, pages=[1, 2])
    room = (await rogue.receive(wire.Promise)).room
    rogue.link.send(message(room=room))
    lost = await decode.wait(events.WriterLost)
    kind = message.__struct_config__.tag
    assert "may not send now: peer sent a frame of" in lost.cause
    assert kind in lost.cause
    assert kind in (await rogue.receive(wire.Bye)).cause


async def test_a_peer_that_does_not_begin_with_hello_is_refused(world) -> None:
    decode = await world.decode()
    transport = LoopbackTransport("mute", world.network)
    await transport.start(poller=None)

    async def serve(link) -> None:
        link.send(wire.Ping(sent_at=0.0))
        await asyncio.Event().wait()

    listener = await transport.listen("mute:1", serve)
    decode.promise("mute:1", "r1", tokens=4, promised=0, pages=[1])
    assert "may not send now" in (await decode.wait(events.RoomFailed, settled=True)).cause
    await listener.close()
    await transport.close()


async def test_a_prefill_with_metadata_of_another_agent_is_refused_at_hello(world, rogue) -> None:
    decode = await world.decode()
    rogue.lies = {"metadata": b"loopback prefill-0"}
    decode.promise(rogue.address, "r1", tokens=16, promised=8, pages=[1, 2])
    failed = await decode.wait(events.RoomFailed, request_id="r1")
    assert failed.settled
    assert f"metadata is not of {rogue.transport.instance}" in failed.cause


async def test_a_prefill_that_accepts_and_never_says_hello_is_given_up_like_one_that_falls_silent(world, rogue) -> None:
    rogue.says_hello.clear()
    decode = await world.decode(heartbeat_s=0.05, missed_s=0.2)
    decode.promise(rogue.address, "r1", tokens=16, promised=8, pages=[1, 2])
    failed = await decode.wait(events.RoomFailed, request_id="r1")
    assert failed.settled
    assert "did not complete the handshake within 0.2 s" in failed.cause
    assert not decode.of(events.PromiseSent)
    assert decode.receiver.statistics()["links"] == 0


async def test_a_room_waits_for_a_handshake_no_longer_than_its_share_and_others_go_on(world, rogue) -> None:
    rogue.says_hello.clear()
    rogue.lies = {"lease_s": 60.0}
    decode = await world.decode(heartbeat_s=15.0, missed_s=60.0, lease_s=60.0)
    decode.promise(rogue.address, "hasty", tokens=16, promised=8, pages=[1, 2], connect_s=0.05)
    decode.promise(rogue.address, "patient", tokens=16, promised=8, pages=[3, 4], connect_s=60.0)
    decode.promise(rogue.address, "without", tokens=16, promised=8, pages=[5, 6])
    decode.promise(rogue.address, "aborted", tokens=16, promised=8, pages=[7, 8], connect_s=0.05)
    decode.receiver.abort("aborted", 0)
    failed = await decode.wait(events.RoomFailed)
    assert (failed.request_id, failed.settled) == ("hasty", True)
    assert "was not connected within 0.05 s" in failed.cause
    rogue.says_hello.set()
    await decode.wait(events.PromiseSent, count=2)
    await rogue.receive(wire.Promise)
    asked = [message.room.request_id for message in rogue.received if isinstance(message, wire.Promise)]
    assert asked == ["patient", "without"]
    assert len(decode.of(events.RoomFailed)) == 1
    assert all(room.connect_timer is None for room in decode.receiver._rooms.values())


async def test_closing_a_receiver_in_a_handshake_closes_the_link_and_tells_nothing(world, rogue) -> None:
    rogue.says_hello.clear()
    decode = await world.decode()
    decode.promise(rogue.address, "r1", tokens=16, promised=8, pages=[1, 2], connect_s=0.05)
    await rogue.accepted.wait()
    await decode.receiver.close()
    assert not decode.transport.links
    assert decode.events == []
