"""The hand-over from the decode side, over loopback: every way in which a room begins and ends."""

from __future__ import annotations

from tidekv.states import events


async def test_a_whole_prompt_arrives_with_its_first_token(world) -> None:
    decode, prefill = await world.decode(), await world.prefill()
    decode.promise(prefill.address, "r1", tokens=22, promised=0, pages=range(10, 16))
    room = await prefill.serve("r1", range(30, 36))
    await decode.wait(events.ChunkLanded, last=True)
    await decode.wait(events.AuxLanded)
    assert world.same(decode, prefill, zip(range(10, 16), range(30, 36), strict=True))
    assert decode.aux == [("r1", 0, 11, {"by": "prefill"})]
    assert prefill.sender.statistics()["bytes_sent"] == 6 * world.PAGE_BYTES
    sent = decode.of(events.PromiseSent)
    assert [(event.writer, event.ranks) for event in sent] == [(prefill.transport.instance, 1)]
    decode.receiver.received("r1", 0)
    assert await room.received() == "received"
    assert prefill.sender.statistics()["rooms_received"] == 1
