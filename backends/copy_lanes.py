"""Where copies of pages run: one lane a direction, which makes what it is given in that order.

On the CPU a lane is a thread, blocked while idle; on CUDA it is a stream (`tidekv.backends.stream_lane`). All copiers
of an engine share their lanes: what goes to the device goes one after the other, whosever it is.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Final

import torch

from tidekv.backends.outcomes import Outcomes, as_error
from tidekv.backends.stream_lane import Move, StreamLane
from tidekv.backends.streams import streams_of
from tidekv.states.errors import EngineClosed

TO_DEVICE: Final = "to_device"
TO_HOST: Final = "to_host"
NOT_RUNNING: Final = "the page copier is not running: start it first, and submit nothing after close"


class CopyLanes:
    """The two lanes of one device. `start` and `close` it on the loop that awaits its copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[str, _CopyThread | StreamLane] = {}
        self._closing = False
        self._in_flight: set[asyncio.Future[None]] = set()

    def start(self) -> None:
        """Start the two directions, on the running loop. Once only."""
        assert not self._lanes, "lanes are started once"
        for direction in (TO_DEVICE, TO_HOST):
            name = f"tidekv-copy-{direction}"
            if self._device.type == "cuda":
                self._lanes[direction] = StreamLane(streams_of(self._device), name=name)
            else:
                self._lanes[direction] = _CopyThread(name=name)

    async def close(self) -> None:
        """Take no more copies, wait until all that were submitted have ended, and stop the threads."""
        self._closing = True
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        for lane in self._lanes.values():
            lane.stop()

    def submit(
        self, direction: str, move: Move, *, launched: asyncio.Future[None] | None = None
    ) -> asyncio.Future[None]:
        """Make a copy; the future is the lane's own, and ends when nothing of it can be written any more. `launched`
        is settled as soon as `move` has returned. Raises EngineClosed before `start` and after `close`.
        """
        if self._closing or not self._lanes:
            raise EngineClosed(NOT_RUNNING)
        ended = self._lanes[direction].submit(move, launched)
        self._in_flight.add(ended)
        ended.add_done_callback(self._in_flight.discard)
        return ended


class _CopyThread:
    """One direction on the CPU: a thread that makes the copies in the order in which they came, blocked while idle."""

    def __init__(self, *, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._outcomes = Outcomes(self._loop)
        self._queue: queue.SimpleQueue[tuple[Move, list[asyncio.Future[None]]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, move: Move, launched: asyncio.Future[None] | None) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._queue.put((move, [future] if launched is None else [launched, future]))
        return future

    def stop(self) -> None:
        """End the thread, which must have nothing left to do: it is back in microseconds."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            move, futures = item
            error: Exception | None = None
            try:
                move()
            except BaseException as raised:  # It is this copy's outcome; the thread goes on.
                error = as_error(raised)
            self._outcomes.deliver([(future, error if future is futures[-1] else None) for future in futures])
