"""The control connection: framed messages over TCP or TLS, behind a challenge.

Before anything of the peer is decoded, both ends prove that they know the shared secret:

    dialler  → listener   magic, version, nonce d
    listener → dialler    magic, version, nonce l
    dialler  → listener   HMAC(secret, "dial"   ‖ d ‖ l)
    listener → dialler    HMAC(secret, "listen" ‖ d ‖ l)

The dialler proves first, so that nobody gets a proof by merely connecting, and the role in the proof keeps one from
being played back. The challenge authenticates the ends, not the frames: on a network that is not private, use TLS.

What is said on one link until it is written: one system call for all of a turn.

In each call the kernel wakes the peer up, which then often runs at once, in our place. So frames that nobody waits for
have none of their own: they go with the next that somebody waits for, or after a moment, and always in order.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import cast

from tidekv.states.errors import (
    InvalidConfig,
    LinkClosed,
    PeerMismatch,
    PrefillCause,
    RemoteProtocolError,
    TidekvError,
    TransferFailed,
)
from tidekv.states.validation import host_and_port
from tidekv.transports.base import DialFailed, Link
from tidekv.transports.control import wire
from tidekv.transports.control.peer_backoff import BackoffLimits, PeerBackoff, is_offence, whose
from tidekv.transports.tasks import OwnedTasks

PATIENCE_S = 0.002
"""So long a frame that nobody waits for may wait for others."""


class Outbox:
    """The frames of one stream. Every method is called on the loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._frames: list[bytes] = []
        self._frames_bytes = 0
        self._is_called = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer, or our own kernel, has not taken yet."""
        return self._writer.transport.get_write_buffer_size() + self._frames_bytes

    def put(self, frame: bytes, *, is_urgent: bool) -> None:
        """Have a frame written in this turn of the loop, or, where it is not urgent, with the next that is."""
        self._frames.append(frame)
        self._frames_bytes += len(frame)
        if self._is_called:
            return
        if is_urgent:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self.write)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self.write)

    def write(self) -> None:
        """Write everything now."""
        frames = self._frames
        self.clear()
        if frames:
            self._writer.writelines(frames)

    def clear(self) -> None:
        """Write nothing of what waits."""
        self._frames, self._frames_bytes, self._is_called = [], 0, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


MAGIC = b"tidekv\r\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + 2 + NONCE_BYTES
CLOSE_S = 1.0
KEEPALIVE_S = 20
"""Seconds of silence after which the kernel asks whether the other host is still there, and between its questions."""
KEEPALIVES_MISSED_MAX = 3
BACKLOG = 128
SMALL_FRAME_BYTES = 64 * 1024
"""A frame up to this size fits into the buffer that each stream has anyway: no budget counts it."""
FRAME_S = 30.0
"""Seconds in which a larger frame must arrive, from its length to its last byte."""
# Where the process has no descriptor left, those who wait to be accepted wait for so long.
ACCEPT_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """The secret and the limits of control links. The contexts turn TLS on for dialling and for listening.

    `handshake_s` bounds all that comes before the first message: TLS and the challenge. `links_max`, and
    `links_per_address_max` for one address, count the links that are still in it, too. Until the Hello of the other end
    is accepted its frames have at most `hello_bytes_max`. A listener holds at most `greeting_bytes_max` of unfinished
    frames of links in that phase, and `unfinished_bytes_max` of all others, beside `SMALL_FRAME_BYTES` of each link.
    """

    secret: str = ""
    frame_bytes_max: int = wire.FRAME_BYTES_MAX
    outgoing_bytes_max: int = 4 * wire.FRAME_BYTES_MAX
    handshake_s: float = 5.0
    links_max: int = 1024
    links_per_address_max: int = 128
    hello_bytes_max: int = wire.HELLO_BYTES_MAX
    greeting_bytes_max: int = 16 * wire.HELLO_BYTES_MAX
    unfinished_bytes_max: int = 16 * wire.FRAME_BYTES_MAX
    allow_no_secret: bool = False
    offences: BackoffLimits = field(default_factory=BackoffLimits)
    dial_tls: ssl.SSLContext | None = None
    listen_tls: ssl.SSLContext | None = None


class FrameBudget:
    """Bytes of unfinished frames that the links of one listener may hold together. A link waits for its share."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_left = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes inside the block; waits, first come first served, until they are there."""
        if self._waiting or size > self._bytes_left:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_back(size)
                else:
                    self._waiting.remove((size, turn))
                    self._give_back(0)
                raise
        else:
            self._bytes_left -= size
        try:
            yield
        finally:
            self._give_back(size)

    def _give_back(self, size: int) -> None:
        self._bytes_left += size
        while self._waiting and self._waiting[0][0] <= self._bytes_left:
            size, turn = self._waiting.popleft()
            self._bytes_left -= size
            turn.set_result(None)


class FrameBudgets:
    """The budgets of one listener: one for links before their Hello, one for all others, so that strangers cannot use
    up what peers need.
    """

    def __init__(self, options: ControlOptions) -> None:
        # A budget below the largest frame would never let that frame through.
        self.greeting = FrameBudget(max(options.greeting_bytes_max, options.hello_bytes_max))
        self.greeted = FrameBudget(max(options.unfinished_bytes_max, options.frame_bytes_max))


class ControlLink:
    """A link over a stream whose challenge has passed."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        peer_label: str,
        options: ControlOptions,
        on_offence: Callable[[], None] | None = None,
        budgets: FrameBudgets | None = None,
    ) -> None:
        """`budgets`: those of the listener; a link that was dialled has its own."""
        self.peer_label = peer_label
        self._budgets = budgets or FrameBudgets(options)
        self._is_greeted = False
        self._on_offence = on_offence
        self._reader = reader
        self._writer = writer
        self._options = options
        self._cause: str | None = None
        self._outbox = Outbox(writer)

    @property
    def leaves_host(self) -> bool:
        """Whether the other end is on another machine, as far as addresses tell."""
        ours, theirs = (self._writer.get_extra_info(name) for name in ("sockname", "peername"))
        return bool(theirs) and theirs[0] != ours[0] and not ip_address(theirs[0].partition("%")[0]).is_loopback

    def send(self, message: wire.Message) -> None:
        """See `Link.send`."""
        if self._cause is not None:
            raise LinkClosed(self._cause)
        frame = wire.encode_frame(message, frame_bytes_max=self._options.frame_bytes_max)
        if (waiting := self._outbox.waiting_bytes) + len(frame) > self._options.outgoing_bytes_max:
            self._end(f"{self.peer_label} does not read: {waiting} bytes wait to be sent")
            raise LinkClosed(self._cause)
        self._outbox.put(frame, is_urgent=not isinstance(message, wire.Received))

    async def receive(self) -> wire.AnyMessage:
        """See `Link.receive`."""
        if self._cause is not None:
            raise LinkClosed(self._cause)
        try:
            message = await self._read_message()
        except TimeoutError as error:
            self._end(f"{self.peer_label} did not finish a frame within {FRAME_S} s")
            raise LinkClosed(self._cause) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            said = str(error) if isinstance(error, OSError) else "without a word"
            self._end(f"{self.peer_label} closed the connection: {said}")
            raise LinkClosed(self._cause) from error
        except RemoteProtocolError as error:
            self.blame()
            await self.close(str(error))
            raise
        if isinstance(message, wire.Bye):
            self._end(f"{self.peer_label} closed the link: {message.cause}")
            raise LinkClosed(self._cause, is_orderly=True)
        return message

    def greeted(self) -> None:
        """See `Link.greeted`."""
        self._is_greeted = True

    def blame(self) -> None:
        """See `Link.blame`."""
        on_offence, self._on_offence = self._on_offence, None
        if on_offence is not None:
            on_offence()

    async def close(self, cause: str = "") -> None:
        """See `Link.close`."""
        if self._cause is None:
            self._outbox.write()
            self._cause = f"closed by us: {cause}"
            farewell = wire.encode_frame(wire.Bye(cause=wire.brief(cause)))
            if self._writer.transport.get_write_buffer_size() + len(farewell) <= self._options.outgoing_bytes_max:
                self._writer.write(farewell)
            self._writer.close()
        await _wait_closed(self._writer)

    async def _read_message(self) -> wire.AnyMessage:
        prefix = await self._reader.readexactly(wire.LENGTH.size)
        options, is_greeted = self._options, self._is_greeted
        limit = options.frame_bytes_max if is_greeted else min(options.hello_bytes_max, options.frame_bytes_max)
        length = wire.body_length(prefix, frame_bytes_max=limit)
        if length <= SMALL_FRAME_BYTES:
            return wire.decode_body(await self._reader.readexactly(length))
        budget = self._budgets.greeted if is_greeted else self._budgets.greeting
        async with asyncio.timeout(FRAME_S), budget.reserve(length):
            body = await self._reader.readexactly(length)
        return wire.decode_body(body)

    def _end(self, cause: str) -> None:
        """Nothing more can be said: drop the connection with all that waits in it. The first cause stays."""
        if self._cause is None:
            self._cause = cause
        self._outbox.clear()
        self._writer.transport.abort()


class ControlListener:
    """An endpoint on a TCP port; see `Listener`.

    It accepts by itself, so that a stranger counts from its first packet on: a server that is given a TLS context tells
    nobody of those who never finish its handshake.
    """

    def __init__(self, on_link: Callable[[Link], Awaitable[None]], options: ControlOptions) -> None:
        self.address = ""
        self._on_link = on_link
        self._options = options
        self._counts: Counter[str] = Counter(links_refused=0, links_over_limit=0, links_over_quota=0, links_in_pause=0)
        self._links_by_address: Counter[str] = Counter()
        self._budgets = FrameBudgets(options)
        self._peer_backoff = PeerBackoff(clock=time.monotonic, limits=options.offences)
        self._tasks = OwnedTasks("control listener")
        self._sockets: list[socket.socket] = []
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}

    async def open(self, address: str) -> None:
        """Start to listen on every address that the host has. Raises InvalidConfig, also for an address of the network
        at which every program could connect.
        """
        host, port = parse_address(address)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self._check_authentication(address, [str(where[0]) for _, _, _, _, where in found])
            for family, where in dict.fromkeys((family, where) for family, _, _, _, where in found):
                place = (where[0], port, *where[2:])
                listening = socket.create_server(place, family=family, backlog=BACKLOG)
                self._sockets.append(listening)
                listening.setblocking(False)
                port = listening.getsockname()[1]
        except OSError as error:
            self._close_sockets()
            raise InvalidConfig(f"cannot listen on {address}: {error}") from error
        self.address = format_address(host, port)
        for listening in self._sockets:
            loop.add_reader(listening.fileno(), self._accept_waiting, listening)

    async def close(self) -> None:
        """See `Listener.close`."""
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            loop.remove_reader(listening.fileno())
        for pause in self._pauses.values():
            pause.cancel()
        self._close_sockets()
        await self._tasks.close()

    def statistics(self) -> dict[str, int | float]:
        """See `Listener.statistics`."""
        return {**self._counts, "offences": self._peer_backoff.offences}

    def _check_authentication(self, address: str, hosts: list[str]) -> None:
        tls = self._options.listen_tls
        asks_for_certificates = tls is not None and tls.verify_mode is ssl.CERT_REQUIRED
        if self._options.secret or asks_for_certificates or self._options.allow_no_secret or _are_loopback(hosts):
            return
        raise InvalidConfig(
            f"cannot listen on {address}: without a secret every program that reaches it could read and write this "
            "worker's memory. Set a secret, require client certificates, listen on 127.0.0.1, or pass allow_no_secret"
        )

    def _close_sockets(self) -> None:
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()

    def _accept_waiting(self, listening: socket.socket) -> None:
        """Take in all who wait, one backlog at once."""
        for _ in range(BACKLOG):
            try:
                connection, where = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                # Out of descriptors or memory. The loop would call here again and again.
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening.fileno())
                resume = partial(loop.add_reader, listening.fileno(), self._accept_waiting, listening)
                self._pauses[listening] = loop.call_later(ACCEPT_PAUSE_S, resume)
                return
            connection.setblocking(False)
            self._accept(connection, str(where[0]), int(where[1]))

    def _accept(self, connection: socket.socket, host: str, port: int) -> None:
        address = whose(host)
        if len(self._tasks) >= self._options.links_max:
            self._counts["links_over_limit"] += 1
        elif self._peer_backoff.pause_left_s(address) > 0:
            self._counts["links_in_pause"] += 1
        elif self._links_by_address[address] >= self._options.links_per_address_max:
            self._counts["links_over_quota"] += 1
        else:
            self._links_by_address[address] += 1
            task = self._tasks.spawn(self._serve(connection, host, port), name="link")
            # In the callback: a task that is cancelled before its first step runs nothing.
            task.add_done_callback(lambda _: self._forget(connection, address))
            return
        connection.close()

    def _forget(self, connection: socket.socket, address: str) -> None:
        connection.close()
        self._links_by_address[address] -= 1
        if not self._links_by_address[address]:
            del self._links_by_address[address]

    async def _serve(self, connection: socket.socket, host: str, port: int) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._options.handshake_s):
                reader, writer = await _streams(connection, self._options.listen_tls)
                await _answer(reader, writer, self._options.secret)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, TransferFailed | RemoteProtocolError | asyncio.IncompleteReadError | OSError):
                # A stranger: port scanners and wrong secrets are counted, and get no word beyond our greeting.
                self._counts["links_refused"] += 1
                if _is_failed_challenge(error):
                    self._peer_backoff.note(whose(host))
                return
            raise
        link = ControlLink(
            reader,
            writer,
            peer_label=format_address(host, port),
            options=self._options,
            on_offence=partial(self._peer_backoff.note, whose(host)),
            budgets=self._budgets,
        )
        try:
            await self._on_link(link)
        finally:
            await link.close("the listener is done with this link")


async def dial(address: str, options: ControlOptions) -> ControlLink:
    """Open a link to `address` ("host:port"). Raises InvalidConfig for the address, DialFailed if nothing answers or
    the secrets differ, PeerMismatch for another version of the protocol.
    """
    host, port = parse_address(address)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(options.handshake_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=options.dial_tls)
            _set_up(writer)
            await _prove(reader, writer, options.secret)
    except BaseException as error:
        if writer is not None:
            writer.transport.abort()
        if isinstance(error, DialFailed):
            raise DialFailed(error.cause, f"{address}: {error}") from error
        if isinstance(error, TimeoutError):
            raise DialFailed(PrefillCause.SILENT, f"{address} did not answer within {options.handshake_s} s") from error
        if isinstance(error, asyncio.IncompleteReadError):
            raise DialFailed(
                PrefillCause.UNREACHABLE,
                f"{address} closed before the challenge: it has too many links, or refuses us for a while",
            ) from error
        if isinstance(error, OSError):
            raise DialFailed(_cause_of(error), f"cannot reach {address}: {error}") from error
        if isinstance(error, ValueError) and not isinstance(error, TidekvError):
            raise InvalidConfig(f"address {address!r} names no host: {error}") from error
        raise
    return ControlLink(reader, writer, peer_label=address, options=options)


async def listen(address: str, on_link: Callable[[Link], Awaitable[None]], options: ControlOptions) -> ControlListener:
    """Listen on `address` ("host:port", port 0 for any). Raises InvalidConfig."""
    listener = ControlListener(on_link, options)
    await listener.open(address)
    return listener


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises InvalidConfig."""
    return host_and_port(address, "address", InvalidConfig, any_port=True)


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def is_loopback(address: str) -> bool:
    """Whether `address` ("host:port") can be reached from this machine only. A name that does not resolve yet may be
    anywhere. Raises InvalidConfig for what is not an address.
    """
    host, port = parse_address(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError):
        return False
    return _are_loopback([str(where[0]) for _, _, _, _, where in found])


def _are_loopback(hosts: Iterable[str]) -> bool:
    return all(ip_address(host.partition("%")[0]).is_loopback for host in hosts)


async def _prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(_greeting(ours))
    theirs = _nonce_of(await reader.readexactly(GREETING_BYTES))
    writer.write(_proof(secret, b"dial", ours, theirs))
    try:
        answer = await reader.readexactly(PROOF_BYTES)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise DialFailed(
            PrefillCause.WRONG_SECRET, "it closed the connection at our proof: the secrets differ"
        ) from error
    if not hmac.compare_digest(answer, _proof(secret, b"listen", ours, theirs)):
        raise DialFailed(PrefillCause.WRONG_SECRET, "it did not prove that it knows the secret")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
    _set_up(writer)
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(_greeting(ours))
    theirs = _nonce_of(await reader.readexactly(GREETING_BYTES))
    proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"dial", theirs, ours)):
        raise TransferFailed("the dialler did not prove that it knows the secret")
    writer.write(_proof(secret, b"listen", theirs, ours))


def _greeting(nonce: bytes) -> bytes:
    return MAGIC + wire.VERSION.to_bytes(2, "little") + nonce


def _nonce_of(greeting: bytes) -> bytes:
    if not greeting.startswith(MAGIC):
        raise RemoteProtocolError("the other end does not speak this protocol")
    version = int.from_bytes(greeting[len(MAGIC) : len(MAGIC) + 2], "little")
    if version != wire.VERSION:
        raise PeerMismatch(field="version", ours=wire.VERSION, theirs=version)
    return greeting[-NONCE_BYTES:]


def _proof(secret: str, role: bytes, dialler: bytes, listener: bytes) -> bytes:
    return hmac.digest(secret.encode(), MAGIC + role + dialler + listener, "sha256")


def _set_up(writer: asyncio.StreamWriter) -> None:
    """Set the options of a connection that this end has just opened or accepted."""
    connection = cast("socket.socket", writer.get_extra_info("socket"))
    # Small frames must not wait for the acknowledgement of the one before.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that lost power closes nothing. Its links would count against its quota for ever.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES_MISSED_MAX)


async def _streams(
    connection: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The accepting end of a connection, as `asyncio.open_connection` makes the dialling one."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _is_failed_challenge(error: Exception) -> bool:
    """Whether a stranger did wrong: who leaves without a word may only have looked whether the port is open."""
    match error:
        case asyncio.IncompleteReadError(partial=said):
            return bool(said)
        case OSError():
            return isinstance(error, TimeoutError | ssl.SSLError)
        case RemoteProtocolError():
            return is_offence(error)
    return True


def _cause_of(error: OSError) -> PrefillCause:
    match error:
        case socket.gaierror():
            # "Try again" is said by a resolver that does not know, not of a name that does not exist.
            return PrefillCause.UNREACHABLE if error.errno == socket.EAI_AGAIN else PrefillCause.UNKNOWN_HOST
        case ConnectionRefusedError():
            return PrefillCause.CONNECTION_REFUSED
        case ssl.SSLError():
            return PrefillCause.MISCONFIGURED
    return PrefillCause.UNREACHABLE


async def _wait_closed(writer: asyncio.StreamWriter) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
    except OSError:
        # The connection broke while it was being closed: it is closed.
        return
