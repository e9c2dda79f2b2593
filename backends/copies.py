"""Copies of pages between the device pool and the host pool, one queue for each direction, with awaitable ends.

On the CPU a thread a direction moves the bytes, in submission order. On CUDA a stream a direction does, and the
driver's poller asks for its events. A copy that was submitted is made, whether or not somebody still waits for it:
only its outcome says that nothing touches its pages any more. How many may be in flight, and what a failure means, is
the caller's business.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy.typing as npt
import torch

from tidekv.backends.base import Poller
from tidekv.backends.cuda_copies import CudaCopy, StagedMover
from tidekv.backends.device import DevicePool
from tidekv.backends.host import HostPool
from tidekv.backends.moves import PageMover
from tidekv.backends.outcomes import Outcomes, as_error
from tidekv.backends.page_layout import same_pages
from tidekv.states.errors import CopyFailed, EngineClosed, InvalidConfig, InvalidRequest, TidekvError
from tidekv.states.shapes import PageIds

TO_DEVICE: Final = "to_device"
TO_HOST: Final = "to_host"

Pages: TypeAlias = "PageIds | npt.ArrayLike"
Move: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class CopierStatistics:
    """Copies submitted, and those that have ended well or not; bytes of the good ones, by direction."""

    submitted: int
    completed: int
    failed: int
    to_device_bytes: int
    to_host_bytes: int


class PageCopier:
    """Copies pages between a device pool and a host pool of the same layout.

    `start` and `close` it on the loop that awaits it. The poller is used for CUDA only. Raises InvalidConfig if the
    pools do not fit each other.
    """

    def __init__(self, device: DevicePool, host: HostPool, poller: Poller) -> None:
        if not same_pages(device.layout, host.layout):
            raise InvalidConfig(f"copies: device pool has {device.layout}, host pool has {host.layout}")
        self._on_cuda = device.device.type == "cuda"
        if self._on_cuda and not host.pinned:
            raise InvalidConfig("copies: a device pool on CUDA needs a pinned host pool; allocate it with pin=True")
        self._device = device
        self._host = host
        self._poller = poller
        self._mover = StagedMover(device, host) if self._on_cuda else PageMover(device, host)
        self._lanes: dict[str, _CopyThread | _CopyStream] = {}
        self._closing = False
        self._in_flight: set[asyncio.Future[None]] = set()
        self._submitted = self._completed = self._failed = 0
        self._bytes = {TO_DEVICE: 0, TO_HOST: 0}

    def start(self) -> None:
        """Start the two directions, on the running loop. Once only."""
        assert not self._lanes, "a copier is started once"
        for direction in (TO_DEVICE, TO_HOST):
            if self._on_cuda:
                self._lanes[direction] = _CopyStream(self._device.device, self._poller)
            else:
                self._lanes[direction] = _CopyThread(name=f"tidekv-copy-{direction}")

    async def close(self) -> None:
        """Take no more copies, wait until all that were submitted have ended, and stop the threads."""
        self._closing = True
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        for lane in self._lanes.values():
            lane.stop()

    def to_device(self, host_pages: Pages, device_pages: Pages) -> asyncio.Future[None]:
        """Copy host pages to device pages, pairwise; the future ends when all bytes are in place.

        The pages belong to the copy until then, even if the future is cancelled. The future raises CopyFailed if the
        copy did not work; its destination holds garbage then. Raises InvalidRequest for pages that are not in the
        pools and for lists of different lengths, EngineClosed before `start` and after `close`.
        """
        sources, targets = self._host.check_pages(host_pages), self._device.check_pages(device_pages)
        return self._submit(TO_DEVICE, partial(self._mover.to_device, sources, targets), len(sources), len(targets))

    def to_host(self, device_pages: Pages, host_pages: Pages) -> asyncio.Future[None]:
        """Copy device pages to host pages, pairwise; as `to_device`.

        On CUDA both directions first wait for the work that the caller's current stream has now: a page is read after
        it was computed, and overwritten after it was last used.
        """
        sources, targets = self._device.check_pages(device_pages), self._host.check_pages(host_pages)
        return self._submit(TO_HOST, partial(self._mover.to_host, sources, targets), len(sources), len(targets))

    def statistics(self) -> CopierStatistics:
        """Return the counters so far."""
        return CopierStatistics(
            submitted=self._submitted,
            completed=self._completed,
            failed=self._failed,
            to_device_bytes=self._bytes[TO_DEVICE],
            to_host_bytes=self._bytes[TO_HOST],
        )

    def _submit(self, direction: str, move: Move, source_count: int, target_count: int) -> asyncio.Future[None]:
        if source_count != target_count:
            raise InvalidRequest(f"copy {direction}: {source_count} source pages for {target_count} destination pages")
        if self._closing or not self._lanes:
            raise EngineClosed("the page copier is not running: start it first, and submit nothing after close")
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The lane settles a future of its own: the caller may cancel the outcome, and the copy still has an end.
        ended = self._lanes[direction].submit(move)
        self._submitted += 1
        self._in_flight.add(ended)
        ended.add_done_callback(partial(self._settle, direction, source_count, outcome))
        return outcome

    def _settle(
        self, direction: str, page_count: int, outcome: asyncio.Future[None], ended: asyncio.Future[None]
    ) -> None:
        self._in_flight.discard(ended)
        error = ended.exception()
        if error is None:
            self._completed += 1
            self._bytes[direction] += page_count * self._device.layout.page_bytes
        else:
            self._failed += 1
            if not isinstance(error, TidekvError):
                failure = CopyFailed(f"copy {direction} of {page_count} pages failed: {error!r}")
                failure.__cause__ = error
                error = failure
        if outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)


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
