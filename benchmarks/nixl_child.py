"""A second process with a NIXL transport, which benchmarks and tests command, stop and kill.

    child = await NixlChild.spawn(pages=64, pieces=(4096, 512), seed=3)
    await child.ask(Add(...)); await child.ask(Write(ours=[1, 2], theirs=[5, 0])); child.end()

The child runs `serve`, which is in a module of its own so that a spawned interpreter can import it. Both ends belong
to one program and trust each other.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeAlias

import msgspec
import numpy as np
import torch

from tidekv.engine.poller import PollerThread
from tidekv.states.errors import TidekvError
from tidekv.states.types import PoolMemory, Segment, page_ids
from tidekv.transports import process, wire
from tidekv.transports.nixl.transport import NixlTransport

START_S = 60.0


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add a peer → Done."""

    instance: str
    metadata: bytes
    memory: PoolMemory


class Write(msgspec.Struct, frozen=True, tag=True):
    """Write pages of the child to those of the last added peer; repeat if `forever` → Done (once), Failed."""

    ours: list[int]
    theirs: list[int]
    forever: bool = False


class ReadPage(msgspec.Struct, frozen=True, tag=True):
    """Return the content of a page of the child → Content."""

    page: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command succeeded; for a write, with the number of written bytes."""

    size_bytes: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command raised."""

    error: str
    text: str


class Content(msgspec.Struct, frozen=True, tag=True):
    """The bytes of a page over all its pieces."""

    content: bytes


class Ready(msgspec.Struct, frozen=True, tag=True):
    """First message of the child, with the content of its Hello."""

    instance: str
    metadata: bytes
    memory: PoolMemory
    process: wire.ProcessMark


Command: TypeAlias = Add | Write | ReadPage
Answer: TypeAlias = Done | Failed | Content | Ready
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class NumpyPool:
    """A pool in plain memory: per piece one array [page_count, piece_bytes]; random bytes if there is a seed, otherwise
    zeros. All of it is touched, so that no write is charged for the first use of a page of memory.
    """

    def __init__(self, pages: int, pieces: tuple[int, ...], *, seed: int | None = None) -> None:
        random = np.random.default_rng(seed)
        self.pieces = [
            np.full((pages, size), 0, np.uint8) if seed is None else random.integers(0, 256, (pages, size), np.uint8)
            for size in pieces
        ]
        self.memory = PoolMemory(
            segments=tuple(
                Segment(address=piece.ctypes.data, piece_bytes=size, stride_bytes=size, page_count=pages)
                for piece, size in zip(self.pieces, pieces, strict=True)
            ),
            page_count=pages,
        )

    def page(self, index: int) -> bytes:
        """Return the bytes of one page."""
        return b"".join(piece[index].tobytes() for piece in self.pieces)


class TorchPool:
    """The same on a torch device."""

    def __init__(self, pages: int, pieces: tuple[int, ...], *, device: str, seed: int | None = None) -> None:
        place = torch.device(device)
        self.pieces = [torch.zeros(pages, size, dtype=torch.uint8, device=place) for size in pieces]
        if seed is not None:
            random = torch.Generator(place).manual_seed(seed)
            for piece in self.pieces:
                piece.random_(0, 256, generator=random)
        self.memory = PoolMemory(
            segments=tuple(
                Segment(address=piece.data_ptr(), piece_bytes=size, stride_bytes=size, page_count=pages)
                for piece, size in zip(self.pieces, pieces, strict=True)
            ),
            page_count=pages,
            kind="VRAM" if place.type == "cuda" else "DRAM",
            device=place.index or 0,
        )
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    def page(self, index: int) -> bytes:
        """Return the bytes of one page."""
        return b"".join(piece[index].cpu().numpy().tobytes() for piece in self.pieces)


def make_pool(pages: int, pieces: tuple[int, ...], *, device: str, seed: int | None) -> NumpyPool | TorchPool:
    """Make a pool in plain memory, or on a GPU."""
    if device == "cpu":
        return NumpyPool(pages, pieces, seed=seed)
    return TorchPool(pages, pieces, device=device, seed=seed)


class NixlChild:
    """The parent's end of a child process."""

    def __init__(self, child: BaseProcess, connection: Connection) -> None:
        self._child = child
        self._connection = connection
        self.ready: Ready

    @classmethod
    async def spawn(
        cls,
        *,
        pages: int,
        pieces: tuple[int, ...],
        seed: int | None = None,
        environment: dict[str, str] | None = None,
        device: str = "cpu",
    ) -> NixlChild:
        """Start a child and wait until its pool is registered."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(
            target=serve, args=(theirs, pages, pieces, seed, environment or {}, device), daemon=True
        )
        child.start()
        theirs.close()
        self = cls(child, ours)
        async with asyncio.timeout(START_S):
            ready = await self.answer()
        assert isinstance(ready, Ready)
        self.ready = ready
        return self

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._child.pid is not None
        return self._child.pid

    async def ask(self, command: Command) -> Answer:
        """Send a command and wait for its answer."""
        self.tell(command)
        return await self.answer()

    def tell(self, command: Command) -> None:
        """Send a command."""
        self._connection.send_bytes(msgspec.msgpack.encode(command))

    async def answer(self) -> Answer:
        """Receive the next answer. Raises EOFError if the child has ended."""
        await _wait_readable(self._connection)
        return _answers.decode(self._connection.recv_bytes())

    def signal(self, number: signal.Signals) -> None:
        """Stop, continue or kill the child."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the child if it still runs, and reap it."""
        if self._child.is_alive():
            self.signal(signal.SIGKILL)
        self._child.join()
        self._connection.close()


def serve(
    connection: Connection,
    pages: int,
    pieces: tuple[int, ...],
    seed: int | None,
    environment: dict[str, str],
    device: str,
) -> None:
    """Run the child until the other end of the pipe is closed."""
    os.environ.update(environment)
    asyncio.run(_serve(connection, make_pool(pages, pieces, device=device, seed=seed)))


async def _serve(connection: Connection, pool: NumpyPool | TorchPool) -> None:
    poller = PollerThread()
    poller.start()
    transport = NixlTransport("child")
    await transport.start(poller=poller)
    await transport.register(pool.memory)
    mark = process.this_process()
    _send(connection, Ready(transport.instance, transport.metadata(), pool.memory, mark))
    peer = None
    while True:
        await _wait_readable(connection)
        try:
            command = _commands.decode(connection.recv_bytes())
        except EOFError:
            break
        try:
            match command:
                case Add():
                    peer = await transport.add_peer(command.instance, command.metadata, command.memory)
                    _send(connection, Done())
                case ReadPage():
                    _send(connection, Content(pool.page(command.page)))
                case Write():
                    assert peer is not None, "a write comes after an Add"
                    ours, theirs = page_ids(command.ours), page_ids(command.theirs)
                    _send(connection, Done(await transport.write(peer, ours, theirs)))
                    while command.forever:
                        await transport.write(peer, ours, theirs)
        except TidekvError as error:
            _send(connection, Failed(type(error).__name__, str(error)))
    await transport.close()
    await poller.close()


def _send(connection: Connection, answer: Answer) -> None:
    connection.send_bytes(msgspec.msgpack.encode(answer))


async def _wait_readable(connection: Connection) -> None:
    """Wait for the pipe without a thread. It blocks again then: the loop makes it non-blocking, and a message may be
    longer than what has arrived.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection.fileno())
        os.set_blocking(connection.fileno(), True)
