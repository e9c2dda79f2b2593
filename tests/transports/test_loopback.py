"""The loopback transport keeps the contract of a real one."""

from __future__ import annotations

import asyncio

import pytest

from tidekv.states.errors import InvalidConfig, LinkClosed, LocalProtocolError, RemoteProtocolError, TransferFailed
from tidekv.states.types import PoolMemory, Segment
from tidekv.transports import loopback, wire
from tidekv.transports.base import Transport, check_memory
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport


class Pair:
    """Two transports that know each other's pool, and a link between them."""

    def __init__(self, world) -> None:
        self.network = LoopbackNetwork()
        self.ours, self.theirs = LoopbackTransport("a", self.network), LoopbackTransport("b", self.network)
        self.our_pool, self.their_pool = world.Pool(8, seed=1), world.Pool(8)
        self.accepted: asyncio.Queue = asyncio.Queue()

    async def start(self) -> None:
        for transport, pool in ((self.ours, self.our_pool), (self.theirs, self.their_pool)):
            await transport.start(poller=None)
            await transport.register(pool.memory)
        self.peer = await self.ours.add_peer(self.theirs.instance, self.theirs.metadata(), self.their_pool.memory)

        async def keep(link) -> None:
            await self.accepted.put(link)
            await asyncio.Event().wait()

        self.listener = await self.theirs.listen("b:0", keep)

    async def links(self):
        link = await self.ours.dial(self.listener.address)
        return link, await self.accepted.get()

    async def close(self) -> None:
        await self.listener.close()
        await self.ours.close()
        await self.theirs.close()


@pytest.fixture
async def pair(world):
    pair = Pair(world)
    await pair.start()
    try:
        yield pair
    finally:
        await pair.close()


def test_it_is_a_transport() -> None:
    transport: Transport = LoopbackTransport("a", LoopbackNetwork())
    again = LoopbackTransport("a", LoopbackNetwork())
    assert transport.instance.startswith("a-")
    assert transport.instance != again.instance


async def test_pages_are_written_pairwise_in_all_their_pieces(world, pair) -> None:
    written = await pair.ours.write(pair.peer, world.page_ids([5, 0, 7]), world.page_ids([1, 2, 6]))
    assert written == 3 * world.PAGE_BYTES
    pages = [pair.their_pool.page(index) for index in range(8)]
    assert pages == [
        pair.our_pool.page(source) if source is not None else bytes(world.PAGE_BYTES)
        for source in (None, 5, 0, None, None, None, 7, None)
    ]
    assert pair.ours.statistics() == {
        "bytes_written": written,
        "pages_written": 3,
        "writes": 1,
        "writes_failed": 0,
        "links": 0,
    }


async def test_nothing_outside_the_pools_is_touched(world, pair) -> None:
    for ours, theirs, error in (
        ([8], [0], RemoteProtocolError),
        ([0], [8], RemoteProtocolError),
        ([-1], [0], RemoteProtocolError),
        ([0], [-1], RemoteProtocolError),
        ([0, 1], [0], LocalProtocolError),
    ):
        with pytest.raises(error):
            await pair.ours.write(pair.peer, world.page_ids(ours), world.page_ids(theirs))
    assert not any(buffer.any() for buffer in pair.their_pool.buffers)


async def test_a_cancelled_write_settles_before_it_raises(world, pair) -> None:
    gate = world.Gate(pair.network)
    writing = asyncio.create_task(pair.ours.write(pair.peer, world.page_ids([1]), world.page_ids([1])))
    await gate.reached.wait()
    for _ in range(3):
        writing.cancel()
        await asyncio.sleep(0)
    assert not writing.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert pair.their_pool.page(1) == pair.our_pool.page(1)


async def test_a_cancelled_write_that_fails_raises_the_cancellation(world, pair) -> None:
    gate = world.Gate(pair.network)
    writing = asyncio.create_task(pair.ours.write(pair.peer, world.page_ids([1]), world.page_ids([1])))
    await gate.reached.wait()
    writing.cancel()
    await asyncio.sleep(0)
    pair.ours.die()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await writing


async def test_closing_waits_for_writes(world, pair) -> None:
    gate = world.Gate(pair.network)
    writing = asyncio.create_task(pair.ours.write(pair.peer, world.page_ids([1]), world.page_ids([1])))
    await gate.reached.wait()
    closing = asyncio.create_task(pair.ours.close())
    await asyncio.sleep(0)
    assert not closing.done()
    gate.open.set()
    await closing
    assert await writing == world.PAGE_BYTES
    with pytest.raises(TransferFailed):
        await pair.ours.write(pair.peer, world.page_ids([1]), world.page_ids([1]))


async def test_a_write_to_a_peer_that_is_gone_fails_and_touches_nothing(world, pair) -> None:
    gate = world.Gate(pair.network)
    writing = asyncio.create_task(pair.ours.write(pair.peer, world.page_ids([1]), world.page_ids([1])))
    await gate.reached.wait()
    pair.network.kill(pair.theirs.instance)
    gate.open.set()
    with pytest.raises(TransferFailed, match="gone"):
        await writing
    assert not any(buffer.any() for buffer in pair.their_pool.buffers)
    assert pair.ours.statistics()["writes_failed"] == 1


async def test_gone_is_told_once_it_is_true_and_never_before(pair) -> None:
    waiting = asyncio.create_task(pair.ours.wait_gone(pair.theirs.instance, None))
    given_up = asyncio.create_task(pair.ours.wait_gone(pair.theirs.instance, None))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    await pair.theirs.close()
    await waiting
    await pair.ours.wait_gone(pair.theirs.instance, None)


async def test_peers_are_judged(world, pair) -> None:
    other = world.Pool(8)
    memory = pair.their_pool.memory
    for instance, metadata, announced in (
        ("nobody-1", pair.theirs.metadata(), memory),
        (pair.theirs.instance, b"other", memory),
        (pair.theirs.instance, pair.theirs.metadata(), other.memory),
    ):
        with pytest.raises(RemoteProtocolError):
            await pair.ours.add_peer(instance, metadata, announced)


@pytest.mark.parametrize(
    "segment",
    [
        Segment(2**64 - 2048, 1024, 1024, 4),
        Segment(0, 1024, 1024, 4),
        Segment(4096, 0, 1024, 4),
        Segment(4096, 2048, 1024, 4),
        Segment(4096, 1024, 2**62, 4),
        Segment(4096, 1024, 1024, 5),
        Segment(-4096, 1024, 1024, 4),
    ],
)
def test_memory_that_overflows_or_contradicts_itself_is_refused(segment: Segment) -> None:
    check_memory(PoolMemory(segments=(Segment(4096, 1024, 1024, 4),), page_count=4))
    with pytest.raises(RemoteProtocolError):
        check_memory(PoolMemory(segments=(Segment(4096, 1024, 1024, 4), segment), page_count=4))


@pytest.mark.parametrize(
    "memory",
    [
        PoolMemory(segments=(), page_count=4),
        PoolMemory(segments=(Segment(1, 1, 1, 0),), page_count=0),
        PoolMemory(segments=(Segment(1, 1, 1, 1),), page_count=1, kind="FILE"),
        PoolMemory(segments=(Segment(1, 1, 1, 1),), page_count=1, device=-1),
    ],
)
def test_memory_of_an_unknown_kind_or_without_pages_is_refused(memory: PoolMemory) -> None:
    with pytest.raises(RemoteProtocolError):
        check_memory(memory)


async def test_device_memory_is_refused(world) -> None:
    with pytest.raises(InvalidConfig, match="VRAM"):
        await LoopbackTransport("a", LoopbackNetwork()).register(
            PoolMemory(segments=(Segment(1, 1, 1, 1),), page_count=1, kind="VRAM")
        )


async def test_links_carry_frames_in_order_and_the_cause_of_their_end(pair) -> None:
    ours, theirs = await pair.links()
    theirs.mark_greeted()
    for sent_at in range(3):
        ours.send(wire.Ping(sent_at=sent_at))
    await ours.close("enough")
    assert [(await theirs.receive()).sent_at for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(LinkClosed, match="enough"):
            await theirs.receive()
    with pytest.raises(LinkClosed):
        theirs.send(wire.Ping(sent_at=1.0))
    with pytest.raises(LinkClosed, match="closed by us"):
        await ours.receive()
    with pytest.raises(LinkClosed, match="closed by us"):
        ours.send(wire.Ping(sent_at=1.0))
    await ours.close()


async def test_a_cut_ends_both_ends(pair) -> None:
    ours, theirs = await pair.links()
    receiving = asyncio.create_task(theirs.receive())
    await asyncio.sleep(0)
    pair.network.cut(pair.ours.instance, "cable")
    with pytest.raises(LinkClosed, match="cable"):
        await receiving
    with pytest.raises(LinkClosed, match="cable"):
        await ours.receive()


async def test_a_peer_that_does_not_read_is_dropped(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "OUTGOING_BYTES_MAX", 100)
    ours, _ = await pair.links()
    with pytest.raises(LinkClosed, match="does not read"):
        for _ in range(100):
            ours.send(wire.Ping(sent_at=1.0))
    with pytest.raises(LinkClosed, match="does not read"):
        await ours.receive()


async def test_a_malformed_frame_closes_the_link(pair) -> None:
    ours, theirs = await pair.links()
    theirs._take(b"\x01\0\0\0\xc1")
    with pytest.raises(RemoteProtocolError):
        await theirs.receive()
    with pytest.raises(LinkClosed, match="no message"):
        await ours.receive()


async def test_addresses_are_given_once_and_freed(pair) -> None:
    async def ignore(link) -> None: ...

    with pytest.raises(InvalidConfig, match="taken"):
        await pair.ours.listen(pair.listener.address, ignore)
    other = await pair.ours.listen("b:0", ignore)
    assert other.address != pair.listener.address
    await other.close()
    with pytest.raises(TransferFailed, match="it has no listener"):
        await pair.ours.dial(other.address)


async def test_transports_of_one_process_meet_without_being_told() -> None:
    one, two = LoopbackTransport("one"), LoopbackTransport("two")
    assert one.network is two.network
