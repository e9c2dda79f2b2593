"""Where copies of pages run: one lane a direction, which makes what it is given in that order.

On the CPU a lane is a thread, blocked while idle. On CUDA it is a stream, whose copies the driver's poller launches and
asks for. All copiers of an engine share their lanes: what goes to the device goes one after the other, whosever it is.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

from tidekv.backends.base import Poller
from tidekv.backends.cuda_copies import CudaCopy
from tidekv.backends.outcomes import Outcomes, as_error
from tidekv.states.errors import EngineClosed

TO_DEVICE: Final = "to_device"
TO_HOST: Final = "to_host"
NOT_RUNNING: Final = "the page copier is not running: start it first, and submit nothing after close"
Move: TypeAlias = Callable[[], None]


class CopyLanes:
    """The two lanes of one device. `start` and `close` it on the loop that awaits its copies; the poller is used for
    CUDA only.
    """

    def __init__(self, device: torch.device, poller: Poller) -> None:
        self._device = device
        self._poller = poller
        self._lanes: dict[str, _CopyThread | _CopyStream] = {}
        self._closing = False
        self._in_flight: set[asyncio.Future[None]] = set()

    def start(self) -> None:
        """Start the two directions, on the running loop. Once only."""
        assert not self._lanes, "lanes are started once"
        for direction in (TO_DEVICE, TO_HOST):
            if self._device.type == "cuda":
                self._lanes[direction] = _CopyStream(self._device, self._poller)
            else:
                self._lanes[direction] = _CopyThread(name=f"tidekv-copy-{direction}")

    async def close(self) -> None:
        """Take no more copies, wait until all that were submitted have ended, and stop the threads."""
        self._closing = True
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        for lane in self._lanes.values():
            lane.stop()

    def submit(self, direction: str, move: Move) -> asyncio.Future[None]:
        """Make a copy; the future is the lane's own, and ends when nothing of it can be written any more. Raises
        EngineClosed before `start` and after `close`.
        """
        if self._closing or not self._lanes:
            raise EngineClosed(NOT_RUNNING)
        ended = self._lanes[direction].submit(move)
        self._in_flight.add(ended)
        ended.add_done_callback(self._in_flight.discard)
        return ended


class _CopyThread:
    """One direction on the CPU: a thread that makes the copies in the order in which they came, blocked while idle."""

    def __init__(self, *, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._outcomes = Outcomes(self._loop)
        self._queue: queue.SimpleQueue[tuple[Move, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, move: Move) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._queue.put((move, future))
        return future

    def stop(self) -> None:
        """End the thread, which must have nothing left to do: it is back in microseconds."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            move, future = item
            error: Exception | None = None
            try:
                move()
            except BaseException as raised:  # It is this copy's outcome; the thread goes on.
                error = as_error(raised)
            self._outcomes.deliver([(future, error)])


class _CopyStream:
    """One direction on CUDA: a stream, and the driver's poller, which launches the copies and asks for their events."""

    def __init__(self, device: torch.device, poller: Poller) -> None:
        self._device = device
        self._poller = poller
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it.

    def submit(self, move: Move) -> asyncio.Future[None]:
        after = torch.cuda.Event()  # type: ignore[no-untyped-call]  # As above.
        after.record(torch.cuda.current_stream(self._device))
        return self._poller.submit(CudaCopy(stream=self._stream, after=after, launch=move))

    def stop(self) -> None:
        """A stream has nothing to stop."""
