"""Windows and states travel in the hand-over: each byte in its own pool, before the word that decode waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from tidekv.states import events
from tidekv.states.component_specs import ComponentPages
from tidekv.states.errors import InvalidRequest
from tidekv.states.handover.sender import RequestedComponent, SenderRoom
from tidekv.states.types import page_ids
from tidekv.transports import wire
from tidekv.transports.control import handshake

# A prompt of 5 pages, the last one in part. Its window of 6 tokens reaches back into page 3.
TOKENS = 18
WINDOW = [ComponentPages("swa", 3, page_ids([10, 11]))]
STATE = [ComponentPages("ssm", 4, page_ids([3]))]
NO_WINDOW = [ComponentPages("swa", 5, page_ids())]
NO_STATE = [ComponentPages("ssm", 5, page_ids())]
OURS = {"swa": [40, 30], "ssm": [20]}


async def pair(world, *components, **of_prefill: object) -> tuple:
    return await world.decode(components=components), await world.prefill(components=components, **of_prefill)


def check(decode, prefill, name: str, written: dict[int, int]) -> None:
    """Decode's pool of the component has exactly these of prefill's pages ({theirs: ours}), and no other byte."""
    for theirs, ours in zip(decode.components[name].buffers, prefill.components[name].buffers, strict=True):
        for page in range(len(theirs)):
            expected = ours[written[page]].tobytes() if page in written else bytes(len(theirs[page]))
            assert theirs[page].tobytes() == expected


def promise(
    decode, address: str, component_pages: Iterable[ComponentPages] | None, *, request_id: str = "r1", **more: object
) -> None:
    decode.promise(
        address, request_id, tokens=TOKENS, promised=8, pages=[1, 2, 3], component_pages=component_pages, **more
    )


async def computed(world, *components, component_pages: Iterable[ComponentPages], **of_prefill: object) -> tuple:
    """Both workers, and a room that asks for these tails, with all pages sent."""
    decode, prefill = await pair(world, *components, **of_prefill)
    promise(decode, prefill.address, component_pages)
    room = await prefill.room("r1")
    await room.send(range(5), start_token=0)
    return decode, prefill, room


async def held_in_its_tail(world) -> tuple:
    """The same, for a room with all pages, and its record (the last part) being written until the gate opens."""
    decode, prefill, room = await computed(world, world.STATE, component_pages=STATE)
    await decode.wait(events.ChunkReceived)
    gate = world.Gate(world.network)
    await room.send_component_pages("ssm", OURS["ssm"])
    await gate.reached.wait()
    return decode, prefill, room, gate


@pytest.mark.parametrize(
    "component_pages",
    [WINDOW + STATE, WINDOW + NO_STATE, NO_WINDOW + STATE, NO_WINDOW + NO_STATE],
    ids=["both", "the window alone", "the state alone", "none of it"],
)
async def test_what_is_asked_for_arrives_byte_for_byte_and_nothing_else(
    world, component_pages: list[ComponentPages]
) -> None:
    decode, prefill, room = await computed(world, world.STATE, world.WINDOW, component_pages=component_pages)
    # Whatever decode asks for, prefill hands over all that the end of the prompt needs.
    counts = {request.component: len(request.pages) for request in component_pages}
    assert room.component_pages == {
        "swa": RequestedComponent("swa", 3, 2, counts["swa"]),
        "ssm": RequestedComponent("ssm", 4, 1, counts["ssm"]),
    }
    for name, pages in OURS.items():
        await room.send_component_pages(name, pages)
    await room.finish(first_token=1)
    await decode.wait(events.ChunkReceived, last=True)
    assert world.same(decode, prefill, [(1, 2), (2, 3), (3, 4)])
    for request in component_pages:
        check(decode, prefill, request.component, dict(zip(request.pages, OURS[request.component], strict=False)))
    decode.receiver.received("r1", 0)
    assert await room.received() == "received"
    assert not any(decode.receiver.counts.values())
    assert prefill.sender.statistics()["pages_sent"] == 3 + sum(len(request.pages) for request in component_pages)


async def test_a_window_is_written_and_reported_in_parts(world) -> None:
    window = msgspec.structs.replace(world.WINDOW, window_tokens=16)
    settings = world.RoomSettings(writes_in_flight_max=1, pages_per_write_max=1)
    sent = []
    world.watch(lambda _, message: isinstance(message, wire.Chunk) and bool(sent.append(message)))
    component_pages = [ComponentPages("swa", 1, page_ids([9, 2, 7, 5]))]
    decode, prefill, room = await computed(world, window, component_pages=component_pages, settings=settings)
    await room.send_component_pages("swa", [6, 1, 8, 3, 4])
    await room.finish(first_token=1)
    await decode.wait(events.ChunkReceived, last=True)
    check(decode, prefill, "swa", {9: 1, 2: 8, 7: 3, 5: 4})
    parts = [message for message in sent if message.component == "swa"]
    assert [(part.span, part.first, part.count) for part in parts] == [(0, at, 1) for at in range(1, 5)]
    assert [part.last for part in parts] == [False, False, False, True]
    assert sent.index(parts[-1]) < next(at for at, one in enumerate(sent) if one.component == "full" and one.last)


async def test_the_last_chunk_is_said_only_when_the_tails_are_in_place(world) -> None:
    decode, prefill, room, gate = await held_in_its_tail(world)
    await room.finish(first_token=1)
    await decode.wait(events.AuxReceived)
    assert not decode.of(events.ChunkReceived, last=True)
    gate.open.set()
    await decode.wait(events.ChunkReceived, last=True)
    check(decode, prefill, "ssm", {3: 20})


async def test_a_room_does_not_finish_without_a_tail_that_was_asked_for(world) -> None:
    decode, _, room = await computed(world, world.STATE, world.WINDOW, component_pages=WINDOW + STATE)
    await room.send_component_pages("swa", OURS["swa"])
    with pytest.raises(InvalidRequest, match="the pages of component 'ssm' were never sent"):
        await room.finish(first_token=1)
    with pytest.raises(InvalidRequest, match="there is no component 'full'"):
        await room.send_component_pages("full", [1])
    with pytest.raises(InvalidRequest, match="64 of component 'ssm' are not all in the pool of 64"):
        await room.send_component_pages("ssm", [64])
    await room.send_component_pages("ssm", OURS["ssm"])
    await room.finish(first_token=1)
    await decode.wait(events.ChunkReceived, last=True)


async def test_without_components_nothing_is_asked_for(world) -> None:
    decode, prefill = await pair(world)
    promise(decode, prefill.address, None)
    room = await prefill.serve("r1", range(5))
    assert room.component_pages == {}
    await decode.wait(events.ChunkReceived, last=True)


@pytest.mark.parametrize(
    ("component_pages", "text"),
    [
        (None, r"names no components; both ends have the components \['ssm', 'swa'\]"),
        ([], r"names no components"),
        (WINDOW, r"names \['swa'\]"),
        ([*STATE, *STATE], r"names \['ssm', 'ssm'\]"),
        ([ComponentPages("swa", 3, page_ids([10])), *STATE], "does not end with the prompt of 5 pages"),
        ([ComponentPages("swa", 2, page_ids([10, 11, 12])), *STATE], "which is more than the prompt's end needs"),
        (
            [*WINDOW, ComponentPages("ssm", 3, page_ids([1, 2]))],
            "requests 2 pages of component 'ssm' from position 3",
        ),
        ([ComponentPages("swa", 3, page_ids([10, 10])), *STATE], "names a page of component 'swa' twice"),
        (
            [ComponentPages("swa", 3, page_ids([10, 64])), *STATE],
            "decode's 'swa' page ids reach 10 to 64, the pool has 64",
        ),
    ],
)
async def test_a_promise_that_does_not_go_with_the_components_fails_its_room(world, component_pages, text: str) -> None:
    decode, prefill = await pair(world, world.STATE, world.WINDOW)
    promise(decode, prefill.address, component_pages)
    failed = await decode.wait(events.RoomFailed)
    assert (await decode.wait(events.RoomDrained)).request_id == "r1"
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(failed.cause)
    # Its link and other rooms go on.
    promise(decode, prefill.address, WINDOW + STATE, request_id="r2")
    await prefill.room("r2")


async def test_an_abort_waits_for_the_tail_that_is_being_written(world) -> None:
    decode, prefill, room, gate = await held_in_its_tail(world)
    drained = world.watch(lambda _, message: isinstance(message, wire.Drained))
    decode.receiver.abort("r1", 0)
    await room.aborted.wait()
    await room.send_component_pages("ssm", [1])
    assert room.writes_in_flight == 1
    assert not drained.is_set()
    gate.open.set()
    await decode.wait(events.RoomDrained)
    assert await room.received() == "aborted"
    check(decode, prefill, "ssm", {3: 20})


async def test_of_a_writer_that_dies_no_tail_lands_once_its_death_is_told(world) -> None:
    decode, prefill, room, gate = await held_in_its_tail(world)
    world.network.kill(prefill.transport.instance)
    await decode.wait(events.WriterLost)
    assert not decode.of(events.RoomDrained)
    await decode.wait(events.WriterDead)
    gate.open.set()
    await room.received()
    check(decode, prefill, "ssm", {})


def changed(component, **changes: object):
    return msgspec.structs.replace(component, **changes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w, s: [w], "component 'ssm': ours is 'a state, 60 bytes a record', theirs is 'absent'"),
        (lambda w, s: [], "component 'ssm': .*theirs is 'absent'"),
        (lambda w, s: [changed(s, name="conv"), s, w], "component 'conv': ours is 'absent', theirs is 'a state"),
        (lambda w, s: [s, changed(w, window_tokens=8)], "window_tokens of component 'swa': ours is 6, theirs is 8"),
        (lambda w, s: [s, changed(w, kind="state", window_tokens=0)], "kind of component 'swa': ours is 'window'"),
        (
            lambda w, s: [changed(s, groups=(changed(s.groups[0], dtype="float16"),)), w],
            "dtype of component 'ssm': ours is 'uint8', theirs is 'float16'",
        ),
        (lambda w, s: [changed(s, piece_bytes=(40, 16, 8)), w], r"page_bytes of component 'ssm': ours is 60, theirs"),
        (
            lambda w, s: [changed(s, piece_bytes=(40, 4, 16)), w],
            r"piece_bytes of component 'ssm': ours is \(40, 16, 4\)",
        ),
        (
            lambda w, s: [s, changed(w, groups=(*w.groups, changed(w.groups[0], name="draft")))],
            "layer group 'draft' of a page of component 'swa': ours is 'absent'",
        ),
    ],
)
async def test_unlike_components_are_refused_by_name_with_both_values(world, change, text: str) -> None:
    decode = await world.decode(components=[world.STATE, world.WINDOW])
    prefill = await world.prefill(components=change(world.WINDOW, world.STATE))
    promise(decode, prefill.address, WINDOW + STATE)
    failed = await decode.wait(events.RoomFailed)
    assert failed.settled
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(failed.cause)


async def test_memory_that_is_not_what_the_identity_says_is_refused(world) -> None:
    decode = await world.decode(components=[world.STATE])
    lies = world.Pool(64, pieces=(40, 20))
    prefill = await world.prefill(components=[world.STATE], component_memory={"ssm": lies.memory})
    promise(decode, prefill.address, STATE)
    assert "memory pieces of component 'ssm'" in (await decode.wait(events.RoomFailed)).cause


class Liar:
    """A prefill that sends a last chunk, and what else a test wants, whatever it has written."""

    def __init__(self, world, said: list[str]) -> None:
        self.pools = [world.Pool(8), world.Pool(8, pieces=world.STATE.piece_bytes)]
        self.transport = world.transport("liar")
        self.identity = world.identity(components=(world.STATE,))
        self.said = said

    async def serve(self, link) -> None:
        pages, records = (pool.memory for pool in self.pools)
        memory = {"ssm": records}
        link.send(
            handshake.make_hello(
                self.transport, memory=pages, component_memory=memory, identity=self.identity, lease_s=1.0
            )
        )
        while not isinstance(promised := await link.receive(), wire.Promise):
            link.mark_greeted()
        for component in self.said:
            link.send(wire.Chunk(room=promised.room, rank=0, span=0, first=4, count=1, last=True, component=component))
        link.send(wire.Chunk(room=promised.room, rank=0, span=0, first=2, count=3, last=True))
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("said", "component_pages", "text"),
    [
        ([], STATE, "is marked as the last; the pages of 'ssm' were not sent"),
        (["swa"], STATE, "of span 0 of component 'swa' was never requested"),
        (["ssm", "ssm"], STATE, "of span 0 of component 'ssm' comes after the span's last one"),
        (["ssm"], NO_STATE, "of span 0 of component 'ssm' was never requested"),
    ],
)
async def test_a_prefill_that_says_what_is_not_so_fails_its_room(world, said, component_pages, text: str) -> None:
    decode, liar = await world.decode(components=[world.STATE]), Liar(world, said)
    await liar.transport.start(poller=None)
    await liar.transport.register(*(pool.memory for pool in liar.pools))
    listener = await liar.transport.listen("liar:1", liar.serve)
    promise(decode, "liar:1", component_pages)
    assert text in (await decode.wait(events.RoomFailed)).cause
    assert not decode.of(events.ChunkReceived)
    await listener.close()
    await liar.transport.close()


async def test_a_sender_that_does_not_wait_for_its_tails_would_be_seen(world, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of this side, taken away: decode sees that what it asked for is not here, and does not go on."""
    monkeypatch.setattr(SenderRoom, "_are_components_reported", property(lambda self: True))
    decode, _, room, gate = await held_in_its_tail(world)
    await room.finish(first_token=1)
    assert "the pages of 'ssm' were not sent" in (await decode.wait(events.RoomFailed)).cause
    gate.open.set()
