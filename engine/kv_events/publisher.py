"""Publisher of KV events: a PUB socket for new batches, and a ROUTER socket that replays batches a consumer missed.

A batch has three frames: topic, sequence number (8 bytes, big-endian), payload. A consumer that sees a gap in the
numbers sends the first missing one to the ROUTER socket. It receives each batch from there on as (empty, topic, number,
payload), and then (empty, empty, -1, empty). Batches that are no longer kept are left out.

The loop's thread only appends to a queue. One thread does the rest, and sleeps while the queue is empty.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from tidekv.engine.kv_events.messages import KVEvent, packed
from tidekv.engine.log import engine_log, own_context
from tidekv.states.errors import InvalidConfig

if TYPE_CHECKING:
    import zmq

LOG = engine_log("tidekv.kv_events")
BATCHES_WAITING_MAX: Final = 10_000
END: Final = (-1).to_bytes(8, "big", signed=True)
CLOSE_TIMEOUT_S: Final = 5.0
LINGER_MS: Final = 200


class KVEventPublisher:
    """Publishes batches of KV events. `address` and `replay_address` have the port numbers that were bound."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        kept_batches: int = 10_000,
        rank: int = 0,
    ) -> None:
        """Bind the sockets and start the thread. Raises InvalidConfig without pyzmq, or if an endpoint cannot be bound.

        Endpoints are those of ZMQ, such as tcp://*:5557 or ipc:///run/kv.
        """
        try:
            import zmq
        except ImportError as error:
            raise InvalidConfig("KV events need pyzmq: pip install 'tidekv[events]'") from error
        self._zmq = zmq
        self._topic = topic.encode()
        self._rank = rank
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept_batches)
        self._waiting: deque[tuple[float, Callable[[], Sequence[KVEvent]]]] = deque()
        self._next = 0
        # A context of its own, so that two engines in a process share nothing.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = LINGER_MS
        try:
            self._pub, self.address = self._bound(zmq.PUB, endpoint)
            self._router: zmq.Socket[bytes] | None = None
            self.replay_address: str | None = None
            if replay is not None:
                self._router, self.replay_address = self._bound(zmq.ROUTER, replay)
        except BaseException:
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
        self._context.term()

    def _bound(self, kind: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        found = self._context.socket(kind)
        # A replay sends at most every kept batch and the end mark, none of which may be dropped.
        found.set_hwm(max(2 * ((self._kept.maxlen or 0) + 1), 1000))
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
            ready = dict(poller.poll())
            if self._woken in ready:
                is_over = self._woken.recv() == b"end"
            # On every wake-up, whatever its cause: `publish` may have dropped its wake because the pipe was full.
            while self._waiting:
                self._send(*self._waiting.popleft())
            if self._router is not None and self._router in ready:
                self._replay(self._router)

    def _send(self, at_s: float, make: Callable[[], Sequence[KVEvent]]) -> None:
        events = make()
        if not events:
            return
        number, self._next = self._next, self._next + 1
        payload = packed(events, at_s=at_s, rank=self._rank)
        self._kept.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            LOG.warning(
                "a replay request for KV events is malformed: it needs three frames, the last of 8 bytes",
                frames=len(frames),
            )
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                router.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
        router.send_multipart((client, b"", b"", END, b""))
