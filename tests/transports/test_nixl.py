"""NIXL between two agents of this process, and the proof that nothing is written where it should not be."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from tidekv.engine.nixl_child import NumpyPool
from tidekv.engine.poller import PollerThread
from tidekv.states.errors import (
    InvalidConfig,
    InvalidRequest,
    LocalProtocolError,
    PeerMismatch,
    RemoteProtocolError,
    TransferFailed,
)
from tidekv.states.shapes import PoolMemory, Segment, page_ids
from tidekv.transports import nixl, nixl_metadata, wire
from tidekv.transports.nixl import NixlTransport
from tidekv.transports.nixl_agent import NixlAgent, Request

pytestmark = pytest.mark.nixl

PIECES = (4096, 512, 4096, 512)


class Worker:
    """A transport with a pool."""

    def __init__(self, name: str, poller: PollerThread, pool: NumpyPool) -> None:
        self.transport = NixlTransport(name)
        self.poller = poller
        self.pool = pool

    async def start(self) -> Worker:
        await self.transport.start(poller=self.poller)
        await self.transport.register(self.pool.memory)
        return self


class Pair:
    """A writer with random pages and a target with empty ones, of other counts."""

    def __init__(self, poller: PollerThread, pieces: tuple[int, ...]) -> None:
        self.writer = Worker("writer", poller, NumpyPool(40, pieces, seed=1))
        self.target = Worker("target", poller, NumpyPool(61, pieces, seed=2))
        self.before = [piece.copy() for piece in self.target.pool.pieces]

    async def start(self) -> Pair:
        await self.writer.start()
        await self.target.start()
        self.peer = await self.add()
        return self

    async def add(self) -> nixl.NixlPeer:
        target = self.target.transport
        return await self.writer.transport.add_peer(target.instance, target.metadata(), self.target.pool.memory)

    async def write(self, ours: list[int], theirs: list[int]) -> int:
        return await self.writer.transport.write(self.peer, page_ids(ours), page_ids(theirs))

    def check(self, written: dict[int, int]) -> None:
        """The target has exactly these pages of the writer ({theirs: ours}), and what it had before in all others."""
        for source, target, before in zip(self.writer.pool.pieces, self.target.pool.pieces, self.before, strict=True):
            for theirs, ours in written.items():
                before[theirs] = source[ours]
            assert np.array_equal(target, before)

    async def close(self) -> None:
        await self.writer.transport.close()
        await self.target.transport.close()


@pytest.fixture
async def poller() -> AsyncIterator[PollerThread]:
    poller = PollerThread()
    poller.start()
    yield poller
    assert await poller.close() == 0


@pytest.fixture
async def pair(poller: PollerThread) -> AsyncIterator[Pair]:
    pair = await Pair(poller, PIECES).start()
    yield pair
    await pair.close()


async def test_random_permutations_land_exactly(pair: Pair) -> None:
    rng = random.Random(5)
    expected = 0
    for _ in range(30):
        count = rng.randint(1, 40)
        ours, theirs = rng.sample(range(40), count), rng.sample(range(61), count)
        assert await pair.write(ours, theirs) == count * sum(PIECES)
        pair.check(dict(zip(theirs, ours, strict=True)))
        expected += count
    told = pair.writer.transport.statistics()
    assert told["pages_written"] == expected
    assert told["bytes_written"] == expected * sum(PIECES)
    assert (told["writes"], told["writes_failed"], told["writes_in_flight"]) == (30, 0, 0)
    assert pair.target.transport.statistics()["bytes_written"] == 0


async def test_one_source_page_may_go_to_many(pair: Pair) -> None:
    await pair.write([3, 3, 3, 2], [0, 60, 30, 31])
    pair.check({0: 3, 60: 3, 30: 3, 31: 2})


async def test_writes_at_once_do_not_mix(pair: Pair) -> None:
    theirs = list(range(61))
    random.Random(1).shuffle(theirs)
    lots = [([index, (index + 7) % 40], theirs[2 * index : 2 * index + 2]) for index in range(30)]
    await asyncio.gather(*(pair.write(*lot) for lot in lots))
    pair.check({target: source for ours, targets in lots for source, target in zip(ours, targets, strict=True)})


async def test_a_write_of_many_parts_lands_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three descriptors a part: parts begin and end within a piece's run of pages.
    monkeypatch.setattr(nixl, "PART_DESCRIPTORS", 3)
    await pair.write(list(range(40)), list(range(60, 20, -1)))
    pair.check({60 - page: page for page in range(40)})
    monkeypatch.setattr(nixl, "PART_DESCRIPTORS", 4096)
    monkeypatch.setattr(nixl, "PART_BYTES", 1)
    await pair.write([1, 2], [2, 1])
    pair.check({2: 1, 1: 2})


async def test_an_empty_write_is_nothing(pair: Pair) -> None:
    assert await pair.write([], []) == 0
    assert pair.writer.transport.statistics()["writes"] == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "error", "words"),
    [
        ([0, 40], [0, 1], InvalidRequest, "page 40 is not of our pool"),
        ([0, -1], [0, 1], InvalidRequest, "page -1 is not of our pool"),
        ([0, 1], [0, 61], RemoteProtocolError, "page 61 is not of target"),
        ([0, 1], [-(2**31), 1], RemoteProtocolError, "page -2147483648 is not of target"),
        ([0, 1], [2], InvalidRequest, "2 pages cannot be written over 1"),
        ([0, 1], [5, 5], InvalidRequest, "page 5 of target.* twice"),
    ],
)
async def test_a_wrong_page_changes_nothing(
    pair: Pair, ours: list[int], theirs: list[int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await pair.write(ours, theirs)
    pair.check({})
    assert pair.writer.transport.statistics()["bytes_written"] == 0


async def test_page_first_pools_and_pools_by_layer_write_to_each_other(poller: PollerThread) -> None:
    """The pieces of a page touch on one side only, then on both: joined or not, the bytes are the same."""
    plain = NumpyPool(9, PIECES, seed=3)
    block = np.zeros((12, sum(PIECES)), np.uint8)
    offsets = np.cumsum((0, *PIECES[:-1])).tolist()
    segments = tuple(
        Segment(address=block.ctypes.data + offset, piece_bytes=size, stride_bytes=sum(PIECES), page_count=12)
        for offset, size in zip(offsets, PIECES, strict=True)
    )
    memory = PoolMemory(segments=segments, page_count=12)
    writer = await Worker("by-layer", poller, plain).start()
    first, second = NixlTransport("page-first"), NixlTransport("page-first")
    for transport in (first, second):
        await transport.start(poller=poller)
    await first.register(memory)
    mirror = np.zeros((12, sum(PIECES)), np.uint8)
    there = PoolMemory(
        segments=tuple(
            msgspec.structs.replace(piece, address=mirror.ctypes.data + offset)
            for piece, offset in zip(segments, offsets, strict=True)
        ),
        page_count=12,
    )
    await second.register(there)
    try:
        peer = await writer.transport.add_peer(first.instance, first.metadata(), memory)
        assert len(peer.pieces) == 4
        await writer.transport.write(peer, page_ids([8, 0, 4]), page_ids([2, 11, 0]))
        assert [block[page].tobytes() for page in (2, 11, 0)] == [plain.page(page) for page in (8, 0, 4)]
        peer = await first.add_peer(second.instance, second.metadata(), there)
        assert len(peer.pieces) == 1
        await first.write(peer, page_ids(range(12)), page_ids(reversed(range(12))))
        assert np.array_equal(mirror, block[::-1])
    finally:
        for transport in (writer.transport, first, second):
            await transport.close()


async def test_metadata_that_is_not_the_peers_is_refused(pair: Pair) -> None:
    target = pair.target.transport
    writer = pair.writer.transport
    memory = pair.target.pool.memory
    blob = target.metadata()
    foreign = nixl_metadata.wrap("else-1", nixl_metadata.unwrap(blob, expected_name=target.instance))
    for metadata in (b"", b"\xc1", blob[:-1], blob[:40], blob + b"\0", b"\x93\x01\x02\x03", b"x" * 500):
        with pytest.raises(RemoteProtocolError):
            await writer.add_peer(target.instance, metadata, memory)
    for index in range(0, len(blob), 7):
        damaged = bytearray(blob)
        damaged[index] ^= 1
        with pytest.raises(RemoteProtocolError):
            await writer.add_peer(target.instance, bytes(damaged), memory)
    with pytest.raises(RemoteProtocolError, match="the peer says it is 'else-0'"):
        await writer.add_peer("else-0", blob, memory)
    with pytest.raises(RemoteProtocolError, match="our own name"):
        await writer.add_peer(writer.instance, writer.metadata(), pair.writer.pool.memory)
    # A well-made envelope around the blob of an agent with another name, which is a peer of ours already.
    with pytest.raises(RemoteProtocolError, match="not authentic"):
        await writer.add_peer("else-1", foreign, memory)
    await pair.write([7], [9])
    pair.check({9: 7})


async def test_a_foreign_blob_of_an_unknown_agent_leaves_nothing_behind(pair: Pair, poller: PollerThread) -> None:
    third = await Worker("third", poller, NumpyPool(2, PIECES, seed=9)).start()
    blob = nixl_metadata.unwrap(third.transport.metadata(), expected_name=third.transport.instance)
    writer = pair.writer.transport
    with pytest.raises(RemoteProtocolError, match="not authentic"):
        await writer.add_peer("else-1", nixl_metadata.wrap("else-1", blob), third.pool.memory)
    peer = await writer.add_peer(third.transport.instance, third.transport.metadata(), third.pool.memory)
    await writer.write(peer, page_ids([4]), page_ids([1]))
    assert third.pool.page(1) == pair.writer.pool.page(4)
    await third.transport.close()


async def test_memory_that_is_not_sound_is_refused(pair: Pair) -> None:
    target = pair.target.transport
    memory = pair.target.pool.memory
    last = memory.segments[-1]

    def announce(*segments: Segment, page_count: int = 61) -> PoolMemory:
        return PoolMemory(segments=segments, page_count=page_count)

    unsound = [
        announce(),
        announce(*memory.segments, page_count=60),
        announce(*memory.segments[:3], msgspec.structs.replace(last, address=2**64 - 512)),
        announce(*memory.segments[:3], msgspec.structs.replace(last, stride_bytes=2**62)),
        announce(*memory.segments[:3], msgspec.structs.replace(last, address=0)),
        msgspec.structs.replace(memory, kind="FILE"),
    ]
    for wrong in unsound:
        with pytest.raises(RemoteProtocolError):
            await pair.writer.transport.add_peer(target.instance, target.metadata(), wrong)
    for wrong in (announce(*memory.segments[:3]), announce(*reversed(memory.segments))):
        with pytest.raises(PeerMismatch, match="piece_bytes"):
            await pair.writer.transport.add_peer(target.instance, target.metadata(), wrong)
    # Sound for us, but not what the peer registered: NIXL refuses, and the peer stays reachable.
    elsewhere = announce(*memory.segments[:3], msgspec.structs.replace(last, address=last.address + 4096))
    with pytest.raises(TransferFailed):
        await pair.writer.transport.add_peer(target.instance, target.metadata(), elsewhere)
    await pair.write([0], [60])
    pair.check({60: 0})


async def test_a_peer_added_twice_lives_until_its_last_handle(pair: Pair) -> None:
    writer = pair.writer.transport
    again = await pair.add()
    await writer.remove_peer(pair.peer)
    with pytest.raises(LocalProtocolError, match="was removed"):
        await pair.write([1], [1])
    with pytest.raises(LocalProtocolError, match="removed twice"):
        await writer.remove_peer(pair.peer)
    await writer.write(again, page_ids([1]), page_ids([1]))
    pair.check({1: 1})
    await writer.remove_peer(again)
    pair.peer = await pair.add()
    await pair.write([2], [2])
    pair.check({2: 2})


async def test_a_cancelled_write_settles_before_it_raises(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PART_DESCRIPTORS", 1)
    task = asyncio.create_task(pair.write(list(range(40)), list(range(40))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    writer = pair.writer.transport
    assert writer.statistics()["writes_in_flight"] == 0
    # Nothing lands after the raise: what is there now stays.
    landed = writer.statistics()["bytes_written"]
    pages = [piece.copy() for piece in pair.target.pool.pieces]
    await pair.write([0], [60])
    for page, piece in zip(pages, pair.target.pool.pieces, strict=True):
        assert np.array_equal(page[:60], piece[:60])
    assert landed < 40 * sum(PIECES)


async def test_a_write_to_a_hanging_peer_outlives_its_caller_and_ends_with_the_transport(
    poller: PollerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_flight_for_ever(call: Callable[[NixlAgent, int], bool]) -> Callable[[NixlAgent, int], bool]:
        def answer(agent: NixlAgent, handle: int) -> bool:
            call(agent, handle)
            return False

        return answer

    released: list[int] = []
    pair = await Pair(poller, PIECES).start()
    pair.writer.transport._close_timeout_s = 0.05
    monkeypatch.setattr(NixlAgent, "post", in_flight_for_ever(NixlAgent.post))
    monkeypatch.setattr(NixlAgent, "check", in_flight_for_ever(NixlAgent.check))
    monkeypatch.setattr(NixlAgent, "release", lambda agent, handle: released.append(handle))
    task = asyncio.create_task(pair.write([0], [0]))
    for _ in range(2):
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
        task.cancel()
    assert pair.writer.transport.statistics()["writes_in_flight"] == 1
    await pair.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pair.writer.transport.statistics()["writes_in_flight"] == 0
    assert not released, "a request was released in flight"


def test_a_request_is_not_touched_after_its_end_nor_released_before() -> None:
    class Agent:
        is_closed = False
        answers: ClassVar = [False, True]
        released: ClassVar[list[int]] = []

        def post(self, handle: int) -> bool:
            return self.answers.pop(0)

        check = post

        def release(self, handle: int) -> None:
            self.released.append(handle)

    request = Request(Agent(), 5)  # type: ignore[arg-type]  # Test.
    assert not request.post()
    with pytest.raises(LocalProtocolError, match="released while it is in flight"):
        request.release()
    assert request.check()
    request.release()
    request.release()
    assert Agent.released == [5]
    for touch in (request.check, request.post):
        with pytest.raises(LocalProtocolError, match="after its release"):
            touch()


async def test_cancelling_while_a_peer_is_added_undoes_it(pair: Pair, poller: PollerThread) -> None:
    third = await Worker("third", poller, NumpyPool(2, PIECES)).start()
    where = (third.transport.instance, third.transport.metadata(), third.pool.memory)
    task = asyncio.create_task(pair.writer.transport.add_peer(*where))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    peer = await pair.writer.transport.add_peer(*where)
    await pair.writer.transport.write(peer, page_ids([4]), page_ids([1]))
    assert third.pool.page(1) == pair.writer.pool.page(4)
    await third.transport.close()


async def test_a_closed_transport_says_so(pair: Pair) -> None:
    await pair.writer.transport.close()
    await pair.writer.transport.close()
    for call in (pair.write([0], [0]), pair.add(), pair.writer.transport.remove_peer(pair.peer)):
        with pytest.raises(TransferFailed, match="is closed"):
            await call
    pair.check({})


async def test_calls_out_of_order_are_refused(poller: PollerThread) -> None:
    transport = NixlTransport("early")
    pool = NumpyPool(2, PIECES)
    with pytest.raises(LocalProtocolError, match="no metadata"):
        transport.metadata()
    with pytest.raises(LocalProtocolError, match="not started"):
        await transport.register(pool.memory)
    await transport.start(poller=poller)
    with pytest.raises(LocalProtocolError, match="started twice"):
        await transport.start(poller=poller)
    with pytest.raises(LocalProtocolError, match="no pool"):
        await transport.add_peer("x-1", b"", pool.memory)
    with pytest.raises(InvalidRequest, match="cannot be registered"):
        await transport.register(msgspec.structs.replace(pool.memory, page_count=3))
    await transport.register(pool.memory)
    with pytest.raises(LocalProtocolError, match="takes one"):
        await transport.register(pool.memory)
    await transport.close()


async def test_wrong_settings_are_refused(poller: PollerThread) -> None:
    with pytest.raises(InvalidConfig, match="name"):
        NixlTransport("")
    with pytest.raises(InvalidConfig, match="progress_delay_us"):
        NixlTransport("x", progress_delay_us=0)
    transport = NixlTransport("x", backends={"NO_SUCH_PLUGIN": {}})
    with pytest.raises(TransferFailed, match="backend NO_SUCH_PLUGIN cannot be started"):
        await transport.start(poller=poller)
    await transport.close()


async def test_each_start_has_its_own_instance(poller: PollerThread) -> None:
    first, second = NixlTransport("decode-0"), NixlTransport("decode-0")
    assert first.name == second.name == "decode-0"
    assert first.instance.startswith("decode-0-")
    assert first.instance != second.instance


async def test_close_leaves_no_thread(poller: PollerThread) -> None:
    def kernel_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    await (await Pair(poller, PIECES).start()).close()
    # UCX keeps one thread for itself once it was used; from then on each transport must clear up after itself.
    before, python_before = kernel_threads(), threading.active_count()
    pair = await Pair(poller, PIECES).start()
    await pair.write([0], [0])
    assert kernel_threads() > before
    await pair.close()
    assert kernel_threads() == before
    assert threading.active_count() == python_before


async def test_links_pass_messages(pair: Pair) -> None:
    got: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def on_link(link: object) -> None:
        got.set_result(await link.receive())  # type: ignore[attr-defined]  # Test.

    listener = await pair.target.transport.listen("127.0.0.1:0", on_link)
    link = await pair.writer.transport.dial(listener.address)
    link.send(wire.Ping(sent_at=1.0))
    assert await got == wire.Ping(sent_at=1.0)
    await link.close()
    await listener.close()
    assert pair.writer.transport.statistics()["links"] == 1


def test_tls_contexts_reach_the_links() -> None:
    context = ssl.create_default_context()
    assert NixlTransport("x", dial_tls=context)._control.dial_tls is context
