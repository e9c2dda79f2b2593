"""NIXL between two agents of this process, and the proof that nothing is written where it should not be."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from benchmarks.nixl_child import NumpyPool
from tests.support.prompts import DIGEST
from tests.support.waits import LIMIT_S
from tidekv.engine.poller import PollerThread
from tidekv.states.errors import (
    InvalidConfig,
    InvalidRequest,
    LocalProtocolError,
    RemoteProtocolError,
    TransferFailed,
)
from tidekv.states.types import PoolMemory, Segment, page_ids
from tidekv.transports import wire
from tidekv.transports.nixl import transport as nixl
from tidekv.transports.nixl.agent import NixlAgent, NixlRequest
from tidekv.transports.nixl.transport import NixlOptions, NixlTransport

pytestmark = pytest.mark.nixl

PIECES = (4096, 512, 4096, 512)


async def test_random_permutations_land_exactly(pair: Any) -> None:
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


async def test_one_source_page_may_go_to_many(pair: Any) -> None:
    await pair.write([3, 3, 3, 2], [0, 60, 30, 31])
    pair.check({0: 3, 60: 3, 30: 3, 31: 2})


async def test_writes_at_once_do_not_mix(pair: Any) -> None:
    theirs = list(range(61))
    random.Random(1).shuffle(theirs)
    lots = [([index, (index + 7) % 40], theirs[2 * index : 2 * index + 2]) for index in range(30)]
    await asyncio.gather(*(pair.write(*lot) for lot in lots))
    pair.check({target: source for ours, targets in lots for source, target in zip(ours, targets, strict=True)})


async def test_writes_that_wait_together_are_few_requests_and_land_exactly(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[int] = []
    post = NixlAgent.post
    monkeypatch.setattr(NixlAgent, "post", lambda agent, handle: (posted.append(handle), post(agent, handle))[1])
    rng = random.Random(3)
    theirs = rng.sample(range(61), 60)
    lots = [([rng.randrange(40) for _ in range(3)], theirs[3 * at : 3 * at + 3]) for at in range(20)]
    assert await asyncio.gather(*(pair.write(*lot) for lot in lots)) == [3 * sum(PIECES)] * 20
    pair.check({target: source for ours, targets in lots for source, target in zip(ours, targets, strict=True)})
    # The first may go before the others are there.
    assert len(posted) < 10
    assert pair.writer.transport.statistics()["writes"] == 20


async def test_a_joint_request_that_fails_fails_each_of_its_writes_and_no_later_one(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = NixlAgent.release

    def fail(agent: NixlAgent, handle: int) -> bool:
        raise TransferFailed("the link is down")

    post = NixlAgent.post
    monkeypatch.setattr(NixlAgent, "post", fail)
    released: list[int] = []
    monkeypatch.setattr(
        NixlAgent, "release", lambda agent, handle: (released.append(handle), release(agent, handle))[1]
    )
    outcomes = await asyncio.gather(*(pair.write([page], [page]) for page in range(10)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TransferFailed] * 10
    assert all("write to peer target" in str(outcome) for outcome in outcomes)
    assert len({id(outcome) for outcome in outcomes}) == 10
    assert 0 < len(released) < 10
    pair.check({})
    told = pair.writer.transport.statistics()
    assert (told["writes_failed"], told["bytes_written"], told["writes_in_flight"]) == (10, 0, 0)
    monkeypatch.setattr(NixlAgent, "post", post)
    await asyncio.gather(*(pair.write([page], [60 - page]) for page in range(10)))
    pair.check({60 - page: page for page in range(10)})


async def test_a_write_of_many_parts_lands_whole(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three descriptors a part: parts begin and end within a piece's run of pages.
    monkeypatch.setattr(nixl, "PART_DESCRIPTORS", 3)
    await pair.write(list(range(40)), list(range(60, 20, -1)))
    pair.check({60 - page: page for page in range(40)})
    monkeypatch.setattr(nixl, "PART_DESCRIPTORS", 4096)
    monkeypatch.setattr(nixl, "PART_BYTES", 1)
    await pair.write([1, 2], [2, 1])
    pair.check({2: 1, 1: 2})


async def test_an_empty_write_is_nothing(pair: Any) -> None:
    assert await pair.write([], []) == 0
    assert pair.writer.transport.statistics()["writes"] == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "error", "text"),
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
    pair: Any, ours: list[int], theirs: list[int], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await pair.write(ours, theirs)
    pair.check({})
    assert pair.writer.transport.statistics()["bytes_written"] == 0


async def test_page_first_pools_and_pools_by_layer_write_to_each_other(poller: PollerThread, start_worker: Any) -> None:
    """The pieces of a page touch on one side only, then on both: joined or not, the bytes are the same."""
    plain = NumpyPool(9, PIECES, seed=3)
    block = np.zeros((12, sum(PIECES)), np.uint8)
    offsets = np.cumsum((0, *PIECES[:-1])).tolist()
    segments = tuple(
        Segment(address=block.ctypes.data + offset, piece_bytes=size, stride_bytes=sum(PIECES), page_count=12)
        for offset, size in zip(offsets, PIECES, strict=True)
    )
    memory = PoolMemory(segments=segments, page_count=12)
    writer = await start_worker("by-layer", plain)
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
        for transport in (first, second):
            await transport.close()


async def test_a_cancelled_write_settles_before_it_raises(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PART_DESCRIPTORS", 1)
    task = asyncio.create_task(pair.write(list(range(40)), list(range(40))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    writer = pair.writer.transport
    assert writer.statistics()["writes_in_flight"] == 0
    # Nothing lands after the raise: what is there now stays.
    written = writer.statistics()["bytes_written"]
    pages = [piece.copy() for piece in pair.target.pool.pieces]
    await pair.write([0], [60])
    for page, piece in zip(pages, pair.target.pool.pieces, strict=True):
        assert np.array_equal(page[:60], piece[:60])
    assert written < 40 * sum(PIECES)


async def test_a_write_to_a_hanging_peer_outlives_its_caller_and_ends_with_the_transport(
    start_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_flight_for_ever(call: Callable[[NixlAgent, int], bool]) -> Callable[[NixlAgent, int], bool]:
        def answer(agent: NixlAgent, handle: int) -> bool:
            call(agent, handle)
            loop.call_soon_threadsafe(posted.set)
            return False

        return answer

    loop, posted = asyncio.get_running_loop(), asyncio.Event()
    released: list[int] = []
    pair = await start_pair()
    pair.writer.transport._close_timeout_s = 0.05
    monkeypatch.setattr(NixlAgent, "post", in_flight_for_ever(NixlAgent.post))
    monkeypatch.setattr(NixlAgent, "check", in_flight_for_ever(NixlAgent.check))
    monkeypatch.setattr(NixlAgent, "release", lambda agent, handle: released.append(handle))
    task = asyncio.create_task(pair.write([0], [0]))
    # Cancelled before that it would post nothing, and end.
    await posted.wait()
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

    request = NixlRequest(Agent(), 5)  # type: ignore[arg-type]  # Test.
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


async def test_a_closed_transport_says_so(pair: Any) -> None:
    await pair.writer.transport.close()
    await pair.writer.transport.close()
    for call in (pair.write([0], [0]), pair.add()):
        with pytest.raises(TransferFailed, match="is closed"):
            await call
    # A later clean-up has nothing left to do.
    await pair.writer.transport.remove_peer(pair.peer)
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
    with pytest.raises(LocalProtocolError, match="call `register` once"):
        await transport.register(pool.memory)
    await transport.close()


async def test_wrong_settings_are_refused(poller: PollerThread) -> None:
    with pytest.raises(InvalidConfig, match="name"):
        NixlTransport("")
    with pytest.raises(InvalidConfig, match="progress_delay_us"):
        NixlTransport("x", nixl=NixlOptions(progress_delay_us=0))
    transport = NixlTransport("x", nixl=NixlOptions(backends={"NO_SUCH_PLUGIN": {}}))
    with pytest.raises(TransferFailed, match="backend NO_SUCH_PLUGIN cannot be started"):
        await transport.start(poller=poller)
    await transport.close()


async def test_each_start_has_its_own_instance(poller: PollerThread) -> None:
    first, second = NixlTransport("decode-0"), NixlTransport("decode-0")
    assert first.name == second.name == "decode-0"
    assert first.instance.startswith("decode-0-")
    assert first.instance != second.instance


async def test_close_leaves_no_thread(start_pair: Any) -> None:
    def kernel_threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    # UCX keeps one thread for itself once it was used; from then on each transport must clear up after itself.
    await (await start_pair()).close()
    before = kernel_threads()
    pair = await start_pair()
    await pair.write([0], [0])
    assert kernel_threads() - before
    await pair.close()
    # A thread that has reported its outcome still needs a moment to end, and no event reports that.
    async with asyncio.timeout(LIMIT_S):
        while kernel_threads() - before:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_links_pass_messages(pair: Any) -> None:
    got: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def on_link(link: object) -> None:
        got.set_result(await link.receive())  # type: ignore[attr-defined]  # Test.

    room = wire.RoomId(instance="d", epoch="e", request_id="r", generation=0)
    listener = await pair.target.transport.listen("127.0.0.1:0", on_link)
    link = await pair.writer.transport.dial(listener.address)
    declined = wire.Declined(room=room, prompt_digest=DIGEST)
    link.send(declined)
    assert await got == declined
    await link.close()
    await listener.close()
    assert pair.writer.transport.statistics()["links"] == 1


def test_tls_contexts_reach_the_links() -> None:
    context = ssl.create_default_context()
    assert NixlTransport("x", dial_tls=context)._control.dial_tls is context
