"""The staging ring: slots have one owner, nobody overtakes, and a wait has a deadline."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv.backends.copies.slice_moves import SliceMover
from tidekv.states import events
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports.prefill.room_writer import RoomSettings, Staging
from tidekv.transports.staging import BATCHES_MIN, Slots, StagingRing

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
    assert ring_of(SIZE).batch_pages(SIZE // BATCHES_MIN) == 1
    assert ring_of(SIZE).batch_pages(SIZE // BATCHES_MIN + 1) == 0


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
