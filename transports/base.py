"""The `Transport` protocol: authenticated control links, and writes into a peer's registered pool.

The hand-over (`decode`, `prefill`) is written against these protocols only, so the same code runs within one process
(loopback) and between hosts (NIXL). This module does no I/O and holds no policy.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol, TypeAlias

from tidekv.states.errors import PrefillCause, RemoteProtocolError, TransferFailed
from tidekv.states.types import PageIds, PoolMemory
from tidekv.transports import wire

ADDRESS_END = 2**64
LISTENER_COUNTS: Final = (
    "handshakes_dropped",
    "links_in_pause",
    "links_misdirected",
    "links_over_limit",
    "links_over_quota",
    "links_refused",
    "links_silent",
)
"""Names of the counts of a listener; see `Listener.statistics`."""


class DialFailed(TransferFailed):
    """A link could not be opened; `cause` is the reason."""

    def __init__(self, cause: PrefillCause, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class PolledTransfer(Protocol):
    """One operation of a library without completion callbacks: posted once, then polled until it ends."""

    @property
    def rounds(self) -> int:
        """Checks made back to back before the poller begins to wait between them."""
        ...

    def post(self) -> bool:
        """Start the operation. Returns True if it is already done. Raises TransferFailed."""
        ...

    def check(self) -> bool:
        """Return True if the operation is done. Raises TransferFailed if it ended in an error."""
        ...

    def release(self) -> None:
        """Release the operation's resources. Called once, only after its end."""
        ...


BeginHashing: TypeAlias = "Callable[[PageIds], asyncio.Future[bytes]]"
Ended: TypeAlias = "list[tuple[asyncio.Future[None], Exception | None]]"


class StreamTurn(enum.Enum):
    """Result of a stream's turn.

    EMPTY: nothing is left to do. WAITING: operations are in flight and none made progress. MOVED: something was posted
    or resolved, and more is left.
    """

    EMPTY = enum.auto()
    WAITING = enum.auto()
    MOVED = enum.auto()


class TransferStream(Protocol):
    """Ordered operations that often end together: the poller calls `advance` of the stream instead of polling each of
    them.
    """

    @property
    def is_empty(self) -> bool:
        """True if a turn has nothing to do."""
        ...

    def advance(self, resolve: Callable[[Ended], None]) -> StreamTurn:
        """Take one turn on the poller's thread: collect what has ended, pass it to `resolve`, post what is next.

        May block. Each future of `Drive.begin` is resolved once. An exception raised here ends the poller.
        """
        ...


class Drive(Protocol):
    """The event loop's handle of a stream."""

    def begin(self) -> asyncio.Future[None]:
        """Return a future for the stream to resolve; hand it to the stream, then call `wake`. Raises EngineClosed."""
        ...

    def wake(self) -> None:
        """Give the stream turns until one returns `StreamTurn.EMPTY`."""
        ...


class TransferPoller(Protocol):
    """Posts and checks operations away from the event loop."""

    def submit(self, pollable: PolledTransfer) -> asyncio.Future[None]:
        """Take an operation over. The returned future is resolved on the loop once the operation has ended and is
        released.
        """
        ...

    def drive(self, stream: TransferStream) -> Drive:
        """Register a stream. It takes no turn before its first `wake`."""
        ...


class Link(Protocol):
    """An authenticated, ordered, framed control connection."""

    @property
    def peer_label(self) -> str:
        """Address or name of the other end, for logs and errors."""
        ...

    def send(self, message: wire.Message) -> None:
        """Queue a message; never blocks.

        Raises LinkClosed if the link is closed, or if its bounded outgoing buffer is full; the latter closes the link
        with that cause.
        """
        ...

    async def receive(self) -> wire.AnyMessage:
        """Return the next message. Raises LinkClosed, with its cause, at the end; RemoteProtocolError for a malformed
        frame, which also closes the link.
        """
        ...

    async def stalled_s(self, key: bytes, *, within_s: float) -> float | None:
        """Return for how many seconds the event loop of the other end, which listens, has not turned; None: its process
        does not answer within `within_s` seconds. `key` is the `liveness_key` of its listener.
        """
        ...

    def mark_greeted(self) -> None:
        """Record that the other end's Hello was accepted: from now on its frames may have the full size."""
        ...

    def report_violation(self) -> None:
        """Count a breach of the protocol by the peer, at most once per link.

        A listener refuses an address with repeated violations for a growing time. `receive` reports malformed frames
        itself.
        """
        ...

    async def close(self, cause: str = "") -> None:
        """Send the cause to the other end if it still reads, and close. Does nothing on a closed link."""
        ...


class Listener(Protocol):
    """An open endpoint that accepts links."""

    @property
    def address(self) -> str:
        """Address to dial, with the port that was assigned."""
        ...

    @property
    def liveness_key(self) -> bytes:
        """Key of questions for signs of life beside the links (`Link.stalled_s`); empty: they have no answer."""
        ...

    def statistics(self) -> dict[str, int | float]:
        """Counters: links_refused (failed before their first message; of them links_silent sent nothing, and
        links_misdirected were meant for another address), links_over_limit, links_over_quota (of their address),
        links_in_pause (their address is refused after violations), handshakes_dropped (the oldest connections in the
        challenge, for newer ones), violations.
        """
        ...

    async def close(self) -> None:
        """Accept no more links, close the open ones, and wait for their tasks."""
        ...


class PeerMemory(Protocol):
    """Opaque handle of a peer's registered pool; each transport has its own type."""

    @property
    def instance(self) -> str:
        """The peer's instance."""
        ...


class Exchange(NamedTuple):
    """Pieces of two pools that a write pairs up, equal in size pair by pair: whole pages, or parts of them."""

    ours: PoolMemory
    theirs: PoolMemory


class Hashing(Protocol):
    """Checksums of pages in host memory, computed away from the event loop if there are many bytes."""

    def hashing(self, memory: PoolMemory) -> BeginHashing:
        """Return a function that begins to hash pages of this pool, or the slices of them that `memory` describes.

        The future has `wire.CHECKSUM_BYTES` for each page, in order. Raises InvalidConfig for GPU memory.
        """
        ...


class Transport(Protocol):
    """Control links and writes between this process and its peers."""

    @property
    def name(self) -> str:
        """The worker's name; the same after a restart."""
        ...

    @property
    def instance(self) -> str:
        """`name`, a dash, and a suffix unique to this start of the process."""
        ...

    async def start(self, *, poller: TransferPoller, listen: str = "") -> None:
        """Set the transport up; called once, before anything else. `listen` is the address that `listen` will be given,
        or empty.
        """
        ...

    async def register(self, memory: PoolMemory, *components: PoolMemory) -> None:
        """Make our pool, and those of components, readable and writable for peers. Called once, before `metadata`."""
        ...

    def metadata(self) -> bytes:
        """Return the bytes that an authenticated peer passes to `add_peer`."""
        ...

    def check_metadata(self, instance: str, metadata: bytes) -> None:
        """Validate the metadata of a peer's Hello. Raises RemoteProtocolError unless it is complete and belongs to
        `instance`.
        """
        ...

    async def add_peer(
        self, instance: str, metadata: bytes, memory: PoolMemory, exchange: Exchange | None = None
    ) -> PeerMemory:
        """Make a peer's pool writable for us and return a new handle of it.

        Without `exchange`, whole pages are written from our first pool; with it, its pieces are. Each call returns a
        separate handle. Raises RemoteProtocolError for invalid metadata or memory.
        """
        ...

    async def remove_peer(self, peer: PeerMemory) -> None:
        """Forget a handle of `add_peer`. The caller has no write to it in flight."""
        ...

    async def write(self, peer: PeerMemory, our_pages: PageIds, their_pages: PageIds) -> int:
        """Write our pages over the peer's, pairwise. Returns the number of bytes once they are in place at the peer.

        Raises TransferFailed. Cancelling does not stop the write: the call waits for its end, then raises the
        cancellation.
        """
        ...

    def check_address(self, address: str) -> None:
        """Raise InvalidRequest if `address` is malformed, or may not be dialled. Opens no connection."""
        ...

    async def dial(self, address: str) -> Link:
        """Open a link and pass the challenge.

        Raises DialFailed, RemoteProtocolError, and InvalidRequest for an address that `check_address` refuses.
        """
        ...

    async def listen(self, address: str, on_link: Callable[[Link], Awaitable[None]]) -> Listener:
        """Open an endpoint. Each link that passed the challenge runs `on_link` in a task owned by the listener."""
        ...

    async def wait_gone(self, instance: str, hello: wire.Hello) -> None:
        """Return once that process is proven dead and our side has progressed for at least 100 ms since.

        After that none of its writes can land. Never returns otherwise; may be cancelled.
        """
        ...

    async def close(self) -> None:
        """Close what `start` created, after the last write has ended."""
        ...

    def statistics(self) -> dict[str, int | float]:
        """Counters: bytes_written, pages_written, writes, writes_failed, links."""
        ...


def check_memory(memory: PoolMemory) -> None:
    """Validate the pool that a peer announced: complete, and without overflow. Raises RemoteProtocolError."""
    # The transfer libraries accept ranges that overflow: no later check exists.
    if memory.kind not in ("DRAM", "VRAM") or memory.device < 0:
        raise RemoteProtocolError(f"peer announces memory of kind {memory.kind!r}, device {memory.device}")
    if not memory.segments or memory.page_count < 1:
        raise RemoteProtocolError(f"peer announces {len(memory.segments)} segments of {memory.page_count} pages")
    for index, segment in enumerate(memory.segments):
        sound = (
            segment.page_count == memory.page_count
            and segment.address > 0
            and 0 < segment.piece_bytes <= segment.stride_bytes
            and segment.address + segment.stride_bytes * segment.page_count <= ADDRESS_END
        )
        if not sound:
            raise RemoteProtocolError(f"peer announces segment {index} out of bounds: {segment}")


def check_pages(pages: PageIds, memory: PoolMemory, *, owner: str) -> None:
    """Validate page ids against a pool before addresses are computed from them. Raises RemoteProtocolError."""
    if pages and not 0 <= min(pages) <= max(pages) < memory.page_count:
        raise RemoteProtocolError(
            f"{owner} page ids reach {min(pages)} to {max(pages)}, the pool has {memory.page_count}"
        )
