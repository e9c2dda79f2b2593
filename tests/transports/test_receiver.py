"""The hand-over over loopback, seen from the decode side: every way in which a room begins and ends."""

from __future__ import annotations

import asyncio

import pytest

from tidekv.states import events
from tidekv.states.errors import InvalidConfig, LocalProtocolError
from tidekv.states.shapes import page_ids
from tidekv.transports import hello, wire
from tidekv.transports.loopback import LoopbackTransport


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
    for now_s in (9.0, 18.0, 27.0):
        answered = world.watch(lambda sender, message: sender == prefill.transport.instance)
        await answered.wait()
        prefill.sender.check_leases()
        assert room.peer.lease_until_s == now_s + 10.0
    assert room.cause is None
    assert not decode.of(events.WriterLost)


# --- What a peer that breaks the protocol can do ---


class Rogue:
    """A prefill that says what a test wants."""

    def __init__(self, world, address: str = "rogue:1") -> None:
        self.pool = world.Pool(8)
        self.identity = world.identity()
        self.transport = LoopbackTransport("rogue", world.network)
        self.address = address
        self.link = None
        self.opened = asyncio.Event()
        self.heard: list[wire.Message] = []
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
        link.send(hello.make_hello(self.transport, memory=self.pool.memory, identity=self.identity, lease_s=1.0))
        self.link = link
        self.opened.set()
        try:
            while True:
                self.heard.append(await link.receive())
                self._news.set()
        except Exception as error:
            self.heard.append(wire.Bye(cause=str(error)))
            self._news.set()

    async def hear(self, kind: type) -> wire.Message:
        async with asyncio.timeout(5):
            while not (found := [message for message in self.heard if isinstance(message, kind)]):
                self._news.clear()
                await self._news.wait()
        return found[-1]


@pytest.fixture
async def rogue(world) -> Rogue:
    rogue = Rogue(world)
    await rogue.start()
    return rogue


def chunk(room: wire.Room, **changes: object) -> wire.Chunk:
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
    room = (await rogue.hear(wire.Promise)).room
    first = next(message.room for message in rogue.heard if isinstance(message, wire.Promise))
    assert (first.request_id, room.request_id) == ("r1", "r2")
    rogue.link.send(chunk(first, **wrong))
    failed = await decode.wait(events.RoomFailed)
    assert (failed.request_id, failed.settled) == ("r1", False)
    assert "broke the protocol" in failed.cause
    # Prefill is told to stop without an abort of the core; what it still says is late.
    assert (await rogue.hear(wire.Abort)).room == first
    rogue.link.send(chunk(first))
    rogue.link.send(wire.Drained(room=first, rank=0))
    await decode.wait(events.RoomDrained, request_id="r1")
    rogue.link.send(chunk(room, count=2, last=True))
    await decode.wait(events.ChunkLanded, request_id="r2", last=True)
    assert len(decode.of(events.ChunkLanded)) == 1
    assert decode.receiver.counts["rooms_broken"] == 1
    assert decode.receiver.counts["frames_late"] == 1


async def test_chunks_after_the_last_and_backwards_are_broken(world, rogue) -> None:
    decode = await world.decode()
    for name in ("r1", "r2"):
        decode.promise(rogue.address, name, tokens=16, promised=8, pages=[1, 2])
    await decode.wait(events.PromiseSent, count=2)
    await rogue.hear(wire.Promise)
    one, two = (message.room for message in rogue.heard if isinstance(message, wire.Promise))
    rogue.link.send(chunk(one, count=2, last=True))
    rogue.link.send(chunk(one, first=4, count=0, last=True))
    assert "after the span's last" in (await decode.wait(events.RoomFailed, request_id="r1")).cause
    rogue.link.send(chunk(two))
    rogue.link.send(chunk(two))
    assert "does not follow" in (await decode.wait(events.RoomFailed, request_id="r2")).cause


async def test_foreign_rooms_are_dropped_and_counted(world, rogue) -> None:
    decode = await world.decode()
    decode.promise(rogue.address, "r1", tokens=16, promised=8, pages=[1, 2], generation=4)
    room = (await rogue.hear(wire.Promise)).room
    for changes in ({"instance": "other"}, {"epoch": "before"}, {"request_id": "r"}, {"generation": 3}):
        fields = {"instance": room.instance, "epoch": room.epoch, "request_id": "r1", "generation": 4} | changes
        rogue.link.send(chunk(wire.Room(**fields), count=2, last=True))
        rogue.link.send(wire.Drained(room=wire.Room(**fields), rank=0))
    rogue.link.send(chunk(room, count=2, last=True))
    await decode.wait(events.ChunkLanded)
    assert len(decode.events) == 2
    assert decode.receiver.counts["frames_foreign"] == 8


async def test_a_second_aux_is_late_and_drained_without_a_cause_fails_the_room(world, rogue) -> None:
    decode = await world.decode()
    decode.promise(rogue.address, "r1", tokens=16, promised=8, pages=[1, 2])
    room = (await rogue.hear(wire.Promise)).room
    rogue.link.send(wire.Aux(room=room, rank=0, first_token=3, aux={"a": 1}, cached={"l1": 4}))
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
    room = (await rogue.hear(wire.Promise)).room
    rogue.link.send(message(room=room))
    lost = await decode.wait(events.WriterLost)
    assert message.__name__ in lost.cause
    assert message.__name__ in (await rogue.hear(wire.Bye)).cause


async def test_a_peer_that_does_not_begin_with_hello_is_refused(world) -> None:
    decode = await world.decode()
    transport = LoopbackTransport("mute", world.network)
    await transport.start(poller=None)

    async def serve(link) -> None:
        link.send(wire.Ping(sent_at=0.0))
        await asyncio.Event().wait()

    listener = await transport.listen("mute:1", serve)
    decode.promise("mute:1", "r1", tokens=4, promised=0, pages=[1])
    assert "instead of Hello" in (await decode.wait(events.RoomFailed, settled=True)).cause
    await listener.close()
    await transport.close()


# --- Calls that are wrong ---


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
