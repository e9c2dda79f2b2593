"""Publisher of KV events: a PUB socket for new batches, and a ROUTER socket that replays batches a consumer missed.

A batch has three frames: topic, sequence number (8 bytes, big-endian), payload. A consumer that sees a gap in the
numbers sends the first missing one to the ROUTER socket. It receives each batch from there on as (empty, topic, number,
payload), and then (empty, empty, -1, empty). Batches that are no longer kept are left out. A consumer has one replay at
a time, which is sent as it is read: a new request takes the place of the one before, and what is not read takes no
memory.

The loop's thread only appends to a queue. One thread does the rest, and sleeps while the queue is empty.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidekv.engine.kv_events.messages import KVEvent, packed
from tidekv.engine.log import engine_log, own_context
from tidekv.states.errors import InvalidConfig, cause_of

if TYPE_CHECKING:
    import zmq
    from zmq.auth.thread import ThreadAuthenticator

LOG = engine_log("tidekv.kv_events")
BATCHES_WAITING_MAX: Final = 10_000
KEY_CHARACTERS: Final = 40
END: Final = (-1).to_bytes(8, "big", signed=True)
CLOSE_TIMEOUT_S: Final = 5.0
LINGER_MS: Final = 200
QUEUED_BATCHES_MAX: Final = 1000
"""Maximum batches that wait for one subscriber; it misses what comes beyond them, and asks for a replay."""
QUEUED_REPLAY_MAX: Final = 16
"""Maximum batches of a replay that wait for one consumer to read them."""
REPLAYS_MAX: Final = 64
"""Maximum consumers with a replay under way; the one that asked first is given up for a new one."""
REPLAY_UNREAD_S: Final = 30.0
"""Seconds after which a replay of which nothing is read is given up."""
REPLAY_POLL_MS: Final = 20
REQUEST_BYTES_MAX: Final = 1024
"""Maximum bytes of a frame that a consumer sends."""


class KVEventPublisher:
    """Publishes batches of KV events. `address` and `replay_address` have the port numbers that were bound."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        kept_batches: int = 10_000,
        kept_bytes: int = 64 * 1024 * 1024,
        rank: int = 0,
        curve_secret_file: str | None = None,
        curve_clients: str | None = None,
        allow_network: bool = False,
    ) -> None:
        """Bind the sockets and start the thread.

        Endpoints are those of ZMQ, such as tcp://127.0.0.1:5557 or ipc:///run/kv. Raises InvalidConfig without pyzmq,
        if an endpoint cannot be bound, and for one on the network without CURVE and without `allow_network`.
        """
        for one in (endpoint, replay):
            if one is not None and curve_secret_file is None and not allow_network and is_on_network(one):
                raise InvalidConfig(
                    f"KV events would be served at {one!r} to every program that reaches it, with the tokens of all "
                    "prompts: use 127.0.0.1 or ipc://, give kv_events.curve_secret_file, or set kv_events.allow_network"
                )
        try:
            import zmq
        except ImportError as error:
            raise InvalidConfig("KV events need pyzmq: pip install 'tidekv[events]'") from error
        self._zmq = zmq
        self._topic = topic.encode()
        self._rank = rank
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_batches_max = kept_batches
        self._kept_bytes_max = kept_bytes
        self._kept_bytes = 0
        self._replays: dict[bytes, tuple[int, float]] = {}
        """The next number of each replay under way, and when it had its last one, by consumer, oldest request first."""
        self._waiting: deque[tuple[float, Callable[[], Sequence[KVEvent]]]] = deque()
        self._next = 0
        # A context of its own, so that two engines in a process share nothing.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = LINGER_MS
        self._authenticator: ThreadAuthenticator | None = None
        try:
            self._secret_key = b"" if curve_secret_file is None else _read_key(curve_secret_file)
            if curve_clients is not None:
                self._authenticator = _only_clients(self._context, curve_clients)
            self._pub, self.address = self._bound(zmq.PUB, endpoint)
            self._router: zmq.Socket[bytes] | None = None
            self.replay_address: str | None = None
            if replay is not None:
                self._router, self.replay_address = self._bound(zmq.ROUTER, replay)
        except BaseException:
            self._stop_authenticator()
            self._context.destroy(linger=0)
            raise
        self._wake = self._context.socket(zmq.PAIR)
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._wake.sndtimeo = int(CLOSE_TIMEOUT_S * 1000)
        self._thread = threading.Thread(
            target=own_context().run, args=(self._run,), name="tidekv-kv-events", daemon=True
        )
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether the queue has a place for another batch."""
        return len(self._waiting) < BATCHES_WAITING_MAX

    def publish(self, make: Callable[[], Sequence[KVEvent]]) -> None:
        """Queue a batch, whose events are made in the sending thread; no events make no batch. Never blocks.

        Call it from one thread only.
        """
        self._waiting.append((time.time(), make))
        try:
            self._wake.send(b"", self._zmq.NOBLOCK)
        except self._zmq.Again:
            return  # The wake-ups already under way suffice.

    def close(self) -> None:
        """Send queued batches, stop the thread, and close. Blocks for at most CLOSE_TIMEOUT_S."""
        with contextlib.suppress(self._zmq.Again):  # The thread has failed and reads no more.
            self._wake.send(b"end")
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            LOG.error("the thread of KV events did not end in time", after_s=CLOSE_TIMEOUT_S)
            return
        self._wake.close()
        self._stop_authenticator()
        self._context.term()

    def _stop_authenticator(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()

    def _bound(self, kind: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        found = self._context.socket(kind)
        found.set_hwm(QUEUED_REPLAY_MAX if kind == self._zmq.ROUTER else QUEUED_BATCHES_MAX)
        found.setsockopt(self._zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        if kind == self._zmq.ROUTER:
            # A full queue is an error instead of a silent gap.
            found.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
        if self._secret_key:
            found.setsockopt(self._zmq.CURVE_SERVER, 1)
            found.setsockopt(self._zmq.CURVE_SECRETKEY, self._secret_key)
            found.setsockopt(self._zmq.ZAP_DOMAIN, b"tidekv")
        try:
            found.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise InvalidConfig(f"KV events cannot be served at {endpoint!r}: {error}") from error
        bound = found.getsockopt(self._zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes), "that option is text"
        return found, bound.rstrip(b"\0").decode()

    def _run(self) -> None:
        sockets = [each for each in (self._woken, self._router, self._pub) if each is not None]
        try:
            self._serve()
        except Exception:
            LOG.exception("KV events stop: the publishing thread failed")
        finally:
            for each in sockets:
                each.close()

    def _serve(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._woken, self._zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, self._zmq.POLLIN)
        is_over = False
        while not is_over:
            ready = dict(poller.poll(REPLAY_POLL_MS if self._replays else None))
            if self._woken in ready:
                is_over = self._woken.recv() == b"end"
            # On every wake-up, whatever its cause: `publish` may have dropped its wake because the pipe was full.
            while self._waiting:
                self._send(*self._waiting.popleft())
            if self._router is not None and self._router in ready:
                self._begin_replay(self._router)
            for client in list(self._replays):
                self._go_on(client)

    def _send(self, at_s: float, make: Callable[[], Sequence[KVEvent]]) -> None:
        events = make()
        if not events:
            return
        number, self._next = self._next, self._next + 1
        payload = packed(events, at_s=at_s, rank=self._rank)
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._kept_batches_max or self._kept_bytes > self._kept_bytes_max:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _begin_replay(self, router: zmq.Socket[bytes]) -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            LOG.warning(
                "a replay request for KV events is malformed: it needs three frames, the last of 8 bytes",
                frames=len(frames),
            )
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        self._replays.pop(client, None)
        self._replays[client] = first, time.monotonic()
        if len(self._replays) > REPLAYS_MAX:
            del self._replays[next(iter(self._replays))]

    def _go_on(self, client: bytes) -> None:
        """Send as much of a replay as the consumer's queue takes."""
        assert self._router is not None, "replays are requested there"
        oldest = self._kept[0][0] if self._kept else self._next
        try:
            number, last_s = self._replays[client]
            number = max(number, oldest)
            while number < self._next:
                payload = self._kept[number - oldest][1]
                self._router.send_multipart(
                    (client, b"", self._topic, number.to_bytes(8, "big"), payload), self._zmq.NOBLOCK
                )
                number += 1
                self._replays[client] = number, (last_s := time.monotonic())
            self._router.send_multipart((client, b"", b"", END, b""), self._zmq.NOBLOCK)
        except self._zmq.Again:
            if time.monotonic() - last_s > REPLAY_UNREAD_S:
                LOG.warning("a consumer of KV events does not read its replay: it is given up")
                del self._replays[client]
            return
        except self._zmq.ZMQError:
            # The consumer has left.
            del self._replays[client]
            return
        del self._replays[client]


def is_on_network(endpoint: str) -> bool:
    """Whether other machines could reach a ZMQ endpoint."""
    scheme, _, place = endpoint.partition("://")
    if scheme in ("ipc", "inproc") or not place:
        return False
    host = place.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _read_key(path: str) -> bytes:
    try:
        with open(path, encoding="ascii") as file:
            key = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"kv_events.curve_secret_file {path} cannot be read: {cause_of(error)}") from error
    if len(key) != KEY_CHARACTERS:
        raise InvalidConfig(
            f"kv_events.curve_secret_file {path} has {len(key)} characters, a key has {KEY_CHARACTERS} of Z85"
        )
    return key.encode()


def _only_clients(context: zmq.Context[zmq.Socket[bytes]], directory: str) -> ThreadAuthenticator:
    """Start the check of listeners' keys: those in the directory may connect."""
    from zmq.auth.thread import ThreadAuthenticator

    if not Path(directory).is_dir():
        raise InvalidConfig(f"kv_events.curve_clients: there is no directory {directory}")
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="tidekv", location=directory)
    return authenticator
