"""The staging ring: slots have one owner, waits end in order, and a wait has a deadline."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waits import LIMIT_S
from tidekv.backends.copies.slice_moves import SliceMover
from tidekv.states import events
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports import wire
from tidekv.transports.prefill.room_writer import RoomSettings
from tidekv.transports.staging import BATCHES_MIN, Slots, Staging, StagingRing, batch_pages

SIZE = 1024


def ring_of(size: int = SIZE) -> StagingRing:
    return StagingRing(PoolMemory(segments=(Segment(4096, size, size, 1),), page_count=1))


async def taken(ring: StagingRing, slot_bytes: int, count: int) -> Slots:
    slots = await ring.take(slot_bytes, count, timeout_s=30.0)
    assert slots is not None
    return slots


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 6), st.booleans()), max_size=40))
def test_slots_never_overlap_and_lie_within_the_ring(steps: list[tuple[int, int, bool]]) -> None:
    async def run() -> None:
        ring, held = ring_of(), []
        for slot_bytes, count, gives_back in steps:
            if gives_back and held:
                ring.give_back(held.pop(0))
            slots = await ring.take(slot_bytes, count, timeout_s=0.0)
            if slots is not None:
                held.append(slots)
            spans = sorted((one.first * one.slot_bytes, (one.first + one.length) * one.slot_bytes) for one in held)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            assert all(0 <= start < end <= SIZE for start, end in spans)
            assert ring.used_bytes == sum(end - start for start, end in spans)
        for slots in held:
            ring.give_back(slots)
        assert ring.used_bytes == 0

    asyncio.run(run())


async def test_a_small_write_does_not_overtake_a_large_one_that_waits() -> None:
    ring = ring_of()
    first = await taken(ring, 128, 6)
    large = asyncio.ensure_future(taken(ring, 128, 4))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(taken(ring, 128, 1))
    await asyncio.sleep(0)
    assert not (large.done() or small.done())
    ring.give_back(first)
    assert (await large).length == 4
    assert (await small).length == 1


@pytest.mark.parametrize("ends", ["timeout", "cancelled"])
async def test_a_wait_that_ends_lets_the_next_one_through(ends: str) -> None:
    ring = ring_of()
    await taken(ring, 128, 6)
    large = asyncio.ensure_future(ring.take(128, 4, timeout_s=0.01 if ends == "timeout" else 30.0))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(taken(ring, 128, 1))
    await asyncio.sleep(0)
    if ends == "timeout":
        assert await large is None
    else:
        large.cancel()
        await asyncio.wait([large])
    assert (await small).length == 1


async def test_a_wait_that_is_cancelled_as_it_is_granted_gives_back_its_slots() -> None:
    ring = ring_of()
    first = await taken(ring, 128, 8)
    waiting = asyncio.ensure_future(ring.take(128, 8, timeout_s=30.0))
    await asyncio.sleep(0)
    ring.give_back(first)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert ring.used_bytes == 0


def test_a_ring_has_room_for_several_batches_or_is_not_used() -> None:
    assert batch_pages(ring_of(SIZE).memory, SIZE // BATCHES_MIN) == 1
    assert batch_pages(ring_of(SIZE).memory, SIZE // BATCHES_MIN + 1) == 0


class Copies:
    """Copies of slices that tests hold and count."""

    def __init__(self) -> None:
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.begun = asyncio.Event()

    def copying(self, source: PoolMemory, target: PoolMemory):
        mover = SliceMover(source, target)

        def begin(sources, targets) -> asyncio.Future[None]:
            self.begun.set()
            return asyncio.ensure_future(self._run(mover, sources, targets))

        return begin

    async def _run(self, mover: SliceMover, sources, targets) -> None:
        await self.may_run.wait()
        mover.move(sources, targets)


@pytest.fixture
async def one_to_two(world):
    """One prefill rank of two heads, and two decode ranks of one; the ring has room for four pages of a head."""

    async def make(**settings: object):
        region = np.zeros(4 * world.PAGE_BYTES, np.uint8)
        segment = Segment(region.ctypes.data, len(region), len(region), 1)
        ring = StagingRing(PoolMemory(segments=(segment,), page_count=1))
        copies = Copies()
        prefill = await world.prefill(
            heads=2, staging=Staging(ring, copies), settings=RoomSettings(**settings) if settings else None
        )
        prefill.region, prefill.ring, prefill.copies = region, ring, copies
        decodes = [
            await world.decode(name=f"decode-{rank}", rank=rank, ranks=2, group=lambda: "group") for rank in range(2)
        ]
        return prefill, decodes

    return make


def is_right(world, prefill, decodes, pages: int) -> bool:
    for piece in range(2):
        whole = prefill.pool.buffers[piece][:pages].reshape(pages, world.PAGE_SIZE, 2, -1)
        for rank, decode in enumerate(decodes):
            found = decode.pool.buffers[piece][10 : 10 + pages].reshape(pages, world.PAGE_SIZE, -1)
            if not np.array_equal(found, whole[:, :, rank]):
                return False
    return True


async def test_more_pages_than_the_ring_has_slots_go_through_it(world, one_to_two) -> None:
    prefill, decodes = await one_to_two()
    for decode in decodes:
        decode.promise(prefill.address, "r1", tokens=80, promised=0, pages=range(10, 30))
    await prefill.serve("r1", range(20), chunk=20)
    for decode in decodes:
        await decode.wait_done("r1")
    assert is_right(world, prefill, decodes, 20)
    statistics = prefill.sender.statistics()
    assert (statistics["pages_staged"], statistics["staging_full"], statistics["staging_used_bytes"]) == (40, 0, 0)


async def test_a_full_ring_makes_writes_go_without_it_after_the_deadline(world, one_to_two) -> None:
    prefill, decodes = await one_to_two(staging_wait_s=0.05)
    held = await taken(prefill.ring, world.PAGE_BYTES, 4)
    for decode in decodes:
        decode.promise(prefill.address, "r1", tokens=16, promised=0, pages=range(10, 14))
    await prefill.serve("r1", range(4))
    for decode in decodes:
        await decode.wait_done("r1")
    assert is_right(world, prefill, decodes, 4)
    assert prefill.sender.statistics()["pages_staged"] == 0
    assert prefill.sender.statistics()["staging_full"] > 0
    prefill.ring.give_back(held)


async def test_an_abort_frees_slots_only_after_what_uses_them_has_ended(world, one_to_two) -> None:
    prefill, decodes = await one_to_two()
    gate = world.Gate(world.network)
    for decode in decodes:
        decode.promise(prefill.address, "r1", tokens=16, promised=0, pages=range(10, 14))
    room = await prefill.room("r1")
    sending = asyncio.ensure_future(room.send(range(4), start_token=0))
    await gate.reached.wait()
    for decode in decodes:
        decode.receiver.abort("r1", 0)
    await room.aborted.wait()
    await sending
    # The write is held: decode may not free its pages, nor prefill its slots.
    assert prefill.ring.used_bytes > 0
    assert not any(decode.of(events.RoomDrained) for decode in decodes)
    gate.open.set()
    for decode in decodes:
        await decode.wait(events.RoomDrained)
    assert await room.received() == "aborted"
    assert prefill.ring.used_bytes == 0


async def test_closing_waits_for_a_copy_into_the_ring(world, one_to_two) -> None:
    prefill, decodes = await one_to_two()
    prefill.copies.may_run.clear()
    for decode in decodes:
        decode.promise(prefill.address, "r1", tokens=16, promised=0, pages=range(10, 14))
    room = await prefill.room("r1")
    sending = asyncio.ensure_future(room.send(range(4), start_token=0))
    await prefill.copies.begun.wait()
    closing = asyncio.ensure_future(prefill.sender.close())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    prefill.copies.may_run.set()
    await closing
    await sending
    assert prefill.ring.used_bytes == 0


@pytest.fixture
async def two_to_one(world):
    """Two prefill ranks of one head each, and a decode rank of both, whose ring has room for four pages of a head."""

    async def make(**settings: object):
        region = np.zeros(4 * world.PAGE_BYTES, np.uint8)
        segment = Segment(region.ctypes.data, len(region), len(region), 1)
        ring = StagingRing(PoolMemory(segments=(segment,), page_count=1))
        copies = Copies()
        decode = await world.decode(heads=2, staging=Staging(ring, copies))
        decode.region, decode.ring, decode.copies = region, ring, copies
        prefills = [
            await world.prefill(
                f"prefill:{rank + 1}",
                name=f"prefill-{rank}",
                rank=rank,
                ranks=2,
                settings=RoomSettings(**settings) if settings else None,
            )
            for rank in range(2)
        ]
        return prefills, decode

    return make


def promised(prefills, decode, *, pages: int, generation: int = 0) -> None:
    address = ",".join(prefill.address for prefill in prefills)
    decode.promise(address, "r1", tokens=4 * pages, promised=0, pages=range(10, 10 + pages), generation=generation)


def has_both_heads(world, prefills, decode, pages: int) -> bool:
    for piece in range(2):
        found = decode.pool.buffers[piece][10 : 10 + pages].reshape(pages, world.PAGE_SIZE, 2, -1)
        for rank, prefill in enumerate(prefills):
            head = prefill.pool.buffers[piece][:pages].reshape(pages, world.PAGE_SIZE, -1)
            if not np.array_equal(found[:, :, rank], head):
                return False
    return True


async def received(prefills, decode, pages: int) -> None:
    """Serve the room on both ranks, and receive it."""
    rooms = await asyncio.gather(*(prefill.serve("r1", range(pages), chunk=pages) for prefill in prefills))
    await decode.wait(events.ChunkReceived, last=True, count=2)
    await decode.wait(events.AuxReceived, count=2)
    decode.receiver.received("r1", 0)
    assert {await room.received() for room in rooms} == {"received"}


async def test_two_ranks_write_through_the_ring_of_one(world, two_to_one) -> None:
    prefills, decode = await two_to_one()
    promised(prefills, decode, pages=20)
    await received(prefills, decode, 20)
    assert has_both_heads(world, prefills, decode, 20)
    assert [prefill.sender.statistics()["pages_staged"] for prefill in prefills] == [20, 20]
    assert decode.receiver.statistics()["staging_used_bytes"] == 0


async def test_pages_are_reported_only_after_they_were_copied_out_of_the_ring(world, two_to_one) -> None:
    prefills, decode = await two_to_one()
    decode.copies.may_run.clear()
    promised(prefills, decode, pages=2)
    serving = asyncio.ensure_future(received(prefills, decode, 2))
    await decode.copies.begun.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not decode.of(events.ChunkReceived)
    decode.copies.may_run.set()
    await serving
    assert has_both_heads(world, prefills, decode, 2)


async def test_a_full_ring_of_decode_makes_writes_go_without_it_after_the_deadline(world, two_to_one) -> None:
    prefills, decode = await two_to_one(staging_wait_s=0.05)
    held = await taken(decode.ring, world.PAGE_BYTES, 4)
    promised(prefills, decode, pages=4)
    await received(prefills, decode, 4)
    assert has_both_heads(world, prefills, decode, 4)
    assert sum(prefill.sender.statistics()["pages_staged"] for prefill in prefills) == 0
    assert all(prefill.sender.statistics()["staging_full"] > 0 for prefill in prefills)
    decode.ring.give_back(held)
    # Requests that prefill gave up are granted nothing.
    for _ in range(50):
        await asyncio.sleep(0)
    assert decode.ring.used_bytes == 0


async def test_an_abort_frees_slots_of_decode_once_every_writer_has_drained(world, two_to_one) -> None:
    prefills, decode = await two_to_one()
    gate = world.Gate(world.network)
    promised(prefills, decode, pages=4)
    rooms = [await prefill.room("r1") for prefill in prefills]
    sending = [asyncio.ensure_future(room.send(range(4), start_token=0)) for room in rooms]
    await gate.reached.wait()
    decode.receiver.abort("r1", 0)
    await asyncio.gather(*(room.aborted.wait() for room in rooms))
    assert decode.ring.used_bytes > 0
    assert len(decode.of(events.RoomDrained)) < 2
    gate.open.set()
    await decode.wait(events.RoomDrained, count=2)
    await asyncio.gather(*sending)
    for _ in range(50):
        await asyncio.sleep(0)
    assert decode.ring.used_bytes == 0


async def rooms_whose_copies_wait(prefills, decode):  # type: ignore[no-untyped-def]
    """Rooms of all prefill ranks for one page, whose copies from decode's ring have begun and do not end."""
    decode.copies.may_run.clear()
    promised(prefills, decode, pages=1)
    rooms = [await prefill.room("r1") for prefill in prefills]
    for room in rooms:
        await room.send([0], start_token=0)
    await decode.copies.begun.wait()
    return rooms


async def test_drained_is_reported_only_after_copies_that_had_begun(world, two_to_one) -> None:
    prefills, decode = await two_to_one()
    rooms = await rooms_whose_copies_wait(prefills, decode)
    decode.receiver.abort("r1", 0)
    for room in rooms:
        await room.received()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(decode.of(events.RoomDrained)) < 2
    decode.copies.may_run.set()
    await decode.wait(events.RoomDrained, count=2)
    assert decode.ring.used_bytes == 0


async def test_the_death_of_a_writer_is_reported_after_its_copies_and_frees_its_slots(world, two_to_one) -> None:
    prefills, decode = await two_to_one()
    await rooms_whose_copies_wait(prefills, decode)
    for prefill in prefills:
        world.network.kill(prefill.transport.instance)
    await decode.wait(events.RoomFailed)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(decode.of(events.WriterDead)) < 2
    assert decode.ring.used_bytes > 0
    decode.copies.may_run.set()
    await decode.wait(events.WriterDead, count=2)
    assert decode.ring.used_bytes == 0


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (lambda **place: wire.Staged(**place, ticket=9, component="full", span=0, first=0), "ticket 9 has no slots"),
        (lambda **place: wire.StagingRequest(**place, ticket=1, component="full", count=99), "requests 99 slots"),
        (lambda **place: wire.StagingRequest(**place, ticket=1, component="ssm", count=1), "component 'ssm'"),
    ],
)
async def test_prefill_ranks_that_break_the_rules_of_the_ring_fail_their_room(
    world, two_to_one, message, words: str
) -> None:
    prefills, decode = await two_to_one()
    promised(prefills, decode, pages=1)
    room = await prefills[0].room("r1")
    writer = room._room_writers[0]
    writer.send(message(room=writer.key, rank=0))
    failed = await decode.wait(events.RoomFailed)
    assert words in failed.cause
    decode.receiver.abort("r1", 0)
    await decode.wait(events.RoomDrained, count=2)
    assert decode.ring.used_bytes == 0


async def test_slots_are_given_back_once_though_prefill_returns_them_twice(world, two_to_one) -> None:
    """A second return would free slots that have another owner by then."""
    prefills, decode = await two_to_one()
    promised(prefills, decode, pages=1)
    rooms = await asyncio.gather(*(prefill.room("r1") for prefill in prefills))
    granted = world.watch(lambda sender, message: isinstance(message, wire.StagingGranted))
    first, second = (room._room_writers[0] for room in rooms)
    first.send(wire.StagingRequest(room=first.key, rank=0, ticket=7, component="full", count=1))
    await asyncio.wait_for(granted.wait(), LIMIT_S)
    one_bytes = decode.ring.used_bytes
    assert one_bytes > 0
    given_back: list[object] = []
    give_back = decode.ring.give_back
    decode.ring.give_back = lambda slots: (given_back.append(slots), give_back(slots))
    for _ in range(2):
        first.send(wire.StagingReturned(room=first.key, rank=0, ticket=7))
    again = world.watch(lambda sender, message: isinstance(message, wire.StagingGranted))
    second.send(wire.StagingRequest(room=second.key, rank=1, ticket=7, component="full", count=1))
    await asyncio.wait_for(again.wait(), LIMIT_S)
    first.send(wire.StagingReturned(room=first.key, rank=0, ticket=7))
    decode.receiver.abort("r1", 0)
    await decode.wait(events.RoomDrained, count=2)
    assert len(given_back) == 2, "of each rank once"
    assert decode.ring.used_bytes == 0
