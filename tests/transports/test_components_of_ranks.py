"""Components between instances of several ranks: windows are divided as pages are, records are not, and all compare."""

from __future__ import annotations

import pytest
from msgspec.structs import replace as changed

from tidekv.states import events
from tidekv.states.component_specs import ComponentPages
from tidekv.states.handover.sender import RequestedComponent
from tidekv.states.types import page_ids

# A prompt of 5 pages, the last one in part. Its window of 6 tokens reaches back into page 3.
WINDOW = [ComponentPages("swa", 3, page_ids([10, 11]))]
STATE = [ComponentPages("ssm", 4, page_ids([3]))]
OURS = {"swa": [40, 30], "ssm": [20]}


def promise(decode, address: str, component_pages: list[ComponentPages]) -> None:
    decode.promise(address, "r1", tokens=18, promised=8, pages=[1, 2, 3], component_pages=component_pages)


async def serve(prefill, name: str, pages: list[int]):
    room = await prefill.room("r1")
    await room.send(range(5), start_token=0)
    await room.send_component_pages(name, pages)
    await room.finish(first_token=1)
    return room


async def ranks(world, decodes: int, prefills: int, *, heads: int = 4, components) -> tuple[list, list, str]:
    """Instances of so many ranks; `components(heads)` makes those of a rank that holds so many."""
    of_decode = [
        await world.decode(
            name=f"decode-{at}",
            rank=at,
            ranks=decodes,
            heads=heads // decodes,
            components=components(heads // decodes),
            group=lambda: "group",
        )
        for at in range(decodes)
    ]
    of_prefill = [
        await world.prefill(
            f"prefill:{at + 1}",
            name=f"prefill-{at}",
            rank=at,
            ranks=prefills,
            heads=heads // prefills,
            components=components(heads // prefills),
        )
        for at in range(prefills)
    ]
    return of_decode, of_prefill, ",".join(prefill.address for prefill in of_prefill)


def window_of(world):
    def make(heads: int) -> list:
        group = changed(world.WINDOW.groups[0], kv_heads=heads)
        return [changed(world.WINDOW, piece_bytes=tuple(24 // 3 * heads for _ in range(2)), groups=(group,))]

    return make


@pytest.mark.parametrize(("decodes", "prefills"), [(2, 2), (4, 2), (2, 4), (1, 4)])
async def test_a_window_is_divided_by_its_heads_as_the_pages_are(world, decodes: int, prefills: int) -> None:
    of_decode, of_prefill, address = await ranks(world, decodes, prefills, components=window_of(world))
    for decode in of_decode:
        promise(decode, address, WINDOW)
    for prefill in of_prefill:
        await serve(prefill, "swa", OURS["swa"])
    shape = (world.PAGE_SIZE, -1, 2)  # Two bytes a head and token.
    for piece in range(2):
        held = [prefill.components["swa"].buffers[piece] for prefill in of_prefill]
        for rank, decode in enumerate(of_decode):
            await decode.wait(events.ChunkReceived, last=True, count=max(1, prefills // decodes))
            for theirs, ours in zip(WINDOW[0].pages, OURS["swa"], strict=True):
                found = decode.components["swa"].buffers[piece][theirs].reshape(shape)
                width = found.shape[1]
                heads = [head for of in held for head in of[ours].reshape(shape).transpose(1, 0, 2)]
                expected = heads[rank * width : (rank + 1) * width]
                assert [head.tolist() for head in found.transpose(1, 0, 2)] == [head.tolist() for head in expected]


async def test_a_record_cannot_be_divided_between_other_numbers_of_ranks(world) -> None:
    of_decode, _, address = await ranks(world, 2, 1, components=lambda heads: [world.STATE])
    for decode in of_decode:
        promise(decode, address, STATE)
    failed = await of_decode[0].wait(events.RoomFailed)
    assert "ranks (it cannot be divided without channels) of component 'ssm': ours is 2, theirs is 1" in failed.cause


async def test_between_as_many_ranks_each_is_sent_its_own_record(world) -> None:
    of_decode, of_prefill, address = await ranks(world, 2, 2, components=lambda heads: [world.STATE])
    for decode in of_decode:
        promise(decode, address, STATE)
    for at, prefill in enumerate(of_prefill):
        await serve(prefill, "ssm", [20 + at])
    for at, (decode, prefill) in enumerate(zip(of_decode, of_prefill, strict=True)):
        await decode.wait(events.ChunkReceived, last=True)
        assert decode.components["ssm"].page(3) == prefill.components["ssm"].page(20 + at)


async def test_ranks_that_ask_for_different_tails_are_refused_on_all(world) -> None:
    of_decode, of_prefill, address = await ranks(world, 2, 2, components=window_of(world))
    promise(of_decode[0], address, WINDOW)
    promise(of_decode[1], address, [ComponentPages("swa", 4, page_ids([10]))])
    for decode in of_decode:
        refused = await decode.wait(events.RoomRefused)
        assert "requests component pages from positions" in refused.cause
        assert "(('swa', 3),)" in refused.cause
        assert "(('swa', 4),)" in refused.cause
    assert all(prefill.sender.statistics()["pages_sent"] == 0 for prefill in of_prefill)


async def test_copies_of_the_same_heads_are_handed_tails_and_write_none(world) -> None:
    """Of latent KV every rank holds all: one writes, and the others' embedders do the same without knowing."""
    window = changed(world.WINDOW, groups=(changed(world.WINDOW.groups[0], kind="mla"),))
    identity = world.identity(kind="mla", components=(window,))
    decode = await world.decode(identity=identity, components=[window])
    prefills = [
        await world.prefill(
            f"prefill:{at + 1}", name=f"prefill-{at}", rank=at, ranks=2, identity=identity, components=[window]
        )
        for at in range(2)
    ]
    promise(decode, ",".join(prefill.address for prefill in prefills), WINDOW)
    rooms = [await serve(prefill, "swa", OURS["swa"]) for prefill in prefills]
    assert [room.component_pages for room in rooms] == [{"swa": RequestedComponent("swa", 3, 2, 2)}] * 2
    await decode.wait(events.ChunkReceived, last=True)
    for theirs, ours in zip(WINDOW[0].pages, OURS["swa"], strict=True):
        assert decode.components["swa"].page(theirs) == prefills[0].components["swa"].page(ours)
    assert [prefill.sender.statistics()["pages_sent"] for prefill in prefills] == [5, 0]
    decode.receiver.received("r1", 0)
    assert {await room.received() for room in rooms} == {"received"}
