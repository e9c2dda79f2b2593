"""Messages of a room while received pages are hashed: their order stays, and an ended room gets none of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.inside import runtime_of
from tests.support.waits import expected
from tidekv import RequestFailed
from tidekv.backends.checksums import ChecksumThread
from tidekv.states.types import PageIds, PoolMemory, page_ids
from tidekv.transports import wire
from tidekv.transports.decode.page_checks import Destinations, InOrder, damaged_page

PROMPT = list(range(100, 142))
ROOM = wire.RoomId(instance="d", epoch="e", request_id="r", generation=0)


@given(waits=st.lists(st.booleans(), max_size=8), data=st.data())
async def test_messages_keep_their_order_whatever_ends_first(waits: list[bool], data: st.DataObject) -> None:
    loop, taken = asyncio.get_running_loop(), list[tuple[int, bytes | None]]()
    in_order = InOrder(lambda message, hashed: taken.append((message.span, hashed)))
    tasks: list[asyncio.Task[None]] = []
    hashing: dict[int, asyncio.Future[bytes]] = {}
    for at, is_hashed in enumerate(waits):
        hashed = loop.create_future() if is_hashed else None
        if hashed is not None:
            hashing[at] = hashed
        message = wire.Chunk(room=ROOM, rank=0, span=at, first=0, count=0, last=False)
        in_order.add(message, partial(lambda given: given, hashed), lambda work: tasks.append(loop.create_task(work)))
        # Nothing is held back without a reason.
        assert len(taken) == next((at for at, waited in enumerate(waits[: at + 1]) if waited), at + 1)
        # The next message may come before or after the task has begun to wait for the first one.
        if data.draw(st.booleans()):
            await asyncio.sleep(0)
    for at in data.draw(st.permutations(list(hashing))):
        hashing[at].set_result(bytes([at]))
        for _ in range(3):
            await asyncio.sleep(0)
        held = next((other for other in hashing if not hashing[other].done()), len(waits))
        assert [span for span, _ in taken] == list(range(held))
    assert taken == [(at, bytes([at]) if is_hashed else None) for at, is_hashed in enumerate(waits)]
    await asyncio.gather(*tasks)


@given(first=st.integers(0, 9), count=st.integers(0, 9), span=st.integers(0, 2))
def test_pages_that_were_not_requested_are_not_hashed(first: int, count: int, span: int) -> None:
    destinations = Destinations(
        page_count=5, spans={("full", 0): (2, page_ids([5, 7, 9])), ("full", 2): (0, page_ids())}
    )
    message = wire.Chunk(room=ROOM, rank=0, span=span, first=first, count=count, last=False)
    reported = destinations.reported(message)
    if span == 0 and first >= 2 and first + count <= 5:
        assert reported == dict(zip(range(first, 5), [5, 7, 9][first - 2 :][:count], strict=False))
    else:
        assert not reported


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_the_first_damaged_page_is_named(damaged: int) -> None:
    destinations = Destinations(
        page_count=8, spans={("full", 1): (4, page_ids([30, 10, 20])), ("swa", 0): (7, page_ids([3]))}
    )
    sent = [bytes([at]) * 16 for at in range(3)]
    here = [bytes(16) if at >= damaged and at else digest for at, digest in enumerate(sent)]
    here[damaged] = b"x" * 16
    chunk = wire.Chunk(room=ROOM, rank=0, span=1, first=4, count=3, last=True, checksums=b"".join(sent))
    found = damaged_page(destinations, chunk, b"".join(here))
    assert found is not None
    assert (found.position, found.page, found.component) == (4 + damaged, [30, 10, 20][damaged], "full")
    assert damaged_page(destinations, chunk, b"".join(sent)) is None
    component = msgspec.structs.replace(chunk, span=0, component="swa", first=7, count=1, checksums=bytes(16))
    assert str(damaged_page(destinations, component, b"x" * 16)) == (
        "page 7 of the prompt of component 'swa', in device page 3, is not what prefill sent"
    )


class HeldHashing:
    """Hashing at decode that does not end before `release`."""

    def __init__(self, thread: ChecksumThread) -> None:
        self._thread = thread
        self._released = asyncio.Event()
        self.begun = asyncio.Event()

    def hashing(self, memory: PoolMemory) -> Callable[[PageIds], asyncio.Future[bytes]]:
        begin = self._thread.hashing(memory)

        async def later(pages: PageIds) -> bytes:
            self.begun.set()
            await self._released.wait()
            return await begin(pages)

        return lambda pages: asyncio.ensure_future(later(pages))

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], HeldHashing]:
    def hold(pair) -> HeldHashing:  # type: ignore[no-untyped-def]  # Of make_pair.
        receiver = runtime_of(pair.engine).receiver
        holding = HeldHashing(receiver._rank.hashing)
        monkeypatch.setattr(receiver, "_rank", dataclasses.replace(receiver._rank, hashing=holding))
        return holding

    return hold


async def test_a_request_is_not_ready_before_its_pages_are_hashed(make_pair, held) -> None:
    async with make_pair(page_checksums=True) as pair, expected("a restore with hashing that is held"):
        holding = held(pair)
        waiting = asyncio.create_task(pair.restore("r1", PROMPT))
        await holding.begun.wait()
        # Prefill has nothing left to send; its first token waits behind the pages.
        for _ in range(200):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert pair.core()["requests_transfer"] == 1
        holding.release()
        await pair.finish(await waiting, PROMPT, [1])
        await pair.assert_nothing_held()


async def test_messages_that_wait_for_hashing_are_bounded(make_pair, held) -> None:
    async with make_pair(page_checksums=True) as pair, expected("the end of a link that sends too much"):
        holding = held(pair)
        waiting = asyncio.create_task(pair.engine.restore(pair.request("r1", PROMPT)))
        await holding.begun.wait()
        (writer,) = pair.peer._sender._room_writers.values()
        for _ in range(100):
            writer.send(wire.Refused(room=writer.key, span=7, cause="again"))
        with pytest.raises(RequestFailed, match="protocol error") as failed:
            await waiting
        assert "messages about one room" in failed.value.detail
        holding.release()
        await pair.assert_nothing_held()


@pytest.mark.parametrize("end", ["abort", "link lost"])
async def test_a_room_that_ends_while_its_pages_are_hashed_is_settled(make_pair, held, end: str) -> None:
    async with make_pair(page_checksums=True) as pair, expected("the end of a room with hashing that is held"):
        holding = held(pair)
        waiting = asyncio.create_task(pair.restore("r1", PROMPT))
        await holding.begun.wait()
        if end == "abort":
            await pair.engine.abort("r1")
        else:
            pair.network.cut(runtime_of(pair.engine).transport.instance)
        with pytest.raises(RequestFailed):
            await waiting
        holding.release()
        await pair.assert_nothing_held()
        assert pair.engine.statistics()["receiver"]["pages_damaged"] == 0
        await pair.finish(await pair.restore("r2", PROMPT), PROMPT, [1])
        await pair.assert_nothing_held()
