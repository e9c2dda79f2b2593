"""Calls of a host engine in the order of its streams: each goes on once the device has reached the point of the call.

NIXL reads and writes device memory without regard to streams, and copies run on streams of their own. What the host
engine has only enqueued when it calls is not done yet: the forward that fills the pages it hands over, or the last one
that reads the pages it lends.

    host engine's thread   forward ──▶ call: marks in its streams ──▶ next forward   never waits
    gate's thread                       sleeps in the driver until they are reached
    loop's thread                                                  └──▶ the call, in the order of the calls

The device is not synchronized: later work of the same streams delays nothing here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tidekv.backends.completions import as_error
from tidekv.backends.copies.streams import InlineStreams, Mark, Stream, Streams, streams_of

CLOSE_S: Final = 60.0
"""Maximum seconds that the end of a gate, and `wait_passed`, wait for the device; one that hangs longer keeps the
gate's thread.
"""

Go = Callable[[Exception | None], None]
"""Goes on with a call; with the error if the device has failed. Called on the gate's thread, must not block or raise.
"""


class ServerStreams:
    """The streams on which a host engine works: the current one of the calling thread, and those that it names."""

    def __init__(self, streams: Streams, others: Callable[[], Sequence[Stream]] = tuple) -> None:
        """`others`: further streams, asked for at each call, such as that of a forward which another thread enqueues or
        which is the current one only while it is enqueued.
        """
        self._streams = streams
        self._others = others

    def mark(self) -> list[Mark]:
        """Mark the point of a call in all streams. Never waits."""
        return [stream.mark() for stream in (self._streams.current(), *self._others())]


def server_streams(device: torch.device, others: Callable[[], Sequence[Stream]] = tuple) -> ServerStreams | None:
    """Return the streams of a host engine with KV on `device`. None for host memory: work there is done when the host
    engine calls.
    """
    streams = streams_of(device)
    return None if isinstance(streams, InlineStreams) else ServerStreams(streams, others)


@dataclass(frozen=True, slots=True)
class _Call:
    marks: list[Mark]
    go: Go


class StreamGate:
    """Passes calls on, in their order, each once its marks are reached. Calls come from the host engine's threads."""

    def __init__(self, server: ServerStreams, *, name: str) -> None:
        """Start its thread, which blocks while there is nothing to wait for."""
        self._server = server
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pass_all, name=f"{name}-gate", daemon=True)
        self._thread.start()

    def behind_streams(self, go: Go) -> None:
        """Pass a call on behind what the host engine has enqueued by now, and behind all earlier calls."""
        self._calls.put(_Call(self._server.mark(), go))

    def behind_calls(self, go: Go) -> None:
        """Pass a call on behind all earlier calls."""
        self._calls.put(_Call([], go))

    def wait_passed(self) -> None:
        """Block until all earlier calls have been passed on, or the gate has ended; at most CLOSE_S."""
        passed = threading.Event()
        self.behind_calls(lambda _: passed.set())
        until_s = time.monotonic() + CLOSE_S
        while not passed.wait(0.1) and self._thread.is_alive() and time.monotonic() < until_s:
            pass

    def close(self) -> None:
        """Pass on what was put in, and end the thread. Returns after CLOSE_S even if the device hangs."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def _pass_all(self) -> None:
        while (call := self._calls.get()) is not None:
            error: Exception | None = None
            for mark in call.marks:
                try:
                    mark.wait()
                except BaseException as raised:  # An error of the device is the outcome of this call.
                    error = error or as_error(raised)
            call.go(error)
