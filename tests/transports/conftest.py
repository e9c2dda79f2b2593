"""A decode worker and a prefill worker in one process, on plain numpy memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.prompts import DIGEST, PROMPT, PromptDigest
from tests.support.waits import LIMIT_S
from tidekv.states import events
from tidekv.states.handover.rank_place import RankPlace
from tidekv.states.types import ComponentIdentity, GroupIdentity, Identity, PoolMemory, Segment, page_ids
from tidekv.transports import process, wire
from tidekv.transports.control import handshake
from tidekv.transports.decode.prefill_link import LinkTimes
from tidekv.transports.decode.receiver import Receiver
from tidekv.transports.local_rank import LocalRank
from tidekv.transports.loopback import LoopbackNetwork, LoopbackTransport
from tidekv.transports.prefill.prefill_room import Room, RoomSettings
from tidekv.transports.prefill.room_writer import RoomCallbacks
from tidekv.transports.prefill.sender import Sender

PAGE_SIZE = 4
PIECES = (24, 8)
"""Bytes of each piece for each head that a page holds."""
RECORD = (40, 16, 4)
"""Bytes of the pieces of a record of a state."""


class Pool:
    """Pages of two pieces, in two buffers."""

    def __init__(
        self, page_count: int, *, seed: int | None = None, heads: int = 1, pieces: tuple[int, ...] = PIECES
    ) -> None:
        pieces = tuple(piece * heads for piece in pieces)
        self.buffers = [np.zeros((page_count, piece), np.uint8) for piece in pieces]
        if seed is not None:
            rng = np.random.default_rng(seed)
            for buffer in self.buffers:
                buffer[:] = rng.integers(1, 256, buffer.shape)
        self.memory = PoolMemory(
            segments=tuple(
                Segment(address=buffer.ctypes.data, piece_bytes=piece, stride_bytes=piece, page_count=page_count)
                for buffer, piece in zip(self.buffers, pieces, strict=True)
            ),
            page_count=page_count,
        )

    def page(self, index: int) -> bytes:
        return b"".join(buffer[index].tobytes() for buffer in self.buffers)


def memory_of(pools: dict[str, Pool]) -> dict[str, PoolMemory]:
    return {name: pool.memory for name, pool in pools.items()}


def identity(*, heads: int = 1, **changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "model": "m",
        "kind": "mha",
        "dtype": "uint8",
        "page_size": PAGE_SIZE,
        "layers": 1,
        "kv_heads": heads,
        "head_dim": 4,
        "page_bytes": sum(PIECES) * heads,
        "piece_bytes": tuple(piece * heads for piece in PIECES),
    }
    return Identity(**(fields | changes))


WINDOW = ComponentIdentity("swa", "window", 6, PAGE_SIZE, PIECES, (GroupIdentity("full", "mha", "uint8", 1, 1, 4),))
STATE = ComponentIdentity("ssm", "state", 0, 1, RECORD, (GroupIdentity("full", "mla", "uint8", 3, 1, 40),))


class NoPoller:
    """Loopback needs none."""

    def submit(self, pollable: object) -> asyncio.Future[None]:
        raise AssertionError("loopback polls nothing")


class Decode:
    """A decode worker that records its events."""

    def __init__(
        self,
        network: LoopbackNetwork,
        *,
        name: str = "decode-0",
        pages: int = 64,
        heads: int = 1,
        components: Iterable[ComponentIdentity] = (),
        **settings: Any,
    ) -> None:
        self.pool = Pool(pages, heads=heads)
        self.components = {of.name: Pool(pages, pieces=of.piece_bytes) for of in components}
        self.rings = [settings["staging"].ring.memory] if "staging" in settings else []
        self.transport = LoopbackTransport(name, network)
        self.events: list[events.AnyEvent] = []
        self.aux: list[tuple[str, int, int, object]] = []
        self._news = asyncio.Event()
        fields = {
            "memory": self.pool.memory,
            "component_memory": memory_of(self.components),
            "identity": identity(heads=heads, components=tuple(components)),
        } | settings
        times = {name: fields.pop(name) for name in LinkTimes.__slots__ if name in fields}
        self.receiver = Receiver(
            self.transport,
            take_rank(fields),
            times=LinkTimes(**times),
            deliver_aux=lambda *aux: self.aux.append(aux),
            **{"clock": time.monotonic, "deliver": self._deliver, **fields},
        )

    async def start(self) -> None:
        await self.transport.start(poller=NoPoller())
        await self.transport.register(self.pool.memory, *memory_of(self.components).values(), *self.rings)
        await self.receiver.start()

    async def close(self) -> None:
        await self.receiver.close()
        await self.transport.close()

    def _deliver(self, event: events.AnyEvent) -> None:
        self.events.append(event)
        self._news.set()

    def of(self, kind: type[Any], **match: object) -> list[Any]:
        return [
            event
            for event in self.events
            if isinstance(event, kind) and all(getattr(event, key) == value for key, value in match.items())
        ]

    async def wait(self, kind: type[Any], *, count: int = 1, **match: object) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while len(self.of(kind, **match)) < count:
                self._news.clear()
                await self._news.wait()
        return self.of(kind, **match)[-1]

    async def wait_done(self, request_id: str) -> None:
        """Wait until the last chunk and the aux of a request are there."""
        await self.wait(events.ChunkReceived, request_id=request_id, last=True)
        await self.wait(events.AuxReceived, request_id=request_id)

    def promise(self, address: str, request_id: str, *, tokens: int, promised: int, pages: Iterable[int], **more: Any):
        self.receiver.promise(
            address,
            request_id,
            more.pop("generation", 0),
            prompt_tokens=tokens,
            promised_tokens=promised,
            pages=page_ids(pages),
            **{"prompt_digest": DIGEST, "tokens": more.pop("packed", None)} | more,
        )


def take_rank(fields: dict[str, Any]) -> LocalRank:
    """Remove the fields of a rank, and those of its place."""
    place = RankPlace(**{name: fields.pop(name) for name in RankPlace.__struct_fields__ if name in fields})
    return LocalRank(**{"place": place, **{name: fields.pop(name) for name in LocalRank.__slots__ if name in fields}})


class Prefill:
    """A prefill worker with a pool full of bytes."""

    def __init__(
        self,
        network: LoopbackNetwork,
        *,
        name: str = "prefill-0",
        pages: int = 64,
        heads: int = 1,
        components: Iterable[ComponentIdentity] = (),
        **settings: Any,
    ) -> None:
        self.pool = Pool(pages, seed=7, heads=heads)
        self.components = {of.name: Pool(pages, seed=at, pieces=of.piece_bytes) for at, of in enumerate(components)}
        self.transport = LoopbackTransport(name, network)
        fields = {
            "memory": self.pool.memory,
            "component_memory": memory_of(self.components),
            "identity": identity(heads=heads, components=tuple(components)),
        } | settings
        rank = take_rank(fields)
        callbacks = RoomCallbacks(**{name: fields.pop(name) for name in RoomCallbacks.__slots__ if name in fields})
        self.sender = Sender(self.transport, rank, callbacks=callbacks, **{"clock": time.monotonic, **fields})

    async def start(self, address: str = "prefill:0") -> None:
        await self.transport.start(poller=NoPoller())
        await self.sender.start(address)

    async def close(self) -> None:
        await self.sender.close()
        await self.transport.close()

    @property
    def address(self) -> str:
        return self.sender.address

    async def room(self, request_id: str, prompt: PromptDigest = PROMPT) -> Room:
        async with asyncio.timeout(LIMIT_S):
            return await self.sender.room(request_id, prompt)

    async def serve(
        self,
        request_id: str,
        pages: Iterable[int],
        *,
        chunk: int = 3,
        first_token: int = 11,
        prompt: PromptDigest = PROMPT,
    ) -> Room:
        """What a prefill loop does: chunk by chunk, then finish."""
        room = await self.room(request_id, prompt)
        ids = list(pages)
        for first in range(0, len(ids), chunk):
            await room.send(ids[first : first + chunk], start_token=first * PAGE_SIZE)
        await room.finish(first_token=first_token, aux={"by": "prefill"})
        return room


class Dialler:
    """A decode worker that sends what a test wants."""

    def __init__(self, world, name: str = "decode-0") -> None:
        self.pool = world.Pool(16)
        self.transport = LoopbackTransport(name, world.network)
        self.identity = world.identity()
        self.world = world

    async def start(self) -> None:
        await self.transport.start(poller=None)
        await self.transport.register(self.pool.memory)
        self.world.closers.append(self.transport.close)

    def hello(self) -> wire.Hello:
        return handshake.make_hello(self.transport, memory=self.pool.memory, identity=self.identity, lease_s=10.0)

    async def dial(self, address: str, greeting: wire.Message | None = None):
        link = await self.transport.dial(address)
        link.send(greeting or self.hello())
        assert isinstance(await self.receive(link), wire.Hello)
        link.mark_greeted()
        return link

    async def open_room(self, prefill: Prefill, **promised: Any) -> tuple[Any, Room]:
        """Dial, promise a room, and wait for it: the link, and the room at prefill."""
        link = await self.dial(prefill.address)
        link.send(self.promise(self.room(), **promised))
        return link, await prefill.room("r1")

    async def receive(self, link) -> wire.AnyMessage:
        async with asyncio.timeout(LIMIT_S):
            return await link.receive()

    def room(self, request_id: str = "r1", generation: int = 0) -> wire.RoomId:
        name = self.transport.name
        epoch = self.transport.instance.removeprefix(f"{name}-")
        return wire.RoomId(instance=name, epoch=epoch, request_id=request_id, generation=generation)

    def promise(self, room: wire.RoomId, *, tokens: int = 8, promised: int = 0, pages=(1, 2)) -> wire.Promise:
        return wire.Promise(
            room=room,
            prompt_tokens=tokens,
            decode_prefix_len=promised,
            pages=wire.pack_pages(self.world.page_ids(pages)),
            prompt_digest=DIGEST,
        )

    def extend(self, room: wire.RoomId, span: int, first: int, pages=(5,)) -> wire.Extend:
        return wire.Extend(room=room, span=span, first=first, pages=wire.pack_pages(self.world.page_ids(pages)))


class Gate:
    """Holds writes until they are let through."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()
        network.before_write = self._before

    async def _before(self, writer: str, target: str, pages: int) -> None:
        self.reached.set()
        await self.open.wait()


class World:
    """Makes workers that are closed at the end."""

    Gate = Gate
    Pool = Pool
    RoomSettings = RoomSettings
    PAGE_SIZE = PAGE_SIZE
    PAGE_BYTES = sum(PIECES)
    WINDOW = WINDOW
    STATE = STATE
    identity = staticmethod(identity)
    page_ids = staticmethod(page_ids)

    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.closers: list[Callable[[], Any]] = []

    async def decode(self, **settings: Any) -> Decode:
        decode = Decode(self.network, **settings)
        await decode.start()
        self.closers.append(decode.close)
        return decode

    def transport(self, name: str) -> LoopbackTransport:
        return LoopbackTransport(name, self.network)

    async def prefill(self, address: str = "prefill:0", **settings: Any) -> Prefill:
        prefill = Prefill(self.network, **settings)
        await prefill.start(address)
        self.closers.append(prefill.close)
        return prefill

    def watch(self, sees: Callable[[str, wire.Message], bool]) -> asyncio.Event:
        """Set once a frame passes for which `sees(sender, message)` is true; none is lost."""
        seen = asyncio.Event()

        def loses(sender: str, message: wire.Message) -> bool:
            if sees(sender, message):
                seen.set()
            return False

        self.network.loses = loses
        return seen

    def same(self, decode: Decode, prefill: Prefill, pairs: Iterable[tuple[int, int]]) -> bool:
        """True when decode's page holds what prefill's page does, for each (decode page, prefill page)."""
        return all(decode.pool.page(theirs) == prefill.pool.page(ours) for theirs, ours in pairs)


@pytest.fixture
async def watchdog() -> AsyncIterator[None]:
    """End a test that hangs: what it waits for never comes."""

    def end() -> None:
        for task in asyncio.all_tasks():
            task.cancel("the test hangs")

    timer = asyncio.get_running_loop().call_later(30, end)
    yield
    timer.cancel()


@pytest.fixture
async def world(watchdog: None) -> AsyncIterator[World]:
    world = World()
    try:
        yield world
    finally:
        for close in reversed(world.closers):
            await close()


@pytest.fixture
async def decode(world) -> Dialler:
    dialler = Dialler(world)
    await dialler.start()
    return dialler


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], wire.ProcessMark]]:
    """A process that waits to be killed, and its mark."""
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = replace(process.this_process(), pid=running.pid, started=process._started(running.pid))
    yield running, mark
    running.kill()
    running.communicate()
