"""Lanes of page copies: one for each direction, which makes copies in the order of submission.

On the CPU a lane is a thread, blocked while idle; on CUDA it is a stream (`tidekv.backends.copies.stream_lane`). All
copiers of an engine share their lanes: copies of one direction run one after the other, whichever copier submitted
them.

On the CPU a small copy is made at once, on the event loop, if its lane is idle: the way to the thread and back costs
more than the copy. Its outcome arrives in a later turn of the loop, as that of any copy. CUDA copies are never made
that way: a launch may have to wait for the driver.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from typing import Final

import torch

from tidekv.backends.completions import Completions, as_error
from tidekv.backends.copies.stream_lane import Layers, Move, StreamLane
from tidekv.backends.copies.streams import streams_of
from tidekv.states.errors import EngineClosed

TO_DEVICE: Final = "to_device"
TO_HOST: Final = "to_host"
# Small copies are made on the loop until they have taken this much of one turn; later ones go to the thread. So many
# small copies hold the loop for this long and one more copy at most.
INLINE_TURN_S: Final = 200e-6
NOT_RUNNING: Final = "the page copier is not running: start it first, and submit nothing after close"


class CopyLanes:
    """The two lanes of one device. `start` and `close` it on the loop that awaits its copies."""

    def __init__(self, device: torch.device, *, inline_turn_s: float = INLINE_TURN_S) -> None:
        """`inline_turn_s`: maximum seconds of one turn of the loop for small copies; 0 sends all of them to the
        thread.
        """
        self._device = device
        self._inline_turn_s = inline_turn_s
        self._taken_s = 0.0
        self._lanes: dict[str, _CopyThread | StreamLane] = {}
        self._closing = False
        self._in_flight: set[asyncio.Future[None]] = set()

    def start(self) -> None:
        """Start both directions, on the running loop. Once only."""
        assert not self._lanes, "lanes are started once"
        for direction in (TO_DEVICE, TO_HOST):
            name = f"tidekv-copy-{direction}"
            if self._device.type == "cuda":
                self._lanes[direction] = StreamLane(streams_of(self._device), name=name)
            else:
                self._lanes[direction] = _CopyThread(name=name)

    async def close(self) -> None:
        """Refuse further copies, wait until all submitted ones have ended, and stop the threads.

        Unbounded, since a copy cannot be stopped: the caller sets the deadline, and keeps the memory if it passes.
        """
        self._closing = True
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        for lane in self._lanes.values():
            lane.stop()

    def submit(
        self,
        direction: str,
        move: Move,
        *,
        is_small: bool = False,
        launched: asyncio.Future[None] | None = None,
        layers: Layers | None = None,
    ) -> asyncio.Future[None]:
        """Make a copy; the future belongs to the lane, and ends when nothing of the copy can be written any more.
        `launched` is settled as soon as `move` has returned, on CUDA the futures of `layers` as each layer ends. A
        small copy may be made before this returns. Raises EngineClosed before `start` and after `close`.
        """
        if self._closing or not self._lanes:
            raise EngineClosed(NOT_RUNNING)
        lane = self._lanes[direction]
        if is_small and isinstance(lane, _CopyThread) and lane.is_idle and self._taken_s < self._inline_turn_s:
            return self._make(lane, move, launched)
        ended = lane.submit(move, launched, layers) if isinstance(lane, StreamLane) else lane.submit(move, launched)
        self._in_flight.add(ended)
        ended.add_done_callback(self._in_flight.discard)
        return ended

    def _make(self, lane: _CopyThread, move: Move, launched: asyncio.Future[None] | None) -> asyncio.Future[None]:
        if not self._taken_s:
            asyncio.get_running_loop().call_soon(self._end_turn)
        began_s = time.perf_counter()
        try:
            return lane.make(move, launched)
        finally:
            self._taken_s += time.perf_counter() - began_s

    def _end_turn(self) -> None:
        self._taken_s = 0.0


class _CopyThread:
    """One direction on the CPU: a thread that makes copies in the order of submission, blocked while idle."""

    def __init__(self, *, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._outcomes = Completions(self._loop)
        self._queue: queue.SimpleQueue[tuple[Move, list[asyncio.Future[None]]] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether every submitted copy has ended and its future is settled. On the loop."""
        return not self._waiting

    def submit(self, move: Move, launched: asyncio.Future[None] | None) -> asyncio.Future[None]:
        """Submit a copy to the thread."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting += 1
        future.add_done_callback(self._ended)
        self._queue.put((move, [future] if launched is None else [launched, future]))
        return future

    def make(self, move: Move, launched: asyncio.Future[None] | None) -> asyncio.Future[None]:
        """Make a copy on the calling thread, the loop's, while the lane is idle."""
        assert self.is_idle, "what was submitted first is made first"
        future: asyncio.Future[None] = self._loop.create_future()
        try:
            move()
        except Exception as raised:
            # An exception is this copy's outcome. Anything else ends the process and is raised on the loop.
            future.set_exception(as_error(raised))
        else:
            future.set_result(None)
        if launched is not None:
            launched.set_result(None)
        return future

    def stop(self) -> None:
        """End the thread, which must be idle: it returns in microseconds."""
        self._queue.put(None)
        self._thread.join()

    def _ended(self, _: asyncio.Future[None]) -> None:
        self._waiting -= 1

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            move, futures = item
            error: Exception | None = None
            try:
                move()
            except BaseException as raised:  # It is this copy's outcome; the thread goes on.
                error = as_error(raised)
            self._outcomes.deliver([(future, error if future is futures[-1] else None) for future in futures])
