"""What a transport offers: authenticated control links, and writes into a peer's registered pool.

The hand-over (`receiver`, `sender`) is written against these protocols alone, so that one process (loopback) and two
hosts (NIXL) run the same code. Nothing here does I/O or holds policy.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeAlias

from tidekv.states.errors import PrefillCause, RemoteProtocolError, TransferFailed
from tidekv.states.types import PageIds, PoolMemory
from tidekv.transports.control import wire

ADDRESS_END = 2**64


class DialFailed(TransferFailed):
    """A link could not be opened; `cause` says why."""

    def __init__(self, cause: PrefillCause, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class Pollable(Protocol):
    """One operation of a library that tells nobody when it is done: it is posted once and then asked."""

    @property
    def rounds(self) -> int:
        """How many checks this operation needs back to back before waiting between them makes sense."""
        ...

    def post(self) -> bool:
        """Start; True when it is already done. Raises TransferFailed."""
        ...

    def check(self) -> bool:
        """True when it is done. Raises TransferFailed when it has ended in an error."""
        ...

    def release(self) -> None:
        """Give back what it holds; called once, only after its end."""
        ...


Ended: TypeAlias = "list[tuple[asyncio.Future[None], Exception | None]]"


class Turn(enum.Enum):
    """How a stream's turn ended: it has nothing left, has to wait, or has posted or told something and has more."""

    EMPTY = enum.auto()
    WAITING = enum.auto()
    MOVED = enum.auto()


class Stream(Protocol):
    """Operations in an order of their own, of which many end together: the poller asks the stream and none of them."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing for a turn to do."""
        ...

    def advance(self, tell: Callable[[Ended], None]) -> Turn:
        """Take a turn on the poller's thread, which may block: see what has ended, tell of it, post what is next. Each
        future of `Drive.begin` is told once. Whatever it raises ends the poller.
        """
        ...


class Drive(Protocol):
    """A stream as the event loop sees it."""

    def begin(self) -> asyncio.Future[None]:
        """A future that the stream will tell of; give it one and `wake` it. Raises EngineClosed."""
        ...

    def wake(self) -> None:
        """Have the stream take its turns, until it says that it has nothing left."""
        ...


class Poller(Protocol):
    """Posts and checks operations away from the event loop."""

    def submit(self, pollable: Pollable) -> asyncio.Future[None]:
        """Take an operation over; the future is resolved on the loop when it has ended, after its release."""
        ...

    def drive(self, stream: Stream) -> Drive:
        """Make a stream known; it takes no turn before it is woken."""
        ...


class Link(Protocol):
    """An authenticated, ordered, framed control connection."""

    @property
    def peer_label(self) -> str:
        """The other end, for people."""
        ...

    def send(self, message: wire.Message) -> None:
        """Queue a message; never blocks. Raises LinkClosed where the link is closed or its bounded outgoing buffer is
        full, which closes it with that cause.
        """
        ...

    async def receive(self) -> wire.AnyMessage:
        """The next message. Raises LinkClosed with its cause at the end, RemoteProtocolError (and closes) for a
        malformed frame.
        """
        ...

    def greeted(self) -> None:
        """The Hello of the other end was accepted: from now on its frames may have the full size."""
        ...

    def blame(self) -> None:
        """The peer broke the protocol on this link: a listener refuses its address for a growing while where that
        happens again and again. Counts once a link; `receive` does it by itself for a malformed frame.
        """
        ...

    async def close(self, cause: str = "") -> None:
        """Tell the other end the cause as far as it still listens, and close. Harmless when closed."""
        ...


class Listener(Protocol):
    """An open endpoint that hands over links."""

    @property
    def address(self) -> str:
        """Where to dial, with the port that was really taken."""
        ...

    def statistics(self) -> dict[str, int | float]:
        """links_refused (failed before their first message), links_over_limit, links_over_quota (of their address),
        links_in_pause (their address had offended too often), offences.
        """
        ...

    async def close(self) -> None:
        """Take no more links, close those there are, and wait for their tasks."""
        ...


class PeerMemory(Protocol):
    """An opaque handle of a peer's registered pool, as one transport knows it."""

    @property
    def instance(self) -> str:
        """The peer's instance."""
        ...


class Exchange(NamedTuple):
    """The pieces of two pools that are written, pairwise of one size: whole pages, or parts of them."""

    ours: PoolMemory
    theirs: PoolMemory


class Transport(Protocol):
    """Control links and writes between this process and its peers."""

    @property
    def name(self) -> str:
        """The worker's name, the same after a restart."""
        ...

    @property
    def instance(self) -> str:
        """`name`, a dash, and what makes this start of the process unique."""
        ...

    async def start(self, *, poller: Poller, listen: str = "") -> None:
        """Make ready; called once, before anything else. `listen` is the address that will be listened on, if any."""
        ...

    async def register(self, memory: PoolMemory, *components: PoolMemory) -> None:
        """Make our pool, and those of components, writable and readable for peers; once, before `metadata`."""
        ...

    def metadata(self) -> bytes:
        """What an authenticated peer needs for `add_peer`."""
        ...

    def check_metadata(self, instance: str, metadata: bytes) -> None:
        """Judge the metadata of a peer at its Hello. Raises RemoteProtocolError unless it is whole, of `instance`."""
        ...

    async def add_peer(
        self, instance: str, metadata: bytes, memory: PoolMemory, exchange: Exchange | None = None
    ) -> PeerMemory:
        """Make a peer's pool writable for us: its whole pages from our first pool, or what is exchanged: pieces of it
        and of one of our pools. Raises RemoteProtocolError for what is not sound; adding twice gives a further handle.
        """
        ...

    async def remove_peer(self, peer: PeerMemory) -> None:
        """Forget a handle of `add_peer`; the caller has no write to it in flight."""
        ...

    async def write(self, peer: PeerMemory, our_pages: PageIds, their_pages: PageIds) -> int:
        """Write our pages over the peer's, pairwise; returns the bytes once they are in place at the peer.

        Raises TransferFailed. Cancelling does not stop the write: the call settles first, then re-raises.
        """
        ...

    def check_address(self, address: str) -> None:
        """Raise InvalidRequest for an address that cannot be dialled, whatever listens there."""
        ...

    async def dial(self, address: str) -> Link:
        """Open a link, challenge included. Raises DialFailed, RemoteProtocolError, or InvalidConfig for an address that
        is none.
        """
        ...

    async def listen(self, address: str, on_link: Callable[[Link], Awaitable[None]]) -> Listener:
        """Open an endpoint; each link that passed the challenge runs `on_link` in a task that the listener owns."""
        ...

    async def wait_gone(self, instance: str, hello: wire.Hello) -> None:
        """Return once that process is proven dead and our side has progressed for 100 ms since: none of its writes can
        land any more. Never returns otherwise; may be cancelled.
        """
        ...

    async def close(self) -> None:
        """Close what was started, after the last write has settled."""
        ...

    def statistics(self) -> dict[str, int | float]:
        """bytes_written, pages_written, writes, writes_failed, links."""
        ...


def check_memory(memory: PoolMemory) -> None:
    """Judge the pool that a peer announced: whole, without overflow. Raises RemoteProtocolError.

    Libraries below accept ranges that overflow, so that this is the only check there is.
    """
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


def check_pages(pages: PageIds, memory: PoolMemory, *, whose: str) -> None:
    """Judge page ids against a pool before an address is made of them. Raises RemoteProtocolError."""
    if pages and not 0 <= min(pages) <= max(pages) < memory.page_count:
        raise RemoteProtocolError(
            f"{whose} page ids reach {min(pages)} to {max(pages)}, the pool has {memory.page_count}"
        )
