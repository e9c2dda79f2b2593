"""One direction of copies on a GPU: a stream, a thread that launches on it, and a thread that waits for completion.

The launching thread may block on the driver's queue, a kernel that is compiled first, or a long list of copies. The
waiting one sleeps in the driver until the device interrupts. Neither is the loop's, nor the poller's, which would delay
transfers, and no thread polls for completion.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tidekv.backends.completions import Completions, as_error
from tidekv.backends.copies.streams import Mark, Streams

Move: TypeAlias = Callable[[], None]
"""Enqueues a copy on the current stream, or makes it."""
Layers: TypeAlias = "Callable[[], list[tuple[Mark, asyncio.Future[None]]]]"
"""Returns the marks of a launched copy's layers, each with the future of its arrival."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """A copy to be launched behind `after`, the work of its caller's stream when it was submitted."""

    move: Move
    after: Mark
    launched: asyncio.Future[None] | None
    ended: asyncio.Future[None]
    layers: Layers | None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched copy, and the mark behind it; without one, nothing runs on the device any more."""

    end: Mark | None
    error: Exception | None
    ended: asyncio.Future[None]


class StreamLane:
    """Makes copies in the order of submission. Make and `stop` it on the loop that awaits them."""

    def __init__(self, streams: Streams, *, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._outcomes = Completions(self._loop)
        self._streams = streams
        self._stream = streams.make()
        self._new: queue.SimpleQueue[_Launch | None] = queue.SimpleQueue()
        self._flying: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._launch_all, name=f"{name}-launch", daemon=True),
            threading.Thread(target=self._wait_for_all, name=f"{name}-wait", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, move: Move, launched: asyncio.Future[None] | None = None, layers: Layers | None = None
    ) -> asyncio.Future[None]:
        """Launch `move` behind the present work of the caller's current stream; the future ends when the device is done
        with it, successful or not. `launched` is settled when it was launched, or could not be, the futures of
        `layers` as the device reaches their marks.
        """
        ended: asyncio.Future[None] = self._loop.create_future()
        self._new.put(_Launch(move, self._streams.current().mark(), launched, ended, layers))
        return ended

    def stop(self) -> None:
        """End both threads, which must be idle: they return in microseconds."""
        self._new.put(None)
        for thread in self._threads:
            thread.join()

    def _launch_all(self) -> None:
        while (item := self._new.get()) is not None:
            flight = self._launch(item)
            if item.launched is not None:
                self._outcomes.deliver([(item.launched, None)])
            for mark, arrived in () if item.layers is None else item.layers():
                self._flying.put(_Flight(mark, None, arrived))
            self._flying.put(flight)
        self._flying.put(None)

    def _launch(self, item: _Launch) -> _Flight:
        error: Exception | None = None
        end: Mark | None = None
        try:
            self._stream.follow(item.after)
            self._stream.run(item.move)
        except BaseException as raised:
            # It is this copy's outcome, and part of it may be running: its end still counts.
            error = as_error(raised)
        try:
            end = self._stream.mark()
        except BaseException as raised:  # The device fails now; the first error is the cause.
            error = error or as_error(raised)
        return _Flight(end, error, item.ended)

    def _wait_for_all(self) -> None:
        while (flight := self._flying.get()) is not None:
            error = flight.error
            try:
                if flight.end is not None:
                    flight.end.wait()
            except BaseException as raised:
                # An error of the device is this copy's outcome; later copies report it too.
                error = error or as_error(raised)
            self._outcomes.deliver([(flight.ended, error)])
