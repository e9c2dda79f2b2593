"""Load messages for SGLang's routers: a PUB socket beside the events.

A message has three frames: b"load", a number of 8 bytes, big-endian, and a MessagePack array with the name "LoadStat".
It is sent at each change that is noticed, and after a second without one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from tidekv.states.errors import InvalidConfig

if TYPE_CHECKING:
    import zmq

TOPIC: Final = b"load"
PERIOD_S: Final = 0.05
"""Seconds between two looks at the load."""
HEARTBEAT_S: Final = 1.0
QUEUED_MAX: Final = 8
"""Maximum messages that wait for one subscriber: a newer one replaces them anyway."""


class LoadStat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The load in SGLang's words, in the order of its fields. Prefill is elsewhere, so its totals are 0."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    max_total_num_tokens: int
    attn_dp_rank: int | None
    num_waiting_uncached_tokens: int
    num_total_tokens: int
    max_running_requests: int
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0


class LoadPublisher:
    """Publishes what `load` returns. `address` has the port number that was bound."""

    def __init__(self, endpoint: str, load: Callable[[], LoadStat]) -> None:
        """Bind the socket. Raises InvalidConfig without pyzmq, and if the endpoint cannot be bound."""
        try:
            import zmq
        except ImportError as error:
            raise InvalidConfig("load messages need pyzmq: pip install 'tidekv[events]'") from error
        self._nonblocking = zmq.NOBLOCK
        self._load = load
        self._next = 0
        self._last: tuple[LoadStat, float] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = 0
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(QUEUED_MAX)
        try:
            self._pub.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidConfig(f"load messages cannot be served at {endpoint!r}: {error}") from error
        bound = self._pub.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes), "that option is text"
        self.address = bound.rstrip(b"\0").decode()

    async def run(self) -> None:
        """Publish until cancelled, on the loop that `load` must be called on."""
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(PERIOD_S)

    def look(self, now_s: float) -> None:
        """Send the load if it has changed, or if the last message is old."""
        load = self._load()
        if self._last is not None and self._last[0] == load and now_s - self._last[1] < HEARTBEAT_S:
            return
        self._last = load, now_s
        frames = (TOPIC, self._next.to_bytes(8, "big"), msgspec.msgpack.encode(load))
        # A PUB socket drops what a subscriber does not take, and never blocks.
        self._pub.send_multipart(frames, self._nonblocking)
        self._next += 1

    def close(self) -> None:
        """Close the socket."""
        self._pub.close()
        self._context.term()
