"""A transport inside one process: control links that still encode and decode every frame, and writes by memory copy.

It keeps the contract of a real transport, so the whole hand-over can be tested without sockets. `LoopbackNetwork` gives
tests hooks to hold writes, cut links and drop frames. It moves host memory only.
"""

from __future__ import annotations

import asyncio
import ctypes
import uuid
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from tidekv.states.errors import (
    InvalidConfig,
    LinkClosed,
    LocalProtocolError,
    PrefillCause,
    RemoteProtocolError,
    TransferFailed,
)
from tidekv.states.types import PageIds, PoolMemory
from tidekv.transports import frames, wire
from tidekv.transports.base import (
    LISTENER_COUNTS,
    DialFailed,
    Exchange,
    Link,
    PeerMemory,
    TransferPoller,
    check_memory,
    check_pages,
)
from tidekv.transports.blocking import settled
from tidekv.transports.tasks import OwnedTasks

OUTGOING_BYTES_MAX = 4 * wire.FRAME_BYTES_MAX
SLICE_BYTES = 1024 * 1024
"""Bytes copied before the loop runs other tasks."""


class LoopbackNetwork:
    """State shared by the loopback transports of one process: listeners, living transports, and the hooks of tests.

    `before_write(writer, target, pages)` is awaited before the bytes of a write move. `loses(sender, message)` returns
    True for a frame to drop without an error.
    """

    def __init__(self) -> None:
        self.before_write: Callable[[str, str, int], Awaitable[None]] | None = None
        self.loses: Callable[[str, wire.Message], bool] | None = None
        self._listeners: dict[str, LoopbackListener] = {}
        self._living: dict[str, LoopbackTransport] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._ports = 0

    def join(self, transport: LoopbackTransport) -> None:
        """Add a transport."""
        self._living[transport.instance] = transport

    def leave(self, instance: str) -> None:
        """Remove a transport; calls of `wait_gone` for it return."""
        self._living.pop(instance, None)
        for waiter in self._waiters.pop(instance, []):
            if not waiter.done():
                waiter.set_result(None)

    def living(self, instance: str) -> LoopbackTransport | None:
        """Return the transport of this instance; None after its end."""
        return self._living.get(instance)

    async def wait_gone(self, instance: str) -> None:
        """Return once no transport of this instance lives."""
        if instance in self._living:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(instance, []).append(waiter)
            await waiter

    def open(self, address: str, listener: LoopbackListener) -> str:
        """Register a listener and return its address; ":0" at the end is replaced by a free port."""
        if address.endswith(":0"):
            self._ports += 1
            address = f"{address[:-1]}{self._ports}"
        if address in self._listeners:
            raise InvalidConfig(f"address {address!r} is taken")
        self._listeners[address] = listener
        return address

    def listener(self, address: str) -> LoopbackListener | None:
        """Return the listener at an address."""
        return self._listeners.get(address)

    def shut(self, address: str) -> None:
        """Remove a listener."""
        self._listeners.pop(address, None)

    def cut(self, instance: str, cause: str = "connection cut") -> None:
        """Break all links of a transport without a Bye."""
        for link in list(self._living[instance].links):
            link.break_off(cause)

    def kill(self, instance: str) -> None:
        """End a transport as the death of its process would: its links break, its writes fail without landing."""
        transport = self._living[instance]
        transport.die()
        self.cut(instance, "process died")
        for address in [at for at, listener in self._listeners.items() if listener.owner is transport]:
            self.shut(address)
        self.leave(instance)


# Global on purpose: like the loopback device of a host, it connects all transports of the process by default.
PROCESS_NETWORK = LoopbackNetwork()


class LoopbackLink:
    """One end of a pair; see `Link`."""

    def __init__(self, owner: LoopbackTransport, peer_label: str, inbound: wire.Inbound) -> None:
        self.peer_label = peer_label
        self.on_violation: Callable[[], None] | None = None
        self._owner = owner
        self._incoming: deque[bytes] = deque()
        self._incoming_bytes = 0
        self._frame_bytes_max = wire.HELLO_BYTES_MAX
        self._inbound = inbound
        self._decoder = inbound.first
        self._arrived = asyncio.Event()
        self._cause: str | None = None
        self._ending: str | None = None
        self._other: LoopbackLink | None = None
        owner.links.add(self)

    def pair_with(self, other: LoopbackLink) -> None:
        """Connect two ends."""
        self._other, other._other = other, self

    async def stalled_s(self, key: bytes, *, within_s: float) -> float | None:
        """See `Link.stalled_s`: there is no thread that answers."""
        return None

    def send(self, message: wire.Message) -> None:
        """See `Link.send`."""
        if self._cause is not None:
            raise LinkClosed(self._cause)
        frame = wire.encode_frame(message)
        loses = self._owner.network.loses
        if self._other is None or (loses is not None and loses(self._owner.instance, message)):
            return
        if self._other._incoming_bytes + len(frame) > OUTGOING_BYTES_MAX:
            self.break_off(f"{self.peer_label} does not read: {self._other._incoming_bytes} bytes wait to be sent")
            raise LinkClosed(self._cause)
        self._other._take(frame)

    async def receive(self) -> wire.AnyMessage:
        """See `Link.receive`."""
        while not self._incoming or self._cause is not None:
            if self._cause is None and self._ending is not None:
                self._close_with(self._ending)
            if self._cause is not None:
                raise LinkClosed(self._cause)
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._incoming.popleft()
        self._incoming_bytes -= len(frame)
        try:
            frames.body_length(frame[: wire.LENGTH.size], frame_bytes_max=self._frame_bytes_max)
            message = wire.decode_body(frame[wire.LENGTH.size :], self._decoder)
        except RemoteProtocolError as error:
            self.report_violation()
            await self.close(str(error))
            raise
        if isinstance(message, wire.Bye):
            self._close_with(f"{self.peer_label} closed the link: {message.cause}")
            raise LinkClosed(self._cause, is_orderly=True)
        return message

    def mark_greeted(self) -> None:
        """See `Link.mark_greeted`."""
        self._frame_bytes_max, self._decoder = wire.FRAME_BYTES_MAX, self._inbound.later

    def report_violation(self) -> None:
        """See `Link.report_violation`. Violations are counted; no peer of this process is refused."""
        if self.on_violation is not None:
            self.on_violation()
            self.on_violation = None

    async def close(self, cause: str = "") -> None:
        """See `Link.close`."""
        if self._cause is None:
            if self._other is not None:
                self._other._take(wire.encode_frame(wire.Bye(cause=wire.brief(cause))))
            self._close_with(f"closed by us: {cause}")
        await asyncio.sleep(0)

    def break_off(self, cause: str) -> None:
        """End both ends at once; the other end can still read what was sent before."""
        if self._other is not None and self._other._ending is None:
            self._other._ending = f"{self._other.peer_label} closed the connection: {cause}"
            self._other._arrived.set()
        if self._cause is None:
            self._close_with(cause)

    def _take(self, frame: bytes) -> None:
        if self._cause is None:
            self._incoming.append(frame)
            self._incoming_bytes += len(frame)
            self._arrived.set()

    def _close_with(self, cause: str) -> None:
        self._cause = cause
        self._incoming.clear()
        self._incoming_bytes = 0
        self._arrived.set()
        self._owner.links.discard(self)
        if self._other is not None and self._other._ending is None:
            self._other._ending = f"{self._other.peer_label} closed the connection"
            self._other._arrived.set()


class LoopbackListener:
    """See `Listener`."""

    def __init__(self, owner: LoopbackTransport, on_link: Callable[[Link], Awaitable[None]]) -> None:
        self.owner = owner
        self.address = ""
        self.liveness_key = b""
        self.violations = 0
        self._on_link = on_link
        self._tasks = OwnedTasks(f"listener of {owner.instance}")

    def accept(self, dialler: LoopbackTransport) -> LoopbackLink:
        """Make a pair of ends: serve one in a task, return the other."""
        theirs = LoopbackLink(dialler, self.address, wire.FROM_PREFILL)
        ours = LoopbackLink(self.owner, dialler.instance, wire.FROM_DECODE)
        ours.pair_with(theirs)
        ours.on_violation = self._note_violation
        self._tasks.spawn(self._serve(ours), name=f"link of {dialler.instance}")
        return theirs

    def statistics(self) -> dict[str, int | float]:
        """See `Listener.statistics`."""
        return {**dict.fromkeys(LISTENER_COUNTS, 0), "violations": self.violations}

    async def close(self) -> None:
        """See `Listener.close`."""
        self.owner.network.shut(self.address)
        await self._tasks.close()

    def _note_violation(self) -> None:
        self.violations += 1

    async def _serve(self, link: LoopbackLink) -> None:
        try:
            await self._on_link(link)
        finally:
            await link.close("the listener is done with this link")


class LoopbackPeer(msgspec.Struct, frozen=True):
    """See `PeerMemory`."""

    instance: str
    memory: PoolMemory
    exchange: Exchange


class LoopbackTransport:
    """See `Transport`. Without a network it joins that of this process."""

    def __init__(self, name: str, network: LoopbackNetwork | None = None) -> None:
        self.name = name
        self.instance = f"{name}-{uuid.uuid4().hex}"
        self.network = PROCESS_NETWORK if network is None else network
        self.links: set[LoopbackLink] = set()
        self._memories: tuple[PoolMemory, ...] = ()
        self._writes: set[asyncio.Task[int]] = set()
        self._dead = False
        self._counts = {"bytes_written": 0, "pages_written": 0, "writes": 0, "writes_failed": 0}

    async def start(self, *, poller: TransferPoller, listen: str = "") -> None:
        """See `Transport.start`; a copy in memory needs no poller."""
        self.network.join(self)

    async def register(self, memory: PoolMemory, *components: PoolMemory) -> None:
        """See `Transport.register`."""
        for pool in (memory, *components):
            if pool.kind != "DRAM":
                raise InvalidConfig(f"the loopback transport moves host memory only, not {pool.kind}")
        self._memories = (memory, *components)

    def metadata(self) -> bytes:
        """See `Transport.metadata`."""
        return b"loopback " + self.instance.encode()

    def check_metadata(self, instance: str, metadata: bytes) -> None:
        """See `Transport.check_metadata`."""
        if metadata != b"loopback " + instance.encode():
            raise RemoteProtocolError(f"metadata is not of {instance}")

    async def add_peer(
        self, instance: str, metadata: bytes, memory: PoolMemory, exchange: Exchange | None = None
    ) -> LoopbackPeer:
        """See `Transport.add_peer`."""
        peer = self.network.living(instance)
        if peer is None or metadata != peer.metadata():
            raise RemoteProtocolError(f"{instance} is not on this loopback network")
        check_memory(memory)
        if memory not in peer._memories:
            raise RemoteProtocolError(f"{instance} announces memory that it did not register")
        # Without pools of ours no write is possible, but a handle may still be made.
        whole = Exchange(ours=self._memories[0] if self._memories else memory, theirs=memory)
        return LoopbackPeer(instance=instance, memory=memory, exchange=exchange or whole)

    async def remove_peer(self, peer: PeerMemory) -> None:
        """See `Transport.remove_peer`; a handle owns nothing here."""

    async def write(self, peer: PeerMemory, our_pages: PageIds, their_pages: PageIds) -> int:
        """See `Transport.write`."""
        if not self._memories or self._dead:
            raise TransferFailed(f"{self.instance} has no memory to write from, or is closed")
        if not isinstance(peer, LoopbackPeer) or len(our_pages) != len(their_pages):
            raise LocalProtocolError(f"{len(our_pages)} pages cannot be written over {len(their_pages)}")
        check_pages(our_pages, peer.exchange.ours, owner="our")
        check_pages(their_pages, peer.exchange.theirs, owner="their")
        work = asyncio.get_running_loop().create_task(self._copy(peer, our_pages, their_pages))
        self._writes.add(work)
        work.add_done_callback(self._writes.discard)
        try:
            written = await settled(work)
        except TransferFailed:
            self._counts["writes_failed"] += 1
            raise
        self._counts["bytes_written"] += written
        self._counts["pages_written"] += len(our_pages)
        self._counts["writes"] += 1
        return written

    def check_address(self, address: str) -> None:
        """See `Transport.check_address`. Every name is a valid address."""

    async def dial(self, address: str) -> LoopbackLink:
        """See `Transport.dial`."""
        listener = self.network.listener(address)
        if listener is None:
            raise DialFailed(PrefillCause.CONNECTION_REFUSED, f"cannot reach {address}: it has no listener")
        return listener.accept(self)

    async def listen(self, address: str, on_link: Callable[[Link], Awaitable[None]]) -> LoopbackListener:
        """See `Transport.listen`."""
        listener = LoopbackListener(self, on_link)
        listener.address = self.network.open(address, listener)
        return listener

    async def wait_gone(self, instance: str, hello: wire.Hello) -> None:
        """See `Transport.wait_gone`."""
        await self.network.wait_gone(instance)

    async def close(self) -> None:
        """See `Transport.close`."""
        while self._writes:
            await asyncio.wait(list(self._writes))
        for link in list(self.links):
            await link.close("transport closed")
        self._dead = True
        self.network.leave(self.instance)

    def die(self) -> None:
        """Let no further write of this transport land; see `LoopbackNetwork.kill`."""
        self._dead = True

    def statistics(self) -> dict[str, int | float]:
        """See `Transport.statistics`."""
        return {**self._counts, "links": len(self.links)}

    async def _copy(self, peer: LoopbackPeer, our_pages: PageIds, their_pages: PageIds) -> int:
        ours, theirs = peer.exchange
        if self.network.before_write is not None:
            await self.network.before_write(self.instance, peer.instance, len(our_pages))
        since_pause = 0
        for our_page, their_page in zip(our_pages, their_pages, strict=True):
            if self._dead or self.network.living(peer.instance) is None:
                # A dead writer writes no more, and the memory of a dead target may be unmapped.
                raise TransferFailed(f"{self.instance} or {peer.instance} is gone")
            for source, target in zip(ours.segments, theirs.segments, strict=True):
                ctypes.memmove(
                    target.address + their_page * target.stride_bytes,
                    source.address + our_page * source.stride_bytes,
                    source.piece_bytes,
                )
            since_pause += ours.page_bytes
            if since_pause >= SLICE_BYTES:
                since_pause = 0
                await asyncio.sleep(0)
        return len(our_pages) * ours.page_bytes
