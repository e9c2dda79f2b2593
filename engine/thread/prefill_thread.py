"""`PrefillPeer` on a thread of its own, for prefill workers whose main loop is not asyncio.

    worker's thread                                 peer's thread
    open, send, finish, stop ── orders ──▶  one hand-over for each request ──▶ rooms of the peer
    poll                     ◀─ outcomes ─  one for each hand-over

Pages are handed over as the model fills them, before or after decode's promise arrives: what is already there is sent
when the room opens, the rest as it comes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from tidekv.backends.keys.chain import namespace_seed
from tidekv.engine.prompts import PromptDigest
from tidekv.engine.thread.loop_thread import LoopThread
from tidekv.engine.thread.server_streams import ServerStreams, StreamGate, server_streams
from tidekv.states.errors import (
    EngineClosed,
    InvalidConfig,
    InvalidRequest,
    PrefillCause,
    TidekvError,
    TransferFailed,
)
from tidekv.states.types import PageIds, page_ids
from tidekv.states.validation import Count, Seconds, SecondsOrZero, Text, checked, checked_first_token
from tidekv.transports.aux_values import encode_aux
from tidekv.transports.prefill.prefill_room import RoomOutcome
from tidekv.transports.tasks import OwnedTasks

if TYPE_CHECKING:
    from tidekv.engine.prefill.prefill_peer import PrefillPeer, Room

__all__ = ["HandedOver", "PrefillThread", "PrefixRead"]

FINAL = (RoomOutcome.RECEIVED, RoomOutcome.ABORTED, RoomOutcome.CLOSED)
"""Outcomes after which decode does not ask for the same prompt again, unless it aborted since it lost the link."""
STOP_S = 60.0
"""Maximum seconds that `stop` waits for a turn of the peer's loop."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The end of one hand-over: nothing reads its pages any more."""

    request_id: str
    outcome: RoomOutcome | None
    """Outcome of the last room. None: no decode worker promised one before the hand-over was stopped or given up."""
    cause: str
    """Why it ended."""
    bytes_sent: int = field(default=0, compare=False)
    """Bytes of pages written to decode, over all rooms of the hand-over."""


@dataclass(slots=True, eq=False)
class PrefixRead:
    """A read of what decode has of a prompt (`PrefillThread.read_prefix`)."""

    _outcome: Future[int] = field(default_factory=lambda: Future())
    _task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether `tokens` tells how it ended."""
        return self._outcome.done()

    @property
    def tokens(self) -> int:
        """Leading tokens of the prompt that are in place; nothing writes to the pages any more. To be asked for when it
        is done.

        Raises InvalidRequest for wrong arguments, with nothing written, and EngineClosed if the reader has ended: then
        the pages may be written to until the thread is closed.
        """
        return self._outcome.result(0)


class _Chunk(NamedTuple):
    """Pages handed over by one call of `send`."""

    pages: PageIds
    start_token: int
    end_token: int | None


class _Stored(NamedTuple):
    """By what storage names a prompt's pages, where decode's promise does not say; as `Room.finish` has them."""

    tokens: bytes | None = None
    key_seed: bytes | None = None


@dataclass(slots=True, eq=False)
class _HandOver:
    """One request's pages so far. Only the peer's loop changes it after its creation."""

    request_id: str
    room_id: str
    prompt: PromptDigest
    chunks: list[_Chunk] = field(default_factory=list)
    component_pages: dict[str, PageIds] = field(default_factory=dict)
    """By component, those of the prompt's end."""
    restarts: int = 0
    """Number of calls of `restart`: what was handed over before the last one is withdrawn."""
    first_token: int | None = None
    """Set by `finish`."""
    aux: Mapping[str, object] = field(default_factory=dict)
    """Set by `finish`."""
    stored: _Stored = field(default_factory=lambda: _Stored())
    """Set by `finish`."""
    bytes_sent: int = 0
    """Of the rooms that have ended."""
    stopped: str = ""
    """Why the worker stopped it."""
    room: Room | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Timeout | None = None
    """The limit of the wait for a room, while there is one."""


class PrefillThread:
    """Serves rooms of a `PrefillPeer` for a host that calls from its own thread. A context manager; it lives once.

        with PrefillThread(PrefillPeer(config, device=pool, transport=transport)) as prefill:
            prefill.open("r1", prompt_digest(tokens))
            prefill.send("r1", pages[:16], start_token=0)      # after each step of the model
            prefill.send("r1", pages[16:], start_token=1024)
            prefill.finish("r1", first_token=token)
            for ended in prefill.poll(): ...                   # the pages of `ended.request_id` are free again

    A hand-over that was opened ends with one `HandedOver`, which `poll` returns. Until then its pages must not change,
    unless `stop` has returned. If a room fails before decode has all pages (its link is lost, its lease ends), the
    hand-over waits for the next promise of the same request, and starts over with the pages that it has. If decode
    declines the request, it ends at once. After an end without success, further promises are refused for
    `promise_timeout_s`.

    Pages in GPU memory are read once the device has done what the calling thread's stream had when they were sent;
    nothing waits for it. Methods may be called on any thread but the peer's; only `stop`, `restart`, `end_read`,
    `flush_reader`, `statistics`, `start` and `close` wait. A forked child does not have the thread: every call raises
    EngineClosed there, and `close` does nothing.
    """

    def __init__(
        self,
        peer: PrefillPeer,
        *,
        promise_timeout_s: float = 60.0,
        name: str = "tidekv-prefill",
        server: ServerStreams | None = None,
    ) -> None:
        """Start nothing. The thread owns `peer`, which must not be entered, until `close`.

        `promise_timeout_s`: maximum seconds without a room since the last call for a request; then it ends unsent.
        `server`: with pages in GPU memory, the streams behind which they are read; None is the current stream of the
        thread that sends them. Raises InvalidConfig.
        """
        self._promise_timeout_s = checked(promise_timeout_s, Seconds, "promise_timeout_s", InvalidConfig)
        self._peer = peer
        self._name = name
        self._loop: LoopThread | None = None
        self._server = server or server_streams(peer.device)
        self._gate: StreamGate | None = None
        """With pages in GPU memory, between `start` and `close`."""
        self._tasks = OwnedTasks(name)
        self._lock = threading.Lock()
        self._live: dict[str, _HandOver] = {}
        self._refusing: dict[tuple[str, PromptDigest], asyncio.Task[None]] = {}
        # Not a SimpleQueue, whose timed get may miss its deadline between two clock reads and then waits for ever.
        self._ended: list[HandedOver] = []
        self._has_ended = threading.Condition(self._lock)

    def start(self) -> None:
        """Start the thread and enter the peer. Raises what entering raises, with the thread stopped again."""
        if self._loop is not None:
            raise EngineClosed(f"{self._name} was started before: it lives once, make another one")
        self._loop = LoopThread(self._name)
        try:
            self._loop.call(self._peer.__aenter__())
        except BaseException:
            self._loop.close(_nothing())
            raise
        if self._server is not None:
            self._gate = StreamGate(self._server, name=self._name)

    def close(self) -> None:
        """End all hand-overs, leave the peer, stop the thread. Idempotent. Outcomes can still be polled."""
        if self._loop is not None:
            self._loop.close(self._close())
            if self._gate is not None and not self._loop.is_forked:
                self._gate.close()

    def __enter__(self) -> Self:
        """Start; see `start`."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; see `close`."""
        self.close()

    @property
    def address(self) -> str:
        """The address that decode workers connect to, "host:port"."""
        return self._peer.address

    def open(self, request_id: str, prompt: PromptDigest, *, room: str | None = None) -> None:
        """Begin the hand-over of a prompt (`tidekv.prompt_digest`): the peer waits for decode's promise. Never waits.

        `request_id` is the name in all other calls and in the outcome. `room` is the id of decode's request, if that is
        another one: ids of several decode workers may be equal, and each gets the pages of its own prompt.
        Raises InvalidRequest for a request id whose hand-over has not ended.
        """
        checked(request_id, Text, "request_id")
        checked(prompt, PromptDigest, "prompt")
        room_id = request_id if room is None else checked(room, Text, "room")
        handed = _HandOver(request_id, room_id, prompt)
        loop = self._started()
        with self._lock:
            if (live := self._live.get(request_id)) is not None:
                other = "" if live.prompt == prompt else ", for another prompt"
                raise InvalidRequest(
                    f"request {request_id!r} is being handed over already{other}: wait for its end, or give this one a"
                    " name of its own, and the id that decode has as `room`"
                )
            self._live[request_id] = handed
        try:
            loop.post(lambda: self._tasks.spawn(self._serve(handed), name=f"hand-over of {request_id}"))
        except BaseException:
            self._forget(handed)
            raise

    def send(
        self, request_id: str, pages: Iterable[int] | PageIds, *, start_token: int, end_token: int | None = None
    ) -> None:
        """Hand over filled pages; the arguments are those of `Room.send`. Never waits.

        Does nothing if the hand-over has ended. Wrong pages fail the room and appear in the cause of the outcome.
        """
        checked(start_token, Count, "start_token")
        chunk = _Chunk(page_ids(pages), start_token, end_token)
        self._change(request_id, lambda handed: handed.chunks.append(chunk), reads_pages=True)

    def send_component_pages(self, request_id: str, component: str, pages: Iterable[int] | PageIds) -> None:
        """Hand over the pages of a window, or the record of a state, for the end of the prompt; the arguments are those
        of `Room.send_component_pages`. Before `finish`; never waits.

        Does nothing if the hand-over has ended. Wrong pages fail the room and appear in the cause of the outcome.
        """
        ids = page_ids(pages)
        self._change(request_id, lambda handed: handed.component_pages.update({component: ids}), reads_pages=True)

    def finish(
        self,
        request_id: str,
        *,
        first_token: int,
        aux: Mapping[str, object] | None = None,
        tokens: bytes | None = None,
        namespace: str | None = None,
    ) -> None:
        """All pages of the prompt were handed over. Never waits. Does nothing if the hand-over has ended.

        `aux` and `tokens` are those of `Room.finish`; `namespace` is that of the prompt's pages in storage, for
        promises that bring none (`DecodeRequest.prompt_digest`). Raises InvalidRequest for a first token that is not in
        the peer's vocabulary, and for values that cannot be sent.
        """
        token = checked_first_token(first_token, self._peer.config.vocabulary)
        values = dict(aux or {})
        encode_aux(values)
        stored = _Stored(tokens, None if namespace is None else namespace_seed(namespace))

        def change(handed: _HandOver) -> None:
            handed.first_token, handed.aux, handed.stored = token, values, stored

        self._change(request_id, change)

    def stop(self, request_id: str, cause: str) -> None:
        """End a hand-over whose pages are about to change. Waits for one turn of the peer's loop.

        After the return the pages may be overwritten: no write that reads them is reported to decode any more. The
        outcome follows when such writes have ended. Does nothing if the hand-over has ended.
        """

        self._interrupt(request_id, lambda handed: _stop(handed, cause))

    def restart(self, request_id: str, cause: str) -> None:
        """Withdraw the pages handed over so far, which are about to change, and wait for others from token 0 on.

        As `stop`, but the hand-over goes on: the open room fails, which decode may answer by a new promise.
        """

        def change(handed: _HandOver) -> None:
            handed.chunks, handed.component_pages = [], {}
            handed.first_token, handed.aux, handed.stored = None, {}, _Stored()
            handed.restarts += 1
            _fail_room(handed, cause)

        self._interrupt(request_id, change)

    def poll(self, timeout_s: float = 0.0) -> list[HandedOver]:
        """Take the hand-overs that ended, oldest first; waits at most `timeout_s` for the first one."""
        checked(timeout_s, SecondsOrZero, "timeout_s")
        if self._loop is not None and self._loop.is_forked:
            self._loop.check()
        with self._has_ended:
            if timeout_s:
                self._has_ended.wait_for(lambda: self._ended, timeout_s)
            ended, self._ended = self._ended, []
        return ended

    def unclaimed(self) -> list[str]:
        """Return the hand-overs that no decode worker asks for at the moment, the oldest first. Never waits."""
        with self._lock:
            live = list(self._live.values())
        return [handed.request_id for handed in live if handed.room is None and not handed.stopped]

    def promised(self, request_id: str) -> int | None:
        """Return the leading tokens of a prompt that the decode worker which asks for it has and shares: 0 if it shares
        nothing, None while none asks. Never waits.
        """
        with self._lock:
            handed = self._live.get(request_id)
        room = None if handed is None else handed.room
        if room is None:
            return None
        return room.decode_prefix_len if room.peer_addresses else 0

    def read_prefix(
        self, request_id: str, pages: Iterable[int] | PageIds, have_tokens: int = 0, *, tokens: bytes, namespace: str
    ) -> PrefixRead:
        """Read what the decode worker that asks for a prompt has of it; see `PrefillPeer.read_prefix`. Never waits.

        Pages in GPU memory are written once the device has done what the calling thread's stream has now. Reads nothing
        while no decode worker asks. The read goes on if the hand-over ends.
        """
        loop, pages, read = self._started(), page_ids(pages), PrefixRead()
        with self._lock:
            handed = self._live.get(request_id)
        room = None if handed is None else handed.room
        if room is None:
            read._outcome.set_result(have_tokens)
            return read
        reached: Future[Exception | None] = Future()
        if self._gate is None:
            reached.set_result(None)
        else:
            self._gate.behind_streams(reached.set_result)

        async def work() -> None:
            try:
                # Not cancelled with this task: the gate sets it.
                if (await asyncio.shield(asyncio.wrap_future(reached))) is not None:
                    read._outcome.set_result(have_tokens)  # Without a device nothing is read, or computed.
                    return
                read._outcome.set_result(
                    await self._peer.read_prefix(room, pages, have_tokens, tokens=tokens, namespace=namespace)
                )
            except Exception as error:
                read._outcome.set_exception(error)

        def begin() -> None:
            read._task = self._tasks.spawn(work(), name=f"read of {request_id}")
            # Cancelled, also before its first step.
            read._task.add_done_callback(lambda _: None if read.is_done else read._outcome.set_result(have_tokens))

        loop.post(begin)
        return read

    def end_read(self, read: PrefixRead) -> None:
        """End a read whose pages are to be used otherwise. Waits until nothing writes to them, for a copy under way.

        Raises TidekvError if that takes longer than STOP_S.
        """

        async def end() -> None:
            if read._task is not None and not read._task.done():
                read._task.cancel()
                await asyncio.wait([read._task])

        if read.is_done:
            return
        try:
            self._started().start(end()).result(STOP_S)
        except TimeoutError:
            raise TidekvError(f"{self._name}: a read did not end within {STOP_S:g} s") from None

    def flush_reader(self) -> None:
        """Empty the host memory of the engine that reads prefixes, if there is one. Waits for it."""
        self._started().call(self._peer.flush_reader())

    def statistics(self) -> dict[str, int | float]:
        """Those of the peer, and `handovers`: hand-overs that have not ended. Waits for a turn of the peer's loop."""

        async def read() -> dict[str, int | float]:
            return self._peer.statistics()

        return {**self._started().call(read()), "handovers": len(self._live)}

    # --- On the way to the peer's thread ---

    def _started(self) -> LoopThread:
        if self._loop is None:
            raise EngineClosed(f"{self._name} was not started: enter it with `with`, or call start()")
        if self._loop.is_forked:
            self._loop.check()
        return self._loop

    def _change(self, request_id: str, change: Callable[[_HandOver], None], *, reads_pages: bool = False) -> None:
        loop = self._started()
        with self._lock:
            handed = self._live.get(request_id)
        if handed is None:
            return
        restarts = handed.restarts

        def apply() -> None:
            if handed.restarts != restarts:
                return  # Withdrawn while it waited for the device.
            change(handed)
            handed.changed.set()
            if handed.waiting is not None:
                _reschedule(handed.waiting, asyncio.get_running_loop().time() + self._promise_timeout_s)

        if self._gate is None:
            loop.post(apply)
            return

        def go(error: Exception | None) -> None:
            # At the end of the thread every hand-over has its outcome.
            with suppress(EngineClosed):
                loop.post(apply if error is None else partial(_stop, handed, f"the device has failed: {error!r}"))

        if reads_pages:
            self._gate.behind_streams(go)
        else:
            self._gate.behind_calls(go)

    def _interrupt(self, request_id: str, change: Callable[[_HandOver], None]) -> None:
        loop = self._started()
        with self._lock:
            handed = self._live.get(request_id)
        if handed is None:
            return

        async def interrupt() -> None:
            change(handed)

        try:
            loop.start(interrupt()).result(STOP_S)
        except TimeoutError:
            raise TidekvError(f"{self._name} did not withdraw {request_id!r} within {STOP_S:g} s") from None

    def _forget(self, handed: _HandOver) -> None:
        with self._lock:
            self._live.pop(handed.request_id, None)

    # --- On the peer's thread ---

    async def _serve(self, handed: _HandOver) -> None:
        """Serve rooms of one request until decode has its pages, or no further room is to be expected."""
        if (refusing := self._refusing.get((handed.room_id, handed.prompt))) is not None:
            refusing.cancel()
            await asyncio.wait([refusing])
        outcome: RoomOutcome | None = None
        cause, end = "", "the worker was closed"
        try:
            while not handed.stopped:
                room = await self._room(handed)
                if room is None:
                    end = f"decode did not ask for it within {self._promise_timeout_s:g} s"
                    break
                outcome = await self._send(room, handed)
                cause = room.cause or ""
                if outcome in FINAL and not (outcome is RoomOutcome.ABORTED and room.lost_link):
                    end = ""
                    break
        except TransferFailed as error:
            end = str(error)  # Decode declined the room.
        except EngineClosed:
            pass  # The peer is being closed, which the cause reports.
        finally:
            # Why the last room failed is what helps; that no other one came, or a stop, follows from it.
            # What a stop has failed is named by it.
            end = handed.stopped or end
            cause = cause if cause == PrefillCause.FAILED.words(end) else "; then ".join(filter(None, (cause, end)))
            self._forget(handed)
            with self._has_ended:
                self._ended.append(HandedOver(handed.request_id, outcome, cause, handed.bytes_sent))
                self._has_ended.notify()
        key = (handed.room_id, handed.prompt)
        if outcome not in FINAL and key not in self._refusing:
            self._refusing[key] = self._tasks.spawn(self._refuse(key, cause), name=f"end of {handed.request_id}")

    async def _refuse(self, key: tuple[str, PromptDigest], cause: str) -> None:
        """Refuse the rooms of a hand-over that ended unsent, so that decode computes at once and does not wait."""
        try:
            async with asyncio.timeout(self._promise_timeout_s):
                while True:
                    with suppress(TransferFailed):
                        room = await self._peer.room(*key)
                        room.fail(cause if PrefillCause.parse(cause) else PrefillCause.FAILED.words(cause))
        except (TimeoutError, EngineClosed):
            pass
        finally:
            self._refusing.pop(key, None)

    async def _room(self, handed: _HandOver) -> Room | None:
        """Wait for decode's promise. None if the time is up, or the worker stopped the hand-over."""
        try:
            async with asyncio.timeout(self._promise_timeout_s) as handed.waiting:
                return await self._peer.room(handed.room_id, handed.prompt)
        except TimeoutError:
            return None
        finally:
            handed.waiting = None

    async def _send(self, room: Room, handed: _HandOver) -> RoomOutcome:
        """Send what was handed over and what comes; returns when nothing reads the pages for this room any more."""
        handed.room = room
        try:
            sending = self._tasks.spawn(self._forward(room, handed), name=f"room of {handed.request_id}")
            try:
                return await room.received()
            finally:
                sending.cancel()
        finally:
            handed.room = None
            handed.bytes_sent += room.bytes_sent

    async def _forward(self, room: Room, handed: _HandOver) -> None:
        # `restart` begins another list, for the next room.
        chunks, sent = handed.chunks, 0
        try:
            while sent < len(chunks) or handed.first_token is None:
                if sent == len(chunks):
                    handed.changed.clear()
                    await handed.changed.wait()
                else:
                    chunk = chunks[sent]
                    await room.send(chunk.pages, start_token=chunk.start_token, end_token=chunk.end_token)
                    sent += 1
                if handed.chunks is not chunks:
                    return
            for component, pages in handed.component_pages.items():
                await room.send_component_pages(component, pages)
                if handed.chunks is not chunks:
                    return
            await room.finish(
                first_token=handed.first_token,
                aux=handed.aux,
                tokens=handed.stored.tokens,
                key_seed=handed.stored.key_seed,
            )
        except TidekvError as error:
            room.fail(PrefillCause.RAISED.words(str(error)))

    async def _close(self) -> None:
        try:
            await self._peer.__aexit__(None, None, None)
        finally:
            await self._tasks.close()


def _reschedule(limit: asyncio.Timeout, at_s: float) -> None:
    if not limit.expired():
        limit.reschedule(at_s)


def _stop(handed: _HandOver, cause: str) -> None:
    handed.stopped = cause
    if handed.waiting is not None:
        _reschedule(handed.waiting, -1.0)
    _fail_room(handed, cause)


def _fail_room(handed: _HandOver, cause: str) -> None:
    if handed.room is not None:
        handed.room.fail(PrefillCause.FAILED.words(cause))


async def _nothing() -> None:
    pass
