"""A decode worker that will not ask for a prompt says so, and prefill waits for it no longer; over loopback."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.support.prompts import DIGEST, OTHER
from tests.support.waits import until
from tidekv.states.errors import LinkClosed, TransferFailed
from tidekv.states.handover import room_claims
from tidekv.transports import wire


async def until_declined(prefill, count: int = 1) -> None:
    await until(lambda: prefill.sender.counts["rooms_declined"] == count)


async def test_a_decline_ends_one_wait_for_its_prompt_at_once(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    waits = [asyncio.ensure_future(prefill.room("r1")) for _ in range(2)]
    other = asyncio.ensure_future(prefill.room("r2"))
    of_other_prompt = asyncio.ensure_future(prefill.room("r1", OTHER))
    await asyncio.sleep(0)
    for number, wait in enumerate(waits):
        # Of two workers that have the same prompt under the same id, one may decline: the other one's wait goes on.
        assert not wait.done()
        decode.receiver.decline(prefill.address, "r1", DIGEST)
        await until_declined(prefill, number + 1)
        with pytest.raises(TransferFailed, match="decode declined it"):
            await wait
    # No link is left of it, no peer, no wait, and the other requests are served as ever.
    await until(lambda: prefill.sender.statistics()["peers"] == 0)
    assert prefill.sender.statistics()["rooms_waited_for"] == 2
    decode.promise(prefill.address, "r2", tokens=4, promised=0, pages=[1])
    assert (await other).cause is None
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[2], prompt_digest=OTHER.digest)
    assert (await of_other_prompt).cause is None
    assert decode.receiver.counts["declines_unsent"] == 0


async def test_a_decline_that_came_before_the_wait_ends_it_soon_unless_the_room_opens(world, monkeypatch) -> None:
    now = [100.0]
    decode, prefill = await world.decode(), await world.prefill(clock=lambda: now[0])
    monkeypatch.setattr(room_claims, "DECLINE_KEPT_S", 0.01)
    decode.receiver.decline(prefill.address, "r1", DIGEST)
    await until_declined(prefill)
    with pytest.raises(TransferFailed, match="decode declined it"):
        await prefill.room("r1")
    # A retry, perhaps at another decode worker: prefill is asked first, then the promise comes.
    monkeypatch.setattr(room_claims, "DECLINE_KEPT_S", 1000.0)
    decode.receiver.decline(prefill.address, "r1", DIGEST)
    await until_declined(prefill, 2)
    retried = asyncio.ensure_future(prefill.room("r1"))
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    assert (await retried).cause is None
    # One that was not taken is forgotten in time.
    decode.receiver.decline(prefill.address, "r3", DIGEST)
    await until_declined(prefill, 3)
    now[0] += 1001.0
    later = asyncio.ensure_future(prefill.room("r3"))
    await asyncio.sleep(0)
    assert not later.done()
    decode.promise(prefill.address, "r3", tokens=4, promised=0, pages=[2])
    assert (await later).cause is None


async def test_prefill_remembers_a_bounded_number_of_declined_rooms(world, monkeypatch) -> None:
    monkeypatch.setattr(room_claims, "DECLINE_KEPT_S", 0.01)
    frozen = [100.0]
    decode, prefill = await world.decode(), await world.prefill(rooms_max=2, clock=lambda: frozen[0])
    for number in range(3):
        decode.receiver.decline(prefill.address, f"r{number}", DIGEST)
        await until_declined(prefill, number + 1)
    forgotten = asyncio.ensure_future(prefill.room("r0"))
    await asyncio.sleep(0)
    for name in ("r1", "r2"):
        with pytest.raises(TransferFailed):
            await prefill.room(name)
    assert not forgotten.done()
    forgotten.cancel()


async def test_a_worker_whose_layout_or_ranks_differ_can_decline_at_all_ranks(world) -> None:
    decode = await world.decode(identity=world.identity(model="other"))
    prefills = [await world.prefill(name=f"prefill-{rank}", rank=rank, ranks=2) for rank in range(2)]
    waits = [asyncio.ensure_future(prefill.room("r1")) for prefill in prefills]
    await asyncio.sleep(0)
    decode.receiver.decline(",".join(prefill.address for prefill in prefills), "r1", DIGEST)
    for wait in waits:
        with pytest.raises(TransferFailed):
            await wait
    assert all(prefill.sender.counts["hellos_refused"] == 0 for prefill in prefills)


async def test_a_link_that_is_open_carries_declines_too(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=4, promised=0, pages=[1])
    room = await prefill.room("r1")
    declined = asyncio.ensure_future(prefill.room("r2"))
    await asyncio.sleep(0)
    decode.receiver.decline(prefill.address, "r2", DIGEST)
    with pytest.raises(TransferFailed):
        await declined
    # A room that is promised stays: a decline is not an abort.
    decode.receiver.decline(prefill.address, "r1", DIGEST)
    await until(lambda: prefill.sender.counts["frames_late"] == 1)
    assert room.cause is None
    assert prefill.sender.statistics()["peers"] == 1


async def test_a_decline_in_the_name_of_another_worker_is_dropped_and_counted(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address)
    waiting = asyncio.ensure_future(prefill.room("r1"))
    await asyncio.sleep(0)
    for name in ("instance", "epoch"):
        link.send(wire.Declined(room=replace(decode.room(), **{name: "another"}), prompt_digest=DIGEST))
    await until(lambda: prefill.sender.counts["frames_foreign"] == 2)
    assert not waiting.done()
    assert prefill.sender.counts["rooms_declined"] == 0
    link.send(wire.Declined(room=decode.room(), prompt_digest=DIGEST))
    with pytest.raises(TransferFailed, match="decode declined it"):
        await waiting


async def test_a_prefill_that_cannot_be_reached_or_does_not_answer_is_counted(world) -> None:
    decode = await world.decode(heartbeat_s=0.01, missed_s=0.02)
    decode.receiver.decline("nowhere:1", "r1", DIGEST)
    await until(lambda: decode.receiver.counts["declines_unsent"] == 1)

    async def silent(link) -> None:
        await asyncio.Event().wait()

    listener = await decode.transport.listen("silent:1", silent)
    decode.receiver.decline("silent:1", "r1", DIGEST)
    await until(lambda: decode.receiver.counts["declines_unsent"] == 2)
    await listener.close()


async def test_a_link_has_either_a_hello_or_one_decline(world, decode) -> None:
    prefill = await world.prefill()
    link = await decode.dial(prefill.address, wire.Declined(room=decode.room(), prompt_digest=DIGEST))
    link.send(decode.promise(decode.room("r2")))
    with pytest.raises(LinkClosed, match="declined"):
        await decode.receive(link)
    assert prefill.sender.statistics()["rooms_sending"] == 0
