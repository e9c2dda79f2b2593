"""Environment of the engine in `benchmarks/engine.py`: a scripted prefill, and storage without bytes.

Both run in the engine's process and on its loop, so that nothing runs beside it, and both measure their own CPU time,
which is not the engine's. Calls go through the engine's own code down to the frame (`wire.encode_frame`,
`wire.decode_body`) and down to the call of the storage engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from tidekv.backends.base import Poller
from tidekv.backends.storage.base import StorageStatistics, Verdict
from tidekv.states.errors import LinkClosed
from tidekv.states.types import PageIds, PoolMemory
from tidekv.transports import wire
from tidekv.transports.base import Exchange, Link, Listener, PeerMemory
from tidekv.transports.frames import body_length

FRAMES_A_TURN = 64
"""Frames that arrive at once, of the order of what a socket's buffer holds."""


class Script:
    """The prefill side. It waits with its answers until `expected` rooms are open, and then answers all in turns.

    This way all requests are in flight at the same time. Each turn sends one chunk of each room, as a prefill does that
    computes many prompts chunk by chunk.
    """

    def __init__(self, *, chunk_pages: int, page_size: int) -> None:
        self.expected = 1
        self.cpu_s = 0.0
        """CPU time of this side of the wire."""
        self.on_all_open: Callable[[], None] = lambda: None
        """Called as the last of the expected rooms is open, before anything is answered."""
        self._chunk_pages = chunk_pages
        self._page_size = page_size
        self._rooms: list[tuple[ScriptedLink, wire.Promise]] = []
        self._frames: deque[tuple[ScriptedLink, bytes]] = deque()

    def take(self, link: ScriptedLink, frame: bytes) -> None:
        """Process a frame from decode."""
        started_s = time.thread_time()
        message = wire.decode_body(frame[wire.LENGTH.size :])
        if isinstance(message, wire.Hello):
            link.deliver(wire.encode_frame(_answer(message)))
        elif isinstance(message, wire.Promise):
            self._rooms.append((link, message))
            if len(self._rooms) >= self.expected:
                self.on_all_open()
                self._answer_all()
        self.cpu_s += time.thread_time() - started_s

    def _answer_all(self) -> None:
        rooms, self._rooms = self._rooms, []
        lists = [list(self._frames_of(promise)) for _, promise in rooms]
        is_idle = not self._frames
        for turn in range(max(len(frames) for frames in lists)):
            for (link, _), frames in zip(rooms, lists, strict=True):
                if turn < len(frames):
                    self._frames.append((link, frames[turn]))
        if is_idle:
            asyncio.get_running_loop().call_soon(self._send_some)

    def _frames_of(self, promise: wire.Promise) -> list[bytes]:
        first, count = promise.decode_prefix_len // self._page_size, len(promise.pages or b"") // 4
        messages: list[wire.Message] = []
        for at in range(0, count, self._chunk_pages) if count else (0,):
            size = min(self._chunk_pages, count - at)
            chunk = wire.Chunk(room=promise.room, rank=0, span=0, first=first + at, count=size, last=at + size == count)
            messages.append(chunk)
        messages.append(wire.Aux(room=promise.room, rank=0, first_token=1))
        return [wire.encode_frame(message) for message in messages]

    def _send_some(self) -> None:
        started_s = time.thread_time()
        for _ in range(min(FRAMES_A_TURN, len(self._frames))):
            link, frame = self._frames.popleft()
            link.deliver(frame)
        if self._frames:
            asyncio.get_running_loop().call_soon(self._send_some)
        self.cpu_s += time.thread_time() - started_s


def _answer(hello: wire.Hello) -> wire.Hello:
    return wire.Hello(
        version=hello.version,
        instance="prefill-scripted",
        identity=hello.identity,
        rank=hello.rank,
        ranks=hello.ranks,
        metadata=b"",
        memory=hello.memory,
        process=hello.process,
        lease_s=hello.lease_s,
    )


class ScriptedLink:
    """Decode's end of a link to a script; see `Link`."""

    peer_label = "prefill-scripted"

    def __init__(self, script: Script) -> None:
        self._script = script
        self._incoming: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._is_closed = False

    def send(self, message: wire.Message) -> None:
        """See `Link.send`."""
        self._script.take(self, wire.encode_frame(message))

    async def receive(self) -> wire.AnyMessage:
        """See `Link.receive`."""
        while not self._incoming:
            if self._is_closed:
                raise LinkClosed("closed")
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._incoming.popleft()
        body_length(frame[: wire.LENGTH.size], frame_bytes_max=wire.FRAME_BYTES_MAX)
        return wire.decode_body(frame[wire.LENGTH.size :])

    def deliver(self, frame: bytes) -> None:
        """Queue a frame for decode."""
        self._incoming.append(frame)
        self._arrived.set()

    def mark_greeted(self) -> None:
        """See `Link.mark_greeted`."""

    def report_violation(self) -> None:
        """See `Link.report_violation`."""

    async def close(self, cause: str = "") -> None:
        """See `Link.close`."""
        self._is_closed = True
        self._arrived.set()


class ScriptedTransport:
    """See `Transport`. Every address dials the same script."""

    name = "decode"
    instance = "decode-bench"

    def __init__(self, script: Script) -> None:
        self._script = script

    async def start(self, *, poller: Poller, listen: str = "") -> None:
        """See `Transport.start`."""

    async def register(self, memory: PoolMemory, *components: PoolMemory) -> None:
        """See `Transport.register`."""

    def metadata(self) -> bytes:
        """See `Transport.metadata`."""
        return b""

    def check_metadata(self, instance: str, metadata: bytes) -> None:
        """See `Transport.check_metadata`: the script has none to check."""

    async def add_peer(
        self, instance: str, metadata: bytes, memory: PoolMemory, exchange: Exchange | None = None
    ) -> PeerMemory:
        """See `Transport.add_peer`."""
        raise NotImplementedError("decode never writes")

    async def remove_peer(self, peer: PeerMemory) -> None:
        """See `Transport.remove_peer`."""

    async def write(self, peer: PeerMemory, our_pages: PageIds, their_pages: PageIds) -> int:
        """See `Transport.write`."""
        raise NotImplementedError("decode never writes")

    def check_address(self, address: str) -> None:
        """See `Transport.check_address`."""

    async def dial(self, address: str) -> Link:
        """See `Transport.dial`."""
        return ScriptedLink(self._script)

    async def listen(self, address: str, on_link: Callable[[Link], Awaitable[None]]) -> Listener:
        """See `Transport.listen`."""
        raise NotImplementedError("decode never listens")

    async def wait_gone(self, instance: str, hello: wire.Hello) -> None:
        """See `Transport.wait_gone`."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """See `Transport.close`."""

    def statistics(self) -> dict[str, int | float]:
        """See `Transport.statistics`."""
        return {}


class KeyStorage:
    """Storage engine that keeps keys but no bytes; see `Storage`. Its calls end one turn of the loop later."""

    uri = "keys:"

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.cpu_s = 0.0
        """CPU time of its own calls."""

    async def register(self, pool: PoolMemory, buffer_of: object, *, namespace: bytes, poller: Poller) -> None:
        """See `Storage.register`."""

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """See `Storage.exists`."""
        return await self._look_up(keys)

    async def get_into(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """See `Storage.get_into`."""
        return await self._look_up(keys)

    async def put_from(self, keys: Sequence[bytes], pages: PageIds, *, timeout_s: float) -> list[bool]:
        """See `Storage.put_from`."""
        started_s = time.thread_time()
        self.keys.update(keys)
        self.cpu_s += time.thread_time() - started_s
        await asyncio.sleep(0)
        return [True] * len(keys)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Storage.delete`."""
        raise NotImplementedError("this benchmark never deletes")

    async def clear(self) -> int:
        """See `Storage.clear`."""
        count = len(self.keys)
        self.keys.clear()
        return count

    async def probe(self) -> None:
        """See `Storage.probe`."""

    async def close(self) -> None:
        """See `Storage.close`."""

    def verify(self) -> AsyncIterator[Verdict]:
        """See `Storage.verify`."""
        raise NotImplementedError("there are no bytes to verify")

    def statistics(self) -> StorageStatistics:
        """See `Storage.statistics`."""
        return StorageStatistics(
            uri=self.uri, pages=len(self.keys), used_bytes=0, capacity_bytes=0, hits=0, puts=0, evictions=0,
            read_bytes=0, written_bytes=0, calls_in_flight=0,
        )  # fmt: skip

    async def _look_up(self, keys: Sequence[bytes]) -> list[bool]:
        started_s = time.thread_time()
        found = [key in self.keys for key in keys]
        self.cpu_s += time.thread_time() - started_s
        await asyncio.sleep(0)
        return found
