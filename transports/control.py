"""The control connection: framed messages over TCP or TLS, behind a challenge.

Before anything of the peer is decoded, both ends prove that they know the shared secret:

    dialler  → listener   magic, version, nonce d
    listener → dialler    magic, version, nonce l
    dialler  → listener   HMAC(secret, "dial"   ‖ d ‖ l)
    listener → dialler    HMAC(secret, "listen" ‖ d ‖ l)

The dialler proves first, so that nobody gets a proof by merely connecting, and the role in the proof keeps one from
being played back. The challenge authenticates the ends, not the frames: on a network that is not private, use TLS.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from tidekv.states.errors import InvalidConfig, LinkClosed, PeerMismatch, RemoteProtocolError, TransferFailed
from tidekv.transports import wire
from tidekv.transports.base import Link
from tidekv.transports.tasks import OwnedTasks

MAGIC = b"tidekv\r\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + 2 + NONCE_BYTES
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """The secret and the limits of control links. The contexts turn TLS on for dialling and for listening."""

    secret: str = ""
    frame_bytes_max: int = wire.FRAME_BYTES_MAX
    outgoing_bytes_max: int = 4 * wire.FRAME_BYTES_MAX
    handshake_s: float = 5.0
    links_max: int = 1024
    dial_tls: ssl.SSLContext | None = None
    listen_tls: ssl.SSLContext | None = None


class ControlLink:
    """A link over a stream whose challenge has passed."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, peer_label: str, options: ControlOptions
    ) -> None:
        self.peer_label = peer_label
        self._reader = reader
        self._writer = writer
        self._options = options
        self._cause: str | None = None

    def send(self, message: wire.Message) -> None:
        """See `Link.send`."""
        if self._cause is not None:
            raise LinkClosed(self._cause)
        frame = wire.encode_frame(message, frame_bytes_max=self._options.frame_bytes_max)
        waiting = self._writer.transport.get_write_buffer_size()
        if waiting + len(frame) > self._options.outgoing_bytes_max:
            self._end(f"{self.peer_label} does not read: {waiting} bytes wait to be sent")
            raise LinkClosed(self._cause)
        self._writer.write(frame)

    async def receive(self) -> wire.AnyMessage:
        """See `Link.receive`."""
        if self._cause is not None:
            raise LinkClosed(self._cause)
        try:
            message = await self._read_message()
        except (asyncio.IncompleteReadError, OSError) as error:
            said = str(error) if isinstance(error, OSError) else "without a word"
            self._end(f"{self.peer_label} closed the connection: {said}")
            raise LinkClosed(self._cause) from error
        except RemoteProtocolError as error:
            await self.close(str(error))
            raise
        if isinstance(message, wire.Bye):
            self._end(f"{self.peer_label} closed the link: {message.cause}")
            raise LinkClosed(self._cause)
        return message

    async def close(self, cause: str = "") -> None:
        """See `Link.close`."""
        if self._cause is None:
            self._cause = f"closed by us: {cause}"
            farewell = wire.encode_frame(wire.Bye(cause=wire.brief(cause)))
            if self._writer.transport.get_write_buffer_size() + len(farewell) <= self._options.outgoing_bytes_max:
                self._writer.write(farewell)
            self._writer.close()
        await _wait_closed(self._writer)

    async def _read_message(self) -> wire.AnyMessage:
        limit = self._options.frame_bytes_max
        prefix = await self._reader.readexactly(wire.LENGTH.size)
        return wire.decode_body(await self._reader.readexactly(wire.body_length(prefix, frame_bytes_max=limit)))

    def _end(self, cause: str) -> None:
        """Nothing more can be said: drop the connection with all that waits in it. The first cause stays."""
        if self._cause is None:
            self._cause = cause
        self._writer.transport.abort()


class ControlListener:
    """An endpoint on a TCP port; see `Listener`."""

    def __init__(self, on_link: Callable[[Link], Awaitable[None]], options: ControlOptions) -> None:
        self.address = ""
        self.refused = 0
        self._on_link = on_link
        self._options = options
        self._tasks = OwnedTasks("control listener")
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> None:
        """Start to listen."""
        host, port = parse_address(address)
        try:
            self._server = await asyncio.start_server(self._accept, host, port, ssl=self._options.listen_tls)
        except OSError as error:
            raise InvalidConfig(f"cannot listen on {address}: {error}") from error
        self.address = format_address(host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """See `Listener.close`."""
        if self._server is not None:
            self._server.close()
        await self._tasks.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= self._options.links_max:
            self.refused += 1
            writer.transport.abort()
            return
        self._tasks.spawn(self._serve(reader, writer), name="link")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        label = _label_of(writer)
        try:
            async with asyncio.timeout(self._options.handshake_s):
                await _answer(reader, writer, self._options.secret)
        except (TransferFailed, RemoteProtocolError, asyncio.IncompleteReadError, OSError, TimeoutError):
            # A stranger: port scanners and wrong secrets are counted, and get no word beyond our greeting.
            self.refused += 1
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        link = ControlLink(reader, writer, peer_label=label, options=self._options)
        try:
            await self._on_link(link)
        finally:
            await link.close("the listener is done with this link")


async def dial(address: str, options: ControlOptions) -> ControlLink:
    """Open a link to `address` ("host:port"). Raises InvalidConfig for the address, TransferFailed where nobody
    answers or the secrets differ, PeerMismatch for another version of the protocol.
    """
    host, port = parse_address(address)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(options.handshake_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=options.dial_tls)
            _send_at_once(writer)
            await _prove(reader, writer, options.secret)
    except BaseException as error:
        if writer is not None:
            writer.transport.abort()
        if isinstance(error, TimeoutError):
            raise TransferFailed(f"{address} did not answer within {options.handshake_s} s") from error
        if isinstance(error, asyncio.IncompleteReadError):
            raise TransferFailed(f"{address} closed during the challenge: the secrets may differ") from error
        if isinstance(error, OSError):
            raise TransferFailed(f"cannot reach {address}: {error}") from error
        raise
    return ControlLink(reader, writer, peer_label=address, options=options)


async def listen(address: str, on_link: Callable[[Link], Awaitable[None]], options: ControlOptions) -> ControlListener:
    """Listen on `address` ("host:port", port 0 for any). Raises InvalidConfig."""
    listener = ControlListener(on_link, options)
    await listener.open(address)
    return listener


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises InvalidConfig."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidConfig(f"address {address!r} is not host:port")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(_greeting(ours))
    theirs = _nonce_of(await reader.readexactly(GREETING_BYTES))
    writer.write(_proof(secret, b"dial", ours, theirs))
    answer = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(answer, _proof(secret, b"listen", ours, theirs)):
        raise TransferFailed("the listener did not prove that it knows the secret")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
    _send_at_once(writer)
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


def _send_at_once(writer: asyncio.StreamWriter) -> None:
    """Small frames must not wait for the acknowledgement of the one before."""
    connection = cast("socket.socket", writer.get_extra_info("socket"))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _label_of(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return format_address(str(peer[0]), int(peer[1])) if peer else "a peer that has gone"


async def _wait_closed(writer: asyncio.StreamWriter) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
    except OSError:
        # The connection broke while it was being closed: it is closed.
        return
