"""The prefill side, spoken to frame by frame, and what its embedder may do wrong."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tidekv.states.errors import CapacityError, EngineClosed, InvalidRequest, LinkClosed, RemoteProtocolError
from tidekv.transports import wire
from tidekv.transports.aux_values import encode_aux
from tidekv.transports.control import handshake
from tidekv.transports.prefill.sender import OFFERS_MAX


async def test_chunks_and_aux_are_said_frame_by_frame(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    key = decode.room()
    link.send(decode.promise(key))
    room = await prefill.room("r1")
    assert (room.prompt_tokens, room.decode_prefix_len, room.tokens) == (8, 0, None)
    await room.send([30], start_token=0)
    assert await decode.receive(link) == wire.Chunk(room=key, rank=0, span=0, first=0, count=1, last=False)
    await room.send([31], start_token=4)
    assert await decode.receive(link) == wire.Chunk(room=key, rank=0, span=0, first=1, count=1, last=False)
    await room.finish(first_token=9, aux={"logprob": -0.5}, cached={"device": 4})
    assert await decode.receive(link) == wire.Aux(
        room=key, rank=0, first_token=9, aux=encode_aux({"logprob": -0.5}), cached={"device": 4}
    )
    assert await decode.receive(link) == wire.Chunk(room=key, rank=0, span=0, first=2, count=0, last=True)
    link.send(wire.Received(room=key))
    assert await room.received() == "received"
    assert room.cause == "decode has received all"
    assert not room.aborted.is_set()


async def test_a_chunk_is_said_only_after_its_write(world, decode) -> None:
    gate = world.Gate(world.network)
    prefill = await world.prefill()
    link, room = await decode.open_room(prefill)
    await room.send([30, 31], start_token=0)
    await room.finish(first_token=1)
    await gate.reached.wait()
    link.send(wire.Ping(sent_at=1.0))
    assert isinstance(await decode.receive(link), wire.Aux)
    assert await decode.receive(link) == wire.Ping(sent_at=1.0)
    gate.open.set()
    assert isinstance(await decode.receive(link), wire.Chunk)


async def test_the_promised_tokens_reach_prefill_as_bytes(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    link.send(replace(decode.promise(decode.room(), tokens=2, pages=[0]), tokens=b"12345678"))
    assert (await prefill.room("r1")).tokens == b"12345678"


async def test_no_more_prompts_of_one_worker_are_taken_at_once_than_so_many(world, decode) -> None:
    go_on = asyncio.Event()

    async def take(theirs: wire.Hello, offer: wire.OfferPrompt) -> wire.PromptTaken:
        await go_on.wait()
        return wire.PromptTaken(number=offer.number, there=1)

    prefill = await world.prefill(on_offer=take)
    link = await decode.dial(prefill.address)
    for number in range(OFFERS_MAX + 1):
        link.send(wire.OfferPrompt(number=number, namespace="", tokens=b"1234", heat=(0, 0, 0, 0), within_s=60.0))
    refused = await decode.receive(link)
    assert (refused.number, refused.there, refused.refuses) == (OFFERS_MAX, 0, False)
    assert "being taken already" in refused.cause
    go_on.set()
    taken = [await decode.receive(link) for _ in range(OFFERS_MAX)]
    assert sorted(each.number for each in taken) == list(range(OFFERS_MAX))
    link.send(wire.OfferPrompt(number=99, namespace="", tokens=b"1234", heat=(0, 0, 0, 0), within_s=60.0))
    assert (await decode.receive(link)).there == 1


async def test_a_repeated_promise_is_harmless(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    promise = decode.promise(decode.room())
    link.send(promise)
    room = await prefill.room("r1")
    link.send(promise)
    link.send(wire.Ping(sent_at=0.0))
    assert isinstance(await decode.receive(link), wire.Ping)
    assert prefill.sender.counts["promises_repeated"] == 1
    assert prefill.sender.statistics()["rooms_sending"] == 1
    link.send(wire.Received(room=decode.room()))
    await room.received()
    # Once ended it is not opened again by a late repeat.
    link.send(promise)
    assert isinstance(await decode.receive(link), wire.Refused)
    assert prefill.sender.statistics()["rooms_sending"] == 0


async def test_an_older_generation_is_refused(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room(generation=2)))
    link.send(decode.promise(decode.room(generation=1)))
    refused = await decode.receive(link)
    assert (refused.room.generation, refused.span) == (1, 0)
    assert (await prefill.room("r1")).generation == 2


async def test_an_abort_before_its_promise_keeps_the_room_shut(world, decode) -> None:
    """A promise may still lie unread on a link that broke, while the next link brings the abort."""
    prefill = await world.prefill()
    old, new = await decode.dial(prefill.address), await decode.dial(prefill.address)
    new.send(wire.Abort(room=decode.room()))
    assert isinstance(await decode.receive(new), wire.Drained)
    old.send(decode.promise(decode.room()))
    assert isinstance(await decode.receive(old), wire.Refused)
    assert prefill.sender.statistics()["rooms_sending"] == 0


async def test_frames_of_unknown_and_foreign_rooms_have_an_answer_or_are_counted(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    link.send(wire.Received(room=decode.room()))
    link.send(wire.FailedRoom(room=decode.room(), cause="x"))
    link.send(decode.extend(decode.room(), 1, 0))
    assert isinstance(await decode.receive(link), wire.Refused)
    link.send(wire.Abort(room=decode.room()))
    assert isinstance(await decode.receive(link), wire.Drained)
    foreign = wire.RoomId(instance="decode-0", epoch="other", request_id="r1", generation=0)
    link.send(decode.promise(foreign))
    link.send(wire.Abort(room=foreign))
    link.send(wire.Ping(sent_at=0.0))
    assert isinstance(await decode.receive(link), wire.Ping)
    assert prefill.sender.counts["frames_late"] == 4
    assert prefill.sender.counts["frames_foreign"] == 2


@pytest.mark.parametrize(
    "changes",
    [{"promised": 3}, {"promised": 12}, {"pages": (1,)}, {"pages": (1, 16)}, {"pages": (1, -1)}, {"pages": (1, 1)}],
    ids=["in a page", "beyond the prompt", "too few pages", "page not in the pool", "negative page", "a page twice"],
)
async def test_a_promise_that_is_wrong_fails_its_room_only(world, decode, changes) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room(), **changes))
    assert isinstance(await decode.receive(link), wire.FailedRoom)
    assert isinstance(await decode.receive(link), wire.Drained)
    link.send(decode.promise(decode.room("r2")))
    room = await prefill.room("r2")
    assert room.cause is None
    assert prefill.sender.statistics()["rooms_sending"] == 1


@pytest.mark.parametrize(("span", "first", "pages"), [(1, 2, (5,)), (1, 0, (16,)), (1, 2**31 - 1, (5,))])
async def test_an_extend_that_is_wrong_fails_its_room(world, decode, span, first, pages) -> None:
    prefill = await world.prefill()
    link, room = await decode.open_room(prefill)
    link.send(decode.extend(decode.room(), span, first, pages))
    assert isinstance(await decode.receive(link), wire.FailedRoom)
    assert isinstance(await decode.receive(link), wire.Drained)
    assert await room.received() == "failed"


async def test_a_message_of_the_wrong_direction_ends_the_link(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    link.send(wire.Drained(room=decode.room(), rank=0))
    with pytest.raises(LinkClosed, match=r"may not send now: .*drained"):
        await decode.receive(link)


async def test_a_first_message_that_is_no_hello_is_refused(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address, wire.Ping(sent_at=0.0))
    with pytest.raises(LinkClosed, match=r"may not send now: .*ping"):
        await decode.receive(link)
    assert prefill.sender.statistics()["violations"] == 1


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("metadata", "metadata is not of"),
        ("memory", "did not register"),
        ("overflow", "out of bounds"),
        ("pieces", "differs in memory pieces"),
        ("identity", "differs in model"),
    ],
)
async def test_a_hello_that_lies_is_refused(world, decode, field: str, said: str) -> None:
    prefill = await world.prefill()
    good = decode.hello()
    lie = {
        "metadata": b"loopback nobody",
        "memory": world.Pool(16).memory,
        "overflow": replace(good.memory, segments=tuple(replace(s, address=2**64 - 8) for s in good.memory.segments)),
        "pieces": replace(good.memory, segments=tuple(reversed(good.memory.segments))),
        "identity": world.identity(model="other"),
    }[field]
    field = {"overflow": "memory", "pieces": "memory"}.get(field, field)
    fields = {name: getattr(good, name) for name in good.__struct_fields__} | {field: lie}
    link = await decode.dial(prefill.address, wire.Hello(**fields))
    with pytest.raises(LinkClosed, match=said):
        await decode.receive(link)


async def test_memory_that_overflows_is_refused_whatever_the_transport_checks(decode) -> None:
    good = decode.hello()
    handshake.check_hello(good, good)
    segments = tuple(replace(segment, address=2**64 - 8) for segment in good.memory.segments)
    with pytest.raises(RemoteProtocolError, match="out of bounds"):
        handshake.check_hello(good, replace(good, memory=replace(good.memory, segments=segments)))


async def test_decode_may_give_a_room_up(world, decode) -> None:
    prefill = await world.prefill()
    link, room = await decode.open_room(prefill)
    link.send(wire.FailedRoom(room=decode.room(), cause="no memory"))
    assert await room.received() == "failed"
    assert "no memory" in str(room.cause)


async def test_writes_of_a_room_are_bounded_and_send_waits(world, decode) -> None:
    gate = world.Gate(world.network)
    prefill = await world.prefill(settings=world.RoomSettings(writes_in_flight_max=2, pages_per_write_max=1))
    link, room = await decode.open_room(prefill, tokens=24, pages=range(6))
    sending = asyncio.create_task(room.send(range(30, 36), start_token=0))
    await gate.reached.wait()
    assert room.writes_in_flight == 2
    assert not sending.done()
    gate.open.set()
    await sending
    await room.finish(first_token=1)
    for _ in range(7):
        await decode.receive(link)
    assert prefill.transport.statistics()["writes"] == 6


async def test_a_write_that_fails_fails_its_room(world, decode) -> None:
    prefill = await world.prefill()
    link, room = await decode.open_room(prefill)

    async def fail(writer: str, target: str, pages: int) -> None:
        prefill.transport.die()

    world.network.before_write = fail
    await room.send([30, 31], start_token=0)
    failed = await decode.receive(link)
    assert isinstance(failed, wire.FailedRoom)
    assert "failed" in failed.cause
    assert isinstance(await decode.receive(link), wire.Drained)
    assert await room.received() == "failed"


async def test_a_room_may_be_asked_for_before_and_after_its_promise(world, decode) -> None:
    prefill = await world.prefill()
    early = asyncio.create_task(prefill.room("r1"))
    gone = asyncio.create_task(prefill.room("r1"))
    await asyncio.sleep(0)
    gone.cancel()
    link = await decode.dial(prefill.address)
    link.send(decode.promise(decode.room()))
    room = await early
    assert gone.cancelled()
    # It is given away once, so that two requests with one id and one prompt get a room each.
    link.send(decode.promise(decode.room(generation=1)))
    again = await prefill.room("r1")
    assert (again.generation, room.outcome) == (1, "replaced")
    assert prefill.sender.statistics()["rooms_waited_for"] == 0


async def test_claims_that_wait_are_bounded(world) -> None:
    prefill = await world.prefill(rooms_max=1)
    waiter = asyncio.create_task(prefill.room("r9"))
    await asyncio.sleep(0)
    with pytest.raises(CapacityError):
        await prefill.room("r8")
    waiter.cancel()


async def test_rooms_beyond_the_limit_wait_until_others_end(world, decode) -> None:
    prefill = await world.prefill(rooms_max=1)
    link = await decode.dial(prefill.address)
    for name in ("r1", "r2", "r3", "r4", "r5"):
        link.send(decode.promise(decode.room(name)))
    refused = await decode.receive(link)
    assert isinstance(refused, wire.Refused)
    assert refused.room.request_id == "r5"
    assert (refused.cause, prefill.sender.statistics()["rooms_pending"]) == (
        "3 rooms wait until prefill has ended others",
        3,
    )
    for ended, opened in (("r1", "r2"), ("r2", "r4")):
        link.send(wire.Abort(room=decode.room("r3")))
        assert (await decode.receive(link)).room.request_id == "r3"
        link.send(wire.Abort(room=decode.room(ended)))
        assert (await decode.receive(link)).room.request_id == ended
        assert (await prefill.room(opened)).request_id == opened
    assert prefill.sender.statistics()["rooms_pending"] == 0


async def test_the_room_of_a_computed_prompt_opens_beyond_the_limit(world, decode) -> None:
    prefill = await world.prefill(rooms_max=1)
    link = await decode.dial(prefill.address)
    waiter = asyncio.create_task(prefill.room("r2"))
    for name in ("r1", "r2", "r3"):
        link.send(decode.promise(decode.room(name)))
    # Claimed before its promise came, and after it: else prefill would hold its pages until others are computed.
    assert (await waiter).request_id == "r2"
    assert (await prefill.room("r3")).request_id == "r3"


async def test_closing_ends_waiters_and_rooms_and_tells_decode(world, decode) -> None:
    gate = world.Gate(world.network)
    prefill = await world.prefill()
    link, room = await decode.open_room(prefill)
    await room.send([30, 31], start_token=0)
    await gate.reached.wait()
    waiter = asyncio.create_task(prefill.room("never"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(prefill.sender.close())
    assert isinstance(await decode.receive(link), wire.FailedRoom)
    with pytest.raises(EngineClosed):
        await waiter
    assert not closing.done()
    gate.open.set()
    assert isinstance(await decode.receive(link), wire.Drained)
    assert await room.received() == "closed"
    await closing
    with pytest.raises(LinkClosed):
        await decode.receive(link)
    with pytest.raises(EngineClosed):
        await prefill.room("r1")
    assert prefill.sender.statistics()["peers"] == 0


@pytest.mark.parametrize("pages", [[64], [-1], [0, 99]])
async def test_pages_outside_our_pool_are_refused_and_nothing_is_sent(world, decode, pages) -> None:
    prefill = await world.prefill()
    _, room = await decode.open_room(prefill)
    with pytest.raises(InvalidRequest, match="pool"):
        await room.send(pages, start_token=0)
    await room.send([30, 31], start_token=0)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await room.finish(first_token=1, aux={"f": object()})
    for token in (2**32, -1, 1.5, None, True, "1"):
        with pytest.raises(InvalidRequest, match="first_token must be an int from 0 to 4294967295"):
            await room.finish(first_token=token)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await room.finish(first_token=1, aux={"big": bytes(wire.FRAME_BYTES_MAX)})
    assert not room.is_finished
    await room.finish(first_token=1)
