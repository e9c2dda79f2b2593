"""Test support: workers in child processes, which tests command, stop, kill and restart.

    child = await FaultProcess.start(serve_prefill, PrefillOrder(...)); await child.ask(AskCounts(), Counts)
    child.signal(signal.SIGKILL); await child.wait_ended(); child.end()

Children are forked from a process that has imported everything and has neither threads nor NIXL agents: the first takes
seconds, each further one milliseconds. Both ends belong to one test and trust each other.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self, TypeAlias, TypeVar

import msgspec
import torch
import uvloop

START_S = 60.0
END_S = 10.0


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Message between a test and its child."""


class Halt(Message, frozen=True, kw_only=True):
    """Halt operations submitted from now on, except the first `skips`, after `after_checks` checks.

    With `stops` the process stops, too. Answered by Done, and by Halted once an operation has halted.
    """

    after_checks: int = 0
    stops: bool = False
    skips: int = 0


class Open(Message, frozen=True, kw_only=True):
    """Let halted operations continue. Answered by Done."""


class AskCounts(Message, frozen=True, kw_only=True):
    """Request the counts. Answered by Counts."""


class Turn(Message, frozen=True, kw_only=True):
    """Restore a prompt, verify it, and finish with this output. Answered by Served or Failed."""

    request_id: str
    tokens: list[int]
    prefill: list[str]
    output: list[int]
    peers: list[str] = []


class EarlyTurn(Turn, frozen=True, kw_only=True):
    """Begin a turn with its first layer, and hold copies before the next one. Answered by Begun."""


class Settle(Message, frozen=True, kw_only=True):
    """Wait until nothing is in flight except operations that wait for the test. Answered by Done."""


class Drain(Message, frozen=True, kw_only=True):
    """Drain, and hand the cache over to the worker at `to`. Answered by Handed."""

    to: str
    hand_s: float


class Ready(Message, frozen=True, kw_only=True):
    """The worker is running. A prefill worker includes its address, a decode worker that at which peers read."""

    address: str = ""


class Done(Message, frozen=True, kw_only=True):
    """A command was carried out."""


class Halted(Message, frozen=True, kw_only=True):
    """The first operation has reached the gate."""


class Counts(Message, frozen=True, kw_only=True):
    """Counts by name."""

    counts: dict[str, float]


class Served(Message, frozen=True, kw_only=True):
    """Success of a turn; `wrong` lists the pages of its prompt with wrong bytes."""

    request_id: str
    sources: dict[str, int]
    wrong: list[int]


class Handed(Message, frozen=True, kw_only=True):
    """The end of a drain to a successor: pages."""

    handed: int
    present: int
    left: int
    cause: str
    live: list[str]


class Begun(Message, frozen=True, kw_only=True):
    """The caller has the first `layers` layers; the others are held."""

    layers: int


class Failed(Message, frozen=True, kw_only=True):
    """Failure of a request."""

    request_id: str
    cause: str


class Closed(Message, frozen=True, kw_only=True):
    """The engine has closed regularly; its last counts."""

    counts: dict[str, float]


AnyMessage: TypeAlias = (
    Halt
    | Open
    | AskCounts
    | Turn
    | EarlyTurn
    | Settle
    | Drain
    | Ready
    | Done
    | Halted
    | Counts
    | Served
    | Handed
    | Begun
    | Failed
    | Closed
)
M = TypeVar("M", bound=Message)
Order = TypeVar("Order", bound=msgspec.Struct)
_messages: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class Line:
    """One end of the pipe between a test and its child, on the running loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._arrived: list[AnyMessage] = []
        self._changed = asyncio.Event()
        self._is_over = False
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read)

    def say(self, message: Message) -> None:
        """Send a message. No effect if the other end is gone."""
        if not self._is_over:
            try:
                self._connection.send_bytes(msgspec.msgpack.encode(message))
            except (BrokenPipeError, ConnectionResetError):
                self.close()

    async def hear(self, kind: type[M]) -> M:
        """Return the next message of this kind; others stay queued. Raises EOFError if the other end is gone."""
        while True:
            for message in self._arrived:
                if isinstance(message, kind):
                    self._arrived.remove(message)
                    return message
            if self._is_over:
                raise EOFError(f"the other end is gone and sent no {kind.__name__}")
            self._changed.clear()
            await self._changed.wait()

    async def __aiter__(self) -> AsyncIterator[AnyMessage]:
        """Yield all messages in order, until the other end is gone."""
        while self._arrived or not self._is_over:
            if self._arrived:
                yield self._arrived.pop(0)
            else:
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        """Close the line, which the other end notices."""
        if not self._is_over:
            self._is_over = True
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._connection.close()
            self._changed.set()

    def _read(self) -> None:
        try:
            self._arrived.append(_messages.decode(self._connection.recv_bytes()))
        except (EOFError, ConnectionResetError):
            self.close()
        self._changed.set()


Role: TypeAlias = Callable[[Line, Order], Coroutine[object, object, None]]


class FaultProcess:
    """The test's end of a child process."""

    def __init__(self, child: multiprocessing.process.BaseProcess, line: Line) -> None:
        self._child = child
        self.line = line
        self.ready = Ready()

    @classmethod
    async def start(cls, role: Role[Order], order: Order, *, environment: dict[str, str] | None = None) -> Self:
        """Start a child and wait until it is running. Raises EOFError if it ends before that."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, role.__module__, "nixl._api"])
        ours, theirs = context.Pipe()
        arguments = (role, type(order), msgspec.msgpack.encode(order), theirs, environment or {})
        child = context.Process(target=run_child, args=arguments, daemon=True)
        await asyncio.to_thread(child.start)
        theirs.close()
        self = cls(child, Line(ours))
        async with asyncio.timeout(START_S):
            self.ready = await self.line.hear(Ready)
        return self

    async def ask(self, message: Message, kind: type[M]) -> M:
        """Send a message, and wait for the next message of a kind."""
        self.line.say(message)
        return await self.line.hear(kind)

    async def counts(self) -> dict[str, float]:
        """Return the child's current counts."""
        return (await self.ask(AskCounts(), Counts)).counts

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._child.pid is not None
        return self._child.pid

    def signal(self, number: signal.Signals) -> None:
        """Stop, continue, interrupt or kill the child."""
        assert self._child.pid is not None
        os.kill(self._child.pid, number)

    async def wait_stopped(self) -> None:
        """Wait until the child's process is stopped."""
        while _state_of(self._child.pid) != "T":  # noqa: ASYNC110  # Only the parent is notified, the fork server.
            await asyncio.sleep(0.005)

    async def wait_ended(self) -> int:
        """Wait until the child has ended; returns its exit code, or minus the signal that killed it."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._child.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._child.sentinel)
        self._child.join()
        assert self._child.exitcode is not None
        return self._child.exitcode

    def end(self) -> None:
        """Kill the child, which may have ended, and reap it."""
        self._child.kill()
        self._child.join(END_S)
        self._child.close()
        self.line.close()


def run_child(
    role: Role[Order], kind: type[Order], order: bytes, connection: Connection, environment: dict[str, str]
) -> None:
    """Run a child: its role until that ends, or Ctrl-C."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    # A background job of a shell ignores SIGINT, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def run() -> None:
        await role(Line(connection), msgspec.msgpack.decode(order, type=kind))

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def _state_of(pid: int | None) -> str:
    """Return the state letter of a process from /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
