"""Control connection: framed messages over TCP or TLS, behind the challenge of `challenge`.

Outgoing frames of one loop iteration are written with one system call (`Outbox`). The kernel wakes the peer in each
call, and the peer then often runs at once on this core. Frames that are not urgent therefore wait up to `BATCH_DELAY_S`
for the next urgent frame. Order is always kept.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Final, cast

from tidekv.states.errors import (
    InvalidConfig,
    LinkClosed,
    PrefillCause,
    RemoteProtocolError,
    TidekvError,
    TransferFailed,
    cause_of,
)
from tidekv.transports import frames, wire
from tidekv.transports.base import LISTENER_COUNTS, DialFailed, Link
from tidekv.transports.control import challenge, liveness
from tidekv.transports.control.addresses import are_loopback, format_address, parse_address
from tidekv.transports.control.peer_backoff import BackoffLimits, PeerBackoff, is_violation, violation_key
from tidekv.transports.log import engine_log
from tidekv.transports.tasks import OwnedTasks

LOG = engine_log("tidekv.transports")

BATCH_DELAY_S = 0.002
"""Maximum seconds that a frame without urgency waits for further frames."""
ADVICE: Final = {
    PrefillCause.CONNECTION_REFUSED: "; start the program that listens there, or correct the address",
    PrefillCause.UNKNOWN_HOST: "; correct the name, or make it known to this machine",
    PrefillCause.MISCONFIGURED: "; check the certificates of both ends",
}
"""What to do about an address that cannot be reached. Other causes may pass by themselves."""


class Outbox:
    """Outgoing frames of one stream. Every method is called on the loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._frames: list[bytes] = []
        self._frames_bytes = 0
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes not yet taken over by the kernel."""
        return self._writer.transport.get_write_buffer_size() + self._frames_bytes

    def put(self, frame: bytes, *, is_urgent: bool) -> None:
        """Write a frame in this loop iteration if it is urgent, otherwise with the next urgent one or after
        `BATCH_DELAY_S`.
        """
        self._frames.append(frame)
        self._frames_bytes += len(frame)
        if self._is_scheduled:
            return
        if is_urgent:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self.write)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_DELAY_S, self.write)

    def write(self) -> None:
        """Write all waiting frames now."""
        frames = self._frames
        self.clear()
        if frames:
            self._writer.writelines(frames)

    def clear(self) -> None:
        """Drop all waiting frames."""
        self._frames, self._frames_bytes, self._is_scheduled = [], 0, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


CLOSE_S = 1.0
KEEPALIVE_S = 20
"""Seconds of silence before the kernel's first keep-alive probe, and between its probes."""
KEEPALIVES_MISSED_MAX = 3
BACKLOG = 128
SMALL_FRAME_BYTES = 64 * 1024
"""Maximum size of a frame that fits into the buffer of each stream: frame budgets do not count it."""
FRAME_S = 30.0
"""Seconds in which a larger frame must arrive, from its length to its last byte."""
ACCEPT_PAUSE_S = 0.5
"""Seconds for which accepting stops if the process has no descriptor or memory left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Secret and limits of control links. The TLS contexts turn TLS on for dialling and for listening.

    `handshake_s` bounds everything before the first message: TLS and the challenge. At most `links_max` links, and
    `links_per_address_max` of one address, have passed the challenge; as many connections again may be in it, beside
    them: a new one takes the place of the oldest. `announces` are further addresses under which a listener may be
    dialled, beside the one that a connection reaches. Until the Hello of the other end is accepted its frames have at
    most `hello_bytes_max`. A listener holds at most `greeting_bytes_max` of
    unfinished frames of links before their Hello, and `unfinished_bytes_max` of all others, in addition to
    `SMALL_FRAME_BYTES` per link.
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
    announces: tuple[str, ...] = ()
    violations: BackoffLimits = field(default_factory=BackoffLimits)
    dial_tls: ssl.SSLContext | None = None
    listen_tls: ssl.SSLContext | None = None


class FrameBudget:
    """Bytes of unfinished frames that all links of one listener may hold. A link waits until its frame fits."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_left = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes inside the block. Waits for them in order of arrival."""
        if self._waiting or size > self._bytes_left:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                # `_give_back` may have granted the bytes in the same loop iteration as the cancellation.
                if turn.done() and not turn.cancelled():
                    self._give_back(size)
                else:
                    self._waiting.remove((size, turn))
                    # The next in line may need fewer bytes and fit now.
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
    """Budgets of one listener: one for links before their Hello, one for all others.

    Two budgets, so that connections without an accepted Hello cannot exhaust the bytes that peers need.
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
        seals: challenge.Seals | None = None,
        on_violation: Callable[[], None] | None = None,
        budgets: FrameBudgets | None = None,
    ) -> None:
        """`seals` are those of the challenge. `budgets` are those of the listener; None: the link was dialled, to
        prefill, and has its own.
        """
        self.peer_label = peer_label
        self._budgets = budgets or FrameBudgets(options)
        self._inbound = wire.FROM_PREFILL if budgets is None else wire.FROM_DECODE
        self._is_greeted = False
        self._seals = seals
        self._on_violation = on_violation
        self._reader = reader
        self._writer = writer
        self._options = options
        self._cause: str | None = None
        self._outbox = Outbox(writer)

    @property
    def leaves_host(self) -> bool:
        """Whether the other end is on another machine, judged by the addresses of both ends."""
        ours, theirs = (self._writer.get_extra_info(name) for name in ("sockname", "peername"))
        return bool(theirs) and theirs[0] != ours[0] and not ip_address(theirs[0].partition("%")[0]).is_loopback

    async def stalled_s(self, key: bytes, *, within_s: float) -> float | None:
        """See `Link.stalled_s`."""
        host, port = self._writer.get_extra_info("peername")[:2]
        return await liveness.stalled_s(host, port, key, within_s=within_s)

    def send(self, message: wire.Message) -> None:
        """See `Link.send`."""
        if self._cause is not None:
            raise LinkClosed(self._cause)
        frame = self._sealed(wire.encode_frame(message, frame_bytes_max=self._options.frame_bytes_max))
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
            cause = str(error) if isinstance(error, OSError) else "without a cause"
            self._end(f"{self.peer_label} closed the connection: {cause}")
            raise LinkClosed(self._cause) from error
        except RemoteProtocolError as error:
            self.report_violation()
            await self.close(str(error))
            raise
        if isinstance(message, wire.Bye):
            self._end(f"{self.peer_label} closed the link: {message.cause}")
            raise LinkClosed(self._cause, is_orderly=True)
        return message

    def mark_greeted(self) -> None:
        """See `Link.mark_greeted`."""
        self._is_greeted = True

    def report_violation(self) -> None:
        """See `Link.report_violation`."""
        on_violation, self._on_violation = self._on_violation, None
        if on_violation is not None:
            on_violation()

    async def close(self, cause: str = "") -> None:
        """See `Link.close`."""
        if self._cause is None:
            self._outbox.write()
            # Set before the first await: a concurrent `send` or `receive` must find the link closed.
            self._cause = f"closed by us: {cause}"
            bye = self._sealed(wire.encode_frame(wire.Bye(cause=wire.brief(cause))))
            if self._writer.transport.get_write_buffer_size() + len(bye) <= self._options.outgoing_bytes_max:
                self._writer.write(bye)
            self._writer.close()
        await _wait_closed(self._writer)

    async def _read_message(self) -> wire.AnyMessage:
        prefix = await self._reader.readexactly(wire.LENGTH.size)
        options, is_greeted = self._options, self._is_greeted
        limit = options.frame_bytes_max if is_greeted else min(options.hello_bytes_max, options.frame_bytes_max)
        length = frames.body_length(prefix, frame_bytes_max=limit)
        decoder = self._inbound.later if is_greeted else self._inbound.first
        if length <= SMALL_FRAME_BYTES:
            return wire.decode_body(await self._read_body(length), decoder)
        # The bytes are reserved before they are read, and held until the frame is decoded or has failed.
        budget = self._budgets.greeted if is_greeted else self._budgets.greeting
        async with asyncio.timeout(FRAME_S), budget.reserve(length):
            body = await self._read_body(length)
        return wire.decode_body(body, decoder)

    async def _read_body(self, length: int) -> bytes:
        """Read a frame's body, and check its seal before anything of it is decoded."""
        if self._seals is None:
            return await self._reader.readexactly(length)
        raw = await self._reader.readexactly(length + challenge.SEAL_BYTES)
        body = raw[:length]
        self._seals.theirs.check(body, raw[length:])
        return body

    def _sealed(self, frame: bytes) -> bytes:
        return frame if self._seals is None else frame + self._seals.ours.next(frame[wire.LENGTH.size :])

    def _end(self, cause: str) -> None:
        """Abort the connection and drop the frames that wait in it. The first cause is kept."""
        if self._cause is None:
            self._cause = cause
        self._outbox.clear()
        self._writer.transport.abort()


class ControlListener:
    """Endpoint on a TCP port; see `Listener`.

    It accepts connections itself instead of using `asyncio.start_server`: with a TLS context that server does not
    report connections that never finish the handshake, so they would escape the limits.
    """

    def __init__(self, on_link: Callable[[Link], Awaitable[None]], options: ControlOptions) -> None:
        self.address = ""
        self._on_link = on_link
        self._options = options
        self._counts: Counter[str] = Counter(dict.fromkeys(LISTENER_COUNTS, 0))
        self._links_by_address: Counter[str] = Counter()
        """Links that have passed the challenge, by the address of their dialler."""
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """Addresses of the connections in the challenge, oldest first."""
        self._key = b""
        self._budgets = FrameBudgets(options)
        self._peer_backoff = PeerBackoff(clock=time.monotonic, limits=options.violations)
        self._tasks = OwnedTasks("control listener")
        self._sockets: list[socket.socket] = []
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._liveness: liveness.LivenessThread | None = None

    @property
    def liveness_key(self) -> bytes:
        """See `Listener.liveness_key`."""
        return b"" if self._liveness is None else self._liveness.key

    async def open(self, address: str) -> None:
        """Listen on every address that the host name resolves to.

        Raises InvalidConfig, also for an address of the network at which every program could connect without
        authentication.
        """
        host, port = parse_address(address)
        self._key = await challenge.stretched(self._options.secret)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self._check_authentication(address, [str(where[0]) for _, _, _, _, where in found])
            for family, where in dict.fromkeys((family, where) for family, _, _, _, where in found):
                place = (where[0], port, *where[2:])
                listening = socket.create_server(place, family=family, backlog=BACKLOG)
                self._sockets.append(listening)
                listening.setblocking(False)
                # With port 0 the first socket gets a free port; the other address families must use the same one.
                port = listening.getsockname()[1]
        except OSError as error:
            self._close_sockets()
            raise InvalidConfig(f"cannot listen on {address}: {_words_of(error)}") from error
        self.address = format_address(host, port)
        thread = liveness.LivenessThread()
        try:
            thread.start(self._sockets)
        except OSError as error:
            LOG.warning("no signs of life beside the links: this UDP port is taken", address=self.address, error=error)
        else:
            self._liveness = thread
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
        if self._liveness is not None:
            self._liveness.close()
        await self._tasks.close()

    def statistics(self) -> dict[str, int | float]:
        """See `Listener.statistics`."""
        return {**self._counts, "violations": self._peer_backoff.violations}

    def _check_authentication(self, address: str, hosts: list[str]) -> None:
        tls = self._options.listen_tls
        asks_for_certificates = tls is not None and tls.verify_mode is ssl.CERT_REQUIRED
        if self._options.secret or asks_for_certificates or self._options.allow_no_secret or are_loopback(hosts):
            return
        raise InvalidConfig(
            f"cannot listen on {address}: without a secret, every program that reaches it could read and write this "
            "worker's memory. Set a secret, require client certificates, listen on 127.0.0.1, or pass allow_no_secret"
        )

    def _close_sockets(self) -> None:
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()

    def _accept_waiting(self, listening: socket.socket) -> None:
        """Accept all waiting connections, at most one backlog per call."""
        for _ in range(BACKLOG):
            try:
                connection, where = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                # Out of descriptors or memory. The socket stays readable, so the loop would spin here without a pause.
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening.fileno())
                resume = partial(loop.add_reader, listening.fileno(), self._accept_waiting, listening)
                self._pauses[listening] = loop.call_later(ACCEPT_PAUSE_S, resume)
                return
            connection.setblocking(False)
            self._accept(connection, str(where[0]), int(where[1]))

    def _accept(self, connection: socket.socket, host: str, port: int) -> None:
        address = violation_key(host)
        if self._peer_backoff.pause_left_s(address) > 0:
            self._counts["links_in_pause"] += 1
            connection.close()
            return
        self._make_place(address)
        task = self._tasks.spawn(self._serve(connection, host, port), name="link")
        self._handshakes[task] = address
        # In the callback, not in `_serve`: a task cancelled before its first step runs nothing of its body.
        task.add_done_callback(partial(self._forget, connection))

    def _make_place(self, address: str) -> None:
        """Drop the oldest connection in the challenge if one more would exceed a limit.

        Not the newest: connections that stay silent would keep out every dialler that comes after them.
        """
        of_address = [task for task, one in self._handshakes.items() if one == address]
        if len(of_address) >= self._options.links_per_address_max:
            oldest = of_address[0]
        elif len(self._handshakes) >= self._options.links_max:
            oldest = next(iter(self._handshakes))
        else:
            return
        self._counts["handshakes_dropped"] += 1
        del self._handshakes[oldest]
        oldest.cancel()

    def _admit(self, address: str) -> bool:
        """Count a dialler that has passed the challenge as a link; False if a limit is reached."""
        if self._links_by_address.total() >= self._options.links_max:
            self._counts["links_over_limit"] += 1
        elif self._links_by_address[address] >= self._options.links_per_address_max:
            self._counts["links_over_quota"] += 1
        else:
            self._links_by_address[address] += 1
            return True
        return False

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        connection.close()

    async def _serve(self, connection: socket.socket, host: str, port: int) -> None:
        address = violation_key(host)
        writer: asyncio.StreamWriter | None = None
        has_place = False

        def admit() -> bool:
            nonlocal has_place
            has_place = self._admit(address)
            return has_place

        try:
            try:
                async with asyncio.timeout(self._options.handshake_s):
                    reader, writer = await _streams(connection, self._options.listen_tls)
                    _set_up(writer)
                    announces = (self.address, *self._options.announces)
                    seals = await challenge.answer(reader, writer, key=self._key, announces=announces, admit=admit)
            except BaseException as error:
                if writer is not None:
                    writer.transport.abort()
                if isinstance(error, TransferFailed | RemoteProtocolError | asyncio.IncompleteReadError | OSError):
                    # Port scanners and wrong secrets are counted. They get our greeting, and a proof is refused, no
                    # more.
                    self._note_refused(address, error)
                    return
                raise
            self._handshakes.pop(_this_task(), None)
            await self._run(reader, writer, seals, host, port)
        finally:
            if has_place:
                self._links_by_address[address] -= 1
                if not self._links_by_address[address]:
                    del self._links_by_address[address]

    def _note_refused(self, address: str, error: Exception) -> None:
        self._counts["links_refused"] += 1
        if isinstance(error, asyncio.IncompleteReadError) and not error.partial:
            self._counts["links_silent"] += 1
        if isinstance(error, challenge.MisdirectedDial):
            self._counts["links_misdirected"] += 1
        if _is_failed_challenge(error):
            self._peer_backoff.note(address)

    async def _run(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seals: challenge.Seals | None,
        host: str,
        port: int,
    ) -> None:
        """Run a link that has passed the challenge."""
        link = ControlLink(
            reader,
            writer,
            peer_label=format_address(host, port),
            options=self._options,
            seals=seals,
            on_violation=partial(self._peer_backoff.note, violation_key(host)),
            budgets=self._budgets,
        )
        try:
            await self._on_link(link)
        finally:
            await link.close("the listener is done with this link")


async def dial(address: str, options: ControlOptions) -> ControlLink:
    """Open a link to `address` ("host:port") and pass the challenge.

    Raises InvalidConfig for a malformed address, DialFailed if nothing answers or the secrets differ, PeerMismatch for
    another version of the protocol.
    """
    host, port = parse_address(address)
    key = await challenge.stretched(options.secret)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(options.handshake_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=options.dial_tls)
            _set_up(writer)
            seals = await challenge.prove(reader, writer, key=key, dialled=address)
    except BaseException as error:
        # BaseException: a cancelled dial must close its connection, too.
        if writer is not None:
            writer.transport.abort()
        if isinstance(error, DialFailed):
            raise DialFailed(error.cause, f"{address}: {error}") from error
        if isinstance(error, TimeoutError):
            raise DialFailed(PrefillCause.SILENT, f"{address} did not answer within {options.handshake_s} s") from error
        if isinstance(error, asyncio.IncompleteReadError):
            raise DialFailed(
                PrefillCause.UNREACHABLE,
                f"{address} closed before the challenge: it has too many links, or refuses this address after "
                "violations",
            ) from error
        if isinstance(error, OSError):
            cause = _cause_of(error)
            raise DialFailed(cause, f"cannot reach {address}: {_words_of(error)}{ADVICE.get(cause, '')}") from error
        if isinstance(error, ValueError) and not isinstance(error, TidekvError):
            raise InvalidConfig(f"address {address!r} names no host: {error}") from error
        raise
    return ControlLink(reader, writer, peer_label=address, options=options, seals=seals)


async def listen(address: str, on_link: Callable[[Link], Awaitable[None]], options: ControlOptions) -> ControlListener:
    """Listen on `address` ("host:port", port 0 for any free one), and call `on_link` with each link that is proven.

    The caller closes the listener. Raises InvalidConfig for an address that cannot be used.
    """
    listener = ControlListener(on_link, options)
    await listener.open(address)
    return listener


def _set_up(writer: asyncio.StreamWriter) -> None:
    """Set the socket options of a connection that this end has just opened or accepted."""
    connection = cast("socket.socket", writer.get_extra_info("socket"))
    # Without Nagle's algorithm: small frames must not wait for the acknowledgement of the frame before.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that lost power closes no connection: without probes its links would count against its quota for ever.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES_MISSED_MAX)


async def _streams(
    connection: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams of an accepted connection, made as `asyncio.open_connection` makes those of a dialled one."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _is_failed_challenge(error: Exception) -> bool:
    """Whether a failed handshake counts as a violation."""
    match error:
        case challenge.MisdirectedDial() | challenge.TooManyLinks():
            return False  # It knows the secret.
        case asyncio.IncompleteReadError(partial=received):
            # A connection closed without a byte may be a check whether the port is open.
            return bool(received)
        case OSError():
            return isinstance(error, TimeoutError | ssl.SSLError)
        case RemoteProtocolError():
            return is_violation(error)
    return True


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None, "a link runs in a task"
    return task


def _cause_of(error: OSError) -> PrefillCause:
    match error:
        case socket.gaierror():
            # EAI_AGAIN means that the resolver got no answer, not that the name does not exist.
            return PrefillCause.UNREACHABLE if error.errno == socket.EAI_AGAIN else PrefillCause.UNKNOWN_HOST
        case ConnectionRefusedError():
            return PrefillCause.CONNECTION_REFUSED
        case ssl.SSLError():
            return PrefillCause.MISCONFIGURED
    return PrefillCause.UNREACHABLE


def _words_of(error: OSError) -> str:
    """Return the system's words for an error: asyncio and `socket` add the address to them, each in its own form."""
    if isinstance(error, (socket.gaierror, ssl.SSLError)) or error.errno is None:
        return cause_of(error)
    return os.strerror(error.errno)


async def _wait_closed(writer: asyncio.StreamWriter) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
    except OSError:
        # The connection broke while it was being closed: it is closed now.
        return
