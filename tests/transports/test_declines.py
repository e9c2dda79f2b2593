"""A decode worker that will not ask for a prompt says so, and prefill waits for it no longer; over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.waits import LIMIT_S
from tidekv.states.errors import LinkClosed, TransferFailed
from tidekv.transports.control import wire


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110  # Counts have no wake-up.
            await asyncio.sleep(0)


async def until_declined(prefill, count: int = 1) -> None:
    await until(lambda: prefill.sender.counts["rooms_declined"] == count)


async def test_a_wait_for_a_declined_room_ends_at_once(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    waits = [asyncio.ensure_future(prefill.sender.room("r1")) for _ in range(2)]
    other = asyncio.ensure_future(prefill.sender.room("r2"))
    await asyncio.sleep(0)
    decode.receiver.decline(prefill.address, "r1")
    for wait in waits:
        with pytest.raises(TransferFailed, match="decode declined it"):
            await wait
    # No link is left of it, no peer, no wait, and the other request is served as ever.
    assert prefill.sender.statistics()["peers"] == 0
    assert prefill.sender.statistics()["rooms_waited_for"] == 1
    decode.promise(prefill.address, "r2", tokens=4, promised=0, pages=[1])
    assert (await other).cause is None
    assert decode.receiver.counts["declines_unsent"] == 0


async def test_a_room_that_is_declined_before_prefill_waits_for_it_is_waited_for_once(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.receiver.decline(prefill.address, "r1")
    await until_declined(prefill)
    with pytest.raises(TransferFailed):
        await prefill.sender.room("r1")
    # The id may be used again; a promise takes a decline back.
    decode.receiver.decline(prefill.address, "r1")
    await until_declined(prefill, 2)
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    await until(lambda: prefill.sender.statistics()["rooms_sending"] == 1)
    assert (await prefill.sender.room("r1")).cause is None


async def test_prefill_remembers_a_bounded_number_of_declined_rooms(world) -> None:
    decode, prefill = await world.decode(), await world.prefill(rooms_max=2)
    for number in range(3):
        decode.receiver.decline(prefill.address, f"r{number}")
        await until_declined(prefill, number + 1)
    forgotten = asyncio.ensure_future(prefill.sender.room("r0"))
    for name in ("r1", "r2"):
        with pytest.raises(TransferFailed):
            await prefill.sender.room(name)
    assert not forgotten.done()
    forgotten.cancel()


async def test_a_worker_whose_layout_or_ranks_differ_can_decline_at_all_ranks(world) -> None:
    decode = await world.decode(identity=world.identity(model="other"))
    prefills = [await world.prefill(name=f"prefill-{rank}", rank=rank, ranks=2) for rank in range(2)]
    waits = [asyncio.ensure_future(prefill.sender.room("r1")) for prefill in prefills]
    await asyncio.sleep(0)
    decode.receiver.decline(",".join(prefill.address for prefill in prefills), "r1")
    for wait in waits:
        with pytest.raises(TransferFailed):
            await wait
    assert all(prefill.sender.counts["hellos_refused"] == 0 for prefill in prefills)


async def test_a_link_that_is_open_carries_declines_too(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    room = await prefill.sender.room("r1")
    decode.receiver.decline(prefill.address, "r2")
    with pytest.raises(TransferFailed):
        await prefill.sender.room("r2")
    # A room that is promised stays: a decline is not an abort.
    decode.receiver.decline(prefill.address, "r1")
    await until(lambda: prefill.sender.counts["frames_late"] == 1)
    assert room.cause is None
    assert prefill.sender.statistics()["peers"] == 1


async def test_a_prefill_that_cannot_be_reached_or_does_not_answer_is_counted(world) -> None:
    decode = await world.decode(heartbeat_s=0.01, missed_s=0.02)
    decode.receiver.decline("nowhere:1", "r1")
    await until(lambda: decode.receiver.counts["declines_unsent"] == 1)

    async def silent(link) -> None:
        await asyncio.Event().wait()

    listener = await decode.transport.listen("silent:1", silent)
    decode.receiver.decline("silent:1", "r1")
    await until(lambda: decode.receiver.counts["declines_unsent"] == 2)
    await listener.close()


async def test_a_link_has_either_a_hello_or_one_decline(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address, wire.Declined(room=decode.room()))
    link.send(decode.promise(decode.room("r2")))
    with pytest.raises(LinkClosed, match="declined"):
        await decode.receive(link)
    assert prefill.sender.statistics()["rooms_sending"] == 0
