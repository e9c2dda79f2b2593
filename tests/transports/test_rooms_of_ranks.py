"""Rooms between instances of several ranks: every promise is compared, heads are shared out, and all end together."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tidekv.states import events
from tidekv.states.errors import LinkClosed
from tidekv.states.handover.sender import SPANS_MAX
from tidekv.transports import wire
from tidekv.transports.prefill import room_writer


class Ranks:
    """Decode and prefill instances of so many ranks each; heads are split evenly."""

    def __init__(self, world, decodes: list, prefills: list) -> None:
        self.world = world
        self.decodes = decodes
        self.prefills = prefills
        self.address = ",".join(prefill.address for prefill in prefills)

    def promise(self, request_id: str, *, tokens: int = 8, promised: list[int] | int = 0, **more: object) -> None:
        for rank, decode in enumerate(self.decodes):
            mine = promised[rank] if isinstance(promised, list) else promised
            pages = range(10, 10 + (tokens - mine) // self.world.PAGE_SIZE)
            decode.promise(self.address, request_id, tokens=tokens, promised=mine, pages=pages, **more)

    async def serve(self, request_id: str, pages: int = 2) -> list:
        return await asyncio.gather(*(prefill.serve(request_id, range(pages)) for prefill in self.prefills))

    async def delivered(self, kind: type, **match: object) -> None:
        await asyncio.gather(*(decode.wait(kind, **match) for decode in self.decodes))


async def pending_room(prefills: list, count: int) -> None:
    """Return when so many promises wait for others at each of these; frames take a few turns of the loop."""
    for _ in range(1000):
        if all(prefill.sender.statistics()["rooms_pending"] == count for prefill in prefills):
            return
        await asyncio.sleep(0)
    raise AssertionError([prefill.sender.statistics() for prefill in prefills])


@pytest.fixture
def make_ranks(world):
    async def make(decodes: int, prefills: int, heads: int = 4) -> Ranks:
        return Ranks(
            world,
            [
                await world.decode(
                    name=f"decode-{at}", rank=at, ranks=decodes, heads=heads // decodes, group=lambda: "group"
                )
                for at in range(decodes)
            ],
            [
                await world.prefill(
                    f"prefill:{at + 1}", name=f"prefill-{at}", rank=at, ranks=prefills, heads=heads // prefills
                )
                for at in range(prefills)
            ],
        )

    return make


async def test_a_room_opens_when_every_rank_has_promised_it(make_ranks) -> None:
    ranks = await make_ranks(2, 2)
    ranks.decodes[0].promise(ranks.address, "r1", tokens=8, promised=4, pages=[10])
    opening = [asyncio.ensure_future(prefill.room("r1")) for prefill in ranks.prefills]
    await ranks.decodes[0].wait(events.PromiseSent)
    await pending_room(ranks.prefills, 1)
    assert not any(room.done() for room in opening)
    ranks.decodes[1].promise(ranks.address, "r1", tokens=8, promised=4, pages=[10])
    rooms = await asyncio.gather(*opening)
    assert [room.decode_prefix_len for room in rooms] == [4, 4]
    for room in rooms:
        await room.send(range(2), start_token=0)
        await room.finish(first_token=11)
    await ranks.delivered(events.AuxReceived)
    await ranks.delivered(events.ChunkReceived, last=True)
    for decode in ranks.decodes:
        assert {event.rank for event in decode.of(events.ChunkReceived)} == {0}
        decode.receiver.received("r1", 0)
    assert [await room.received() for room in rooms] == ["received", "received"]
    assert all(prefill.sender.statistics()["pages_sent"] == 1 for prefill in ranks.prefills)


async def test_promises_that_differ_are_refused_on_all_ranks_with_both_numbers(make_ranks) -> None:
    ranks = await make_ranks(2, 2)
    ranks.promise("r1", promised=[4, 0])
    await ranks.delivered(events.RoomRefused)
    for decode in ranks.decodes:
        causes = {event.cause for event in decode.of(events.RoomRefused)}
        assert all("made different promises" in cause for cause in causes)
        assert all("promised 4 of 8 tokens" in cause and "promised 0 of 8 tokens" in cause for cause in causes)
    for prefill in ranks.prefills:
        statistics = prefill.sender.statistics()
        assert (statistics["promises_differ"], statistics["rooms_pending"]) == (1, 0)
        assert statistics["pages_sent"] == 0
    # The next generation, on which they agree, is served.
    ranks.promise("r1", promised=4, generation=1)
    await ranks.serve("r1")
    await ranks.delivered(events.AuxReceived, generation=1)


async def test_groups_of_one_request_id_do_not_meet(make_ranks, world) -> None:
    ranks = await make_ranks(2, 1)
    other = await world.decode(name="other", rank=1, ranks=2, heads=2, group=lambda: "another group")
    ranks.decodes[0].promise(ranks.address, "r1", tokens=8, promised=4, pages=[10])
    other.promise(ranks.address, "r1", tokens=8, promised=0, pages=[10, 11])
    await ranks.decodes[0].wait(events.PromiseSent)
    await other.wait(events.PromiseSent)
    await pending_room(ranks.prefills, 2)
    assert not other.of(events.RoomRefused)


@pytest.mark.parametrize(("decodes", "prefills"), [(2, 4), (1, 4), (4, 2), (4, 1)])
async def test_each_rank_hears_of_the_writers_that_hold_its_heads(make_ranks, decodes: int, prefills: int) -> None:
    ranks = await make_ranks(decodes, prefills)
    ranks.promise("r1", promised=8)
    rooms = await ranks.serve("r1")
    writers = max(prefills // decodes, 1)
    for decode in ranks.decodes:
        await decode.wait(events.AuxReceived, count=writers)
        assert {event.rank for event in decode.of(events.ChunkReceived)} == set(range(writers))
        assert [event.ranks for event in decode.of(events.PromiseSent)] == [writers]
        decode.receiver.received("r1", 0)
    assert {await room.received() for room in rooms} == {"received"}
    # A full hit sends nothing, and still every rank here has heads that it would send.
    assert not any(room.sends_nothing for room in rooms)


async def test_ranks_that_hold_copies_send_nothing_and_know_it(make_ranks, world) -> None:
    identity = world.identity(kind="mla")
    decode = await world.decode(identity=identity)
    prefills = [
        await world.prefill(f"prefill:{at + 1}", name=f"prefill-{at}", rank=at, ranks=2, identity=identity)
        for at in range(2)
    ]
    decode.promise(",".join(prefill.address for prefill in prefills), "r1", tokens=8, promised=0, pages=[1, 2])
    rooms = await asyncio.gather(*(prefill.serve("r1", [5, 6]) for prefill in prefills))
    await decode.wait(events.AuxReceived)
    await decode.wait(events.ChunkReceived, last=True)
    assert [room.sends_nothing for room in rooms] == [False, True]
    assert [prefill.sender.statistics()["pages_sent"] for prefill in prefills] == [2, 0]
    assert world.same(decode, prefills[0], [(1, 5), (2, 6)])
    decode.receiver.received("r1", 0)
    assert {await room.received() for room in rooms} == {"received"}


async def test_each_stage_is_written_by_its_own_and_compares_with_all(world) -> None:
    # Two stages of two decode ranks and one prefill rank each; the second stage has another number of layers.
    decodes = [
        await world.decode(
            name=f"decode-{at}",
            rank=at,
            ranks=4,
            stages=2,
            heads=2,
            identity=world.identity(heads=2, layers=1 + at // 2),
            group=lambda: "group",
        )
        for at in range(4)
    ]
    prefills = [
        await world.prefill(
            f"prefill:{at + 1}",
            name=f"prefill-{at}",
            rank=at,
            ranks=2,
            stages=2,
            heads=4,
            identity=world.identity(heads=4, layers=1 + at),
        )
        for at in range(2)
    ]
    ranks = Ranks(world, decodes, prefills)
    ranks.promise("r1", promised=4)
    await ranks.serve("r1")
    await ranks.delivered(events.ChunkReceived, last=True)
    await ranks.delivered(events.AuxReceived)
    for at, decode in enumerate(decodes):
        source, place = prefills[at // 2], at % 2
        # Page 1 of the prompt is page 10 here, 1 there: of each token the heads of this rank.
        for mine, whole in zip(decode.pool.buffers, source.pool.buffers, strict=True):
            heads = whole[1].reshape(world.PAGE_SIZE, 2, -1)[:, place]
            assert mine[10].tobytes() == heads.tobytes()
        decode.receiver.received("r1", 0)
    ranks.promise("r2", promised=[4, 4, 4, 0])
    await ranks.delivered(events.RoomRefused)
    assert "rank 3 promised 0 of 8" in decodes[0].of(events.RoomRefused)[0].cause


async def test_another_number_of_stages_is_a_mismatch(world) -> None:
    decode = await world.decode(rank=0, ranks=2, stages=2, group=lambda: "group")
    prefill = await world.prefill(rank=0, ranks=2)
    decode.promise(f"{prefill.address},nobody:1", "r1", tokens=4, promised=0, pages=[1])
    failed = await decode.wait(events.RoomFailed)
    assert "stages" in failed.cause or "nobody" in failed.cause


async def test_an_abort_of_one_rank_ends_the_room_on_every_rank_and_each_writer_says_drained(make_ranks) -> None:
    ranks = await make_ranks(1, 4)
    ranks.promise("r1")
    rooms = await asyncio.gather(*(prefill.room("r1") for prefill in ranks.prefills))
    ranks.decodes[0].receiver.abort("r1", 0)
    await ranks.decodes[0].wait(events.RoomDrained, count=4)
    assert {event.rank for event in ranks.decodes[0].of(events.RoomDrained)} == {0, 1, 2, 3}
    assert {await room.received() for room in rooms} == {"aborted"}
    assert ranks.decodes[0].receiver.statistics()["rooms_open"] == 0


async def test_a_lost_writer_fails_the_room_and_is_drained_by_its_death(make_ranks, world) -> None:
    ranks = await make_ranks(1, 2)
    ranks.promise("r1")
    await asyncio.gather(*(prefill.room("r1") for prefill in ranks.prefills))
    (decode,) = ranks.decodes
    world.network.kill(ranks.prefills[1].transport.instance)
    failed = await decode.wait(events.RoomFailed)
    assert not failed.settled
    assert ranks.prefills[1].address in failed.cause
    decode.receiver.abort("r1", 0)
    await decode.wait(events.RoomDrained, count=2)
    assert {event.rank for event in decode.of(events.RoomDrained)} == {0, 1}


async def contexts_of(world, *, stripes: tuple[int, ...] = (1, 1), ranks: int = 2) -> list:
    """Prefill ranks that hold every other page each; `stripes` has the `stripe_pages` of each of them."""
    return [
        await world.prefill(
            f"prefill:{at + 1}", name=f"prefill-{at}", rank=at, ranks=ranks, contexts=2, stripe_pages=stripe, heads=4
        )
        for at, stripe in enumerate(stripes)
    ]


async def test_pages_of_a_lost_context_are_not_taken_for_written(world) -> None:
    ranks = Ranks(world, [await world.decode(heads=4)], await contexts_of(world))
    (decode,) = ranks.decodes
    ranks.promise("r1", tokens=16)
    rooms = await asyncio.gather(*(prefill.room("r1") for prefill in ranks.prefills))
    assert [room.held(range(4)) for room in rooms] == [[0, 2], [1, 3]]
    # The first context is done; the second has sent the first of its two pages.
    await rooms[0].send([5, 7], start_token=0, end_token=16)
    await rooms[0].finish(first_token=1)
    await rooms[1].send([6], start_token=0, end_token=8)
    await decode.wait(events.ChunkReceived, rank=0, last=True)
    await decode.wait(events.ChunkReceived, rank=1)
    assert [(event.first, event.count, event.last) for event in decode.of(events.ChunkReceived, rank=1)] == [
        (0, 2, False)
    ]
    assert world.same(decode, ranks.prefills[0], [(10, 5), (12, 7)])
    assert world.same(decode, ranks.prefills[1], [(11, 6)])
    world.network.kill(ranks.prefills[1].transport.instance)
    failed = await decode.wait(events.RoomFailed)
    assert ranks.prefills[1].address in failed.cause and not failed.settled
    decode.receiver.abort("r1", 0)
    await decode.wait(events.RoomDrained, count=2)
    assert {event.rank for event in decode.of(events.RoomDrained)} == {0, 1}
    assert await rooms[0].received() == "aborted"


async def test_contexts_that_divide_prompts_differently_are_refused_by_name(world) -> None:
    ranks = Ranks(world, [await world.decode(heads=4)], await contexts_of(world, stripes=(1, 2)))
    ranks.promise("r1")
    failed = await ranks.decodes[0].wait(events.RoomFailed)
    assert failed.settled and "stripe_pages (of prefill at prefill:1 and prefill:2)" in failed.cause


async def test_a_request_that_names_one_context_of_two_is_refused(world) -> None:
    ranks = Ranks(world, [await world.decode(heads=4)], await contexts_of(world))
    ranks.address = ranks.prefills[0].address
    ranks.promise("r1")
    failed = await ranks.decodes[0].wait(events.RoomFailed)
    assert failed.settled and "rank (at prefill:1)" in failed.cause


async def test_a_decode_worker_has_no_contexts(decode, world) -> None:
    prefill = await world.prefill()
    hello = msgspec.structs.replace(decode.hello(), ranks=2, contexts=2)
    link = await decode.dial(prefill.address, hello)
    with pytest.raises(LinkClosed, match="contexts of decode"):
        await decode.receive(link)


async def test_an_unreachable_rank_fails_the_room_before_any_rank_was_promised_it(make_ranks) -> None:
    ranks = await make_ranks(1, 2)
    ranks.address = f"{ranks.prefills[0].address},nobody:1"
    ranks.promise("r1")
    (decode,) = ranks.decodes
    failed = await decode.wait(events.RoomFailed)
    assert failed.settled
    assert "nobody:1" in failed.cause
    assert ranks.prefills[0].sender.statistics()["rooms_pending"] == 0
    decode.receiver.abort("r1", 0)
    await decode.wait(events.RoomDrained)
    assert decode.receiver.statistics()["rooms_open"] == 0
    # The other rank's link serves rooms that name reachable ranks only.
    assert not decode.of(events.PromiseSent)


async def test_addresses_in_another_order_are_refused(make_ranks) -> None:
    ranks = await make_ranks(2, 2)
    ranks.address = ",".join(reversed(ranks.address.split(",")))
    ranks.promise("r1")
    await ranks.delivered(events.RoomFailed)
    assert all("rank (at prefill:" in decode.of(events.RoomFailed)[0].cause for decode in ranks.decodes)


async def test_a_link_that_breaks_before_all_have_promised_refuses_the_room(make_ranks, world) -> None:
    ranks = await make_ranks(2, 1)
    ranks.decodes[0].promise(ranks.address, "r1", tokens=8, promised=0, pages=[10, 11])
    ranks.decodes[1].promise(ranks.address, "r2", tokens=8, promised=0, pages=[10, 11])
    await pending_room(ranks.prefills, 2)
    world.network.cut(ranks.decodes[1].transport.instance)
    await ranks.decodes[1].wait(events.WriterLost)
    await pending_room(ranks.prefills, 1)
    # The other rank's own room still waits; it gives it up.
    ranks.decodes[0].receiver.abort("r1", 0)
    await ranks.decodes[0].wait(events.RoomDrained)
    assert ranks.prefills[0].sender.statistics()["rooms_pending"] == 0


async def test_a_promise_on_the_link_of_another_rank_breaks_its_room(decode, world) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    key = decode.room()
    link.send(
        wire.Promise(
            prompt_digest=decode.promise(decode.room()).prompt_digest,
            room=key,
            prompt_tokens=8,
            decode_prefix_len=8,
            pages=b"",
            rank=1,
            ranks=2,
            group="g",
        )
    )
    failed = await decode.receive(link)
    assert isinstance(failed, wire.FailedRoom)
    assert "rank 1 of 2 promises on the link of another" in failed.cause
    assert isinstance(await decode.receive(link), wire.Drained)


async def test_who_expects_pages_of_a_rank_without_its_heads_is_told_so(decode, world) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    link.send(
        wire.Promise(
            prompt_digest=decode.promise(decode.room()).prompt_digest,
            room=decode.room(),
            prompt_tokens=8,
            decode_prefix_len=8,
            pages=None,
        )
    )
    failed = await decode.receive(link)
    assert isinstance(failed, wire.FailedRoom)
    assert "expects nothing of prefill's rank 0, which holds some of its heads" in failed.cause


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"pages": bytes(4 * 3)}, "beyond the prompt's 2"),
        ({"first": 2**31 - 1}, "beyond the prompt's 2"),
        ({"spans": SPANS_MAX + 1}, "more than 1024 spans"),
    ],
)
async def test_further_pages_of_a_room_that_waits_for_promises_are_bounded(
    make_ranks, change: dict[str, int], cause: str
) -> None:
    ranks = await make_ranks(2, 1)
    decode = ranks.decodes[0]
    decode.promise(ranks.address, "r1", tokens=8, promised=4, pages=[10])
    await decode.wait(events.PromiseSent)
    (link,) = decode.receiver._links.values()
    (room,) = decode.receiver._rooms.values()
    extend = wire.Extend(room=room.key, span=1, first=0, pages=bytes(4))
    spans = change.pop("spans", 1)
    for _ in range(spans):
        link.send(msgspec.structs.replace(extend, **change))
    refused = await decode.wait(events.RoomRefused)
    assert cause in refused.cause
    assert ranks.prefills[0].sender.statistics()["rooms_pending"] == 0


async def test_the_rooms_of_a_link_hold_bounded_lists(decode, world, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_writer, "PEER_BYTES_MAX", 23)
    prefill = await world.prefill()
    link, room = await decode.open_room(prefill)
    for generation, fits in ((1, True), (2, False)):
        key = decode.room(f"r{generation + 1}", generation)
        link.send(decode.promise(key))
        if fits:
            await prefill.room(key.request_id)
        else:
            refused = await decode.receive(link)
            assert isinstance(refused, wire.Refused)
            assert "prompts and page lists" in refused.cause
    # 7 bytes are left: further pages are held, until the budget is used up.
    link.send(decode.extend(room._key, 1, 0, pages=[5]))
    link.send(decode.extend(room._key, 2, 1, pages=[6]))
    failed = await decode.receive(link)
    assert isinstance(failed, wire.FailedRoom)
    assert "prompts and page lists" in failed.cause
    assert isinstance(await decode.receive(link), wire.Drained)
    # What the room held is free again.
    link.send(decode.promise(decode.room("r4")))
    await prefill.room("r4")


async def test_an_abort_counts_a_writer_whose_link_is_closed_as_drained(make_ranks) -> None:
    ranks = await make_ranks(1, 4)
    ranks.promise("r1")
    await asyncio.gather(*(prefill.room("r1") for prefill in ranks.prefills))
    (decode,) = ranks.decodes
    # The link is known to be lost, and what becomes of its rooms has not been decided yet: nothing would do it again.
    closed = decode.receiver._links[ranks.prefills[1].address]
    closed._is_lost = True
    decode.receiver.abort("r1", 0)
    assert [event.rank for event in decode.of(events.RoomDrained)] == [1]
    await decode.wait(events.RoomDrained, count=4)
    assert sorted(event.rank for event in decode.of(events.RoomDrained)) == [0, 1, 2, 3]
    assert decode.receiver.statistics()["rooms_unsettled"] == 0
    closed._is_lost = False


async def test_an_abort_expects_nothing_of_a_rank_that_writes_nothing_and_has_no_link(make_ranks, world) -> None:
    identity = world.identity(kind="mla")
    decode = await world.decode(identity=identity)
    prefills = [
        await world.prefill(f"prefill:{at + 1}", name=f"prefill-{at}", rank=at, ranks=2, identity=identity)
        for at in range(2)
    ]
    decode.promise(",".join(prefill.address for prefill in prefills), "r1", tokens=8, promised=0, pages=[1, 2])
    rooms = await asyncio.gather(*(prefill.room("r1") for prefill in prefills))
    silent = decode.receiver._links[prefills[1].address]
    silent._is_lost = True
    decode.receiver.abort("r1", 0)
    assert not decode.of(events.RoomDrained)
    assert await rooms[0].received() == "aborted"
    await decode.wait(events.RoomDrained)
    # A second one would end the room before its only writer has.
    assert [event.rank for event in decode.of(events.RoomDrained)] == [0]
    silent._is_lost = False


async def test_a_room_of_which_two_ranks_fail_fails_once(make_ranks) -> None:
    ranks = await make_ranks(1, 4)
    ranks.promise("r1")
    rooms = await asyncio.gather(*(prefill.room("r1") for prefill in ranks.prefills))
    (decode,) = ranks.decodes
    for room in rooms[:2]:
        room.fail("out of memory")
    await decode.wait(events.RoomFailed)
    decode.receiver.abort("r1", 0)
    await decode.wait(events.RoomDrained, count=4)
    assert len(decode.of(events.RoomFailed)) == 1
    assert sorted(event.rank for event in decode.of(events.RoomDrained)) == [0, 1, 2, 3]


@pytest.mark.parametrize("shortest", [0, 1, 2])
async def test_the_lease_of_a_room_of_three_ranks_is_the_shortest(world, shortest: int) -> None:
    now_s = 0.0
    leases = [8.0, 8.0, 8.0]
    leases[shortest] = 3.0
    decodes = [
        await world.decode(
            name=f"decode-{at}",
            rank=at,
            ranks=3,
            heads=1,
            group=lambda: "group",
            lease_s=leases[at],
            missed_s=2.0,
            heartbeat_s=1.0,
        )
        for at in range(3)
    ]
    prefill = await world.prefill(heads=3, lease_s=10.0, clock=lambda: now_s)
    ranks = Ranks(world, decodes, [prefill])
    # While it waits for the others, and as a room.
    waiting, whole = decodes[shortest], decodes
    waiting.promise(ranks.address, "r0", tokens=8, promised=0, pages=[10, 11])
    others = [decode for decode in decodes if decode is not waiting]
    others[0].promise(ranks.address, "r0", tokens=8, promised=0, pages=[10, 11])
    await pending_room([prefill], 2)
    for decode in whole:
        decode.promise(ranks.address, "r1", tokens=8, promised=0, pages=[12, 13])
    room = await prefill.room("r1")
    now_s = 2.9
    prefill.sender.check_leases()
    assert room.cause is None and prefill.sender.statistics()["rooms_pending"] == 2
    now_s = 3.1
    prefill.sender.check_leases()
    assert await room.received() == "lease ended"
    assert f"decode-{shortest}" in str(room.cause)
    await pending_room([prefill], 0)


async def test_ranks_of_latents_agree_with_and_without_a_number_of_heads(world) -> None:
    """With MLA each rank holds the whole latents: one head, said or not."""
    identity = world.identity(kind="mla")
    for at, (here, there) in enumerate([(0, 0), (1, 1), (0, 1), (1, 0)]):
        decode = await world.decode(name=f"decode-{at}", identity=identity, kv_heads_total=here)
        prefills = [
            await world.prefill(
                f"prefill:{at}{rank}",
                name=f"prefill-{at}{rank}",
                rank=rank,
                ranks=2,
                identity=identity,
                kv_heads_total=there,
            )
            for rank in range(2)
        ]
        address = ",".join(prefill.address for prefill in prefills)
        decode.promise(address, f"r{at}", tokens=8, promised=0, pages=[1, 2])
        await asyncio.gather(*(prefill.serve(f"r{at}", [5, 6]) for prefill in prefills))
        await decode.wait_done(f"r{at}")
        assert world.same(decode, prefills[0], [(1, 5), (2, 6)])
    decode = await world.decode(name="decode-x", identity=identity)
    prefill = await world.prefill("prefill:x", name="prefill-x", identity=identity, kv_heads_total=2)
    decode.promise(prefill.address, "rx", tokens=8, promised=0, pages=[1, 2])
    failed = await decode.wait(events.RoomFailed)
    assert failed.settled and "the 2 heads of a model" in failed.cause
