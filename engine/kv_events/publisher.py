"""Publisher of KV events: a socket for new batches, and a ROUTER socket that replays batches a consumer missed.

A batch has three frames: topic, sequence number (8 bytes, big-endian), payload. Numbers begin at 0 and have no gaps.
After a second without a batch an empty one is sent, so that a consumer notices the loss of the last one.

Each new subscriber causes a fence: live batches numbered -1, not kept, with everything that is published. A consumer
that knows nothing of numbers, or of an earlier engine at this address, is right from then on.

A consumer that sees a gap in the numbers sends the first missing one to the ROUTER socket. It receives each batch from
there on as (empty, topic, number, payload), and then (empty, empty, -1, empty). If the number asked for is no longer
kept, the whole content takes the place of what is missing: under that number and the next ones, followed by empty
batches up to the newest. A consumer has one replay at a time, which is sent as it is read: a new request takes the
place of the one before, and what is not read takes no memory.

The loop's thread only appends to a queue. One thread does the rest, and sleeps while the queue is empty.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidekv.engine.config.engine_config import KVEventsOptions
from tidekv.engine.kv_events.messages import AllBlocksCleared, KVEvent, packed, packed_parts
from tidekv.engine.kv_events.watcher import MakeEvents
from tidekv.engine.log import engine_log, own_context
from tidekv.states.errors import InvalidConfig, cause_of
from tidekv.states.validation import is_loopback_host

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
"""Maximum batches that wait for one subscriber; it misses what comes beyond them, and asks for a replay. A batch has
at most BATCH_BYTES_MAX, so a subscriber that does not read takes 250 MiB at most."""
QUEUED_REPLAY_MAX: Final = 16
"""Maximum batches of a replay that wait for one consumer to read them."""
REPLAYS_MAX: Final = 64
"""Maximum consumers with a replay under way; the one that asked first is given up for a new one."""
REPLAY_UNREAD_S: Final = 30.0
"""Seconds after which a replay of which nothing is read is given up."""
REPLAY_POLL_MS: Final = 20
HEARTBEAT_S: Final = 1.0
"""Seconds without a batch after which an empty one is sent."""
FENCE_DELAY_S: Final = 0.1
"""Seconds from a new subscriber to its fence, which others that come meanwhile share."""
FENCES_APART_S: Final = 1.0
SNAPSHOTS_MAX: Final = 2
"""Maximum snapshots of the whole content that replays under way hold; those with an older one are given up."""
REQUEST_BYTES_MAX: Final = 1024
"""Maximum bytes of a frame that a consumer sends."""


@dataclass(slots=True)
class _Snapshot:
    """The whole content as it was before batch `end`."""

    parts: list[bytes]
    end: int


@dataclass(slots=True)
class _Replay:
    """A replay under way. `first` is the number of the snapshot's first part."""

    next: int
    last_s: float
    """When its last batch was taken."""
    snapshot: _Snapshot | None = None
    first: int = 0


def _nothing() -> Iterable[KVEvent]:
    return [AllBlocksCleared()]


class KVEventPublisher:
    """Publishes batches of KV events. `address` and `replay_address` have the port numbers that were bound."""

    def __init__(
        self,
        options: KVEventsOptions,
    ) -> None:
        """Bind the sockets and start the thread.

        Endpoints are those of ZMQ, such as tcp://127.0.0.1:5557 or ipc:///run/kv. Raises InvalidConfig without pyzmq,
        if an endpoint cannot be bound, and for one on the network without CURVE and without `allow_network`.
        """
        if options.endpoint is None:
            raise InvalidConfig("kv_events.endpoint is none: give the endpoint at which KV events are published")
        for one in (options.endpoint, options.replay):
            if one is not None and not (options.curve_secret_file or options.allow_network) and is_on_network(one):
                raise InvalidConfig(
                    f"KV events would be served at {one!r} to every program that reaches it, with the tokens of all "
                    "prompts: use 127.0.0.1 or ipc://, give kv_events.curve_secret_file, or set kv_events.allow_network"
                )
        try:
            import zmq
        except ImportError as error:
            raise InvalidConfig("KV events need pyzmq: pip install 'tidekv[events]'") from error
        self._zmq = zmq
        self._topic = options.topic.encode()
        self._rank = options.data_parallel_rank
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_batches_max = options.kept_batches
        self._kept_bytes_max = options.kept_bytes
        self._kept_bytes = 0
        self._replays: dict[bytes, _Replay] = {}
        """The replays under way by consumer, oldest request first."""
        self._snapshot: _Snapshot | None = None
        """The last one made for a replay; it serves others while the batches behind it are kept."""
        self._waiting: deque[tuple[float, MakeEvents, MakeEvents]] = deque()
        self._whole: MakeEvents = _nothing
        self._next = 0
        self._fence_at_s = self._fenced_at_s = float("-inf")
        self._has_newcomer = False
        # A context of its own, so that two engines in a process share nothing.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = LINGER_MS
        self._authenticator: ThreadAuthenticator | None = None
        try:
            self._secret_key = b"" if options.curve_secret_file is None else _read_key(options.curve_secret_file)
            if options.curve_clients is not None:
                self._authenticator = _only_clients(self._context, options.curve_clients)
            self._pub, self.address = self._bound(zmq.XPUB, options.endpoint)
            self._router: zmq.Socket[bytes] | None = None
            self.replay_address: str | None = None
            if options.replay is not None:
                self._router, self.replay_address = self._bound(zmq.ROUTER, options.replay)
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

    def publish(self, make: MakeEvents, whole: MakeEvents = _nothing) -> None:
        """Queue events, which are made in the sending thread and sent in as many batches as they need. Never blocks.

        `whole` makes the events of all that is published after these, beginning with AllBlocksCleared. Both are called
        in that thread. Call it from one thread only.
        """
        self._waiting.append((time.time(), make, whole))
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
        if kind == self._zmq.XPUB:
            # Each subscription is seen, also of a second subscriber to the same topic.
            found.setsockopt(self._zmq.XPUB_VERBOSE, 1)
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
        for each in (self._woken, self._pub, self._router):
            if each is not None:
                poller.register(each, self._zmq.POLLIN)
        heartbeat_at_s = time.monotonic() + HEARTBEAT_S
        is_over = False
        while not is_over:
            ready = dict(poller.poll(self._wait_ms(heartbeat_at_s)))
            sent = self._next
            if self._woken in ready:
                is_over = self._woken.recv() == b"end"
            # On every wake-up, whatever its cause: `publish` may have dropped its wake because the pipe was full.
            while self._waiting:
                at_s, make, self._whole = self._waiting.popleft()
                for payload in packed_parts(make(), at_s=at_s, rank=self._rank):
                    self._send(payload)
            if self._pub in ready:
                self._take_subscriptions()
            now_s = time.monotonic()
            if self._has_newcomer and now_s >= self._fence_at_s:
                self._fence()
            if self._next != sent:
                heartbeat_at_s = now_s + HEARTBEAT_S
            elif now_s >= heartbeat_at_s:
                heartbeat_at_s = now_s + HEARTBEAT_S
                self._send(self._empty())
            if self._router is not None and self._router in ready:
                self._begin_replay(self._router)
            for client in list(self._replays):
                self._go_on(client)

    def _wait_ms(self, heartbeat_at_s: float) -> int:
        """Milliseconds until something is due."""
        if self._replays:
            return REPLAY_POLL_MS
        due_s = min(heartbeat_at_s, self._fence_at_s) if self._has_newcomer else heartbeat_at_s
        return max(0, int((due_s - time.monotonic()) * 1000) + 1)

    def _send(self, payload: bytes) -> None:
        """Send a payload under the next number, and keep it."""
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._kept_batches_max or self._kept_bytes > self._kept_bytes_max:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _empty(self) -> bytes:
        return packed((), at_s=time.time(), rank=self._rank)

    # --- Fences ---

    def _take_subscriptions(self) -> None:
        """Read what subscribers say; a new one is due a fence."""
        with contextlib.suppress(self._zmq.Again):
            while True:
                if self._pub.recv(self._zmq.NOBLOCK)[:1] != b"\x01":
                    continue  # One that leaves, or a message of a subscriber, which means nothing.
                if not self._has_newcomer:
                    self._has_newcomer = True
                    self._fence_at_s = max(time.monotonic() + FENCE_DELAY_S, self._fenced_at_s + FENCES_APART_S)

    def _fence(self) -> None:
        self._has_newcomer, self._fenced_at_s = False, time.monotonic()
        for payload in self._whole_parts():
            self._pub.send_multipart((self._topic, END, payload))

    def _whole_parts(self) -> list[bytes]:
        return list(packed_parts(self._whole(), at_s=time.time(), rank=self._rank))

    # --- Replays ---

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
        self._replays[client] = _Replay(first, time.monotonic())
        if len(self._replays) > REPLAYS_MAX:
            del self._replays[next(iter(self._replays))]

    def _go_on(self, client: bytes) -> None:
        """Send as much of a replay as the consumer's queue takes."""
        assert self._router is not None, "replays are requested there"
        replay = self._replays.get(client)
        if replay is None:
            return  # Given up just now, for another one's snapshot.
        try:
            while replay.next < self._next:
                payload = self._payload_of(replay)
                number = replay.next.to_bytes(8, "big")
                self._router.send_multipart((client, b"", self._topic, number, payload), self._zmq.NOBLOCK)
                replay.next += 1
                replay.last_s = time.monotonic()
            self._router.send_multipart((client, b"", b"", END, b""), self._zmq.NOBLOCK)
        except self._zmq.Again:
            if time.monotonic() - replay.last_s > REPLAY_UNREAD_S:
                LOG.warning("a consumer of KV events does not read its replay: it is given up")
                del self._replays[client]
            return
        except self._zmq.ZMQError:
            # The consumer has left.
            del self._replays[client]
            return
        del self._replays[client]

    def _payload_of(self, replay: _Replay) -> bytes:
        """Return the batch that comes next in a replay: a kept one, a part of a snapshot, or an empty one behind it."""
        number, oldest = replay.next, self._kept[0][0] if self._kept else self._next
        if replay.snapshot is None or number >= replay.snapshot.end:
            replay.snapshot = None
            if number >= oldest:
                return self._kept[number - oldest][1]
            replay.snapshot, replay.first = self._snapshot_for(number, oldest), number
        at = number - replay.first
        return replay.snapshot.parts[at] if at < len(replay.snapshot.parts) else self._empty()

    def _snapshot_for(self, number: int, oldest: int) -> _Snapshot:
        """Return a snapshot whose parts fit in the numbers from this one on, before batches that are kept."""
        snapshot = self._snapshot
        if snapshot is not None and snapshot.end >= oldest and number + len(snapshot.parts) <= snapshot.end:
            return snapshot
        parts = self._whole_parts()
        while self._next < number + len(parts):
            self._send(self._empty())
        snapshot = self._snapshot = _Snapshot(parts, self._next)
        alive = {id(each.snapshot): each.snapshot for each in self._replays.values() if each.snapshot is not None}
        if len(alive) >= SNAPSHOTS_MAX:
            given_up = next(iter(alive))
            LOG.warning("replays of KV events are given up: others ask for a newer snapshot")
            for client in [client for client, each in self._replays.items() if id(each.snapshot) == given_up]:
                del self._replays[client]
        return snapshot


def is_on_network(endpoint: str) -> bool:
    """Whether other machines could reach a ZMQ endpoint."""
    scheme, _, place = endpoint.partition("://")
    if scheme in ("ipc", "inproc") or not place:
        return False
    host = place.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return not is_loopback_host(host)


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
